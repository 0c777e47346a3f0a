"""Times of events with intervals and provenance."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol, TypeVar

import numpy as np
from jaxtyping import Float64

from perfmodel.ops import Collective, KernelOp, Op
from perfmodel.spec import Cluster, Device

_RINGS: Final = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")


@dataclass(frozen=True)
class EventTimes:
    """Predicted times of `n` events."""

    time_s: Float64[np.ndarray, "n"]
    lo_s: Float64[np.ndarray, "n"]
    """Lower end of the 90 % interval."""
    hi_s: Float64[np.ndarray, "n"]
    """Upper end of the 90 % interval."""
    provenance: tuple[str, ...]
    """`measured`, `learned`, `analytical`, `extrapolated`, or `skipped: reason`."""

    @classmethod
    def of_rows(cls, rows: Sequence[tuple[Any, ...]]) -> "EventTimes":
        """Of events by row: time, lower and upper end, provenance; what stands behind is left out."""
        time_s, lo_s, hi_s = np.array([row[:3] for row in rows], float).reshape(-1, 3).T
        return cls(time_s, lo_s, hi_s, tuple(row[3] for row in rows))

    def rows(self) -> Iterator[tuple[float, float, float, str]]:
        """Inverse of `of_rows`."""
        return zip(self.time_s.tolist(), self.lo_s.tolist(), self.hi_s.tolist(), self.provenance, strict=True)

    @classmethod
    def together(cls, n: int, parts: Iterable[tuple[Sequence[int], "EventTimes"]]) -> "EventTimes":
        """Those of `n` events, each part with the positions that it is of."""
        time_s, lo_s, hi_s = np.zeros((3, n))
        provenance = np.full(n, "", object)
        for at, part in parts:
            time_s[at], lo_s[at], hi_s[at], provenance[at] = part.time_s, part.lo_s, part.hi_s, part.provenance
        return cls(time_s, lo_s, hi_s, tuple(provenance.tolist()))

    def scaled(self, by: Float64[np.ndarray, "n"]) -> "EventTimes":
        """The same with every time and its interval multiplied."""
        return replace(self, time_s=self.time_s * by, lo_s=self.lo_s * by, hi_s=self.hi_s * by)

    def plus(self, more_s: Float64[np.ndarray, "n"]) -> "EventTimes":
        """The same with every time and its interval so much longer."""
        return replace(self, time_s=self.time_s + more_s, lo_s=self.lo_s + more_s, hi_s=self.hi_s + more_s)

    def at_least(self, where: Sequence[int], bounds: "EventTimes") -> "EventTimes":
        """The same with those of the events at `where` that take less time than their `bounds` replaced by these."""
        return self._replaced(where, bounds, np.greater)

    def at_most(self, where: Sequence[int], bounds: "EventTimes") -> "EventTimes":
        """The same with those of the events at `where` that take longer than their `bounds` replaced by these."""
        return self._replaced(where, bounds, np.less)

    def replaced(self, where: Sequence[int], others: "EventTimes") -> "EventTimes":
        """The same with the events at `where` taking the times of `others`."""
        return self._replaced(where, others, np.not_equal)

    def _replaced(self, where: Sequence[int], bounds: "EventTimes", by: np.ufunc) -> "EventTimes":
        time_s, lo_s, hi_s = self.time_s.copy(), self.lo_s.copy(), self.hi_s.copy()
        provenance = list(self.provenance)
        for at, i in enumerate(where):
            if by(bounds.time_s[at], time_s[i]):
                time_s[i], lo_s[i], hi_s[i] = bounds.time_s[at], bounds.lo_s[at], bounds.hi_s[at]
                provenance[i] = bounds.provenance[at]
        return EventTimes(time_s, lo_s, hi_s, tuple(provenance))


_MOST_KNOWN: Final = 500_000
"""Events whose times are kept."""
Key = TypeVar("Key", bound=Hashable)


class KnownTimes:
    """Times of events by key; all are forgotten where they become too many."""

    def __init__(self) -> None:
        self._rows: dict[Hashable, tuple[float, float, float, str]] = {}

    def times(
        self, keys: Sequence[Key], work_out: Callable[[list[Key]], Iterable[tuple[Sequence[Key], EventTimes]]]
    ) -> EventTimes:
        """Times by key; those not known yet are worked out.

        Args:
            work_out: of keys that are not known, each once, gives their times with the keys that they are of, and those
                of others where it has them.
        """
        if len(self._rows) > _MOST_KNOWN:
            self._rows.clear()
        rows = [self._rows.get(key) for key in keys]
        if None in rows:
            new = dict.fromkeys(key for key, row in zip(keys, rows, strict=True) if row is None)
            for found, times in work_out([*new]):
                self._rows.update(zip(found, times.rows(), strict=True))
            rows = [self._rows[key] for key in keys]
        return EventTimes.of_rows(rows)  # pyright: ignore[reportArgumentType]


class PricesKernels(Protocol):
    """Whatever tells kernel times: the calibrated model, or a variation of it."""

    def times(self, device: Device, ops: Sequence[KernelOp], /) -> EventTimes:
        """Time of each op on a device."""
        ...


class PricesCollectives(Protocol):
    """Whatever tells times of collectives."""

    def times(self, cluster: Cluster, ops: Sequence[Collective], /) -> EventTimes:
        """Time of each op on a cluster."""
        ...


def _relayed(
    cluster: Cluster, ops: Sequence[Collective], times: EventTimes, collectives: PricesCollectives
) -> EventTimes:
    """The times of collectives, but no less than what they send on inside nodes takes (`Collective.relayed_bytes`)."""
    where = [i for i, op in enumerate(ops) if op.relayed_bytes > 0 and op.ranks_per_node > 1]
    if not where:
        return times
    inside = [
        Collective(collective=op.collective, bytes=op.relayed_bytes, num_ranks=op.ranks_per_node,
                   ranks_per_node=op.ranks_per_node, dtype=op.dtype, exchange=op.exchange)
        for op in (ops[i] for i in where)
    ]  # fmt: skip
    return times.at_least(where, collectives.times(cluster, inside))


def _of_ranks(cluster: Cluster, ops: Sequence[Collective]) -> Float64[np.ndarray, "n"]:
    """What collectives wait for the ranks of their rings between nodes (`NetworkLevel.rank_latency_s`)."""
    steps = [(op.num_nodes > 1 and op.collective in _RINGS) * (op.num_ranks - 1) for op in ops]
    return np.array([n * cluster.levels[op.level].rank_latency_s for n, op in zip(steps, ops, strict=True)], float)


def event_times(
    ops: Sequence[Op], cluster: Cluster, kernels: PricesKernels, collectives: PricesCollectives
) -> EventTimes:
    """Times of a mixed list of kernels and collectives, in order.

    Raises:
        PerfModelError: nodes of several kinds, of which each is priced by itself.
    """
    cluster.require_one_kind()
    comm = [i for i, op in enumerate(ops) if isinstance(op, Collective)]
    rest = [i for i, op in enumerate(ops) if not isinstance(op, Collective)]
    parts = []
    if rest:
        kernel_ops: list[KernelOp] = [ops[i] for i in rest]  # pyright: ignore[reportAssignmentType]
        parts.append((rest, kernels.times(cluster.device, kernel_ops)))
    if comm:
        sent: list[Collective] = [ops[i] for i in comm]  # pyright: ignore[reportAssignmentType]
        shared = [op.num_nodes ** cluster.levels[op.level].contention if op.num_nodes > 1 else 1.0 for op in sent]
        times = collectives.times(cluster, sent).scaled(np.array(shared)).plus(_of_ranks(cluster, sent))
        parts.append((comm, _relayed(cluster, sent, times, collectives)))
    return EventTimes.together(len(ops), parts)
