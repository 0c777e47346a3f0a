"""The fitted collective model (physics effects, measured curves, interval widths) and its
safetensors file."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.cost.learn._weights import WeightFiles, parse_weights, sealed_weights, weight_files
from perfmodel.cost.learn.collectives._curves import (
    Curve,
    Placements,
    mean_curve,
    stacked,
    unstacked,
)
from perfmodel.cost.learn.collectives._fabrics import Fabric, names_of_parts
from perfmodel.cost.learn.collectives._link_constants import Effect
from perfmodel.cost.learn.collectives._physics import DIRECT
from perfmodel.cost.learn.collectives._rows import SeriesKey
from perfmodel.errors import CalibrationError
from perfmodel.files import parse_json, require_intact
from perfmodel.ingest.tables import write_bytes

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
        keys_of_parts = (device_key._replace(device=name) for name in names_of_parts(fabric.device))
        return tuple(dict.fromkeys((device_key, *keys_of_parts, *link_keys)))

    def sharing_exponent(self, fabric: Fabric, kind: str, level: int) -> float | None:
        """The measured exponent of groups that share a fabric's links between nodes (`sharing`);
        None if unmeasured."""
        key = FabricKey(fabric.device, fabric.key(between=True, level=level), kind)
        return self.sharing.get(key, self.sharing.get(key._replace(kind="")))

    def by_die(self) -> "CollectiveWeights":
        """Copy the usual curves of devices to the names of similar parts (`names_of_parts`).

        Parts share the mean of the curves that were measured on any of them with such links. A
        site's own fit to its device (`_merged`) takes precedence.
        """
        by_placement: dict[FabricKey, dict[tuple[float, float], list[Curve]]] = {}
        # Sorted, because the last digits of a mean depend on the order of its terms.
        for key, places in _sorted(self.curves).items():
            if not isinstance(key, FabricKey):
                continue
            for name in names_of_parts(key.device):
                curves_at_places = by_placement.setdefault(key._replace(device=name), {})
                for place, curve in places.items():
                    curves_at_places.setdefault(place, []).append(curve)
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
    curves = _sorted(weights.curves)
    exchanges = _sorted(moe.curves)
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
