"""The structure of a step: devices, streams and dependencies of events, without durations.

Durations are a short vector indexed by *class* (DistSim's deduplicated events): one structure
serves every model, cluster and batch that lead to the same order of events.

The table of ops and edges from which a structure is assembled comes behind it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Int

from perfmodel.errors import PerfModelError


class Kind(IntEnum):
    """The kind of an op and its duration class."""

    ZERO = 0
    """Joins and barriers: no time of their own. Class 0 is always of this kind."""
    FORWARD = 1
    BACKWARD = 2
    """Input and weight gradient together, including recomputation."""
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    SEND_FORWARD = 5
    """Activation from a stage to the next."""
    SEND_BACKWARD = 6
    """Activation gradient from a stage to the one before."""
    GRAD_REDUCE = 7
    """All-reduce (ZeRO 0) or reduce-scatter (ZeRO 1-3) of weight gradients over data-parallel
    ranks."""
    PARAM_GATHER = 8
    """All-gather of sharded weights before forward use."""
    PARAM_GATHER_BACKWARD = 9
    """All-gather of sharded weights before backward use (ZeRO 3)."""
    EMBEDDING_REDUCE = 10
    """All-reduce of tied embedding gradients between first and last stage."""
    OPTIMIZER = 11
    OFFLOAD = 12
    """Activations of a stage copied to host memory after its forward."""
    RELOAD = 13
    """Activations of a stage copied back from host memory before its backward."""


def is_of_kind(
    class_kind: Int[np.ndarray, " classes"], kinds: Sequence[Kind]
) -> Bool[np.ndarray, " classes"]:
    """Whether each class is of one of some kinds.

    Args:
        class_kind: kind of every class (`Structure.class_kind`).
    """
    # A look into a table of all kinds takes a tenth of the time of `np.isin`.
    is_wanted = np.zeros(len(Kind), bool)
    is_wanted[list(kinds)] = True
    return is_wanted[class_kind]


class Stream(IntEnum):
    """Streams of a device; ops of one stream run in order, streams run concurrently."""

    COMPUTE = 0
    DATA_COMM = 1
    """Gradient reduction and weight gathering."""
    SEND = 2
    """Point-to-point transfers to the neighbouring stages."""
    OFFLOAD = 3
    """Copies to host memory."""
    RELOAD = 4
    """Copies from host memory."""


N_STREAMS = len(Stream)
PAIRED: Final = 1
"""Variant of a pass that the schedule overlaps with another one, whose kernels hide all of its
collectives."""
COMBINED: Final = 2
"""Variant of a pass that is combined with one of another micro-batch, whose kernels hide its expert
exchanges."""
PLAIN = np.array([[1, 0, 0]], np.int32)
"""The one variant of most structures: single micro-batches of whole sequences, not overlapped."""


@dataclass(frozen=True, eq=False)
class Structure:
    """Ops in topological order (program order).

    The last op is the end of the step: it depends, directly or not, on all others, so that its
    end time is the makespan. End times obey
    `end[i] = max_j(end[pred[i, j]] + d[lag[i, j]]) + d[duration[i]]` with `d` the durations of the
    classes, `d[0] = 0`, and 0 where an op has no predecessor.
    """

    duration: Int[np.ndarray, " ops"]
    """Class of each op's own duration."""
    pred: Int[np.ndarray, "ops 2"]
    """Predecessors (op indices below the op's own), -1 for none."""
    lag: Int[np.ndarray, "ops 2"]
    """Class of the delay between a predecessor's end and the op's start (a transfer), 0 for
    none."""
    stream: Int[np.ndarray, " ops"]
    """device * N_STREAMS + Stream, -1 for joins that belong to no device."""
    micro_batch: Int[np.ndarray, " ops"]
    """Micro-batch of the op; -1 if it has none."""
    class_kind: Int[np.ndarray, " classes"]
    """`Kind` of each class; class 0 is `Kind.ZERO`."""
    class_stage: Int[np.ndarray, " classes"]
    """Global stage (chunk * devices + device for interleaved) that the class belongs to."""
    class_segment: Int[np.ndarray, " classes"]
    """Layer group inside the stage (0 if a stage is one op)."""
    alloc: Int[np.ndarray, " ops"]
    """Memory class whose bytes the op allocates at its start: global stage + 1, or 0 for none.
    Bytes are per micro-batch; an op of several allocates (and frees) a multiple."""
    free: Int[np.ndarray, " ops"]
    """Memory class whose bytes the op frees at its end, 0 for none."""
    devices: int
    """Pipeline ranks (tensor- and data-parallel replicas are identical and not repeated)."""
    class_variant: Int[np.ndarray, " classes"] = field(
        default_factory=lambda: np.zeros(0, np.int32)
    )
    """Row of `variants` of each class (left out: 0 for all)."""
    variants: Int[np.ndarray, "variants 3"] = field(default_factory=lambda: PLAIN.copy())
    """Variants of a stage's passes: micro-batches computed at once, slice of the sequence, and
    whether the pass runs alone (0) or overlaps with another (`PAIRED`, `COMBINED`)."""

    def __post_init__(self) -> None:
        if not len(self.class_variant):
            object.__setattr__(self, "class_variant", np.zeros(self.n_classes, np.int32))
        n = len(self.duration)
        if n == 0:
            raise PerfModelError("structure: at least one op is needed")

        # Program order: with every predecessor before its op the graph has no cycle, and a single
        # pass over the ops finds all end times.
        rows = np.arange(n)[:, None]
        if (self.pred >= rows).any() or (self.pred < -1).any():
            op = int(np.argmax(((self.pred >= rows) | (self.pred < -1)).any(axis=1)))
            raise PerfModelError(
                f"structure: op {op} has predecessors {self.pred[op]} that come after it"
            )
        for name in ("duration", "lag"):
            values = getattr(self, name)
            if values.min() < 0 or values.max() >= self.n_classes:
                raise PerfModelError(
                    f"structure: {name} classes must lie in 0..{self.n_classes - 1}"
                )
        if self.class_kind[0] != Kind.ZERO:
            raise PerfModelError("structure: class 0 must be Kind.ZERO")

    @property
    def n_ops(self) -> int:
        return len(self.duration)

    @property
    def n_classes(self) -> int:
        return len(self.class_kind)

    @property
    def n_edges(self) -> int:
        return int((self.pred >= 0).sum())

    @property
    def class_span(self) -> Int[np.ndarray, " classes"]:
        """Number of micro-batches that an op of each class computes at once."""
        return self.variants[self.class_variant, 0]

    @property
    def spans(self) -> list[int]:
        """Numbers of micro-batches that a pass may compute at once, over all variants."""
        return np.unique(self.variants[:, 0]).tolist()

    @property
    def device(self) -> Int[np.ndarray, " ops"]:
        """Pipeline rank of each op, -1 for joins that belong to none."""
        return np.where(self.stream < 0, -1, self.stream // N_STREAMS)

    @property
    def kind(self) -> Int[np.ndarray, " ops"]:
        """`Kind` of each op."""
        return self.class_kind[self.duration]


# --- the growing table of ops and edges from which a structure is assembled
# ------------------------------

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
    """Kind, stage and segment packed into one number (`StructureBuilder.class_code`); 0 for
    joins."""
    stream: Ids
    micro_batch: Ids
    alloc: Ids
    free: Ids
    key: Ids
    """Sort key for the program order, any integers; only used until `StructureBuilder.sort`."""


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

    def class_code(
        self, kind: Column, stage: Column, segment: Column = WHOLE, variant: Column = 0
    ) -> Column:
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
        """Add one op per entry of `device` (the other columns may be single values); returns their
        ids."""
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
        self.edges = [
            Edges(place[edges.source], place[edges.destination], edges.lag_code)
            for edges in self.edges
        ]

    def last_on_streams(self) -> Int[np.ndarray, "devices streams"]:
        """Id of the last op so far on every stream of every device; -1 if there is none."""
        # NumPy keeps the last assignment of a repeated index; `NO_STREAM` lands in the extra entry.
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
    """Keys for `StructureBuilder.sort`: positions of ops relative to the schedule's instructions.

    An op's key is its instruction's slot, then its place around the instruction's parts, then its
    device. Slots grow along data dependencies, so keys do too.
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
        """Key of an op at one of an instruction's places: first the `lead_in` places before it,
        then those around its parts."""
        width = self.lead_in + len(Around) * self.segments
        return (slot.astype("int64") * width + place) * self.devices + device
