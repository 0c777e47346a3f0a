"""Uneven pipeline stages: exact front, bounds, and local search by exact evaluation.

A flushing pipeline with one stage per rank takes about sum over stages of (F + B + sends) plus (m -
1) times the slowest F + B (GPipe exactly, with transfers that do not queue; 1F1B at least nearly).
Its least partitions come from dynamic programming; reductions, gathers and the optimizer are left
to exact evaluation.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, permutations
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Float

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._contiguous import (
    Cuts,
    NothingFitsError,
    least_critical_path,
    least_sum_plus_max,
    relative_gap,
)
from perfmodel.prediction import StepProblem, layout_batches
from perfmodel.prediction.composition import (
    StageCosts,
    one_stage_per_rank,
    pass_s,
    program_live,
    step_programs,
)
from perfmodel.prediction.phases import in_classes
from perfmodel.program import Kind, ProgramSpec, is_of_kind, stage_blocks
from perfmodel.schedule.memory import LiveState
from perfmodel.spec import Layout
from perfmodel.spec.notation import PerRank
from perfmodel.timeline import makespan_many

T = TypeVar("T")
CutOnKinds = tuple[tuple[int, ...], PerRank]
"""Layers of every stage, and the kind of nodes that it lies on (None where nodes are alike)."""
FRONT: Final = 8
"""Number of cuts of the exact front that are evaluated."""
MOST_ORDERED: Final = 4
"""Most kinds of nodes for which all orders, each kind in one piece, are tried."""
_ROUNDS: Final = 40
_ROUNDING: Final = 1e-3
"""Share of a step time that sums over thousands of passes in single precision may be off."""


@dataclass(frozen=True)
class KindCosts:
    """Costs of every possible stage of a layout, on each kind of nodes."""

    of_kind: Mapping[str | None, StageCosts]
    """Costs by the kind's name; by None where nodes are alike."""
    supply: tuple[int, ...]
    """Number of stages on each kind of nodes."""

    def layouts(self, base: Layout, cuts: Iterable[CutOnKinds]) -> list[Layout]:
        """Return the layout with each partition, recomputing as many layers as it must to fit."""
        layouts = []
        for sizes, kinds in dict.fromkeys(cuts):
            costs_of_stage = [self.of_kind[kind] for kind in kinds or (None,) * len(sizes)]
            stage_spans = list(zip(costs_of_stage, *spans(sizes), strict=True))

            # Infinite costs mark stages that do not fit even with all their layers recomputed.
            if all(np.isfinite(costs.forward_s[s, i, j]) for costs, s, i, j in stage_spans):
                full = tuple(int(costs.full_layers[s, i, j]) for costs, s, i, j in stage_spans)
                full = full if any(full) else None
                layouts.append(
                    base.replace(partition=sizes, kinds=kinds, recompute_full_layers=full)
                )
        return layouts

    def exact(self, base: Layout, micro_batches: int, limit: int = FRONT) -> list[CutOnKinds]:
        """Return the partitions near the least sum plus slowest stage.

        With several kinds of nodes, at most `limit` over all orders of kinds, and as many for each
        order in which every kind is contiguous.
        """
        names = [*self.of_kind]
        costs = [*self.of_kind.values()]
        if len(costs) == 1:
            return [(cut.partition, base.kinds) for cut in _front(costs, micro_batches)[:limit]]

        cuts: list[CutOnKinds] = []
        for cut in _front(costs, micro_batches, self.supply)[:limit]:
            cuts.append((cut.partition, tuple(str(names[kind]) for kind in cut.kinds)))

        # Orders in which every kind is in one piece: each stage has the costs of one kind alone.
        for kinds in in_pieces(base.kinds):
            fixed = _joined_stages([self.of_kind[kind] for kind in kinds or ()])
            cuts += [(cut.partition, kinds) for cut in _front([fixed], micro_batches)[:limit]]
        return cuts

    def lower_bound_s(self, spec: ProgramSpec, live: LiveState) -> float:
        """Lower bound of the step over all partitions in the schedule's order; inf if none fits.

        It is the larger of two minima over all partitions. The first is that of
        `prediction.lower_bounds_s`. The second looks at the first backward on rank r. Before it,
        its micro-batch has passed all stages and come back to r, and the rank has done at most w
        forwards. All other passes of the rank come later, and the last backward passes the ranks
        before r. So a step takes at least

            sum over stages of (F + B + sends) + (m - 1) B_r + (m - w) F_r

        Where the last rank does all forwards first (GPipe), the first backward waits for all m on
        every rank: w = 1. Without a flush only the work of a rank counts.
        """
        m = spec.micro_batches
        costs = [*self.of_kind.values()]
        forward = np.stack([on_kind.forward_s for on_kind in costs])
        backward = np.stack([on_kind.backward_s for on_kind in costs])
        both = forward + backward

        # Passes of stage r alone take m (F + B). Without a flush steps overlap, so that nothing
        # else is certain.
        rank_work_s = m * both
        if spec.steps > 1:
            return least_critical_path(rank_work_s, np.zeros_like(rank_work_s), self.supply)

        # Where backward passes are split, gradients of weights may come whenever there is room: of
        # other ranks only the forward passes before the first one of r are certain.
        if live.split:
            return least_critical_path(rank_work_s, forward, self.supply)

        # Else one forward passes the ranks before r ahead of its work, and one backward after it;
        # and the second minimum holds too.
        passed = both + _sends(costs)
        warm_up = np.ones_like(live.warm_up) if live.warm_up[-1] == m else live.warm_up
        after = _times(m - 1, backward) + _times((m - warm_up)[:, None, None], forward)
        try:
            (least_s, *_) = least_sum_plus_max(passed, after, self.supply)
        except NothingFitsError:
            return np.inf
        return max(least_critical_path(rank_work_s, passed, self.supply), least_s.value)


def _joined_stages(costs: Sequence[StageCosts]) -> StageCosts:
    """Join the costs of stages on different kinds: stage s has the costs `costs[s]` of its kind."""
    columns = []
    for field in fields(StageCosts):
        columns.append(
            np.stack([getattr(on_kind, field.name)[stage] for stage, on_kind in enumerate(costs)])
        )
    return StageCosts(*columns)


def _front(
    costs: Sequence[StageCosts], micro_batches: int, supply: Sequence[int] | None = None
) -> list[Cuts]:
    """Return the cuts around the least sum + (m - 1) max, the best first, none if none is possible.

    Args:
        costs: costs of each kind of nodes.
        micro_batches: m.
        supply: stages on each kind.
    """
    both = np.stack([c.both_s for c in costs])
    try:
        return least_sum_plus_max(both + _sends(costs), _times(micro_batches - 1, both), supply)
    except NothingFitsError:
        return []


def _times(count: int | np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Return `count * seconds`, infinite wherever `seconds` is, even for a count of 0."""
    possible = np.isfinite(seconds)
    return np.where(possible, count * np.where(possible, seconds, 0.0), np.inf)


def _sends(costs: Sequence[StageCosts]) -> Float[np.ndarray, "kinds stages 1 cuts"]:
    """Return the transfers after a stage. Between two kinds they take at least as long as within
    one of them."""
    return np.stack([c.sends_s for c in costs])[:, :, None, :]


def spread_bound_s(problem: StepProblem, base: Layout) -> float:
    """A cheap, loose lower bound of the step time over all partitions and orders of kinds of nodes.

    Suppose n_k ranks are of kind k, which takes at least rho_k times as long for any block as the
    fastest kind for that block. Then the slowest rank is busy for at least W / sum(n_k / rho_k),
    where W is the time of all passes on the fastest kinds. In a pipeline with a flush, one
    micro-batch also passes through all stages while the slowest rank has nothing to compute, except
    for the w micro-batches whose forward it runs before its first backward
    (`KindCosts.lower_bound_s`). The bound is 0 if passes may overlap.
    """
    (layout_batch,) = layout_batches(problem, [base])
    spec = layout_batch.spec
    if not spec.scheduler.plain:
        return 0.0

    # Seconds of one pass of every block on each kind of nodes, and on the fastest kind for it.
    counts = layout_batch.program.counts.sum(axis=(0, 1))
    passes = (Kind.FORWARD,) if spec.is_forward_only else (Kind.FORWARD, Kind.BACKWARD)
    ranks = Counter(layout_batch.layouts[0].kinds or (problem.cluster.name,) * spec.stages)
    block_s_by_kind = {}
    for on_kind in problem.kinds or (problem,):
        seconds = pass_s(on_kind, layout_batches(on_kind, layout_batch.layouts)[0])
        block_s_by_kind[on_kind.cluster.name] = np.sum(
            [seconds[kind][0] for kind in passes], axis=0
        )
    block_s_by_kind = {kind: block_s_by_kind[kind] for kind in ranks}
    fastest = np.min([*block_s_by_kind.values()], axis=0)
    slower = {}
    for kind, seconds in block_s_by_kind.items():
        ratio = seconds[fastest > 0] / fastest[fastest > 0]
        slower[kind] = float(ratio.min(initial=np.inf))
    once_s = float(fastest @ counts)

    # Shared in proportion to the ranks' speeds, one micro-batch keeps the slowest of them busy
    # for at least `share_s` seconds.
    share_s = once_s / sum(n / slower[kind] for kind, n in ranks.items())
    least_s = spec.micro_batches * share_s
    live = program_live(problem.setting, spec)
    if spec.steps > 1 or not one_stage_per_rank(layout_batch) or live.split:
        return least_s
    warm_up = 1 if live.warm_up[-1] == spec.micro_batches else int(live.warm_up.max())
    return max(least_s, once_s + (spec.micro_batches - warm_up) * share_s)


def passes_and_transfers_s(
    problem: StepProblem, layouts: Sequence[Layout]
) -> Float[np.ndarray, " layouts"]:
    """Lower bounds of the step times of layouts that differ in their stages and recomputation
    alone: their timelines with nothing but passes, without layers that are recomputed in full, and
    the transfers between stages.

    A makespan never falls when a duration rises, so that everything left out (reductions, gathers,
    updates, and what they slow) can only add to it. Transfers carry the activations of a
    micro-batch, wherever the stages are cut.

    A bound is 0 where passes may overlap or join micro-batches, where several ranks hold a stage,
    where steps run into each other, and on nodes of several kinds. It is infinite where the stages
    cannot hold the layers so.
    """
    least_s = np.zeros(len(layouts))
    if problem.kinds:
        return least_s
    for mode in dict.fromkeys(layout.recompute for layout in layouts):
        layouts_of_mode = [i for i, layout in enumerate(layouts) if layout.recompute == mode]
        base = layouts[layouts_of_mode[0]].replace(partition=None, recompute_full_layers=None)
        (batch,) = layout_batches(problem, [base])
        spec = batch.spec
        terms = batch.composed[0]
        if not spec.scheduler.plain or spec.combines_passes or spec.replicas > 1 or spec.steps > 1:
            continue

        # All cuts share the program of the base, and the durations of its transfers.
        ((program, base_s, _),) = step_programs(problem, [base])[0]
        structure = program.structure
        is_transfer = is_of_kind(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
        transfers_s = np.where(is_transfer, base_s, 0.0)

        # Seconds of every block in each class; none in classes that are not passes.
        block_s = np.zeros((structure.n_classes, len(terms.events.kinds)))
        for kind, (of_kind,) in pass_s(problem, batch).items():
            block_s[structure.class_kind == kind] = of_kind
        durations_s = []
        possible = []
        for i in layouts_of_mode:
            try:
                counts = stage_blocks(
                    terms.events.kinds, spec.n_stages, spec.segments, layouts[i].partition
                )
            except LayoutError:
                least_s[i] = np.inf
                continue
            blocks = in_classes(structure.class_stage, structure.class_segment, counts)
            durations_s.append(transfers_s + (blocks * block_s).sum(axis=1) * terms.factor)
            possible.append(i)
        if possible:
            (least_s[possible],) = makespan_many([program.compiled], [np.array(durations_s)])
    return least_s


def in_pieces(kinds: PerRank) -> Iterable[PerRank]:
    """Orders of the kinds of pipeline ranks in which each kind is contiguous (with many kinds, only
    the given order)."""
    names = list(dict.fromkeys(kinds or ()))
    for order in permutations(names) if len(names) <= MOST_ORDERED else (names,):
        pieces = [(name,) * (kinds or ()).count(name) for name in order]
        yield tuple(chain.from_iterable(pieces))


class StageSpans(NamedTuple):
    """A partition's stages, as an index into tables [stage, first layer, end]."""

    stage: np.ndarray
    first_layer: np.ndarray
    end: np.ndarray


def spans(sizes: Sequence[int]) -> StageSpans:
    """The stages of a partition by the number of their layers."""
    end = np.cumsum(sizes)
    return StageSpans(np.arange(len(end)), end - np.array(sizes), end)


def neighbours(partition: tuple[int, ...], reach: int | None = None) -> Iterable[tuple[int, ...]]:
    """Partitions with one layer moved between stages at most `reach` apart (default: any distance
    up to 8 stages, else 2)."""
    stages = len(partition)
    reach = reach or (stages if stages <= 8 else 2)
    for a in range(stages):
        for b in range(max(0, a - reach), min(stages, a + reach + 1)):
            if a != b and partition[a] > 0:
                yield tuple(n - (s == a) + (s == b) for s, n in enumerate(partition))


@dataclass(frozen=True)
class Descent(Generic[T]):
    """The result of a descent."""

    best: T
    value: float
    """Value of the best member."""
    evaluated: int
    """Members that were evaluated or ruled out by their bound on the way, the best among them."""


def descend(
    start: Sequence[T],
    moves: Callable[[T], Iterable[T]],
    evaluate: Callable[[Sequence[T]], Float[np.ndarray, " n"]],
    bound: Callable[[Sequence[T]], Float[np.ndarray, " n"]] | None = None,
) -> Descent[T]:
    """Steepest descent from the best of `start`, until no neighbour is better.

    Args:
        start: members to begin from.
        moves: the neighbours of a member.
        evaluate: values of members, which are minimised.
        bound: lower bounds of these values, much cheaper than the values; members whose bound is
            above the best value are not evaluated.

    Raises:
        NothingFitsError: none of `start` is possible.
    """
    # Remember all values: neighbours of neighbours repeat, and an evaluation is the costly part.
    values = dict(zip(start, evaluate(start).tolist(), strict=True))
    best = min(values, key=values.__getitem__)
    if not np.isfinite(values[best]):
        raise NothingFitsError(
            "no division of the layers into these stages fits into memory; give more stages, or recompute"
        )
    for _ in range(_ROUNDS):
        new = [x for x in dict.fromkeys(moves(best)) if x not in values]
        if not new:
            break
        if bound is not None:
            # No value falls below its bound, and the best value only falls, so an interval that is
            # ruled out once stays out.
            ruled_out = bound(new) > values[best] * (1 + _ROUNDING)
            values.update(
                (x, np.inf) for x, is_out in zip(new, ruled_out.tolist(), strict=True) if is_out
            )
            new = [x for x in new if x not in values]
        if new:
            values.update(zip(new, evaluate(new).tolist(), strict=True))
        better = min(values, key=values.__getitem__)
        if values[better] >= values[best]:
            break
        best = better
    return Descent(best, values[best], len(values))


@dataclass(frozen=True)
class Certificate:
    """A lower bound for the whole space, and its justification."""

    lower_bound_s: float
    """No member of the space is faster."""
    exact_in: str
    """The objective in which the result is proven best; empty where in none."""
    how: str
    """Derivation of the bound, in words."""

    def gap(self, value_s: float) -> float:
        """Largest relative distance of the result from the bound; 0 if proved optimal."""
        return relative_gap(value_s, self.lower_bound_s)

    def to_dict(self, value_s: float) -> dict[str, Any]:
        """Plain values, for JSON."""
        return vars(self) | {"gap": self.gap(value_s)}
