"""Plans for answering requests: directly, by a ratio to a measured kind, by a sibling, or from
related devices."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

from perfmodel.cost.learn.rows import kind_distance
from perfmodel.cost.learn.stack import (
    FEW_ROWS,
    Figures,
    Preference,
    SoftwareNearness,
    Stack,
    larger_part,
    similarity,
)
from perfmodel.display import shorten_reprs
from perfmodel.ingest import OWN_ORDER, UNDER_LOAD
from perfmodel.ops import ATTENTION_MASKS, KernelKind

Mode = Literal["direct", "ratio", "sibling", "near", "far"]
SERVED: Final = ("Google",)
"""Vendors whose attention was timed only in inference servers. Their paged forward is slower than
the backward pass of a training kernel and says nothing about it."""
MAX_DONORS: Final = 6
"""Devices that a time is averaged over at most."""
NEAR_SIMILARITY: Final = 0.45
"""Least similarity at which a related device counts as a near relative (same generation, similar
figures)."""
_TRUST: Final = {
    SoftwareNearness.NAMED: 1.0,
    SoftwareNearness.OTHER_VERSION: 0.5,
    SoftwareNearness.SAME_SOURCE: 0.05,
    SoftwareNearness.OTHER: 0.002,
}
"""Factor on similarity, by how near a stack's software is to the requested one.

Steeper than the similarity between generations, because another software is a worse guide than
another device.
"""
_TOO_UNLIKE: Final = 4.0
"""Distance of kinds (another dtype) from which their ratio says nothing."""
_OTHER_CLOCK: Final = 0.1
"""Factor on similarity between sources that do and do not time the host's launch."""


class Term(NamedTuple):
    """One term of a plan: an evaluation of the regressor with its coefficient."""

    coefficient: float
    stack: int
    kind: KernelKind
    figures: Figures
    """Device whose time is evaluated: the requested one, or a donor within a ratio."""
    work: KernelKind | None = None
    """Requested kind of kernel, if the measured `kind` stands in for it."""
    home: Figures | None = None
    """Another part of the same die, on which the kernel is evaluated. Only clocks and bandwidth
    then adjust its time to `figures` (`Elsewhere`), so that no part is slower for having more of
    either."""

    @property
    def at(self) -> Figures:
        """Device on which the kernel is evaluated."""
        return self.home or self.figures


@dataclass(frozen=True)
class Plan:
    """log time = sum of coefficient x log time of every term."""

    mode: Mode
    terms: tuple[Term, ...]


@dataclass(frozen=True, eq=False)
class KernelRequest:
    """A request for a kind of kernel on a device, optionally with source and software, and the
    available stacks."""

    stacks: Sequence[Stack]
    figures: Figures
    kind: KernelKind
    source: str | None = None
    software: str | None = None

    @cached_property
    def order(self) -> tuple[Preference, ...]:
        """Sort key of every stack."""
        return tuple(
            stack.preference(self.kind, self.source, self.software) for stack in self.stacks
        )

    def likeness(self, stack: int) -> float:
        """Similarity of a stack's device to the requested one."""
        return similarity(self.figures, self.stacks[stack].figures, self.kind.dtype)

    @property
    def forward(self) -> "KernelRequest":
        """The forward pass of the kind."""
        return replace(self, kind=replace(self.kind, pass_="fwd"))


def timed_for(plan: Plan, stacks: Sequence[Stack], figures: Figures, source: str | None) -> bool:
    """Whether a plan uses measurements of the requested source, or a user's on this device."""
    stack = stacks[plan.terms[0].stack]
    return stack.source == source or (
        stack.order == OWN_ORDER and stack.figures.same_kernels(figures)
    )


def make_plan(
    stacks: Sequence[Stack],
    figures: Figures,
    kind: KernelKind,
    source: str | None,
    software: str | None,
    *,
    direct: bool = True,
) -> Plan | None:
    """Choose stacks for `kind` on a device; `None` if no stack of the family has such a kind.

    1. A stack of this device that has the kind, preferably of the requested software, else of the
       requested source. If the request names neither, it is the stack closest to a training job.
    2. A stack of this device (and source) that has a related kind, times the ratio between the two
       kinds on the most similar device that has both (backward over forward, say). If the related
       kind is of another op, the kind itself on a sibling predicts better
       (`training/kinds_left_out.py`). Siblings are devices of the same silicon with another memory.
       They must have been timed in the same software, unless the ratio mixes software too.
    3. The stacks of the most similar devices. Each predicts the kind with its own efficiencies and
       residual and with the figures of the requested device. The logs of these times are averaged
       with weights that grow with the device's similarity, the trust in the software and the number
       of rows. If only the forward pass was timed on more similar devices, the answer is their
       forward, times the ratio between the two passes on the most similar device that has both.

    A backward of attention that was not timed on the device is derived from its forward before step
    1 (`_by_own_forward`).

    A source without measurements is ignored. A software named together with its source selects
    both.

    Devices of one die share their kernels: the answer for each starts from the device with the most
    measurements (`Term.home`) and is adjusted to the figures of the requested one. If several were
    measured, their mean is used, unless the request names the source of one of them or the user
    measured it.

    Args:
        direct: whether the device's own stack may answer, if it has the kind.
    """
    known_source, known_software = _known_names(stacks, source, software)
    request = KernelRequest(stacks, figures, kind, known_source, known_software)
    on_die = [i for i, stack in enumerate(stacks) if stack.figures.same_die(figures)]
    by_device_itself = _by_device_itself(request, on_die) if direct else None
    if by_device_itself is not None:
        return by_device_itself

    # Any other part of a die is answered as its most measured part, and moved from there.
    home = home_of(stacks, figures)
    if home != figures:
        plan_at_home = make_plan(
            stacks, home, kind, request.source, request.software, direct=direct
        )
        return plan_at_home and _plan_for_part(plan_at_home, stacks, home, figures)

    # 1. A stack of the device that has the kind.
    eligible = [i for i in on_die if request.source is None or stacks[i].source == request.source]
    if request.source is None:
        # Measurements under load show how kernels compare, not how fast they are.
        eligible = [i for i in on_die if stacks[i].source not in UNDER_LOAD] or on_die
    having = sorted((i for i in eligible if kind in stacks[i].kinds), key=request.order.__getitem__)
    if having and direct:
        return Plan("direct", _mean_over_die(request, having))

    # 2. A related kind on the device times a ratio from other devices; for backward of attention,
    # first its forward.
    by_forward = _by_own_forward(request)
    if by_forward is not None:
        return by_forward
    ratio = ratio_plan(request, eligible)
    if ratio is not None:
        return _sibling_plan(request, ratio) or ratio

    # 3. Related devices, by the kind itself or through its forward, whichever was timed on more
    # similar devices.
    related = _related_plan(request)
    forward = _through_forward(request)
    if (
        related is None
        or forward is None
        or _mean_similarity(forward, request) <= _mean_similarity(related, request)
    ):
        return related
    return forward


def _by_device_itself(request: KernelRequest, on_die: Sequence[int]) -> Plan | None:
    """The stack of the device itself, if the user measured it or the request names its source.

    Other parts of its die are then ignored.

    Args:
        on_die: stacks of parts of the device's die.
    """
    stacks, figures = request.stacks, request.figures
    exact = [
        i
        for i in on_die
        if stacks[i].figures.same_kernels(figures) and request.kind in stacks[i].kinds
    ]
    exact = [i for i in exact if stacks[i].order == OWN_ORDER or stacks[i].source == request.source]
    if not exact:
        return None
    best = min(exact, key=request.order.__getitem__)
    return Plan("direct", (Term(1.0, best, request.kind, figures, home=stacks[best].figures),))


def home_of(stacks: Sequence[Stack], figures: Figures) -> Figures:
    """The device of the same die with the most measured rows; without any, the catalog's largest
    part of the die, or else the device itself."""
    on_die = [s for s in stacks if s.figures.same_die(figures)]
    if on_die:
        return max(on_die, key=lambda s: sum(s.kinds.values())).figures
    return larger_part(figures.name) or figures.nominal


def _mean_over_die(request: KernelRequest, having: Sequence[int]) -> tuple[Term, ...]:
    """Terms of the mean over a die's devices that have a kind, leaving out devices whose best stack
    suits it less.

    Args:
        having: stacks that have the kind, the most suitable first.
    """
    stacks, order = request.stacks, request.order
    first = having[0]

    # Read backwards, the best stack of every device is the last to be written, and stays.
    best_of_device = {stacks[i].figures.name: i for i in reversed(having)}

    # Stacks count as equally good if their software is equally near to the requested one, all or
    # none of them have few rows, and all or none were timed with the host's launch.
    as_good = []
    for i in sorted(best_of_device.values()):
        same_nearness = order[i].software == order[first].software
        same_support = order[i].has_few_rows == order[first].has_few_rows
        if same_nearness and same_support and stacks[i].host_launch == stacks[first].host_launch:
            as_good.append(i)
    share = 1 / len(as_good)
    return tuple(
        Term(share, i, request.kind, request.figures, home=stacks[i].figures) for i in as_good
    )


def _plan_for_part(plan: Plan, stacks: Sequence[Stack], home: Figures, figures: Figures) -> Plan:
    """The plan of one part of a die for another part of it."""
    terms = [t._replace(figures=figures, home=t.at) if t.figures == home else t for t in plan.terms]
    # The first term decides provenance and interval: a stack of the device itself, if there is one.
    terms.sort(key=lambda t: not stacks[t.stack].figures.same_kernels(figures))
    measured = stacks[terms[0].stack].figures.same_kernels(figures)
    mode = "sibling" if plan.mode == "direct" and not measured else plan.mode
    return Plan(mode, tuple(terms))


def on_behalf_of(plan: Plan, known: KernelKind, kind: KernelKind) -> Plan:
    """A plan for a kind via the stand-in `known`: its constants with the work of `kind`.

    If its pass or dtype differs from the measured one, the answer no longer counts as direct: it
    assumes that both kinds are equally efficient.
    """
    if known == kind:
        return plan
    is_other_kind = (known.dtype, known.pass_) != (kind.dtype, kind.pass_)
    mode = "ratio" if plan.mode == "direct" and is_other_kind else plan.mode
    terms = [t._replace(work=kind) if t.kind == known else t for t in plan.terms]
    return Plan(mode, tuple(terms))


def _by_own_forward(request: KernelRequest) -> Plan | None:
    """Plan of an attention's backward: the device's forward times the ratio of the passes; None for
    other kinds.

    Masked backward was timed on few shapes. If it has too few rows, the ratio comes from the other
    mask, because both passes skip what is masked.
    """
    kind, figures = request.kind, request.figures
    if kind.op not in ATTENTION_MASKS or kind.pass_ == "fwd" or figures.vendor in SERVED:
        return None
    other_mask = replace(kind, op=next(mask for mask in ATTENTION_MASKS if mask != kind.op))
    ratio = _pass_ratio(request) or _pass_ratio(replace(request, kind=other_mask))
    if not ratio:
        return None
    forward = make_plan(
        request.stacks, figures, request.forward.kind, request.source, request.software
    )
    if forward is None:
        return None
    mode = "ratio" if forward.mode == "direct" else forward.mode
    return Plan(mode, (*forward.terms, *ratio))


def _through_forward(request: KernelRequest) -> Plan | None:
    """Forward of related devices, times the ratio to it on the most similar device that has both
    passes."""
    ratio = _pass_ratio(request)
    if request.kind.pass_ == "fwd" or not ratio:
        return None
    base = _related_plan(request.forward)
    if base is None:
        return None
    return Plan(base.mode, (*base.terms, *ratio))


def _pass_ratio(request: KernelRequest) -> tuple[Term, ...]:
    """Terms of the ratio of a pass to forward, on the most similar device with enough rows of both;
    else none."""
    kind = request.kind
    forward = request.forward.kind
    stacks = request.stacks
    donors = []
    for i, stack in enumerate(stacks):
        rows = stack.kinds.get(kind, 0)
        rows_of_forward = stack.kinds.get(forward, 0)
        if min(rows, rows_of_forward) >= FEW_ROWS:
            donors.append(i)
    if not donors:
        return ()
    donor = max(donors, key=request.likeness)
    # Both terms are on the donor's device: their difference in log time is the log of the ratio.
    donor_figures = stacks[donor].figures
    return Term(1.0, donor, kind, donor_figures), Term(-1.0, donor, forward, donor_figures)


def _mean_similarity(plan: Plan, request: KernelRequest) -> float:
    """Mean similarity between the requested device and those that a plan takes times from."""
    moved_terms = [
        t for t in plan.terms if not request.stacks[t.stack].figures.same_kernels(t.figures)
    ]
    return sum(
        t.coefficient * similarity(t.figures, request.stacks[t.stack].figures, request.kind.dtype)
        for t in moved_terms
    )


def _known_names(
    stacks: Sequence[Stack], source: str | None, software: str | None
) -> tuple[str | None, str | None]:
    """Source and software that a request names; no source where nobody measured it."""
    if source is not None:
        is_known = any(stack.source == source for stack in stacks)
        return source if is_known else None, software
    for stack in stacks:
        if software == f"{stack.source}/{stack.software}":
            return stack.source, stack.software
    return None, software


def ratio_plan(request: KernelRequest, among: Sequence[int]) -> Plan | None:
    """A plan from the nearest measured kind, times the ratio on the most similar device that has
    both."""
    best_cost: tuple[float, tuple] | None = None
    best_terms: tuple[Term, ...] | None = None
    for base, reference, distance in _references(request, among):
        for donor, stack in enumerate(request.stacks):
            if request.kind not in stack.kinds or reference not in stack.kinds:
                continue
            cost = distance - request.likeness(donor), request.order[base]
            if best_cost is None or cost < best_cost:
                best_cost = cost
                best_terms = (
                    Term(1.0, base, reference, request.figures),
                    Term(1.0, donor, request.kind, stack.figures),
                    Term(-1.0, donor, reference, stack.figures),
                )
    return Plan("ratio", best_terms) if best_terms else None


def _references(
    request: KernelRequest, among: Sequence[int]
) -> Iterator[tuple[int, KernelKind, float]]:
    """Stacks with a kind that they measured, near enough to the requested one, and the distance of
    the two kinds."""
    for base in among:
        for reference, rows in request.stacks[base].kinds.items():
            # A kind with few rows counts as one step further away.
            distance = kind_distance(request.kind, reference) + (rows < FEW_ROWS)
            if distance < _TOO_UNLIKE:
                yield base, reference, distance


def _sibling_plan(request: KernelRequest, ratio: Plan) -> Plan | None:
    """The kind itself on devices of the same silicon, if that predicts better than a ratio; else
    None."""
    stacks, figures = request.stacks, request.figures
    reference, donor = ratio.terms[:2]
    if reference.kind.op == request.kind.op:
        return None
    same_silicon = set()
    for i, stack in enumerate(stacks):
        if stack.figures.same_silicon(figures) and not stack.figures.same_kernels(figures):
            same_silicon.add(i)
    siblings = _related_plan(request, among=same_silicon)
    if siblings is None:
        return None

    # Siblings timed in another software lose to a ratio, unless the ratio mixes software too.
    source = stacks[reference.stack].source
    sibling_source = stacks[siblings.terms[0].stack].source
    ratio_mixes_sources = stacks[donor.stack].source != source
    if sibling_source == source or ratio_mixes_sources:
        return Plan("sibling", siblings.terms)
    return None


class _Donor(NamedTuple):
    """A stack that has the requested kind, with its weight in the mean."""

    score: float
    stack: int


def _related_plan(request: KernelRequest, among: Collection[int] | None = None) -> Plan | None:
    """The mean over the most similar devices that have a kind, each by its best stack.

    Args:
        among: stacks that may be used; None: all.
    """
    source, kind, order = request.source, request.kind, request.order

    # Score of every device's best stack: similarity, times trust in its software, times how many
    # rows it rests on.
    best_of_device: dict[str, _Donor] = {}
    source_times_launch = any(s.host_launch for s in request.stacks if s.source == source)
    for i, stack in enumerate(request.stacks):
        if kind not in stack.kinds or (among is not None and i not in among):
            continue
        trust = 1.0 if source is None else _TRUST[order[i].software]
        if source is not None and stack.host_launch != source_times_launch:
            trust *= _OTHER_CLOCK
        support = stack.kinds[kind] / (stack.kinds[kind] + FEW_ROWS)
        score = trust * support * request.likeness(i)
        name = stack.figures.name
        best = best_of_device.get(name)
        if best is None or (-score, order[i]) < (-best.score, order[best.stack]):
            best_of_device[name] = _Donor(score, i)
    if not best_of_device:
        return None

    # The best few are averaged in log time, weighed by their scores.
    top = sorted(best_of_device.values(), key=lambda donor: (-donor.score, donor.stack))[
        :MAX_DONORS
    ]
    total = sum(donor.score for donor in top)
    terms = tuple(Term(donor.score / total, donor.stack, kind, request.figures) for donor in top)
    mean_similarity = sum(t.coefficient * request.likeness(t.stack) for t in terms)
    mode = "near" if mean_similarity >= NEAR_SIMILARITY else "far"
    return Plan(mode, terms)


shorten_reprs(__name__)
