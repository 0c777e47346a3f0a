"""Times of exchanges of tokens with experts at the rates that their libraries' authors published."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64

from perfmodel.catalog import ExchangeRates, exchange_library
from perfmodel.cost.learn import Fabric, Groups
from perfmodel.ops import Exchange, ExchangeWay


def published_s(fabric: Fabric, groups: Groups, exchanges: Sequence[Exchange]) -> Float64[np.ndarray, "n"]:
    """Bytes over the published rate [s], which moves with the bandwidth of the links that it was measured on; NaN where
    none is published for the links, or between nodes for as many ranks of each."""
    time_s = np.full(len(exchanges), np.nan)
    inside = groups.ranks <= groups.ranks_per_node
    for exchange in dict.fromkeys(exchanges):
        own = np.array([other == exchange for other in exchanges])
        for rates in exchange_library(exchange.dispatcher).rate:
            for level, link in enumerate(fabric.levels):
                if link.link != rates.link:
                    continue
                if rates.ranks_per_node:
                    here = own & ~inside & (groups.level == level) & (groups.ranks_per_node == rates.ranks_per_node)
                else:
                    here = own & inside & (level == 0)
                parties = groups.ranks[here] / (rates.ranks_per_node or 1)
                share = share_of_link(rates, exchange.way, parties)
                sharing = groups.concurrent[here] if rates.ranks_per_node else 1.0
                time_s[here] = groups.buffer_bytes[here] * sharing / (share * link.bandwidth)
    return time_s


def share_of_link(
    rates: ExchangeRates, way: ExchangeWay, parties: Float64[np.ndarray, "n"]
) -> Float64[np.ndarray, "n"]:
    """Rates relative to the link's: between published numbers of parties linear in their logarithm, beyond them that of
    the nearest."""
    published = rates.dispatch_gb_per_s if way == "dispatch" else rates.combine_gb_per_s
    return np.interp(np.log2(parties), np.log2(rates.parties), published) / rates.link_gb_per_s
