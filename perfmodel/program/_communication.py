"""Adds to a program the events outside its passes: transfers between stages, weight gathers,
gradient reductions, and host copies."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.program._passes import Passes, first_forwards, last_of_chunks
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import (
    WHOLE,
    Around,
    Ids,
    Kind,
    ProgramOrder,
    Stream,
    StructureBuilder,
)
from perfmodel.schedule import NEVER, Phase, Schedule
from perfmodel.schedule.memory import Offloads, offloads


class Arrival(NamedTuple):
    """Transfers of one kind, by the instructions that wait for them."""

    receiver: Ids
    """Instructions that need the transferred data."""
    source: Ids
    """Op that each receiver waits for."""
    lag: Ids | int
    """Code of the class of the delay after that op's end; 0 for none."""


def add_transfers(
    builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder
) -> tuple[Arrival, ...]:
    """Add transfers of activations to the next stage and gradients to the previous one, between
    devices.

    Their class belongs to the sending stage.
    """
    # Only passes that get their input from another device receive a transfer.
    arrivals = []
    schedule = passes.schedule
    upstream = schedule.dependencies.upstream
    receiver = np.flatnonzero(upstream != NEVER)
    receiver = receiver[schedule.device[upstream[receiver]] != schedule.device[receiver]]
    for kind, forward in ((Kind.SEND_FORWARD, True), (Kind.SEND_BACKWARD, False)):
        receivers = receiver[(schedule.phase[receiver] == Phase.FORWARD) == forward]
        sender = upstream[receivers]
        stage, device = schedule.instruction_stage[sender], schedule.device[sender]
        variant = passes.variants.of_transfer[sender]

        # A lag delays the receiver and occupies nobody.
        if spec.sends == "lag":
            lag_code = builder.class_code(kind, stage, variant=variant)
            arrivals.append(Arrival(receivers, passes.end[sender], lag_code))
            continue

        # An op occupies a stream of the sender, which goes on after it: its own for sends, or
        # compute.
        after = passes.end[sender]
        last_part = passes.part[after]
        sends = builder.add(
            kind,
            device,
            Stream.SEND if spec.sends == "op" else Stream.COMPUTE,
            stage,
            variant=variant,
            micro_batch=schedule.micro_batch[sender],
            key=order.key(schedule.slot[passes.instruction[after]], device, last_part, Around.SEND),
        )
        builder.connect(after, sends)
        arrivals.append(Arrival(receivers, sends, 0))
    for arrival in arrivals:
        builder.connect(arrival.source, passes.start[arrival.receiver], arrival.lag)
    return tuple(arrivals)


def _gather_ops(
    builder: StructureBuilder,
    passes: Passes,
    uses: Int[np.ndarray, " uses"],
    key: Int[np.ndarray, " uses"],
) -> Ids:
    """The gather of each op that uses weights; `key` orders them on their stream."""
    schedule = passes.schedule
    used_by = passes.instruction[uses]
    gathers = np.empty(len(uses), np.int64)
    forward = schedule.phase[used_by] == Phase.FORWARD
    for kind, selected in ((Kind.PARAM_GATHER, forward), (Kind.PARAM_GATHER_BACKWARD, ~forward)):
        instruction = used_by[selected]
        gathers[selected] = builder.add(
            kind,
            schedule.device[instruction],
            Stream.DATA_COMM,
            schedule.instruction_stage[instruction],
            segment=passes.segment[uses[selected]],
            micro_batch=schedule.micro_batch[instruction],
            key=key[selected],
        )
    return gathers


def add_layer_gathers(
    builder: StructureBuilder,
    spec: ProgramSpec,
    passes: Passes,
    order: ProgramOrder,
    optimizers: Ids,
    arrivals: tuple[Arrival, ...],
) -> None:
    """Add the weight gathers of ZeRO 3 before each op that uses the weights.

    With `ahead` gathers in advance, a device issues the gather for its op k when op k - 1 - ahead
    ends, just before op k - ahead starts.

    Args:
        optimizers: optimizer ops in a stream of steps, as `add_updates` returns them.
        arrivals: transfers that ops wait for.
    """
    schedule = passes.schedule
    ahead = spec.gathers_ahead

    # The ops that use weights; k counts them on each device within a step. A weight gradient uses
    # only activations and gradients.
    uses = np.flatnonzero((schedule.phase != Phase.BACKWARD_WEIGHT)[passes.instruction])
    used_by = passes.instruction[uses]
    device, step = schedule.device[used_by], schedule.updates_before[used_by]
    index = np.arange(len(uses))
    begins = (np.diff(device, prepend=-1) != 0) | (np.diff(step, prepend=-1) != 0)
    start = np.maximum.accumulate(np.where(begins, index, 0))
    k = index - start

    # A gather queues on DATA_COMM before the reductions that follow op k - ahead, as in FSDP's
    # backward prefetch. The first gathers of a step queue before all of its ops. If the next op
    # waits for each reduction, a gather that is not needed yet must not delay the reduction: it
    # queues as if it were one op ahead, though it may start earlier when the stream is idle.
    queued = min(ahead, 1) if spec.grad_reduce == "end" else ahead
    queued_before = uses[start + np.maximum(k - queued, 0)]
    slot = schedule.slot[passes.instruction[queued_before]]
    key = np.where(
        k < queued,
        order.place_key(slot, device, k),
        order.key(slot, device, passes.part[queued_before], Around.GATHER),
    )
    gathers = _gather_ops(builder, passes, uses, key)
    builder.connect(gathers, uses)

    # A gather is issued at most `ahead` ops early.
    gated = np.flatnonzero(k > ahead)
    builder.connect(uses[gated - 1 - ahead], gathers[gated])

    # Without prefetch, the op issues its own gather once its input has arrived.
    if not ahead:
        gather_of_op = np.full(len(passes.instruction), NEVER)
        gather_of_op[uses] = gathers
        for arrival in arrivals:
            builder.connect(
                arrival.source, gather_of_op[passes.first[arrival.receiver]], arrival.lag
            )

    # In a stream of steps, the first gathers of each step wait for the previous update.
    if len(optimizers):
        first = np.flatnonzero((k <= ahead) & (step > 0))
        builder.connect(optimizers[schedule.all_updates_before[used_by[first]] - 1], gathers[first])


def add_step_gathers(
    builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder
) -> None:
    """Add the weight gathers of ZeRO 1 and 2 with overlap, from the start of the step in order of
    first use.

    In a stream of steps `add_updates` adds them.
    """
    schedule = passes.schedule
    # One gather for each op of a chunk's first forward, in the order in which the device runs them.
    ops = first_forwards(passes)
    device = schedule.device[passes.instruction[ops]]
    count = np.bincount(device, minlength=schedule.devices)
    first_of_device = np.cumsum(count) - count
    place = np.arange(len(ops)) - first_of_device[device]

    # Before all instructions, in the order of their places.
    key_before_all = (place - schedule.chunks * spec.segments) * order.devices + device
    gathers = builder.add(
        Kind.PARAM_GATHER,
        device,
        Stream.DATA_COMM,
        schedule.instruction_stage[passes.instruction[ops]],
        segment=passes.segment[ops] if spec.segments > 1 else WHOLE,
        key=key_before_all,
    )
    builder.connect(gathers, ops)


def add_reductions(
    builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder
) -> None:
    """Add gradient reductions during the passes, overlapped or blocking the next pass
    (`grad_reduce="end"`).

    Both cases add the same ops in the same order, so that overlap only removes waits. Blocking
    reductions follow the whole pass, except under ZeRO 3, where each segment's reduction follows
    that segment. A stage with replicas on several devices starts its reduction when all of them are
    ready.
    """
    schedule = passes.schedule
    overlapped = spec.grad_reduce in ("overlap", "eager_opt")
    during_passes = overlapped or spec.reduce_every_micro_batch or schedule.updates.any()
    if spec.grad_reduce == "none" or not during_passes:
        return
    # Each reduction follows the op of its own segment or, if it blocks, the whole pass.
    after = np.flatnonzero(reduced_after(spec, schedule)[passes.instruction])
    instruction = passes.instruction[after]
    follows = after
    if spec.grad_reduce == "end" and not spec.gathers_by_layer:
        follows = passes.end[instruction]
    device = schedule.device[instruction]
    stage = schedule.instruction_stage[instruction]
    slot = schedule.slot[instruction]

    # Replicas of a stage on several devices reduce together, once the last of them is ready.
    meeting = None
    if not spec.reduce_every_micro_batch:
        meeting = _meetings(stage, passes.segment[after], schedule.replicas)
    if meeting is not None:
        slot[meeting] = slot[meeting].max(axis=1, keepdims=True)
    reductions = builder.add(
        Kind.GRAD_REDUCE,
        device,
        Stream.DATA_COMM,
        stage,
        segment=passes.segment[after],
        micro_batch=schedule.micro_batch[instruction] if spec.reduce_every_micro_batch else -1,
        key=order.key(slot, device, passes.part[follows], Around.REDUCE),
    )
    builder.connect(follows, reductions)

    # Without overlap the device's next op waits for the reduction.
    if spec.grad_reduce == "end":
        has_next = np.flatnonzero(
            np.append(np.diff(schedule.device[passes.instruction]) == 0, False)
        )
        waited_for = np.isin(follows, has_next)
        builder.connect(reductions[waited_for], follows[waited_for] + 1)

    # The reduction of each replica waits for the backwards of all other replicas.
    if meeting is not None:
        for shift in range(1, schedule.replicas):
            other_replica = np.roll(meeting, shift, axis=1)
            builder.connect(after[meeting].ravel(), reductions[other_replica].ravel())


def reduced_after(spec: ProgramSpec, schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Instructions after which gradients are reduced immediately."""
    # Every backward, except the last one of each chunk if its reduction waits for the end of the
    # step.
    if spec.reduce_every_micro_batch:
        reduced = schedule.ends_backward.copy()
        if spec.ends_with_reductions:
            reduced[last_of_chunks(schedule, reduced)] = False
        return reduced

    # Only the last backward of each chunk, which completes its gradients.
    reduced = np.zeros(schedule.n_instructions, bool)
    if spec.grad_reduce in ("overlap", "eager_opt") or schedule.updates.any():
        reduced[last_of_chunks(schedule, schedule.ends_backward)] = True

    # Keep stages of which some device is idle later, with all of their replicas.
    if spec.grad_reduce == "eager_opt":
        stages_with_idle = schedule.instruction_stage[reduced & _idle_later(schedule)]
        reduced &= np.isin(schedule.instruction_stage, stages_with_idle)
    return reduced


def _idle_later(schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Whether the device has an idle slot between the instruction and its own last one (Chimera,
    section 3.2)."""
    # There is an idle slot if more slots than instructions remain up to the last one.
    last = schedule.offsets[1:][schedule.device] - 1
    return schedule.slot[last] - schedule.slot > last - np.arange(schedule.n_instructions)


def _meetings(
    stage: Ids, segment: Ids, replicas: int
) -> Int[np.ndarray, "meetings replicas"] | None:
    """Reductions that are one collective over all replicas of a stage, by index; None without
    replicas."""
    if replicas == 1:
        return None
    return np.lexsort((segment, stage)).reshape(-1, replicas)


def add_offloads(builder: StructureBuilder, passes: Passes, order: ProgramOrder) -> None:
    """Add copies to and from host memory, on separate streams."""
    schedule = passes.schedule
    offloaded: Offloads = offloads(schedule)
    device = schedule.device[offloaded.forward]
    stage = schedule.instruction_stage[offloaded.forward]
    variant = passes.variants.of_transfer[offloaded.forward]

    # A forward's activations are copied out as soon as it ends. The forward after next waits for
    # the copy, so that at most two copies are under way.
    ended = passes.end[offloaded.forward]
    copies_out = builder.add(
        Kind.OFFLOAD,
        device,
        Stream.OFFLOAD,
        stage,
        variant=variant,
        micro_batch=schedule.micro_batch[offloaded.forward],
        free=stage + 1,
        key=order.key(
            schedule.slot[passes.instruction[ended]], device, passes.part[ended], Around.SEND
        ),
    )
    builder.connect(ended, copies_out)
    waits = offloaded.next_but_one >= 0
    builder.connect(copies_out[waits], passes.start[offloaded.next_but_one[waits]])

    # They are copied back while the instruction before their backward runs, and not earlier than it
    # can start.
    overlapping = offloaded.backward - 1
    back = builder.add(
        Kind.RELOAD,
        device,
        Stream.RELOAD,
        stage,
        variant=variant,
        micro_batch=schedule.micro_batch[offloaded.forward],
        alloc=stage + 1,
        key=order.key(schedule.slot[overlapping], device, 0, Around.GATHER),
    )
    builder.connect(copies_out, back)
    before_that = np.where(
        schedule.device[overlapping - 1] == device, passes.last[overlapping - 1], -1
    )
    builder.connect(before_that, back)
    builder.connect(back, passes.start[offloaded.backward])
