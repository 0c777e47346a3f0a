"""Times of events with intervals and provenance, and how they grow with the work."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, reduce
from itertools import product
from math import gcd
from operator import or_
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from jaxtyping import Bool, Float64, Int

from perfmodel.ops import Attention, Collective, Gemm, KernelOp, Op
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
        """Build times from rows of (time, lower end, upper end, provenance); further entries are
        ignored."""
        time_s, lo_s, hi_s = np.array([row[:3] for row in rows], float).reshape(-1, 3).T
        return cls(time_s, lo_s, hi_s, tuple(row[3] for row in rows))

    def rows(self) -> Iterator[tuple[float, float, float, str]]:
        """Return the times as rows; `of_rows` converts them back."""
        return zip(
            self.time_s.tolist(),
            self.lo_s.tolist(),
            self.hi_s.tolist(),
            self.provenance,
            strict=True,
        )

    @classmethod
    def together(cls, n: int, parts: Iterable[tuple[Sequence[int], "EventTimes"]]) -> "EventTimes":
        """Assemble the times of `n` events from parts with their positions."""
        time_s, lo_s, hi_s = np.zeros((3, n))
        provenance = np.full(n, "", object)
        for index, part in parts:
            time_s[index] = part.time_s
            lo_s[index] = part.lo_s
            hi_s[index] = part.hi_s
            provenance[index] = part.provenance
        return cls(time_s, lo_s, hi_s, tuple(provenance.tolist()))

    def scaled(self, factor: Float64[np.ndarray, "n"]) -> "EventTimes":
        """Multiply every time and its interval."""
        return replace(
            self, time_s=self.time_s * factor, lo_s=self.lo_s * factor, hi_s=self.hi_s * factor
        )

    def plus(self, more_s: Float64[np.ndarray, "n"]) -> "EventTimes":
        """Add seconds to every time and the ends of its interval."""
        return replace(
            self, time_s=self.time_s + more_s, lo_s=self.lo_s + more_s, hi_s=self.hi_s + more_s
        )

    def at_least(self, index: Sequence[int], bounds: "EventTimes") -> "EventTimes":
        """Bound times at positions from below."""
        return self._replaced(index, bounds, np.greater)

    def at_most(self, index: Sequence[int], bounds: "EventTimes") -> "EventTimes":
        """Bound times at positions from above."""
        return self._replaced(index, bounds, np.less)

    def replaced(self, index: Sequence[int], times: "EventTimes") -> "EventTimes":
        """A copy with other times at some positions."""
        return self._replaced(index, times, np.not_equal)

    def _replaced(
        self, index: Sequence[int], bounds: "EventTimes", gives_way: np.ufunc
    ) -> "EventTimes":
        """The times, with a bound in place of each that gives way to it."""
        # With the time its interval and its provenance are replaced: an event is as well known as
        # what it takes.
        time_s = self.time_s.copy()
        lo_s = self.lo_s.copy()
        hi_s = self.hi_s.copy()
        provenance = list(self.provenance)
        for number, i in enumerate(index):
            if gives_way(bounds.time_s[number], time_s[i]):
                time_s[i], lo_s[i], hi_s[i] = (
                    bounds.time_s[number],
                    bounds.lo_s[number],
                    bounds.hi_s[number],
                )
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


def collective_times(
    cluster: Cluster, ops: Sequence[Collective], collectives: PricesCollectives
) -> EventTimes:
    """Times of collectives on a cluster: those of its links, then the corrections that the cluster
    states, in order.

    Each step is a function with what it rests on; `perfmodel.cost.learn.collectives` has the steps
    of links.
    """
    times = collectives.times(cluster, ops)
    if any(level.contention or level.rank_latency_s for level in cluster.levels):
        times = waiting_for_ring(cluster, ops, slowed_by_contention(cluster, ops, times))
    return no_less_than_relayed(cluster, ops, times, collectives)


def slowed_by_contention(
    cluster: Cluster, ops: Sequence[Collective], times: EventTimes
) -> EventTimes:
    """Lengthen collectives over several nodes because of contended links, more with more nodes
    (`NetworkLevel.contention`)."""
    factors = []
    for op in ops:
        # Within one node this is 1.
        factors.append(op.num_nodes ** cluster.levels[op.level].contention)
    return times.scaled(np.array(factors, float))


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
    # Between nodes a rank may receive for its neighbours, and passes on inside the node what is
    # theirs.
    relayed = [i for i, op in enumerate(ops) if op.relayed_bytes > 0 and op.ranks_per_node > 1]
    if not relayed:
        return times
    in_node = []
    for op in (ops[i] for i in relayed):
        relay = Collective(
            collective=op.collective,
            bytes=op.relayed_bytes,
            num_ranks=op.ranks_per_node,
            ranks_per_node=op.ranks_per_node,
            dtype=op.dtype,
            exchange=op.exchange,
        )
        in_node.append(relay)
    return times.at_least(relayed, collectives.times(cluster, in_node))


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
    if at_collectives:
        sent: list[Collective] = [ops[i] for i in at_collectives]  # pyright: ignore[reportAssignmentType]
        parts.append((at_collectives, collective_times(cluster, sent, collectives)))
    if at_kernels:
        kernel_ops: list[KernelOp] = [ops[i] for i in at_kernels]  # pyright: ignore[reportAssignmentType]
        parts.append((at_kernels, kernels.times(cluster.device, kernel_ops)))
    return EventTimes.together(len(ops), parts)


# --- growth with the work
# ------------------------------------------------------------------------------
#
# Tables time a kernel by itself, again and again: some sizes find their operands in the cache or
# end before clocks fall, others fit tiles that the next size does not. Measurements, and more so
# what is learned of them, so have twice the work take less time than half of it, or more than twice
# as long. In a step a kernel follows other kernels, and a framework may cut a large one in two. So
# twice the samples take at least as long, and at most twice as long. Measured times stay as far as
# they grow so among themselves; all other times are adapted to them. Element-wise kernels are not
# changed: the next kernel really does find their results in the cache.


FEWEST: Final[Mapping[str, int]] = {"m": 64, "k": 64, "tokens": 64}
"""Number of samples below which a kernel does not fill a tile. In training steps its time is then
derived from that of more samples. 1 for sequences and images."""
_MOST: Final = 2**16
"""Beyond this number of samples, where measurements end, times grow in proportion."""
_MOST_SEQUENCES: Final = 2**10
"""Beyond this number of sequences times of attention grow in proportion."""
_MOST_HEADS: Final = 2**7
"""With more heads than this, attention kernels are compared only by their sequences."""
_SIDES: Final = ("m", "n", "k")
_LEAST_SIDE: Final = 2**7
_MOST_SIDE: Final = 2**13
"""Sides of matrices below this are not compared with others; beyond it times grow in proportion."""
_WITH_SIDES: Final = ("fp64", "fp32", "tf32", "int8")
"""Element types in which products are also compared by the sides of their matrices, because few
large ones were measured."""
_TWICE: Final = float(np.log(2.0))

Grid = Float64[np.ndarray, "..."]
"""Values of the kernels of a lattice; along each axis every kernel does twice the work of the
previous one."""


@dataclass(frozen=True)
class _Lattice:
    """Kernels that do more or less of the same work."""

    ops: tuple[KernelOp, ...]
    """Kernels in the order of a grid of `shape`."""
    shape: tuple[int, ...]
    few: int
    """Number of the smallest sample counts that do not fill a tile."""
    nearest: int
    """Index of the requested kernel, or, if it is larger than all others, of the largest that
    differs only in size."""
    over: float
    """Work of the requested kernel relative to that at `nearest`."""


def _octaves(count: int, least: int, most: int) -> list[int]:
    """A number multiplied and divided by every power of two that leaves it whole, from `least` to
    `most`, in ascending order."""
    # dividing by the lowest set bit leaves the odd factor
    odd = count // (count & -count)
    return [odd << i for i in range(most.bit_length()) if least <= odd << i <= most]


def _other_axes(op: KernelOp) -> list[list[dict[str, Any]]]:
    """Axes other than samples along which a kernel's work grows, each as the fields that change.

    Heads of attention, and sides of the matrices of a product (but of a batched one, which ranks
    share by its batch).
    """
    if isinstance(op, Attention) and op.heads <= _MOST_HEADS:
        group = op.heads // gcd(op.heads, op.kv_heads)
        # as many heads of queries for each of keys as the kernel has, whole numbers of both
        heads = [n for n in _octaves(op.heads, group, _MOST_HEADS) if n % group == 0]
        return [[{"heads": n, "kv_heads": n * op.kv_heads // op.heads} for n in heads]]
    if isinstance(op, Gemm) and op.op != "bmm" and op.dtype in _WITH_SIDES:
        axes = []
        for side in _SIDES:
            if side != op.samples:
                axes.append([{side: n} for n in _sides(getattr(op, side))])
        return axes
    return []


def _sides(side: int) -> list[int]:
    """Sides that a matrix side is compared with; only itself if it is small or odd."""
    if side < _LEAST_SIDE:
        return [side]
    return _octaves(side, _LEAST_SIDE, _MOST_SIDE) or [side]


@lru_cache(maxsize=2**11)
def _lattice(op: KernelOp, tile: int) -> _Lattice | None:
    """Build the lattice of a kernel: its numbers of samples by powers of two, times `_other_axes`.

    Samples go from what fills a tile (from the kernel's own, where that does not) to the largest
    that is compared. None for numbers of samples that are compared with no others.

    Args:
        tile: number of samples that fill a tile.
    """
    name = op.samples
    count = getattr(op, name)
    if count < 1:
        return None
    most_samples = _MOST_SEQUENCES if isinstance(op, Attention) else _MOST
    samples = _octaves(count, min(count, tile), most_samples)
    if not samples:
        return None

    # Every combination of the axes' changes, the samples' first. The op's fields are read once, as
    # `replace` would read them for each.
    axes = [[{name: n} for n in samples], *_other_axes(op)]
    stated = op.stated()
    ops = tuple(type(op)(**reduce(or_, changes, stated)) for changes in product(*axes))

    # Where the op itself stands; or the largest of the lattice that it is a multiple of.
    positions = [_position(op, axis) for axis in axes]
    shape = tuple(len(axis) for axis in axes)
    nearest = np.ravel_multi_index([place for place, _ in positions], shape)
    over_nearest = np.prod([times_larger for _, times_larger in positions])
    n_below_tile = sum(n < tile for n in samples)
    return _Lattice(ops, shape, n_below_tile, int(nearest), float(over_nearest))


def _position(op: KernelOp, axis: list[dict[str, Any]]) -> tuple[int, float]:
    """Index of a kernel along an axis (at most the last), and its work relative to the kernel
    there."""
    for i, changes in enumerate(axis):
        if all(getattr(op, name) == value for name, value in changes.items()):
            return i, 1.0
    name, last = next(iter(axis[-1].items()))
    return len(axis) - 1, getattr(op, name) / last


def _upper_bounds(log_s: Grid, axes: Iterable[int]) -> Grid:
    """Longest time of every kernel that the others along some axes allow: no longer than a larger
    one, and at most twice as long as one of half its work. Axes are taken one after another,
    because the logs of their limits add up."""
    for axis in axes:
        # Log time that doublings add from the first kernel of the axis on, if each doubles the
        # time.
        steps = _TWICE * np.arange(log_s.shape[axis])
        slopes = steps.reshape([-1 if i == axis else 1 for i in range(log_s.ndim)])
        larger = np.flip(np.minimum.accumulate(np.flip(log_s, axis), axis), axis)
        log_s = np.minimum(larger, np.minimum.accumulate(log_s - slopes, axis) + slopes)
    return log_s


def _lower_bounds(log_s: Grid, axes: Iterable[int]) -> Grid:
    """Shortest time of every kernel that the others allow: `_upper_bounds` with times and work
    reversed."""
    return -np.flip(_upper_bounds(np.flip(-log_s), axes))


def growing(log_s: Grid, measured: Bool[np.ndarray, "..."], axes: Sequence[int] = ()) -> Grid:
    """Adjust log times so that a kernel of twice the work takes between one and two times as long.

    The work doubles from kernel to kernel along `axes` (all axes by default). Every time becomes
    the mean of the longest and the shortest time that all others allow. This is done for the
    measured times first, and the others are then kept between them. Times that already grow this
    way are unchanged.

    The result is monotone in every time, and a common factor on all times carries over to it. Both
    bounds grow as required (they are the largest and the smallest Lipschitz extensions: McShane,
    Bull. AMS 40(12), 1934), hence so do their mean and a time that is clipped to them.
    """
    axes = axes or range(log_s.ndim)
    grown = (_upper_bounds(log_s, axes) + _lower_bounds(log_s, axes)) / 2
    if not measured.any():
        return grown

    # The measured times among themselves: the others bound nothing, hence the infinities. Along
    # lines on which none was measured, all count as if they were.
    any_measured = measured.any(tuple(axes), keepdims=True)
    counts = np.where(any_measured, measured, True)
    most_of_measured = _upper_bounds(np.where(counts, log_s, np.inf), axes)
    least_of_measured = _lower_bounds(np.where(counts, log_s, -np.inf), axes)
    grown_measured = (most_of_measured + least_of_measured) / 2

    # All others give way to them.
    lower = _lower_bounds(np.where(counts, grown_measured, -np.inf), axes)
    upper = _upper_bounds(np.where(counts, grown_measured, np.inf), axes)
    return np.clip(grown, lower, upper)


class _PlacedLattice(NamedTuple):
    """The lattice of an event, and the positions of its kernels among all kernels of a grid."""

    event: int
    """Place of the event."""
    places: Int[np.ndarray, " lattice"]
    """Place of each kernel of the lattice."""
    lattice: _Lattice


@dataclass(frozen=True)
class MonotoneGrid:
    """Distinct events with all kernels that they are compared with."""

    ops: tuple[Op, ...]
    _lattices: tuple[_PlacedLattice, ...]
    """Lattices of the events that are compared with other kernels."""

    @classmethod
    def of(cls, ops: Iterable[Op], fewest: Mapping[str, int] = FEWEST) -> "MonotoneGrid":
        """Collect all kernels that the times of events in a step depend on.

        Args:
            fewest: least number of samples, see `FEWEST`; none where steps of few samples are
                usual.
        """
        place: dict[Op, int] = {}
        lattices = []
        for op in ops:
            # with an event come all that it is compared with
            if op in place:
                continue
            place[op] = len(place)
            if isinstance(op, Collective) or not op.samples:
                continue
            lattice = _lattice(op, fewest.get(op.samples, 1))
            if lattice is not None:
                places = np.array([place.setdefault(kernel, len(place)) for kernel in lattice.ops])
                lattices.append(_PlacedLattice(place[op], places, lattice))
        return cls(tuple(place), tuple(lattices))

    def times(self, alone: EventTimes) -> EventTimes:
        """Times of `ops` in a step, from isolated times; collectives are unchanged."""
        # an event may take no time at all, as a collective of one rank: its log is cut
        log_alone = np.log(np.maximum(alone.time_s, 1e-300))
        measured = np.array([provenance == "measured" for provenance in alone.provenance], bool)

        # Lattices of one form are computed together: most have a dozen kernels, of which NumPy
        # computes hundreds in the time that a call takes.
        alike: dict[tuple[tuple[int, ...], int, bool, bool], list[int]] = defaultdict(list)
        for i, (_, places, lattice) in enumerate(self._lattices):
            any_measured = bool(measured[places].reshape(lattice.shape)[lattice.few :].any())
            is_product = isinstance(lattice.ops[0], Gemm)
            alike[lattice.shape, lattice.few, is_product, any_measured].append(i)
        grown: dict[int, Float64[np.ndarray, " lattice"]] = {}
        for (shape, n_below_tile, is_product, _), members in alike.items():
            places = np.stack([self._lattices[i].places for i in members])
            stacked = (len(members), *shape)
            in_step = _lattices_in_step(
                log_alone[places].reshape(stacked),
                measured[places].reshape(stacked),
                n_below_tile,
                is_product,
            )
            grown.update(zip(members, in_step.reshape(len(members), -1), strict=True))

        # A kernel of several lattices has its time in the last of them.
        log_in_step = log_alone.copy()
        for i, (event, places, lattice) in enumerate(self._lattices):
            log_in_step[places] = grown[i]
            # beyond the lattice in proportion to the work
            log_in_step[event] = grown[i][lattice.nearest] + np.log(lattice.over)
        return alone.scaled(np.exp(log_in_step - log_alone))


def _lattices_in_step(
    log_s: Grid, measured: Bool[np.ndarray, "..."], n_below_tile: int, is_product: bool
) -> Grid:
    """Log times in a step of lattices [lattices, samples, ...], from those of isolated kernels.

    Args:
        measured: which kernels were measured; in every lattice some that fill a tile, or in none.
        n_below_tile: number of the smallest sample counts that do not fill a tile.
        is_product: whether the kernels are matrix products.
    """
    # Products grow along their samples alone. A product takes no longer than a larger one, up to
    # which it could be padded, and no longer than two halves, into which it could be cut. So small
    # products are not slowed by large ones. Times of too few samples give way to those of twice the
    # samples.
    side_axes = range(2, log_s.ndim)
    axes = (1,) if is_product else (1, *side_axes)
    fills_tile = np.s_[:, n_below_tile:]
    grown = log_s.copy()
    grown[fills_tile] = growing(log_s[fills_tile], measured[fills_tile], axes)

    # Downwards from the samples that fill a tile: each takes between half and all of the time of
    # twice its samples.
    for i in reversed(range(min(n_below_tile, grown.shape[1] - 1))):
        grown[:, i] = np.clip(grown[:, i], grown[:, i + 1] - _TWICE, grown[:, i + 1])
    return _upper_bounds(grown, side_axes) if is_product else grown
