"""Devices with their nominal figures, and clusters: devices joined by a hierarchy of networks."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import pairwise
from typing import NamedTuple

from perfmodel.errors import LayoutError, PerfModelError, Reason, UnknownNameError
from perfmodel.spec._layout import Layout
from perfmodel.units import dtype_bytes, number_of, positive, require_whole

# --- devices
# -------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PeakRates:
    """Dense peak rates in FLOP/s per element type; `None` where the device has no such unit."""

    fp64: float | None = None
    fp32: float | None = None
    tf32: float | None = None
    """Matrix rate for fp32 storage (TF32 on NVIDIA, on AMD matrix fp32, from CDNA 3 on xf32)."""
    bf16: float | None = None
    fp16: float | None = None
    fp8: float | None = None
    fp4: float | None = None
    int8: float | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None:
                positive(f"peak rate {field.name}", value)

    def flops_per_s(self, dtype: str) -> float:
        """Peak FLOP/s of `dtype`, or of the nearest wider type that the device supports."""
        for name in _FALLBACK.get(dtype, (dtype, "fp32")):
            value = getattr(self, name, None)
            if value is not None:
                return value
        raise PerfModelError(
            f"no peak rate is known for dtype {dtype!r}; add it to the device entry"
        )


_FALLBACK = {
    "fp4": ("fp4", "fp8", "bf16", "fp16", "fp32"),
    "fp8": ("fp8", "bf16", "fp16", "fp32"),
    "int8": ("int8", "fp8", "bf16", "fp16", "fp32"),
    "bf16": ("bf16", "fp16", "fp32"),
    "fp16": ("fp16", "bf16", "fp32"),
    "tf32": ("tf32", "fp32"),
    "fp32": ("fp32",),
    "fp64": ("fp64", "fp32"),
}
"""Wider types, in order of preference, whose peak rate applies where a device lacks a type: narrow
products run in wider units."""


_WHOLE_FP32 = ("CDNA1", "CDNA2")
"""Architectures whose matrix units multiply fp32 at full precision."""
USUAL_DTYPES = ("bf16", "fp16", "fp32")
"""Usual element types of training; the default is the first that a device has."""
BACKENDS = ("jax", "torch", "nccl-tests")
"""Backends that measure kernels and collectives; `nccl-tests` measures collectives only, with its
own programs."""


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator (or CPU socket) with its nominal vendor figures."""

    name: str
    vendor: str
    architecture: str
    die: str = ""
    """The die: devices with the same die have the same multiprocessors. Empty: not shared with
    other devices."""
    memory_bytes: float
    """Capacity of the device's own memory."""
    memory_bandwidth_bytes_per_s: float
    """Nominal bandwidth of reads and writes together."""
    peak: PeakRates
    compute_units: int
    """Multiprocessors (NVIDIA SM, AMD CU, TPU core, CPU core)."""
    clock_hz: float
    """Boost clock of the device."""
    exponentials_per_clock: int = 16
    """Exponentials that one multiprocessor computes per clock."""
    l2_bytes: float
    link_bandwidth_bytes_per_s: float
    """One-way bandwidth of the device's own scale-up link (NVLink, PCIe, ICI), all lanes
    together."""
    host_bandwidth_bytes_per_s: float | None = None
    """One-way bandwidth between device and host memory (PCIe or a coherent link)."""
    power_w: float | None = None
    """Nominal (thermal design) power."""
    idle_power_w: float | None = None
    """Idle power at full clocks."""
    reached_share: float | None = None
    """Largest share of peak that matrix products reach, for devices without measured kernels."""
    collective_sm_share: float | None = None
    """Measured share of the device that an overlapped collective occupies; None: derived from the
    channels that it starts."""
    usd_per_hour: float | None = None
    """List price per device and hour, in US dollars."""
    price_source: str = ""
    """The provider of the list price."""
    source: str = ""
    aliases: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        figures = {
            "memory_bytes": self.memory_bytes,
            "memory_bandwidth_bytes_per_s": self.memory_bandwidth_bytes_per_s,
            "compute_units": self.compute_units,
            "clock_hz": self.clock_hz,
            "exponentials_per_clock": self.exponentials_per_clock,
            "l2_bytes": self.l2_bytes,
            "link_bandwidth_bytes_per_s": self.link_bandwidth_bytes_per_s,
        }
        for name, value in figures.items():
            positive(f"device {self.name}: {name}", value)

        # Figures that not every vendor publishes.
        for name in (
            "host_bandwidth_bytes_per_s",
            "power_w",
            "idle_power_w",
            "usd_per_hour",
        ):
            value = getattr(self, name)
            if value is not None:
                positive(f"device {self.name}: {name}", value)
        if not self.dtypes:
            raise PerfModelError(f"device {self.name}: peak: give the rate of at least one dtype")
        if self.reached_share is not None and not 0 < self.reached_share <= 1:
            raise PerfModelError(f"device {self.name}: reached_share must be above 0 and at most 1")
        if self.collective_sm_share is not None and not 0 <= self.collective_sm_share < 1:
            raise PerfModelError(
                f"device {self.name}: collective_sm_share must be at least 0 and below 1"
            )

    def require(self, dtype: str) -> None:
        """Raise `PerfModelError` if the device does not support `dtype` (`UnknownNameError` if no
        device does)."""
        dtype_bytes(dtype)
        if dtype not in self.dtypes:
            raise PerfModelError(
                f"device {self.name} has no {dtype}; choose a dtype among {', '.join(self.dtypes)}"
            )

    def flops_per_s(self, dtype: str) -> float:
        """Peak of matrix products of `dtype` in FLOP/s (`PeakRates.flops_per_s`)."""
        # Up to CDNA 2 AMD's matrix units take fp32 as it is, twice as fast as its vector units
        # (`PeakRates.tf32`); from CDNA 3 on that is a shorter type.
        multiplies_fp32 = self.vendor == "AMD" and self.architecture in _WHOLE_FP32
        type_of_units = "tf32" if dtype == "fp32" and multiplies_fp32 else dtype
        return self.peak.flops_per_s(type_of_units)

    @property
    def scales_blocks(self) -> bool:
        """Whether the matrix units support block scaling of narrow types."""
        # Such units came with those of 4 bits (NVIDIA Blackwell, AMD CDNA4).
        return self.peak.fp4 is not None

    @property
    def usual_dtype(self) -> str:
        """The default element type: the first usual one that the device supports, else its
        first."""
        return next((name for name in USUAL_DTYPES if name in self.dtypes), USUAL_DTYPES[0])

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Element types that have a peak rate."""
        return tuple(
            field.name for field in fields(self.peak) if getattr(self.peak, field.name) is not None
        )


# --- clusters
# ------------------------------------------------------------------------------------------


class Reach(NamedTuple):
    """The part of a network used by communicating ranks: fields of `perfmodel.ops.Collective`."""

    ranks_per_node: int
    """Ranks of the group per node (on the node with the most)."""
    level: int
    """Index of the innermost level that joins all of them."""
    concurrent: int
    """Groups that share a node's adapters."""
    interleaved: int
    """Groups whose ranks alternate within a node and share its links."""


def interleaved_groups(ranks: int, reach: int) -> int:
    """Number of interleaved groups of `ranks` within the `reach` consecutive ranks that one group
    spans.

    Neighbours are alone in their span. Ranks that are n apart leave room for n - 1 groups like
    theirs between them.
    """
    return -(-(reach - 1) // max(1, ranks - 1))


@dataclass(frozen=True, kw_only=True)
class NetworkLevel:
    """One tier of the network: the devices that it joins, and its bandwidth and latency per
    device."""

    name: str
    """Interconnect name as in measurement tables, e.g. `NVLink3` or `InfiniBand HDR`."""
    size: int
    """Devices joined by this tier (the whole group, not the number of sub-groups)."""
    bandwidth_bytes_per_s: float
    """One-way bandwidth per device when all devices of the tier communicate."""
    latency_s: float
    """Latency of an empty message."""
    source: str = ""
    """Source of these figures."""
    contention: float = 0.0
    """Collectives over n nodes take n^contention times as long as algorithm and bandwidth explain,
    because of hash collisions and other tenants. 0 for a dedicated fat tree."""
    rank_latency_s: float = 0.0
    """Additional latency per rank of reductions, gathers and broadcasts between nodes, beyond
    `latency_s` of each ring step."""
    slows_at_scale: bool = True
    """Whether collectives lose efficiency over many nodes, as measured: falling bandwidth, channels
    shared among more peers, waits in long rings."""

    def __post_init__(self) -> None:
        if not 0 <= self.contention < float("inf"):
            raise PerfModelError(
                f"network level {self.name}: contention must be 0 (none) or a positive exponent, got {self.contention}"
            )
        if not 0 <= self.rank_latency_s < float("inf"):
            raise PerfModelError(
                f"network level {self.name}: rank_latency_s must not be below 0, got {self.rank_latency_s}"
            )
        require_whole(f"network level {self.name}", {"size": self.size})
        positive(f"network level {self.name}: bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        positive(f"network level {self.name}: latency_s", self.latency_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical devices under a hierarchy of network levels, or several such clusters side by side
    (`of_kinds`)."""

    name: str
    device: Device
    levels: tuple[NetworkLevel, ...]
    """Network levels, innermost first."""
    max_devices: int | None = None
    """Number of devices, if fewer than the outermost level could join; None: as many as it
    joins."""
    price_per_device_hour: float | None = None
    """Price in US dollars from `source`; None: the device's list price, if known (`list_price`)."""
    source: str = ""
    kinds: tuple["Cluster", ...] = ()
    """Kinds of nodes by name; empty if all nodes are of one kind. With several kinds, `device` and
    `levels` are those of the first; code must check `kinds` before using them."""
    between: NetworkLevel | None = None
    """The link between devices of different kinds; None: the slower of their outermost levels."""
    assumed: tuple[str, ...] = ()
    """Assumptions about facts that were not stated, one sentence each."""

    def __post_init__(self) -> None:
        if self.kinds or self.between:
            self._check_kinds()
            return
        if not self.levels:
            raise PerfModelError(f"cluster {self.name}: at least one network level is needed")

        # Each level joins a whole number of groups of the level inside it.
        sizes = [level.size for level in self.levels]
        if any(b <= a or b % a for a, b in pairwise(sizes)):
            raise PerfModelError(
                f"cluster {self.name}: level sizes must grow and divide one another, got {sizes}"
            )
        price = self.price_per_device_hour
        if price is not None and not 0 <= price < float("inf"):
            raise PerfModelError(
                f"cluster {self.name}: price_per_device_hour must be at least 0, got {price}"
            )
        if self.max_devices is not None and not 1 <= self.max_devices <= sizes[-1]:
            raise PerfModelError(
                f"cluster {self.name}: max_devices={self.max_devices} must be between 1 and the {sizes[-1]} devices "
                f"that its outermost level {self.levels[-1].name!r} joins; enlarge that level, or add one"
            )

    @classmethod
    def of_kinds(
        cls,
        name: str,
        kinds: Sequence["Cluster"],
        between: NetworkLevel | None = None,
        source: str = "",
    ) -> "Cluster":
        """Combine several clusters into one with several kinds of nodes, named after them.

        Raises:
            PerfModelError: there are fewer than two kinds, two have the same name, or a layout
                cannot contain a name.
        """
        if not kinds:
            raise PerfModelError(f"cluster {name}: give at least two kinds of nodes")
        # What asks for the device or the levels of the whole gets those of the first kind.
        first = kinds[0]
        return cls(
            name=name,
            device=first.device,
            levels=first.levels,
            source=source,
            kinds=tuple(kinds),
            between=between,
        )

    def _check_kinds(self) -> None:
        """Raise `PerfModelError` unless the kinds have distinct names that a layout's notation can
        contain."""
        names = [kind.name for kind in self.kinds]
        if len(names) < 2 or len(set(names)) < len(names):
            raise PerfModelError(
                f"cluster {self.name}: give at least two kinds of nodes with different names, got {', '.join(names)}"
            )
        for kind in self.kinds:
            if not re.fullmatch(r"(?!none$)[a-z][a-z0-9_.]*", kind.name):
                raise PerfModelError(
                    f"cluster {self.name}: kind {kind.name!r}: the name is used in layouts, so it may have only "
                    "lower-case letters, digits, _ and ."
                )
            if kind.kinds:
                raise PerfModelError(
                    f"cluster {self.name}: kind {kind.name}: it has several kinds itself; list these here instead"
                )

        # Each kind has its own number of devices, and its own price.
        if self.max_devices is not None or self.price_per_device_hour is not None:
            raise PerfModelError(
                f"cluster {self.name}: set max_devices and price_per_device_hour in each of its kinds instead"
            )

    def kind(self, name: str) -> "Cluster":
        """One of the cluster's kinds of nodes, by name.

        Raises:
            UnknownNameError: there is none of this name.
        """
        named = next((kind for kind in self.kinds if kind.name == name), None)
        if named is None:
            raise UnknownNameError(
                f"kind of nodes of cluster {self.name}",
                name,
                [kind.name for kind in self.kinds],
            )
        return named

    def require_one_kind(self) -> None:
        """Raise `PerfModelError` if the cluster has several kinds of nodes."""
        if self.kinds:
            names = ", ".join(kind.name for kind in self.kinds)
            raise PerfModelError(
                f"cluster {self.name} has several kinds of nodes ({names}): this calculation supports only one; "
                "give a cluster with a single kind"
            )

    def stages_of(self, layout: Layout) -> dict[str, int]:
        """Number of pipeline ranks that each kind of nodes has room for; all groups of a rank lie
        within one kind."""
        return {kind.name: kind.capacity // (layout.devices // layout.pp) for kind in self.kinds}

    @property
    def list_price(self) -> tuple[float | None, str]:
        """US dollars per device and hour, and the source of the price: the cluster, else its
        device.

        None if the cluster has nodes of several kinds.
        """
        if self.kinds:
            return None, ""
        if self.price_per_device_hour is not None:
            return self.price_per_device_hour, self.source
        return self.device.usd_per_hour, self.device.price_source

    @property
    def capacity(self) -> int:
        """Number of devices: all that the outermost level joins, or `max_devices` if that is
        fewer."""
        if self.kinds:
            return sum(kind.capacity for kind in self.kinds)
        return self.levels[-1].size if self.max_devices is None else self.max_devices

    def require(self, devices: int, subject: str) -> None:
        """Raise `LayoutError` if `subject` needs more devices than the cluster has."""
        if devices > self.capacity:
            limit = f"max_devices={self.max_devices}"
            if self.kinds:
                limit = ", ".join(f"{kind.name} {kind.capacity}" for kind in self.kinds)
            elif self.max_devices is None:
                limit = f"all that its outermost level {self.levels[-1].name!r} joins"
            raise LayoutError(
                f"{subject} needs {number_of(devices, 'device')}; cluster {self.name} has {self.capacity} ({limit}); use fewer "
                "devices or a larger cluster",
                Reason.CAPACITY,
            )

    @property
    def devices_per_node(self) -> int:
        """Devices per node, on the largest nodes."""
        if self.kinds:
            return max(min(kind.devices_per_node, kind.capacity) for kind in self.kinds)
        return self.levels[0].size

    def reach(self, ranks: Iterable[int], running: int | None = None) -> Reach:
        """The part of the network that a group of ranks uses, and the groups that share it.

        Devices fill nodes in the order of their numbers. The ranks of a node that are not in the
        group are taken to be in groups like it, which communicate at the same time, as replicas do.

        Args:
            ranks: number of ranks of the group.
            running: devices that take part in the program at all, if fewer than a node has.
        """
        # How many ranks of the group each node has.
        group = list(ranks)
        node = self.devices_per_node
        nodes = Counter(rank // node for rank in group)
        ranks_of_group_in_node = max(nodes.values())

        # The innermost level that joins all ranks is the one that their slowest message crosses.
        joining_level = len(self.levels) - 1
        for index, level in enumerate(self.levels):
            if len({rank // level.size for rank in group}) == 1:
                joining_level = index
                break

        # Over several nodes the groups of a node share its adapters; within one, groups whose ranks
        # alternate share its links.
        if len(nodes) > 1:
            groups_of_node = max(1, min(node, running or node) // ranks_of_group_in_node)
            alternating = 1
        else:
            groups_of_node = 1
            alternating = interleaved_groups(len(group), max(group) - min(group) + 1)
        return Reach(ranks_of_group_in_node, joining_level, groups_of_node, max(1, alternating))

    def level_of(self, span: int) -> int:
        """Index of the innermost level that covers `span` consecutive ranks (the last if none
        does)."""
        for index, level in enumerate(self.levels):
            if span <= level.size:
                return index
        return len(self.levels) - 1
