"""Weight updates inside a stream of steps: optimizer, and gathering of sharded weights."""

import numpy as np

from perfmodel.program._order import Around, ProgramOrder
from perfmodel.program._passes import Passes, first_of_chunks
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Kind, Stream
from perfmodel.program._structure_builder import WHOLE, StructureBuilder
from perfmodel.schedule import NEVER, Phase


def add_updates(builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """Where a schedule tells when weights are updated: each device does so on its own and goes on.

    The optimizer waits for the reductions since the device's last update; passes after it wait for the
    optimizer by the order of their stream, and first forwards for their gathered weights.
    """
    s = passes.schedule
    at = np.flatnonzero(s.updates)
    if not len(at) or not spec.optimizer:
        return
    device = s.device[at]
    slot, part = s.slot[at], passes.part[passes.last[at]]
    if spec.tied_embedding:
        # each end's all-reduce takes its time where it stands; the two ends do not wait for each other, as
        # devices in a stream are steps apart
        ends = np.isin(s.stage[device], [0, s.n_stages - 1]).any(axis=1)
        stage = np.where((s.stage[device] == 0).any(axis=1), 0, s.n_stages - 1)[ends]
        key = order.key(slot[ends], device[ends], part[ends], Around.UPDATE)
        builder.add(Kind.EMBEDDING_REDUCE, device[ends], Stream.COMPUTE, stage, key=key)
    key = order.key(slot, device, part, Around.UPDATE_END)
    optimizers = builder.add(Kind.OPTIMIZER, device, Stream.COMPUTE, s.stage[device, 0], key=key)
    columns = builder.columns()
    reductions = np.flatnonzero(columns.class_code // builder.class_code(1, 0, -1) == Kind.GRAD_REDUCE)
    reductions = reductions[columns.stream[reductions] % len(Stream) == Stream.DATA_COMM]
    if len(reductions):
        waits = _next_of(columns.key[reductions], columns.stream[reductions] // len(Stream), key, device)
        builder.connect(reductions, optimizers[waits])
    if spec.param_gather in ("step", "step_overlap"):
        _add_gathers(builder, spec, passes, optimizers, order)


def _next_of(key: np.ndarray, device: np.ndarray, later_key: np.ndarray, later_device: np.ndarray) -> np.ndarray:
    """For each entry the first of the later ones on its device whose key is higher."""
    scale = int(max(key.max(), later_key.max())) + 1
    order = np.argsort(later_device * scale + later_key)
    found = np.searchsorted((later_device * scale + later_key)[order], device * scale + key)
    return order[found]


def _add_gathers(
    builder: StructureBuilder, spec: ProgramSpec, passes: Passes, optimizers: np.ndarray, order: ProgramOrder
) -> None:
    """Sharded weights are gathered before each step of the stream, in the order in which its passes need them.

    The device goes on once it has all of them, or overlapped each first forward waits for its own: the same gathers one
    after another, so that overlap only takes waits away.
    """
    s = passes.schedule
    overlapped = spec.param_gather == "step_overlap"
    firsts = first_of_chunks(s, s.phase == Phase.FORWARD)
    firsts = firsts[np.lexsort((s.position[firsts], s.device[firsts]))]
    uses = np.flatnonzero(np.isin(passes.instruction, firsts)) if overlapped else passes.first[firsts]
    used_by = passes.instruction[uses]
    done = np.cumsum(s.updates) - s.updates  # of all devices, one after another, as the optimizers are
    update = np.where(s.updates_before[used_by] > 0, done[used_by] - 1, NEVER)
    goes_on = np.where(update == NEVER, s.offsets[s.device[used_by]], np.flatnonzero(s.updates)[update] + 1)
    place = np.arange(len(uses)) - np.searchsorted(goes_on, goes_on)
    gathers = builder.add(
        Kind.PARAM_GATHER,
        s.device[used_by],
        Stream.DATA_COMM,
        s.instruction_stage[used_by],
        segment=passes.segment[uses] if overlapped else WHOLE,
        key=order.lead_in_key(s.slot[goes_on], s.device[used_by], place),
    )
    builder.connect(gathers, uses if overlapped else passes.first[goes_on])
    builder.connect(np.where(update == NEVER, NEVER, optimizers[update]), gathers)
