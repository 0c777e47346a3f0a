"""Mixture-of-experts dispatch and combine: token exchanges priced from tokens, hidden size and routing.

A token goes once to every distinct rank that holds one of its experts: `N (1 - (1 - 1/N)^topk)` ranks of N
with balanced routing (the mean number of non-empty bins; Johnson and Kotz, "Urn Models", 1977, section 3.2).
"""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.learn._collective_alpha_beta import larger, smaller
from perfmodel.learn._collective_links import link_class
from perfmodel.learn._collective_table import numbers
from perfmodel.learn._kriging import Component, Points

KINDS: Final = ("moe_dispatch", "moe_combine", "moe_prepare", "moe_combine_low_precision")
GPUS_PER_NODE: Final = 8
ALL_MULTIPROCESSORS: Final = 24.0
"""What a library takes where the table names no number."""
TOKEN_BYTES: Final = 2.0
"""Of one element as sent, before quantisation: a scale that the fitted bandwidth absorbs."""

COMPONENTS: Final = (
    Component(("series",), ("tokens", "hidden", "topk", "experts", "sms", "ranks")),
    Component(("series", "placement"), ("tokens", "sms")),
    Component(("series", "placement", "sms"), ("tokens", "hidden", "topk"), rough=True),
    Component(("series", "placement", "shape"), ("tokens", "sms")),
    Component(("way", "placement"), ("tokens", "hidden", "topk", "sms")),
)
COORDINATES: Final = ("tokens", "hidden", "topk", "experts", "sms", "ranks")
CATEGORIES: Final = ("series", "way", "placement", "sms", "shape")


@dataclass(frozen=True)
class MoeRows:
    """Rows of an exchange table, one array element per row."""

    series: np.ndarray
    """Software, device, interconnect, kind, mode, dtype joined by `|`."""
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
        return MoeRows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def part(self, index: int) -> np.ndarray:
        """Field `index` of every series name: 0 software, 1 device, 2 interconnect, 3 kind, 4 mode, 5 dtype."""
        names, inverse = np.unique(self.series.astype(str), return_inverse=True)
        return np.array([name.split("|")[index] for name in names], dtype=object)[inverse]


def moe_rows(table: pd.DataFrame) -> MoeRows:
    """Canonical rows of a `moe_alltoall` table; a row that lacks a number says so in `skipped`."""

    def text(name: str) -> pd.Series:
        column = table[name] if name in table else pd.Series("", index=table.index)
        return pd.Series([str(v) if v == v else "" for v in column], index=table.index, dtype=object)

    nodes = numbers(table, "num_nodes", 1.0)
    ranks = numbers(table, "num_ranks")
    ranks = np.where(np.isfinite(ranks), ranks, nodes * GPUS_PER_NODE)
    series = text("software") + "|" + text("device") + "|" + text("interconnect") + "|"
    series = series + text("collective") + "|" + text("mode") + "|" + text("dtype")
    needed = {name: numbers(table, name) for name in ("tokens", "hidden", "topk", "experts")}
    skipped = np.full(len(table), "", dtype=object)
    for name, values in needed.items():
        skipped[(skipped == "") & ~(np.isfinite(values) & (values > 0))] = f"no {name}"
    return MoeRows(
        series=series.to_numpy(dtype=object),
        **needed,
        sms=numbers(table, "sms", ALL_MULTIPROCESSORS),
        ranks=ranks,
        nodes=nodes,
        time_s=numbers(table, "time_us") * 1e-6,
        skipped=skipped,
    )


def moe_prior(series: str) -> np.ndarray:
    """Natural logarithms of launch [s], bandwidth inside and between nodes and per multiprocessor [bytes/s]."""
    _, device, interconnect, *_ = series.split("|")
    intra = link_class(interconnect, device, False).bandwidth_bytes_per_s
    return np.log([25e-6, 0.6 * intra, 45e9, 0.6 * intra / 16])


def moe_curve(vector: np.ndarray, rows: MoeRows) -> np.ndarray:
    """Time [s]: launch, or the bytes over what links and multiprocessors move, smoothly whichever is larger.

    `vector` as `moe_prior`, float64[4] or [4, n].
    """
    launch_s, intra, inter, per_sm = np.exp(vector)
    copies = rows.ranks * (1 - (1 - 1 / rows.ranks) ** rows.topk)
    nodes_hit = rows.nodes * (1 - (1 - 1 / rows.nodes) ** rows.topk)
    token_bytes = rows.tokens * rows.hidden * TOKEN_BYTES
    inside_s = token_bytes * copies / smaller(intra, per_sm * rows.sms, 4.0)
    between_s = token_bytes * np.where(rows.nodes > 1, nodes_hit, 0.0) / inter
    return launch_s + larger(inside_s, between_s, 4.0)


def fit_moe_series(rows: MoeRows) -> dict[str, np.ndarray]:
    """Constants of every series: least squares on log time, with priors from nominal link rates."""
    from scipy.optimize import least_squares

    result = {}
    for name in np.unique(rows.series.astype(str)):
        own = rows.take(rows.series == name)
        prior, observed = moe_prior(name), np.log(own.time_s)

        def residual(
            vector: np.ndarray, own: MoeRows = own, prior: np.ndarray = prior, observed: np.ndarray = observed
        ) -> np.ndarray:
            error = np.log(moe_curve(vector, own)) - observed
            return np.concatenate([error / 0.1 * np.sqrt(min(1.0, 200 / len(own))), vector - prior])

        result[name] = least_squares(residual, prior, max_nfev=100).x
    return result


def relative_moe_vector(series: str, known: Mapping[str, np.ndarray]) -> np.ndarray:
    """Constants of a series never measured: its closest relatives', moved by nominal bandwidth."""
    own, wanted = moe_prior(series), series.split("|")
    weights, moves = [1e-6], [np.zeros_like(own)]
    for name, vector in known.items():
        has = name.split("|")
        weight = 1.0
        for index, factor in ((0, 0.1), (1, 0.3), (2, 0.3), (3, 0.05), (4, 0.02), (5, 0.3)):
            weight *= 1.0 if has[index] == wanted[index] else factor
        weights.append(weight)
        moves.append(vector - moe_prior(name))
    return own + np.average(moves, axis=0, weights=weights)


def moe_points(rows: MoeRows, curve_s: np.ndarray) -> Points:
    """Kriging points of rows whose physical curve is `curve_s` [s]."""
    placement = rows.ranks.astype(str).astype(object) + "|" + rows.nodes.astype(str).astype(object)
    shape = rows.hidden.astype(str).astype(object) + "|" + rows.topk.astype(str).astype(object)
    shape = shape + "|" + rows.experts.astype(str).astype(object)
    way = rows.part(0) + "|" + rows.part(3) + "|" + rows.part(4) + "|" + rows.part(5)
    coordinates = {
        name: np.log2(getattr(rows, name)) for name in ("tokens", "hidden", "topk", "experts", "sms", "ranks")
    }
    return Points(
        categories={
            "series": rows.series,
            "way": way,
            "placement": placement,
            "sms": rows.sms.astype(str).astype(object),
            "shape": shape,
        },
        coordinates=coordinates,
        unrest=np.minimum(1.0, (8e-6 / curve_s) ** 2),
    )


def moe_blocks(rows: MoeRows) -> np.ndarray:
    """Rows of one whole shape (tokens, hidden, routing, ranks) of one series' device and mode; int[n]."""
    frame = pd.DataFrame(
        {f.name: getattr(rows, f.name) for f in fields(rows) if f.name not in ("time_s", "skipped", "sms")}
    )
    return frame.groupby(list(frame.columns), sort=False).ngroup().to_numpy()


def moe_families(rows: MoeRows, most: int) -> list[tuple[str, np.ndarray]]:
    """Families for exact kriging: by mode and kind, then by device where that has more than `most` rows."""
    way = rows.part(3) + "|" + rows.part(4)
    result = []
    for name in np.unique(way.astype(str)):
        index = np.flatnonzero(way == name)
        if len(index) <= most:
            result.append((name, index))
            continue
        device = rows.part(1)
        result += [(f"{name}|{d}", index[device[index] == d]) for d in np.unique(device[index].astype(str))]
    return result


def moe_family_names(rows: MoeRows) -> tuple[np.ndarray, np.ndarray]:
    """Names under which a row's family may be stored, coarse to fine."""
    way = rows.part(3) + "|" + rows.part(4)
    return way, way + "|" + rows.part(1)


def moe_curves(rows: MoeRows, known: Mapping[str, np.ndarray]) -> np.ndarray:
    """The physical curve [s] of every row: by its own series' constants, or by its relatives'."""
    curve_s = np.zeros(len(rows))
    for name in np.unique(rows.series.astype(str)):
        index = np.flatnonzero(rows.series == name)
        vector = known[name] if name in known else relative_moe_vector(name, known)
        curve_s[index] = moe_curve(vector, rows.take(index))
    return curve_s
