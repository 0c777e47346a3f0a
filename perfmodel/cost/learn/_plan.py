"""How a request is answered: directly, by a ratio to a measured kind, by a sibling, or from related devices."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple

from perfmodel.cost.learn._rows import kind_distance
from perfmodel.cost.learn._stack import FEW_ROWS, Figures, Stack, larger_part, similarity
from perfmodel.ingest import OWN_ORDER
from perfmodel.ops import ATTENTION_MASKS, KernelKind

Mode = Literal["direct", "ratio", "sibling", "near", "far"]
SERVED: Final = ("Google",)
"""Vendors whose attention was timed in inference servers alone: paged forward, slower than a backward of a training
kernel, of which it says nothing."""
MAX_DONORS: Final = 6
NEAR_SIMILARITY: Final = 0.45
"""From here on a related device counts as a near relative (same generation, like figures)."""
_TRUST: Final = (1.0, 0.5, 0.05, 0.002)
"""Factor on similarity for the software asked for, another version of it, another of the same source, any other.

Steeper than similarity between generations: other software tells less than another device.
"""
_TOO_UNLIKE: Final = 4.0
"""Distance of kinds (another dtype) from which their ratio says nothing."""
_OTHER_CLOCK: Final = 0.1
"""Factor on similarity between sources that do and do not time the host's launch."""


class Term(NamedTuple):
    """One evaluation of the regressor that enters the log time with a coefficient."""

    coefficient: float
    stack: int
    kind: KernelKind
    figures: Figures
    """Device whose time it is (the asked one, or a donor's own within a ratio)."""
    work: KernelKind | None = None
    """Kind whose work it does, where `kind` stands in for one that was never measured."""
    home: Figures | None = None
    """Device whose kernels it runs where that is another part of the same die: its time moves from there by clocks and
    bandwidth alone (`Elsewhere`), so that no part is slower for having more of either."""

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
    """A kind of kernel on a device, perhaps of some source and software, and the stacks to answer it by."""

    stacks: Sequence[Stack]
    figures: Figures
    kind: KernelKind
    source: str | None = None
    software: str | None = None

    @cached_property
    def order(self) -> tuple[tuple[int, bool, int, str], ...]:
        """Sort key of every stack (`Stack.preference`)."""
        return tuple(stack.preference(self.kind, self.source, self.software) for stack in self.stacks)

    def likeness(self, stack: int) -> float:
        """How far the device of a stack tells about the asked one."""
        return similarity(self.figures, self.stacks[stack].figures, self.kind.dtype)

    @property
    def forward(self) -> "KernelRequest":
        """The forward pass of the kind."""
        return replace(self, kind=replace(self.kind, pass_="fwd"))


def timed_for(plan: Plan, stacks: Sequence[Stack], figures: Figures, source: str | None) -> bool:
    """Whether a plan rests on what the source that is asked has timed, or a user on this device."""
    stack = stacks[plan.terms[0].stack]
    return stack.source == source or (stack.order == OWN_ORDER and stack.figures.same_kernels(figures))


def make_plan(
    stacks: Sequence[Stack], figures: Figures, kind: KernelKind, source: str | None, software: str | None, *,
    direct: bool = True,
) -> Plan | None:  # fmt: skip
    """Choose stacks for `kind` on a device; `None` if no stack of the family has such a kind.

    1. A stack of this device that has the kind: of the named software or at least source, or, where
       none is named, the best stand-in for a training job.
    2. A stack of this device (and source) that has a related kind, times the ratio between the two
       kinds on the most similar device that has both (backward over forward, say). Where the related kind is
       another op, its kind on siblings tells more (`training/kinds_left_out.py`): devices of the same
       silicon with another memory, in the same software or where the ratio is not of one software either.
    3. The stacks that tell most about it: log times averaged over devices by similarity, trust in
       the software and number of rows, each under its own efficiencies and residual but with the
       asked device's figures. Where nearer relatives were timed in forward alone, their forward, times the
       ratio between the two passes on the most similar device that has both.

    Backward of attention that was not timed on the device goes by its forward (`_by_own_forward`) before all of these.

    Args:
        direct: whether the device's own stack may answer, if it has the kind.

    A source that nobody measured says nothing: its rows are answered as if none was named. A software named in
    full, with its source, means both.

    Devices of one die share their kernels: each is answered as the most measured one of them is, and its time moves
    from there (`Term.home`). What several of them were measured in is their mean, unless one's own source is named, or
    it was measured by the user.
    """
    wanted = KernelRequest(stacks, figures, kind, *_known_names(stacks, source, software))
    source, order = wanted.source, wanted.order
    own = [i for i, s in enumerate(stacks) if s.figures.same_die(figures)]
    exact = [i for i in own if stacks[i].figures.same_kernels(figures) and kind in stacks[i].kinds]
    exact = [i for i in exact if stacks[i].order == OWN_ORDER or stacks[i].source == source]
    if exact and direct:
        best = min(exact, key=order.__getitem__)
        return Plan("direct", (Term(1.0, best, kind, figures, home=stacks[best].figures),))
    home = home_of(stacks, figures)
    if home != figures:
        plan = make_plan(stacks, home, kind, source, wanted.software, direct=direct)
        return plan and _moved(plan, stacks, home, figures)
    mine = [i for i in own if source is None or stacks[i].source == source]
    if source is None:  # what was timed under load says how kernels compare, not how fast they are
        mine = [i for i in own if not stacks[i].under_load] or own
    having = sorted((i for i in mine if kind in stacks[i].kinds), key=order.__getitem__)
    if having and direct:
        return Plan("direct", _shared(wanted, having))
    by_forward = _by_own_forward(wanted)
    if by_forward is not None:
        return by_forward
    ratio = ratio_plan(wanted, mine)
    if ratio is not None:
        return _sibling(wanted, ratio) or ratio
    related, forward = _related(wanted), _through_forward(wanted)
    if related is None or forward is None or _nearest(forward, wanted) <= _nearest(related, wanted):
        return related
    return forward


def home_of(stacks: Sequence[Stack], figures: Figures) -> Figures:
    """The most measured part of a device's die; where none was measured the catalog's largest part of it, or the
    device itself if none is larger: what others' kernels say of it stays as it is where its figures are changed."""
    own = [s for s in stacks if s.figures.same_die(figures)]
    if own:
        return max(own, key=lambda s: sum(s.kinds.values())).figures
    return larger_part(figures.name) or figures.nominal


def _shared(wanted: KernelRequest, having: Sequence[int]) -> tuple[Term, ...]:
    """The mean of the devices of a die that have a kind, each by its best stack if that is as good as the best."""
    stacks, order = wanted.stacks, wanted.order
    best = {stacks[i].figures.name: i for i in reversed(having)}
    as_good = [i for i in best.values() if order[i][:2] == order[having[0]][:2]]
    alike = sorted(i for i in as_good if stacks[i].host_launch == stacks[having[0]].host_launch)
    return tuple(Term(1 / len(alike), i, wanted.kind, wanted.figures, home=stacks[i].figures) for i in alike)


def _moved(plan: Plan, stacks: Sequence[Stack], home: Figures, figures: Figures) -> Plan:
    """The plan of one part of a die for another part of it."""
    terms = [t._replace(figures=figures, home=t.at) if t.figures == home else t for t in plan.terms]
    terms.sort(key=lambda t: not stacks[t.stack].figures.same_kernels(figures))
    measured = stacks[terms[0].stack].figures.same_kernels(figures)
    return Plan("sibling" if plan.mode == "direct" and not measured else plan.mode, tuple(terms))


def on_behalf_of(plan: Plan, known: KernelKind, kind: KernelKind) -> Plan:
    """A plan for a kind that `known` stands in for: its constants, but the work of `kind`.

    A pass or dtype that was not measured is not called so: the ratio of efficiencies between the two is taken as one.
    """
    if known == kind:
        return plan
    moved = (known.dtype, known.pass_) != (kind.dtype, kind.pass_)
    mode = "ratio" if plan.mode == "direct" and moved else plan.mode
    return Plan(mode, tuple(t._replace(work=kind) if t.kind == known else t for t in plan.terms))


def _by_own_forward(wanted: KernelRequest) -> Plan | None:
    """Backward of attention: forward, however it is known, times the ratio between the passes where both are believed.

    Masked backward was timed on few shapes only; the ratio under the other mask says more, as both passes skip what
    is masked.
    """
    kind, figures = wanted.kind, wanted.figures
    if kind.op not in ATTENTION_MASKS or kind.pass_ == "fwd" or figures.vendor in SERVED:
        return None
    other_mask = replace(kind, op=next(mask for mask in ATTENTION_MASKS if mask != kind.op))
    ratio = _pass_ratio(wanted) or _pass_ratio(replace(wanted, kind=other_mask))
    if not ratio:
        return None
    forward = make_plan(wanted.stacks, figures, wanted.forward.kind, wanted.source, wanted.software)
    return forward and Plan("ratio" if forward.mode == "direct" else forward.mode, (*forward.terms, *ratio))


def _through_forward(wanted: KernelRequest) -> Plan | None:
    """Forward of related devices, times the ratio to it on the most similar device that has both passes."""
    ratio = _pass_ratio(wanted)
    if wanted.kind.pass_ == "fwd" or not ratio:
        return None
    base = _related(wanted.forward)
    return base and Plan(base.mode, (*base.terms, *ratio))


def _pass_ratio(wanted: KernelRequest) -> tuple[Term, ...]:
    """Terms of the ratio of a pass to forward on the most similar device that is believed in both; else none."""
    kind, forward, stacks = wanted.kind, wanted.forward.kind, wanted.stacks
    donors = [i for i, s in enumerate(stacks) if min(s.kinds.get(kind, 0), s.kinds.get(forward, 0)) >= FEW_ROWS]
    if not donors:
        return ()
    donor = max(donors, key=wanted.likeness)
    own = stacks[donor].figures
    return Term(1.0, donor, kind, own), Term(-1.0, donor, forward, own)


def _nearest(plan: Plan, wanted: KernelRequest) -> float:
    """Mean similarity of the devices that a plan moves to the asked one."""
    moved = [t for t in plan.terms if not wanted.stacks[t.stack].figures.same_kernels(t.figures)]
    return sum(t.coefficient * similarity(t.figures, wanted.stacks[t.stack].figures, wanted.kind.dtype) for t in moved)


def _known_names(stacks: Sequence[Stack], source: str | None, software: str | None) -> tuple[str | None, str | None]:
    if source is None:
        full = (s for s in stacks if software == f"{s.source}/{s.software}")
        return next(((s.source, s.software) for s in full), (None, software))
    return (source if any(s.source == source for s in stacks) else None), software


def ratio_plan(wanted: KernelRequest, own: Sequence[int]) -> Plan | None:
    """The nearest kind that a stack of `own` has, times the ratio to it on the most similar device that has both."""
    stacks, kind = wanted.stacks, wanted.kind
    best: tuple[float, tuple, Plan] | None = None
    for mine in own:
        for reference, rows in stacks[mine].kinds.items():
            step = kind_distance(kind, reference) + (rows < FEW_ROWS)
            for donor, stack in enumerate(stacks):
                if kind in stack.kinds and reference in stack.kinds and step < _TOO_UNLIKE:
                    cost = step - wanted.likeness(donor)
                    if best is None or (cost, wanted.order[mine]) < best[:2]:
                        terms = (
                            Term(1.0, mine, reference, wanted.figures),
                            Term(1.0, donor, kind, stack.figures),
                            Term(-1.0, donor, reference, stack.figures),
                        )
                        best = (cost, wanted.order[mine], Plan("ratio", terms))
    return best[2] if best else None


def _sibling(wanted: KernelRequest, ratio: Plan) -> Plan | None:
    """The kind on devices of the same silicon, where they tell more of it than a ratio does."""
    stacks, figures = wanted.stacks, wanted.figures
    reference, donor = ratio.terms[:2]
    if reference.kind.op == wanted.kind.op:
        return None
    alike = {i for i, s in enumerate(stacks) if s.figures.same_silicon(figures) and not s.figures.same_kernels(figures)}
    siblings = _related(wanted, among=alike)
    if siblings is None:
        return None
    mine, first = stacks[reference.stack].source, stacks[siblings.terms[0].stack].source
    return Plan("sibling", siblings.terms) if first == mine or stacks[donor.stack].source != mine else None


def _related(wanted: KernelRequest, among: Collection[int] | None = None) -> Plan | None:
    """The stacks that tell most of a kind: of every device that has it, or of those `among` some, the best."""
    source, kind, order = wanted.source, wanted.kind, wanted.order
    scores: dict[str, tuple[float, int]] = {}
    told_with_launch = any(s.host_launch for s in wanted.stacks if s.source == source)
    for i, stack in enumerate(wanted.stacks):
        if kind in stack.kinds and (among is None or i in among):
            trust = 1.0 if source is None else _TRUST[order[i][0]]
            if source is not None and stack.host_launch != told_with_launch:
                trust *= _OTHER_CLOCK
            support = stack.kinds[kind] / (stack.kinds[kind] + FEW_ROWS)
            score = trust * support * wanted.likeness(i)
            name = stack.figures.name
            if name not in scores or (-score, order[i]) < (-scores[name][0], order[scores[name][1]]):
                scores[name] = (score, i)
    if not scores:
        return None
    top = sorted(scores.values(), key=lambda s: (-s[0], s[1]))[:MAX_DONORS]
    total = sum(score for score, _ in top)
    terms = tuple(Term(score / total, i, kind, wanted.figures) for score, i in top)
    nearest = sum(t.coefficient * wanted.likeness(t.stack) for t in terms)
    return Plan("near" if nearest >= NEAR_SIMILARITY else "far", terms)
