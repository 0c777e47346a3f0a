"""Held-out errors of the collective model (shapes, rank counts, devices, fabrics), and interval
widths as their conformal quantiles."""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from perfmodel.cost.learn.collectives import expert_exchanges as moe
from perfmodel.cost.learn.collectives._curves import LARGE, Placements
from perfmodel.cost.learn.collectives._fit import (
    NO_SOURCES,
    Sources,
    fit_all_curves,
    fit_rows,
    guides,
)
from perfmodel.cost.learn.collectives._physics_fit import fit_between, physical_time
from perfmodel.cost.learn.collectives._price import CollectivePrices, predict_collective_rows
from perfmodel.cost.learn.collectives._rows import (
    CollectiveRows,
    collective_rows,
    counted,
    reasons_to_set_aside,
)
from perfmodel.cost.learn.collectives._weights import CollectiveWeights, CurveKey, LinksKey, Scope
from perfmodel.cost.learn.intervals import conformal_quantile
from perfmodel.ingest.tables import groups_of, hashed

RANK_FOLDS: Final = 3
"""Number of folds in which intermediate rank counts are left out."""
DEVICE_FOLDS: Final = 3
"""Number of folds in which devices are left out; physics is fitted anew in each."""
_LOG: Final = logging.getLogger(__name__)
FEWEST: Final = 30
"""Least number of errors for which a separate width is fitted."""
FEWEST_SERIES: Final = 4
"""Least number of series that these errors come from, if they are used for other series."""
LEVEL_OF_OTHERS: Final = 0.95
"""Quantile of the errors of other fabrics and rank counts that holds 90 % of a new one's. It is
above 90 % because errors within a fabric are correlated."""
PER_SERIES: Final = 400
"""Most rows of one series that count, so that dense sweeps do not dominate."""


class UsableRows(NamedTuple):
    """Measured collectives that can be fitted to."""

    collectives: CollectiveRows
    exchanges: moe.MoeRows
    """Exchanges of tokens between experts."""
    left_out: dict[str, int]
    """Number of other rows, by reason."""


def usable(tables: Sequence[pd.DataFrame], sources: Sources = NO_SOURCES) -> UsableRows:
    """The rows of tables that can be fitted to."""
    table = (
        pd.concat(list(tables), ignore_index=True) if tables else pd.DataFrame({"collective": []})
    )
    is_exchange = table["collective"].isin(moe.MOE_KINDS).to_numpy()
    exchanges = moe.moe_rows(table.loc[is_exchange])
    exchanges = exchanges.take(
        (exchanges.skipped == "") & np.isfinite(exchanges.time_s) & (exchanges.time_s > 0)
    )

    rows = collective_rows(table.loc[~is_exchange])
    has_time = np.isfinite(rows.time_s) & (rows.time_s > 0)
    rows = rows.take((rows.skipped == "") & ~rows.doubtful & has_time & (rows.ranks > 1))

    # known doubts stay: of unhealthy networks as measured, of physics' witnesses at scale by a
    # robust fit
    no_guide = (*sources.unhealthy, *((name,) for name in sources.physics_only))
    reason, slow = reasons_to_set_aside(rows, no_guide)
    slow &= sources.keep_slow
    rows = replace(rows, slow=slow)
    left_out = counted(rows, np.where(slow, "", reason))
    return UsableRows(rows.take((reason == "") | slow), exchanges, left_out)


def shape_folds(rows: CollectiveRows, folds: int = 5) -> np.ndarray:
    """A reproducible random fold for each whole shape (device, kind, ranks, size)."""
    columns = [
        rows.of_series("device"),
        rows.kind,
        rows.ranks,
        rows.ranks_per_node,
        rows.buffer_bytes,
    ]
    return (hashed(columns) % folds).astype(int)


def shape_errors(
    rows: CollectiveRows, weights: CollectiveWeights, sources: Sources
) -> tuple[np.ndarray, np.ndarray]:
    """log(predicted / measured) of every row by its own series when its shape was left out, and
    whether it has one."""
    fold = shape_folds(rows)
    error = np.full(len(rows), np.nan)
    measured = np.zeros(len(rows), bool)
    # physics stays: only the curves, by which a series differs from it, are fitted without the fold
    for k in range(fold.max() + 1):
        test = np.flatnonzero(fold == k)
        train = rows.take(fold != k)
        if len(train) and len(test):
            curves = fit_all_curves(train, weights.physics, sources)
            prices = CollectivePrices(replace(weights, curves=curves))
            priced = predict_collective_rows(prices, rows.take(test))
            error[test] = np.log(priced.time_s / rows.time_s[test])
            measured[test] = priced.provenance == "measured"
    return error, measured


def shape_spread(
    rows: CollectiveRows, weights: CollectiveWeights, sources: Sources
) -> dict[Scope, float]:
    """Half-widths for measured series, from errors of held-out shapes, and for the usual prices of
    a fabric."""
    error, measured = shape_errors(rows, weights, sources)
    measured_spread = quantiles(rows, np.where(measured, error, np.nan), "measured")

    # the same rows as if nobody had said whose they are: how far series of a fabric lie from its
    # usual price
    usual_times = predict_collective_rows(CollectivePrices(weights), rows.anonymous())
    source = rows.of_series("source")
    is_reference = np.isin(source, sources.reference or source)
    known = (usual_times.provenance == "measured") & is_reference
    error = np.where(known, np.log(usual_times.time_s / rows.time_s), np.nan)
    return measured_spread | quantiles(rows, error, "usual")


def quantiles(rows: CollectiveRows, error: np.ndarray, basis: str) -> dict[Scope, float]:
    """90 % quantiles of absolute errors (NaN: none) by `Scope`; those `measured` also by series."""
    # Scopes from general to special, each with its rows and how many errors it needs.
    large = rows.buffer_bytes >= 1 << LARGE
    tier = np.where(rows.between, "between", "inside").astype(object)
    scopes: list[tuple[Scope, np.ndarray, int]] = []
    for (is_large, place), index in groups_of(large, tier):
        scopes.append((Scope(basis, is_large, place), index, 1))
    for (is_large, place, kind), index in groups_of(large, tier, rows.kind):
        scopes.append((Scope(basis, is_large, place, kind), index, FEWEST))
    if basis == "measured":
        for (is_large, code), index in groups_of(large, rows.series):
            scopes.append((Scope(basis, is_large, series=rows.keys[code]), index, FEWEST))

    level = 0.9 if basis in ("measured", "usual") else LEVEL_OF_OTHERS
    widths = {}
    for scope, index, fewest in scopes:
        known = at_most(rows, index[np.isfinite(error[index])])
        # A width that is to hold for other series must come from several.
        tells_of_others = fewest > 1 and basis != "measured"
        too_few_series = tells_of_others and len(set(rows.series[known])) < FEWEST_SERIES
        if len(known) >= fewest and not too_few_series:
            widths[scope] = round(conformal_quantile(error[known], level), 4)
    return widths


def at_most(rows: CollectiveRows, index: np.ndarray) -> np.ndarray:
    """Thin the rows at `index` to at most `PER_SERIES` of each series, evenly."""
    chosen = []
    for _, rows_of_series in groups_of(rows.series[index]):
        step = -(-len(rows_of_series) // PER_SERIES)
        chosen.append(index[rows_of_series[::step]])
    return np.sort(np.concatenate(chosen)) if chosen else index


@dataclass(frozen=True)
class LeftOut:
    """Rows with held-out predictions."""

    what: str
    rows: CollectiveRows
    error: np.ndarray
    """log(predicted / measured), NaN where not left out."""
    half_width: np.ndarray
    """Half-width of the interval, from other folds."""
    simpler: dict[str, np.ndarray]
    """Errors of simpler prediction methods."""


@dataclass(frozen=True)
class Study:
    """Interval widths and the underlying errors."""

    spread: dict[Scope, float]
    parts: tuple[LeftOut, ...]
    exchanges: Mapping[str, tuple[np.ndarray, np.ndarray]]
    """Errors and half-widths of mixture-of-experts exchanges, by kind of held-out group."""


def study_collectives(tables: Sequence[pd.DataFrame], sources: Sources = NO_SOURCES) -> Study:
    """Hold out shapes, rank counts, devices and fabrics in turn.

    Physics is fitted anew wherever devices, fabrics or the largest rank counts are left out; the
    latter two are then predicted by it alone. Fabrics whose network is known to have run far below
    its rate are not part of these studies.
    """
    rows, exchanges, _ = usable(tables, sources)
    weights = fit_rows(rows, None, sources)
    licensed = rows.take(~np.isin(rows.of_series("source"), sources.physics_only))

    # 1. Shapes: how well a series predicts sizes that it was not timed at.
    _LOG.info("shapes")
    error, measured = shape_errors(licensed, weights, sources)
    error = np.where(measured, error, np.nan)
    by_physics = np.log(physical_time(weights.physics, licensed) / licensed.time_s)
    simpler = {"physics": by_physics, "interpolation": _interpolation(licensed)}
    half = (hashed([licensed.buffer_bytes, licensed.ranks]) % 2).astype(int)
    parts = [_crossed("shapes", licensed, error, half, simpler, "measured")]

    # 2. Rank counts that lie between others of the series.
    _LOG.info("rank counts")

    def with_curves_of(train: CollectiveRows) -> CollectiveWeights:
        return replace(weights, curves=fit_all_curves(train, weights.physics, sources))

    fold = ranks_fold(licensed)
    error = _left_out(licensed, fold, with_curves_of)
    parts.append(_crossed("rank counts", licensed, error, fold, {"physics": by_physics}, "learned"))
    spread = quantiles(licensed, error, "learned")

    # 3. Devices, inside a node: their links are known from other devices alone.
    _LOG.info("devices")
    healthy = rows.take(guides(rows, sources))
    device = np.array([fabric.device for fabric in healthy.fabric], dtype=object)
    fold = _folds(device, DEVICE_FOLDS)
    error = _left_out(healthy, fold, lambda train: fit_rows(train, None, sources, weights.physics))
    error = np.where(healthy.between, np.nan, error)
    parts.append(_crossed("devices", healthy, error, fold, {}, "links"))
    spread |= quantiles(healthy, error, "links")

    # 4. Fabrics between nodes, one at a time, by physics that has not seen them.
    _LOG.info("fabrics and rank counts beyond, between nodes")
    between_nodes = healthy.take(healthy.between)
    curves_inside = replace(weights, curves=_inside_curves(weights.curves))

    def with_physics_of(train: CollectiveRows) -> CollectiveWeights:
        return replace(curves_inside, physics=fit_between(train, weights.physics))

    fold = _folds(fabric_names(between_nodes), len(between_nodes))
    error = _left_out(between_nodes, fold, with_physics_of)
    parts.append(_crossed("fabrics between nodes", between_nodes, error, fold, {}, "analytical"))
    spread |= quantiles(between_nodes, error, "analytical")

    # 5. The largest rank counts of every series, with the widths that fabrics left out teach.
    error = _left_out(between_nodes, np.where(most_ranks(between_nodes), 0, -1), with_physics_of)
    known = CollectiveWeights(
        physics={}, spread=quantiles(between_nodes, parts[-1].error, "analytical")
    )
    half = half_widths(between_nodes, np.flatnonzero(np.isfinite(error)), known, "analytical")
    parts.append(LeftOut("rank counts beyond", between_nodes, error, half, {}))

    # inside a node physics alone is as far off as the links of other devices are
    in_node_widths = {
        scope._replace(what="analytical"): width
        for scope, width in spread.items()
        if scope.what == "links"
    }
    return Study(in_node_widths | spread, tuple(parts), left_out_exchanges(exchanges))


def fabric_names(rows: CollectiveRows) -> np.ndarray:
    """Labels of measured fabrics, for holding out whole fabrics; str objects [n]."""
    device = np.array([fabric.device for fabric in rows.fabric], dtype=object)
    return rows.of_series("source") + ", " + device + ", " + rows.of_series("interconnect")


def most_ranks(rows: CollectiveRows) -> np.ndarray:
    """Mark the rows with the most ranks in their series and at their number of ranks per node, if
    fewer ranks were measured there too; bool[n]."""
    result = np.zeros(len(rows), bool)
    for _, index in groups_of(rows.series, rows.ranks_per_node):
        ranks = rows.ranks[index]
        result[index[ranks == ranks.max()]] = ranks.min() < ranks.max()
    return result


def _inside_curves(curves: Mapping[CurveKey, Placements]) -> dict[CurveKey, Placements]:
    """Curves of groups inside one node."""
    in_node = {}
    for key, placements in curves.items():
        in_one_node = {place: curve for place, curve in placements.items() if place[0] <= place[1]}
        if in_one_node:
            in_node[key] = in_one_node
    return in_node


def ranks_fold(rows: CollectiveRows) -> np.ndarray:
    """Assign folds by rank count; rows of the smallest and largest count of a series have none
    (-1)."""
    fold = np.full(len(rows), -1)
    for _, part in groups_of(rows.series, rows.between):
        for position, count in enumerate(np.unique(rows.ranks[part])[1:-1]):
            fold[part[rows.ranks[part] == count]] = position % RANK_FOLDS
    return fold


def _left_out(
    rows: CollectiveRows, fold: np.ndarray, fit: Callable[[CollectiveRows], CollectiveWeights]
) -> np.ndarray:
    """log(predicted / measured) of every row by weights fitted without its fold; NaN for rows in no
    fold (-1)."""
    error = np.full(len(rows), np.nan)
    for k in range(fold.max(initial=-1) + 1):
        test = np.flatnonzero(fold == k)
        train = np.flatnonzero(fold != k)
        if len(test) and len(train):
            priced = predict_collective_rows(
                CollectivePrices(fit(rows.take(train))), rows.take(test)
            )
            error[test] = np.log(priced.time_s / rows.time_s[test])
    return error


def _folds(label: np.ndarray, folds: int) -> np.ndarray:
    """Reproducible folds with about equal numbers of labels."""
    names, inverse = np.unique(label.astype(str), return_inverse=True)
    order = np.argsort(hashed([names]), kind="stable")
    rank = np.empty(len(names), int)
    rank[order] = np.arange(len(names))
    return rank[inverse] % folds


def _crossed(
    basis: str,
    rows: CollectiveRows,
    error: np.ndarray,
    fold: np.ndarray,
    simpler: dict[str, np.ndarray],
    name: str,
) -> LeftOut:
    """Held-out rows, each with the half-width from the other folds."""
    half = np.full(len(rows), np.nan)
    for k in range(fold.max(initial=-1) + 1):
        known = CollectiveWeights(
            physics={}, spread=quantiles(rows, np.where(fold == k, np.nan, error), name)
        )
        test = np.flatnonzero((fold == k) & np.isfinite(error))
        half[test] = half_widths(rows, test, known, name)[test]
    return LeftOut(basis, rows, error, half, simpler)


def half_widths(
    rows: CollectiveRows, index: np.ndarray, known: CollectiveWeights, name: str
) -> np.ndarray:
    """Half-widths of the rows at `index` from the errors of this name in `known`; NaN elsewhere,
    float64[n]."""
    half = np.full(len(rows), np.nan)
    for i in index:
        tier = "between" if rows.between[i] else "inside"
        is_large = bool(rows.buffer_bytes[i] >= 1 << LARGE)
        source = {"measured": rows.keys[rows.series[i]], "links": LinksKey("", "")}.get(name)
        provenance = "learned" if name == "links" else name
        half[i] = known.half_width(provenance, str(rows.kind[i]), tier, is_large, source)
    return half


def _interpolation(rows: CollectiveRows) -> np.ndarray:
    """Errors of log-log interpolation between the nearest sizes of the same entry and placement,
    own size left out."""
    error = np.full(len(rows), np.nan)
    for _, index in groups_of(
        rows.series, rows.software, rows.dtype, rows.ranks, rows.ranks_per_node
    ):
        x = np.log(rows.buffer_bytes[index])
        y = np.log(rows.time_s[index])
        sizes, inverse = np.unique(x, return_inverse=True)
        if len(sizes) <= 2:
            continue
        # the first and the last size have neighbours on one side only: no guess
        medians = np.array([np.median(y[inverse == i]) for i in range(len(sizes))])
        inner = np.arange(1, len(sizes) - 1)
        share = (sizes[inner] - sizes[inner - 1]) / (sizes[inner + 1] - sizes[inner - 1])
        guess = np.full(len(sizes), np.nan)
        guess[inner] = medians[inner - 1] * (1 - share) + medians[inner + 1] * share
        error[index] = guess[inverse] - y
    return error


def left_out_exchanges(rows: moe.MoeRows) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Errors and half-widths of held-out exchanges, by which rows were held out; empty without
    rows."""
    return moe.moe_left_out(rows, moe.fit_moe_series(rows)) if len(rows) else {}
