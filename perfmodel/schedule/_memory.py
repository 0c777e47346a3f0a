"""How many activations a schedule holds at once: decided by each device's order alone."""

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._schedule import Phase, Schedule


def in_flight(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Largest number of micro-batches whose activations are alive at once, per device and chunk.

    A micro-batch is alive from the start of its forward to the end of its backward (of its weight
    gradient where that is split off). Without backward passes it lives for its forward alone.
    """
    peaks = [
        _peak(schedule, (schedule.chunk == chunk).astype(np.int64)).astype(np.int64) for chunk in range(schedule.chunks)
    ]
    return np.stack(peaks, axis=1)


def alive_at_peak(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Micro-batches alive per chunk at the moment when a device holds most activations in all.

    Chunks peak at different moments, so this is less than `in_flight` for looped schedules; times the bytes
    of each stage it is the peak wherever a device's chunks are about equally large.
    """
    taken = schedule.phase == Phase.FORWARD
    change = taken.astype(np.int64) - np.where(taken, 0, schedule.ends_backward)
    if schedule.forward_only:
        return in_flight(schedule)
    alive = np.zeros((schedule.devices, schedule.chunks), np.int64)
    for device in range(schedule.devices):
        own = slice(schedule.offsets[device], schedule.offsets[device + 1])
        until = int(np.argmax(np.cumsum(change[own]))) + 1 if own.stop > own.start else 0
        chunk = schedule.chunk[own][:until]
        np.add.at(alive[device], chunk, change[own][:until])
    return alive


def peak_live(schedule: Schedule, stage_bytes: Float[np.ndarray, " stages"]) -> Float[np.ndarray, " devices"]:
    """Largest activation bytes alive at once on each device.

    Args:
        schedule: the schedule.
        stage_bytes: bytes that one micro-batch holds on each global stage until its backward ends.
    """
    stage_bytes = np.asarray(stage_bytes, float)
    if stage_bytes.shape != (schedule.n_stages,):
        raise PerfModelError(
            f"stage_bytes must have one entry for each of {schedule.n_stages} stages, got {stage_bytes.shape}"
        )
    return _peak(schedule, stage_bytes[schedule.instruction_stage])


def _peak(schedule: Schedule, size: np.ndarray) -> np.ndarray:
    """Largest running total per device of `size`, taken by forwards and given back by backwards."""
    if schedule.forward_only:
        alive = np.where(schedule.phase == Phase.FORWARD, size, 0)
    else:
        change = np.where(schedule.phase == Phase.FORWARD, size, np.where(schedule.ends_backward, -size, 0))
        alive = np.cumsum(change)
        before = np.append(0, alive)[schedule.offsets[:-1]]
        alive = alive - before[schedule.device]  # totals of earlier devices cancel, but for rounding
    peak = np.zeros(schedule.devices, alive.dtype)
    busy = np.diff(schedule.offsets) > 0
    peak[busy] = np.maximum.reduceat(alive, schedule.offsets[:-1][busy])
    return peak
