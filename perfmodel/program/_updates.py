"""Adds weight updates, and the reductions and gathers at the end of a step."""

import numpy as np

from perfmodel.program._communication import reduced_after
from perfmodel.program._passes import Passes, first_forwards
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import (
    N_STREAMS,
    Around,
    Ids,
    Kind,
    ProgramOrder,
    Stream,
    StructureBuilder,
)
from perfmodel.schedule import NEVER, Schedule


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
