"""Gradient relaxation of a layout's launch settings: layers per stage, recomputed layers and
micro-batch size together.

The step and the memory of `perfmodel.step_time_function` are relaxed down the timeline's gradient;
its ends are rounded to layouts, and single changes of these are evaluated exactly until none is
better. Dynamic programming knows the step by a formula of plain pipelines and one micro-batch size;
the gradient knows it for every schedule that flushes.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from perfmodel.display import shorten_reprs
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._contiguous import NothingFitsError
from perfmodel.planning.optimise._partition import (
    PartitionResult,
    exact_steps_s,
    layers_per_stage,
    partition_certificate,
)
from perfmodel.planning.optimise._pipeline import descend, neighbours
from perfmodel.planning.optimise._relax import Relaxation, Values, relax
from perfmodel.planning.optimise._variables import Box, Variable, WholeShares
from perfmodel.prediction import StepProblem, explain, layout_batches
from perfmodel.prediction.differentiable import (
    Memory,
    Programs,
    StepParameters,
    between_sizes,
    greatest,
    possible_micro_batches,
    step_time_function_of,
)
from perfmodel.spec import Layout

_STARTS: Final = 8
_STEPS: Final = 150


@dataclass(frozen=True)
class LaunchChoices:
    """The settings of a launch that may change, besides degrees and schedule."""

    micro_batches: tuple[int, ...]
    """Sequences of a micro-batch."""
    recomputes: tuple[str, ...] = ("none", "selective")
    """Recomputation of layers that do not recompute in full: `none`, `selective`, or both. Empty
    where all layers must recompute in full."""
    full_layers: bool = True
    """Whether some layers of a stage may recompute in full."""
    by_stage: bool = True
    """Whether this number may differ between stages. Otherwise one number holds for all stages, and
    the other layers recompute nothing (Megatron-LM's recompute method `block`)."""


def relax_layout(problem: StepProblem, layout: Layout, choices: LaunchChoices) -> PartitionResult:
    """Improve a layout by relaxation and single changes; the result is never slower.

    Args:
        problem: model, job, cluster and cost models.
        layout: a pipeline whose schedule flushes, with at least as many layers as stages.
        choices: values that may be chosen.

    Raises:
        LayoutError: nothing to relax, or nothing that fits into memory.
    """
    began = time.perf_counter()
    (batch,) = layout_batches(problem, [layout])
    partitioned = layout.replace(partition=layers_per_stage(batch))
    ends = relaxed_layouts(problem, layout, choices)

    def moves(layout: Layout) -> Iterable[Layout]:
        return changed_once(layout, choices, trains=problem.job.mode == "train")

    def steps_s(layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
        return exact_steps_s(problem, layouts)

    try:
        end = descend(list(dict.fromkeys([partitioned, *ends])), moves, steps_s)
    except NothingFitsError:
        raise LayoutError(
            f"the relaxation found no combination of stages, recomputation and micro-batch with which {layout.label} "
            "fits into memory"
        ) from None
    (given_s,) = steps_s([partitioned]).tolist()
    return PartitionResult(
        prediction=explain(problem, end.best),
        given_s=explain(problem, partitioned).step_time_s if np.isfinite(given_s) else None,
        certificate=partition_certificate(problem, end.best),
        evaluated=end.evaluated,
        seconds=time.perf_counter() - began,
    )


def relaxed_layouts(problem: StepProblem, layout: Layout, choices: LaunchChoices) -> list[Layout]:
    """Layouts rounded from a relaxation with several starts, the fastest that fits first.

    Args:
        problem, layout, choices: as for `relax_layout`.

    Raises:
        LayoutError: no stages to cut, a schedule without a flush, or copies of single layers to the
            host, which are planned for the layers as they are.
    """
    # Full recompute is a share of layers here; the other layers use a recompute mode that a launch
    # may state beside it.
    kinds = choices.recomputes or (layout.recompute,)
    recompute_kind = layout.recompute if layout.recompute in kinds else kinds[-1]
    if choices.full_layers and not choices.by_stage:
        recompute_kind = "none"
    base = layout.replace(partition=None, recompute_full_layers=None, recompute=recompute_kind)
    sizes = possible_micro_batches(problem, base, choices.micro_batches)
    function = step_time_function_of(problem, base, vary="layout", micro_batches=sizes)
    nominal, programs = function.nominal, function.programs
    stages = len(nominal.layers)
    layers = int(nominal.layers.sum())
    flushes = len(programs.steps) == len(sizes)
    if stages == 1 or not flushes or layers < stages or programs.offloads_layers:
        raise LayoutError(
            f"layout {layout.label} has no pipeline stages to divide unevenly; use pp > 1"
        )

    variables: dict[str, Variable] = {"layers": WholeShares(stages, layers, least=1)}
    if len(sizes) > 1:
        variables["micro_batch"] = Box((1,), sizes[0], sizes[-1], log=True)
    recomputes = choices.full_layers and problem.job.mode == "train"
    if recomputes:
        variables["recompute"] = Box((stages if choices.by_stage else 1,), 0.0, 1.0)
    constants = {
        "tables": function.tables,
        "nominal": nominal,
        "times": function.times,
        "log_sizes": function.log_sizes,
        "usable_bytes": np.float64(function.usable_bytes),
    }
    relaxation = Relaxation(
        variables, _Step(programs), _Durations(programs), constants, _MemoryLimit(function.memory)
    )
    ends = relax(relaxation, n_starts=_STARTS, steps=_STEPS).starts

    # Ends that break the memory's limit come last: rounding may mend them. A relaxed share never
    # becomes 0, so that each is tried without full recompute too.
    layouts: list[Layout] = []
    for end in sorted(ends, key=lambda end: (max(end.excess, 0.0), end.objective)):
        layout_at_end = rounded_layout(base, end.values, sizes, choices)
        layouts += [layout_at_end, layout_at_end.replace(recompute_full_layers=None)]
    return list(dict.fromkeys(layouts))


def rounded_layout(
    base: Layout, values: Values, sizes: Sequence[int], choices: LaunchChoices
) -> Layout:
    """Round relaxed values to the nearest layout that a launch can state."""
    partition = tuple(map(int, values["layers"]))
    micro_batch = base.micro_batch
    if "micro_batch" in values:
        distance = np.abs(np.log(sizes) - np.log(values["micro_batch"][0]))
        micro_batch = sizes[int(distance.argmin())]

    # Layers that recompute are rounded up, since memory is what they are for.
    full_layers = None
    if "recompute" in values:
        shares = np.asarray(values["recompute"], float)
        layers = partition if choices.by_stage else max(partition)
        stage_layers = np.ceil(shares * layers - 1e-3).astype(int)
        full_layers = tuple(stage_layers.tolist()) if stage_layers.any() else None
    return base.replace(
        partition=partition, micro_batch=micro_batch, recompute_full_layers=full_layers
    )


def changed_once(layout: Layout, choices: LaunchChoices, *, trains: bool) -> Iterable[Layout]:
    """Layouts with one change: a layer moved or recomputed, or another micro-batch size."""
    yield from _layer_moved(layout)
    yield from _other_micro_batch(layout, choices)
    if trains:
        yield from _other_recompute(layout, choices)
        yield from _layer_recomputed(layout, choices)


def _layer_moved(layout: Layout) -> Iterable[Layout]:
    """Yield the layouts in which one layer stands in the neighbouring stage."""
    full_layers = layout.recompute_full_layers
    for partition in neighbours(layout.partition or ()):
        # A stage cannot recompute more layers than it has.
        fewer = full_layers
        if full_layers is not None and len(full_layers) == len(partition):
            fewer = tuple(
                min(full, layers) for full, layers in zip(full_layers, partition, strict=True)
            )
        yield layout.replace(partition=partition, recompute_full_layers=fewer)


def _other_micro_batch(layout: Layout, choices: LaunchChoices) -> Iterable[Layout]:
    """The next smaller and the next larger size."""
    sizes = sorted({layout.micro_batch, *choices.micro_batches})
    place = sizes.index(layout.micro_batch)
    for size in sizes[max(0, place - 1) : place + 2]:
        if size != layout.micro_batch:
            yield layout.replace(micro_batch=size)


def _other_recompute(layout: Layout, choices: LaunchChoices) -> Iterable[Layout]:
    """The layout under every other recompute policy that a launch may choose."""
    # Beside layers that recompute in full, frameworks without a number per stage have no other mode
    # for the rest.
    may_differ = choices.by_stage or layout.recompute_full_layers is None
    for kind in choices.recomputes:
        if kind != layout.recompute and (kind == "none" or may_differ):
            yield layout.replace(recompute=kind)


def _layer_recomputed(layout: Layout, choices: LaunchChoices) -> Iterable[Layout]:
    """One layer more or less that recomputes in full, in one stage or in all alike."""
    may_recompute = layout.recompute == "none" or (choices.by_stage and layout.recompute != "full")
    if not choices.full_layers or not may_recompute:
        return
    partition = layout.partition or ()
    # With one number for all stages, a stage with fewer layers recomputes all that it has.
    limits = partition if choices.by_stage else (max(partition),)
    numbers = _numbers(layout.recompute_full_layers, len(limits))
    for stage, number_of_stage in enumerate(numbers):
        for number in (number_of_stage - 1, number_of_stage + 1):
            if 0 <= number <= limits[stage]:
                changed = (*numbers[:stage], number, *numbers[stage + 1 :])
                yield layout.replace(recompute_full_layers=changed if any(changed) else None)


def shares_of_stages(
    share: Float[Array, ""], layers: Float[Array, " stages"]
) -> Float[Array, " stages"]:
    """Shares of layers that recompute in full, where all stages have one number of them.

    Args:
        share: number of recomputed layers, as a share of the longest stage's layers.
        layers: layers of every stage. A stage with fewer than that number recomputes all of them.
    """
    return jnp.minimum(share * greatest(layers) / layers, 1.0)


def _numbers(full_layers: tuple[int, ...] | None, n: int) -> tuple[int, ...]:
    """Layers that recompute in full, one number for each of `n` stages, also if one number or None
    holds for all."""
    if full_layers is None:
        return (0,) * n
    return full_layers if len(full_layers) == n else full_layers[:1] * n


def _parameters(values: Values) -> StepParameters:
    """Parameters of a step at some values of the unknowns; all other parameters stay unchanged."""
    x: StepParameters = values["nominal"]._replace(layers=values["layers"])
    if "micro_batch" in values:
        x = x._replace(micro_batch=values["micro_batch"][0])
    if "recompute" in values:
        shares = values["recompute"]
        if shares.shape != x.layers.shape:
            shares = shares_of_stages(shares[0], x.layers)
        x = x._replace(recompute=shares)
    return x


@dataclass(frozen=True)
class _Durations:
    programs: Programs

    def __call__(self, values: Values) -> Float[Array, " classes"]:
        return self.programs.durations(values["tables"], _parameters(values), values["times"])


@dataclass(frozen=True)
class _Step:
    """The step at a micro-batch size between those of the programs."""

    programs: Programs

    @property
    def n_classes(self) -> int:
        return self.programs.starts[-1]

    def span_s(self, values: Values, durations: Float[Array, " classes"]) -> Float[Array, ""]:
        micro_batch = jnp.asarray(_parameters(values).micro_batch)
        return between_sizes(self.programs.step_s(durations), micro_batch, values["log_sizes"])


@dataclass(frozen=True)
class _MemoryLimit:
    """The limit that no rank's peak exceeds its device's usable memory."""

    memory: Memory

    def __call__(self, values: Values) -> Float[Array, " ranks"]:
        return self.memory.bytes(_parameters(values)) / values["usable_bytes"] - 1.0


shorten_reprs(__name__)
