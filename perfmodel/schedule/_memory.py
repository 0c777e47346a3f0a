"""How many activations a schedule holds at once: decided by each device's order alone."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import PerfModelError
from perfmodel.schedule._schedule import NEVER, Phase, Schedule


def in_flight(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Largest number of micro-batches whose activations are alive at once, per device and chunk.

    A micro-batch is alive from the start of its forward to the end of its backward (of its weight
    gradient where that is split off). Without backward passes it lives for its forward alone.
    """
    peaks = [
        _peak(schedule, np.where(schedule.chunk == chunk, schedule.span, 0)).astype(np.int64)
        for chunk in range(schedule.chunks)
    ]
    return np.stack(peaks, axis=1)


def alive_at_peak(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Micro-batches alive per chunk at the moment when a device holds most activations in all.

    Chunks peak at different moments, so this is less than `in_flight` for looped schedules; times the bytes
    of each stage it is the peak wherever a device's chunks are about equally large.
    """
    if schedule.forward_only:
        return in_flight(schedule)
    return _most_alive(schedule, np.arange(schedule.n_instructions), schedule.chunk, taken(schedule, schedule.span))


def taken(schedule: Schedule, size: np.ndarray) -> np.ndarray:
    """Of what each instruction's micro-batches hold, what forwards take, less what the ends of backwards give back."""
    return np.where(schedule.phase == Phase.FORWARD, size, np.where(schedule.ends_backward, -size, 0))


def _most_alive(
    schedule: Schedule,
    instruction: Int[np.ndarray, " events"],
    chunk: Int[np.ndarray, " events"],
    change: Int[np.ndarray, " events"],
) -> Int[np.ndarray, "devices chunks"]:
    """Micro-batches alive per chunk when each device holds most in all; events of one instruction in order given."""
    order = np.argsort(instruction, kind="stable")
    instruction, chunk, change = instruction[order], chunk[order], change[order]
    bounds = np.searchsorted(instruction, schedule.offsets)
    alive = np.zeros((schedule.devices, schedule.chunks), np.int64)
    for device in range(schedule.devices):
        on_device = slice(bounds[device], bounds[device + 1])
        peak = int(np.argmax(np.cumsum(change[on_device]))) + 1 if on_device.stop > on_device.start else 0
        np.add.at(alive[device], chunk[on_device][:peak], change[on_device][:peak])
    return alive


@dataclass(frozen=True, eq=False)
class Offloads:
    """Micro-batches whose activations leave the device between forward and backward, an entry each."""

    forward: Int[np.ndarray, " offloads"]
    """Instruction whose activations leave."""
    next_but_one: Int[np.ndarray, " offloads"]
    """The forward after next on the device, `NEVER` if there is none."""
    backward: Int[np.ndarray, " offloads"]
    """The first backward instruction that needs them."""


def offloads(schedule: Schedule) -> Offloads:
    """What is worth offloading: activations that are still waiting when the forward after next starts.

    Forwards of several micro-batches whose backwards come one by one stay where they are.
    """
    forward = np.flatnonzero(schedule.phase == Phase.FORWARD)
    device = schedule.device[forward]
    next_but_one = np.append(forward[2:], [NEVER, NEVER])[: len(forward)]
    its_device = np.append(device[2:], [NEVER, NEVER])[: len(forward)]
    next_but_one[its_device != device] = NEVER
    needed = schedule.dependencies.own
    backwards = np.flatnonzero((schedule.phase == Phase.BACKWARD) | (schedule.phase == Phase.BACKWARD_INPUT))
    backward = np.full(schedule.n_instructions, NEVER)
    backward[needed[backwards]] = backwards
    single = (schedule.span[forward] == 1) & (backward[forward] != NEVER)
    single &= schedule.span[np.maximum(backward[forward], 0)] == 1
    worth = single & (next_but_one != NEVER) & (backward[forward] > next_but_one + 1)
    return Offloads(forward[worth], next_but_one[worth], backward[forward][worth])


def offloaded_at_peak(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """`alive_at_peak` where activations wait in host memory: out before the forward after next, back while
    the instruction before their backward runs."""
    moved = offloads(schedule)
    ones = np.ones(len(moved.forward), np.int64)
    instruction = np.concatenate([moved.next_but_one, moved.backward - 1, np.arange(schedule.n_instructions)])
    chunk = np.concatenate([schedule.chunk[moved.forward], schedule.chunk[moved.forward], schedule.chunk])
    return _most_alive(schedule, instruction, chunk, np.concatenate([-ones, ones, taken(schedule, schedule.span)]))


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
    return _peak(schedule, stage_bytes[schedule.instruction_stage] * schedule.span)


def _peak(schedule: Schedule, size: np.ndarray) -> np.ndarray:
    """Largest running total per device of `size`, taken by forwards and given back by backwards."""
    if schedule.forward_only:
        alive = np.where(schedule.phase == Phase.FORWARD, size, 0)
    else:
        alive = schedule.running_total(taken(schedule, size))
    peak = np.zeros(schedule.devices, alive.dtype)
    nonempty = np.diff(schedule.offsets) > 0
    peak[nonempty] = np.maximum.reduceat(alive, schedule.offsets[:-1][nonempty])
    return peak
