"""Times of collectives on clusters or from table rows; expert exchanges at the rates published by
their libraries' authors."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float64, Int64

from perfmodel.catalog import ExchangeRates, exchange_library
from perfmodel.cost._events import EventTimes
from perfmodel.cost.learn import WeightFiles, weight_files
from perfmodel.cost.learn.collectives import (
    CollectivePrices,
    CollectiveRequest,
    CollectiveWeights,
    Fabric,
    Groups,
    Priced,
    collective_rows,
    collective_weights,
    predict_collective_rows,
)
from perfmodel.cost.learn.collectives.expert_exchanges import (
    MOE_KINDS,
    MoeRows,
    moe_rows,
    predict_moe,
)
from perfmodel.cost.learn.collectives.links import is_flat, is_known, link_class
from perfmodel.ingest.tables import text
from perfmodel.ops import Collective, Exchange, ExchangeWay
from perfmodel.session import current_session
from perfmodel.spec import Cluster

if TYPE_CHECKING:
    import pandas as pd


class CollectiveModel:
    """Predicts all_reduce, all_gather, reduce_scatter, all_to_all, send_recv and broadcast.

    Clusters and table rows are converted to fabrics: a device, link classes and their rates. A row
    that names a measured series (source, software and so on) gets the times of that series. All
    other rows, and ops on clusters, get the usual times of their fabric, so that equivalent rows
    and ops get equal times.
    """

    def __init__(self, weights: CollectiveWeights) -> None:
        self.weights = weights
        self._prices = CollectivePrices(weights)

    @classmethod
    def load(cls, calibration: Path | str | None = None) -> "CollectiveModel":
        """Load the shipped model, or the one of a calibration made by `perfmodel fit`.

        Raises:
            CalibrationError: if the weights are missing, truncated or of another schema version.
        """
        return cls.of(weight_files(calibration))

    @classmethod
    def of(cls, weights: WeightFiles) -> "CollectiveModel":
        """The model of some weights (cached in the session)."""
        return current_session().cost_models.get_or_compute(
            (cls, weights), lambda: cls(collective_weights(weights))
        )

    def times(self, cluster: Cluster, ops: Sequence[Collective]) -> EventTimes:
        """Time of each op, alone on the network except for its `concurrent` groups; 0 for one rank.

        Times grow, or stay equal, with bytes, ranks (inside a switched node, and with the nodes),
        latency and sharing; they never rise with bandwidth. Provenance: `measured` (this die,
        fabric, kind, rank count and size range), `learned` (this fabric, or these links on other
        devices), `analytical` (physics of a link class that was measured elsewhere), `extrapolated`
        (physics of links or rank counts never measured).
        """
        fabric = Fabric.of(cluster)
        priced = Priced.unknown(len(ops))
        groups = _groups(fabric, ops)
        by_kind: dict[str, list[int]] = {}
        for i, op in enumerate(ops):
            by_kind.setdefault(op.collective, []).append(i)
        for kind, members in by_kind.items():
            index = np.array(members)
            priced.put(
                index, self._prices.price(CollectiveRequest(kind, fabric), groups.take(index))
            )
        # Published rates stand for the kernels of special libraries.
        by_library = {
            i: op.exchange for i, op in enumerate(ops) if op.exchange and op.num_ranks > 1
        }
        if by_library:
            self._exchange(
                fabric, list(by_library.values()), groups, priced, np.array(list(by_library))
            )
        return _event_times(priced)

    def _exchange(
        self,
        fabric: Fabric,
        exchanges: Sequence[Exchange],
        groups: Groups,
        priced: Priced,
        index: Int64[np.ndarray, "n"],
    ) -> None:
        """Give exchanges by special libraries the times of their published rates.

        Args:
            exchanges: library and direction of each.
            index: their places among `groups` and `priced`.
        """
        # Without a published rate an exchange keeps its time as an all-to-all.
        time_s = _published_s(fabric, groups.take(index), exchanges)
        known = np.isfinite(time_s)

        # A rate includes the latency at its size: smaller messages still take as long as the
        # smallest one, which is the time of an empty message.
        known_index = index[known]
        empty = replace(groups.take(known_index), buffer_bytes=np.zeros(len(known_index)))
        latency_s = self._prices.price(CollectiveRequest("all_to_all", fabric), empty).time_s
        priced.time_s[known_index] = np.maximum(
            np.maximum(time_s[known], latency_s), priced.least_s[known_index]
        )

    def table_times(self, table: "pd.DataFrame") -> EventTimes:
        """Times of the rows of a collective table (columns of the data README, also
        `moe_alltoall`).

        Rows it cannot price get NaN and `skipped: reason`; nothing is raised for them.
        """
        priced = Priced.unknown(len(table))
        is_moe = np.isin(text(table, "collective"), MOE_KINDS)
        # Exchanges of tokens have columns and prices of their own.
        for exchange in (False, True):
            index = np.flatnonzero(is_moe == exchange)
            part = table.iloc[index]
            rows = moe_rows(part) if exchange else collective_rows(part)
            priced.provenance[index] = np.array(
                [f"skipped: {reason}" for reason in rows.skipped], dtype=object
            )
            usable = np.flatnonzero(rows.skipped == "")
            if isinstance(rows, MoeRows):
                prices = predict_moe(self.weights.moe, rows.take(usable))
            else:
                prices = predict_collective_rows(self._prices, rows.take(usable))
            priced.put(index[usable], prices)
        return _event_times(priced)


def _groups(fabric: Fabric, ops: Sequence[Collective]) -> Groups:
    """The groups of collectives on a fabric, as columns."""

    def column(name: str) -> Float64[np.ndarray, " ops"]:
        return np.array([getattr(op, name) for op in ops], np.float64)

    return Groups.on(
        fabric,
        buffer_bytes=column("bytes"),
        ranks=column("num_ranks"),
        ranks_per_node=column("ranks_per_node"),
        level=column("level"),
        concurrent=column("concurrent"),
        interleaved=column("interleaved"),
    )


def _event_times(priced: Priced) -> EventTimes:
    # links at their full rate bound the interval from below, too
    lo_s = np.maximum(priced.time_s * np.exp(-priced.half_width), priced.least_s)
    hi_s = priced.time_s * np.exp(priced.half_width)
    return EventTimes(priced.time_s, lo_s, hi_s, tuple(priced.provenance.tolist()))


def interconnect_of(cluster: Cluster) -> str:
    """The cluster's links in the notation of tables. Rates are written where they differ from what
    the name implies.

    Between nodes a name says the rate of an adapter, which devices may share; only a higher rate is
    stated.
    """
    device = cluster.device.name
    names = []
    flat = is_flat([level.name for level in cluster.levels], device)
    for index, level in enumerate(cluster.levels[:2]):
        between_nodes = flat or index > 0
        # Tables name links by the usual words and state a rate only where it is another than these
        # words mean.
        nominal = link_class(level.name, device, between_nodes).bandwidth_bytes_per_s
        shared = between_nodes and is_known(level.name, device, between_nodes)
        rate = max(level.bandwidth_bytes_per_s, nominal) if shared else level.bandwidth_bytes_per_s
        # `+` and `@` divide the notation.
        name = level.name.replace("+", " ").replace("@", " ")
        name_says_rate = rate == nominal and is_known(level.name, device, between_nodes)
        with_rate = name if name_says_rate else f"{name}@{rate / 1e9:g}GB/s"
        names.append(with_rate)
    return " + ".join(names)


def _published_s(
    fabric: Fabric, groups: Groups, exchanges: Sequence[Exchange]
) -> Float64[np.ndarray, "n"]:
    """Seconds of exchanges at published rates, which scale with the bandwidth of their links.

    NaN if no rate is published for these links or, between nodes, for this number of ranks per
    node.
    """
    time_s = np.full(len(exchanges), np.nan)
    in_node = groups.ranks <= groups.ranks_per_node
    for exchange in dict.fromkeys(exchanges):
        same_exchange = np.array([candidate == exchange for candidate in exchanges])
        rates_and_levels = product(
            exchange_library(exchange.dispatcher).rate, enumerate(fabric.levels)
        )
        for rates, (level, link) in rates_and_levels:
            if link.link != rates.link:
                continue

            # Rates that state ranks per node hold between nodes: their parties are nodes, and
            # concurrent groups share the adapters. For other rates, the parties are ranks.
            if rates.ranks_per_node:
                same_ranks_per_node = groups.ranks_per_node == rates.ranks_per_node
                matching = same_exchange & ~in_node & (groups.level == level) & same_ranks_per_node
                parties = groups.ranks[matching] / rates.ranks_per_node
                sharing = groups.concurrent[matching]
            else:
                matching = same_exchange & in_node & (level == 0)
                parties = groups.ranks[matching]
                sharing = 1.0
            share = share_of_link(rates, exchange.way, parties)
            time_s[matching] = groups.buffer_bytes[matching] * sharing / (share * link.bandwidth)
    return time_s


def share_of_link(
    rates: ExchangeRates, way: ExchangeWay, parties: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Rates relative to the link's, interpolated over the logarithm of the number of parties."""
    published = rates.dispatch_gb_per_s if way == "dispatch" else rates.combine_gb_per_s
    return np.interp(np.log2(parties), np.log2(rates.parties), published) / rates.link_gb_per_s
