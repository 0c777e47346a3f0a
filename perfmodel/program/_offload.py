"""Activations kept in host memory between forward and backward."""

import numpy as np

from perfmodel.program._order import Around, ProgramOrder
from perfmodel.program._passes import Passes
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Kind, Stream
from perfmodel.program._structure_builder import StructureBuilder
from perfmodel.schedule import Offloads, offloads


def add_offloads(builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """Copies to and from host memory, on streams of their own.

    A forward's activations leave as soon as it ends; the forward after next waits for that, so that at
    most two are on their way out. They come back while the instruction before their backward runs.
    """
    if not spec.offload:
        return
    s = passes.schedule
    moved: Offloads = offloads(s)
    device = s.device[moved.forward]
    stage = s.instruction_stage[moved.forward]
    variant = passes.variants.of_transfer[moved.forward]
    ended = passes.end[moved.forward]
    out = builder.add(
        Kind.OFFLOAD,
        device,
        Stream.OFFLOAD,
        stage,
        variant=variant,
        micro_batch=s.micro_batch[moved.forward],
        free=stage + 1,
        key=order.key(s.slot[passes.instruction[ended]], device, passes.part[ended], Around.SEND),
    )
    builder.connect(ended, out)
    waits = moved.next_but_one >= 0
    builder.connect(out[waits], passes.start[moved.next_but_one[waits]])
    beside = moved.backward - 1
    back = builder.add(
        Kind.RELOAD,
        device,
        Stream.RELOAD,
        stage,
        variant=variant,
        micro_batch=s.micro_batch[moved.forward],
        alloc=stage + 1,
        key=order.key(s.slot[beside], device, 0, Around.GATHER),
    )
    builder.connect(out, back)
    builder.connect(np.where(s.device[beside - 1] == device, passes.last[beside - 1], -1), back)
    builder.connect(back, passes.start[moved.backward])
