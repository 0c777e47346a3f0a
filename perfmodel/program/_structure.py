"""The structure of a step: devices, streams and dependencies of events, without durations.

Durations are a short vector indexed by *class* (DistSim's deduplicated events): one structure
serves every model, cluster and batch that lead to the same order of events.
"""

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
from jaxtyping import Int

from perfmodel.errors import PerfModelError


class Kind(IntEnum):
    """The kind of an op and its duration class."""

    ZERO = 0
    """Joins and barriers: no time of their own. Class 0 is always of this kind."""
    FORWARD = 1
    BACKWARD = 2
    """Input and weight gradient together, with whatever is recomputed."""
    BACKWARD_INPUT = 3
    BACKWARD_WEIGHT = 4
    SEND_FORWARD = 5
    """Activation from a stage to the next."""
    SEND_BACKWARD = 6
    """Activation gradient from a stage to the one before."""
    GRAD_REDUCE = 7
    """All-reduce (ZeRO 0) or reduce-scatter (ZeRO 1-3) of weight gradients over data-parallel ranks."""
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
"""Variant of a pass that the schedule runs beside another, behind whose kernels all of its collectives hide."""
COMBINED: Final = 2
"""Variant of a pass that takes turns with one of another micro-batch; its expert exchanges hide behind the other's
kernels."""
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
    """Class of the delay between a predecessor's end and the op's start (a transfer), 0 for none."""
    stream: Int[np.ndarray, " ops"]
    """device * N_STREAMS + Stream, -1 for joins that belong to no device."""
    micro_batch: Int[np.ndarray, " ops"]
    """Micro-batch of the op, -1 where it has none."""
    class_kind: Int[np.ndarray, " classes"]
    """`Kind` of each class; class 0 is `Kind.ZERO`."""
    class_stage: Int[np.ndarray, " classes"]
    """Global stage (chunk * devices + device for interleaved) that the class belongs to."""
    class_segment: Int[np.ndarray, " classes"]
    """Layer group inside the stage (0 where a stage is one op)."""
    alloc: Int[np.ndarray, " ops"]
    """Memory class whose bytes the op takes at its start: global stage + 1, 0 for none. They are bytes per
    micro-batch: an op of several takes (and gives back) so many times as much."""
    free: Int[np.ndarray, " ops"]
    """Memory class whose bytes the op gives back at its end, 0 for none."""
    devices: int
    """Pipeline ranks (tensor- and data-parallel replicas are identical and not repeated)."""
    class_variant: Int[np.ndarray, " classes"] = field(default_factory=lambda: np.zeros(0, np.int32))
    """Row of `variants` of each class (left out: 0 for all)."""
    variants: Int[np.ndarray, "variants 3"] = field(default_factory=lambda: PLAIN.copy())
    """Ways in which passes of one stage differ: micro-batches computed in one go, slice of the sequence,
    and whether the pass runs alone (0) or beside another (`PAIRED`, `COMBINED`)."""

    def __post_init__(self) -> None:
        if not len(self.class_variant):
            object.__setattr__(self, "class_variant", np.zeros(self.n_classes, np.int32))
        n = len(self.duration)
        if n == 0:
            raise PerfModelError("structure: at least one op is needed")

        # Program order: with every predecessor before its op the graph has no cycle, and a single pass over the
        # ops finds all end times.
        rows = np.arange(n)[:, None]
        if (self.pred >= rows).any() or (self.pred < -1).any():
            op = int(np.argmax(((self.pred >= rows) | (self.pred < -1)).any(axis=1)))
            raise PerfModelError(f"structure: op {op} has predecessors {self.pred[op]} that come after it")
        for name in ("duration", "lag"):
            values = getattr(self, name)
            if values.min() < 0 or values.max() >= self.n_classes:
                raise PerfModelError(f"structure: {name} classes must lie in 0..{self.n_classes - 1}")
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
    def device(self) -> Int[np.ndarray, " ops"]:
        """Pipeline rank of each op, -1 for joins that belong to none."""
        return np.where(self.stream < 0, -1, self.stream // N_STREAMS)

    @property
    def kind(self) -> Int[np.ndarray, " ops"]:
        """`Kind` of each op."""
        return self.class_kind[self.duration]
