"""Fitting of collective models from measurement tables."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.errors import TableError
from perfmodel.learn import _moe_alltoall as moe
from perfmodel.learn._collective_constants import Series, fit_series
from perfmodel.learn._collective_correction import (
    COMPONENTS,
    MOST_POINTS,
    as_points,
    families,
    likelihood_sample,
    point_labels,
    shape_blocks,
)
from perfmodel.learn._collective_curve import LinkConstants
from perfmodel.learn._collective_grids import reference_grids
from perfmodel.learn._collective_predict import entry_names, local_at, physical_curves, pooled_residual
from perfmodel.learn._collective_residual import ResidualNet, fit_residual, residual_features
from perfmodel.learn._collective_store import FILE_NAME, save_collective_weights
from perfmodel.learn._collective_studies import left_out_spread
from perfmodel.learn._collective_table import CollectiveRows, collective_rows
from perfmodel.learn._collective_weights import CollectiveWeights, Corrected, MoeWeights
from perfmodel.learn._fine_tables import FineTables, fit_fine_tables
from perfmodel.learn._kriging import Hyperparameters, Kriging, fit_kriging
from perfmodel.learn._kriging_hyper import MAX_POINTS, fit_hyperparameters
from perfmodel.learn._local_intervals import conformal_quantile, local_errors

MOE_MOST_POINTS: Final = 2600
_LOG: Final = logging.getLogger(__name__)


def fit_collectives(
    tables: Sequence[pd.DataFrame],
    out: Path,
    seed: int = 0,
    *,
    reference_sources: Sequence[str] = (),
    unhealthy: Sequence[str] = (),
    start: CollectiveWeights | None = None,
    studies: bool = True,
) -> CollectiveWeights:
    """Fit curves, pooled residuals, corrections and intervals; write `out/collectives.safetensors`.

    Deterministic for one seed. A table of twenty rows is enough: what it is too small for is left out.

    Args:
        tables: collective tables as `read_table` gives them; `moe_alltoall` rows may stand among them.
        reference_sources: sources that cluster predictions stand on, best first; by default the largest.
        unhealthy: beginnings of series names whose links between nodes are no guide to other clusters.
        start: an earlier fit whose hyperparameters and networks are kept: several times faster.
        studies: leave rank counts and devices out to learn how wide intervals must be there; if not, the
            widths of `start` are kept.

    Raises:
        TableError: if no row of the tables can be used.
    """
    table = pd.concat(list(tables), ignore_index=True) if tables else pd.DataFrame({"collective": []})
    is_moe = table["collective"].isin(moe.KINDS).to_numpy()
    rows = _usable(collective_rows(table.loc[~is_moe]))
    exchanges = _usable_moe(moe.moe_rows(table.loc[is_moe]))
    if not len(rows) and not len(exchanges):
        raise TableError("no usable collective row: bytes, num_ranks and time_us are needed in each")
    sources = tuple(reference_sources) or tuple(pd.Series(rows.part(0)).value_counts().index)
    weights = CollectiveWeights(series=(), reference_sources=sources, unhealthy=tuple(unhealthy))
    if len(rows):
        weights = fit_rows(rows, weights, seed, start)
        weights = replace(weights, grids=reference_grids(weights, rows))
        if studies:
            weights = replace(weights, spread=left_out_spread(rows, weights, _refit(seed)))
        elif start:
            weights = replace(weights, spread=start.spread)
    if len(exchanges):
        weights = replace(weights, moe=fit_moe(exchanges, seed, start.moe if start else None, studies))
    weights = replace(weights, notes={"seed": seed, "rows": len(rows), "exchange_rows": len(exchanges)})
    save_collective_weights(weights, Path(out) / FILE_NAME)
    return weights


def _refit(seed: int) -> Any:
    def refit(rows: CollectiveRows, weights: CollectiveWeights) -> CollectiveWeights:
        return fit_rows(rows, replace(weights, series=(), corrections={}), seed, weights)

    return refit


def fit_rows(
    rows: CollectiveRows, base: CollectiveWeights, seed: int, start: CollectiveWeights | None
) -> CollectiveWeights:
    """Curves, networks (kept from `start`, if given) and corrections of measured rows."""
    series = fit_series(rows)
    _LOG.info("fitted the constants of %d series", len(series))
    nets = dict(start.nets) if start else fit_nets(rows, series, seed)
    hyper = {name: c.kriging.hyper for name, c in start.corrections.items()} if start else {}
    corrections = fit_corrections(rows, series, nets, hyper, seed)
    return replace(base, series=series, nets=nets, corrections=corrections)


def fit_nets(rows: CollectiveRows, series: Sequence[Series], seed: int) -> dict[str, ResidualNet]:
    """One residual network per collective kind that enough machines were measured with."""
    curve_s, vectors = physical_curves(rows, series)
    features = residual_features(rows, LinkConstants.from_vector(vectors), curve_s)
    residual = np.log(rows.time_s / curve_s)
    label = point_labels(rows)
    _, first = np.unique(label, return_index=True)
    machine = rows.part(0) + "|" + rows.part(1)
    nets = {}
    for kind in np.unique(rows.kind.astype(str)):
        index = first[rows.kind[first] == kind]
        _, entry, count = np.unique(rows.series[index].astype(str), return_inverse=True, return_counts=True)
        net = fit_residual(features[index], residual[index], 1.0 / count[entry], machine[index], seed)
        if net is not None:
            nets[kind] = net
            _LOG.info("%s: pooled residual, shrinkage %.2f", kind, net.shrinkage)
    return nets


def fit_corrections(
    rows: CollectiveRows,
    series: Sequence[Series],
    nets: dict[str, ResidualNet],
    hyper: Mapping[str, Hyperparameters],
    seed: int,
) -> dict[str, Corrected]:
    """Kriging of every family, with intervals from shapes left out."""
    curve_s, vectors = physical_curves(rows, series)
    residual = np.log(rows.time_s / curve_s) - pooled_residual(rows, vectors, curve_s, nets)
    corrections = {}
    for family in families(rows, MOST_POINTS):
        own, target = rows.take(family.rows), residual[family.rows]
        label = point_labels(own)
        _, first = np.unique(label, return_index=True)
        middle = pd.Series(target).groupby(label).median().to_numpy()
        chosen = own.take(first)
        points = as_points(chosen, curve_s[family.rows][first])
        found = hyper.get(family.name) or fit_hyperparameters(
            COMPONENTS, points, middle, likelihood_sample(chosen, MAX_POINTS, seed)
        )
        kriging, left_out = fit_kriging(COMPONENTS, found, points, middle, shape_blocks(chosen))
        placement, size = points.categories["placement"][label], np.log2(own.buffer_bytes)
        rest = target - kriging.predict(as_points(own, curve_s[family.rows]))
        fine, without = fit_fine_tables(entry_names(own, placement), size, rest)
        error = np.where(np.isnan(without), target - left_out[label], without)
        corrections[family.name] = _corrected(family.name, kriging, fine, own.series, placement, size, error)
    return corrections


def fit_moe(rows: moe.MoeRows, seed: int, start: MoeWeights | None, studies: bool) -> MoeWeights:
    """Curves and corrections of mixture-of-experts exchanges; hyperparameters are shared by all families."""
    known = moe.fit_moe_series(rows)
    curve_s = moe.moe_curves(rows, known)
    residual = np.log(rows.time_s / curve_s)
    points = moe.moe_points(rows, curve_s)
    if start and start.corrections:
        hyper = next(iter(start.corrections.values())).kriging.hyper
    else:
        sample = np.random.default_rng(seed).permutation(len(rows))[:MAX_POINTS]
        hyper = fit_hyperparameters(moe.COMPONENTS, points, residual, sample)
    corrections = {}
    for name, index in moe.moe_families(rows, MOE_MOST_POINTS):
        own = rows.take(index)
        kriging, left_out = fit_kriging(moe.COMPONENTS, hyper, points.take(index), residual[index], moe.moe_blocks(own))
        error = residual[index] - left_out
        placement = points.categories["placement"][index]
        corrections[name] = _corrected(
            name, kriging, FineTables({}, {}), own.series, placement, np.log2(own.tokens), error
        )
    fitted = MoeWeights(known, corrections)
    if studies:
        return replace(fitted, spread=_moe_spread(rows, known))
    return replace(fitted, spread=start.spread) if start else fitted


def _corrected(
    name: str,
    kriging: Kriging,
    fine: FineTables,
    series: np.ndarray,
    placement: np.ndarray,
    size: np.ndarray,
    error: np.ndarray,
) -> Corrected:
    errors = local_errors(series, size, error).joined(local_errors(series + "#" + placement, size, error))
    centre, _ = local_at(errors, series, placement, size)
    mean = float(np.abs(np.expm1(centre - error)).mean())
    _LOG.info("%s: %d points, %.1f %% on shapes left out", name, len(kriging.weight), 100 * mean)
    return Corrected(kriging, errors, fine, mean)


def _moe_spread(rows: moe.MoeRows, known: dict[str, np.ndarray]) -> float:
    """Error of the curve alone for each device, its constants taken from the others."""
    device, errors = rows.part(1), []
    for name in np.unique(device.astype(str)):
        others = {k: v for k, v in known.items() if k.split("|")[1] != name}
        if others:
            own = rows.take(device == name)
            errors.append(np.log(own.time_s / moe.moe_curves(own, others)))
    return conformal_quantile(np.concatenate(errors)) if errors else MoeWeights().spread


def _usable(rows: CollectiveRows) -> CollectiveRows:
    return rows.take((rows.skipped == "") & np.isfinite(rows.time_s) & (rows.time_s > 0) & (rows.ranks > 1))


def _usable_moe(rows: moe.MoeRows) -> moe.MoeRows:
    return rows.take((rows.skipped == "") & np.isfinite(rows.time_s) & (rows.time_s > 0))
