"""Gradient reductions that start before the device's last backward is done."""

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.program._order import Around, ProgramOrder
from perfmodel.program._passes import Passes, last_of_chunks
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Kind, Stream
from perfmodel.program._structure_builder import Ids, StructureBuilder
from perfmodel.schedule import Schedule


def add_reductions(builder: StructureBuilder, spec: ProgramSpec, passes: Passes, order: ProgramOrder) -> None:
    """Reductions during the passes: beside them, or with the next pass waiting for each (`grad_reduce="end"`).

    Both have the same ops in the same order, so that overlap only takes waits away. Where a stage has replicas on
    several devices its reduction starts when all of them are ready.
    """
    s = passes.schedule
    during = spec.grad_reduce in ("overlap", "eager_opt") or spec.reduce_every_micro_batch or s.updates.any()
    if spec.grad_reduce == "none" or not during:
        return
    after = np.flatnonzero(passes.op_column(reduced_after(spec, s)))
    instruction = passes.instruction[after]
    device, stage, slot = s.device[instruction], s.instruction_stage[instruction], s.slot[instruction]
    meeting = _meetings(stage, passes.segment[after], s.replicas) if not spec.reduce_every_micro_batch else None
    if meeting is not None:
        slot[meeting] = slot[meeting].max(axis=1, keepdims=True)
    reductions = builder.add(
        Kind.GRAD_REDUCE,
        device,
        Stream.DATA_COMM,
        stage,
        segment=passes.segment[after],
        micro_batch=s.micro_batch[instruction] if spec.reduce_every_micro_batch else -1,
        key=order.key(slot, device, passes.part[after], Around.REDUCE),
    )
    builder.connect(after, reductions)
    if spec.grad_reduce == "end":
        goes_on = np.flatnonzero(np.append(np.diff(s.device[passes.instruction]) == 0, False))
        waited_for = np.isin(after, goes_on)
        builder.connect(reductions[waited_for], after[waited_for] + 1)
    if meeting is not None:
        for shift in range(1, s.replicas):
            builder.connect(after[meeting].ravel(), reductions[np.roll(meeting, shift, axis=1)].ravel())


def reduced_after(spec: ProgramSpec, schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Instructions after which gradients are reduced at once, rather than at the end of the step."""
    if spec.reduce_every_micro_batch:
        return schedule.ends_backward
    reduced = np.zeros(schedule.n_instructions, bool)
    if spec.grad_reduce in ("overlap", "eager_opt") or schedule.updates.any():
        reduced[last_of_chunks(schedule, schedule.ends_backward)] = True
    if spec.grad_reduce == "eager_opt":
        reduced &= np.isin(schedule.instruction_stage, schedule.instruction_stage[reduced & _idle_later(schedule)])
    return reduced


def _idle_later(schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Whether the device has an idle slot between the instruction and its own last one (Chimera, section 3.2)."""
    last = schedule.offsets[1:][schedule.device] - 1
    return schedule.slot[last] - schedule.slot > last - np.arange(schedule.n_instructions)


def _meetings(stage: Ids, segment: Ids, replicas: int) -> Int[np.ndarray, "meetings replicas"] | None:
    """Reductions that are one collective over all replicas of a stage, by their places; None without replicas."""
    if replicas == 1:
        return None
    return np.lexsort((segment, stage)).reshape(-1, replicas)
