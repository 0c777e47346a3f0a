"""What every event of a layout's step contributes: the gradient of the timeline, event by event."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.ops import Op
from perfmodel.prediction._compose import bundles
from perfmodel.prediction._evaluate import per_step, step_programs
from perfmodel.prediction._explain import CriticalPath
from perfmodel.prediction._problem import StepProblem
from perfmodel.program import Structure
from perfmodel.spec import Layout


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
    (bundle,) = bundles(problem, [layout])
    programs = step_programs(problem, bundle)
    structure, durations, _ = programs[0]
    step_s, gradient, _ = per_step(programs)
    path = CriticalPath(problem, bundle, durations, gradient)
    counted = CriticalPath(problem, bundle, durations, occurrences(structure.structure) / bundle.spec.steps)
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
