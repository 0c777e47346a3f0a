"""Plausible limits of cluster and device figures, and the unit that an implausible figure probably
has.

Data sheets give 450e9 bytes/s and 2e-6 s, but files here take GB/s and microseconds. Without
limits, such figures would silently make communication free or endless.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from perfmodel.display import shorten_reprs
from perfmodel.errors import PerfModelError
from perfmodel.units import GIB, MIB, parse_quantity


@dataclass(frozen=True)
class Plausible:
    """Plausible limits of one figure, in the unit of its key."""

    least: float
    most: float
    unit: str = ""
    mistaken: Mapping[str, float] = field(default_factory=dict)
    """Units that the user may have meant, and their size in the unit of the key."""
    kind: str = ""
    """Kind of quantity (`perfmodel.units.QUANTITY_KINDS`) if the figure may be text with a unit;
    empty if it must be a number."""
    inside: float = 1.0
    """The unit of the key in the unit of the kind."""

    def holds(self, value: float) -> bool:
        """Whether a value is within the limits, up to rounding."""
        return self.least * (1 - 1e-9) <= value <= self.most * (1 + 1e-9)


_BANDWIDTHS: Final = {"bytes/s": 1e-9, "KB/s": 1e-6, "MB/s": 1e-3, "TB/s": 1e3}
_TIMES: Final = {"s": 1e6, "ms": 1e3, "ns": 1e-3}
_BITS: Final = {"bit/s": 1e-9, "Mbit/s": 1e-3, "Tbit/s": 1e3}
_POWERS: Final = {"mW": 1e-3, "kW": 1e3, "MW": 1e6}


def _gb_per_s(low: float, high: float) -> Plausible:
    return Plausible(low, high, "GB/s", _BANDWIDTHS, "bandwidth", 1e9)


PLAUSIBLE: Final[Mapping[str, Plausible]] = {
    # Clusters and their networks.
    "bandwidth_gb_per_s": _gb_per_s(1e-3, 1e5),
    "latency_us": Plausible(1e-2, 1e5, "us", _TIMES, "time", 1e-6),
    "rank_latency_us": Plausible(1e-4, 1e4, "us", _TIMES, "time", 1e-6),
    "contention": Plausible(1e-6, 3.0),
    "size": Plausible(1, 1e7),
    "devices": Plausible(1, 1e8),
    "max_devices": Plausible(1, 1e8),
    "devices_per_node": Plausible(1, 1e5),
    "nics_per_node": Plausible(1, 1e5),
    "nic_gbit_per_s": Plausible(1e-2, 1e5, "Gbit/s", _BITS, "bandwidth", 1e9 / 8),
    "price_per_device_hour": Plausible(1e-4, 1e4, "USD", {"cents": 1e-2}),
    # Devices.
    "memory_gib": Plausible(
        1e-2, 1e5, "GiB", {"bytes": 1 / GIB, "MiB": 2.0**-10, "TiB": 2.0**10}, "memory", GIB
    ),
    "memory_bandwidth_gb_per_s": _gb_per_s(0.1, 1e6),
    "compute_units": Plausible(1, 1e6),
    "clock_mhz": Plausible(10, 2e4, "MHz", {"Hz": 1e-6, "kHz": 1e-3, "GHz": 1e3}, "frequency", 1e6),
    "exponentials_per_clock": Plausible(1, 1e5),
    "l2_mib": Plausible(
        1e-3, 1e5, "MiB", {"bytes": 1 / MIB, "KiB": 2.0**-10, "GiB": 2.0**10}, "memory", MIB
    ),
    "link_gb_per_s": _gb_per_s(1e-3, 1e5),
    "host_gb_per_s": _gb_per_s(1e-3, 1e5),
    "power_w": Plausible(0.1, 1e5, "W", _POWERS, "power"),
    "idle_power_w": Plausible(0.1, 1e5, "W", _POWERS, "power"),
    "reached_share": Plausible(1e-3, 1.0, "of 1", {"%": 1e-2}),
    "usd_per_hour": Plausible(1e-4, 1e4, "USD", {"cents": 1e-2}),
}
"""Limits by key of a file. Zero and negative values are refused or read as none where the figure is
used."""
PEAK_RATE: Final = Plausible(
    1e-3, 1e6, "TFLOP/s", {"FLOP/s": 1e-12, "GFLOP/s": 1e-3, "PFLOP/s": 1e3}, "rate", 1e12
)
"""Limits of the peak of every element type in `peak_tflops`."""


def plausible_figures(data: Mapping[str, Any], place: str) -> dict[str, Any]:
    """Convert text such as "200Gbit/s" in a table (and nested tables) to numbers in the unit of its
    key.

    Raises:
        PerfModelError: a figure beyond its limits; names the unit that it was likely meant in.
    """
    return {key: _checked(key, key, value, place) for key, value in data.items()}


def _checked(key: str, path: str, value: Any, place: str) -> Any:
    """The value of a key with its figures checked; `path` names it from the beginning of the
    file."""
    if isinstance(value, Mapping):
        if key == "peak_tflops":
            return {
                dtype: _figure(f"{path}.{dtype}", rate, PEAK_RATE, place)
                for dtype, rate in value.items()
            }
        return {
            inner: _checked(inner, f"{path}.{inner}", item, place) for inner, item in value.items()
        }
    if isinstance(value, list):
        return [
            _checked(key, f"{path}.{position}", item, place) for position, item in enumerate(value)
        ]
    return _figure(path, value, PLAUSIBLE[key], place) if key in PLAUSIBLE else value


def _figure(key: str, value: Any, limits: Plausible, place: str) -> Any:
    """One figure as a number in the unit of its key (raises `PerfModelError` as
    `plausible_figures`)."""
    # Text carries its own unit and is converted; a number is in the unit of the key.
    if isinstance(value, str) and limits.kind:
        try:
            value = parse_quantity(value, limits.kind) / limits.inside
        except PerfModelError as error:
            raise PerfModelError(f"{place}: {key}: {error}") from None
    # Values of another type, and zeros, are refused where the figure is used, with a message about
    # that.
    if (
        not isinstance(value, (int, float))
        or isinstance(value, bool)
        or not value > 0
        or limits.holds(value)
    ):
        return value
    # The remedy is the same figure in the units that would have made it plausible.
    likely = [
        f"{key} = {value * factor:.4g} if it is in {unit}"
        for unit, factor in limits.mistaken.items()
        if limits.holds(value * factor)
    ]
    remedy = f"write {' or '.join(likely)}" if likely else "look at the figure"
    unit = f" {limits.unit}" if limits.unit else ""
    raise PerfModelError(
        f"{place}: {key}: {value:g}{unit} is not plausible, as it should be {limits.least:g} to "
        f"{limits.most:g}{unit}; {remedy}"
    )


shorten_reprs(__name__)
