"""Fits how groups of ranks that communicate at once share the links between nodes.

Beyond its latency, each of n groups alike on the same nodes takes n^c times as long as one group
alone. Links that one group fills and that all share give c = 1, adapters of their own c = 0, and
hosts that lose by switching between groups c > 1. Prices of collectives use c instead of an equal
share of the nominal rate (`CollectivePrices`), which still bounds them: no link carries more.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn.collectives._price import CollectivePrices
from perfmodel.cost.learn.collectives._requests import CollectiveRequest, Groups
from perfmodel.cost.learn.collectives._rows import CollectiveRows, times_over_alone
from perfmodel.cost.learn.collectives._weights import CollectiveWeights, FabricKey

MOST: Final = 2.0
"""Largest exponent, with which two groups slow each other to a quarter of the rate."""
_COARSE: Final = 21
"""Number of exponents tried from 0 to `MOST`, then again between the neighbours of the best."""
_LEAST_EFFECT: Final = 0.5
"""Least difference of log times between the smallest and largest exponent; below it messages are
too small to tell exponents apart."""


def sharing_exponents(rows: CollectiveRows, weights: CollectiveWeights) -> dict[FabricKey, float]:
    """Fit the exponents of `CollectiveWeights.sharing` to rows of several groups at once.

    The exponent of a kind of collective on a fabric makes the predicted slowdowns lie closest to
    the measured ones (least absolute deviations of the logs, so that single bad rows do not count).
    Kinds that were not measured get the median of those that were.
    """
    # The exponent is that of groups which share the adapters of their nodes: rows between nodes
    # alone tell of it.
    measured: dict[FabricKey, list[tuple[int, float]]] = defaultdict(list)
    for i, ratio in times_over_alone(rows):
        if rows.between[i] and rows.skipped[i] == "":
            fabric = rows.fabric[i]
            measured[FabricKey(fabric.device, fabric.key(between=True), str(rows.kind[i]))].append(
                (i, ratio)
            )

    exponents: dict[FabricKey, float] = {}
    by_fabric: dict[FabricKey, list[float]] = defaultdict(list)
    for key, timed in measured.items():
        indices = np.array([i for i, _ in timed])
        log_ratios = np.log([ratio for _, ratio in timed])
        exponent = _closest_exponent(rows.take(indices), log_ratios, key, weights)
        if exponent is not None:
            exponents[key] = exponent
            by_fabric[key._replace(kind="")].append(exponent)
    for key, exponents_of_kinds in by_fabric.items():
        exponents[key] = float(np.median(exponents_of_kinds))
    return exponents


def _closest_exponent(
    rows: CollectiveRows,
    log_ratios: Float64[np.ndarray, "n"],
    key: FabricKey,
    weights: CollectiveWeights,
) -> float | None:
    """The exponent that predicts measured slowdowns best; None where no exponent makes a
    difference."""

    def deviation(exponent: float) -> float:
        shared = replace(weights, sharing={**weights.sharing, key: exponent})
        return float(np.abs(_log_slowdowns(rows, shared) - log_ratios).mean())

    ends = [
        _log_slowdowns(rows, replace(weights, sharing={key: exponent})) for exponent in (0.0, MOST)
    ]
    if float(np.max(ends[1] - ends[0])) < _LEAST_EFFECT:
        return None

    # A coarse grid first, as the deviation is not convex where a floor binds; then a finer one
    # around its best point.
    coarse = np.linspace(0.0, MOST, _COARSE)
    best = _least(coarse.tolist(), [deviation(exponent) for exponent in coarse.tolist()])
    step = MOST / (_COARSE - 1)
    fine = np.linspace(max(0.0, best - step), min(MOST, best + step), _COARSE)
    return _least(fine.tolist(), [deviation(exponent) for exponent in fine.tolist()])


def _least(values: Sequence[float], costs: Sequence[float]) -> float:
    """The value of the lowest cost; of equal ones the middle one."""
    lowest = min(costs) + 1e-12
    best = [value for value, cost in zip(values, costs, strict=True) if cost <= lowest]
    return best[len(best) // 2]


def _log_slowdowns(rows: CollectiveRows, weights: CollectiveWeights) -> Float64[np.ndarray, "n"]:
    """Log of the predicted time of each row's group together with the others, relative to that
    alone."""
    prices = CollectivePrices(weights)
    log_slowdowns = np.zeros(len(rows))
    for i in range(len(rows)):
        fabric = rows.fabric[i]
        request = CollectiveRequest(str(rows.kind[i]), fabric)
        outermost = np.full(2, len(fabric.levels) - 1)
        size = np.full(2, rows.buffer_bytes[i])
        ranks = np.full(2, rows.ranks[i])
        per_node = np.full(2, rows.ranks_per_node[i])
        groups = np.array([float(rows.groups[i]), 1.0])
        concurrent_s, alone_s = prices.price(
            request,
            Groups.on(
                fabric,
                buffer_bytes=size,
                ranks=ranks,
                ranks_per_node=per_node,
                level=outermost,
                concurrent=groups,
            ),
        ).time_s
        log_slowdowns[i] = np.log(concurrent_s / alone_s)
    return log_slowdowns
