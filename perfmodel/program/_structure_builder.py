"""The growing table of ops and edges from which a structure is assembled, and where its ops stand in program order."""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from perfmodel.program._structure import N_STREAMS, PLAIN, Stream

WHOLE = -1
"""Segment of a class that covers its whole stage, in structures where other ops are split."""

NO_STREAM = -1
"""Stream of a join, which belongs to no device."""
Ids = Int[np.ndarray, "..."]
"""Ids of ops, or of instructions."""
Column = Ids | int
"""A column of the op or edge table, or one value for all its entries."""


class OpColumns(NamedTuple):
    """The op table, one entry per op in each column."""

    class_code: Ids
    """Kind, stage and segment packed into one number (`StructureBuilder.class_code`); 0 for joins."""
    stream: Ids
    micro_batch: Ids
    alloc: Ids
    free: Ids
    key: Ids
    """Place in program order, any integers; only of use until `StructureBuilder.sort`."""


class Edges(NamedTuple):
    """Edges added together: ids of source and destination ops, and the class code of the delay."""

    source: Ids
    destination: Ids
    lag_code: Ids


@dataclass
class StructureBuilder:
    """Ops and edges added in bulk. Ids count up from 0.

    First come ops with keys, in any order; `sort` then puts them in program order. Ops added after
    that stand where they are added.
    """

    devices: int
    n_stages: int
    segments: int
    variants: Int[np.ndarray, "variants 3"] = field(default_factory=lambda: PLAIN.copy())
    edges: list[Edges] = field(default_factory=list)
    n_ops: int = 0
    _blocks: list[OpColumns] = field(default_factory=list)

    def class_code(self, kind: Column, stage: Column, segment: Column = WHOLE, variant: Column = 0) -> Column:
        """Number of the class (kind, variant, stage, segment); 0 is `Kind.ZERO`."""
        # Mixed radix. Segments count from -1 (`WHOLE`), hence the one more.
        kind_and_variant = kind * len(self.variants) + variant
        return (kind_and_variant * self.n_stages + stage) * (self.segments + 1) + segment + 1

    def add(
        self,
        kind: Column,
        device: Ids,
        stream: Stream,
        stage: Column,
        *,
        segment: Column = WHOLE,
        variant: Column = 0,
        micro_batch: Column = -1,
        alloc: Column = 0,
        free: Column = 0,
        key: Column = 0,
    ) -> Ids:
        """Add one op per entry of `device` (the other columns may be single values); returns their ids."""
        code = self.class_code(kind, stage, segment, variant)
        return self._append(code, device * N_STREAMS + stream, micro_batch, alloc, free, key)

    def add_join(self) -> int:
        """Add one op of no duration that belongs to no stream; returns its id."""
        return int(self._append(0, np.array([NO_STREAM]), -1, 0, 0, 0)[0])

    def _append(self, class_code: Column, stream: Ids, *rest: Column) -> Ids:
        """Append a block of ops, single values repeated for all of them; returns their ids."""
        count = len(stream)
        columns = []
        for column in (class_code, stream, *rest):
            columns.append(column if isinstance(column, np.ndarray) else np.full(count, column))
        self._blocks.append(OpColumns(*columns))
        self.n_ops += count
        return np.arange(self.n_ops - count, self.n_ops)

    def connect(self, source: Column, destination: Column, lag_code: Column = 0) -> None:
        """Add edges (arguments broadcast); sources below 0 stand for none."""
        source, destination, lag_code = np.broadcast_arrays(source, destination, lag_code)
        exists = source >= 0
        self.edges.append(Edges(source[exists], destination[exists], lag_code[exists]))

    def columns(self) -> OpColumns:
        """The whole op table."""
        # Joined when first asked for, and kept so: blocks are many and small while ops are added.
        if len(self._blocks) > 1:
            self._blocks = [OpColumns(*map(np.concatenate, zip(*self._blocks, strict=True)))]
        return self._blocks[0]

    def sort(self) -> None:
        """Put all ops so far in the order of their keys; ids change accordingly."""
        # Keys grow along every edge, so that this is a topological order.
        ops = self.columns()
        order = np.argsort(ops.key)
        self._blocks = [OpColumns(*(column[order] for column in ops))]

        # Edges name ops by their new places.
        place = np.empty(self.n_ops, np.int32)
        place[order] = np.arange(self.n_ops, dtype=np.int32)
        self.edges = [Edges(place[edges.source], place[edges.destination], edges.lag_code) for edges in self.edges]

    def last_on_streams(self) -> Int[np.ndarray, "devices streams"]:
        """Id of the last op so far on every stream of every device, -1 where there is none."""
        # Of repeated indices NumPy keeps the last one assigned; `NO_STREAM` lands in the extra entry.
        stream = self.columns().stream
        last = np.full(self.devices * N_STREAMS + 1, -1)
        last[stream] = np.arange(self.n_ops)
        return last[:-1].reshape(self.devices, N_STREAMS)


class Around(IntEnum):
    """Places around one part (segment) of an instruction, in order."""

    GATHER = 0
    COMPUTE = 1
    REDUCE = 2
    SEND = 3
    UPDATE = 4
    UPDATE_END = 5


@dataclass(frozen=True)
class ProgramOrder:
    """Keys for `StructureBuilder.sort`: where ops stand relative to the schedule's instructions.

    An op's key is its instruction's slot, then its place around the instruction's parts, then its device.
    Slots grow along data dependencies, so keys do too.
    """

    devices: int
    segments: int
    """Most parts that an instruction is split into."""
    lead_in: int
    """Extra places before an instruction's first part."""

    def key(self, slot: Ids, device: Ids, part: Column, around: Around) -> Ids:
        """Key of an op at one of the places around a part."""
        return self.place_key(slot, device, self.lead_in + len(Around) * part + around)

    def place_key(self, slot: Ids, device: Ids, place: Column) -> Ids:
        """Key of an op at one of an instruction's places: the `lead_in` ones before it, then those around its parts."""
        width = self.lead_in + len(Around) * self.segments
        return (slot.astype("int64") * width + place) * self.devices + device

    def prologue_key(self, device: Ids, place: Ids, places: int) -> Ids:
        """Key of an op before all instructions, `place` in 0..places-1."""
        return (place - places) * self.devices + device
