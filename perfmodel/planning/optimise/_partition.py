"""Finds the best uneven stages of a layout, the layers that each must recompute to fit, and, on
several kinds of nodes, the kind of each stage."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from math import comb
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar, Unpack

import numpy as np
from jaxtyping import Float

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._contiguous import NothingFitsError
from perfmodel.planning.optimise._pipeline import (
    Certificate,
    KindCosts,
    descend,
    in_pieces,
    neighbours,
    passes_and_transfers_s,
    spread_bound_s,
)
from perfmodel.prediction import (
    LayoutBatch,
    Prediction,
    StepProblem,
    evaluate,
    explain,
    layout_batches,
    layout_of,
    step_problem_of,
    step_times_s,
)
from perfmodel.prediction.composition import (
    StageCosts,
    one_stage_per_rank,
    program_live,
    stage_costs,
)
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.prediction.memory import fitting
from perfmodel.spec import Cluster, Framework, Job, Layout, Model, Problem
from perfmodel.spec.keywords import JobKeywords
from perfmodel.spec.notation import PerRank

MOST_CUTS: Final = 200
"""Most combinations of cuts and orders of kinds that are all tried where dynamic programming does
not apply."""


@dataclass(frozen=True)
class PartitionResult:
    """Uneven stages, with their step time and bound."""

    prediction: Prediction
    """The best layout found; its `layout.partition` and `layout.recompute_full_layers` are the
    answer."""
    given_s: float | None
    """Step time of the layout as it was given; None where it does not fit into memory."""
    certificate: Certificate
    """Lower bound over all partitions and recompute choices of the space."""
    evaluated: int
    """Layouts that were evaluated in full, or ruled out by the timeline of their passes and
    transfers alone."""
    seconds: float

    @property
    def gain(self) -> float:
        """Saved share of the given layout's step time; 1 if that layout does not fit."""
        return 1.0 if self.given_s is None else 1 - self.step_time_s / self.given_s

    @property
    def layout(self) -> Layout:
        """The best layout."""
        return self.prediction.layout

    @property
    def step_time_s(self) -> float:
        """Step time of the best layout found."""
        return self.prediction.step_time_s

    @property
    def gap(self) -> float:
        """Largest relative distance of the step time from the lower bound."""
        return self.certificate.gap(self.step_time_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "layout": self.prediction.layout_notation,
            "step_time_s": self.step_time_s,
            "given_s": self.given_s,
            "certificate": self.certificate.to_dict(self.step_time_s),
            "evaluated": self.evaluated,
            "seconds": self.seconds,
        }


def partition(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    layout: catalog.StatedLayout = "",
    *,
    calibration: Path | str | None = None,
    recompute: bool = True,
    global_batch: int | None = None,
    seq_len: int | None = None,
    dtype: str | None = None,
    devices: int | None = None,
    job: Job | Mapping[str, Any] | None = None,
    framework: Framework | str | None = None,
    **of_job: Unpack[JobKeywords],
) -> PartitionResult:
    """Find the best uneven stages of a layout; arguments as in `perfmodel.predict`."""
    problem, layout = catalog.problem_and_layout(
        model,
        cluster,
        layout,
        global_batch=global_batch,
        seq_len=seq_len,
        dtype=dtype,
        devices=devices,
        job=job,
        framework=framework,
        **of_job,
    )
    laid_out, _ = layout_of(problem, layout)
    return partition_stages(step_problem_of(problem, calibration), laid_out, recompute=recompute)


def partition_stages(
    problem: StepProblem,
    layout: Layout,
    *,
    recompute: bool = True,
) -> PartitionResult:
    """Find the fastest contiguous partition of the layers into stages that fits into memory.

    One stage per rank: dynamic programming gives the exact front of sums against slowest stages,
    whose best are evaluated by the schedule's timeline and improved by moving single layers or
    recomputing otherwise. Several stages per rank: from the even partition by moving layers alone.

    On nodes of several kinds the order of the kinds is looked for too: as many stages stay on each
    as the layout has there (or as the cluster's order gives it).

    Args:
        problem: model, job, cluster and cost models.
        layout: the layout, whose other fields are kept.
        recompute: also choose between `none` and `selective`, and let stages that do not fit
            recompute as few of their layers in full as make them fit; otherwise the layout's
            recompute is kept.

    Raises:
        LayoutError: nothing to cut, or no partition fits into memory.
    """
    started = time.perf_counter()

    # Starting points: the layout as it is, and for each mode of recompute the cuts that dynamic
    # programming finds best.
    partitioned, bases, costs = _space(problem, layout, recompute)
    (batch,) = layout_batches(problem, [partitioned])
    start = [partitioned, *bases]
    for base in bases:
        base_costs = costs.get(base.recompute)
        if base_costs is None:
            if base.kinds:
                start += _few_cuts(base)
        else:
            start += base_costs.layouts(base, base_costs.exact(base, batch.spec.micro_batches))

    try:
        # The dynamic program minimises a formula; the descent minimises the evaluated step.
        end = descend(
            list(dict.fromkeys(start)),
            partial(_moves, bases=bases, costs=costs),
            lambda layouts: exact_steps_s(problem, layouts),
            # Most moves of a layer lengthen the timeline of passes and transfers alone beyond the
            # best step.
            bound=lambda layouts: passes_and_transfers_s(problem, layouts),
        )
    except NothingFitsError:
        raise LayoutError(
            f"no partition of {problem.model.name} into the stages of {layout.label} fits into memory"
        ) from None
    # The descent compares in single precision; reported times have double precision.
    (given_s,) = exact_steps_s(problem, [partitioned]).tolist()
    return PartitionResult(
        prediction=explain(problem, end.best),
        given_s=float(step_times_s(problem, [partitioned])[0]) if np.isfinite(given_s) else None,
        certificate=_certificate(problem, bases, costs),
        evaluated=end.evaluated,
        seconds=time.perf_counter() - started,
    )


def _moves(
    layout: Layout, bases: Sequence[Layout], costs: dict[str, KindCosts]
) -> Iterator[Layout]:
    """Neighbours of a layout: one layer moved to another stage, or the same cut recomputed
    otherwise."""
    neighbouring = _neighbouring_cuts(layout)
    if layout.recompute not in costs:
        for sizes, kinds in neighbouring:
            yield layout.replace(partition=sizes, kinds=kinds)
        return

    # Costs tell which moves fit and what each stage has to recompute. The other mode of recompute
    # is tried with the same cut.
    yield from costs[layout.recompute].layouts(layout, neighbouring)
    for base in bases:
        if base.recompute != layout.recompute:
            yield from costs[base.recompute].layouts(base, [(layout.partition or (), layout.kinds)])


def _neighbouring_cuts(layout: Layout) -> list[tuple[tuple[int, ...], PerRank]]:
    """Cuts that one move leads to, as layers and kind of nodes of each stage: a layer is shifted
    between stages, or two stages exchange their kinds of nodes, with or without their layers."""
    sizes = layout.partition or ()
    kinds = layout.kinds
    cuts: list[tuple[tuple[int, ...], PerRank]] = [(moved, kinds) for moved in neighbours(sizes)]
    if not kinds or len(kinds) != len(sizes):
        return cuts
    for a, b in combinations(range(len(kinds)), 2):
        if kinds[a] != kinds[b]:
            exchanged = _exchanged(kinds, a, b)
            cuts += [(sizes, exchanged), (_exchanged(sizes, a, b), exchanged)]
    return cuts


def partition_bound_s(problem: StepProblem, layout: Layout) -> float:
    """Lower bound of the step time over all partitions and any recomputation, in milliseconds of
    work; infinite if none fits."""
    if layout.pp == 1:
        return float(lower_bounds_s(problem, [layout])[0])
    return partition_certificate(problem, layout).lower_bound_s


def partition_certificate(problem: StepProblem, layout: Layout) -> Certificate:
    """The lower bound over all partitions of a pipelined layout, with any recomputation."""
    _, bases, costs = _space(problem, layout, recompute=True)
    return _certificate(problem, bases, costs)


T = TypeVar("T")


def _exchanged(items: tuple[T, ...], a: int, b: int) -> tuple[T, ...]:
    order = [*range(len(items))]
    order[a], order[b] = b, a
    return tuple(items[i] for i in order)


def _kind_costs(problem: StepProblem, base: Layout, recompute_to_fit: bool) -> KindCosts:
    """Costs of stages on each kind of nodes that the layout uses."""
    if base.kinds is None:
        return KindCosts({None: stage_costs(problem, base, recompute_to_fit)}, (base.pp,))

    # Transfers cross the link between kinds only if stages lie on more than one of them.
    used_kinds = dict.fromkeys(base.kinds)
    is_mixed = len(used_kinds) > 1
    costs_by_name: dict[str, StageCosts] = {}
    for on_kind, link in zip(problem.kinds, problem.links, strict=True):
        if on_kind.cluster.name in used_kinds:
            costs = stage_costs(on_kind, base, recompute_to_fit, link if is_mixed else None)
            costs_by_name[on_kind.cluster.name] = costs

    # Kinds stand in the order of the stages.
    costs_by_kind: dict[str | None, StageCosts]
    costs_by_kind = {kind: costs_by_name[kind] for kind in used_kinds}
    return KindCosts(costs_by_kind, tuple(base.kinds.count(kind) for kind in used_kinds))


def _few_cuts(base: Layout) -> list[Layout]:
    """All cuts of a layout's layers, with each kind of nodes in one piece, if they are few. They
    are needed where the transfers differ between cuts, because single moves of layers then stop too
    early."""
    sizes = base.partition or ()
    orders = list(dict.fromkeys(in_pieces(base.kinds)))
    if comb(sum(sizes) - 1, len(sizes) - 1) * len(orders) > MOST_CUTS:
        return []
    layouts = []
    for ends in combinations(range(1, sum(sizes)), len(sizes) - 1):
        cut = tuple(np.diff((0, *ends, sum(sizes))).tolist())
        layouts += [base.replace(partition=cut, kinds=kinds) for kinds in orders]
    return layouts


def balanced(
    problem: StepProblem,
    layout: Layout,
    *,
    uneven: bool = True,
    worst_s: float = np.inf,
) -> tuple[list[Layout], float]:
    """Find the best orders of kinds of nodes and partitions of a layout by dynamic programming,
    with a lower bound of the step time; no layouts if the bound exceeds `worst_s`, an infinite
    bound if nothing fits.

    Args:
        layout: layout with one stage per pipeline rank and its kinds of nodes written out.
        uneven: stages may have any number of layers; otherwise the kinds' orders alone are tried.
    """
    base = layout.replace(partition=None, recompute_full_layers=None)
    if layout.pp == 1 or not uneven:
        orders = dict.fromkeys(in_pieces(base.kinds or ()))
        ordered = [base.replace(kinds=kinds) for kinds in orders]
        fits = [layout for layout in ordered if fitting(problem, [layout])[0]]
        return fits, spread_bound_s(problem, base) if fits else np.inf
    (batch,) = layout_batches(problem, [base])

    # Passes of several micro-batches have no stage costs of their own. The best cuts of a plain
    # pipeline are good starting points for them too.
    if not batch.spec.scheduler.plain:
        plain_sizes, _ = balanced(problem, base.replace(schedule="1f1b"))
        cuts = [cut.replace(schedule=base.schedule) for cut in plain_sizes]
        cuts = [cut for cut, fits in zip(cuts, fitting(problem, cuts), strict=True) if fits]
        return cuts, spread_bound_s(problem, base) if cuts else np.inf

    # The bound of this layout is worked out before its cuts: it may rule it out.
    costs = _kind_costs(
        problem,
        base,
        recompute_to_fit=problem.job.mode == "train" and base.recompute != "full",
    )
    least_s = costs.lower_bound_s(batch.spec, program_live(problem.setting, batch.spec))
    if least_s > worst_s or not np.isfinite(least_s):
        return [], least_s
    return costs.layouts(base, costs.exact(base, batch.spec.micro_batches, limit=1)), least_s


class _PartitionSpace(NamedTuple):
    """Partitions of a layout's blocks into stages."""

    partitioned: Layout
    """The layout with its own partition written out."""
    bases: list[Layout]
    """Layouts whose partitions are tried, one per recompute mode."""
    costs: dict[str, KindCosts]
    """Costs of stages on each base, by recompute mode; empty where dynamic programming does not
    apply."""


def _space(problem: StepProblem, layout: Layout, recompute: bool) -> _PartitionSpace:
    """The partitions of a layout among which the best one is looked for."""
    (batch,) = layout_batches(problem, [layout])
    if batch.spec.n_stages == 1:
        raise LayoutError("a partition needs pipeline stages; use pp > 1")
    partitioned = batch.layouts[0].replace(partition=layers_per_stage(batch))
    bases = [partitioned]
    free = recompute and problem.job.mode == "train"
    if free:
        free_layers = partitioned.replace(recompute_full_layers=None)
        bases = [free_layers.replace(recompute=mode) for mode in ("none", "selective")]

    # Dynamic programming needs the cost of a stage to depend on its own layers only, which fails
    # where a rank holds several stages or layers to recompute are prescribed.
    if not one_stage_per_rank(batch) or (layout.recompute_full_layers is not None and not free):
        return _PartitionSpace(partitioned, bases, {})
    costs = {base.recompute: _kind_costs(problem, base, recompute_to_fit=free) for base in bases}
    return _PartitionSpace(partitioned, bases, costs)


def _certificate(
    problem: StepProblem, bases: Sequence[Layout], costs: Mapping[str, KindCosts]
) -> Certificate:
    """A lower bound of the step under any cut, and how it was proved."""
    # Without stage costs only the total work bounds the step.
    if not costs:
        work_s = min(spread_bound_s(problem, base) for base in bases)
        return Certificate(work_s, "", "all passes spread evenly over the ranks")
    (batch,) = layout_batches(problem, [bases[0]])
    live = program_live(problem.setting, batch.spec)
    orders = "orders of the kinds and " if bases[0].kinds else ""
    return Certificate(
        min(base_costs.lower_bound_s(batch.spec, live) for base_costs in costs.values()),
        "sum of stages + (m - 1) slowest stage",
        f"lower bound for any order of passes, minimised over all {orders}partitions by dynamic programming",
    )


def layers_per_stage(batch: LayoutBatch) -> tuple[int, ...]:
    """Layers per stage of a bundle's layouts, explicit or default."""
    layers = [block.is_layer for block in batch.tables[0].blocks]
    return tuple(batch.program.counts.sum(axis=1)[:, layers].sum(axis=1).astype(int).tolist())


def exact_steps_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Step times; infinite for layouts that are invalid or do not fit."""
    step_s = np.full(len(layouts), np.inf)

    # Three sieves, cheapest first: does the layout exist, does it fit, how long does it take.
    possible = [i for i, layout in enumerate(layouts) if _is_possible(problem, layout)]
    fits = fitting(problem, [layouts[i] for i in possible])
    fitting_layouts = [i for i, ok in zip(possible, fits.tolist(), strict=True) if ok]
    if fitting_layouts:
        step_s[fitting_layouts] = evaluate(
            problem, [layouts[i] for i in fitting_layouts]
        ).step_time_s
    return step_s


def _is_possible(problem: StepProblem, layout: Layout) -> bool:
    try:
        layout_batches(problem, [layout])
    except LayoutError:
        return False
    return True
