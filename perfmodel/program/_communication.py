"""Communication during the passes: transfers between stages, weight gathering."""

import numpy as np

from perfmodel.program._order import Around, ProgramOrder
from perfmodel.program._passes import Passes, first_of_chunks
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Kind, Stream
from perfmodel.program._structure_builder import WHOLE, StructureBuilder
from perfmodel.schedule import NEVER, Phase


def add_transfers(builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
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
        variant = passes.variants.of_transfer[sender]
        if spec.sends == "lag":
            builder.connect(passes.end[sender], passes.start[to], builder.class_code(kind, stage, variant=variant))
            continue
        after = passes.end[sender]
        last_part = passes.part[after]
        sends = builder.add(
            kind,
            device,
            Stream.SEND if spec.sends == "op" else Stream.COMPUTE,
            stage,
            variant=variant,
            micro_batch=s.micro_batch[sender],
            key=order.key(s.slot[passes.instruction[after]], device, last_part, Around.SEND),
        )
        builder.connect(after, sends)
        builder.connect(sends, passes.start[to])


def add_layer_gathers(builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
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
        gathers[which] = builder.add(
            kind,
            device[which],
            Stream.DATA_COMM,
            s.instruction_stage[instruction],
            segment=passes.segment[uses[which]],
            micro_batch=s.micro_batch[instruction],
            key=key[which],
        )
    builder.connect(gathers, uses)
    gated = np.flatnonzero(k > ahead)
    builder.connect(uses[gated - 1 - ahead], gathers[gated])


def add_step_gathers(builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """ZeRO 1 and 2 with overlap: weights gathered from the start of the step on, in order of first use.

    In a stream of steps `add_updates` adds them.
    """
    s = passes.schedule
    if spec.param_gather != "step_overlap" or s.updates.any():
        return
    firsts = first_of_chunks(s, s.phase == Phase.FORWARD)
    firsts = firsts[np.lexsort((s.position[firsts], s.device[firsts]))]
    ops = np.flatnonzero(np.isin(passes.instruction, firsts))
    device = s.device[passes.instruction[ops]]
    count = np.bincount(device, minlength=s.devices)
    place = np.arange(len(ops)) - (np.cumsum(count) - count)[device]
    gathers = builder.add(
        Kind.PARAM_GATHER,
        device,
        Stream.DATA_COMM,
        s.instruction_stage[passes.instruction[ops]],
        segment=passes.segment[ops] if spec.segments > 1 else WHOLE,
        key=order.prologue_key(device, place, s.chunks * spec.segments),
    )
    builder.connect(gathers, ops)
