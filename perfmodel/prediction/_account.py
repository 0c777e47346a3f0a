"""Breaks a step's time down into disjoint, non-negative parts that add up to the step time.

Parts inside passes are seconds of the compute streams, means over pipeline ranks. Work beside the
passes counts as much as the step would be shorter without it: hidden time costs nothing. The bubble
is what remains.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from math import prod
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.ops import MemoryBound
from perfmodel.prediction._durations import StepProgram
from perfmodel.prediction._node_kinds import NodeKindShare
from perfmodel.prediction._problem import StepProblem, session_cached
from perfmodel.prediction._programs import Prepared, TimedProgram, prepared, rank_busy_s
from perfmodel.prediction._step_costs import has_whole_step_costs, overlap_loss, step_factors
from perfmodel.prediction.blocks import BlockTimes
from perfmodel.prediction.layer_copies import offloads_layers
from perfmodel.prediction.phases import PASS_KINDS, Phase
from perfmodel.program import Kind, is_of_kind
from perfmodel.spec import DIMENSIONS
from perfmodel.timeline import makespan
from perfmodel.workload import QUANTISING

ABLATIONS: Final[tuple[str, ...]] = (
    "step_overhead",
    "kernels_slowed_by_communication",
    "data_parallel_communication_exposed",
    "pipeline_communication_exposed",
    "host_copies_exposed",
)
"""Activities in the order in which they are removed from a step. The cost of each is the time by
which the step then becomes shorter. The first two are not events but parts of the optimizer and of
passes."""

_KINDS_OF_ACTIVITY: Final = {
    "data_parallel_communication_exposed": (
        Kind.GRAD_REDUCE,
        Kind.PARAM_GATHER,
        Kind.PARAM_GATHER_BACKWARD,
        Kind.EMBEDDING_REDUCE,
    ),
    "pipeline_communication_exposed": (Kind.SEND_FORWARD, Kind.SEND_BACKWARD),
    "host_copies_exposed": (Kind.OFFLOAD, Kind.RELOAD),
}
"""Classes that are nothing but one of the `ABLATIONS`."""

_COMMUNICATION = tuple(dict.fromkeys(d.name for d in DIMENSIONS if d.shards_blocks))
"""Dimensions whose collectives run inside passes."""


class Part(IntEnum):
    """Parts of a pass. The collectives of `_COMMUNICATION` have the places after RECOMPUTE."""

    FORWARD = 0
    BACKWARD = 1
    RECOMPUTE = 2
    GAPS = RECOMPUTE + len(_COMMUNICATION) + 1
    WAITING = GAPS + 1
    SLOWED = GAPS + 2
    CLOCK = GAPS + 3
    QUANTISING = GAPS + 4
    RUNS = GAPS + 5


# Kernels of a phase are counted as forward, backward or recompute; collectives of a block by their
# process group.
_PART_OF_PHASE = {
    Phase.FORWARD: Part.FORWARD,
    Phase.BACKWARD_INPUT: Part.BACKWARD,
    Phase.BACKWARD_WEIGHT: Part.BACKWARD,
    Phase.RECOMPUTE_SELECTIVE: Part.RECOMPUTE,
    Phase.RECOMPUTE_FULL: Part.RECOMPUTE,
}
_PLACE_OF = {name: Part.RECOMPUTE + 1 + i for i, name in enumerate(_COMMUNICATION)}
_PLACE_OF_GROUP = {d.key: _PLACE_OF[d.name] for d in DIMENSIONS if d.shards_blocks}


@dataclass(frozen=True, eq=False)
class Account:
    """The breakdown of a step's time."""

    breakdown_s: dict[str, float]
    """Mean seconds per pipeline rank by activity; sums to the step time.

    - `forward`, `backward`, `recompute`, `optimizer`: kernels, for as long as they run at the clock
      at which they were timed by themselves.
    - `clock_under_load`: by how much longer they run in passes at the clock that a training step
      sustains, within the power limit.
    - `kernels_slower_in_runs`: by how much longer than that they run by what runs of the site, or
      published ones, show; there where they show so. Runs that show faster kernels shorten the
      parts before instead.
    - `quantising`: kernels that bring operands to 8 or 4 bits (`Job.fp8_recipe`); there where
      products are so narrow.
    - `..._parallel_communication`: collectives inside passes, as far as they are not hidden behind
      kernels.
    - `kernel_launch_gaps`: inside passes, between kernels and where they wait for the host.
    - `waiting_for_slowest_rank`: collectives inside passes, for the last of their ranks.
    - `kernels_slowed_by_communication`: by how much kernels run longer beside collectives that they
      hide, of the passes themselves and of reductions and gathers of weights; of the latter, by how
      much shorter the step would be.
    - `data_parallel_communication_exposed`, `pipeline_communication_exposed`,
      `host_copies_exposed`: by how much the step would be shorter without reductions and gathers of
      weights; then without transfers between stages; then without copies to and from the host, of
      which those of single layers (`Layout.offload_layers`) are waited for inside passes.
    - `bubble`: what is left, idle time of the compute stream when none of these takes any time:
      what the order of the passes and the imbalance of the stages leave. A pipeline of one rank has
      none.
    - `waiting_for_input`: by how much input pipelines with a stated rate take longer than all the
      rest.
    - `generation`: stated seconds in which the devices generate the samples of the step.
    - `step_overhead`, `stragglers`, `beyond_all_parameters`: what measured runs showed beyond the
      events. Runs that are faster than their parameters say make every part shorter instead of the
      last of these negative.
    """
    kernels_s: float
    """Time of the kernels alone on the pipeline rank that runs them longest, each at the lower end
    of its interval and at the clock at which it was timed. No step can be shorter."""


def step_account(problem: StepProblem, programs: Sequence[StepProgram], step_s: float) -> Account:
    """Divide the time of one layout's step among activities.

    Args:
        problem: the step.
        programs: those that make up the step. Where steps are not flushed there are two, which are
            accounted for by themselves and weighted as their makespans are.
        step_s: the step time.
    """
    batch = programs[0].shares[0].batch
    layout = batch.layouts[0]
    spec = batch.spec
    on_kinds = problem.kinds or (problem,)

    # Stragglers, and what runs showed beyond all parameters, lengthen every part of the step alike.
    factors = [step_factors(on_kind, layout) for on_kind in on_kinds]
    slowest = max(stragglers for stragglers, _ in factors)
    beyond = max(beyond for _, beyond in factors)
    nominal_share = 1 / (slowest * max(1.0, beyond))

    taken_apart = [_Program.of(program) for program in programs]
    passes_s = np.sum([program.passes_s for program in taken_apart], axis=0)
    optimizer_s = np.sum([program.optimizer_s for program in taken_apart], axis=0)
    busy_s = float((passes_s.sum(axis=1) + optimizer_s).mean())

    exposed_s, step_without_s = _ablate(taken_apart, step_s)
    mean_s = (passes_s.mean(axis=0) * nominal_share).tolist()

    # In the order in which the account is printed. Activities that a step cannot have are left out,
    # not 0.
    result = _activities_of_passes(mean_s, trains=problem.job.mode == "train")
    result["kernels_slowed_by_communication"] = (
        mean_s[Part.SLOWED] + exposed_s["kernels_slowed_by_communication"] * nominal_share
    )
    result["optimizer"] = float(optimizer_s.mean()) * nominal_share
    result["data_parallel_communication_exposed"] = (
        exposed_s["data_parallel_communication_exposed"] * nominal_share
    )
    result["pipeline_communication_exposed"] = (
        exposed_s["pipeline_communication_exposed"] * nominal_share
    )
    if spec.offload or (layout.offload_layers and offloads_layers(problem, layout)):
        result["host_copies_exposed"] = exposed_s["host_copies_exposed"] * nominal_share
    if any(map(has_whole_step_costs, on_kinds)):
        without_overhead_s = step_without_s["step_overhead"]
        result["step_overhead"] = exposed_s["step_overhead"]
        result["stragglers"] = without_overhead_s * nominal_share * (slowest - 1)
        result["beyond_all_parameters"] = (
            without_overhead_s * nominal_share * slowest * (max(1.0, beyond) - 1)
        )

    # Idle time of the compute stream when none of these activities takes any time.
    result["bubble"] = max(0.0, step_without_s[ABLATIONS[-1]] - busy_s) * nominal_share
    alone_s = np.sum([program.alone_s for program in taken_apart], axis=0)
    return Account(
        breakdown_s=result, kernels_s=min(step_s, float(alone_s.max()) * min(1.0, beyond))
    )


def _activities_of_passes(mean_s: Sequence[float], *, trains: bool) -> dict[str, float]:
    """Seconds of what the passes consist of, in the order in which they are printed.

    Args:
        mean_s: mean seconds of a rank, by `Part`.
    """
    result = {"forward": mean_s[Part.FORWARD]}
    if trains:
        result |= {"backward": mean_s[Part.BACKWARD], "recompute": mean_s[Part.RECOMPUTE]}
    result["clock_under_load"] = mean_s[Part.CLOCK]
    if mean_s[Part.RUNS]:
        result["kernels_slower_in_runs"] = mean_s[Part.RUNS]
    if mean_s[Part.QUANTISING]:
        result["quantising"] = mean_s[Part.QUANTISING]
    for name, place in _PLACE_OF.items():
        result[f"{name}_communication"] = mean_s[place]
    result["kernel_launch_gaps"] = mean_s[Part.GAPS]
    result["waiting_for_slowest_rank"] = mean_s[Part.WAITING]
    return result


@dataclass(frozen=True, eq=False)
class _Program:
    """A program whose weighted makespan is part of the step time."""

    prepared: Prepared
    """Structure of the program."""
    weight: float
    """Weight of its makespan in the step time."""
    durations_s: dict[str, Float[np.ndarray, " classes"]]
    """Durations of the classes without each of `ABLATIONS` and those before it."""
    active: frozenset[str]
    """Activities whose removal changes the duration of some class."""
    passes_s: Float[np.ndarray, "ranks parts"]
    """Weighted seconds of a step on every rank's compute stream by `Part`."""
    optimizer_s: Float[np.ndarray, " ranks"]
    """Weighted seconds of the optimizer's step on every rank."""
    alone_s: Float[np.ndarray, " ranks"]
    """Kernels of passes and optimizer, timed alone and as fast as their intervals allow."""

    @classmethod
    def of(cls, step_program: StepProgram) -> "_Program":
        """Break down a program's time."""
        program, all_s, weight = step_program.timed
        seconds = _ClassSeconds.of(step_program)
        durations_s = _ablated_s(step_program, seconds)

        # Activities that change no duration cost nothing: their makespans need not be evaluated.
        active = set()
        before_s = all_s
        for activity, after_s in durations_s.items():
            if (after_s != before_s).any():
                active.add(activity)
            before_s = after_s

        optimizer = program.structure.class_kind == Kind.OPTIMIZER
        updates_s = np.where(optimizer, durations_s["step_overhead"], 0.0)
        count = weight * program.rank_count
        return cls(
            prepared=program,
            weight=weight,
            durations_s=durations_s,
            active=frozenset(active),
            passes_s=count @ seconds.parts_s,
            optimizer_s=count @ updates_s,
            alone_s=count @ seconds.alone_s,
        )


class _ClassSeconds(NamedTuple):
    """Parts of the duration of each class of a program."""

    parts_s: Float[np.ndarray, "classes parts"]
    """Seconds of passes, by `Part`."""
    waits_s: Float[np.ndarray, " classes"]
    """Seconds that passes wait for copies to and from the host."""
    overhead_s: Float[np.ndarray, " classes"]
    """Overhead of the step, which counts with the optimizer."""
    alone_s: Float[np.ndarray, " classes"]
    """Kernels of passes and optimizer, timed alone and as fast as their intervals allow."""

    @classmethod
    def of(cls, step_program: StepProgram) -> "_ClassSeconds":
        """Add up the kinds of nodes, each of which has the seconds of its own classes and 0 for all
        others."""
        kind = step_program.timed.prepared.structure.class_kind
        optimizer = kind == Kind.OPTIMIZER
        parts_s = waits_s = overhead_s = alone_s = np.zeros(())
        for share in step_program.shares:
            problem = share.problem
            events = share.events[0]
            factor = prod(step_factors(problem, share.batch.layouts[0]))
            parts_s = parts_s + _pass_seconds(share, _phase_parts) * factor
            waits_s = waits_s + share.copy_waits_s[0] * factor
            overhead_s = overhead_s + share.only(
                optimizer * problem.adjusted_framework.host.step_overhead_s
            )

            kernels_s = _pass_seconds(share, _alone_s).sum(axis=1)
            lowest_s = np.bincount(
                events.class_index, events.times.lo_s[events.op_index], minlength=len(kind)
            )
            alone_s = alone_s + kernels_s + np.where(optimizer, lowest_s, 0.0)
        return cls(parts_s, waits_s, overhead_s, alone_s)


def _ablated_s(
    step_program: StepProgram, seconds: _ClassSeconds
) -> dict[str, Float[np.ndarray, " classes"]]:
    """Durations of a program's classes without each of `ABLATIONS` and those before it."""
    kind = step_program.timed.prepared.structure.class_kind
    durations_s: dict[str, Float[np.ndarray, " classes"]] = {}
    remaining_s = step_program.timed.durations_s - seconds.overhead_s
    durations_s["step_overhead"] = remaining_s

    # Passes take as long as their parts, plus the slowdown by reductions and gathers that overlap
    # with them.
    if any(overlap_loss(share.problem) for share in step_program.shares):
        passes_s = np.sum(seconds.parts_s, axis=1) + seconds.waits_s
        remaining_s = np.where(is_of_kind(kind, PASS_KINDS), passes_s, remaining_s)
    durations_s["kernels_slowed_by_communication"] = remaining_s

    # The other activities are classes of their own, but for copies that passes wait for.
    for activity, kinds in _KINDS_OF_ACTIVITY.items():
        remaining_s = np.where(is_of_kind(kind, kinds), 0.0, remaining_s)
        durations_s[activity] = remaining_s
    durations_s["host_copies_exposed"] = remaining_s - seconds.waits_s
    return durations_s


def _ablate(
    programs: Sequence[_Program], step_s: float
) -> tuple[dict[str, float], dict[str, float]]:
    """The cost of each of `ABLATIONS`, and the step time without it and those before it.

    Args:
        step_s: the step time with all of them.
    """
    # Remove one activity after another; an activity costs as much as the step shortens by.
    exposed_s: dict[str, float] = {}
    step_without_s: dict[str, float] = {}
    remaining_s = step_s
    for activity in ABLATIONS:
        shortened_s = remaining_s
        if any(activity in program.active for program in programs):
            # In a stream of steps, the step is a difference of makespans and may grow, but a cost
            # may not be negative.
            shortened_s = min(_step_without_s(programs, activity), remaining_s)
        exposed_s[activity] = remaining_s - shortened_s
        step_without_s[activity] = remaining_s = shortened_s
    return exposed_s, step_without_s


def _step_without_s(programs: Sequence[_Program], activity: str) -> float:
    """The step time without an activity and without those before it in `ABLATIONS`."""
    without = [
        TimedProgram(program.prepared, program.durations_s[activity], program.weight)
        for program in programs
    ]
    weighted_s = [
        weight * float(makespan(program.compiled, durations_s))
        for program, durations_s, weight in without
    ]
    return max(sum(weighted_s), float(rank_busy_s(without).max()))


def _pass_seconds(
    share: NodeKindShare,
    of_phases: Callable[[StepProblem, BlockTimes, bool], Float[np.ndarray, "blocks phases parts"]],
) -> Float[np.ndarray, "classes parts"]:
    """Seconds of every class of passes on one kind of nodes, by part.

    Args:
        of_phases: seconds of the phases of blocks by part, given their times and whether passes are
            paired.
    """
    seconds_of_classes: list[tuple[np.ndarray, np.ndarray]] = []
    for times, paired, runs in share.passes:
        by_phase = of_phases(share.problem, times, paired)
        by_phase = by_phase.reshape(-1, by_phase.shape[-1])
        for _, classes, counts in runs:
            seconds_of_classes.append((classes, counts.reshape(-1, len(by_phase)) @ by_phase))
    n_parts = seconds_of_classes[0][1].shape[1]
    seconds = np.zeros((prepared(share.batch.spec).structure.n_classes, n_parts))
    for classes, of_classes in seconds_of_classes:
        seconds[classes] = of_classes
    return share.only(seconds)


@session_cached
def _alone_s(
    problem: StepProblem, table: BlockTimes, _paired: bool
) -> Float[np.ndarray, "blocks phases 1"]:
    """Seconds of the kernels of every phase of every block, timed alone and as fast as their
    intervals allow."""
    is_kernel = np.array([group == "" for group in table.groups], bool)
    # The lower end of the interval, at the clock at which the kernel was timed.
    fastest_s = np.where(
        is_kernel, table.times.lo_s / (table.clock_slowdown * table.slowdown_of_runs), 0.0
    )
    return (table.counts @ fastest_s)[:, :, None]


@session_cached
def _phase_parts(
    problem: StepProblem, table: BlockTimes, paired: bool
) -> Float[np.ndarray, "blocks phases parts"]:
    """Seconds of every phase of every block by part; for paired passes, only the time by which
    collectives outlast kernels.

    Together they are the duration of the passes, except for the costs of a step beyond its events.
    """
    parts_s = np.zeros((*table.gap_s.shape, max(Part) + 1))
    collective = np.array([group != "" for group in table.groups], bool)

    # Kernels: the shares that a lower clock and then runs add to each, casts to 8 or 4 bits, and
    # the rest by phase.
    slowdown = table.clock_slowdown * table.slowdown_of_runs
    slower = np.where(collective, 0.0, np.maximum(0.0, 1 - 1 / slowdown))
    slower_in_runs = np.clip(1 - 1 / table.slowdown_of_runs, 0.0, slower)
    quantising = np.array(
        [isinstance(op, MemoryBound) and op.op == QUANTISING for op in table.ops], bool
    )
    parts_s[:, :, Part.RUNS] = table.event_s @ slower_in_runs
    parts_s[:, :, Part.CLOCK] = table.event_s @ (slower - slower_in_runs)
    parts_s[:, :, Part.QUANTISING] = table.event_s[:, :, quantising] @ (1 - slower[quantising])
    apart_s = parts_s[:, :, [Part.CLOCK, Part.RUNS, Part.QUANTISING]].sum(axis=2)
    kernels_s = table.event_s[:, :, ~collective].sum(axis=2) - apart_s
    for phase, part in _PART_OF_PHASE.items():
        parts_s[:, phase, part] = kernels_s[:, phase]

    # Idle time and waits; collectives as far as nothing hides them.
    parts_s[:, :, Part.GAPS] = table.paired.gap_s if paired else table.gap_s
    parts_s[:, :, Part.WAITING] = table.waiting_s
    parts_s[:, :, Part.SLOWED] = table.paired.slowed_s if paired else table.slowed_s
    for i in np.flatnonzero(collective).tolist():
        parts_s[:, :, _PLACE_OF_GROUP[table.groups[i]]] += table.event_s[:, :, i]
    if paired:
        share = table.paired.collective_s / np.maximum(table.collective_s, 1e-300)
        parts_s[:, :, [*_PLACE_OF.values()]] *= share[:, :, None]
    return parts_s
