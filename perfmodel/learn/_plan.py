"""How a request is answered: directly, by a ratio to a measured kind, by a sibling, or from related devices."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

from perfmodel.learn._kinds import kind_distance
from perfmodel.learn._machine import Figures, similarity
from perfmodel.learn._stack import EAGER_SOURCES, Stack, product

Mode = Literal["direct", "ratio", "sibling", "near", "far"]
MAX_DONORS: Final = 6
NEAR_SIMILARITY: Final = 0.45
"""From here on a related device counts as a near relative (same generation, like figures)."""
_TRUST: Final = (1.0, 0.5, 0.05, 0.002)
"""Factor on similarity for the software asked for, another version of it, another of the same source, any other.

Steeper than similarity between generations: other software tells less than another device.
"""
FEW_ROWS: Final = 30
"""Rows of a kind from which a stack is believed; the same number halves the weight of a relative."""
_TOO_UNLIKE: Final = 4.0
"""Distance of kinds (another dtype) from which their ratio says nothing."""
_OTHER_CLOCK: Final = 0.1
"""Factor on similarity between sources that do and do not time the host's launch."""


class Term(NamedTuple):
    """One evaluation of the regressor that enters the log time with a coefficient."""

    coefficient: float
    stack: int
    kind: str
    figures: Figures
    """Device whose figures are used (the asked one, or a donor's own within a ratio)."""


@dataclass(frozen=True)
class Plan:
    """log time = sum of coefficient x log time of every term."""

    mode: Mode
    terms: tuple[Term, ...]


def make_plan(
    stacks: Sequence[Stack], figures: Figures, kind: str, source: str | None, software: str | None
) -> Plan | None:
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
    """
    own = [i for i, s in enumerate(stacks) if s.figures.same_kernels(figures)]
    mine = [i for i in own if source is None or stacks[i].source == source]
    order = {i: preference_for(stacks[i], kind, source, software) for i in range(len(stacks))}
    direct = sorted((i for i in mine if kind in stacks[i].kinds), key=order.__getitem__)
    if direct:
        return Plan("direct", (Term(1.0, direct[0], kind, figures),))
    ratio = ratio_plan(stacks, mine, figures, kind, order)
    if ratio is not None:
        return _sibling(stacks, figures, kind, source, order, ratio) or ratio
    related = _related(stacks, figures, kind, source, order)
    forward = _through_forward(stacks, figures, kind, source, software)
    if related is None or forward is None or _nearest(forward, stacks, kind) <= _nearest(related, stacks, kind):
        return related
    return forward


def _through_forward(
    stacks: Sequence[Stack], figures: Figures, kind: str, source: str | None, software: str | None
) -> Plan | None:
    """Forward of related devices, times the ratio to it on the most similar device that has both passes."""
    dtype, op, direction = kind.split("/")
    forward = f"{dtype}/{op}/fwd"
    donors = [i for i, s in enumerate(stacks) if min(s.kinds.get(kind, 0), s.kinds.get(forward, 0)) >= FEW_ROWS]
    if direction == "fwd" or not donors:
        return None
    order = {i: preference_for(stacks[i], forward, source, software) for i in range(len(stacks))}
    base = _related(stacks, figures, forward, source, order)
    assert base is not None  # the donors have it
    donor = max(donors, key=lambda i: similarity(figures, stacks[i].figures, dtype))
    own = stacks[donor].figures
    return Plan(base.mode, (*base.terms, Term(1.0, donor, kind, own), Term(-1.0, donor, forward, own)))


def _nearest(plan: Plan, stacks: Sequence[Stack], kind: str) -> float:
    """Mean similarity of the devices that a plan moves to the asked one."""
    dtype = kind.split("/")[0]
    moved = [t for t in plan.terms if not stacks[t.stack].figures.same_kernels(t.figures)]
    return sum(t.coefficient * similarity(t.figures, stacks[t.stack].figures, dtype) for t in moved)


def preference_for(stack: Stack, kind: str, source: str | None, software: str | None) -> tuple[int, bool, int, str]:
    """Sort key of a stack for a request: named software, then named source, then rows and preference."""
    named = 3
    if software is not None and stack.matches(software):
        named = 0 if source is None or stack.source == source else 2
    elif source is not None and stack.source == source:
        named = 1 if software is not None and product(stack.software) == product(software) else 2
    return (named, stack.kinds.get(kind, 0) < FEW_ROWS, *stack.preference())


def ratio_plan(
    stacks: Sequence[Stack], own: Sequence[int], figures: Figures, kind: str, order: dict[int, tuple]
) -> Plan | None:
    """The nearest kind that a stack of `own` has, times the ratio to it on the most similar device that has both."""
    dtype = kind.split("/")[0]
    best: tuple[float, tuple, Plan] | None = None
    for mine in own:
        for reference, rows in stacks[mine].kinds.items():
            step = kind_distance(kind, reference) + (rows < FEW_ROWS)
            for donor, stack in enumerate(stacks):
                if kind in stack.kinds and reference in stack.kinds and step < _TOO_UNLIKE:
                    cost = step - similarity(figures, stack.figures, dtype)
                    if best is None or (cost, order[mine]) < best[:2]:
                        terms = (
                            Term(1.0, mine, reference, figures),
                            Term(1.0, donor, kind, stack.figures),
                            Term(-1.0, donor, reference, stack.figures),
                        )
                        best = (cost, order[mine], Plan("ratio", terms))
    return best[2] if best else None


def _sibling(
    stacks: Sequence[Stack], figures: Figures, kind: str, source: str | None, order: dict[int, tuple], ratio: Plan
) -> Plan | None:
    """The kind on devices of the same silicon, where they tell more of it than a ratio does."""
    reference, donor = ratio.terms[:2]
    if reference.kind.split("/")[1] == kind.split("/")[1]:
        return None
    alike = {i for i, s in enumerate(stacks) if s.figures.same_silicon(figures) and not s.figures.same_kernels(figures)}
    siblings = _related(stacks, figures, kind, source, order, among=alike)
    if siblings is None:
        return None
    mine, first = stacks[reference.stack].source, stacks[siblings.terms[0].stack].source
    return Plan("sibling", siblings.terms) if first == mine or stacks[donor.stack].source != mine else None


def _related(
    stacks: Sequence[Stack], figures: Figures, kind: str, source: str | None, order: dict[int, tuple],
    among: Collection[int] | None = None,
) -> Plan | None:  # fmt: skip
    dtype = kind.split("/")[0]
    scores: dict[str, tuple[float, int]] = {}
    for i, stack in enumerate(stacks):
        if kind in stack.kinds and (among is None or i in among):
            trust = 1.0 if source is None else _TRUST[order[i][0]]
            if source is not None and (source in EAGER_SOURCES) != stack.eager:
                trust *= _OTHER_CLOCK
            support = stack.kinds[kind] / (stack.kinds[kind] + FEW_ROWS)
            score = trust * support * similarity(figures, stack.figures, dtype)
            name = stack.figures.name
            if name not in scores or (-score, order[i]) < (-scores[name][0], order[scores[name][1]]):
                scores[name] = (score, i)
    if not scores:
        return None
    top = sorted(scores.values(), key=lambda s: (-s[0], s[1]))[:MAX_DONORS]
    total = sum(score for score, _ in top)
    terms = tuple(Term(score / total, i, kind, figures) for score, i in top)
    nearest = sum(t.coefficient * similarity(figures, stacks[t.stack].figures, dtype) for t in terms)
    return Plan("near" if nearest >= NEAR_SIMILARITY else "far", terms)
