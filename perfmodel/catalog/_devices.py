"""Devices by name."""

from dataclasses import dataclass, field
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from perfmodel.catalog._cpu import CPU_NAMES, this_cpu
from perfmodel.catalog._toml import checked, index, key, package_tables, resolve
from perfmodel.errors import PerfModelError
from perfmodel.spec import Device, PeakRates, Stated
from perfmodel.units import GIB, MIB


@dataclass(frozen=True, kw_only=True)
class PeakTflops(PeakRates, Stated):
    """Dense peaks in 10^12 FLOP/s."""


@dataclass(frozen=True, kw_only=True)
class DeviceEntry(Stated):
    """A device as TOML states it, in the units of data sheets."""

    vendor: str
    architecture: str
    die: str = ""
    memory_gib: float
    memory_bandwidth_gb_per_s: float
    peak_tflops: PeakTflops
    compute_units: int
    clock_mhz: float
    exponentials_per_clock: int = 16
    l2_mib: float
    link_gb_per_s: float
    """One way, all lanes together."""
    host_gb_per_s: float | None = None
    """One way between device and host memory."""
    power_w: float | None = None
    idle_power_w: float | None = None
    reached_share: float | None = None
    usd_per_hour: float | None = None
    price_source: str = ""
    source: str
    aliases: tuple[str, ...] = field(default=())

    def device(self, name: str) -> Device:
        """The same in SI units."""
        stated = dict(vars(self))
        peak = {dtype: rate * 1e12 for dtype, rate in vars(stated.pop("peak_tflops")).items() if rate is not None}
        for stated_as, (name_si, factor) in _SI.items():
            value = stated.pop(stated_as)
            stated[name_si] = None if value is None else value * factor
        return Device(name=name, peak=PeakRates(**peak), **stated)


_SI: Final = {
    "memory_gib": ("memory_bytes", GIB),
    "memory_bandwidth_gb_per_s": ("memory_bandwidth_bytes_per_s", 1e9),
    "clock_mhz": ("clock_hz", 1e6),
    "l2_mib": ("l2_bytes", MIB),
    "link_gb_per_s": ("link_bandwidth_bytes_per_s", 1e9),
    "host_gb_per_s": ("host_bandwidth_bytes_per_s", 1e9),
}
"""Field of `Device`, and factor, of each entry that is not in SI units."""


def device(name: str) -> Device:
    """A device by name or alias, e.g. `A100-SXM4-80GB` or `h100`; `cpu` is the machine at hand.

    Raises:
        UnknownNameError: with the nearest known names.
    """
    if key(name) in CPU_NAMES:
        return this_cpu()
    table, names = _catalog()
    plain = "-".join(word for word in key(name).split("-") if word not in _MAKERS_WORDS)
    return resolve("device", name if key(name) in names else plain if plain in names else name, names, table)


def devices() -> tuple[str, ...]:
    """Names of all devices in the catalog (aliases left out)."""
    return (*sorted(_catalog()[0]), "cpu")


def device_from_toml(data: dict[str, Any], where: str) -> Device:
    """A device from a parsed TOML table that also has a `name`."""
    data = dict(data)
    name = data.pop("name", None)
    if not isinstance(name, str):
        raise PerfModelError(f"{where}: name: missing")
    return checked(DeviceEntry, data, where).device(name)


_MAKERS_WORDS = frozenset({
    "nvidia", "tesla", "geforce", "amd", "instinct", "radeon", "intel", "habana", "google", "cloud",
    "hbm2", "hbm2e", "hbm3", "hbm3e", "oam", "cts",
})  # fmt: skip
"""What drivers and submitters add to a device's name: `NVIDIA H100 80GB HBM3`, `AMD Instinct MI300X OAM`."""


@cache
def _catalog() -> tuple[MappingProxyType[str, Device], MappingProxyType[str, str]]:
    table = {
        name: checked(DeviceEntry, entry, f"{file} [{name}]").device(name)
        for file, entries in package_tables("devices").items()
        for name, entry in entries.items()
    }
    names = index([*((d.name, d.aliases) for d in table.values())])
    return MappingProxyType(table), MappingProxyType(names)
