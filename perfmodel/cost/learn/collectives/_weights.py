"""The fitted collective model (physics effects, measured curves, interval widths) and its
safetensors file."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np

from perfmodel.cost.learn._weights import WeightFiles, parse_weights, sealed_weights, weight_files
from perfmodel.cost.learn.collectives._fabrics import Effect, Fabric, names_of_parts
from perfmodel.cost.learn.collectives._physics import DIRECT
from perfmodel.cost.learn.collectives._rows import SeriesKey
from perfmodel.errors import CalibrationError
from perfmodel.files import parse_json, require_intact
from perfmodel.ingest.tables import write_bytes

# --- curves of corrections
# -----------------------------------------------------------------------------
#
# Correction curves over message sizes at each measured placement (ranks, ranks per node): fit,
# mean, interpolation, storage.


Key = TypeVar("Key")
PER_OCTAVE: Final = 4
"""Points of the grid in each doubling of the size."""
LOWEST: Final = 4
"""log2 of the smallest size of the grid: 16 bytes."""
HIGHEST: Final = 38
"""log2 of the largest size of the grid: 256 GiB."""
GRID: Final = np.arange(LOWEST * PER_OCTAVE, HIGHEST * PER_OCTAVE + 1) / PER_OCTAVE
"""log2 bytes (or tokens) at which every curve is known, float64[g]."""
LARGE: Final = 20
"""log2 of the bytes from which a message counts as large: 1 MiB."""
_TRANSFER_SHARE: Final = 1 / (1 + np.exp2(LARGE - GRID))
"""Usual share of the transfer in the time of a message, half at the size from which it counts as
large: it takes 10 us at 100 GB/s, the latency of a collective on eight ranks. float64[g]."""


@dataclass(frozen=True)
class Curve:
    """The correction at one placement: log(measured / physical time), piecewise linear over
    sizes."""

    ranks: float
    ranks_per_node: float
    start: int
    """Index into `GRID` of the first value."""
    value: np.ndarray
    """Log correction at successive points of `GRID`, float32[m]."""

    def everywhere(self) -> np.ndarray:
        """The curve on the whole grid, float64[g].

        It is constant beyond the largest measured size, and below the smallest if latency was
        measured there. A correction that was measured on transfers alone says nothing of latency,
        so below the smallest size it falls with their share of the time.
        """
        index = np.clip(np.arange(len(GRID)) - self.start, 0, len(self.value) - 1)
        share_lost = np.maximum(_TRANSFER_SHARE[self.start] - _TRANSFER_SHARE, 0.0)
        return self.value[index] * (1.0 - share_lost)

    @property
    def low(self) -> float:
        """log2 of the smallest size measured (to a quarter of an octave)."""
        return float(GRID[self.start])

    @property
    def high(self) -> float:
        return float(GRID[self.start + len(self.value) - 1])


Placements = Mapping[tuple[float, float], Curve]
"""Curves by ranks and ranks per node."""

CovarianceTerms = list[tuple[float, dict[float, Curve]]]
"""Weights and measured curves by count."""


def _fit_curve(
    ranks: float, ranks_per_node: float, size: np.ndarray, residual: np.ndarray
) -> Curve:
    """Medians of quarter octaves, joined; `size` is log2 bytes, `residual` log(measured /
    physical), float64[n]."""
    order = np.argsort(size, kind="stable")
    x, y = np.clip(size[order], LOWEST, HIGHEST), residual[order]

    # Take a median per quarter of an octave, because repeats scatter and some runs are slow. Each
    # median stands at the mean of its sizes; the grid is interpolated between these points.
    cell = np.round(x * PER_OCTAVE).astype(int)
    first_of_cell = np.flatnonzero(np.diff(cell, prepend=cell[0] - 1))
    middle = np.array([part.mean() for part in np.split(x, first_of_cell[1:])])
    median = np.array([np.median(part) for part in np.split(y, first_of_cell[1:])])
    start, end = cell[0] - LOWEST * PER_OCTAVE, cell[-1] - LOWEST * PER_OCTAVE
    value = np.interp(GRID[start : end + 1], middle, median).astype(np.float32)
    return Curve(ranks, ranks_per_node, int(start), value)


def fit_curves(
    groups: Iterable[tuple[Key, np.ndarray]],
    ranks: np.ndarray,
    ranks_per_node: np.ndarray,
    size: np.ndarray,
    residual: np.ndarray,
) -> dict[Key, dict[tuple[float, float], Curve]]:
    """One curve per key and placement; `groups`: keys with the indices of their rows."""
    result: dict[Key, dict[tuple[float, float], Curve]] = {}
    for key, index in groups:
        places = set(zip(ranks[index].tolist(), ranks_per_node[index].tolist(), strict=True))
        for place in sorted(places):
            at_place = index[(ranks[index] == place[0]) & (ranks_per_node[index] == place[1])]
            result.setdefault(key, {})[place] = _fit_curve(
                *place, size[at_place], residual[at_place]
            )
    return result


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """The mean of curves of one placement, at sizes where at least one was measured."""
    if len(curves) == 1:
        return curves[0]
    start = min(c.start for c in curves)
    end = max(c.start + len(c.value) for c in curves)
    value = np.mean([c.everywhere()[start:end] for c in curves], axis=0)
    return replace(curves[0], start=start, value=value.astype(np.float32))


def correction(parts: CovarianceTerms, count: np.ndarray) -> np.ndarray:
    """Log correction at rank or node counts on `GRID`, float64[c, g]."""
    total = np.zeros((len(count), len(GRID)))
    for share, curves in parts:
        if not curves:
            continue
        known = sorted(curves)
        values = np.array([curves[known_count].everywhere() for known_count in known])

        # Between the two nearest measured counts, linear in the counts' logarithm; beyond the
        # outermost as at these.
        place = np.interp(np.log2(count), np.log2(known), np.arange(len(known)))
        low = np.minimum(place.astype(int), max(len(known) - 2, 0))
        high = np.minimum(low + 1, len(known) - 1)
        weight = (place - low)[:, None]
        total += share * (values[low] * (1 - weight) + values[high] * weight)
    return total


def between_of(
    placements: Placements, ranks_per_node: float
) -> list[tuple[float, dict[float, Curve]]]:
    """Curves over several nodes by number of nodes, with their weights: those of the requested
    ranks per node or, if these were not measured, of the nearest ones, weighed by nearness in the
    logarithm."""
    between_nodes = {place: curve for place, curve in placements.items() if place[0] > place[1]}
    known = sorted({per_node for _, per_node in between_nodes})
    low = max((per_node for per_node in known if per_node <= ranks_per_node), default=None)
    high = min((per_node for per_node in known if per_node >= ranks_per_node), default=None)

    # At the ends of what was measured one neighbour stands for all; between two both do.
    if low is None or high is None or low == high:
        shares = [(1.0, per_node) for per_node in {low, high} - {None}]
    else:
        weight = float(np.log2(ranks_per_node / low) / np.log2(high / low))
        shares = [(1 - weight, low), (weight, high)]

    parts = []
    for share, known_per_node in shares:
        by_nodes = {
            n / per_node: curve
            for (n, per_node), curve in between_nodes.items()
            if per_node == known_per_node
        }
        parts.append((share, by_nodes))
    return parts


def stacked(curves: Mapping[Any, Placements]) -> dict[str, np.ndarray]:
    """Stack all curves into arrays for a file.

    `name` is the number of every curve's key, and `value` all values, one curve's behind the
    other's.
    """
    key_numbers: list[int] = []
    flat: list[Curve] = []
    for number, placements in enumerate(curves.values()):
        for curve in placements.values():
            key_numbers.append(number)
            flat.append(curve)
    values = [curve.value for curve in flat]
    return {
        "name": np.array(key_numbers, np.int32),
        "place": np.array(
            [(curve.ranks, curve.ranks_per_node) for curve in flat], np.float64
        ).reshape(-1, 2),
        "start": np.array([curve.start for curve in flat], np.int32),
        "length": np.array([len(value) for value in values], np.int32),
        "value": np.concatenate(values) if values else np.zeros(0, np.float32),
    }


def unstacked(
    keys: list[Any], arrays: Mapping[str, np.ndarray], prefix: str
) -> dict[Any, Placements]:
    """Inverse of `stacked`, for arrays with this name prefix."""
    key_numbers, places, starts, lengths, flat_values = (
        arrays[prefix + name] for name in ("name", "place", "start", "length", "value")
    )
    values = np.split(flat_values, np.cumsum(lengths)[:-1])
    result: dict[Any, dict[tuple[float, float], Curve]] = {}
    # not strict: splitting an empty array gives one part where there is no curve
    columns = zip(key_numbers.tolist(), places.tolist(), starts.tolist(), values, strict=False)
    for number, (ranks, per_node), start, value in columns:
        result.setdefault(keys[number], {})[ranks, per_node] = Curve(ranks, per_node, start, value)
    return dict(result)


# --- weights
# -------------------------------------------------------------------------------------------


SCHEMA: Final = "perfmodel-collectives/4"
FILE_NAME: Final = "collectives.safetensors"
HALF_WIDTH: Final = {"measured": 0.12, "learned": 0.3, "analytical": 0.6, "extrapolated": 0.8}
"""Half-width of the 90 % interval in log time where a table was too small to leave anything out."""


class EntryKey(NamedTuple):
    """Key of a series with one software and element type."""

    series: SeriesKey
    software: str
    dtype: str


class FabricKey(NamedTuple):
    """The usual price of a kind of collective on a fabric of one device, or of all parts of a
    die."""

    device: str
    links: str
    kind: str


class LinksKey(NamedTuple):
    """The usual price of a kind of collective on links inside a node, whatever the device."""

    links: str
    kind: str


class ExchangeKey(NamedTuple):
    """A measured series of mixture-of-experts exchanges."""

    software: str
    device: str
    interconnect: str
    kind: str
    mode: str
    dtype: str

    def __str__(self) -> str:
        return "|".join(self)


class ExchangePlace(NamedTuple):
    """Key under which a correction of exchanges is filed; None where it holds for all."""

    series: ExchangeKey
    ranks: int
    nodes: int
    sms: int | None = None
    hidden: int | None = None
    topk: int | None = None
    experts: int | None = None


CurveKey = SeriesKey | EntryKey | FabricKey | LinksKey
_CURVE_KEYS: Final = (SeriesKey, EntryKey, FabricKey, LinksKey)


class MeasuredPlace(NamedTuple):
    """The place of a measured series: kind, device, links."""

    kind: str
    device: str
    link: str
    between: bool

    def __str__(self) -> str:
        place = "between nodes" if self.between else "inside a node"
        return f"{self.kind} on {self.device}, {self.link} {place}"


class Scope(NamedTuple):
    """Which errors the half-width of an interval was measured on."""

    what: str
    """`measured`, `usual` (of a fabric), `links` (of other devices), or a provenance."""
    large: bool
    """Messages of 1 MiB and more (exchanges: of many tokens)."""
    tier: str = ""
    """`inside` a node or `between` nodes; empty for both."""
    kind: str = ""
    """Kind of collective; empty for all."""
    series: SeriesKey | None = None


@dataclass(frozen=True)
class MoeWeights:
    """Mixture-of-experts exchanges."""

    series: Mapping[ExchangeKey, Any] = field(default_factory=dict)
    """Constants as `moe_curve` takes them, float64[4]."""
    curves: Mapping[ExchangePlace, Placements] = field(default_factory=dict)
    """Corrections over log2 tokens."""
    spread: Mapping[Scope, float] = field(default_factory=dict)
    """Half-widths of intervals."""


def usual_kind(kind: str, algorithm: str) -> str:
    """Name under which the usual price of a kind is filed: direct reductions have their own."""
    return f"{kind} {algorithm}" if algorithm == DIRECT else kind


@dataclass(frozen=True)
class CollectiveWeights:
    """A fitted model of collectives."""

    physics: Mapping[Effect, float]
    """Effects that measurements moved."""
    curves: Mapping[CurveKey, Placements] = field(default_factory=dict)
    """Measured corrections of series, of their software and element types, of fabrics and of
    links."""
    measured_on: Mapping[SeriesKey, tuple[MeasuredPlace, ...]] = field(default_factory=dict)
    spread: Mapping[Scope, float] = field(default_factory=dict)
    """Half-widths of 90 % intervals in log time, from rows left out."""
    most_ranks: Mapping[str, int] = field(default_factory=dict)
    """Most ranks measured on each link class."""
    sharing: Mapping[FabricKey, float] = field(default_factory=dict)
    """Measured exponents c of groups that share the links between nodes: beyond its latency, each
    of n groups at once takes n^c times as long as one alone. A key without a kind stands for all
    kinds that were not measured."""
    moe: MoeWeights = field(default_factory=MoeWeights)
    notes: Mapping[str, Any] = field(default_factory=dict)
    """JSON values: numbers of rows, and rows that were replaced or set aside."""

    @property
    def series(self) -> tuple[SeriesKey, ...]:
        """The measured series."""
        return tuple(key for key in self.curves if isinstance(key, SeriesKey))

    @staticmethod
    def usual_keys(
        fabric: Fabric, kind: str, between: bool, level: int
    ) -> tuple[FabricKey | LinksKey, ...]:
        """Keys that a fabric's usual curves may be filed under, most specific first."""
        links = fabric.key(between, level)
        device_key = FabricKey(fabric.device, links, kind)
        # between nodes a price follows from devices, too; links that nobody knows are not those of
        # other devices
        if between or fabric.inside.link.startswith("unknown"):
            return (device_key,)
        return device_key, LinksKey(links, kind)

    @classmethod
    def priced_by(
        cls, fabric: Fabric, kind: str, between: bool, level: int
    ) -> tuple[FabricKey | LinksKey, ...]:
        """Keys for pricing, in order: the device, similar parts of its die, its links."""
        device_key, *link_keys = cls.usual_keys(fabric, kind, between, level)
        of_parts = (device_key._replace(device=name) for name in names_of_parts(fabric.device))
        return tuple(dict.fromkeys((device_key, *of_parts, *link_keys)))

    def sharing_exponent(self, fabric: Fabric, kind: str, level: int) -> float | None:
        """The measured exponent of groups that share a fabric's links between nodes (`sharing`);
        None if unmeasured."""
        key = FabricKey(fabric.device, fabric.key(True, level), kind)
        return self.sharing.get(key, self.sharing.get(key._replace(kind="")))

    def by_die(self) -> "CollectiveWeights":
        """Copy the usual curves of devices to the names of similar parts (`names_of_parts`).

        Parts share the mean of the curves that were measured on any of them with such links. A
        site's own fit to its device (`_merged`) takes precedence.
        """
        by_placement: dict[FabricKey, dict[tuple[float, float], list[Curve]]] = {}
        # Sorted, because the last digits of a mean depend on the order of its terms.
        for key, places in _sorted(self.curves).items():
            if isinstance(key, FabricKey):
                for name in names_of_parts(key.device):
                    of_parts = by_placement.setdefault(key._replace(device=name), {})
                    for place, curve in places.items():
                        of_parts.setdefault(place, []).append(curve)
        shared: dict[CurveKey, Placements] = {}
        for key, curves_by_place in by_placement.items():
            shared[key] = {place: mean_curve(curves) for place, curves in curves_by_place.items()}
        other_curves = {
            key: places for key, places in self.curves.items() if not isinstance(key, FabricKey)
        }
        return replace(self, curves={**other_curves, **shared})

    def half_width(
        self, provenance: str, kind: str, tier: str, large: bool, source: CurveKey | None
    ) -> float:
        """Half-width of the interval in log time; `source`: key of the curves that a price stands
        on."""
        # The curves behind a price determine its interval better than its provenance does.
        basis = provenance
        if isinstance(source, LinksKey):
            basis = "links"
        elif isinstance(source, FabricKey) and provenance == "measured":
            basis = "usual"

        # From special to general: of the series, of the kind, of all kinds. No measurement was left
        # out beyond the measured range, so extrapolated times have the widths of analytical ones.
        scopes = []
        if basis == "measured" and isinstance(source, SeriesKey):
            scopes.append(Scope(basis, large, series=source))
        for known in (basis, "analytical") if basis == "extrapolated" else (basis,):
            scopes += [Scope(known, large, tier, kind), Scope(known, large, tier)]
        for scope in scopes:
            if scope in self.spread:
                return self.spread[scope]
        return HALF_WIDTH[provenance]


def save_collective_weights(weights: CollectiveWeights, path: Path) -> None:
    """Write `path` atomically."""
    # everything sorted, so that the same weights are the same bytes
    moe = weights.moe
    curves, exchanges = _sorted(weights.curves), _sorted(moe.curves)
    arrays = {f"curves/{name}": array for name, array in stacked(curves).items()}
    arrays |= {f"moe/{name}": array for name, array in stacked(exchanges).items()}
    constants = _sorted(moe.series)
    arrays["moe/vector"] = np.array(list(constants.values()), np.float64).reshape(-1, 4)
    meta = {
        "schema": SCHEMA,
        "physics": list(_sorted(weights.physics).items()),
        "curves": [(_CURVE_KEYS.index(type(key)), key) for key in curves],
        "measured_on": list(_sorted(weights.measured_on).items()),
        "spread": list(_sorted(weights.spread).items()),
        "most_ranks": dict(weights.most_ranks),
        "sharing": list(_sorted(weights.sharing).items()),
        "moe_series": list(constants),
        "moe_curves": list(exchanges),
        "moe_spread": list(_sorted(moe.spread).items()),
        "notes": dict(weights.notes),
    }
    # the format copies memory as it lies
    contiguous = {name: np.ascontiguousarray(value) for name, value in arrays.items()}
    write_bytes(path, sealed_weights(contiguous, {"perfmodel": json.dumps(meta, sort_keys=True)}))


def collective_weights(weights: WeightFiles) -> CollectiveWeights:
    """The collectives of a calibration; the shipped ones where it has none.

    Raises:
        CalibrationError: if the file is truncated, incomplete, or of another schema version.
    """
    from safetensors import SafetensorError

    # who fitted kernels alone is served by the shipped collectives
    if FILE_NAME not in weights.names:
        return collective_weights(weight_files(None))
    path = weights.folder / FILE_NAME
    try:
        content = weights.read(FILE_NAME)
        metadata, arrays = parse_weights(content)
        meta = parse_json(metadata.get("perfmodel", "{}"))
    except (SafetensorError, ValueError) as error:
        raise CalibrationError(
            f"{path}: truncated or not a weights file ({error}); fit it again"
        ) from None
    if meta.get("schema") != SCHEMA:
        raise CalibrationError(
            f"{path}: the file has schema {meta.get('schema')!r}, but this version reads {SCHEMA!r}; fit it again"
        )
    require_intact(content, path)
    try:
        return _weights(meta, arrays)
    except (KeyError, IndexError, ValueError, TypeError) as error:
        raise CalibrationError(
            f"{path}: incomplete weights file ({error!r}); fit it again"
        ) from None


def _weights(meta: Mapping[str, Any], arrays: Mapping[str, np.ndarray]) -> CollectiveWeights:
    """Weights of a file; where no site's fit stands in it, by die."""
    # JSON knows no tuples: every key is built again from the list that it was written as
    exchanges = [ExchangeKey(*key) for key in meta["moe_series"]]
    places = [ExchangePlace(ExchangeKey(*series), *rest) for series, *rest in meta["moe_curves"]]
    measured_on = {}
    for key, measured_places in meta["measured_on"]:
        measured_on[SeriesKey(*key)] = tuple(MeasuredPlace(*place) for place in measured_places)
    weights = CollectiveWeights(
        physics={Effect(*key): value for key, value in meta["physics"]},
        curves=unstacked(
            [_curve_key(kind, parts) for kind, parts in meta["curves"]], arrays, "curves/"
        ),
        measured_on=measured_on,
        spread=_widths(meta["spread"]),
        most_ranks=meta["most_ranks"],
        # Files of earlier releases have none.
        sharing={FabricKey(*key): exponent for key, exponent in meta.get("sharing", [])},
        moe=MoeWeights(
            series=dict(zip(exchanges, arrays["moe/vector"], strict=True)),
            curves=unstacked(places, arrays, "moe/"),
            spread=_widths(meta["moe_spread"]),
        ),
        notes=meta["notes"],
    )
    fitted_by_site = weights.notes.get("own")
    return weights if fitted_by_site else weights.by_die()


def _curve_key(kind: int, parts: list[Any]) -> CurveKey:
    if _CURVE_KEYS[kind] is EntryKey:
        series, software, dtype = parts
        return EntryKey(SeriesKey(*series), software, dtype)
    return _CURVE_KEYS[kind](*parts)  # pyright: ignore[reportCallIssue]


def _widths(pairs: list[Any]) -> dict[Scope, float]:
    return {
        Scope(what, large, tier, kind, SeriesKey(*series) if series else None): width
        for (what, large, tier, kind, series), width in pairs
    }


def _sorted(by_key: Mapping[Any, Any]) -> dict[Any, Any]:
    """Sort in an order that does not depend on how the keys were made: by the name of the key's
    type, then its parts as text."""
    return dict(sorted(by_key.items(), key=lambda item: (type(item[0]).__name__, repr(item[0]))))
