"""Fits correction curves, and joins a site's fit with the shipped one.

One curve per measured placement (ranks, ranks per node) of a key: a series with its software and
element type, a series, a fabric on one device, or links inside a node on any device.
"""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import numpy as np
import pandas as pd

from perfmodel.cost.learn.collectives._curves import Curve, fit_curves, mean_curve
from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._link_constants import Effect
from perfmodel.cost.learn.collectives._physics import DIRECT
from perfmodel.cost.learn.collectives._physics_fit import fit_physics, physical_time
from perfmodel.cost.learn.collectives._rows import CollectiveRows, SeriesKey
from perfmodel.cost.learn.collectives._weights import (
    CollectiveWeights,
    CurveKey,
    EntryKey,
    FabricKey,
    LinksKey,
    MeasuredPlace,
    usual_kind,
)
from perfmodel.ingest.tables import groups_of


@dataclass(frozen=True)
class Sources:
    """Facts about the sources of tables, as in `training/collectives.toml`."""

    reference: tuple[str, ...] = ()
    """Sources from which a fabric's usual price is computed, best first; by default all, largest
    first."""
    unhealthy: tuple[tuple[str, ...], ...] = ()
    """Prefixes of series whose network ran far below its rate; they are not used for other
    series."""
    as_timed: tuple[tuple[str, ...], ...] = ()
    """Prefixes of series (`""`: all) whose times include more than the collective; they are not
    used for other series."""
    physics_only: tuple[str, ...] = ()
    """Sources that state no licence: constants are fitted to them, their figures are not kept."""
    keep_slow: bool = False
    """Whether placements that ran far below their links' rates are kept for their own series
    only."""
    forced: bool = False
    """Whether a series with a forced algorithm may represent a fabric without other
    measurements."""


NO_SOURCES: Final = Sources()
"""Facts for sources of which nothing is known."""


def fit_rows(
    rows: CollectiveRows,
    base: CollectiveWeights | None,
    sources: Sources = NO_SOURCES,
    start: Mapping[Effect, float] | None = None,
) -> CollectiveWeights:
    """Fit the link physics, unless `base` has it, and the curves of all measured series."""
    # Physics should hold for links in general, so it is fitted without rows of faulty hosts or
    # networks.
    healthy = guides(rows, sources)
    physics = dict(base.physics) if base else fit_physics(rows.take(healthy), start)
    weights = CollectiveWeights(physics=physics, most_ranks=_most_ranks(rows.take(healthy)))

    # sources without a licence leave their mark in the constants alone
    licensed = rows.take(~np.isin(rows.of_series("source"), sources.physics_only))
    if len(licensed):
        curves = fit_all_curves(licensed, physics, sources)
        weights = replace(weights, curves=curves, measured_on=_measured_on(licensed))
    return _merged(weights, base) if base else weights


def guides(rows: CollectiveRows, sources: Sources) -> np.ndarray:
    """Whether each row is representative of its links, bool[n]."""
    on_unhealthy_network = rows.starting(sources.unhealthy) & rows.between
    timed_with_more = rows.starting(sources.as_timed)
    return ~on_unhealthy_network & ~timed_with_more & ~rows.slow


def fit_all_curves(
    rows: CollectiveRows, physics: Mapping[Effect, float], sources: Sources
) -> dict[CurveKey, dict[tuple[float, float], Curve]]:
    """Curves of series, of their software and element types, and the usual curves of fabrics."""
    rows = rows.take(~np.isin(rows.of_series("source"), sources.physics_only))
    # curves are what measurements add to physics: their logs are fitted and later multiplied in
    residual = np.log(rows.time_s / np.maximum(physical_time(physics, rows), 1e-9))
    place = (rows.ranks, rows.ranks_per_node, np.log2(rows.buffer_bytes), residual)
    series = fit_curves(_by_series(rows, np.ones(len(rows), bool)), *place)
    healthy = guides(rows, sources)
    healthy_series = fit_curves(_by_series(rows, healthy), *place)
    entries = groups_of(rows.series, rows.software, rows.dtype)

    # a series run with one software and element type is its own entry
    entries_of_series = Counter(code for (code, *_), _ in entries)
    several = {code for code, count in entries_of_series.items() if count > 1}
    of_entries = [
        (EntryKey(rows.keys[code], *run), index)
        for (code, *run), index in entries
        if code in several
    ]
    usual_curves = _usual_curves(rows.take(healthy), healthy_series, sources)
    return {**series, **fit_curves(of_entries, *place), **usual_curves}


def _by_series(rows: CollectiveRows, among: np.ndarray) -> Iterator[tuple[SeriesKey, np.ndarray]]:
    """Every series with the indices of its rows among some (bool[n])."""
    chosen = np.flatnonzero(among)
    return ((rows.keys[code], chosen[index]) for (code,), index in groups_of(rows.series[chosen]))


def _usual_curves(
    rows: CollectiveRows,
    series: Mapping[SeriesKey, Mapping[tuple[float, float], Curve]],
    sources: Sources,
) -> dict[FabricKey | LinksKey, dict[tuple[float, float], Curve]]:
    """A fabric's usual curves from representative rows: at each placement, those of the best
    reference source that measured it."""
    reference = sources.reference or tuple(pd.Series(rows.of_series("source")).value_counts().index)
    candidates: dict[_UsualPlace, list[_Candidate]] = defaultdict(list)
    for (code,), (row, *_) in groups_of(rows.series):
        key = rows.keys[code]
        is_direct = rows.algorithm[row] == DIRECT
        is_forced = not rows.any_algorithm[row] and not is_direct
        if key.source not in reference or (is_forced and not sources.forced):
            continue
        # The usual price is that of the device, without the host's time between calls.
        if rows.host_launches[row]:
            continue
        # A forced algorithm counts where the library's own choice was not measured.
        rank = reference.index(key.source) + (len(reference) if is_forced else 0)
        fabric: Fabric = rows.fabric[row]  # pyright: ignore[reportAssignmentType]
        kind = usual_kind(str(rows.kind[row]), str(rows.algorithm[row]))
        for placement, curve in series[key].items():
            ranks, ranks_per_node = placement
            for usual in CollectiveWeights.usual_keys(fabric, kind, ranks > ranks_per_node, -1):
                candidates[_UsualPlace(usual, placement)].append(_Candidate(rank, curve))

    usual_curves: dict[FabricKey | LinksKey, dict[tuple[float, float], Curve]] = {}
    for place, curves_at_place in candidates.items():
        best_rank = min(candidate.rank for candidate in curves_at_place)
        best = [candidate.curve for candidate in curves_at_place if candidate.rank == best_rank]
        usual_curves.setdefault(place.key, {})[place.placement] = mean_curve(best)
    return usual_curves


class _UsualPlace(NamedTuple):
    """A placement on a fabric or on links."""

    key: FabricKey | LinksKey
    placement: tuple[float, float]
    """Ranks and ranks per node."""


class _Candidate(NamedTuple):
    """A measured curve that may be the usual one."""

    rank: int
    """Rank of its source among the reference sources, the lowest first."""
    curve: Curve


def _measured_on(rows: CollectiveRows) -> dict[SeriesKey, tuple[MeasuredPlace, ...]]:
    """Return the devices and links that every series was measured on, inside nodes first."""
    result: dict[SeriesKey, dict[MeasuredPlace, None]] = {}
    columns = zip(rows.series.tolist(), rows.between.tolist(), rows.kind, rows.fabric, strict=True)
    distinct = dict.fromkeys(columns)
    for code, between_nodes, kind, fabric in sorted(distinct, key=lambda parts: parts[:2]):
        link = fabric.levels[-1].link if between_nodes else fabric.inside.link
        result.setdefault(rows.keys[code], {})[
            MeasuredPlace(str(kind), fabric.device, link, between_nodes)
        ] = None
    return {key: tuple(places) for key, places in result.items()}


def _merged(site: CollectiveWeights, base: CollectiveWeights) -> CollectiveWeights:
    """`base` with the usual curves of its fabrics and kinds replaced where the site measured them.

    Shipped series stay, because they predict their own rows; usual times of links on other devices
    stay as well.
    """
    usual_curves = {
        key: curves for key, curves in site.curves.items() if not isinstance(key, LinksKey)
    }
    measured: set[MeasuredPlace] = set()
    for places in site.measured_on.values():
        measured.update(places)

    # which series lose their say about a place, for the report of the fit
    replaced: dict[str, list[str]] = {}
    for key, places in base.measured_on.items():
        for place in measured & set(places):
            replaced.setdefault(str(place), []).append(str(key))
    series_left = sum(key not in site.curves for key in base.series) + len(base.moe.series)
    links = {*base.most_ranks, *site.most_ranks}
    return replace(
        base,
        curves={**base.curves, **usual_curves},
        measured_on={**base.measured_on, **site.measured_on},
        most_ranks={
            link: max(base.most_ranks.get(link, 0), site.most_ranks.get(link, 0)) for link in links
        },
        notes={**base.notes, "replaced": replaced, "kept": series_left, "own": len(site.series)},
    )


def _most_ranks(rows: CollectiveRows) -> dict[str, int]:
    """Most ranks that were measured on every named link class: beyond twice as many a price counts
    as extrapolated."""
    result: dict[str, int] = {}
    for fabric, ranks, ranks_per_node in set(
        zip(rows.fabric, rows.ranks, rows.ranks_per_node, strict=True)
    ):
        link = fabric.inside.link if ranks <= ranks_per_node else fabric.levels[-1].link
        if not link.startswith("unknown"):
            result[link] = max(result.get(link, 0), int(ranks))
    return result
