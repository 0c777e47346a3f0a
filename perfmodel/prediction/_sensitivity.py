"""Derivatives of step times, through the timeline: by its events, and by the parameters of runs and machines.

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

from perfmodel.ops import Op
from perfmodel.prediction._adjustment import Adjustment
from perfmodel.prediction._compose import bundles
from perfmodel.prediction._durations import parts
from perfmodel.prediction._evaluate import per_step, step_gradients, step_programs
from perfmodel.prediction._explain import CriticalPath
from perfmodel.prediction._problem import StepProblem
from perfmodel.program import Structure
from perfmodel.spec import Layout

_STEP = 1e-6


@dataclass(frozen=True, eq=False)
class StepDerivatives:
    """Step times of layouts and how they move with parameters."""

    step_s: Float[np.ndarray, " layouts"]
    by_parameter: Float[np.ndarray, "layouts parameters"]
    """d step time / d parameter [s]."""
    durations_s: tuple[Float[np.ndarray, " classes"], ...]
    """Of the classes of each layout's program."""
    durations_by_parameter: tuple[Float[np.ndarray, "parameters classes"], ...]


def step_derivatives(problem: StepProblem, layouts: Sequence[Layout], names: Sequence[str]) -> StepDerivatives:
    """Step times, and their derivatives by the named parameters, where the problem's adjustment stands."""
    adjustment = problem.adjustment or Adjustment(device=problem.cluster.device.name, values=())
    return derivatives_towards(problem, layouts, [problem.adjusted(adjustment.moved(n, _STEP)) for n in names], _STEP)


def derivatives_towards(
    problem: StepProblem, layouts: Sequence[Layout], moved: Sequence[StepProblem], step: float
) -> StepDerivatives:
    """Step times, and their derivatives by parameters of which each of `moved` has one larger by `step`."""
    here, there = step_programs(problem, layouts), [step_programs(other, layouts) for other in moved]
    step_s, by_parameter = np.zeros(len(layouts)), np.zeros((len(layouts), len(moved)))
    first = []
    for lane, programs in enumerate(here):
        step_s[lane], gradients = step_gradients(programs)
        for at, ((_, of_class, weight), gradient) in enumerate(zip(programs, gradients, strict=True)):
            slopes = np.array([(of_layouts[lane][at][1] - of_class) / step for of_layouts in there])
            by_parameter[lane] += [weight * float(gradient @ slope) for slope in slopes]
            if at == 0:
                first.append(slopes.reshape(len(moved), len(of_class)))
    return StepDerivatives(step_s, by_parameter, tuple(programs[0][1] for programs in here), tuple(first))


@dataclass(frozen=True, eq=False)
class EventShares:
    """The distinct events of one layout's step."""

    step_time_s: float
    gap_s: float
    """Seconds of the step that no event takes: host, launch gaps, waiting, contention, copies to the host,
    what the step costs beyond."""
    waiting_s: float
    """The part of them that ranks wait for the last of a group."""
    ops: tuple[Op, ...]
    critical_s: Float[np.ndarray, " ops"]
    """d step time / d log(event time): seconds of the step's critical path that the event takes."""
    executions: Float[np.ndarray, " ops"]
    """How often the step runs the event, counted on every device that takes part."""


def event_shares(problem: StepProblem, layout: Layout) -> EventShares:
    """Distinct events of a step (DistSim section 4.1) with what each contributes.

    Hidden communication counts with its exposed part only; a block that waits for its host counts with the time
    of its kernels.

    Raises:
        LayoutError: if the model does not divide as the layout asks.
    """
    (bundle,), (programs,) = bundles(problem, [layout]), step_programs(problem, [layout])
    (structure, durations, _), kinds = programs[0], parts(problem, bundle)
    step_s, gradient, _ = per_step(programs)
    path = CriticalPath(kinds, durations, gradient)
    counted = CriticalPath(kinds, durations, occurrences(structure.structure) / bundle.spec.steps)
    index: dict[Op, int] = {}
    at = np.array([index.setdefault(op, len(index)) for op in path.ops])
    replicas = layout.devices / layout.pp
    return EventShares(
        step_time_s=step_s,
        gap_s=path.other_s,
        waiting_s=path.waiting_s,
        ops=tuple(index),
        critical_s=np.bincount(at, path.seconds, len(index)),
        executions=np.bincount(at, counted.count, len(index)) * replicas,
    )


def occurrences(structure: Structure) -> Float[np.ndarray, " classes"]:
    """How often each class occurs in a structure, as an op's own duration or as a transfer between two."""
    return np.bincount(
        np.concatenate([structure.duration, structure.lag.ravel()]), minlength=structure.n_classes
    ).astype(float)
