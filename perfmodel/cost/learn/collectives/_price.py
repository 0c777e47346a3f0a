"""Prices of collectives: physics times measured correction, made monotone in bytes and ranks.

For one kind on one fabric the product of the physical curve and the measured correction is laid out
on a grid of sizes and rank (or node) counts and projected onto what grows with both, with bytes in
proportion to them at most (`rising`, which leaves alone what grows so already): twice the bytes can
be sent as two messages. Between the points of the grid the logarithm of the time is interpolated.
So a price never falls with bytes or ranks, and, as physics does not fall with latency nor rise with
bandwidth at any point of the grid, neither does the price.

In a mesh of direct links (NVLink 2, XGMI) more ranks of a node have more links: there, inside a
node, each rank count stands for itself. The same holds where a row of a table names a measured
series: its curve is returned as measured, with every rank count or size that happens to be slower
than the next.
"""

from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.cost.learn.collectives._curves import (
    GRID,
    LARGE,
    PER_OCTAVE,
    CovarianceTerms,
    Curve,
    Placements,
    between_of,
    correction,
)
from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._link_constants import constants
from perfmodel.cost.learn.collectives._physics import (
    DIRECT,
    HOST_SHARPNESS,
    collective_time,
    larger,
    least_volume,
    peers_of,
)
from perfmodel.cost.learn.collectives._requests import CollectiveRequest, Groups, Priced
from perfmodel.cost.learn.collectives._rows import CollectiveRows, SeriesKey
from perfmodel.cost.learn.collectives._weights import (
    CollectiveWeights,
    CurveKey,
    EntryKey,
    LinksKey,
    usual_kind,
)
from perfmodel.ingest.tables import groups_of
from perfmodel.session import Cache

_STEPS: Final = (
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    14,
    16,
    18,
    20,
    24,
    28,
    32,
    36,
    40,
    48,
    56,
    64,
    72,
    96,
)
RANKS: Final = np.array([*_STEPS, *(2**k for k in range(7, 15))], float)
"""Rank counts inside a node at which prices are computed."""
NODES: Final = np.array(
    [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, *(2**k for k in range(7, 18))], float
)
"""Node counts at which prices are computed."""
RING_KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter")
"""Kinds whose rings run over all ranks of a group."""
_MOST_TABLES: Final = 4096
"""Most tables that are cached, one per kind, fabric and placement."""


@dataclass(frozen=True)
class _LogPrices:
    """Log times, half-widths and provenances of all groups of a request, filled in table by
    table."""

    log_s: np.ndarray
    half_width: np.ndarray
    provenance: np.ndarray


@dataclass(frozen=True)
class _Table:
    """Log time over counts and `GRID`, float64[c, g], and the measurements that it rests on."""

    count: np.ndarray
    log_s: np.ndarray
    curves: dict[float, Curve]
    """Curves measured at just these ranks per node, by count."""
    source: CurveKey | None
    """Key of these curves."""


class CollectivePrices:
    """Times of collectives on fabrics, from fitted weights."""

    def __init__(self, weights: CollectiveWeights) -> None:
        self.weights = weights
        # weights never change, so cached results of equal queries stay right
        self._tables = Cache(_MOST_TABLES)

    def price(self, request: CollectiveRequest, groups: Groups) -> Priced:
        """Time, interval and provenance of every group; 0 for one rank."""
        n = len(groups.ranks)
        fabric = request.fabric
        prices = _LogPrices(np.zeros(n), np.zeros(n), np.full(n, "measured", dtype=object))
        link_bytes_per_s = np.full(n, fabric.inside.bandwidth)
        several = groups.ranks > 1

        # Inside a node: one table over rank counts for each number of groups that share a host
        # bridge.
        in_node = several & (groups.ranks <= groups.ranks_per_node)
        for sharing in np.unique(groups.interleaved[in_node]).tolist():
            selected = np.flatnonzero(in_node & (groups.interleaved == sharing))
            self._fill(
                prices,
                selected,
                request,
                self._in_node_table(request, sharing),
                groups,
                groups.ranks,
            )

        # Between nodes: one table over node counts for each placement.
        between_nodes = np.flatnonzero(several & ~in_node)
        columns = [
            groups.ranks_per_node[between_nodes],
            groups.level[between_nodes],
            groups.concurrent[between_nodes],
        ]
        placements, placement_of = np.unique(np.stack(columns, axis=1), axis=0, return_inverse=True)
        for i, (per_node, level, concurrent) in enumerate(placements.tolist()):
            selected = between_nodes[placement_of.ravel() == i]
            question = (request, per_node, int(level), concurrent)
            table = self._tables.get_or_compute(
                question, lambda question=question: self._between_table(*question)
            )
            self._fill(
                prices, selected, request, table, groups, groups.ranks / groups.ranks_per_node
            )
            link_bytes_per_s[selected] = fabric.share_between(int(level), per_node, concurrent)

        # No algorithm beats its least volume at the links' full rate.
        reduces = np.array([level.link_class.reduces for level in fabric.levels])[groups.level]
        limited = np.array([level.link_class.limited for level in fabric.levels])[groups.level]
        volume = least_volume(request.kind, groups.ranks, groups.ranks_per_node, reduces)
        least_s = np.where(limited, volume * groups.buffer_bytes / link_bytes_per_s, 0.0)
        time_s = np.maximum(np.exp(prices.log_s) * several, least_s)
        return Priced(time_s, prices.half_width, prices.provenance, least_s)

    def _fill(
        self,
        prices: _LogPrices,
        at: np.ndarray,
        request: CollectiveRequest,
        table: _Table,
        groups: Groups,
        count: np.ndarray,
    ) -> None:
        """Fill in the prices of the groups at positions, by a table over `count` (their ranks or
        nodes)."""
        size = np.log2(np.maximum(groups.buffer_bytes[at], 1.0))
        count = count[at]
        prices.log_s[at] = _interpolated(table, size, count)

        # Measured: a size and a count that were, at these ranks per node, half an octave more or
        # less.
        measured = np.zeros(len(at), bool)
        for known_count, curve in table.curves.items():
            in_range = (size >= curve.low - 0.5) & (size <= curve.high + 0.5)
            measured |= (count == known_count) & in_range

        # Groups that were not measured count as learned if their fabric or links were; otherwise
        # the price is physics, which is trusted up to twice the rank counts that it was fitted to.
        if table.source:
            unmeasured = np.full(len(at), "learned", dtype=object)
        else:
            fabric = request.fabric
            levels = groups.level[at]
            links = np.array([x.link for x in fabric.levels])[levels]
            if table.count is RANKS:
                links = np.full(len(at), fabric.inside.link)
            most_ranks = np.array([self.weights.most_ranks.get(name, 0) for name in links.tolist()])
            unmeasured = np.where(
                groups.ranks[at] <= 2 * most_ranks, "analytical", "extrapolated"
            ).astype(object)

        # Curves of links alone are those of other devices.
        measured &= not isinstance(table.source, LinksKey)
        provenance = np.where(measured, "measured", unmeasured)
        prices.provenance[at] = provenance

        # Widths differ by provenance, and between messages that latency and that bandwidth bounds.
        tier = "inside" if table.count is RANKS else "between"
        for name in np.unique(provenance.astype(str)):
            for is_large in (False, True):
                same_source = (provenance == name) & ((size >= LARGE) == is_large)
                width = self.weights.half_width(name, request.kind, tier, is_large, table.source)
                prices.half_width[at[same_source]] = width

    def _in_node_table(self, request: CollectiveRequest, sharing: float) -> _Table:
        """Table of groups inside a node, a number of which share a host bridge (cached)."""
        make = self._new_in_node_table if sharing == 1 else self._bridge_table
        return self._tables.get_or_compute((request, sharing), lambda: make(request, sharing))

    def _bridge_table(self, request: CollectiveRequest, sharing: float) -> _Table:
        """Table of groups that share a host bridge: no shorter than alone, and never counted as
        measured."""
        # The measured time of a group that has its bridge to itself bounds the price from below;
        # the price does not count as measured.
        one_group = self._in_node_table(request, 1.0)
        shared = self._new_in_node_table(request, sharing)
        return _Table(RANKS, np.maximum(one_group.log_s, shared.log_s), {}, one_group.source)

    def _new_in_node_table(self, request: CollectiveRequest, sharing: float) -> _Table:
        """Table of groups inside a node.

        Bandwidth on a host bridge falls with the ranks of a group, because a ring over more of them
        crosses slower hops. Groups whose ranks lie in turn cross the same hops as one group of all
        their ranks, so they get its bandwidth; their latency is that of their own ranks.
        """
        fabric = request.fabric
        parts, source = self._measured_curves(request, between=False, level=0, per_node=0.0)
        in_network = request.algorithm == "collnet"
        link = constants(
            self.weights.physics,
            request.kind,
            fabric,
            level=0,
            ranks_per_node=1.0,
            concurrent=1.0,
            in_network=in_network,
            spans_nodes=False,
            host_launches=request.host_launches,
        )
        # The curves of other devices correct kernels alone, so the host's time comes after them.
        # Those of the series itself were fitted with it.
        host_s = 0.0 if isinstance(source, SeriesKey) else float(link.host_s)
        if host_s:
            link = replace(link, host_s=0.0)
        size_bytes = np.exp2(GRID)[None, :]
        ranks = RANKS[:, None]
        if sharing > 1:
            # The factor is that of the largest messages, whose time follows from bandwidth.
            slower = correction(parts, RANKS * sharing)[:, -1:] - correction(parts, RANKS)[:, -1:]
            more_peers = peers_of(ranks * sharing) / peers_of(ranks)
            loss = more_peers ** min(0.0, float(link.peer_exponent))
            slowed_bytes_per_s = link.inside.bytes_per_s * loss * np.exp(-slower)
            link = replace(link, inside=replace(link.inside, bytes_per_s=slowed_bytes_per_s))

        # Physics, times what measurements add to it, made monotone in bytes and then in ranks.
        time_s = collective_time(request.kind, size_bytes, ranks, ranks, link, request.algorithm)
        time_s = time_s * np.exp(correction(parts, RANKS))
        time_s = larger(time_s, host_s, HOST_SHARPNESS)
        log_s = _over_bytes(np.log(time_s), source)

        # A measured series is returned unchanged, and in a mesh more ranks have more links.
        each_count_alone = isinstance(source, SeriesKey) or fabric.inside.link_class.mesh
        if not each_count_alone:
            log_s = rising(log_s, axis=0)
        return _Table(RANKS, log_s, parts[0][1] if parts else {}, source)

    def _between_table(
        self, request: CollectiveRequest, per_node: float, level: int, concurrent: float
    ) -> _Table:
        """Table of groups over several nodes, by their number; one node first, from the table
        inside it."""
        fabric = request.fabric
        parts, source = self._measured_curves(request, between=True, level=level, per_node=per_node)
        is_measured_series = isinstance(source, SeriesKey)
        in_network = request.algorithm == "collnet"

        # Concurrent groups share the nominal rate equally, unless their mutual slowdown was
        # measured: a group alone may leave part of its links idle for others to use, or all may
        # lose by switching between groups.
        exponent = self.weights.sharing_exponent(fabric, request.kind, level)
        link = constants(
            self.weights.physics,
            request.kind,
            fabric,
            level=level,
            ranks_per_node=per_node,
            concurrent=concurrent if exponent is None else 1.0,
            in_network=in_network,
            spans_nodes=True,
            host_launches=request.host_launches,
        )
        size_bytes = np.exp2(GRID)[None, :]
        nodes = NODES[1:]
        ranks = nodes[:, None] * per_node

        # Physics, times what measurements add to it, made monotone in bytes and then in nodes.
        time_s = collective_time(request.kind, size_bytes, ranks, per_node, link, request.algorithm)
        time_s = time_s * np.exp(correction(parts, nodes))
        if exponent is not None:
            latency_s = time_s[:, :1]
            time_s = latency_s + np.maximum(time_s - latency_s, 0.0) * concurrent**exponent
        log_s = _over_bytes(np.log(time_s), source)
        if not is_measured_series:
            log_s = rising(log_s, axis=0)

        # One node: the group inside it, than which no larger one is faster. Ranks with a node each
        # have no such group; the row only serves interpolation between one node and two.
        one_node = log_s[0]
        if per_node > 1:
            one_node, least = self._inside_nodes(request, per_node, ranks, concurrent)
            if not is_measured_series:
                log_s = np.maximum(log_s, least)

        measured: dict[float, Curve] = {}
        for _, curves in parts:
            for node_count, curve in curves.items():
                if curve.ranks_per_node == per_node:
                    measured[node_count] = curve
        return _Table(NODES, np.concatenate([one_node[None], log_s]), measured, source)

    def _inside_nodes(
        self,
        request: CollectiveRequest,
        per_node: float,
        ranks: Float[np.ndarray, "groups 1"],
        concurrent: float,
    ) -> tuple[Float[np.ndarray, " sizes"], Float[np.ndarray, "#groups sizes"]]:
        """Logarithms of times inside a node: of a group of its ranks, and the least of groups over
        several nodes."""
        bridged = request.fabric.inside.link_class.bridged
        in_node_prices = self._in_node_table(request, concurrent if bridged else 1.0)
        ranks_inside = np.full(len(GRID), per_node)
        one_node = _interpolated(in_node_prices, GRID, ranks_inside)
        if not (bridged and request.kind in RING_KINDS):
            return one_node, one_node[None]

        # A ring over all ranks sends more over each link inside a node than one over the node's own
        # ranks.
        more_octaves = np.log2((1 - 1 / ranks) / (1 - 1 / per_node)).ravel()
        in_ring = [
            _interpolated(in_node_prices, GRID + octaves, ranks_inside) for octaves in more_octaves
        ]
        return one_node, np.maximum(one_node, np.array(in_ring))

    def _measured_curves(
        self, request: CollectiveRequest, between: bool, level: int, per_node: float
    ) -> tuple[CovarianceTerms, CurveKey | None]:
        """Measured curves for a table, with weights: those of the series, of the fabric or, inside
        a node, of the links."""
        known = self.weights.curves
        candidates: list[tuple[CurveKey, Placements]] = []

        # The series that is named; its own software and element type replace what all of it shows
        # at a placement.
        if request.keys:
            series: dict[tuple[float, float], Curve] = {}
            for key in reversed(request.keys):
                series |= known.get(key, {})
            candidates.append((request.keys[-1], series))

        # The usual curves of a fabric do not apply to a run that is restricted to one algorithm.
        # Direct reductions have curves of their own.
        if request.any_algorithm or request.algorithm == DIRECT:
            kind = usual_kind(request.kind, request.algorithm)
            usual_keys = self.weights.priced_by(request.fabric, kind, between, level)
            candidates += [(key, known.get(key, {})) for key in usual_keys]

        for key, placements in candidates:
            if between:
                parts = between_of(placements, per_node)
            else:
                # Curves inside one node by ranks.
                in_node_curves = {
                    ranks: curve
                    for (ranks, per_node), curve in placements.items()
                    if ranks <= per_node
                }
                parts = [(1.0, in_node_curves)] if in_node_curves else []
            if parts:
                return parts, key
        return [], None


def rising(values: np.ndarray, axis: int = -1, at_most: np.ndarray | None = None) -> np.ndarray:
    """Make values non-decreasing along an axis: the mean of the running maximum from below and
    minimum from above.

    The result is monotone in every value, and order is preserved: values that are never larger than
    others, or larger by a bounded amount, stay so along the other axes too.

    Args:
        at_most: rises along the last axis, and the result by no more than it does.

    >>> rising(np.array([1.0, 3.0, 2.0, 4.0])).tolist()
    [1.0, 2.5, 2.5, 4.0]
    >>> rising(np.array([0.0, 0.0, 3.0]), at_most=np.array([0.0, 1.0, 2.0])).tolist()
    [0.5, 1.0, 2.0]
    """
    # A curve rises no faster than the line if its difference to the line never rises.
    if at_most is not None:
        values = at_most - rising(at_most - values)
    above = np.flip(np.minimum.accumulate(np.flip(values, axis), axis), axis)
    return 0.5 * (np.maximum.accumulate(values, axis) + above)


def _over_bytes(log_s: np.ndarray, source: CurveKey | None) -> np.ndarray:
    """Make times on `GRID` grow with bytes, and at most in proportion to them unless they are those
    of a measured series."""
    if isinstance(source, SeriesKey):
        return rising(log_s)
    return rising(log_s, at_most=GRID * np.log(2.0))


def _interpolated(table: _Table, size: np.ndarray, count: np.ndarray) -> np.ndarray:
    """Log time at log2 sizes and counts, by bilinear interpolation; in proportion to the size
    beyond the largest."""
    # Neighbours on the grid of sizes, and on that of counts, with how far the point lies from the
    # lower one.
    place_of_size = np.clip((size - GRID[0]) * PER_OCTAVE, 0, len(GRID) - 1)
    below_size = np.minimum(place_of_size.astype(np.int64), len(GRID) - 2)
    log_counts = np.log2(table.count)
    place_of_count = np.interp(np.log2(count), log_counts, np.arange(len(log_counts)))
    below_count = np.minimum(place_of_count.astype(np.int64), len(log_counts) - 2)
    along_sizes, along_counts = place_of_size - below_size, place_of_count - below_count

    def at_count(number: np.ndarray) -> np.ndarray:
        """Log times of a count of the table, between its two nearest sizes."""
        return (
            table.log_s[number, below_size] * (1 - along_sizes)
            + table.log_s[number, below_size + 1] * along_sizes
        )

    below = at_count(below_count)
    above = at_count(below_count + 1)
    beyond_grid = np.log(2) * np.maximum(size - GRID[-1], 0)
    return below * (1 - along_counts) + above * along_counts + beyond_grid


class _SharedByRows(NamedTuple):
    """What rows that are priced together have in common."""

    kind: str
    fabric: Fabric
    series: int
    """Index of the series in `CollectiveRows.keys`."""
    software: str
    dtype: str
    algorithm: str
    any_algorithm: bool
    host_launches: bool


def predict_collective_rows(prices: CollectivePrices, rows: CollectiveRows) -> Priced:
    """Prices of table rows, each alone on its fabric, using its own series if measured."""
    # Rows that ask the same table questions go together: they differ in sizes and counts alone.
    columns = [getattr(rows, name) for name in _SharedByRows._fields]
    codes: dict[_SharedByRows, int] = {}
    code_of_row = np.zeros(len(rows), np.int64)
    for row, values in enumerate(zip(*columns, strict=True)):
        code_of_row[row] = codes.setdefault(_SharedByRows(*values), len(codes))
    distinct = list(codes)

    priced = Priced.unknown(len(rows))
    for (code,), index in groups_of(code_of_row):
        shared = distinct[code]
        series = rows.keys[shared.series]
        request = CollectiveRequest(
            kind=str(shared.kind),
            fabric=shared.fabric,
            keys=(EntryKey(series, shared.software, shared.dtype), series),
            algorithm=str(shared.algorithm),
            any_algorithm=bool(shared.any_algorithm),
            host_launches=bool(shared.host_launches),
        )
        groups = Groups.on(
            shared.fabric,
            buffer_bytes=rows.buffer_bytes[index],
            ranks=rows.ranks[index],
            ranks_per_node=rows.ranks_per_node[index],
            level=np.full(len(index), len(shared.fabric.levels) - 1),
            concurrent=np.ones(len(index)),
        )
        priced.put(index, prices.price(request, groups))
    return priced
