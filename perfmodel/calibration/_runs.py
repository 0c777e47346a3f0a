"""Measured runs (what was run, how long a step took), and times that can only be in another unit or of other work."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.prediction import EAGER, Site
from perfmodel.spec import Cluster, Framework, Job, Layout, Model
from perfmodel.timeline import Timeline
from perfmodel.workload import step_flops


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
    site: Site = field(default_factory=Site)
    timeline: Timeline | None = field(default=None, repr=False, compare=False)
    """Measured starts and ends of the ops of the layout's own program, where there was a trace: then the times of
    each stage's passes, reductions and updates are observations too."""

    def __post_init__(self) -> None:
        if not 0 < self.measured_s < float("inf"):
            raise PerfModelError(
                f"run {self.name}: measured step time must be positive and finite, got {self.measured_s}"
            )


TOO_SLOW = 100.0
"""Times the prediction from which a step is not slow but in another unit, where its thousandth is plausible."""
PLAUSIBLE = 10.0
"""Times by which a plausible step is off its prediction at most."""


def check_units(runs: Sequence[Run], predicted_s: np.ndarray) -> None:
    """Refuse runs whose step times are no seconds per step.

    Raises:
        PerfModelError: naming the first such run: milliseconds, or shorter than its arithmetic at the peak rate.
    """
    for run, expected_s in zip(runs, predicted_s.tolist(), strict=True):
        least_s = arithmetic_s(run)
        if run.measured_s < least_s:
            raise PerfModelError(
                f"run {run.name}: a step of {run.measured_s:g} s is shorter than its arithmetic at the peak rate of "
                f"{run.cluster.device.name} ({least_s:.3g} s); give measured_iter_time_s in seconds, for the whole "
                "global batch"
            )
        in_ms = run.measured_s / 1000
        plausible = max(expected_s / PLAUSIBLE, least_s) <= in_ms <= expected_s * PLAUSIBLE
        if run.measured_s > TOO_SLOW * expected_s and plausible:
            raise PerfModelError(
                f"run {run.name}: a step of {run.measured_s:g} s is {run.measured_s / expected_s:,.0f} times the "
                f"predicted {expected_s:.3g} s, as if it were milliseconds; give measured_iter_time_s in seconds"
            )


def arithmetic_s(run: Run) -> float:
    """The step's model FLOPs on all devices at the peak rate of its dtype; fp32 may be run as tf32."""
    dtypes = ("fp32", "tf32") if run.job.dtype == "fp32" else (run.job.dtype,)
    rate = max(run.cluster.device.peak.flops_per_s(dtype) for dtype in dtypes)
    return step_flops(run.model, run.job).total / run.layout.devices / rate
