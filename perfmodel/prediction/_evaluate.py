"""Evaluates step times of layouts from the durations of their classes.

One by one in double precision with gradients, by the thousand in single precision, and with
derivatives with respect to parameters of runs and machines.
"""

from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._compose import LayoutBatch, joined, layout_batches, weighted_programs
from perfmodel.prediction._durations import durations
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import PartitionedProgram, TimedProgram, prepared, rank_busy_s
from perfmodel.prediction.sites import Adjustment
from perfmodel.program import ProgramSpec, Structure
from perfmodel.session import current_session
from perfmodel.spec import Layout
from perfmodel.spec.notation import PerRank
from perfmodel.timeline import (
    CompiledStructure,
    ProgramBatch,
    makespan,
    makespan_and_grad,
    makespan_many,
)

PART_OPS: Final = 1_500_000
"""Most ops that are evaluated in one call, which takes about 20 ms."""


@dataclass(frozen=True, eq=False)
class BatchResult:
    """Step time of many layouts, in the caller's order."""

    step_time_s: Float[np.ndarray, " layouts"]


class _Weighted(NamedTuple):
    """Layouts with one program whose makespans enter their step times with a weight."""

    layouts: LayoutBatch
    weight: float


def evaluate(problem: StepProblem, layouts: Sequence[Layout]) -> BatchResult:
    """Step time of every layout by full evaluation of its schedule (float32)."""
    groups = _by_program(problem, layouts)
    specs = tuple(map(_specs, groups))
    batches = current_session().batches.get_or_compute(specs, lambda: _batches(specs))

    # The loops over one part's events run in a thread while the next part's durations are composed.
    spans: list[Future[Any]] = []
    without_flush: list[tuple[_Weighted, np.ndarray]] = []
    with ThreadPoolExecutor(1) as loops:
        for part, batch in batches:
            timed: list[tuple[_Weighted, np.ndarray]] = []
            for group in groups[part]:
                timed += zip(group, _durations_s(problem, group), strict=True)
            durations_s = [seconds.astype(np.float32) for _, seconds in timed]
            spans.append(loops.submit(makespan_many, batch, durations_s))
            without_flush += [item for item in timed if item[0].layouts.spec.steps > 1]
        # Results are waited for here: an interrupt while an executor joins its thread would leave
        # that running.
        spans_s = list(chain.from_iterable(part.result() for part in spans))

    # A step is the weighted sum of its programs' makespans, which come in the order of the groups,
    # and no shorter than the work of its busiest rank or than the arrival of its samples.
    time_s = np.zeros(len(layouts))
    for member, span_s in zip(chain.from_iterable(groups), spans_s, strict=True):
        time_s[list(member.layouts.lanes)] += member.weight * span_s
    for lanes, busy_s in _busy_s_per_step(without_flush).items():
        time_s[list(lanes)] = np.maximum(time_s[list(lanes)], busy_s.max(axis=1))
    return BatchResult(np.maximum(time_s, problem.job.input_s) + problem.job.generation_s)


def _by_program(problem: StepProblem, layouts: Sequence[Layout]) -> list[list[_Weighted]]:
    """The layouts in groups whose durations are composed in one call: those of equal programs."""
    groups: dict[tuple[PartitionedProgram, PerRank], list[_Weighted]] = defaultdict(list)
    for whole_step in layout_batches(problem, layouts):
        for layout_batch, weight in weighted_programs(whole_step):
            key = (layout_batch.program.canonical, layout_batch.layouts[0].kinds)
            groups[key].append(_Weighted(layout_batch, weight))
    return list(groups.values())


def _specs(group: Sequence[_Weighted]) -> tuple[ProgramSpec, ...]:
    """The program of each member of a group."""
    return tuple(member.layouts.spec for member in group)


def _durations_s(
    problem: StepProblem, group: Sequence[_Weighted]
) -> list[Float[np.ndarray, "layouts classes"]]:
    """Durations of the classes of each member of a group with one program."""
    seconds = durations(problem, joined([member.layouts for member in group]))
    ends = np.cumsum([len(member.layouts.lanes) for member in group])
    return np.split(seconds, ends[:-1])


def _busy_s_per_step(
    members: Sequence[tuple[_Weighted, Float[np.ndarray, "layouts classes"]]],
) -> dict[tuple[int, ...], Float[np.ndarray, "layouts ranks"]]:
    """Seconds that each rank works per step, by lanes, from the durations of their programs."""
    busy_s: dict[tuple[int, ...], np.ndarray] = {}
    for (layout_batch, weight), seconds in members:
        program = TimedProgram(prepared(layout_batch.spec), seconds, weight)
        lanes = layout_batch.lanes
        busy_s[lanes] = busy_s.get(lanes, 0.0) + rank_busy_s([program])
    return busy_s


def _batches(specs: Sequence[Sequence[ProgramSpec]]) -> list[tuple[slice, ProgramBatch]]:
    """Join programs for evaluation, in groups with about the same number of ops."""
    groups: list[list[CompiledStructure]] = []
    ops_of_group: list[int] = []
    for group in specs:
        programs = [prepared(spec).compiled for spec in group]
        groups.append(programs)
        ops_of_group.append(sum(program.n_ops for program in programs))

    # Parts of about as many ops overlap best: one is evaluated while the durations of the next are
    # composed.
    part_of_group = np.cumsum(ops_of_group) // PART_OPS
    bounds = np.flatnonzero(np.diff(part_of_group, prepend=-1, append=-1)).tolist()
    batches = []
    for start, end in pairwise(bounds):
        joined_programs = tuple(chain.from_iterable(groups[start:end]))
        batches.append((slice(start, end), ProgramBatch(joined_programs)))
    return batches


def step_programs(problem: StepProblem, layouts: Sequence[Layout]) -> list[list[TimedProgram]]:
    """Programs that make up the step of each layout."""
    programs_of_layout: list[list[TimedProgram]] = [[] for _ in layouts]
    for whole_step in layout_batches(problem, layouts):
        for layout_batch, weight in weighted_programs(whole_step):
            program = prepared(layout_batch.spec)
            for lane, seconds in zip(
                whole_step.lanes, durations(problem, layout_batch), strict=True
            ):
                programs_of_layout[lane].append(TimedProgram(program, seconds, weight))
    return programs_of_layout


def step_time_s(programs: Sequence[TimedProgram]) -> float:
    """Step time (float64) of the programs that make up a step."""
    spans_s = 0.0
    for program, durations_s, weight in programs:
        spans_s += weight * float(makespan(program.compiled, durations_s))
    return max(spans_s, float(rank_busy_s(programs).max()))


def step_times_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Step time of each layout in float64, one by one (use `evaluate` for thousands)."""
    steps = step_programs(problem, layouts)
    return np.array([problem.job.paced_s(step_time_s(programs)) for programs in steps])


def step_gradients(
    programs: Sequence[TimedProgram],
) -> tuple[float, list[Float[np.ndarray, " classes"]]]:
    """Step time, and the gradient of each program's makespan with respect to class durations."""
    step_s = 0.0
    gradients = []
    for program, durations_s, weight in programs:
        span, gradient = makespan_and_grad(program.compiled, durations_s)
        step_s += weight * float(span)
        gradients.append(np.asarray(gradient, float))

    # Where the busiest rank sets the step, the derivatives are those of its time.
    busy_s = rank_busy_s(programs)
    if busy_s.max() > step_s * (1 + 1e-12):
        busiest = busy_s.argmax()
        counts = [program.prepared.rank_count[busiest] for program in programs]
        return float(busy_s.max()), counts
    return step_s, gradients


class StepGradient(NamedTuple):
    """A step time with its gradient, by the classes of its (first) program."""

    step_s: float
    """Seconds of the step, before it waits for input."""
    gradient: Float[np.ndarray, " classes"]
    """Derivative of the step time with respect to the duration of each class: how often it lies on
    the critical path."""
    compute_count: Float[np.ndarray, " classes"]
    """Occurrences of each class on compute streams."""


def per_step(programs: Sequence[TimedProgram]) -> StepGradient:
    """The step time of the programs that make up a step, with its gradient."""
    step_s, gradients = step_gradients(programs)
    first = programs[0].prepared
    if len(programs) == 1:
        return StepGradient(step_s, gradients[0], first.compute_count)

    # Programs of fewer or more steps have the same classes, but may number them otherwise.
    classes = {key: i for i, key in enumerate(_class_keys(first.structure))}
    of_step, count = np.zeros((2, len(classes)))
    for (program, _, weight), gradient in zip(programs, gradients, strict=True):
        index = [classes[key] for key in _class_keys(program.structure)]
        of_step += weight * np.bincount(index, gradient, len(classes))
        count += weight * np.bincount(index, program.compute_count, len(classes))
    return StepGradient(step_s, of_step, count)


def _class_keys(structure: Structure) -> list[tuple[int, ...]]:
    """Kind, stage, segment and variant of every class."""
    variants = structure.variants[structure.class_variant].T
    columns = (structure.class_kind, structure.class_stage, structure.class_segment, *variants)
    return list(zip(*(column.tolist() for column in columns), strict=True))


# --- derivatives with respect to parameters of runs and machines
# ---------------------------------------------------
#
# d T / d parameter = sum over classes of (d T / d duration) (d duration / d parameter). The first
# factor is the gradient of the makespan; the second, of the arithmetic that composes durations from
# events, is a difference quotient: that arithmetic is smooth but for switches between
# compute-bound, launch-bound and hidden, which a step that small does not meet.
#
# `perfmodel.prediction.differentiable` traces the same arithmetic. These derivatives do not use it
# for two reasons. A fit needs them at hundreds of layouts, each of which would compile another
# program (seconds, against milliseconds here). And it lacks some parameters: latency and volume by
# kind of collective, losses, skew, another machine.

_STEP: Final = 1e-6
"""Change of a parameter for finite differences."""


@dataclass(frozen=True, eq=False)
class StepDerivatives:
    """Step times of layouts, with their derivatives with respect to parameters."""

    step_s: Float[np.ndarray, " layouts"]
    """Step time of each layout."""
    by_parameter: Float[np.ndarray, "layouts parameters"]
    """d step time / d parameter [s]."""
    durations_s: tuple[Float[np.ndarray, " classes"], ...]
    """Seconds of the classes of each layout's (first) program."""
    durations_by_parameter: tuple[Float[np.ndarray, "parameters classes"], ...]
    """d duration / d parameter [s] of these."""


def step_derivatives(
    problem: StepProblem, layouts: Sequence[Layout], names: Sequence[str]
) -> StepDerivatives:
    """Step times and their derivatives with respect to named parameters, at the problem's
    adjustment."""
    adjustment = problem.adjustment or Adjustment(device=problem.cluster.device.name, values=())
    moved = [problem.adjusted(adjustment.moved(name, _STEP)) for name in names]
    return derivatives_towards(problem, layouts, moved, _STEP)


def derivatives_towards(
    problem: StepProblem, layouts: Sequence[Layout], moved: Sequence[StepProblem], step: float
) -> StepDerivatives:
    """Step times and finite-difference derivatives; each problem in `moved` has one parameter
    increased by `step`."""
    programs_of_layouts = step_programs(problem, layouts)
    moved_programs = [step_programs(moved_problem, layouts) for moved_problem in moved]
    step_s = np.zeros(len(layouts))
    by_parameter = np.zeros((len(layouts), len(moved)))
    durations_s, durations_by_parameter = [], []
    for lane, programs in enumerate(programs_of_layouts):
        step_s[lane], gradients = step_gradients(programs)
        for place, ((_, seconds, weight), gradient) in enumerate(
            zip(programs, gradients, strict=True)
        ):
            # d T / d parameter: the gradient of the makespan times the difference quotients of the
            # durations.
            moved_seconds = [of_layouts[lane][place].durations_s for of_layouts in moved_programs]
            slopes = np.array([(of_moved - seconds) / step for of_moved in moved_seconds])
            by_parameter[lane] += [weight * float(gradient @ slope) for slope in slopes]
            if place == 0:
                durations_s.append(seconds)
                durations_by_parameter.append(slopes.reshape(len(moved), len(seconds)))
    return StepDerivatives(step_s, by_parameter, tuple(durations_s), tuple(durations_by_parameter))
