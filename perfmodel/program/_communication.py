"""Communication during the passes: transfers between stages, gradient reduction, weight gathering."""

import numpy as np

from perfmodel.program._draft import WHOLE, Draft
from perfmodel.program._order import Around, ProgramOrder
from perfmodel.program._passes import Passes, first_of_chunks, last_of_chunks
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Kind, Stream
from perfmodel.schedule import NEVER, Phase


def add_transfers(draft: Draft, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """Activations to the next stage and gradients to the one before, where it is on another device.

    Their class belongs to the sending stage.
    """
    s = passes.schedule
    upstream = s.dependencies.upstream
    receiver = np.flatnonzero(upstream != NEVER)
    receiver = receiver[s.device[upstream[receiver]] != s.device[receiver]]
    for kind, forward in ((Kind.SEND_FORWARD, True), (Kind.SEND_BACKWARD, False)):
        to = receiver[(s.phase[receiver] == Phase.FORWARD) == forward]
        sender = upstream[to]
        stage, device = s.instruction_stage[sender], s.device[sender]
        if spec.sends == "lag":
            draft.connect(passes.last[sender], passes.first[to], draft.class_code(kind, stage))
            continue
        last_part = passes.part[passes.last[sender]]
        sends = draft.add(
            kind,
            device,
            Stream.SEND if spec.sends == "op" else Stream.COMPUTE,
            stage,
            micro_batch=s.micro_batch[sender],
            key=order.key(s.slot[sender], device, last_part, Around.SEND),
        )
        draft.connect(passes.last[sender], sends)
        draft.connect(sends, passes.first[to])


def add_reductions(draft: Draft, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """Gradient reductions that start before the device's last backward is done."""
    overlap = spec.grad_reduce == "overlap"
    if spec.grad_reduce == "none" or not (overlap or spec.reduce_every_micro_batch):
        return
    s = passes.schedule
    reduced = s.ends_backward
    if not spec.reduce_every_micro_batch:
        last = last_of_chunks(s, reduced)
        reduced = np.zeros(s.n_instructions, bool)
        reduced[last] = True
    after = np.flatnonzero(passes.op_column(reduced))
    instruction = passes.instruction[after]
    device = s.device[instruction]
    reductions = draft.add(
        Kind.GRAD_REDUCE,
        device,
        Stream.DATA_COMM if overlap else Stream.COMPUTE,
        s.instruction_stage[instruction],
        segment=passes.segment[after],
        micro_batch=s.micro_batch[instruction] if spec.reduce_every_micro_batch else -1,
        key=order.key(s.slot[instruction], device, passes.part[after], Around.REDUCE),
    )
    draft.connect(after, reductions)


def add_layer_gathers(draft: Draft, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """ZeRO 3: each op that uses weights waits for their gathering.

    On each device gather k is issued when op k - 1 - ahead ends, just before op k - ahead, so that it
    queues on DATA_COMM before reductions that follow op k - ahead (as FSDP's backward prefetch does).
    """
    if not spec.gathers_by_layer:
        return
    s = passes.schedule
    ahead = spec.gathers_ahead
    uses = np.flatnonzero(passes.op_column(s.phase != Phase.BACKWARD_WEIGHT))
    device = s.device[passes.instruction[uses]]
    count = np.bincount(device, minlength=s.devices)
    start = np.cumsum(count) - count
    k = np.arange(len(uses)) - start[device]
    beside = uses[start[device] + np.maximum(k - ahead, 0)]
    slot = s.slot[passes.instruction[beside]]
    key = np.where(
        k < ahead,
        order.lead_in_key(slot, device, k),
        order.key(slot, device, passes.part[beside], Around.GATHER),
    )
    gathers = np.empty(len(uses), np.int64)
    forward = s.phase[passes.instruction[uses]] == Phase.FORWARD
    for kind, which in ((Kind.PARAM_GATHER, forward), (Kind.PARAM_GATHER_BACKWARD, ~forward)):
        instruction = passes.instruction[uses[which]]
        gathers[which] = draft.add(
            kind,
            device[which],
            Stream.DATA_COMM,
            s.instruction_stage[instruction],
            segment=passes.segment[uses[which]],
            micro_batch=s.micro_batch[instruction],
            key=key[which],
        )
    draft.connect(gathers, uses)
    gated = np.flatnonzero(k > ahead)
    draft.connect(uses[gated - 1 - ahead], gathers[gated])


def add_step_gathers(draft: Draft, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """ZeRO 1 and 2 with overlap: weights gathered from the start of the step on, in order of first use."""
    if spec.param_gather != "step_overlap":
        return
    s = passes.schedule
    firsts = first_of_chunks(s, s.phase == Phase.FORWARD)
    firsts = firsts[np.lexsort((s.position[firsts], s.device[firsts]))]
    ops = np.flatnonzero(np.isin(passes.instruction, firsts))
    device = s.device[passes.instruction[ops]]
    count = np.bincount(device, minlength=s.devices)
    place = np.arange(len(ops)) - (np.cumsum(count) - count)[device]
    gathers = draft.add(
        Kind.PARAM_GATHER,
        device,
        Stream.DATA_COMM,
        s.instruction_stage[passes.instruction[ops]],
        segment=passes.segment[ops] if spec.segments > 1 else WHOLE,
        key=order.prologue_key(device, place, s.chunks * spec.segments),
    )
    draft.connect(gathers, ops)
