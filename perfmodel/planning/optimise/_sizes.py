"""Optimises integer sizes within a step: micro-batches of several sizes, and gradient buckets
(groups of a stage's layers whose reductions overlap with the backward pass).

Micro-batches are relaxed first. Few whole layers per bucket leave little to relax: they are
evaluated exactly at once.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._pipeline import descend, neighbours
from perfmodel.planning.optimise._relax import Relaxation, Values, relax
from perfmodel.planning.optimise._variables import WholeShares
from perfmodel.prediction import (
    LayoutBatch,
    StepProblem,
    durations,
    evaluate,
    layout_batches,
    prepared,
)
from perfmodel.prediction.composition import in_program_of
from perfmodel.prediction.memory import fitting
from perfmodel.program import Kind, Structure, by_layer, is_of_kind, segment_sizes
from perfmodel.spec import Layout
from perfmodel.timeline import compile_structure, makespan, makespan_lanes
from perfmodel.units import divisors

_OF_SIZE: Final = (
    Kind.FORWARD,
    Kind.BACKWARD,
    Kind.BACKWARD_INPUT,
    Kind.BACKWARD_WEIGHT,
    Kind.SEND_FORWARD,
    Kind.SEND_BACKWARD,
)
"""Kinds of operations whose time depends on the size of their micro-batch."""
_LARGEST: Final = 16
"""Most sequences of a micro-batch that are tried."""


@dataclass(frozen=True)
class MicroBatchResult:
    """The best sizes of a step's micro-batches."""

    sizes: tuple[int, ...]
    """Sequences of each micro-batch, in the order in which they enter the pipeline."""
    step_time_s: float
    uniform_s: float
    """Step time with the same number of micro-batches of equal size."""
    best_uniform_s: float
    """Step time with equal sizes of any number that fits."""
    best_uniform: int
    """Size of the micro-batches if all are equal."""
    evaluated: int
    seconds: float

    @property
    def not_launchable(self) -> str:
        """Why no framework in the catalog can run these sizes; empty if one can."""
        if len(set(self.sizes)) == 1:
            return ""
        return (
            "no framework in the catalog runs micro-batches of several sizes in one step; the best single size "
            f"is {self.best_uniform}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return vars(self) | {"not_launchable": self.not_launchable}


class RefinedStructure(NamedTuple):
    """A program whose classes differ by micro-batch."""

    structure: Structure
    old_class: Int[np.ndarray, " refined"]
    """The class of the usual structure, for each new one."""
    micro_batch: Int[np.ndarray, " refined"]
    """The micro-batch of each new class; -1 for kinds that do not depend on it."""


def _priced_sizes(
    problem: StepProblem,
    layout_batch: LayoutBatch,
    refined: RefinedStructure,
    sizes: Int[np.ndarray, " sizes"],
) -> dict[str, Any]:
    """Seconds of each class at every size of its micro-batch, for `_durations_of_sizes`."""
    durations_of_size = []
    for size in sizes.tolist():
        sized = in_program_of(
            problem, layout_batch, layout_batch.layouts[0].replace(micro_batch=size)
        )
        durations_of_size.append(durations(problem, sized)[0][refined.old_class])
    return {
        "sizes": sizes,
        "by_size": np.stack(durations_of_size),
        "micro_batch_of_class": np.maximum(refined.micro_batch, 0),
        "scaled": refined.micro_batch >= 0,
        "base": durations(problem, layout_batch)[0][refined.old_class],
        "largest": float(sizes[-1]),
    }


def size_micro_batches(problem: StepProblem, layout: Layout) -> MicroBatchResult:
    """Find the best micro-batch sizes of a layout, by relaxation, rounding and single moves.

    Times of sizes between those that the batch divides into are interpolated; no size exceeds the
    largest that fits into memory when all micro-batches have it (and `_LARGEST`).

    Args:
        problem: model, job, cluster and cost models, for training.
        layout: the layout; its `micro_batch` gives the number of micro-batches.

    Raises:
        LayoutError: one micro-batch, or a schedule with passes of several kinds or without a flush.
    """
    began = time.perf_counter()
    (layout_batch,) = layout_batches(problem, [layout])
    spec = layout_batch.spec
    if spec.micro_batches < 2 or not spec.scheduler.plain or spec.steps > 1:
        raise LayoutError(
            "micro-batch sizes can be optimised only with several micro-batches and a plain synchronous "
            f"schedule, not {layout.schedule} with {spec.micro_batches}"
        )
    uniform = _uniform_step_s(problem, layout)
    if layout.micro_batch not in uniform:
        raise LayoutError(
            f"layout {layout.label} does not fit into memory; give a layout that fits to optimise its micro-batch sizes"
        )

    # In the usual structure all micro-batches share their durations. Here each micro-batch gets
    # separate classes, whose seconds follow its size.
    refined = by_micro_batch(prepared(spec).structure)

    # The sizes that fit, and 1, are priced exactly; others are interpolated.
    sizes = np.array(sorted({1, *uniform}))
    constants = _priced_sizes(problem, layout_batch, refined, sizes)
    program = compile_structure(refined.structure)
    total = spec.micro_batches * layout.micro_batch
    variables = {"batch": WholeShares(spec.micro_batches, total, least=1)}
    relaxation = Relaxation(variables, program, _durations, constants, limits=_limits)

    # A micro-batch above the largest size that fits is not allowed, so that its seconds do not
    # matter.
    def step_s(tried: Any) -> Float[np.ndarray, " n"]:
        """Seconds of a step under each grouping."""
        tried = np.array(tried)
        spans_s = makespan_lanes(program, _durations_of_sizes(constants, tried))
        return np.where(tried.max(axis=1) <= sizes[-1], spans_s, np.inf)

    # Descend by single moves from equal sizes and from those that relaxation leads to.
    equal = (layout.micro_batch,) * spec.micro_batches
    relaxed = [tuple(map(int, end.values["batch"])) for end in relax(relaxation, steps=400).starts]
    end = descend(list(dict.fromkeys([equal, *relaxed])), _single_moves, step_s)
    best_s, equal_s = (
        float(makespan(program, row))
        for row in _durations_of_sizes(constants, np.array([end.best, equal]))
    )
    best_uniform = min(uniform, key=uniform.__getitem__)
    return MicroBatchResult(
        sizes=end.best,
        step_time_s=best_s,
        uniform_s=equal_s,
        best_uniform_s=uniform[best_uniform],
        best_uniform=best_uniform,
        evaluated=end.evaluated,
        seconds=time.perf_counter() - began,
    )


def by_micro_batch(
    structure: Structure,
) -> RefinedStructure:
    """The structure with separate classes for the passes and transfers of each micro-batch."""
    # A new class is an old class and a micro-batch; -1 for classes that do not depend on it.
    is_of_size = is_of_kind(structure.class_kind, _OF_SIZE)

    def pairs(classes: np.ndarray, micro_batch: np.ndarray) -> Int[np.ndarray, "n 2"]:
        return np.column_stack([classes, np.where(is_of_size[classes], micro_batch, -1)])

    # Class 0 stands for nothing and stays the first, whether an op has it or not.
    n_lags = structure.lag.shape[1]
    op_pairs = pairs(structure.duration, structure.micro_batch)
    lag_pairs = pairs(structure.lag.ravel(), np.repeat(structure.micro_batch, n_lags))
    distinct, number = np.unique(
        np.concatenate([[[0, -1]], op_pairs, lag_pairs]), axis=0, return_inverse=True
    )
    duration, lag = np.split(number.ravel()[1:], [len(op_pairs)])
    old_class, micro_batch = distinct.T
    columns_of_class = ("class_kind", "class_stage", "class_segment", "class_variant")
    refined = replace(
        structure,
        duration=duration,
        lag=lag.reshape(structure.lag.shape),
        **{name: getattr(structure, name)[old_class] for name in columns_of_class},
    )
    return RefinedStructure(refined, old_class, micro_batch)


def _single_moves(at: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
    return (sizes for sizes in neighbours(at, 2) if min(sizes) >= 1)


def _durations(values: Values) -> Float[Array, " classes"]:
    return _interpolated(jnp, values, values["batch"][values["micro_batch_of_class"]])


def _limits(values: Values) -> Float[Array, " micro_batches"]:
    return values["batch"] / values["largest"] - 1


def _durations_of_sizes(
    constants: Values, sizes: Int[np.ndarray, "n micro_batches"]
) -> Float[np.ndarray, "n classes"]:
    """Durations for many sets of whole sizes at once, in double precision."""
    size_of_class = sizes[:, constants["micro_batch_of_class"]]
    return _interpolated(np, constants, np.minimum(size_of_class, constants["sizes"][-1]))


def _interpolated(xp: Any, constants: Values, size: Any) -> Any:
    """Interpolate the seconds of classes for micro-batch sizes [..., classes] between the known
    sizes, with `jax.numpy` or `numpy`."""
    sizes, by_size = constants["sizes"], constants["by_size"]

    # Linear interpolation between the two nearest sizes that are priced.
    upper = xp.clip(xp.searchsorted(sizes, size), 1, len(sizes) - 1)
    share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
    columns = xp.arange(size.shape[-1])
    interpolated = by_size[upper - 1, columns] * (1 - share) + by_size[upper, columns] * share
    return xp.where(constants["scaled"], interpolated, constants["base"])


def _uniform_step_s(problem: StepProblem, layout: Layout) -> dict[int, float]:
    """Step times of all equal sizes that divide the batch and fit."""
    per_replica = problem.job.global_batch // layout.dp
    sizes = divisors(per_replica, _LARGEST)
    layouts = [layout.replace(micro_batch=size) for size in sizes]
    fits = fitting(problem, layouts)
    steps_s = evaluate(problem, layouts).step_time_s.tolist()
    return {
        size: step_s
        for size, step_s, fits_memory in zip(sizes, steps_s, fits, strict=True)
        if fits_memory
    }


Sizes = tuple[tuple[int, ...], ...]
"""Layers of every bucket of every stage, in model order; the last of a stage is reduced first."""
NUMBERS: Final = (1, 2, 4, 8)
"""Numbers of buckets per stage that are tried when layers move between buckets."""
MOST_BUCKETS: Final = 16
"""Most buckets per stage that are tried when all have one size."""


@dataclass(frozen=True)
class BucketResult:
    """The best gradient buckets of every stage."""

    buckets: Sizes
    step_time_s: float
    given_s: float
    """Step time with the buckets that a prediction assumes: equal ones, one per layer up to a
    number."""
    evaluated: int
    seconds: float

    @property
    def gain(self) -> float:
        """Share of the step saved, compared with the buckets that a prediction assumes."""
        return 1 - self.step_time_s / self.given_s

    @property
    def most_layers(self) -> int:
        """Layers of the largest bucket."""
        return max(max(stage_buckets) for stage_buckets in self.buckets)

    @property
    def not_launchable(self) -> str:
        """Why no framework in the catalog can run these buckets; empty if one can.

        Frameworks fill buckets up to one size, from the last layer on (torch's `bucket_cap_mb`,
        Megatron's `--ddp-bucket-size`): all are equal but the one that is filled last, of the first
        layers, which may be smaller.
        """
        # Buckets are in model order and filled from the last layer on, so that the first may be
        # the one that is not full. A stage of few layers has empty ones at its end.
        filled_last = [stage_buckets[0] for stage_buckets in self.buckets]
        full: set[int] = set()
        for stage_buckets in self.buckets:
            full.update(layers for layers in stage_buckets[1:] if layers)
        size = max(full, default=max(filled_last))
        if full <= {size} and max(filled_last) <= size:
            return ""
        return "no framework in the catalog accepts buckets of several sizes; all buckets but the last have the same size"

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return vars(self) | {"not_launchable": self.not_launchable}


def launchable_buckets(problem: StepProblem, layout: Layout) -> BucketResult:
    """Find the best uniform gradient-bucket size, in whole layers, as frameworks can use it.

    Args:
        problem, layout: as for `size_buckets`.

    Raises:
        LayoutError: no overlapped reductions to group.
    """
    began = time.perf_counter()
    layout_batch = _reducing(problem, layout)
    per_stage = [sum(sizes) for sizes in Grouping(problem, layout_batch, 1).equal]

    # Sizes that give every stage the same buckets are one; of these the smallest, which fills them
    # most evenly.
    sizes_of_number: dict[int, Sizes] = {}
    for size in range(1, max(per_stage) + 1):
        number = -(-max(per_stage) // size)
        if number <= MOST_BUCKETS:
            sizes_of_number.setdefault(
                number, tuple(_filled(layers, size, number) for layers in per_stage)
            )

    step_s: dict[Sizes, float] = {}
    for number, sizes in sizes_of_number.items():
        step_s[sizes] = float(Grouping(problem, layout_batch, number).step_s([sizes])[0])
    best = min(step_s, key=lambda sizes: (step_s[sizes], sizes))
    return BucketResult(
        buckets=best,
        step_time_s=step_s[best],
        given_s=_assumed_s(problem, layout_batch),
        evaluated=len(sizes_of_number),
        seconds=time.perf_counter() - began,
    )


def _filled(layers: int, size: int, number: int) -> tuple[int, ...]:
    """Buckets with this many layers, filled from the last layer on; the rest stay empty."""
    # A stage with nothing but the embedding or the head has no layer to put into a bucket.
    filled = max(1, -(-layers // size))
    first = layers - size * (filled - 1)
    return (first, *(size,) * (filled - 1), *(0,) * (number - filled))


def _reducing(problem: StepProblem, layout: Layout) -> LayoutBatch:
    """Return the layout as a batch; check that gradient reductions overlap backward passes.

    Raises:
        LayoutError: it does not.
    """
    (layout_batch,) = layout_batches(problem, [layout])
    if (
        layout_batch.spec.grad_reduce not in ("overlap", "eager_opt")
        or layout_batch.spec.gathers_by_layer
        or layout_batch.spec.steps > 1
    ):
        raise LayoutError(
            f"layout {layout.label} has no overlapped gradient reductions to group; use dp > 1 and zero < 3"
        )
    return layout_batch


def _assumed_s(problem: StepProblem, layout_batch: LayoutBatch) -> float:
    """Step time with the buckets that a prediction assumes."""
    return float(
        makespan(prepared(layout_batch.spec).compiled, durations(problem, layout_batch)[0])
    )


def size_buckets(
    problem: StepProblem, layout: Layout, *, numbers: Sequence[int] = NUMBERS
) -> BucketResult:
    """Find each stage's best gradient buckets, by descent from buckets of equal size.

    Args:
        problem: model, job, cluster and cost models, for training.
        layout: layout with data-parallel replicas, overlapped reduction and ZeRO below 3.
        numbers: numbers of buckets per stage to try, besides as many as a prediction assumes.

    Raises:
        LayoutError: no overlapped reductions to group.
    """
    began = time.perf_counter()
    layout_batch = _reducing(problem, layout)

    # Each number of buckets is a separate structure, within which layers move. The best number
    # wins; the buckets that a prediction assumes are among the starts, so that the result is never
    # slower than these.
    groupings = [
        Grouping(problem, layout_batch, n) for n in sorted({*numbers, layout_batch.spec.segments})
    ]
    ends = [descend([grouping.equal], grouping.moves, grouping.step_s) for grouping in groupings]
    fastest = min(range(len(ends)), key=lambda which: ends[which].value)
    grouping = groupings[fastest]
    best = ends[fastest].best
    return BucketResult(
        buckets=best,
        step_time_s=float(makespan(grouping.prepared.compiled, grouping.durations(best))),
        given_s=_assumed_s(problem, layout_batch),
        evaluated=sum(end.evaluated for end in ends),
        seconds=time.perf_counter() - began,
    )


class Grouping:
    """All groupings of a layout's layers into a given number of buckets per stage."""

    def __init__(self, problem: StepProblem, layout_batch: LayoutBatch, buckets: int) -> None:
        self._problem = problem
        self._layout_batch = layout_batch
        before, cumulative, after = by_layer(layout_batch.tables[0].pairs)

        # Blocks per stage without the embedding before the first layer and the head after the
        # last.
        layer_counts = layout_batch.program.counts.sum(axis=1)
        layer_counts[0] -= before
        layer_counts[-1] -= after
        # Stages are cut where the prefix sums of blocks agree.
        ends = []
        for blocks_so_far in np.cumsum(layer_counts, axis=0):
            ends.append(int(np.flatnonzero((cumulative == blocks_so_far).all(axis=1))[0]))
        per_stage = np.diff([0, *ends]).tolist()
        self.equal: Sizes = tuple(tuple(segment_sizes(n, buckets).tolist()) for n in per_stage)
        self.prepared = prepared(replace(layout_batch.spec, segments=buckets))

    def moves(self, at: Sizes) -> Iterable[Sizes]:
        """The groupings with one layer moved to a neighbouring bucket."""
        for stage, sizes in enumerate(at):
            for moved in neighbours(sizes, reach=1):
                yield (*at[:stage], moved, *at[stage + 1 :])

    def step_s(self, groupings: Sequence[Sizes]) -> Float[np.ndarray, " n"]:
        return np.asarray(
            makespan_lanes(
                self.prepared.compiled, np.stack([self.durations(sizes) for sizes in groupings])
            ),
            float,
        )

    def durations(self, sizes: Sizes) -> Float[np.ndarray, " classes"]:
        """Durations of the structure's classes for these buckets."""
        divided = replace(
            self._layout_batch, program=self._layout_batch.program.with_segments(sizes)
        )
        return durations(self._problem, divided)[0]
