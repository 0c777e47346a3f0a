"""Adds to a program the events outside its passes: transfers between stages, weight gathers,
gradient reductions, host copies, and updates of weights."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.program._passes import Passes, first_forwards, last_of_chunks
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import (
    N_STREAMS,
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


# --- updates of weights, and the end of the step
# -------------------------------------------------------
#
# Adds weight updates, and the reductions and gathers at the end of a step.


def add_updates(
    builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder
) -> Ids:
    """Add weight updates at the places given by the schedule.

    Passes after an optimizer wait for it by the order of their stream, first forwards for their
    gathered weights.

    Returns:
        The optimizer of every update, of all devices one after another.
    """
    schedule = passes.schedule
    updating = np.flatnonzero(schedule.updates)
    device = schedule.device[updating]
    slot, part = schedule.slot[updating], passes.part[passes.last[updating]]

    # The first and the last stage each spend the time of the all-reduce. They do not wait for each
    # other, because in a stream of steps these devices are steps apart.
    if spec.tied_embedding:
        ends = np.isin(schedule.stage[device], [0, schedule.n_stages - 1]).any(axis=1)
        stage = np.where((schedule.stage[device] == 0).any(axis=1), 0, schedule.n_stages - 1)[ends]
        key = order.key(slot[ends], device[ends], part[ends], Around.UPDATE)
        builder.add(Kind.EMBEDDING_REDUCE, device[ends], Stream.COMPUTE, stage, key=key)
    key = order.key(slot, device, part, Around.UPDATE_END)
    optimizers = builder.add(
        Kind.OPTIMIZER, device, Stream.COMPUTE, schedule.stage[device, 0], key=key
    )

    # An optimizer waits for the reductions since the device's last update.
    columns = builder.columns()
    reductions = np.flatnonzero(
        columns.class_code // builder.class_code(1, 0, -1) == Kind.GRAD_REDUCE
    )
    if len(reductions):
        waits = _next_of(
            columns.key[reductions], columns.stream[reductions] // N_STREAMS, key, device
        )
        builder.connect(reductions, optimizers[waits])
    if spec.param_gather in ("step", "step_overlap"):
        _add_gathers(builder, spec, passes, optimizers, order)
    return optimizers


def _next_of(
    key: np.ndarray, device: np.ndarray, later_key: np.ndarray, later_device: np.ndarray
) -> np.ndarray:
    """Index of the first later entry with a higher key on the same device, for each entry."""
    # Device and key in one number, so that a single search serves all devices.
    scale = int(max(key.max(), later_key.max())) + 1
    order = np.argsort(later_device * scale + later_key)
    places = np.searchsorted((later_device * scale + later_key)[order], device * scale + key)
    return order[places]


def _add_gathers(
    builder: StructureBuilder,
    spec: ProgramSpec,
    passes: Passes,
    optimizers: np.ndarray,
    order: ProgramOrder,
) -> None:
    """Add gathers of sharded weights before each step of the stream, in the order in which its
    passes need them.

    Without overlap the device waits for all of them; with overlap, each first forward waits for its
    own. The gathers and their order are the same, so that overlap only removes waits.
    """
    schedule = passes.schedule
    overlapped = spec.param_gather == "step_overlap"
    uses = first_forwards(passes)
    used_by = passes.instruction[uses]

    # The update before each use, and the device's next instruction after it. Optimizers are
    # numbered like the updates: one device after another.
    update = np.where(
        schedule.updates_before[used_by] > 0, schedule.all_updates_before[used_by] - 1, NEVER
    )
    after_update = np.flatnonzero(schedule.updates)[update] + 1
    next_instruction = np.where(
        update == NEVER, schedule.offsets[schedule.device[used_by]], after_update
    )

    # Gathers before the same instruction queue in the order of their uses.
    place = np.arange(len(uses)) - np.searchsorted(next_instruction, next_instruction)
    gathers = builder.add(
        Kind.PARAM_GATHER,
        schedule.device[used_by],
        Stream.DATA_COMM,
        schedule.instruction_stage[used_by],
        segment=passes.segment[uses],
        key=order.place_key(schedule.slot[next_instruction], schedule.device[used_by], place),
    )
    builder.connect(gathers, uses if overlapped else passes.first[next_instruction])
    builder.connect(np.where(update == NEVER, NEVER, optimizers[update]), gathers)


_AWAITED = [Stream.COMPUTE, Stream.DATA_COMM]
"""Streams whose work the end of the step waits for; transfers on SEND are awaited by their
receivers."""


def add_step_end(builder: StructureBuilder, spec: ProgramSpec, schedule: Schedule) -> None:
    """Add everything after the passes; the builder must be sorted."""
    if spec.is_forward_only or schedule.forward_only or schedule.updates.any():
        return

    # After each device's last backward, the chunks that were not reduced earlier are reduced.
    if spec.ends_with_reductions:
        reduced_early = np.zeros(schedule.n_stages, bool)
        if not spec.reduce_every_micro_batch:
            reduced_early[schedule.instruction_stage[reduced_after(spec, schedule)]] = True

        # Later chunks come first, because their backwards end first in looped pipelines.
        last_pass = builder.last_on_streams()[:, Stream.COMPUTE]
        for chunk in reversed(range(schedule.chunks)):
            devices = np.flatnonzero(~reduced_early[schedule.stage[:, chunk]])
            stage = schedule.stage[devices, chunk]
            reductions = builder.add(Kind.GRAD_REDUCE, devices, Stream.DATA_COMM, stage)

            # All devices that hold the stage must be ready: this one and those of its replicas.
            reduction, holder = np.nonzero(
                (schedule.stage[None] == stage[:, None, None]).any(axis=2)
            )
            builder.connect(last_pass[holder], reductions[reduction])

    # All-reduce of tied embeddings between the devices of the first and the last stage, when both
    # are ready.
    if spec.tied_embedding:
        ends = np.array([0, schedule.n_stages - 1])
        devices = np.array([np.argwhere(schedule.stage == stage)[0][0] for stage in ends])
        # A device that holds both ends has both gradients itself.
        if devices[0] != devices[1]:
            last = builder.last_on_streams()[devices][:, _AWAITED].ravel()
            reductions = builder.add(Kind.EMBEDDING_REDUCE, devices, Stream.DATA_COMM, ends)
            builder.connect(np.repeat(last, 2), np.tile(reductions, len(last)))

    if spec.optimizer:
        # One optimizer op per device; its class belongs to the stage of the device's chunk 0. The
        # order of the compute stream makes it wait for the passes, an edge for the reductions.
        ready = builder.last_on_streams()[:, _AWAITED]
        before = ready[:, 1]

        # The norm of all gradients is known once the last device has its own.
        if spec.grad_norm_barrier and schedule.devices > 1:
            before = builder.add_join()
            builder.connect(ready.ravel(), before)
        optimizers = builder.add(
            Kind.OPTIMIZER, np.arange(schedule.devices), Stream.COMPUTE, schedule.stage[:, 0]
        )
        builder.connect(before, optimizers)

    if spec.param_gather == "step":
        _add_final_gathers(builder, schedule)


def _add_final_gathers(builder: StructureBuilder, schedule: Schedule) -> None:
    """Add gathers of updated weights, chunk by chunk; the first waits for the optimizer, the others
    for their stream."""
    updated = builder.last_on_streams()[:, Stream.COMPUTE]
    for chunk in range(schedule.chunks):
        gathers = builder.add(
            Kind.PARAM_GATHER,
            np.arange(schedule.devices),
            Stream.DATA_COMM,
            schedule.stage[:, chunk],
        )
        if chunk == 0:
            builder.connect(updated, gathers)
