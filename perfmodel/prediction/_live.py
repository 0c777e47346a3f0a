"""What a program keeps on every pipeline rank: activations at the peak, versions of the weights."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from perfmodel.program import ProgramSpec
from perfmodel.schedule import Phase, Schedule, alive_at_peak, offloaded_at_peak, weight_versions


@dataclass(frozen=True, eq=False)
class LiveState:
    """Decided by the order of events alone."""

    stage: Int[np.ndarray, "ranks chunks"]
    """Global stage of every chunk."""
    activations: Float[np.ndarray, "ranks chunks"]
    """Micro-batches alive when the rank holds most."""
    versions: Int[np.ndarray, " ranks"]
    """Weight versions held at once."""
    warm_up: Int[np.ndarray, " ranks"]
    """Forwards before the rank's first backward."""
    replicas: int
    """Ranks that hold the same stage."""
    split: bool
    """Whether gradients of weights are passes of their own, which nothing but the step's end waits for."""


def live_state(spec: ProgramSpec, schedule: Schedule) -> LiveState:
    """The live state of a program and its schedule."""
    alive = offloaded_at_peak(schedule) if spec.offload else alive_at_peak(schedule)
    versions = weight_versions(schedule, spec.scheduler.weights).held
    forward = schedule.phase == Phase.FORWARD
    warm_up = [
        int(np.append(forward[first:end], False).argmin())
        for first, end in zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True)
    ]
    split = bool((schedule.phase == Phase.BACKWARD_WEIGHT).any())
    return LiveState(schedule.stage, alive / schedule.slices, versions, np.array(warm_up), schedule.replicas, split)
