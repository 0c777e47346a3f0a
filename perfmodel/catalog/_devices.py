"""Devices by name, from the data sheets of the catalog."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any, Final

from perfmodel.catalog._device_words import PartNames, device_words, part_named
from perfmodel.catalog.entries import checked, index, key, resolve, stated_entries
from perfmodel.catalog.plausible import plausible_figures
from perfmodel.catalog.this_machine import CPU_NAMES, this_cpu
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
    """Bandwidth of the device's links in GB/s, one way, all lanes together."""
    host_gb_per_s: float | None = None
    """Bandwidth between device and host memory in GB/s, one way."""
    power_w: float | None = None
    idle_power_w: float | None = None
    reached_share: float | None = None
    usd_per_hour: float | None = None
    price_source: str = ""
    source: str
    aliases: tuple[str, ...] = field(default=())

    def device(self, name: str) -> Device:
        """The device of this entry, in SI units."""
        # Units of data sheets end here: everything behind this is in SI units.
        stated = dict(vars(self))
        peak = {
            dtype: rate * 1e12
            for dtype, rate in vars(stated.pop("peak_tflops")).items()
            if rate is not None
        }
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
"""Entries that are not in SI units: the field of `Device` that each sets, and the factor."""


def device(name: str) -> Device:
    """A device by name or alias, e.g. `A100-SXM4-80GB` or `h100`; `cpu` is the machine at hand.

    Maker, chip, architecture, form factor, memory and power limit may stand in any order:
    `80GB SXM H100 500W` is an H100 with a power limit of 500 W.

    Raises:
        UnknownNameError: with the nearest known names.
        PerfModelError: a power limit far from the device's nominal power.
    """
    if key(name) in CPU_NAMES:
        return this_cpu()
    # The whole name first: a name of the catalog must never be read as words.
    table, names = _catalog()
    if key(name) in names:
        return table[names[key(name)]]
    stated = device_words(name)
    named = part_named(stated, _part_names())
    # A maker or an architecture that is not the device's (`AMD H100`) is a slip that nobody can
    # settle here.
    if (
        named is None
        or stated.makers - {table[named].vendor}
        or stated.architectures - {table[named].architecture}
    ):
        return resolve("device", name, {}, table)
    return _limited(table[named], stated.power_w)


def _limited(base: Device, power_w: float | None) -> Device:
    """The device with a power limit that its name states.

    Raises:
        PerfModelError: a limit far from its nominal power.
    """
    if power_w is None or power_w == base.power_w:
        return base
    low, high = _POWER_LIMITS
    if power_w <= 0 or (base.power_w is not None and not low <= power_w / base.power_w <= high):
        raise PerfModelError(
            f"device {base.name}: a power limit of {power_w:g} W is implausible for {base.power_w:g} W; it must "
            f"be {low:g} to {high:g} times that"
        )
    return replace(base, name=f"{base.name}-{power_w:g}W", power_w=power_w)


def devices() -> tuple[str, ...]:
    """Names of all devices in the catalog (aliases left out)."""
    return (*sorted(stated_entries("devices")), "cpu")


def device_from_toml(data: dict[str, Any], place: str) -> Device:
    """A device from a parsed TOML table that also has a `name`."""
    data = dict(data)
    name = data.pop("name", None)
    if not isinstance(name, str):
        raise PerfModelError(f"{place}: name: missing")
    return checked(DeviceEntry, plausible_figures(data, place), place).device(name)


_POWER_LIMITS: Final = (0.2, 1.5)
"""Range of accepted power limits, relative to the nominal power."""


@cache
def _part_names() -> Mapping[str, PartNames]:
    """Parts of the names and aliases of each device, by its name."""
    part_names = {}
    for accelerator in _catalog()[0].values():
        # A name without a chip (`Grace Hopper`) is known as a whole alone: as parts it would be any
        # device's.
        by_name = [device_words(name) for name in (accelerator.name, *accelerator.aliases)]
        names = tuple(name for name in by_name if name.chip)
        part_names[accelerator.name] = PartNames(names, accelerator.memory_bytes / GIB)
    return part_names


@cache
def _catalog() -> tuple[MappingProxyType[str, Device], MappingProxyType[str, str]]:
    """All devices of the catalog, and the name that each alias stands for."""
    table = {}
    for name, (file, entry) in stated_entries("devices").items():
        table[name] = checked(DeviceEntry, entry, f"{file} [{name}]").device(name)
    names = index([*((d.name, d.aliases) for d in table.values())])

    # Parts of a die differ in clocks, memory and power alone: the share of the peak that the best
    # product reaches on the one that was searched for it holds for all.
    reached = {
        part.die: part.reached_share for part in table.values() if part.die and part.reached_share
    }
    for name, part in table.items():
        known = reached.get(part.die)
        table[name] = part if known is None else replace(part, reached_share=known)
    return MappingProxyType(table), MappingProxyType(names)
