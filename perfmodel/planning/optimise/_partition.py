"""The best uneven stages of a layout, with the layers that each must recompute to fit."""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._certificate import Certificate
from perfmodel.planning.optimise._pipeline import (
    FRONT,
    NothingFitsError,
    descend,
    front,
    lower_bound_s,
    neighbours,
    spans,
)
from perfmodel.prediction import (
    Bundle,
    Prediction,
    StageCosts,
    StepProblem,
    bundles,
    evaluate,
    explain,
    is_layer,
    layout_of,
    lower_bounds_s,
    one_stage_per_rank,
    pass_s,
    peak_memory,
    program_live,
    stage_costs,
    step_problem_of,
)
from perfmodel.program import Kind
from perfmodel.spec import Cluster, Layout, Model, Problem


@dataclass(frozen=True)
class PartitionResult:
    """Uneven stages and how good they are."""

    prediction: Prediction
    """Of the best layout found, whose `layout.partition` and `layout.recompute_full_layers` are the answer."""
    given_s: float | None
    """Step time of the layout as it was given; None where it does not fit into memory."""
    certificate: Certificate
    """Over all partitions and recompute choices of the space."""
    evaluated: int
    """Layouts evaluated by full evaluation of the schedule."""
    seconds: float

    @property
    def gain(self) -> float:
        """Share of the given layout's step that is saved; 1 where that does not fit."""
        return 1.0 if self.given_s is None else 1 - self.step_time_s / self.given_s

    @property
    def layout(self) -> Layout:
        """The best layout."""
        return self.prediction.layout

    @property
    def step_time_s(self) -> float:
        """Its step time."""
        return self.prediction.step_time_s

    @property
    def gap(self) -> float:
        """By what share the step time is above the lower bound at most."""
        return self.certificate.gap(self.step_time_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "layout": str(self.layout),
            "step_time_s": self.step_time_s,
            "given_s": self.given_s,
            "certificate": self.certificate.to_dict(self.step_time_s),
            "evaluated": self.evaluated,
            "seconds": self.seconds,
        }


def partition(
    model: Problem | Model | str,
    cluster: Cluster | str | None = None,
    layout: Layout | str = "",
    *,
    calibration: Path | str | None = None,
    recompute: bool = True,
    **words: Any,
) -> PartitionResult:
    """`partition_stages` of a problem and a layout, by name or as they are; arguments as in `perfmodel.predict`."""
    problem, layout = catalog.problem_and_layout(model, cluster, layout, **words)
    return partition_stages(step_problem_of(problem, calibration), layout_of(problem, layout)[0], recompute=recompute)


def partition_stages(
    problem: StepProblem, layout: Layout, *, recompute: bool = True, cuts: Sequence[tuple[int, ...]] | None = None
) -> PartitionResult:
    """The fastest contiguous partition of the layers into the layout's stages that fits into memory.

    One stage per rank: dynamic programming gives the exact front of sums against slowest stages, whose best are
    evaluated by the schedule's timeline and improved by moving single layers. Several stages per rank: from the
    even partition by moving layers alone.

    Args:
        problem: model, job, cluster and cost models.
        layout: the layout, whose other fields are kept.
        cuts: partitions from which layers are moved, in place of those that dynamic programming finds.
        recompute: also choose between `none` and `selective`, and let stages that do not fit recompute as few of
            their layers in full as make them fit; otherwise the layout's recompute is kept.

    Raises:
        LayoutError: nothing to cut, or no partition fits into memory.
    """
    started = time.perf_counter()
    given, bases, costs = _space(problem, layout, recompute)
    (bundle,) = bundles(problem, [given])
    start = [given, *bases]
    for base in bases:
        of_base = costs.get(base.recompute)
        if of_base is None:
            start += [base.replace(partition=sizes) for sizes in cuts or ()]
        elif cuts is not None:
            start += [with_partition(base, of_base, sizes) for sizes in cuts if fits_as(of_base, sizes)]
        else:
            exact = front([of_base], bundle.spec.micro_batches)[:FRONT]
            start += [with_partition(base, of_base, found.partition) for found in exact]

    def moves(at: Layout) -> Iterable[Layout]:
        for sizes in neighbours(at.partition or ()):
            if at.recompute not in costs:
                yield at.replace(partition=sizes)
            elif fits_as(costs[at.recompute], sizes):
                yield with_partition(at, costs[at.recompute], sizes)

    try:
        best, _, evaluated = descend(list(dict.fromkeys(start)), moves, lambda some: _step_s(problem, some))
    except NothingFitsError:
        raise LayoutError(
            f"no partition of {problem.model.name} into the stages of {layout} fits into memory"
        ) from None
    (given_s,) = _step_s(problem, [given]).tolist()
    return PartitionResult(
        prediction=explain(problem, best),
        given_s=explain(problem, given).step_time_s if np.isfinite(given_s) else None,
        certificate=_certificate(problem, bases, costs),
        evaluated=evaluated,
        seconds=time.perf_counter() - started,
    )


def partition_bound_s(problem: StepProblem, layout: Layout, *, recompute: bool = True) -> float:
    """The step time that no partition of a layout can beat; infinite where none fits. Takes milliseconds.

    Args:
        problem, layout, recompute: as for `partition_stages`.
    """
    if layout.pp == 1:
        return float(lower_bounds_s(problem, [layout])[0])
    _, bases, costs = _space(problem, layout, recompute)
    return _certificate(problem, bases, costs).lower_bound_s


def _space(problem: StepProblem, layout: Layout, recompute: bool) -> tuple[Layout, list[Layout], dict[str, StageCosts]]:
    """The layout with its partition written out, the bases of all others, and the stages' costs on each base by its
    recompute; no costs where dynamic programming does not apply."""
    (bundle,) = bundles(problem, [layout])
    if bundle.spec.n_stages == 1:
        raise LayoutError("a partition needs pipeline stages; use pp > 1")
    given = layout.replace(partition=layers_per_stage(bundle))
    bases = [given]
    if free := recompute and problem.job.mode == "train":
        bases = [given.replace(recompute=mode, recompute_full_layers=None) for mode in ("none", "selective")]
    if not one_stage_per_rank(bundle) or (layout.recompute_full_layers is not None and not free):
        return given, bases, {}
    return given, bases, {base.recompute: stage_costs(problem, base, recompute_to_fit=free) for base in bases}


def _certificate(problem: StepProblem, bases: Sequence[Layout], costs: Mapping[str, StageCosts]) -> Certificate:
    if not costs:
        work_s = min(_evenly_spread_s(problem, base) for base in bases)
        return Certificate(work_s, "", "all passes spread evenly over the ranks")
    (bundle,) = bundles(problem, [bases[0]])
    live = program_live(problem.setting, bundle.spec)
    return Certificate(
        min(lower_bound_s([of_base], bundle.spec, live) for of_base in costs.values()),
        "sum of stages + (m - 1) slowest stage",
        "what every order of passes needs, least over all partitions by dynamic programming",
    )


def layers_per_stage(bundle: Bundle) -> tuple[int, ...]:
    """The partition that a bundle's layouts have, given or not."""
    layers = [is_layer(block) for block in bundle.tables[0].blocks]
    return tuple(bundle.counts.sum(axis=1)[:, layers].sum(axis=1).astype(int).tolist())


def with_partition(base: Layout, costs: StageCosts, sizes: tuple[int, ...]) -> Layout:
    """The layout with these stages, which recompute what they must to fit."""
    full = tuple(costs.full_layers[spans(sizes)].tolist())
    return base.replace(partition=sizes, recompute_full_layers=full if any(full) else None)


def fits_as(costs: StageCosts, sizes: tuple[int, ...]) -> bool:
    """Whether all of these stages are possible and fit."""
    return bool(np.isfinite(costs.forward_s[spans(sizes)]).all())


def _step_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Step times, infinite for layouts that are impossible or do not fit."""
    step_s = np.full(len(layouts), np.inf)
    possible = [i for i, layout in enumerate(layouts) if _is_possible(problem, layout)]
    peak, _ = peak_memory(problem, [layouts[i] for i in possible])
    fits = peak <= problem.usable_bytes
    if kept := [i for i, ok in zip(possible, fits.tolist(), strict=True) if ok]:
        step_s[kept] = evaluate(problem, [layouts[i] for i in kept]).step_time_s
    return step_s


def _is_possible(problem: StepProblem, layout: Layout) -> bool:
    try:
        bundles(problem, [layout])
    except LayoutError:
        return False
    return True


def _evenly_spread_s(problem: StepProblem, base: Layout) -> float:
    """Seconds of all passes of a step, shared evenly by the ranks; 0 where passes may overlap."""
    (bundle,) = bundles(problem, [base])
    if not bundle.spec.scheduler.plain:
        return 0.0
    of_block, blocks = pass_s(problem, bundle), bundle.counts.sum(axis=(0, 1))
    kinds = (Kind.FORWARD,) if bundle.spec.is_forward_only else (Kind.FORWARD, Kind.BACKWARD)
    return float(sum(of_block[kind][0] @ blocks for kind in kinds)) * bundle.spec.micro_batches / bundle.spec.stages
