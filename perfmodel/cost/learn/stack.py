"""Stacks (one device with one software, the unit of measurements) and device figures."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from enum import IntEnum
from functools import cached_property, lru_cache
from math import exp, log2
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from perfmodel.catalog import device, devices
from perfmodel.display import shorten_reprs
from perfmodel.errors import TableError, UnknownNameError
from perfmodel.ingest import OWN_ORDER
from perfmodel.ops import KernelKind
from perfmodel.spec import Device

PEAK_NAMES: Final = ("fp64", "fp32", "tf32", "bf16", "fp8", "int8")
_TENSOR_CLASSES: Final = ("tf32", "half", "fp8", "int8")
"""Dtype classes whose products tensor units take."""
_SLOWED: Final = 0.75
"""Share of a die's rate below which units are slowed by design: the rates that data sheets state of
other parts differ by up to 13 % for the clocks at which they are stated (H200 NVL; H20 has 0.23,
MI308X 0.55)."""


@dataclass(frozen=True)
class Figures:
    """The figures of a device that are stored in weights files."""

    name: str
    vendor: str
    architecture: str
    bandwidth: float
    """Bytes/s of the device's memory."""
    units: float
    """Number of multiprocessors."""
    l2: float
    """Bytes of the last-level cache."""
    clock: float
    """Boost clock in Hz."""
    peaks: dict[str, float]
    """FLOP/s by dtype class (`half` for fp16 and bf16)."""
    die: str = ""
    """Name of the die that the device is a part of (`Device.die`)."""
    reached_share: float | None = None
    """Share of its peak that the best of its products reaches, where no table times its kernels."""
    exponentials_per_clock: int = 16
    """Exponentials that the special function units of a multiprocessor take in a clock."""

    def __hash__(self) -> int:
        # `peaks` is a dict, which has no hash of its own
        return hash((self.name, self.bandwidth, self.units, *self.peaks.values()))

    @classmethod
    def of(cls, device: Device) -> "Figures":
        """Figures of a device."""
        peaks = {name: device.flops_per_s(name) for name in PEAK_NAMES}
        # fp16 and bf16 run alike: one class
        peaks["half"] = peaks.pop("bf16")
        return cls(
            name=device.name,
            vendor=device.vendor,
            architecture=device.architecture,
            bandwidth=device.memory_bandwidth_bytes_per_s,
            units=float(device.compute_units),
            l2=device.l2_bytes,
            clock=device.clock_hz,
            peaks=peaks,
            die=device.die,
            reached_share=device.reached_share,
            exponentials_per_clock=device.exponentials_per_clock,
        )

    @property
    def nominal(self) -> "Figures":
        """The catalog's figures of this device, else these."""
        return in_catalog(self.name) or self

    def same_kernels(self, figures: "Figures") -> bool:
        """Whether kernels are equally fast: the same device, or one with a different memory size
        only.

        Changed figures of a catalog device count as that device, so that its measurements still
        apply.
        """
        return self.name == figures.name or self.nominal._of_kernels == figures.nominal._of_kernels

    @cached_property
    def _of_kernels(self) -> tuple[Any, ...]:
        return self.architecture, self.bandwidth, self.units, self.l2, self.peaks

    def same_die(self, figures: "Figures") -> bool:
        """Whether both devices have the same kind of multiprocessors: the same device, or parts of
        one die."""
        return self.name == figures.name or (self.die != "" and self.die == figures.die)

    def same_silicon(self, figures: "Figures") -> bool:
        """Whether the devices have the same kind and number of multiprocessors."""
        return (self.architecture, self.units) == (figures.architecture, figures.units)

    def peak(self, dtype: str) -> float:
        """Peak FLOP/s of a dtype class; that of fp32 if unknown."""
        return self.peaks.get(dtype, self.peaks["fp32"])

    def per_clock(self, dtype: str) -> float:
        """Peak FLOPs of one multiprocessor in a clock."""
        return self.peak(dtype) / (self.units * self.clock)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a weights file's metadata."""
        return asdict(self)


@lru_cache(maxsize=512)
def in_catalog(name: str) -> Figures | None:
    """Figures of a device by its name or an alias; None where the catalog has none."""
    try:
        return Figures.of(device(name))
    except UnknownNameError:
        return None


@lru_cache(maxsize=512)
def larger_part(name: str) -> Figures | None:
    """Figures of the largest part of a device's die; None if the device is the largest."""
    figures = in_catalog(name)
    if figures is None or not figures.die:
        return None
    names_of_die = [part for part in devices() if part != "cpu" and device(part).die == figures.die]
    parts = [Figures.of(device(part)) for part in names_of_die]
    largest = max(parts, key=lambda part: part.units)
    return largest if largest.units > figures.units else None


@lru_cache(maxsize=512)
def fastest_units(die: str) -> Mapping[str, float]:
    """FLOPs that a multiprocessor of a die's fastest part takes in a clock, by the dtype classes of
    tensor units."""
    parts = [
        Figures.of(device(part)) for part in devices() if part != "cpu" and device(part).die == die
    ]
    fastest: dict[str, float] = {}
    for name in _TENSOR_CLASSES:
        fastest[name] = max(part.per_clock(name) for part in parts)
    return MappingProxyType(fastest)


def with_whole_units(figures: Figures) -> Figures:
    """Figures of a part with tensor units as fast as those of the fastest part of its die.

    Some parts have slower tensor units by design (H20 compared with H100) and are otherwise the
    same. Figures of the fastest part, or of a die with a single device, are returned unchanged.
    """
    if not figures.die:
        return figures
    peaks = dict(figures.peaks)
    for name, per_clock in fastest_units(figures.die).items():
        if figures.per_clock(name) < _SLOWED * per_clock:
            peaks[name] = per_clock * figures.units * figures.clock
    if peaks == figures.peaks:
        return figures
    # It gets another name, because under its own the catalog's figures would be used.
    return replace(
        figures, name=f"{figures.name} with whole tensor units", peaks=peaks, reached_share=None
    )


def figures_named(name: str) -> Figures:
    """Figures of a device that a table names.

    Raises:
        TableError: for a device that the catalog does not have.
    """
    try:
        return in_catalog(name) or Figures.of(device(name))
    except UnknownNameError as error:
        raise TableError(f"the table's device is not in the catalog: {error}") from None


_GENERATION: Final = {
    "Maxwell": 0,
    "Pascal": 1,
    "Volta": 2,
    "Turing": 2.5,
    "Ampere": 3,
    "Ada": 3.5,
    "Hopper": 4,
    "Blackwell": 5,
    "GCN5": 1,
    "CDNA1": 2,
    "CDNA2": 3,
    "CDNA3": 4,
    "CDNA4": 5,
}
"""Place of an architecture among its vendor's, so that a difference counts generations."""


def similarity(a: Figures, b: Figures, dtype: str) -> float:
    """Similarity of devices `a` and `b`: 1 for equal figures, towards 0 with distance.

    The weights are those under which devices left out were predicted best.
    """
    # Doublings between what one multiprocessor computes and what memory gives it, between numbers
    # of multiprocessors and between caches.
    distance = 0.0
    for weight, x, y in (
        (1.0, a.peak(dtype) / a.units, b.peak(dtype) / b.units),
        (1.0, a.bandwidth / a.units, b.bandwidth / b.units),
        (0.5, a.units, b.units),
        (0.25, a.l2, b.l2),
    ):
        distance += weight * abs(log2(x / y))

    # steps between architectures, a long one between vendors
    if a.vendor != b.vendor:
        distance += 4.0
    elif a.architecture != b.architecture:
        steps = abs(_GENERATION.get(a.architecture, 3) - _GENERATION.get(b.architecture, 3))
        distance += 0.3 + 0.3 * steps
    return exp(-distance)


def product(software: str) -> str:
    """Name of a software without its version.

    >>> product("torch2.1.0-cu121")
    'torch'
    """
    # the version begins at the first digit, with the `v` or the dash before it
    return re.split(r"[-_ ]?v?\d", software, maxsplit=1)[0]


FEW_ROWS: Final = 30
"""Least number of rows of a kind at which a stack is trusted; the same number halves the weight of
a relative."""


class SoftwareNearness(IntEnum):
    """How near a stack's software is to the requested one."""

    NAMED = 0
    OTHER_VERSION = 1
    SAME_SOURCE = 2
    """Another software of the requested source, or the requested software from another source."""
    OTHER = 3


class Preference(NamedTuple):
    """Sort key of a stack for a request; the smallest answers best."""

    software: SoftwareNearness
    has_few_rows: bool
    """Whether the kind was timed in few rows."""
    order: int
    """How well the stack stands in for a training job (`Stack.order`)."""
    name: str
    """Name of its software, which breaks ties reproducibly."""


@dataclass(frozen=True)
class Stack:
    """A device under a software, and the kinds that were measured on it."""

    figures: Figures
    source: str
    software: str
    kinds: dict[KernelKind, int]
    """Rows of every kind that it was fitted on."""
    host_launch: bool = False
    """Whether its times include the host's launch."""
    order: int = OWN_ORDER
    """Rank of how closely the stack resembles a training job, the lowest first."""

    @property
    def key(self) -> str:
        """Unique label of the stack."""
        return f"{self.figures.name}|{self.source}|{self.software}"

    def preference(self, kind: KernelKind, source: str | None, software: str | None) -> Preference:
        """Sort key of the stack among those that could answer a request for a kind, from a source
        or a software (named alone, by its source or by both)."""
        is_of_source = source is None or self.source == source
        names_of_software = (self.software, self.source, f"{self.source}/{self.software}")
        # The requested software comes first, then its other versions, then other software of the
        # same source; stacks of other sources come last.
        if software in names_of_software:
            nearness = SoftwareNearness.NAMED if is_of_source else SoftwareNearness.SAME_SOURCE
        elif source is None or not is_of_source:
            nearness = SoftwareNearness.OTHER
        elif software is not None and product(self.software) == product(software):
            nearness = SoftwareNearness.OTHER_VERSION
        else:
            nearness = SoftwareNearness.SAME_SOURCE
        has_few_rows = self.kinds.get(kind, 0) < FEW_ROWS
        return Preference(nearness, has_few_rows, self.order, self.software)

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a weights file's metadata."""
        kinds = {str(kind): n for kind, n in self.kinds.items()}
        return asdict(replace(self, kinds={})) | {"kinds": kinds}

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Stack":
        """Read what `to_dict` returns."""
        # weights of earlier releases do not state the die
        known = in_catalog(value["figures"]["name"])
        figures = Figures(**{"die": known.die if known else "", **value["figures"]})
        kinds = {KernelKind.parse(kind): n for kind, n in value["kinds"].items()}
        return cls(**{**value, "figures": figures, "kinds": kinds})


shorten_reprs(__name__)
