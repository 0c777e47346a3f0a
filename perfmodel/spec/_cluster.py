"""Clusters: devices joined by a hierarchy of networks."""

from dataclasses import dataclass
from itertools import pairwise

from perfmodel.errors import LayoutError, PerfModelError, Reason
from perfmodel.spec._device import Device
from perfmodel.units import positive, whole


@dataclass(frozen=True, kw_only=True)
class NetworkLevel:
    """One tier of the network: the devices that it joins and what each device gets from it."""

    name: str
    """Interconnect name as in measurement tables, e.g. `NVLink3` or `InfiniBand HDR`."""
    size: int
    """Devices joined by this tier (the whole group, not the number of sub-groups)."""
    bandwidth_bytes_per_s: float
    """One-way bandwidth per device when all devices of the tier communicate."""
    latency_s: float
    source: str = ""
    contention: float = 0.0
    """Collectives over n nodes take n^contention times what their algorithm and the bandwidth explain: flows that hash
    onto the same links, and other tenants. 0 for a fat tree of one's own."""
    rank_latency_s: float = 0.0
    """Reductions, gathers and broadcasts between nodes take this longer for each rank beyond the first: what the steps
    of their rings wait beyond `latency_s`."""
    slows_at_scale: bool = True
    """Whether collectives over many nodes get less of it than those over two, as measured: bandwidth that falls with
    nodes, channels that a rank's sends share among more peers, ranks of long rings that wait for one another."""

    def __post_init__(self) -> None:
        if not 0 <= self.contention < float("inf"):
            raise PerfModelError(
                f"network level {self.name}: contention must be 0 (none) or a positive exponent, got {self.contention}"
            )
        if not 0 <= self.rank_latency_s < float("inf"):
            raise PerfModelError(
                f"network level {self.name}: rank_latency_s must not be below 0, got {self.rank_latency_s}"
            )
        whole(f"network level {self.name}", {"size": self.size})
        positive(f"network level {self.name}: bandwidth_bytes_per_s", self.bandwidth_bytes_per_s)
        positive(f"network level {self.name}: latency_s", self.latency_s)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Identical devices under a hierarchy of network levels, innermost first."""

    name: str
    device: Device
    levels: tuple[NetworkLevel, ...]
    max_devices: int | None = None
    """Devices that there are, where they are fewer than the outermost level could join; None: as many as it joins."""
    price_per_device_hour: float | None = None
    """In US dollars, as `source` has it; None: the device's list price, if there is one (`list_price`)."""
    source: str = ""

    def __post_init__(self) -> None:
        if not self.levels:
            raise PerfModelError(f"cluster {self.name}: at least one network level is needed")
        sizes = [level.size for level in self.levels]
        if any(b <= a or b % a for a, b in pairwise(sizes)):
            raise PerfModelError(f"cluster {self.name}: level sizes must grow and divide one another, got {sizes}")
        price = self.price_per_device_hour
        if price is not None and not 0 <= price < float("inf"):
            raise PerfModelError(f"cluster {self.name}: price_per_device_hour must be at least 0, got {price}")
        if self.max_devices is not None and not 1 <= self.max_devices <= sizes[-1]:
            raise PerfModelError(
                f"cluster {self.name}: max_devices={self.max_devices} must be between 1 and the {sizes[-1]} devices "
                f"that its outermost level {self.levels[-1].name!r} joins; make that larger, or add a level"
            )

    @property
    def list_price(self) -> tuple[float | None, str]:
        """US dollars per device and hour, and whose price that is: the cluster's own, else its device's."""
        if self.price_per_device_hour is not None:
            return self.price_per_device_hour, self.source
        return self.device.usd_per_hour, self.device.price_source

    @property
    def capacity(self) -> int:
        """Devices that there are: all that the outermost level joins, unless `max_devices` says fewer."""
        return self.levels[-1].size if self.max_devices is None else self.max_devices

    def require(self, devices: int, what: str) -> None:
        """Raise `LayoutError` if `what`, which needs so many devices, is more than there are."""
        if devices > self.capacity:
            limit = (
                f"its outermost level {self.levels[-1].name!r} joins no more"
                if self.max_devices is None
                else f"max_devices={self.max_devices}"
            )
            raise LayoutError(
                f"{what} needs {devices} devices; cluster {self.name} has {self.capacity} ({limit}): take fewer "
                "devices or a larger cluster",
                Reason.CAPACITY,
            )

    @property
    def devices_per_node(self) -> int:
        """Devices joined by the innermost level."""
        return self.levels[0].size

    def level_of(self, span: int) -> int:
        """Index of the innermost level whose size covers `span` consecutive ranks (last if none does)."""
        for index, level in enumerate(self.levels):
            if span <= level.size:
                return index
        return len(self.levels) - 1
