"""Goodput: share of a run's time that failures, restarts and checkpoints leave to its steps.

Devices fail independently, at a constant rate, and one that fails stops the run: n of them are
interrupted every M = device_mtbf / n on average. After every tau of training a checkpoint is taken,
for which training stands still for delta and which is written in whole w later (0 where training
waits for it). A failure costs a restart R, itself open to failures, and the work since the last
checkpoint written. Of a time X between failures, exponentially distributed, floor((X - R - w) /
(tau + delta)) intervals of work are kept, so that

    goodput = tau / M * sum over k >= 1 of P(X > R + w + k (tau + delta))
            = tau / (M exp((R + w) / M) (exp((tau + delta) / M) - 1)),

which for w = 0 is Daly's complete model (Daly 2006, "A higher order estimate of the optimum
checkpoint interval", equation 20). It is highest at tau = M (1 + W(-exp(-1 - delta / M))) with
Lambert's W, of which Young's sqrt(2 delta M) (1974) is the first and Daly's estimate a higher
order.

A pipeline whose steps run into each other has v mini-batches under way (its version difference),
whose updates lie a step t apart, so that the first update of a pipeline that starts empty comes (v
- 1) t late (Little's law). After a failure that is part of R; and of delta too, where all stages
stop at one version to write a checkpoint together. Where every stage writes its own after the
backward of the same mini-batch (PipeDream; TiMePReSt, arXiv 2410.14312, section 4.3) none waits for
others: what they write is of one version, and delta is the longest of the stages' own.
"""

from dataclasses import asdict, dataclass
from math import exp, expm1, log1p, sqrt
from statistics import fmean
from typing import Any, Final, NamedTuple

from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.prediction import layout_batches, step_problem_of
from perfmodel.prediction.memory import (
    checkpoint_bytes,
    rank_checkpoint_bytes,
    rank_devices,
    version_difference,
)
from perfmodel.spec import Device, Layout, Problem
from perfmodel.units import positive

DEVICE_MTBF_S: Final = 54 * 86400 * 16384 / 419
"""Mean time between failures of one device, 50,700 hours: 419 unexpected interruptions in 54 days
on 16,384 H100, of whatever cause (Llama 3, arXiv 2407.21783, section 3.3.4). Others: 384 A100 of
BLOOM 43,000 h (1 to 2 failures a week, arXiv 2211.05100, section 3.2.3), Meta's research cluster
RSC-1 29,500 h (6.5 failures per 1,000 node-days, arXiv 2410.21680), 992 A100 of OPT-175B 14,000 h
(35 manual and about 70 automatic restarts in two months, arXiv 2205.01068, section 2.5)."""
RESTART_S: Final = 600.0
"""Seconds until a failure is found, its node replaced and the job restarted, before the checkpoint
is read: detection and diagnosis take less than 10 minutes on average (MegaScale, arXiv 2402.15627,
section 6.3)."""
STORAGE_BYTES_PER_S_PER_DEVICE: Final = 2e12 / 16384
"""Sustained rate of Llama 3's storage, 2 TB/s, over its devices (arXiv 2407.21783, section
3.3.1)."""


@dataclass(frozen=True, kw_only=True)
class Reliability:
    """Failure rate of devices, and durations of checkpoints and restarts."""

    device_mtbf_s: float = DEVICE_MTBF_S
    """Mean time between interruptions of a run on one device."""
    restart_s: float = RESTART_S
    """Seconds from a failure to the reading of the checkpoint."""
    storage_bytes_per_s: float | None = None
    """Rate at which all devices together write and read checkpoints; None:
    `STORAGE_BYTES_PER_S_PER_DEVICE` each."""
    asynchronous: bool = False
    """Whether training resumes as soon as states are copied to host memory, while they are still
    being written."""
    interval_s: float | None = None
    """Training time between checkpoints; None: the best."""
    by_stage: bool = False
    """Whether every pipeline stage writes and reads a separate checkpoint, at its devices' share of
    the storage's rate; otherwise all devices write equal parts of one checkpoint at the same
    time."""

    def __post_init__(self) -> None:
        positive("device_mtbf_s", self.device_mtbf_s)
        if self.restart_s:
            positive("restart_s", self.restart_s)
        for name in ("storage_bytes_per_s", "interval_s"):
            value = getattr(self, name)
            if value is not None:
                positive(name, value)


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """Shares of a run's time spent on useful work, checkpoints and failures."""

    fraction: float
    """Expected share of the run's time in steps whose work is kept."""
    checkpointing: float
    """Share of the time in which training waits for checkpoints of kept work."""
    failing: float
    """Share of the time in lost work and restarts."""
    mtbf_s: float
    """Mean time between interruptions of the whole run."""
    interval_s: float
    """Training time between checkpoints."""
    checkpoint_bytes: float
    write_s: float
    """Seconds until a checkpoint is written."""
    stall_s: float
    """Seconds for which training waits at a checkpoint."""
    restart_s: float
    """Seconds from a failure until training continues at full rate, including reading the
    checkpoint."""
    reload_s: float
    """The part of `restart_s` in which the checkpoint is read."""
    lost_steps: float
    """Mean number of steps between the last written checkpoint and a failure, which are computed
    again."""
    under_way: int = 1
    """Mini-batches in the pipeline at once, which a failure also loses (the version difference)."""
    stages: tuple["StageCheckpoint", ...] = ()
    """Bytes and seconds of every pipeline rank, where each writes its own part."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON: seconds, bytes and shares."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class StageCheckpoint:
    """The checkpoint of one pipeline rank's stages, written and read by its own devices."""

    bytes: float
    write_s: float
    """Seconds to write the checkpoint; reading takes the same time."""
    stall_s: float
    """Seconds for which the stage waits at a checkpoint."""


class _CheckpointTimes(NamedTuple):
    """Seconds of one checkpoint of the whole run (fields as in `Goodput`)."""

    write_s: float
    stall_s: float
    reload_s: float
    stages: tuple[StageCheckpoint, ...]


def _checkpoint_times(
    problem: Problem, layout: Layout, reliability: Reliability, refill_s: float
) -> _CheckpointTimes:
    """Time to write and to read a checkpoint; `refill_s`: seconds to refill the pipeline."""
    # Where each stage has a checkpoint of its own, all wait for the slowest stage.
    if reliability.by_stage:
        stages = stage_checkpoints(problem, layout, reliability)
        write_s = max(stage.write_s for stage in stages)
        stall_s = max(stage.stall_s for stage in stages)
        # All go back to the same version: on the stages that did not fail it is in host memory, if
        # it was copied there.
        reload_s = fmean(stage.write_s for stage in stages) if reliability.asynchronous else write_s
        return _CheckpointTimes(write_s, stall_s, reload_s, stages)

    # Otherwise all devices write an equal part of one checkpoint, and read it as fast as they wrote
    # it.
    n_bytes = checkpoint_bytes(problem.model, problem.job)
    rate = reliability.storage_bytes_per_s or layout.devices * STORAGE_BYTES_PER_S_PER_DEVICE
    transfer_s = n_bytes / rate
    kinds = problem.cluster.kinds or (problem.cluster,)
    stalls_s = [
        _stall_s(n_bytes / layout.devices, transfer_s, kind.device, reliability) for kind in kinds
    ]
    # Training stands still for a refill of the pipeline before anything is written.
    return _CheckpointTimes(transfer_s + refill_s, max(stalls_s) + refill_s, transfer_s, ())


def goodput(
    problem: Problem,
    layout: Layout,
    step_time_s: float,
    reliability: Reliability | None = None,
) -> Goodput:
    """Compute the goodput of a run that stops when any device fails.

    Args:
        problem: problem whose weights and optimizer states a checkpoint holds; all devices write
            equal parts.
        layout: a possible layout of the problem.
        step_time_s: checkpoints are at least a step apart.
        reliability: failure rates of devices; those of published runs if not given.

    Raises:
        PerfModelError: failures come so often that nothing is ever kept.
    """
    assumed = reliability or Reliability()
    devices = layout.devices

    # An asynchronous pipeline holds several mini-batches at once, which are lost at a failure and
    # have to be filled in anew.
    under_way = version_difference(step_problem_of(problem), layout)
    refill_s = (under_way - 1) * step_time_s
    write_s, stall_s, reload_s, stages = _checkpoint_times(problem, layout, assumed, refill_s)

    # Any device's failure stops the run: rates of failure add up.
    mtbf_s = assumed.device_mtbf_s / devices
    restart_s = assumed.restart_s + reload_s + refill_s
    # One checkpoint is written at a time.
    hidden_s = write_s - stall_s
    least_s = max(step_time_s, hidden_s)
    interval_s = max(least_s, assumed.interval_s or best_interval_s(stall_s, mtbf_s))
    fraction = goodput_fraction(interval_s, stall_s, hidden_s, restart_s, mtbf_s)
    if fraction == 0:
        raise PerfModelError(
            f"goodput: {devices} devices fail every {mtbf_s:.3g} s and take {restart_s:.3g} s to restart, so the "
            "run makes no progress; give a longer time between failures, a faster restart or storage"
        )

    # Per unit of work that is kept, checkpoints take stall / interval besides. All remaining time
    # is lost work and restarts.
    failing = 1 - fraction * (1 + stall_s / interval_s)
    return Goodput(
        fraction=fraction,
        checkpointing=fraction * stall_s / interval_s,
        failing=failing,
        mtbf_s=mtbf_s,
        interval_s=interval_s,
        checkpoint_bytes=checkpoint_bytes(problem.model, problem.job),
        write_s=write_s,
        stall_s=stall_s,
        restart_s=restart_s,
        reload_s=reload_s,
        # If nothing is saved between two failures, the restart takes min(X, R) of that time.
        lost_steps=max(0.0, mtbf_s * (failing + expm1(-restart_s / mtbf_s))) / step_time_s,
        under_way=under_way,
        stages=stages,
    )


def stage_checkpoints(
    problem: Problem, layout: Layout, reliability: Reliability
) -> tuple[StageCheckpoint, ...]:
    """The checkpoints that each pipeline rank of a layout writes.

    The devices of a rank share the storage's rate in proportion to their number, and each writes an
    equal part.
    """
    model = step_problem_of(problem)
    (layout_batch,) = layout_batches(model, [layout])
    rate = reliability.storage_bytes_per_s or layout.devices * STORAGE_BYTES_PER_S_PER_DEVICE
    rank_rate = rate / layout.pp
    checkpoints = []
    n_bytes = rank_checkpoint_bytes(model, layout).tolist()
    for rank_bytes, device in zip(
        n_bytes, rank_devices(model, layout_batch.layouts[0]), strict=True
    ):
        write_s = rank_bytes / rank_rate
        stall_s = _stall_s(rank_bytes / (layout.devices // layout.pp), write_s, device, reliability)
        checkpoints.append(StageCheckpoint(bytes=rank_bytes, write_s=write_s, stall_s=stall_s))
    return tuple(checkpoints)


def _stall_s(
    device_bytes: float, write_s: float, device: Device, reliability: Reliability
) -> float:
    """Return the seconds for which training stops while each device writes this many bytes."""
    host_bytes_per_s = device.host_bandwidth_bytes_per_s
    # a link that nobody tells is waited for
    if not reliability.asynchronous or host_bytes_per_s is None:
        return write_s
    return min(write_s, device_bytes / host_bytes_per_s)


def goodput_fraction(
    interval_s: float, stall_s: float, hidden_s: float, restart_s: float, mtbf_s: float
) -> float:
    """Share of the time spent on steps whose work is kept (formula in the module's docstring).

    Args:
        interval_s: training between checkpoints.
        stall_s: seconds for which training stands still at each checkpoint.
        hidden_s: seconds for which a checkpoint is still being written while training goes on.
        restart_s: seconds from a failure until training continues.
        mtbf_s: mean time between failures.
    """
    period_s = interval_s + stall_s
    # exponents of one sign: a run that never gets on has goodput 0, not an overflow
    lost_s = restart_s + hidden_s + period_s
    return interval_s / mtbf_s * exp(-lost_s / mtbf_s) / -expm1(-period_s / mtbf_s)


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """The checkpoint interval with the highest goodput; 0 if checkpoints take no time."""
    # By the definition of W (module's docstring), x + log(1 - x) = -stall / mtbf for x = interval /
    # mtbf. The left side is concave and too small at the start, from where Newton's method never
    # passes the answer.
    stall = stall_s / mtbf_s
    x = -expm1(-stall - sqrt(2 * stall))
    while 0 < x < 1:
        step = (x + log1p(-x) + stall) * (1 - x) / x
        x += step
        if step >= -1e-12 * x:
            break
    return mtbf_s * x


shorten_reprs(__name__)
