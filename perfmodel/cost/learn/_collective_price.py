"""Prices of collectives: physics times what was measured, made monotone in bytes and ranks.

For one kind on one fabric the product of the physical curve and the measured correction is laid out on a grid of
sizes and rank (or node) counts and projected onto what grows with both, with bytes in proportion to them at most
(`rising`, which leaves alone what grows so already): twice the bytes can be sent as two messages. Between the points
of the grid the logarithm of the time is interpolated. So a price never falls with bytes or ranks, and, as physics does
not fall with latency nor rise with bandwidth at any point of the grid, neither does the price.

In a mesh of direct links (NVLink 2, XGMI) more ranks of a node have more links: there, inside a node, each rank
count stands for itself. So it does where a row of a table names a measured series, which is to be told as measured,
with what made one count of its ranks, or one size, slower than the next.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np

from perfmodel.cost.learn._collective_curves import (
    GRID,
    PER_OCTAVE,
    CovarianceTerms,
    Curve,
    between_of,
    correction,
    inside_of,
)
from perfmodel.cost.learn._collective_effects import constants
from perfmodel.cost.learn._collective_physics import collective_time, least_volume, peers_of
from perfmodel.cost.learn._collective_rows import CollectiveRows, SeriesKey
from perfmodel.cost.learn._collective_weights import CollectiveWeights, CurveKey, EntryKey, LinksKey
from perfmodel.cost.learn._fabrics import Fabric
from perfmodel.ingest.tables import groups_of
from perfmodel.session import Cache

_STEPS: Final = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 18, 20, 24, 28, 32, 36, 40, 48, 56, 64, 72, 96)
RANKS: Final = np.array([*_STEPS, *(2**k for k in range(7, 15))], float)
"""Rank counts inside a node at which prices are worked out."""
NODES: Final = np.array([1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, *(2**k for k in range(7, 18))], float)
RING_KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter")
_MOST_TABLES: Final = 4096
LARGE: Final = 20
"""log2 of the bytes from which a message counts as large: 1 MiB."""


@dataclass(frozen=True)
class CollectiveRequest:
    """What is priced together: one kind on one fabric, by what was measured under some names."""

    kind: str
    fabric: Fabric
    keys: tuple[EntryKey | SeriesKey, ...] = ()
    """A measured series to price by, most specific first; without one the fabric's usual price."""
    algorithm: str = ""
    """The one that it is held to; by default the fastest."""
    any_algorithm: bool = True


@dataclass(frozen=True)
class Groups:
    """`n` collectives as columns, float64[n] (`level` int64)."""

    buffer_bytes: np.ndarray
    ranks: np.ndarray
    ranks_per_node: np.ndarray
    level: np.ndarray
    """Outermost network level reached."""
    concurrent: np.ndarray
    """Groups that share each node's outgoing links."""
    interleaved: np.ndarray
    """Groups whose ranks lie in turn within one span of a node, which share its host bridge if it has one."""

    @classmethod
    def on(
        cls, fabric: Fabric, buffer_bytes: np.ndarray, ranks: np.ndarray, ranks_per_node: np.ndarray,
        level: np.ndarray, concurrent: np.ndarray, interleaved: np.ndarray | float = 1.0,
    ) -> "Groups":  # fmt: skip
        """Of one fabric: over at least its first network level where they leave a node."""
        last = len(fabric.levels) - 1
        level = np.clip(level.astype(np.int64), 0, last)
        if fabric.flat:
            ranks_per_node = np.ones(len(ranks))
        else:
            ranks_per_node = np.clip(ranks_per_node, 1, ranks)
            level = np.where(ranks > ranks_per_node, np.maximum(level, min(1, last)), 0)
        concurrent = np.maximum(concurrent, 1.0)
        if not fabric.inside.of.bridged:
            interleaved = 1.0
        # groups that leave a node share its bridge with all that leave it beside them
        sharing = np.where(ranks > ranks_per_node, concurrent if fabric.inside.of.bridged else 1.0, interleaved)
        return cls(buffer_bytes, ranks, ranks_per_node, level, concurrent, np.maximum(sharing, 1.0))


@dataclass(frozen=True)
class Priced:
    """Times with 90 % intervals."""

    time_s: np.ndarray
    half_width: np.ndarray
    """Of the interval in log time."""
    provenance: np.ndarray
    least_s: np.ndarray
    """What the links' full rates allow: no time, nor any end of an interval, is shorter."""

    @classmethod
    def unknown(cls, n: int) -> "Priced":
        """Room for `n` prices."""
        return cls(np.full(n, np.nan), np.full(n, np.nan), np.full(n, "", dtype=object), np.zeros(n))

    def put(self, at: np.ndarray, prices: "Priced") -> None:
        """Set the prices at positions."""
        for name, column in vars(self).items():
            column[at] = getattr(prices, name)


@dataclass(frozen=True)
class _Table:
    """Log time over counts and `GRID`, float64[c, g], and what it stands on."""

    count: np.ndarray
    log_s: np.ndarray
    curves: dict[float, Curve]
    """Curves measured at just these ranks per node, by count."""
    source: CurveKey | None
    """Key that they were found under."""


class CollectivePrices:
    """Times of collectives on fabrics, from fitted weights."""

    def __init__(self, weights: CollectiveWeights) -> None:
        self.weights = weights
        self._tables = Cache(_MOST_TABLES)  # weights never change: what was worked out for equal questions stays right

    def price(self, asked: CollectiveRequest, groups: Groups) -> Priced:
        """Time, interval and provenance of every group; 0 for one rank."""
        n = len(groups.ranks)
        log_s, half, provenance = np.zeros(n), np.zeros(n), np.full(n, "measured", dtype=object)
        rate, fabric = np.full(n, asked.fabric.inside.bandwidth), asked.fabric
        several = groups.ranks > 1
        inside = several & (groups.ranks <= groups.ranks_per_node)
        for sharing in np.unique(groups.interleaved[inside]).tolist():
            index = np.flatnonzero(inside & (groups.interleaved == sharing))
            table = self._inside(asked, sharing)
            self._fill(asked, table, groups, index, groups.ranks, (log_s, half, provenance))
        rest = np.flatnonzero(several & ~inside)
        places = np.stack([groups.ranks_per_node[rest], groups.level[rest], groups.concurrent[rest]], axis=1)
        found, which = np.unique(places, axis=0, return_inverse=True)
        for i, (per_node, level, concurrent) in enumerate(found.tolist()):
            own = rest[which.ravel() == i]
            place = (asked, per_node, int(level), concurrent)
            table = self._tables.get_or_compute(place, lambda place=place: self._between_table(*place))
            self._fill(asked, table, groups, own, groups.ranks / groups.ranks_per_node, (log_s, half, provenance))
            rate[own] = fabric.share_between(int(level), per_node, concurrent)
        reduces = np.array([x.of.reduces for x in fabric.levels])[groups.level]
        limited = np.array([x.of.limited for x in fabric.levels])[groups.level]
        volume = least_volume(asked.kind, groups.ranks, groups.ranks_per_node, reduces)
        least_s = np.where(limited, volume * groups.buffer_bytes / rate, 0.0)
        return Priced(np.maximum(np.exp(log_s) * several, least_s), half, provenance, least_s)

    def _fill(
        self, asked: CollectiveRequest, table: _Table, groups: Groups, index: np.ndarray, count: np.ndarray,
        out: tuple[np.ndarray, np.ndarray, np.ndarray],
    ) -> None:  # fmt: skip
        log_s, half, provenance = out
        size, at = np.log2(np.maximum(groups.buffer_bytes[index], 1.0)), count[index]
        log_s[index] = _read(table, size, at)
        exact = np.zeros(len(index), bool)
        for known, curve in table.curves.items():
            exact |= (at == known) & (size >= curve.low - 0.5) & (size <= curve.high + 0.5)
        source = self._unmeasured(asked, table, groups, index)
        # links alone are known from other devices
        exact &= not isinstance(table.source, LinksKey)
        provenance[index] = np.where(exact, "measured", source)
        where = "inside" if table.count is RANKS else "between"
        for name in np.unique(provenance[index].astype(str)):
            for large in (False, True):
                part = (provenance[index] == name) & ((size >= LARGE) == large)
                half[index[part]] = self.weights.half_width(name, asked.kind, where, large, table.source)

    def _unmeasured(self, asked: CollectiveRequest, table: _Table, groups: Groups, index: np.ndarray) -> np.ndarray:
        """Provenance of what was not itself measured."""
        if table.source:
            return np.full(len(index), "learned", dtype=object)
        fabric, levels = asked.fabric, groups.level[index]
        links = np.array([x.link for x in fabric.levels])[levels]
        if table.count is RANKS:
            links = np.full(len(index), fabric.inside.link)
        most = np.array([self.weights.most_ranks.get(name, 0) for name in links.tolist()])
        return np.where(groups.ranks[index] <= 2 * most, "analytical", "extrapolated").astype(object)

    def _inside(self, asked: CollectiveRequest, sharing: float) -> _Table:
        make = self._inside_table if sharing == 1 else self._bridge_table
        return self._tables.get_or_compute((asked, sharing), lambda: make(asked, sharing))

    def _bridge_table(self, asked: CollectiveRequest, sharing: float) -> _Table:
        """Of groups that share a host bridge: no shorter than alone, and nothing of it was measured."""
        alone, shared = self._inside(asked, 1.0), self._inside_table(asked, sharing)
        return _Table(RANKS, np.maximum(alone.log_s, shared.log_s), {}, alone.source)

    def _inside_table(self, asked: CollectiveRequest, sharing: float) -> _Table:
        """Of groups inside a node.

        Bandwidth on a host bridge falls with the ranks of a group, because a ring over more of them crosses slower
        hops. Groups whose ranks lie in turn cross the same hops as one group of all their ranks, so they get its
        bandwidth; their latency is that of their own ranks.
        """
        fabric = asked.fabric
        parts, source = self._measured_curves(asked, False, 0, 0.0)
        c = constants(self.weights.physics, asked.kind, fabric, 0, 1.0, 1.0, asked.algorithm == "collnet", False)
        size_bytes = np.exp2(GRID)[None, :]
        ranks = RANKS[:, None]
        if sharing > 1:
            # of the largest messages, which take as long as bandwidth says
            slower = correction(parts, RANKS * sharing)[:, -1:] - correction(parts, RANKS)[:, -1:]
            loss = (peers_of(ranks * sharing) / peers_of(ranks)) ** min(0.0, float(c.peer_exponent))
            c = replace(c, bandwidth_inside=c.bandwidth_inside * loss * np.exp(-slower))
        time_s = collective_time(asked.kind, size_bytes, ranks, ranks, c, asked.algorithm)
        time_s = time_s * np.exp(correction(parts, RANKS))
        log_s = _over_bytes(np.log(time_s), source)
        alone = isinstance(source, SeriesKey) or fabric.inside.of.mesh
        return _Table(RANKS, log_s if alone else rising(log_s, axis=0), parts[0][1] if parts else {}, source)

    def _between_table(self, asked: CollectiveRequest, per_node: float, level: int, concurrent: float) -> _Table:
        fabric = asked.fabric
        parts, source = self._measured_curves(asked, True, level, per_node)
        c = constants(
            self.weights.physics, asked.kind, fabric, level, per_node, concurrent, asked.algorithm == "collnet", True
        )
        size_bytes = np.exp2(GRID)[None, :]
        nodes = NODES[1:]
        ranks = nodes[:, None] * per_node
        time_s = collective_time(asked.kind, size_bytes, ranks, per_node, c, asked.algorithm) * np.exp(
            correction(parts, nodes)
        )
        log_s = _over_bytes(np.log(time_s), source)
        if not isinstance(source, SeriesKey):
            log_s = rising(log_s, axis=0)
        one = log_s[0]
        if per_node > 1:
            bridged = fabric.inside.of.bridged
            inside, here = self._inside(asked, concurrent if bridged else 1.0), np.full(len(GRID), per_node)
            one = _read(inside, GRID, here)
            if not isinstance(source, SeriesKey):
                log_s = np.maximum(log_s, one)
            if bridged and asked.kind in RING_KINDS and not isinstance(source, SeriesKey):
                # a ring over all ranks sends more over each link inside a node than one over the node's own ranks
                more = np.log2((1 - 1 / ranks) / (1 - 1 / per_node))
                in_ring = np.array([_read(inside, GRID + at_nodes, here) for at_nodes in more.ravel()])
                log_s = np.maximum(log_s, in_ring)
        exact = {n: c for _, curves in parts for n, c in curves.items() if c.ranks_per_node == per_node}
        return _Table(NODES, np.concatenate([one[None], log_s]), exact, source)

    def _measured_curves(
        self, asked: CollectiveRequest, between: bool, level: int, per_node: float
    ) -> tuple[CovarianceTerms, CurveKey | None]:
        """Measured curves to stand on, with weights: of the series, of the fabric, inside a node of the links."""
        known = self.weights.curves
        usual = self.weights.priced_by(asked.fabric, asked.kind, between, level) if asked.any_algorithm else ()
        series: dict[tuple[float, float], Curve] = {}
        for key in reversed(asked.keys):
            series |= known.get(key, {})
        filed = [(asked.keys[-1], series)] if asked.keys else []
        for key, placements in (*filed, *((key, known.get(key, {})) for key in usual)):
            inside = inside_of(placements)
            parts = between_of(placements, per_node) if between else [(1.0, inside)] if inside else []
            if parts:
                return parts, key
        return [], None


def rising(values: np.ndarray, axis: int = -1, at_most: np.ndarray | None = None) -> np.ndarray:
    """Values that never fall along an axis: the mean of the running maximum from below and the running minimum from
    above, which leaves alone what rises already.

    Monotone in every value, and moved with all of them: what is never larger, or larger by so much at most, stays so,
    along other axes too.

    Args:
        at_most: rises along the last axis, and the result by no more than it does.

    >>> rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    >>> rising(np.array([0.0, 0.0, 3.0]), at_most=np.array([0.0, 1.0, 2.0])).tolist()
    [0.5, 1.0, 2.0]
    """
    if at_most is not None:
        values = at_most - rising(at_most - values)
    above = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return 0.5 * (np.maximum.accumulate(values, axis) + above)


def _over_bytes(log_s: np.ndarray, source: CurveKey | None) -> np.ndarray:
    """Times on `GRID` that grow with bytes, and but for those of a measured series in proportion to them at most."""
    if isinstance(source, SeriesKey):
        return rising(log_s)
    return rising(log_s, at_most=GRID * np.log(2.0))


def _read(table: _Table, size: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Log time at log2 sizes and counts: bilinear, beyond the largest size in proportion to it."""
    x = np.clip((size - GRID[0]) * PER_OCTAVE, 0, len(GRID) - 1)
    left = np.minimum(x.astype(np.int64), len(GRID) - 2)
    logs = np.log2(table.count)
    place = np.interp(np.log2(count), logs, np.arange(len(logs)))
    low = np.minimum(place.astype(np.int64), len(logs) - 2)
    across, up = x - left, place - low
    value = table.log_s
    below = value[low, left] * (1 - across) + value[low, left + 1] * across
    above = value[low + 1, left] * (1 - across) + value[low + 1, left + 1] * across
    return below * (1 - up) + above * up + np.log(2) * np.maximum(size - GRID[-1], 0)


def predict_collective_rows(prices: CollectivePrices, rows: CollectiveRows) -> Priced:
    """Prices of rows of tables, each alone on its fabric, by its own series where that was measured."""
    found = Priced.unknown(len(rows))
    columns = (rows.kind, rows.fabric, rows.series, rows.software, rows.dtype, rows.algorithm, rows.any_algorithm)
    code: dict[tuple[Any, ...], int] = {}
    which = np.array([code.setdefault(key, len(code)) for key in zip(*columns, strict=True)], dtype=np.int64)
    alike = list(code)
    for (number,), index in groups_of(which):
        kind, fabric, series, software, dtype, algorithm, any_algorithm = alike[number]
        key = rows.keys[series]
        asked = CollectiveRequest(
            str(kind), fabric, (EntryKey(key, software, dtype), key), str(algorithm), bool(any_algorithm)
        )
        outermost, alone = np.full(len(index), len(fabric.levels) - 1), np.ones(len(index))
        sizes = rows.buffer_bytes[index], rows.ranks[index], rows.ranks_per_node[index]
        found.put(index, prices.price(asked, Groups.on(fabric, *sizes, outermost, alone)))
    return found
