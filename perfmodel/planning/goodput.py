"""Goodput: the share of a training run's time that failures, restarts and checkpoints leave to its steps.

Devices fail independently, at a constant rate, and one that fails stops the run: n of them are interrupted every
M = device_mtbf / n on average. After every tau of training a checkpoint is taken, for which training stands still for
delta and which is written in whole w later (0 where training waits for it). A failure costs a restart R, itself open to
failures, and the work since the last checkpoint written. Of a time X between failures, exponentially distributed,
floor((X - R - w) / (tau + delta)) intervals of work are kept, so that

    goodput = tau / M * sum over k >= 1 of P(X > R + w + k (tau + delta))
            = tau / (M exp((R + w) / M) (exp((tau + delta) / M) - 1)),

which for w = 0 is Daly's complete model (Daly 2006, "A higher order estimate of the optimum checkpoint interval",
equation 20). It is highest at tau = M (1 + W(-exp(-1 - delta / M))) with Lambert's W, of which Young's
sqrt(2 delta M) (1974) is the first and Daly's estimate a higher order.
"""

from dataclasses import asdict, dataclass
from math import exp, expm1
from typing import Any, Final

from perfmodel.errors import PerfModelError
from perfmodel.prediction import checkpoint_bytes
from perfmodel.spec import Problem
from perfmodel.units import positive

DEVICE_MTBF_S: Final = 54 * 86400 * 16384 / 419
"""50,700 hours: 419 unexpected interruptions in 54 days on 16,384 H100, of whatever cause (Llama 3, arXiv 2407.21783,
section 3.3.4). Others: 384 A100 of BLOOM 43,000 h (1 to 2 failures a week, arXiv 2211.05100, section 3.2.3), Meta's
research cluster RSC-1 29,500 h (6.5 failures per 1,000 node-days, arXiv 2410.21680), 992 A100 of OPT-175B 14,000 h (35
manual and about 70 automatic restarts in two months, arXiv 2205.01068, section 2.5)."""
RESTART_S: Final = 600.0
"""Until a failure is found, its node replaced and the job started, without reading the checkpoint: detection and
diagnosis take less than 10 minutes on average (MegaScale, arXiv 2402.15627, section 6.3)."""
STORAGE_BYTES_PER_S_PER_DEVICE: Final = 2e12 / 16384
"""Sustained rate of Llama 3's storage, 2 TB/s, over its devices (arXiv 2407.21783, section 3.3.1)."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """How often devices fail, and what checkpoints and restarts take."""

    device_mtbf_s: float = DEVICE_MTBF_S
    """Mean time between interruptions of a run on one device."""
    restart_s: float = RESTART_S
    """From a failure to the reading of the checkpoint."""
    storage_bytes_per_s: float | None = None
    """Rate at which all devices together write and read checkpoints; None: `STORAGE_BYTES_PER_S_PER_DEVICE` each."""
    asynchronous: bool = False
    """Whether training waits only until states are copied to host memory, not until they are written."""
    interval_s: float | None = None
    """Training time between checkpoints; None: the best."""

    def __post_init__(self) -> None:
        positive("device_mtbf_s", self.device_mtbf_s)
        if self.restart_s:
            positive("restart_s", self.restart_s)
        for name in ("storage_bytes_per_s", "interval_s"):
            if (value := getattr(self, name)) is not None:
                positive(name, value)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """What becomes of a run's time."""

    fraction: float
    """Expected share of the run's time that steps take whose work is not lost."""
    checkpointing: float
    """Share in which training stands still for the checkpoints of that work."""
    failing: float
    """The rest: lost work and restarts."""
    mtbf_s: float
    """Mean time between interruptions of the whole run."""
    interval_s: float
    """Training time between checkpoints."""
    checkpoint_bytes: float
    write_s: float
    """Until a checkpoint is written."""
    stall_s: float
    """For which training stands still at a checkpoint."""
    restart_s: float
    """From a failure until training goes on, the checkpoint read."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: seconds, bytes and shares."""
        return asdict(self)


def goodput(problem: Problem, devices: int, step_time_s: float, reliability: Reliability | None = None) -> Goodput:
    """The goodput of a run on so many devices.

    Args:
        problem: whose weights and optimizer states a checkpoint holds; every device writes as much of them.
        devices: of which any failure stops the run.
        step_time_s: checkpoints are at least a step apart.
        reliability: of the devices; that of published runs if not given.

    Raises:
        PerfModelError: failures come so often that nothing is ever kept.
    """
    given = reliability or Reliability()
    n_bytes = checkpoint_bytes(problem.model, problem.job)
    write_s = n_bytes / (given.storage_bytes_per_s or devices * STORAGE_BYTES_PER_S_PER_DEVICE)
    host_bytes_per_s = problem.cluster.device.host_bandwidth_bytes_per_s
    stall_s = write_s
    if given.asynchronous and host_bytes_per_s is not None:  # a link that nobody tells is waited for
        stall_s = min(write_s, n_bytes / devices / host_bytes_per_s)
    mtbf_s, restart_s = given.device_mtbf_s / devices, given.restart_s + write_s  # read as fast as written
    least_s = max(step_time_s, write_s - stall_s)  # one checkpoint is written at a time
    interval_s = max(least_s, given.interval_s or best_interval_s(stall_s, mtbf_s))
    hidden_s = write_s - stall_s
    fraction = goodput_fraction(interval_s, stall_s, hidden_s, restart_s, mtbf_s)
    if fraction == 0:
        raise PerfModelError(
            f"goodput: {devices} devices fail every {mtbf_s:.3g} s and need {restart_s:.3g} s to start again: no work "
            "is ever kept; give a longer time between failures, a faster restart or storage"
        )
    return Goodput(
        fraction=fraction,
        checkpointing=fraction * stall_s / interval_s,
        failing=1 - fraction * (1 + stall_s / interval_s),
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        checkpoint_bytes=n_bytes,
        write_s=write_s,
        stall_s=stall_s,
        restart_s=restart_s,
    )


def goodput_fraction(interval_s: float, stall_s: float, hidden_s: float, restart_s: float, mtbf_s: float) -> float:
    """Share of the time in steps whose work is kept, as the module states it.

    Args:
        interval_s: training between checkpoints.
        stall_s: for which training stands still at each.
        hidden_s: for which it is still being written while training goes on.
        restart_s: after a failure.
        mtbf_s: mean time between failures.
    """
    period_s = interval_s + stall_s
    # exponents of one sign: a run that never gets on has goodput 0, not an overflow
    return interval_s / mtbf_s * exp(-(restart_s + hidden_s + period_s) / mtbf_s) / -expm1(-period_s / mtbf_s)


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Training time between checkpoints with the highest goodput; 0 where checkpoints take no time."""
    from scipy.special import lambertw

    return mtbf_s * (1 + float(lambertw(-exp(-1 - stall_s / mtbf_s)).real))
