"""Clusters by name or from a TOML file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from perfmodel.catalog._devices import CPU_NAMES, device, device_from_toml
from perfmodel.catalog._network_tokens import unread_link_words
from perfmodel.catalog._network_words import NETWORK_WORDS, read_network
from perfmodel.catalog._plausible import plausible_figures
from perfmodel.catalog._toml import checked, index, key, package_tables, read_toml, resolve
from perfmodel.catalog._words import cluster_for, network_level
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
    """One way per device, all devices of the tier communicating."""
    latency_us: float
    source: str = ""
    contention: float = 0.0
    """Exponent of the number of nodes by which collectives take longer than alone on the network."""
    rank_latency_us: float = 0.0
    """What rings between nodes wait for each rank beyond the first."""

    def level(self) -> NetworkLevel:
        """The same in SI units."""
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
    """What joins nodes of different kinds, as TOML states it."""

    name: str
    bandwidth_gb_per_s: float
    """One way per device, all devices communicating."""
    latency_us: float
    source: str = ""

    def level(self, size: int) -> NetworkLevel:
        """A tier of so many devices."""
        return LevelEntry(**vars(self), size=size).level()


@dataclass(frozen=True, kw_only=True)
class KindEntry(Stated):
    """Nodes of one kind, as TOML states them: those of another cluster, or a device and levels as a cluster has."""

    name: str
    devices: int
    """Of this kind."""
    cluster: str | None = None
    """Catalog name or TOML file."""
    device: Any = None
    levels: tuple[LevelEntry, ...] = ()
    source: str = ""

    def kind(self, where: str) -> Cluster:
        """The same as a cluster of its own."""
        where = f"{where} kind {self.name}"
        if (self.cluster is None) == (self.device is None):
            raise PerfModelError(f"{where}: give either a cluster, or a device and its levels")
        if self.cluster is None:
            entry = ClusterEntry(device=self.device, levels=self.levels, max_devices=self.devices, source=self.source)
            return entry.cluster(self.name, where)
        if self.levels:
            raise PerfModelError(f"{where}: levels are those of {self.cluster}; leave them out")
        like = cluster(self.cluster)
        if like.kinds:
            raise PerfModelError(f"{where}: {self.cluster} has kinds itself; state those here")
        return replace(like, name=self.name, max_devices=self.devices, source=self.source or like.source)


@dataclass(frozen=True, kw_only=True)
class ClusterEntry(Stated):
    """A cluster as TOML states it: a device (catalog name, or a table of its own) and levels; or kinds of nodes."""

    device: Any = None
    levels: tuple[LevelEntry, ...] = ()
    devices_per_node: int | None = None
    """In place of `levels`, with the next four: links in words, read as those of a table of runs (`cluster_for`)."""
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

    def cluster(self, name: str, where: str) -> Cluster:
        """The same with its device resolved and in SI units."""
        if self.kinds:
            if alone := [k for k in ("device", "levels", "max_devices", "price_per_device_hour") if getattr(self, k)]:
                raise PerfModelError(f"{where}: {', '.join(alone)}: where there are kinds, state it of each of them")
            kinds = [entry.kind(where) for entry in self.kinds]
            link = self.between and self.between.level(sum(kind.capacity for kind in kinds))
            return Cluster.of_kinds(name, kinds, link, self.source)
        if self.between:
            raise PerfModelError(f"{where}: between: it joins kinds of nodes, of which there are none")
        if self.inter_link is not None and not self.levels and isinstance(self.device, str):
            return self._in_words(name, where)
        if told := [key for key in _LINK_WORDS if getattr(self, key)]:
            raise PerfModelError(
                f"{where}: {', '.join(told)}: links in words need a device by name and inter_link, and no levels"
            )
        if missing := [key for key in ("device", "levels") if not getattr(self, key)]:
            raise PerfModelError(f"{where}: " + "; ".join(f"{key}: missing" for key in missing))
        if isinstance(self.device, str):
            found = device(self.device)
        elif isinstance(self.device, dict):
            found = device_from_toml(self.device, f"{where} device")
        else:
            raise PerfModelError(f"{where}: device: must be a catalog name or a table, got {self.device!r}")
        return Cluster(
            name=name,
            device=found,
            levels=tuple(entry.level() for entry in self.levels),
            max_devices=self.max_devices,
            price_per_device_hour=self.price_per_device_hour,
            source=self.source,
        )

    def _in_words(self, name: str, where: str) -> Cluster:
        """The cluster whose links are told in words."""
        try:
            network = read_network(self.inter_link or "")
            found = cluster_for(
                self.device,
                self.devices_per_node,
                self.intra_link,
                network,
                self.nics_per_node,
                self.nic_gbit_per_s,
            )
        except PerfModelError as error:
            raise PerfModelError(f"{where}: {error}") from None
        if unread := (*network.not_understood, *unread_link_words(self.intra_link)):
            raise PerfModelError(f"{where}: {', '.join(map(repr, unread))} not understood in links; {NETWORK_WORDS}")
        return replace(
            found,
            name=name,
            max_devices=self.max_devices,
            price_per_device_hour=self.price_per_device_hour,
            source=self.source or "links as its words tell",
        )


_LINK_WORDS = ("devices_per_node", "intra_link", "inter_link", "nics_per_node", "nic_gbit_per_s")


@dataclass(frozen=True, kw_only=True)
class NetworkEntry(Stated):
    """What the network between nodes is instead of a cluster's own, in words or in figures; figures win."""

    inter_link: str = ""
    """In words, such as 8x 400 Gb/s InfiniBand NDR; b is bits, B bytes."""
    nics_per_node: int | None = None
    """Network adapters of a node."""
    nic_gbit_per_s: float | None = None
    """Rate of one adapter in Gbit/s."""
    bandwidth_gb_per_s: float | None = None
    """GB/s one way per device, all devices communicating."""
    latency_us: float | None = None
    """Of one hop of a collective, in microseconds."""
    contention: float | None = None
    """Exponent of the number of nodes by which collectives take longer than alone on the network."""
    rank_latency_us: float | None = None
    """What rings between nodes wait for each rank beyond the first, in microseconds."""


def with_network(found: Cluster, table: Mapping[str, Any], where: str) -> Cluster:
    """A cluster with another network between nodes, as a table states it (`NetworkEntry`).

    Raises:
        PerfModelError: naming `where` and every key that is unknown or malformed; words that are not understood.
    """
    entry = checked(NetworkEntry, table, where)
    if all(value in (None, "") for value in vars(entry).values()):
        return found
    found.require_one_kind()
    outer = found.levels[-1]
    if entry.inter_link or entry.nics_per_node is not None or entry.nic_gbit_per_s is not None:
        try:
            network = read_network(entry.inter_link or outer.name)
            told = network_level(
                found.device, found.devices_per_node, network, entry.nics_per_node, entry.nic_gbit_per_s
            )
        except PerfModelError as error:
            raise PerfModelError(f"{where}: {error}") from None
        if entry.inter_link and network.not_understood:
            unread = ", ".join(map(repr, network.not_understood))
            raise PerfModelError(f"{where}: {unread} not understood in inter_link; {NETWORK_WORDS}")
        outer = replace(told, size=outer.size) if len(found.levels) > 1 else told
    figures = {
        "bandwidth_bytes_per_s": _scaled(entry.bandwidth_gb_per_s, 1e9),
        "latency_s": _scaled(entry.latency_us, 1e-6),
        "contention": entry.contention,
        "rank_latency_s": _scaled(entry.rank_latency_us, 1e-6),
    }
    outer = replace(outer, **{name: value for name, value in figures.items() if value is not None})
    inner = found.levels[:-1] if len(found.levels) > 1 else found.levels
    return replace(found, levels=(*inner, outer))


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
    entries, names = _catalog()
    try:
        entry_name, where, entry = resolve("cluster", str(name_or_path), names, entries)
    except UnknownNameError:
        if (found := reference_system(str(name_or_path))) is None:
            raise
        return found
    return entry.cluster(entry_name, where)


def cluster_from_toml(data: dict[str, Any], where: str, name: str) -> Cluster:
    """A cluster from a parsed TOML table, called `name` unless that says otherwise.

    Raises:
        PerfModelError: naming `where` and every key that is missing, unknown or malformed.
    """
    own = str(data.get("name", name))
    stated = plausible_figures({key: value for key, value in data.items() if key != "name"}, where)
    return checked(ClusterEntry, stated, where).cluster(own, where)


def reference_system(device_name: str) -> Cluster | None:
    """Servers as the maker of a device joins them; None for what is no accelerator of the catalog."""
    try:
        found = device(device_name)
    except UnknownNameError:
        return None
    if key(device_name) in CPU_NAMES:
        return None
    system = cluster_for(found.name, None, "", "")
    return replace(
        system,
        name=found.name,
        source=f"reference system of {found.name}: {found.source}",
        assumed=(_networks_assumed(system),),
    )


def _networks_assumed(system: Cluster) -> str:
    """Say which networks the reference system of a device has."""
    tiers = [
        f"{level.name} at {scaled(level.bandwidth_bytes_per_s, 'B/s')} per device for up to {level.size:,} devices"
        for level in system.levels
    ]
    return (
        f"networks of the reference system of {system.device.name} are assumed: {', then '.join(tiers)}; "
        "name a cluster (perfmodel catalog clusters) or give a TOML for others"
    )


def clusters() -> tuple[str, ...]:
    """Names of all clusters in the catalog."""
    return tuple(sorted(_catalog()[0]))


_Entries = MappingProxyType[str, tuple[str, str, ClusterEntry]]


@cache
def _catalog() -> tuple[_Entries, MappingProxyType[str, str]]:
    entries = {
        name: (name, f"{file} [{name}]", checked(ClusterEntry, entry, f"{file} [{name}]"))
        for file, tables in package_tables("clusters").items()
        for name, entry in tables.items()
    }
    names = index((name, entry.aliases) for name, _, entry in entries.values())
    return MappingProxyType(entries), MappingProxyType(names)
