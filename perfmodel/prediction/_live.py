"""What a program keeps on every pipeline rank: activations at the peak, versions of the weights."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from perfmodel.program import ProgramSpec
from perfmodel.schedule import alive_at_peak, offloaded_at_peak, weight_versions


@dataclass(frozen=True, eq=False)
class LiveState:
    """Decided by the order of events alone."""

    stage: Int[np.ndarray, "ranks chunks"]
    """Global stage of every chunk."""
    activations: Float[np.ndarray, "ranks chunks"]
    """Micro-batches alive when the rank holds most."""
    versions: Int[np.ndarray, " ranks"]
    """Weight versions held at once."""


def live_state(spec: ProgramSpec) -> LiveState:
    """The live state of a program's schedule."""
    schedule = spec.build_schedule()
    alive = offloaded_at_peak(schedule) if spec.offload else alive_at_peak(schedule)
    versions = weight_versions(schedule, spec.scheduler.weights).held
    return LiveState(schedule.stage, alive / schedule.slices, versions)
