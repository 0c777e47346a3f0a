"""A measured run: what was run, and how long a step took."""

from dataclasses import dataclass, field

from perfmodel.errors import PerfModelError
from perfmodel.prediction import EAGER, Framework
from perfmodel.spec import Cluster, Job, Layout, Model
from perfmodel.timeline import Timeline


@dataclass(frozen=True, kw_only=True)
class Run:
    """One configuration that was run and timed."""

    name: str
    model: Model
    cluster: Cluster
    job: Job
    layout: Layout
    measured_s: float
    """Seconds per step."""
    framework: Framework = EAGER
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """Measured starts and ends of the ops of the layout's own program, where there was a trace: then the times of
    each stage's passes, reductions and updates are observations too."""

    def __post_init__(self) -> None:
        if not 0 < self.measured_s < float("inf"):
            raise PerfModelError(
                f"run {self.name}: measured step time must be positive and finite, got {self.measured_s}"
            )
