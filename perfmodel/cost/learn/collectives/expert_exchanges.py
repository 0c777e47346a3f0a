"""Mixture-of-experts dispatch and combine: token exchanges priced from tokens, hidden size and
routing.

A token goes once to every distinct rank that holds one of its experts: `N (1 - (1 - 1/N)^topk)`
ranks of N with balanced routing (the mean number of non-empty bins; Johnson and Kotz, "Urn Models",
1977, section 3.2).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from perfmodel.catalog.networks import DEVICES_PER_NODE
from perfmodel.cost.learn.collectives._curves import GRID, PER_OCTAVE, Placements, fit_curves
from perfmodel.cost.learn.collectives._physics import larger, smaller
from perfmodel.cost.learn.collectives._requests import Priced
from perfmodel.cost.learn.collectives._weights import ExchangeKey, ExchangePlace, MoeWeights, Scope
from perfmodel.cost.learn.collectives.links import link_class
from perfmodel.cost.learn.intervals import conformal_quantile
from perfmodel.display import shorten_reprs
from perfmodel.ingest import is_marked_suspect
from perfmodel.ingest.tables import groups_of, hashed, number, relabel, text

if TYPE_CHECKING:
    import pandas as pd

MOE_KINDS: Final = ("moe_dispatch", "moe_combine", "moe_prepare", "moe_combine_low_precision")
ALL_MULTIPROCESSORS: Final = 24.0
"""Multiprocessors that a library takes where the table names no number."""
TOKEN_BYTES: Final = 2.0
"""Bytes of one element as sent, before quantisation: a scale that the fitted bandwidth absorbs."""

SMALL_TOKENS: Final = 512
"""Below this an exchange is bound by latency."""
_UNLIKE: Final = (0.1, 0.3, 0.3, 0.05, 0.02, 0.3)
"""Weight of a series for another that differs in one part of its key, by part."""


@dataclass(frozen=True)
class MoeRows:
    """Rows of an exchange table, one array element per row."""

    series: np.ndarray
    """Index into `keys`, int64[n]."""
    keys: tuple[ExchangeKey, ...]
    """Key of every series of the table."""
    tokens: np.ndarray
    """Tokens of one rank."""
    hidden: np.ndarray
    topk: np.ndarray
    experts: np.ndarray
    sms: np.ndarray
    """Multiprocessors given to the exchange."""
    ranks: np.ndarray
    nodes: np.ndarray
    time_s: np.ndarray
    skipped: np.ndarray

    def __len__(self) -> int:
        return len(self.series)

    def take(self, index: np.ndarray) -> "MoeRows":
        """The rows at `index`."""
        columns = {f.name: getattr(self, f.name)[index] for f in fields(self) if f.name != "keys"}
        return replace(self, **columns)

    def by_series(self) -> Iterator[tuple[ExchangeKey, np.ndarray]]:
        """Every series with the indices of its rows."""
        return ((self.keys[code], index) for (code,), index in groups_of(self.series))


def moe_rows(table: "pd.DataFrame") -> MoeRows:
    """Canonical rows of a `moe_alltoall` table; a row that lacks a number says so in `skipped`."""
    nodes = number(table, "num_nodes", 1.0)
    ranks = number(table, "num_ranks")
    ranks = np.where(np.isfinite(ranks), ranks, nodes * DEVICES_PER_NODE)
    # A series is one exchange of one software on one kind of machine: its rows share a curve.
    columns = [
        text(table, name)
        for name in ("software", "device", "interconnect", "collective", "mode", "dtype")
    ]
    place: dict[ExchangeKey, int] = {}
    series = []
    for parts in zip(*columns, strict=True):
        series.append(place.setdefault(ExchangeKey(*parts), len(place)))
    # The first number that a row lacks is its reason; a mark as suspect replaces any other.
    needed = {name: number(table, name) for name in ("tokens", "hidden", "topk", "experts")}
    skipped = np.full(len(table), "", dtype=object)
    for name, values in needed.items():
        skipped[(skipped == "") & ~(np.isfinite(values) & (values > 0))] = f"no {name}"
    skipped[relabel(text(table, "variant"), is_marked_suspect).astype(bool)] = "marked as suspect"
    return MoeRows(
        series=np.array(series, np.int64),
        keys=tuple(place),
        **needed,
        sms=number(table, "sms", ALL_MULTIPROCESSORS),
        ranks=ranks,
        nodes=nodes,
        time_s=number(table, "time_us") * 1e-6,
        skipped=skipped,
    )


def moe_prior(series: ExchangeKey) -> np.ndarray:
    """Natural logarithms of launch [s], bandwidth inside and between nodes and per multiprocessor
    [bytes/s]."""
    intra = link_class(
        series.interconnect, series.device, between_nodes=False
    ).bandwidth_bytes_per_s
    return np.log([25e-6, 0.6 * intra, 45e9, 0.6 * intra / 16])


def moe_curve(vector: np.ndarray, rows: MoeRows) -> np.ndarray:
    """Time [s]: the smooth maximum of the launch time and of the time to move the bytes over links
    and multiprocessors.

    `vector` as `moe_prior`, float64[4] or [4, n].
    """
    launch_s, intra, inter, per_sm = np.exp(vector)

    # distinct ranks, and distinct nodes, that the experts of one token lie on
    copies = rows.ranks * (1 - (1 - 1 / rows.ranks) ** rows.topk)
    nodes_hit = rows.nodes * (1 - (1 - 1 / rows.nodes) ** rows.topk)
    token_bytes = rows.tokens * rows.hidden * TOKEN_BYTES

    # Inside a node the links or the multiprocessors that copy set the pace; between nodes a token
    # goes once to each.
    inside_s = token_bytes * copies / smaller(intra, per_sm * rows.sms, 4.0)
    between_s = token_bytes * np.where(rows.nodes > 1, nodes_hit, 0.0) / inter
    return launch_s + larger(inside_s, between_s, 4.0)


def fit_moe_series(rows: MoeRows) -> dict[ExchangeKey, np.ndarray]:
    """Constants of every series: least squares on log time, with priors from nominal link rates."""
    from scipy.optimize import least_squares

    def fitted(key: ExchangeKey, series_rows: MoeRows) -> np.ndarray:
        prior = moe_prior(key)
        observed = np.log(series_rows.time_s)
        # beyond 200 rows more of them weigh no more against the prior
        weight = np.sqrt(min(1.0, 200 / len(series_rows)))

        def residual(vector: np.ndarray) -> np.ndarray:
            error = np.log(moe_curve(vector, series_rows)) - observed
            return np.concatenate([error / 0.1 * weight, vector - prior])

        return least_squares(residual, prior, max_nfev=100).x

    return {key: fitted(key, rows.take(index)) for key, index in rows.by_series()}


def relative_moe_vector(series: ExchangeKey, known: Mapping[ExchangeKey, np.ndarray]) -> np.ndarray:
    """Constants of a series that was never measured: its closest relatives' constants, scaled by
    nominal bandwidth."""
    prior = moe_prior(series)
    # the prior itself counts a little, so that there is an answer where nothing else is known
    weights = [1e-6]
    moves = [np.zeros_like(prior)]
    for key, vector in known.items():
        likeness = 1.0
        for part, asked_part, factor in zip(key, series, _UNLIKE, strict=True):
            if part != asked_part:
                likeness *= factor
        weights.append(likeness)
        moves.append(vector - moe_prior(key))
    return prior + np.average(moves, axis=0, weights=weights)


_PLACES: Final = (("sms", "hidden", "topk", "experts"), ("sms",), ())
"""What a correction holds for beside series, ranks and nodes, most specific first: the routing's
shape and the multiprocessors given to it, these alone, or neither."""


def moe_places(rows: MoeRows, beside: Sequence[str]) -> list[tuple[ExchangePlace, np.ndarray]]:
    """Group the rows by the places at which corrections are stored."""
    names = ("ranks", "nodes", *beside)
    columns = [getattr(rows, name).astype(np.int64) for name in names]
    places = []
    for (code, *values), index in groups_of(rows.series, *columns):
        place = ExchangePlace(rows.keys[code], **dict(zip(names, values, strict=True)))
        places.append((place, index))
    return places


def fit_moe(rows: MoeRows, base: MoeWeights) -> MoeWeights:
    """Fit constants and curves of exchanges, which replace those of the same series in `base`;
    widths come from held-out shapes and devices."""
    series = fit_moe_series(rows)
    other_series = {key: vector for key, vector in base.series.items() if key not in series}
    other_curves = {
        place: curve for place, curve in base.curves.items() if place.series not in series
    }
    curves = other_curves | _moe_fit_curves(rows, series)
    return MoeWeights({**other_series, **series}, curves, moe_spread(rows, series))


def _moe_fit_curves(
    rows: MoeRows, series: Mapping[ExchangeKey, np.ndarray]
) -> dict[ExchangePlace, Placements]:
    """Curves of what the rows take beyond their series' constants, at every place that a price may
    rest on."""
    # at every depth, as a row whose very routing was not measured falls back to the next
    residual = np.log(rows.time_s / moe_curves(rows, series))
    once = np.ones(len(rows))
    result = {}
    for beside in _PLACES:
        result |= fit_curves(moe_places(rows, beside), once, once, np.log2(rows.tokens), residual)
    return result


def predict_moe(weights: MoeWeights, rows: MoeRows) -> Priced:
    """Price exchanges: the physical curve of each series times its measured correction."""
    # The most specific correction that was measured counts: rows that have one are done.
    correction = np.zeros(len(rows))
    corrected = np.zeros(len(rows), bool)
    is_known = np.array([key in weights.series for key in rows.keys] or [False], bool)[rows.series]
    provenance = np.where(is_known, "learned", "extrapolated").astype(object)
    position = np.clip((np.log2(rows.tokens) - GRID[0]) * PER_OCTAVE, 0, len(GRID) - 1)
    for depth, beside in enumerate(_PLACES):
        for place, index in moe_places(rows, beside):
            curve = weights.curves.get(place, {}).get((1.0, 1.0))
            uncorrected = index[~corrected[index]]
            if curve is None or not len(uncorrected):
                continue
            correction[uncorrected] = np.interp(
                position[uncorrected], np.arange(len(GRID)), curve.everywhere()
            )
            corrected[uncorrected] = True
            # only of the very routing, with as many multiprocessors, a time counts as measured
            if depth == 0:
                provenance[uncorrected] = "measured"

    few_tokens = rows.tokens < SMALL_TOKENS
    half_widths = []
    for source, is_small in zip(provenance, few_tokens.tolist(), strict=True):
        half_widths.append(weights.spread.get(Scope(source, not is_small), 0.5))
    time_s = moe_curves(rows, weights.series) * np.exp(correction)
    return Priced(time_s, np.array(half_widths), provenance, np.zeros(len(rows)))


def moe_errors(
    rows: MoeRows, series: Mapping[ExchangeKey, np.ndarray], folds: int = 5
) -> dict[str, np.ndarray]:
    """log(predicted / measured) by provenance: tokens of a shape left out, whole shapes left out,
    devices left out."""
    # hashing spreads rows over folds the same way every time
    name = np.array([str(key) for key in rows.keys], object)[rows.series]
    columns = [name, rows.ranks, rows.nodes, rows.hidden, rows.topk, rows.experts]
    result = {}
    for basis, together in (("measured", [*columns, rows.tokens]), ("learned", columns)):
        fold = hashed(together) % folds
        error = np.full(len(rows), np.nan)
        for k in range(folds):
            train = rows.take(fold != k)
            test = np.flatnonzero(fold == k)
            if len(train) and len(test):
                without = MoeWeights(series, _moe_fit_curves(train, series))
                error[test] = np.log(
                    predict_moe(without, rows.take(test)).time_s / rows.time_s[test]
                )
        result[basis] = error

    # devices left out in turn: priced by the constants of all series on other ones
    device = np.array([key.device for key in rows.keys], object)[rows.series]
    error = np.full(len(rows), np.nan)
    for (name,), rows_of_device in groups_of(device):
        elsewhere = {key: vector for key, vector in series.items() if key.device != name}
        if elsewhere:
            error[rows_of_device] = np.log(
                moe_curves(rows.take(rows_of_device), elsewhere) / rows.time_s[rows_of_device]
            )
    return result | {"extrapolated": error}


def moe_left_out(
    rows: MoeRows, series: Mapping[ExchangeKey, np.ndarray]
) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Errors of held-out rows, by kind of group held out, with half-widths fitted to the other half
    of the rows."""
    titles = {"measured": "shapes", "learned": "routings", "extrapolated": "devices"}
    half = hashed([rows.tokens]) % 2
    result = {}
    for basis, error in moe_errors(rows, series).items():
        # The widths of each half come from the errors of the other half.
        width = np.full(len(rows), np.nan)
        for k in (0, 1):
            known = _by_size(rows, np.where(half == k, np.nan, error), basis)
            for few_tokens in (True, False):
                part = (half == k) & ((rows.tokens < SMALL_TOKENS) == few_tokens)
                width[part] = known.get(Scope(basis, not few_tokens), np.nan)
        result[titles[basis]] = error, width
    return result


def moe_spread(rows: MoeRows, series: Mapping[ExchangeKey, np.ndarray]) -> dict[Scope, float]:
    """Half-widths by provenance and size."""
    result: dict[Scope, float] = {}
    for basis, error in moe_errors(rows, series).items():
        result |= _by_size(rows, error, basis)
    return result


def _by_size(rows: MoeRows, error: np.ndarray, basis: str) -> dict[Scope, float]:
    """Half-widths that cover the errors of small and of large exchanges."""
    sizes = ((False, rows.tokens < SMALL_TOKENS), (True, rows.tokens >= SMALL_TOKENS))
    known = {Scope(basis, is_large): error[part & np.isfinite(error)] for is_large, part in sizes}
    return {
        scope: round(conformal_quantile(errors), 4)
        for scope, errors in known.items()
        if len(errors)
    }


def moe_curves(rows: MoeRows, known: Mapping[ExchangeKey, np.ndarray]) -> np.ndarray:
    """The physical curve [s] of every row: by its own series' constants, or by its relatives'."""
    curve_s = np.zeros(len(rows))
    for name, index in rows.by_series():
        vector = known[name] if name in known else relative_moe_vector(name, known)
        curve_s[index] = moe_curve(vector, rows.take(index))
    return curve_s


shorten_reprs(__name__)
