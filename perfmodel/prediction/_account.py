"""Where a step's time goes: disjoint parts, none negative, that add up to the step under every schedule and option."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import prod

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.ops import MemoryBound
from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._durations import OnKind
from perfmodel.prediction._layer_copies import offloads_layers
from perfmodel.prediction._phases import PHASES, Phase
from perfmodel.prediction._price import under_training_load
from perfmodel.prediction._problem import StepProblem, session_cached
from perfmodel.prediction._programs import Prepared, WeightedDurations, prepared, rank_busy_s
from perfmodel.prediction._step_costs import beside_loss, has_whole_step_costs, step_factors
from perfmodel.program import Kind
from perfmodel.spec import DIMENSIONS, Layout
from perfmodel.timeline import makespan
from perfmodel.workload import QUANTISING

_DP_KINDS = (Kind.GRAD_REDUCE, Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD, Kind.EMBEDDING_REDUCE)
_SEND_KINDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_COPY_KINDS = (Kind.OFFLOAD, Kind.RELOAD)


_COMMUNICATION = tuple(dict.fromkeys(d.name for d in DIMENSIONS if d.shards_blocks))
"""Dimensions whose collectives run inside passes."""


class Part(IntEnum):
    """What a pass consists of, beside the collectives of `_COMMUNICATION`, which have the places after RECOMPUTE."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    GAPS = RECOMPUTE + len(_COMMUNICATION) + 1
    WAITING = GAPS + 1
    SLOWED = GAPS + 2
    CLOCK = GAPS + 3
    QUANTISING = GAPS + 4


_PART_OF_PHASE = {
    Phase.FORWARD: Part.FORWARD, Phase.BACKWARD_INPUT: Part.BACKWARD, Phase.BACKWARD_WEIGHT: Part.BACKWARD,
    Phase.RECOMPUTE_SELECTIVE: Part.RECOMPUTE, Phase.RECOMPUTE_FULL: Part.RECOMPUTE,
}  # fmt: skip
_PLACE_OF = {name: Part.RECOMPUTE + 1 + i for i, name in enumerate(_COMMUNICATION)}
_PLACE_OF_GROUP = {d.key: _PLACE_OF[d.name] for d in DIMENSIONS if d.shards_blocks}


@dataclass(frozen=True, eq=False)
class Account:
    """A step's time, taken apart."""

    breakdown_s: dict[str, float]
    """Mean seconds per pipeline rank by activity; sums to the step time.

    - `forward`, `backward`, `recompute`, `optimizer`: kernels, for as long as they run at the clock at which they were
      timed by themselves.
    - `clock_under_load`: by how much longer they run in passes at the clock that a training step sustains, within the
      power limit.
    - `quantising`: kernels that bring operands to 8 or 4 bits (`Job.fp8_recipe`); there where products are so narrow.
    - `..._parallel_communication`: collectives inside passes, as far as they are not hidden behind kernels.
    - `kernel_launch_gaps`: inside passes, between kernels and where they wait for the host.
    - `waiting_for_slowest_rank`: collectives inside passes, for the last of their ranks.
    - `kernels_slowed_by_communication`: by how much kernels run longer beside collectives that they hide, of the passes
      themselves and of reductions and gathers of weights; of the latter, by how much shorter the step would be.
    - `data_parallel_communication_exposed`, `pipeline_communication_exposed`, `host_copies_exposed`: by how much the
      step would be shorter without reductions and gathers of weights;
      then without transfers between stages; then without copies to and from the host, of which those of single layers
      (`Layout.offload_layers`) are waited for inside passes.
    - `bubble`: what is left, idle time of the compute stream when none of these takes any time: what the order of the
      passes and the imbalance of the stages leave. A pipeline of one rank has none.
    - `step_overhead`, `stragglers`, `beyond_all_parameters`: what measured runs showed beyond the events. Runs that
      are faster than their parameters say make every part shorter instead of the last of these negative.
    """
    kernels_s: float
    """Kernels alone on the pipeline rank that runs them longest, each at the lower end of its own interval and at the
    clock at which it was timed by itself: what no step is shorter than."""


def step_account(
    problem: StepProblem, parts: Sequence[Sequence[OnKind]], programs: Sequence[WeightedDurations], step_s: float
) -> Account:
    """Take the step of one layout apart, from the parts of its programs and the durations that these have.

    Durations are taken away one kind after another; what the step shortens by is what the kind costs. Where steps are
    not flushed, programs of several steps are taken apart and weighted as their makespans are.
    """
    bundle = parts[0][0].bundle
    layout, spec = bundle.layouts[0], bundle.spec
    on_kinds = problem.kinds or (problem,)
    slowest, like = map(max, zip(*(_whole_step_factors(one, layout) for one in on_kinds), strict=True))
    usual = 1 / (slowest * max(1.0, like))
    taken = [_Program.of(*each) for each in zip(parts, programs, strict=True)]
    passes_s = np.sum([p.passes_s for p in taken], axis=0)
    optimizer_s = np.sum([p.optimizer_s for p in taken], axis=0)
    busy_s = float((passes_s.sum(axis=1) + optimizer_s).mean())
    lengths_s = [step_s]
    for left in range(5):
        shorter_s = _length_s(taken, left) if _changes(taken, left) else lengths_s[-1]
        lengths_s.append(min(shorter_s, lengths_s[-1]))  # a difference of streams may not shorten
    overhead_s, slowed_s, dp_s, sends_s, copies_s = (a - b for a, b in pairwise(lengths_s))

    mean_s = (passes_s.mean(axis=0) * usual).tolist()
    training = problem.job.mode == "train"
    result = {"forward": mean_s[Part.FORWARD]}
    if training:
        result |= {"backward": mean_s[Part.BACKWARD], "recompute": mean_s[Part.RECOMPUTE]}
    result["clock_under_load"] = mean_s[Part.CLOCK]
    if mean_s[Part.QUANTISING]:
        result["quantising"] = mean_s[Part.QUANTISING]
    result |= {f"{name}_communication": mean_s[place] for name, place in _PLACE_OF.items()}
    result["kernel_launch_gaps"] = mean_s[Part.GAPS]
    result["waiting_for_slowest_rank"] = mean_s[Part.WAITING]
    result["kernels_slowed_by_communication"] = mean_s[Part.SLOWED] + slowed_s * usual
    result["optimizer"] = float(optimizer_s.mean()) * usual
    result["data_parallel_communication_exposed"] = dp_s * usual
    result["pipeline_communication_exposed"] = sends_s * usual
    if spec.offload or offloads_layers(problem, layout):
        result["host_copies_exposed"] = copies_s * usual
    if any(map(has_whole_step_costs, on_kinds)):
        result["step_overhead"] = overhead_s
        result["stragglers"] = lengths_s[1] * usual * (slowest - 1)
        result["beyond_all_parameters"] = lengths_s[1] * usual * slowest * (max(1.0, like) - 1)
    result["bubble"] = max(0.0, lengths_s[-1] - busy_s) * usual
    alone_s = np.sum([p.alone_s for p in taken], axis=0)
    return Account(breakdown_s=result, kernels_s=min(step_s, float(alone_s.max()) * min(1.0, like)))


@dataclass(frozen=True, eq=False)
class _Program:
    """A program whose weighted makespan is part of the step time."""

    prepared: Prepared
    weight: float
    durations_s: tuple[Float[np.ndarray, " classes"], ...]
    """Without the step's overhead; also without what reductions and gathers cost the passes beside them; without
    these; without transfers; without copies."""
    whole_s: Float[np.ndarray, " classes"]
    passes_s: Float[np.ndarray, "ranks parts"]
    """Weighted seconds of a step on every rank's compute stream by `Part`."""
    optimizer_s: Float[np.ndarray, " ranks"]
    alone_s: Float[np.ndarray, " ranks"]
    """Kernels of both, timed alone and as fast as their intervals allow."""

    @classmethod
    def of(cls, parts: Sequence[OnKind], durations: WeightedDurations) -> "_Program":
        program, whole_s, weight = durations
        kind = program.structure.class_kind
        optimizer = kind == Kind.OPTIMIZER
        left = [whole_s.copy()]
        parts_s = alone_s = waits_s = 0.0
        for part in parts:
            own, events = part.problem, part.events[0]
            factor = prod(_whole_step_factors(own, part.bundle.layouts[0]))
            parts_s = parts_s + _of_passes(part, _phase_parts) * factor
            waits_s = waits_s + part.copy_waits_s * factor
            left[0] -= part.only(optimizer * own.host.step_overhead_s)
            lowest_s = np.bincount(events.class_index, events.times.lo_s[events.op_index], minlength=len(kind))
            kernels_s = _of_passes(part, _alone_s).sum(axis=1)
            alone_s = alone_s + kernels_s + np.where(optimizer, lowest_s, 0.0)
        slowed = any(beside_loss(part.problem) for part in parts)
        passes_s = np.sum(parts_s, axis=1) + waits_s
        left.append(np.where(_of_kinds(PHASES)[kind], passes_s, left[0]) if slowed else left[0])
        for kinds in (_DP_KINDS, _SEND_KINDS, _COPY_KINDS):
            left.append(np.where(_of_kinds(kinds)[kind], 0.0, left[-1]))
        left[-1] = left[-1] - waits_s
        count = weight * program.rank_count
        updates_s = np.where(optimizer, left[0], 0.0)
        return cls(program, weight, tuple(left), whole_s, count @ parts_s, count @ updates_s, count @ alone_s)


def _length_s(programs: list[_Program], left: int) -> float:
    """The step with what is left in it."""
    spans = (p.weight * float(makespan(p.prepared.compiled, p.durations_s[left])) for p in programs)
    busy_s = rank_busy_s((p.prepared, p.durations_s[left], p.weight) for p in programs)
    return max(sum(spans), float(busy_s.max()))


def _changes(programs: list[_Program], left: int) -> bool:
    """Whether taking away the next kind changes any duration at all."""
    return any((p.durations_s[left] != (p.durations_s[left - 1] if left else p.whole_s)).any() for p in programs)


def _of_kinds(kinds: Iterable[Kind]) -> Bool[np.ndarray, " Kind"]:
    """Which kinds of classes are among some."""
    found = np.zeros(len(Kind), bool)
    found[list(kinds)] = True
    return found


def _whole_step_factors(problem: StepProblem, layout: Layout) -> tuple[float, float]:
    """`step_factors`, where anything makes the step longer as a whole."""
    return step_factors(problem, layout) if has_whole_step_costs(problem) else (1.0, 1.0)


def _of_passes(
    part: OnKind,
    of_phases: Callable[[StepProblem, BlockTimes, bool], Float[np.ndarray, "blocks phases parts"]],
) -> Float[np.ndarray, "classes parts"]:
    """Seconds of every class of passes on one kind of nodes by part, from those of the phases of blocks (and whether
    passes are paired)."""
    found: list[tuple[np.ndarray, np.ndarray]] = []
    for table, paired, classes in part.passes:
        by_phase = of_phases(part.problem, table, paired)
        by_phase = by_phase.reshape(-1, by_phase.shape[-1])
        found += [(where, counts.reshape(-1, len(by_phase)) @ by_phase) for where, counts in classes]
    out = np.zeros((prepared(part.bundle.spec).structure.n_classes, found[0][1].shape[1]))
    for where, seconds in found:
        out[where] = seconds
    return part.only(out)


@session_cached
def _alone_s(problem: StepProblem, table: BlockTimes, _paired: bool) -> Float[np.ndarray, "blocks phases 1"]:
    """Seconds of the kernels of every phase of every block, timed alone and as fast as their intervals allow."""
    kernel = np.array([group == "" for group in table.groups], bool)
    return (table.counts @ np.where(kernel, table.times.lo_s / under_training_load(problem, table.ops), 0.0))[
        :, :, None
    ]


@session_cached
def _phase_parts(problem: StepProblem, table: BlockTimes, paired: bool) -> Float[np.ndarray, "blocks phases parts"]:
    """Seconds of every phase of every block by part; of a pair's collectives only what outlasts the kernels.

    Together they are what passes last, but for what a step costs beyond its events.
    """
    out = np.zeros((*table.gap_s.shape, max(Part) + 1))
    collective = np.array([group != "" for group in table.groups], bool)
    slower = np.where(collective, 0.0, np.maximum(0.0, 1 - 1 / under_training_load(problem, table.ops)))
    quantising = np.array([isinstance(op, MemoryBound) and op.op == QUANTISING for op in table.ops], bool)
    out[:, :, Part.CLOCK] = table.event_s @ slower
    out[:, :, Part.QUANTISING] = table.event_s[:, :, quantising] @ (1 - slower[quantising])
    kernels_s = table.event_s[:, :, ~collective].sum(axis=2) - out[:, :, Part.CLOCK] - out[:, :, Part.QUANTISING]
    for phase, part in _PART_OF_PHASE.items():
        out[:, phase, part] = kernels_s[:, phase]
    out[:, :, Part.GAPS] = table.paired.gap_s if paired else table.gap_s
    out[:, :, Part.WAITING] = table.waiting_s
    out[:, :, Part.SLOWED] = table.paired.slowed_s if paired else table.slowed_s
    for i in np.flatnonzero(collective).tolist():
        out[:, :, _PLACE_OF_GROUP[table.groups[i]]] += table.event_s[:, :, i]
    if paired:
        share = table.paired.collective_s / np.maximum(table.collective_s, 1e-300)
        out[:, :, [*_PLACE_OF.values()]] *= share[:, :, None]
    return out
