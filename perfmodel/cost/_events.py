"""Times of events with intervals and provenance."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Protocol

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
        """Build times from rows of (time, lower end, upper end, provenance); further entries are ignored."""
        time_s, lo_s, hi_s = np.array([row[:3] for row in rows], float).reshape(-1, 3).T
        return cls(time_s, lo_s, hi_s, tuple(row[3] for row in rows))

    def rows(self) -> Iterator[tuple[float, float, float, str]]:
        """Return the times as rows; `of_rows` converts them back."""
        return zip(self.time_s.tolist(), self.lo_s.tolist(), self.hi_s.tolist(), self.provenance, strict=True)

    @classmethod
    def together(cls, n: int, parts: Iterable[tuple[Sequence[int], "EventTimes"]]) -> "EventTimes":
        """Assemble the times of `n` events from parts with their positions."""
        time_s, lo_s, hi_s = np.zeros((3, n))
        provenance = np.full(n, "", object)
        for at, part in parts:
            time_s[at] = part.time_s
            lo_s[at] = part.lo_s
            hi_s[at] = part.hi_s
            provenance[at] = part.provenance
        return cls(time_s, lo_s, hi_s, tuple(provenance.tolist()))

    def scaled(self, factor: Float64[np.ndarray, "n"]) -> "EventTimes":
        """Multiply every time and its interval."""
        return replace(self, time_s=self.time_s * factor, lo_s=self.lo_s * factor, hi_s=self.hi_s * factor)

    def plus(self, more_s: Float64[np.ndarray, "n"]) -> "EventTimes":
        """Add seconds to every time and the ends of its interval."""
        return replace(self, time_s=self.time_s + more_s, lo_s=self.lo_s + more_s, hi_s=self.hi_s + more_s)

    def at_least(self, at: Sequence[int], bounds: "EventTimes") -> "EventTimes":
        """Bound times at positions from below."""
        return self._replaced(at, bounds, np.greater)

    def at_most(self, at: Sequence[int], bounds: "EventTimes") -> "EventTimes":
        """Bound times at positions from above."""
        return self._replaced(at, bounds, np.less)

    def replaced(self, at: Sequence[int], times: "EventTimes") -> "EventTimes":
        """Replace the times at positions."""
        return self._replaced(at, times, np.not_equal)

    def _replaced(self, at: Sequence[int], bounds: "EventTimes", gives_way: np.ufunc) -> "EventTimes":
        # With the time its interval and its provenance are replaced: an event is as well known as what it takes.
        time_s = self.time_s.copy()
        lo_s = self.lo_s.copy()
        hi_s = self.hi_s.copy()
        provenance = list(self.provenance)
        for number, i in enumerate(at):
            if gives_way(bounds.time_s[number], time_s[i]):
                time_s[i], lo_s[i], hi_s[i] = bounds.time_s[number], bounds.lo_s[number], bounds.hi_s[number]
                provenance[i] = bounds.provenance[number]
        return EventTimes(time_s, lo_s, hi_s, tuple(provenance))


MOST_EVENTS: Final = 500_000
"""Events whose times a cache keeps."""


class PricesKernels(Protocol):
    """Protocol of kernel time models."""

    def times(self, device: Device, ops: Sequence[KernelOp], /) -> EventTimes:
        """Time of each op on a device."""
        ...


class PricesCollectives(Protocol):
    """Protocol of collective time models."""

    def times(self, cluster: Cluster, ops: Sequence[Collective], /) -> EventTimes:
        """Time of each op on a cluster."""
        ...


def collective_times(cluster: Cluster, ops: Sequence[Collective], collectives: PricesCollectives) -> EventTimes:
    """Times of collectives on a cluster: those of its links, then the corrections that the cluster states, in order.

    Each step is a function with what it rests on; `perfmodel.cost.learn.collectives` has the steps of links.
    """
    times = collectives.times(cluster, ops)
    times = slowed_by_contention(cluster, ops, times)
    times = waiting_for_ring(cluster, ops, times)
    return no_less_than_relayed(cluster, ops, times, collectives)


def slowed_by_contention(cluster: Cluster, ops: Sequence[Collective], times: EventTimes) -> EventTimes:
    """Slow groups over several nodes by crowded links, the more the more nodes (`NetworkLevel.contention`)."""
    factors = []
    for op in ops:
        exponent = cluster.levels[op.level].contention
        factor = op.num_nodes**exponent if op.num_nodes > 1 else 1.0
        factors.append(factor)
    return times.scaled(np.array(factors))


def waiting_for_ring(cluster: Cluster, ops: Sequence[Collective], times: EventTimes) -> EventTimes:
    """Add the wait for each rank of a ring between nodes (`NetworkLevel.rank_latency_s`)."""
    waits_s = []
    for op in ops:
        is_ring_between_nodes = op.num_nodes > 1 and op.collective in _RINGS
        steps = op.num_ranks - 1 if is_ring_between_nodes else 0
        waits_s.append(steps * cluster.levels[op.level].rank_latency_s)
    return times.plus(np.array(waits_s, float))


def no_less_than_relayed(
    cluster: Cluster, ops: Sequence[Collective], times: EventTimes, collectives: PricesCollectives
) -> EventTimes:
    """Make collectives take at least as long as forwarding their messages inside nodes takes
    (`Collective.relayed_bytes`)."""
    # Between nodes a rank may receive for its neighbours, and passes on inside the node what is theirs.
    relayed = [i for i, op in enumerate(ops) if op.relayed_bytes > 0 and op.ranks_per_node > 1]
    if not relayed:
        return times
    inside = []
    for op in (ops[i] for i in relayed):
        relay = Collective(
            collective=op.collective,
            bytes=op.relayed_bytes,
            num_ranks=op.ranks_per_node,
            ranks_per_node=op.ranks_per_node,
            dtype=op.dtype,
            exchange=op.exchange,
        )
        inside.append(relay)
    return times.at_least(relayed, collectives.times(cluster, inside))


def event_times(
    ops: Sequence[Op], cluster: Cluster, kernels: PricesKernels, collectives: PricesCollectives
) -> EventTimes:
    """Times of a mixed list of kernels and collectives, in order.

    Raises:
        PerfModelError: nodes of several kinds, of which each is priced by itself.
    """
    cluster.require_one_kind()
    at_collectives = [i for i, op in enumerate(ops) if isinstance(op, Collective)]
    at_kernels = [i for i, op in enumerate(ops) if not isinstance(op, Collective)]
    parts = []
    if at_kernels:
        kernel_ops: list[KernelOp] = [ops[i] for i in at_kernels]  # pyright: ignore[reportAssignmentType]
        parts.append((at_kernels, kernels.times(cluster.device, kernel_ops)))
    if at_collectives:
        sent: list[Collective] = [ops[i] for i in at_collectives]  # pyright: ignore[reportAssignmentType]
        parts.append((at_collectives, collective_times(cluster, sent, collectives)))
    return EventTimes.together(len(ops), parts)
