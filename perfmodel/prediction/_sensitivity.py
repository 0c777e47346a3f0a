"""Derivatives of step times by the parameters of runs and machines, through the timeline.

d T / d parameter = sum over classes of (d T / d duration) (d duration / d parameter). The first factor is the
gradient of the makespan; the second, of the arithmetic that composes durations from events, is a difference quotient:
that arithmetic is smooth but for switches between compute-bound, launch-bound and hidden, which a step that
small does not meet.

`perfmodel.prediction.differentiable` traces the same arithmetic. These derivatives do not rest on it, as a fit asks for
them at hundreds of layouts, each a program to compile once more (seconds, against milliseconds here), and towards
parameters that it does not have: latency and volume by kind of collective, losses, skew, another machine altogether.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._adjustment import Adjustment
from perfmodel.prediction._compose import bundles, weighted_programs
from perfmodel.prediction._durations import durations
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import Prepared, prepared, rank_busy_s
from perfmodel.spec import Layout
from perfmodel.timeline import makespan_and_grad

_STEP = 1e-6


@dataclass(frozen=True, eq=False)
class StepDerivatives:
    """Step times of layouts and how they move with parameters."""

    step_s: Float[np.ndarray, " layouts"]
    by_parameter: Float[np.ndarray, "layouts parameters"]
    """d step time / d parameter [s]."""
    prepared: tuple[Prepared, ...]
    """Program of each layout."""
    durations_s: tuple[Float[np.ndarray, " classes"], ...]
    durations_by_parameter: tuple[Float[np.ndarray, "parameters classes"], ...]


@dataclass(frozen=True, eq=False)
class _Program:
    lane: int
    prepared: Prepared
    weight: float
    durations_s: Float[np.ndarray, " classes"]


def _programs(problem: StepProblem, layouts: Sequence[Layout]) -> list[_Program]:
    """Programs of all layouts, the first of each layout before its others."""
    found: list[_Program] = []
    for bundle in bundles(problem, layouts):
        for one, weight in weighted_programs(bundle):
            program, of_lanes = prepared(one.spec), durations(problem, one)
            found += [_Program(lane, program, weight, of_lanes[i]) for i, lane in enumerate(bundle.lanes)]
    return found


def _rank_busy_s(programs: Sequence[_Program], lanes: int) -> list[Float[np.ndarray, " ranks"]]:
    """Busy time of every rank of every layout, which its step is no shorter than (`rank_busy_s`)."""
    of_lane: list[list[_Program]] = [[] for _ in range(lanes)]
    for program in programs:
        of_lane[program.lane].append(program)
    return [rank_busy_s((p.prepared, p.durations_s, p.weight) for p in own) for own in of_lane]


def step_derivatives(problem: StepProblem, layouts: Sequence[Layout], names: Sequence[str]) -> StepDerivatives:
    """Step times, and their derivatives by the named parameters, where the problem's adjustment stands."""
    adjustment = problem.adjustment or Adjustment(device=problem.cluster.device.name, values=())
    return derivatives_towards(problem, layouts, [problem.adjusted(adjustment.moved(n, _STEP)) for n in names], _STEP)


def derivatives_towards(
    problem: StepProblem, layouts: Sequence[Layout], moved: Sequence[StepProblem], step: float
) -> StepDerivatives:
    """Step times, and their derivatives by parameters of which each of `moved` has one larger by `step`."""
    here = _programs(problem, layouts)
    step_s, by_parameter = np.zeros(len(layouts)), np.zeros((len(layouts), len(moved)))
    gradients = []
    for program in here:
        span, gradient = makespan_and_grad(program.prepared.compiled, program.durations_s)
        step_s[program.lane] += program.weight * float(span)
        gradients.append(np.asarray(gradient))
    for lane, busy_s in enumerate(_rank_busy_s(here, len(layouts))):
        if busy_s.max() > step_s[lane] * (1 + 1e-12):
            step_s[lane] = busy_s.max()
            for at, program in enumerate(here):
                if program.lane == lane:
                    gradients[at] = program.prepared.rank_count[busy_s.argmax()]
    of_class = [np.zeros((len(moved), len(program.durations_s))) for program in here]
    for i, other in enumerate(moved):
        there = _programs(other, layouts)
        for at, (program, one) in enumerate(zip(here, there, strict=True)):
            of_class[at][i] = (one.durations_s - program.durations_s) / step
            by_parameter[program.lane, i] += program.weight * float(gradients[at] @ of_class[at][i])
    first = {program.lane: at for at, program in reversed([*enumerate(here)])}
    order = [first[lane] for lane in range(len(layouts))]
    return StepDerivatives(
        step_s,
        by_parameter,
        tuple(here[at].prepared for at in order),
        tuple(here[at].durations_s for at in order),
        tuple(of_class[at] for at in order),
    )
