"""Clusters by name or from a TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.catalog._devices import device, device_from_toml
from perfmodel.catalog.entries import checked, index, key, read_toml, resolve, stated_entries
from perfmodel.catalog.networks import (
    NETWORK_WORDS,
    cluster_for,
    network_level,
    read_network,
    unread_link_words,
)
from perfmodel.catalog.plausible import plausible_figures
from perfmodel.catalog.this_machine import CPU_NAMES
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.spec import Cluster, NetworkLevel, Stated
from perfmodel.units import scaled


@dataclass(frozen=True, kw_only=True)
class LevelEntry(Stated):
    """A tier of the network as TOML states it."""

    name: str
    size: int
    """Devices joined by the tier."""
    bandwidth_gb_per_s: float
    """Bandwidth in GB/s per device, one way, while all devices of the tier communicate."""
    latency_us: float
    source: str = ""
    contention: float = 0.0
    """Slowdown by other traffic: collectives over n nodes take n^contention times as long as alone
    on the network."""
    rank_latency_us: float = 0.0
    """Microseconds that rings between nodes wait for each rank beyond the first."""

    def level(self) -> NetworkLevel:
        """The network level of this entry, in SI units."""
        return NetworkLevel(
            name=self.name,
            size=self.size,
            bandwidth_bytes_per_s=self.bandwidth_gb_per_s * 1e9,
            latency_s=self.latency_us * 1e-6,
            source=self.source,
            contention=self.contention,
            rank_latency_s=self.rank_latency_us * 1e-6,
        )


@dataclass(frozen=True, kw_only=True)
class LinkEntry(Stated):
    """Network between nodes of different kinds, as TOML states it."""

    name: str
    bandwidth_gb_per_s: float
    """Bandwidth in GB/s per device, one way, while all devices communicate."""
    latency_us: float
    source: str = ""

    def level(self, size: int) -> NetworkLevel:
        """The tier for a number of devices."""
        return LevelEntry(**vars(self), size=size).level()


@dataclass(frozen=True, kw_only=True)
class KindEntry(Stated):
    """One kind of nodes in TOML: the nodes of another cluster, or a device with levels."""

    name: str
    devices: int
    """Number of devices in nodes of this kind."""
    cluster: str | None = None
    """Catalog name or TOML file."""
    device: Any = None
    levels: tuple[LevelEntry, ...] = ()
    source: str = ""

    def kind(self, place: str) -> Cluster:
        """This kind of nodes as a separate cluster."""
        place = f"{place} kind {self.name}"
        if (self.cluster is None) == (self.device is None):
            raise PerfModelError(f"{place}: give either a cluster, or a device and its levels")
        # Each kind of nodes is read as a cluster, so that it gets the same checks.
        if self.cluster is None:
            entry = ClusterEntry(
                device=self.device,
                levels=self.levels,
                max_devices=self.devices,
                source=self.source,
            )
            return entry.cluster(self.name, place)
        if self.levels:
            raise PerfModelError(
                f"{place}: cluster = {self.cluster} already defines levels; leave them out"
            )
        base = cluster(self.cluster)
        if base.kinds:
            raise PerfModelError(
                f"{place}: {self.cluster} has several kinds itself; list these here instead"
            )
        return replace(
            base,
            name=self.name,
            max_devices=self.devices,
            source=self.source or base.source,
        )


@dataclass(frozen=True, kw_only=True)
class ClusterEntry(Stated):
    """A cluster in TOML: a device (catalog name or table) with levels, or several kinds of
    nodes."""

    device: Any = None
    levels: tuple[LevelEntry, ...] = ()
    devices_per_node: int | None = None
    """Devices of a node. With the next four fields, links in words that replace `levels` (read by
    `cluster_for`)."""
    intra_link: str = ""
    inter_link: str | None = None
    nics_per_node: int | None = None
    nic_gbit_per_s: float | None = None
    max_devices: int | None = None
    price_per_device_hour: float | None = None
    source: str = ""
    aliases: tuple[str, ...] = field(default=())
    kinds: tuple[KindEntry, ...] = ()
    between: LinkEntry | None = None

    def cluster(self, name: str, place: str) -> Cluster:
        """The cluster of this entry, with its device looked up and figures in SI units."""
        if self.kinds:
            # A cluster states devices in one of three ways: kinds of nodes, links in words, or
            # levels in figures. What belongs to another way is refused, since it would be passed
            # over in silence.
            single_kind_keys = ("device", "levels", "max_devices", "price_per_device_hour")
            misplaced = [key for key in single_kind_keys if getattr(self, key)]
            if misplaced:
                raise PerfModelError(
                    f"{place}: {', '.join(misplaced)}: state this in each kind instead"
                )
            kinds = [entry.kind(place) for entry in self.kinds]
            # Nodes of different kinds meet on one network, whose level spans all of them.
            link = self.between and self.between.level(sum(kind.capacity for kind in kinds))
            return Cluster.of_kinds(name, kinds, link, self.source)
        if self.between:
            raise PerfModelError(
                f"{place}: between is for clusters with several kinds of nodes; leave it out"
            )
        if self.inter_link is not None and not self.levels and isinstance(self.device, str):
            return self._in_words(name, place)
        link_fields = [key for key in _LINK_WORDS if getattr(self, key)]
        if link_fields:
            raise PerfModelError(
                f"{place}: {', '.join(link_fields)}: to describe links in words, name the device, give inter_link, "
                "and leave out levels"
            )
        missing = [key for key in ("device", "levels") if not getattr(self, key)]
        if missing:
            raise PerfModelError(f"{place}: " + "; ".join(f"{key}: missing" for key in missing))
        if isinstance(self.device, str):
            resolved = device(self.device)
        elif isinstance(self.device, dict):
            resolved = device_from_toml(self.device, f"{place} device")
        else:
            raise PerfModelError(
                f"{place}: device: must be a catalog name or a table, got {self.device!r}"
            )
        return Cluster(
            name=name,
            device=resolved,
            levels=tuple(entry.level() for entry in self.levels),
            max_devices=self.max_devices,
            price_per_device_hour=self.price_per_device_hour,
            source=self.source,
        )

    def _in_words(self, name: str, place: str) -> Cluster:
        """The cluster whose links are described in words."""
        try:
            network = read_network(self.inter_link or "")
            by_words = cluster_for(
                self.device,
                self.devices_per_node,
                self.intra_link,
                network,
                self.nics_per_node,
                self.nic_gbit_per_s,
            )
        except PerfModelError as error:
            raise PerfModelError(f"{place}: {error}") from None
        # In a table of published runs words that nobody understands are left; in a user's own file
        # they are mistakes.
        unread = (*network.not_understood, *unread_link_words(self.intra_link))
        if unread:
            raise PerfModelError(
                f"{place}: {', '.join(map(repr, unread))} cannot be read in links; {NETWORK_WORDS}"
            )
        return replace(
            by_words,
            name=name,
            max_devices=self.max_devices,
            price_per_device_hour=self.price_per_device_hour,
            source=self.source or "links as described in words",
        )


_LINK_WORDS = (
    "devices_per_node",
    "intra_link",
    "inter_link",
    "nics_per_node",
    "nic_gbit_per_s",
)


@dataclass(frozen=True, kw_only=True)
class NetworkEntry(Stated):
    """Network between nodes that replaces a cluster's own, in words or in figures, which override
    the words."""

    inter_link: str = ""
    """Network between nodes in words, such as 8x 400 Gb/s InfiniBand NDR; b is bits, B bytes."""
    nics_per_node: int | None = None
    """Network adapters of a node."""
    nic_gbit_per_s: float | None = None
    """Rate of one adapter in Gbit/s."""
    bandwidth_gb_per_s: float | None = None
    """GB/s one way per device, all devices communicating."""
    latency_us: float | None = None
    """Latency of one hop of a collective, in microseconds."""
    contention: float | None = None
    """Slowdown by other traffic: collectives over n nodes take n^contention times as long as alone
    on the network."""
    rank_latency_us: float | None = None
    """Time that a ring between nodes waits for each rank beyond the first, in microseconds."""


def with_network(base: Cluster, table: Mapping[str, Any], place: str) -> Cluster:
    """A cluster with another network between nodes, as a table states it (`NetworkEntry`).

    Raises:
        PerfModelError: naming `place` and every key that is unknown or malformed; words that are
            not understood.
    """
    entry = checked(NetworkEntry, table, place)
    if all(value in (None, "") for value in vars(entry).values()):
        return base
    base.require_one_kind()
    # Only the outermost level is the network between nodes; what joins devices within one stays.
    outer = base.levels[-1]
    # Words describe a whole level; figures then replace single values of it.
    if entry.inter_link or entry.nics_per_node is not None or entry.nic_gbit_per_s is not None:
        try:
            network = read_network(entry.inter_link or outer.name)
            level = network_level(
                base.device,
                base.devices_per_node,
                network,
                entry.nics_per_node,
                entry.nic_gbit_per_s,
            )
        except PerfModelError as error:
            raise PerfModelError(f"{place}: {error}") from None
        if entry.inter_link and network.not_understood:
            unread = ", ".join(map(repr, network.not_understood))
            raise PerfModelError(f"{place}: {unread} cannot be read in inter_link; {NETWORK_WORDS}")
        outer = replace(level, size=outer.size) if len(base.levels) > 1 else level
    # Figures win over words, one by one.
    figures = {
        "bandwidth_bytes_per_s": _scaled(entry.bandwidth_gb_per_s, 1e9),
        "latency_s": _scaled(entry.latency_us, 1e-6),
        "contention": entry.contention,
        "rank_latency_s": _scaled(entry.rank_latency_us, 1e-6),
    }
    outer = replace(outer, **{name: value for name, value in figures.items() if value is not None})
    # A cluster of one level is a single node: the stated network is added around it.
    inner = base.levels[:-1] if len(base.levels) > 1 else base.levels
    return replace(base, levels=(*inner, outer))


def _scaled(value: float | None, factor: float) -> float | None:
    return None if value is None else value * factor


def cluster(name_or_path: str | Path | Cluster) -> Cluster:
    """Look up a cluster by its catalog name or alias, or read it from a `.toml` file.

    The name of a device stands for its reference system. A `Cluster` is returned as it is.

    Raises:
        UnknownNameError: for a name that is neither in the catalog nor a file.
        PerfModelError: for a file with missing, unknown or malformed keys; lists all of them.
    """
    if isinstance(name_or_path, Cluster):
        return name_or_path
    path = Path(name_or_path)
    if path.suffix == ".toml":
        return cluster_from_toml(read_toml(path), str(path), path.stem)
    # A cluster's name goes before a device's: that of a device stands for servers with it.
    entries, names = _catalog()
    try:
        entry_name, place, entry = resolve("cluster", str(name_or_path), names, entries)
    except UnknownNameError:
        system = reference_system(str(name_or_path))
        if system is None:
            raise
        return system
    return entry.cluster(entry_name, place)


def cluster_from_toml(data: dict[str, Any], place: str, name: str) -> Cluster:
    """A cluster from a parsed TOML table, with the default name `name`.

    Raises:
        PerfModelError: naming `place` and every key that is missing, unknown or malformed.
    """
    own_name = str(data.get("name", name))
    stated = plausible_figures({key: value for key, value in data.items() if key != "name"}, place)
    return checked(ClusterEntry, stated, place).cluster(own_name, place)


def reference_system(device_name: str) -> Cluster | None:
    """The reference system of a device's maker; None for devices other than accelerators in the
    catalog."""
    try:
        accelerator = device(device_name)
    except UnknownNameError:
        return None
    # The machine at hand has no reference system of a vendor.
    if key(device_name) in CPU_NAMES:
        return None
    system = cluster_for(accelerator.name, None, "", "")
    return replace(
        system,
        name=accelerator.name,
        source=f"reference system of {accelerator.name}: {accelerator.source}",
        assumed=(_networks_assumed(system),),
    )


def _networks_assumed(system: Cluster) -> str:
    """A sentence on the assumed networks of a device's reference system."""
    # The answer must say which network it assumed, tier by tier.
    tiers = [
        f"{level.name} at {scaled(level.bandwidth_bytes_per_s, 'B/s')} per device for up to {level.size:,} devices"
        for level in system.levels
    ]
    return (
        f"the networks of the reference system of {system.device.name} are assumed: {', then '.join(tiers)}; for "
        "others name a cluster (perfmodel catalog clusters) or give a TOML"
    )


def clusters() -> tuple[str, ...]:
    """Names of all clusters in the catalog."""
    return tuple(sorted(stated_entries("clusters")))


_Entries = MappingProxyType[str, tuple[str, str, ClusterEntry]]


@cache
def _catalog() -> tuple[_Entries, MappingProxyType[str, str]]:
    """All clusters of the catalog, and the name that each alias stands for."""
    entries = {}
    for name, (file, entry) in stated_entries("clusters").items():
        place = f"{file} [{name}]"
        entries[name] = (name, place, checked(ClusterEntry, entry, place))
    names = index((name, entry.aliases) for name, _, entry in entries.values())
    return MappingProxyType(entries), MappingProxyType(names)
