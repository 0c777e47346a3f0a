"""Adds forward and backward ops: one per instruction, or per segment where necessary."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import (
    COMBINED,
    PAIRED,
    WHOLE,
    Around,
    Ids,
    Kind,
    ProgramOrder,
    Stream,
    StructureBuilder,
)
from perfmodel.schedule import Phase, Schedule


@dataclass(frozen=True)
class Variants:
    """The variants of passes in a schedule, plain first; see `Structure.variants`."""

    table: Int[np.ndarray, "variants 3"]
    of_pass: Int[np.ndarray, " instructions"]
    """Which variant each instruction is."""
    of_transfer: Int[np.ndarray, " instructions"]
    """Variant of each instruction's transfer, which depends only on the number of micro-batches."""


def variants_of(schedule: Schedule, combines: bool = False) -> Variants:
    """Find the variants of a schedule's passes and transfers.

    Args:
        combines: see `ProgramSpec.combines_passes`.
    """
    # Passes of a stage differ in: how many micro-batches, which slice of the sequence, and what
    # runs beside them. `paired` marks the first of a pair, whose second follows it.
    span = schedule.span.astype(np.int64)
    sequence_slice = schedule.micro_batch % schedule.slices
    paired = schedule.paired | np.append(False, schedule.paired[:-1])
    beside_code = paired * PAIRED
    if combines and not paired.any():
        beside_code = _between_others(schedule) * COMBINED

    # Numbers that sort in the order of the table's rows; the plain variant (1, 0, 0) is the
    # smallest.
    ways = 1 + max(PAIRED, COMBINED)
    per_span = schedule.slices * ways
    of_pass = span * per_span + sequence_slice * ways + beside_code
    of_transfer = span * per_span
    plain_code = per_span

    # The codes that occur, decoded again, form the table.
    codes = np.unique(np.concatenate([[plain_code], of_pass, of_transfer]))
    table = np.stack([codes // per_span, codes % per_span // ways, codes % ways], axis=1)
    return Variants(
        table.astype(np.int32),
        of_pass=np.searchsorted(codes, of_pass),
        of_transfer=np.searchsorted(codes, of_transfer),
    )


def _between_others(schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Passes from each device's first backward to its last forward.

    There every backward has a forward of another micro-batch behind it; passes that fill the
    pipeline, and those that drain it, have none.
    """
    index = np.arange(schedule.n_instructions)
    device = schedule.device
    is_forward = schedule.phase == Phase.FORWARD
    first_backward = np.full(schedule.devices, schedule.n_instructions)
    last_forward = np.full(schedule.devices, -1)
    np.minimum.at(first_backward, device[~is_forward], index[~is_forward])
    np.maximum.at(last_forward, device[is_forward], index[is_forward])
    return (index >= first_backward[device]) & (index <= last_forward[device])


_KIND = np.empty(len(Phase), np.int32)
_KIND[Phase.FORWARD] = Kind.FORWARD
_KIND[Phase.BACKWARD] = Kind.BACKWARD
_KIND[Phase.BACKWARD_INPUT] = Kind.BACKWARD_INPUT
_KIND[Phase.BACKWARD_WEIGHT] = Kind.BACKWARD_WEIGHT


@dataclass(frozen=True)
class Passes:
    """The schedule's instructions as compute ops, which have ids 0..n-1 in each device's order."""

    schedule: Schedule
    variants: Variants
    instruction: Int[np.ndarray, " ops"]
    """Instruction that each op is a part of."""
    part: Int[np.ndarray, " ops"]
    """Index among the instruction's parts."""
    segment: Int[np.ndarray, " ops"]
    """Layer group that each op computes, `WHOLE` for the whole stage."""
    first: Int[np.ndarray, " instructions"]
    """Id of each instruction's first part."""
    last: Int[np.ndarray, " instructions"]
    """Id of each instruction's last part."""

    @property
    def start(self) -> Int[np.ndarray, " instructions"]:
        """The op that needs an instruction's inputs (the first of a pair)."""
        second = np.append(False, self.schedule.paired[:-1])
        return np.where(second, np.roll(self.first, 1), self.first)

    @property
    def end(self) -> Int[np.ndarray, " instructions"]:
        """The op whose end makes an instruction's outputs available (the last of a pair)."""
        return np.where(self.schedule.paired, np.roll(self.last, -1), self.last)


def add_passes(
    builder: StructureBuilder,
    spec: ProgramSpec,
    schedule: Schedule,
    variants: Variants,
    order: ProgramOrder,
) -> Passes:
    """Add the compute ops of all instructions; parts of an instruction run one after another."""
    parts = np.where(_split(spec, schedule), spec.segments, 1)
    last = np.cumsum(parts) - 1
    first = last + 1 - parts
    instruction = np.repeat(np.arange(schedule.n_instructions), parts)
    part = np.arange(len(instruction)) - first[instruction]
    phase, stage, device = schedule.phase, schedule.instruction_stage, schedule.device

    # Backward passes take the segments of a stage in reverse; instructions that are not split are
    # whole.
    if spec.segments > 1:
        backwards = (phase != Phase.FORWARD)[instruction]
        segment = np.where(backwards, spec.segments - 1 - part, part)
        segment = np.where(parts[instruction] > 1, segment, WHOLE)
    else:
        segment = np.full(len(instruction), WHOLE)

    # The first forward op of a micro-batch takes its activation memory, the last backward op gives
    # it back. In inference the forward itself does.
    allocates = phase == Phase.FORWARD
    frees = allocates if schedule.forward_only else schedule.ends_backward
    alloc, free = np.zeros((2, len(instruction)), np.int32)
    alloc[first] = np.where(allocates, stage + 1, 0)
    free[last] = np.where(frees, stage + 1, 0)
    ids = builder.add(
        _KIND[phase][instruction],
        device[instruction],
        Stream.COMPUTE,
        stage[instruction],
        segment=segment,
        variant=variants.of_pass[instruction],
        micro_batch=schedule.micro_batch[instruction],
        alloc=alloc,
        free=free,
        key=order.key(schedule.slot[instruction], device[instruction], part, Around.COMPUTE),
    )
    return Passes(schedule, variants, instruction, part, segment, ids[first], ids[last])


def first_forwards(passes: Passes) -> Ids:
    """Ops of the first forward of every chunk of every device, in each step."""
    return np.flatnonzero(np.isin(passes.instruction, _first_of_chunks(passes.schedule)))


def _first_of_chunks(schedule: Schedule) -> Ids:
    """First forward of every chunk of every device, in each step."""
    forwards = np.flatnonzero(schedule.phase == Phase.FORWARD)
    return forwards[np.unique(_chunk_of_step(schedule)[forwards], return_index=True)[1]]


def last_of_chunks(schedule: Schedule, among: Bool[np.ndarray, " instructions"]) -> Ids:
    """The last marked instruction of each chunk, device and step."""
    marked = np.flatnonzero(among)[::-1]
    return marked[np.unique(_chunk_of_step(schedule)[marked], return_index=True)[1]]


def _chunk_of_step(schedule: Schedule) -> Int[np.ndarray, " instructions"]:
    """A number that identifies every chunk of every device between two updates of its weights."""
    device_of_step = schedule.all_updates_before * schedule.devices + schedule.device
    return device_of_step * schedule.chunks + schedule.chunk


def _split(spec: ProgramSpec, schedule: Schedule) -> Bool[np.ndarray, " instructions"]:
    """Return the instructions that become one op per segment, because their communication is by
    segment."""
    n = schedule.n_instructions
    if spec.segments == 1:
        return np.zeros(n, bool)
    if spec.gathers_by_layer:
        return np.ones(n, bool)

    # A stage's last backward is reduced by segments, its first forward waits for gathers by
    # segments. In a stream of steps ops are split whatever overlaps, so that overlap only takes
    # waits away.
    split = np.zeros(n, bool)
    stream = bool(schedule.updates.any())
    if spec.grad_reduce in ("overlap", "eager_opt") or (stream and spec.grad_reduce == "end"):
        ends = schedule.ends_backward
        split[ends if spec.reduce_every_micro_batch else last_of_chunks(schedule, ends)] = True
    if spec.param_gather == "step_overlap" or (stream and spec.param_gather == "step"):
        split[_first_of_chunks(schedule)] = True
    return split
