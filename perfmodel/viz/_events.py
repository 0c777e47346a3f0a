"""A timeline as drawable slices: the ops of every stream, and transfers folded into lags."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.program import N_STREAMS, Kind, Stream
from perfmodel.timeline import Timeline

LABELS = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.BACKWARD_INPUT: "backward (input)",
    Kind.BACKWARD_WEIGHT: "backward (weight)",
    Kind.SEND_FORWARD: "send activation",
    Kind.SEND_BACKWARD: "send gradient",
    Kind.GRAD_REDUCE: "gradient reduction",
    Kind.PARAM_GATHER: "weight gather",
    Kind.PARAM_GATHER_BACKWARD: "weight gather (backward)",
    Kind.EMBEDDING_REDUCE: "embedding all-reduce",
    Kind.OPTIMIZER: "optimizer",
    Kind.OFFLOAD: "offload to host",
    Kind.RELOAD: "reload from host",
}


@dataclass(frozen=True)
class Slices:
    """Parallel arrays, one entry per slice, sorted by start."""

    start_s: Float[np.ndarray, " slices"]
    duration_s: Float[np.ndarray, " slices"]
    device: Int[np.ndarray, " slices"]
    stream: Int[np.ndarray, " slices"]
    kind: Int[np.ndarray, " slices"]
    stage: Int[np.ndarray, " slices"]
    micro_batch: Int[np.ndarray, " slices"]
    critical: Bool[np.ndarray, " slices"]
    """On the critical path."""

    def __iter__(self) -> Iterator[tuple[float, float, int, int, int, int, int, bool]]:
        columns = (getattr(self, name) for name in self.__dataclass_fields__)
        return iter(zip(*(c.tolist() for c in columns), strict=True))


def slices(timeline: Timeline) -> Slices:
    """Every op that takes time, and every transfer, as a slice."""
    s = timeline.structure
    start, end = np.asarray(timeline.start_s), np.asarray(timeline.end_s)
    path = np.zeros(s.n_ops, bool)
    path[timeline.critical_path()] = True
    ops = np.flatnonzero((s.stream >= 0) & (end > start) & (s.kind != Kind.ZERO))
    op, side = np.nonzero((s.lag > 0) & (s.pred >= 0))
    source = s.pred[op, side]
    lag_class = s.lag[op, side]
    lag_s = np.asarray(timeline.durations_s)[lag_class]
    moved = lag_s > 0
    op, source, lag_class, lag_s = op[moved], source[moved], lag_class[moved], lag_s[moved]
    joined = Slices(
        start_s=np.concatenate([start[ops], end[source]]),
        duration_s=np.concatenate([(end - start)[ops], lag_s]),
        device=np.concatenate([s.device[ops], s.device[source]]),
        stream=np.concatenate([s.stream[ops] % N_STREAMS, np.full(len(op), Stream.SEND)]),
        kind=np.concatenate([s.kind[ops], s.class_kind[lag_class]]),
        stage=np.concatenate([s.class_stage[s.duration[ops]], s.class_stage[lag_class]]),
        micro_batch=np.concatenate([s.micro_batch[ops], s.micro_batch[op]]),
        critical=np.concatenate([path[ops], path[op] & path[source]]),
    )
    order = np.lexsort((joined.stream, joined.device, joined.start_s))
    return Slices(**{name: getattr(joined, name)[order] for name in joined.__dataclass_fields__})
