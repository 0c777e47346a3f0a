"""Peak memory of a schedule: activations and weight versions held at once."""

from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.schedule._asynchronous import weight_versions
from perfmodel.schedule._registry import WeightPolicy
from perfmodel.schedule._schedule import NEVER, Phase, Schedule


def in_flight(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Largest number of micro-batches whose activations are alive at once, per device and chunk.

    A micro-batch is alive from the start of its forward to the end of its backward (of its weight
    gradient where that is split off). Without backward passes it lives for its forward alone.
    """
    peaks = []
    for chunk in range(schedule.chunks):
        span_on_chunk = np.where(schedule.chunk == chunk, schedule.span, 0)
        peaks.append(_peak(schedule, span_on_chunk).astype(np.int64))
    return np.stack(peaks, axis=1)


def alive_at_peak(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Micro-batches alive per chunk at a device's peak of activations.

    Chunks peak at different moments, so this is less than `in_flight` for looped schedules; times
    the bytes of each stage it is the peak wherever a device's chunks are about equally large.
    """
    if schedule.forward_only:
        return in_flight(schedule)
    instruction = np.arange(schedule.n_instructions)
    return _most_alive(schedule, instruction, schedule.chunk, schedule.taken(schedule.span))


def _most_alive(
    schedule: Schedule,
    instruction: Int[np.ndarray, " events"],
    chunk: Int[np.ndarray, " events"],
    change: Int[np.ndarray, " events"],
) -> Int[np.ndarray, "devices chunks"]:
    """Micro-batches alive per chunk when each device holds most in all.

    Args:
        schedule: the schedule.
        instruction: at which each event happens; events of one instruction happen in the order in
            which they stand.
        chunk: chunk of the event.
        change: micro-batches that the event adds to those alive.
    """
    # Put events in the order in which devices run the instructions.
    order = np.argsort(instruction, kind="stable")
    instruction, chunk, change = instruction[order], chunk[order], change[order]
    bounds = np.searchsorted(instruction, schedule.offsets)

    # Up to the peak of the running total over all chunks, sum the changes of each chunk.
    alive = np.zeros((schedule.devices, schedule.chunks), np.int64)
    for device in range(schedule.devices):
        on_device = slice(bounds[device], bounds[device + 1])
        if on_device.stop == on_device.start:
            continue
        peak = int(np.argmax(np.cumsum(change[on_device]))) + 1
        np.add.at(alive[device], chunk[on_device][:peak], change[on_device][:peak])
    return alive


@dataclass(frozen=True, eq=False)
class Offloads:
    """Micro-batches whose activations are offloaded between forward and backward."""

    forward: Int[np.ndarray, " offloads"]
    """Instruction whose activations leave."""
    next_but_one: Int[np.ndarray, " offloads"]
    """The forward after next on the device, `NEVER` if there is none."""
    backward: Int[np.ndarray, " offloads"]
    """The first backward instruction that needs them."""


def offloads(schedule: Schedule) -> Offloads:
    """Activations worth offloading: those still waiting when the forward after the next one starts.

    Forwards of several micro-batches whose backwards come one by one stay where they are.
    """
    # The forward after next, if it is on the same device.
    forward = np.flatnonzero(schedule.phase == Phase.FORWARD)
    device = schedule.device[forward]
    next_but_one = np.append(forward[2:], [NEVER, NEVER])[: len(forward)]
    device_of_next_but_one = np.append(device[2:], [NEVER, NEVER])[: len(forward)]
    next_but_one[device_of_next_but_one != device] = NEVER

    # The backward that waits for each forward.
    backwards = np.flatnonzero(
        (schedule.phase == Phase.BACKWARD) | (schedule.phase == Phase.BACKWARD_INPUT)
    )
    backward_of = np.full(schedule.n_instructions, NEVER)
    backward_of[schedule.dependencies.same_stage[backwards]] = backwards
    backward = backward_of[forward]

    # Only passes of one micro-batch each, and only if something runs between the copy out and the
    # copy back.
    single = (schedule.span[forward] == 1) & (backward != NEVER)
    single &= schedule.span[np.maximum(backward, 0)] == 1
    waits_long = (next_but_one != NEVER) & (backward > next_but_one + 1)
    worth = single & waits_long
    return Offloads(forward[worth], next_but_one[worth], backward[worth])


def offloaded_at_peak(schedule: Schedule) -> Int[np.ndarray, "devices chunks"]:
    """Micro-batches alive per chunk at a device's peak (`alive_at_peak`), with offloading.

    Activations have left the device before the forward after next, and return during the
    instruction before their backward.
    """
    # Three kinds of events: copies out, copies back, and allocations and frees of the instructions
    # themselves.
    moved = offloads(schedule)
    ones = np.ones(len(moved.forward), np.int64)
    moved_chunk = schedule.chunk[moved.forward]
    instruction = np.concatenate(
        [moved.next_but_one, moved.backward - 1, np.arange(schedule.n_instructions)]
    )
    chunk = np.concatenate([moved_chunk, moved_chunk, schedule.chunk])
    change = np.concatenate([-ones, ones, schedule.taken(schedule.span)])
    return _most_alive(schedule, instruction, chunk, change)


def peak_live(
    schedule: Schedule, stage_bytes: Float[np.ndarray, " stages"]
) -> Float[np.ndarray, " devices"]:
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
    """Largest running total of `size` per device, which forwards allocate and backwards free."""
    # In inference a forward's activations are gone when it ends.
    if schedule.forward_only:
        alive = np.where(schedule.phase == Phase.FORWARD, size, 0)
    else:
        alive = schedule.running_total(schedule.taken(size))

    # `reduceat` would take a device without instructions for one of the next device's.
    peak = np.zeros(schedule.devices, alive.dtype)
    nonempty = np.diff(schedule.offsets) > 0
    peak[nonempty] = np.maximum.reduceat(alive, schedule.offsets[:-1][nonempty])
    return peak


@dataclass(frozen=True, eq=False)
class LiveState:
    """Activations and weights alive on pipeline ranks, which depend only on the order of events."""

    stage: Int[np.ndarray, "ranks chunks"]
    """Global stage of every chunk."""
    activations: Float[np.ndarray, "ranks chunks"]
    """Micro-batches alive at the rank's peak."""
    versions: Int[np.ndarray, " ranks"]
    """Weight versions held at once."""
    warm_up: Int[np.ndarray, " ranks"]
    """Forwards before the rank's first backward."""
    replicas: int
    """Ranks that hold the same stage."""
    split: bool
    """Whether weight gradients are separate passes, on which only the step's end depends."""

    def with_slots(self, slots_per_stage: int, n_stages: int) -> "LiveState":
        """The state if the framework reserves memory for this number of micro-batches per stage, on
        all ranks except the last; 0: unchanged.

        OneFlow puts a buffer behind each tensor that a backward pass reads from a forward pass, on
        all stages but the last, with as many places as twice the number of stages
        (oneflow/core/job_rewriter/pipeline_buffer_pass.cpp @0bc5c37, PipelineBufferPass::Apply:
        `buffer_size = total_stage_num * 2`).
        """
        if not slots_per_stage or n_stages == 1:
            return self
        holds_last_stage = (self.stage == n_stages - 1).any(axis=1, keepdims=True)
        slots = np.where(holds_last_stage, 0.0, float(slots_per_stage * n_stages))
        return replace(self, activations=np.maximum(self.activations, slots))


def live_state(schedule: Schedule, offload: bool, weights: WeightPolicy) -> LiveState:
    """Activations and weights that a schedule keeps alive.

    Args:
        offload: whether activations wait for their backward in host memory.
        weights: which versions of the weights passes use.
    """
    alive = offloaded_at_peak(schedule) if offload else alive_at_peak(schedule)
    # Where all passes of a step are over before its update, one version is enough.
    versions = np.ones(schedule.devices, np.int64)
    if weights != "flush":
        versions = weight_versions(schedule, weights).stored

    is_forward = schedule.phase == Phase.FORWARD
    warm_up = []
    for first, end in zip(schedule.offsets[:-1], schedule.offsets[1:], strict=True):
        # The place of the first pass that is not a forward; behind all of them where there is none.
        warm_up.append(int(np.append(is_forward[first:end], False).argmin()))
    return LiveState(
        stage=schedule.stage,
        activations=alive / schedule.slices,
        versions=versions,
        warm_up=np.array(warm_up),
        replicas=schedule.replicas,
        split=bool((schedule.phase == Phase.BACKWARD_WEIGHT).any()),
    )


shorten_reprs(__name__)
