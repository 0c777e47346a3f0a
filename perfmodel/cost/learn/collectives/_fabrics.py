"""Fabrics: networks in the form that the collective model uses."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np

from perfmodel.catalog import device as catalog_device
from perfmodel.catalog.networks import DEVICES_PER_NODE, NVL72_DEVICES
from perfmodel.cost.learn.collectives.links import (
    LinkClass,
    in_node_of,
    is_flat,
    is_network,
    is_rack,
    link_class,
    states_rate,
)
from perfmodel.errors import UnknownNameError
from perfmodel.spec import Cluster

_NODE_OF_FOUR: Final = re.compile(r"slingshot|gh200")
"""Nodes of four modules: those of Slingshot (Perlmutter, Polaris, Frontier, LUMI) and of GH200."""
_DIES_OF_MODULE: Final = {"MI250X-GCD": 2}
"""Devices, by their names in the catalog, of which a module holds several."""


@dataclass(frozen=True)
class Level:
    """One tier of the network."""

    link_class: LinkClass
    """Generation of links that it is made of."""
    bandwidth: float
    """One-way bytes/s per device when all devices of the tier communicate."""
    adapter: float
    """One-way bytes/s that one rank alone can get."""
    latency_s: float
    """Stated latency of one message."""
    slows_at_scale: bool = True
    """Whether bandwidth falls with the nodes of a group."""

    @property
    def link(self) -> str:
        """Name of the link class."""
        return self.link_class.name


@dataclass(frozen=True)
class Fabric:
    """A device and the levels of its network, innermost first."""

    device: str
    """Catalog name, or the name as given."""
    node_size: int
    """Devices per node; 1 if every device is a separate node."""
    levels: tuple[Level, ...]

    @property
    def flat(self) -> bool:
        """Whether every device is a separate node (Piz Daint)."""
        return self.node_size == 1

    @property
    def inside(self) -> Level:
        return self.levels[0]

    def key(self, between: bool, level: int = -1) -> str:
        """Key of this fabric's measurements: links inside a node, or these and the network's."""
        if not between:
            return self.inside.link
        if self.flat:
            return self.levels[level].link
        return f"{self.inside.link}+{self.levels[level].link}"

    @classmethod
    def of(cls, cluster: Cluster) -> "Fabric":
        """The fabric of a cluster."""
        names = tuple(
            (x.name, x.bandwidth_bytes_per_s, x.latency_s, x.slows_at_scale) for x in cluster.levels
        )
        return _fabric(cluster.device.name, cluster.devices_per_node, names)

    @classmethod
    def of_row(
        cls,
        device: str,
        interconnect: str,
        ranks_per_node: float,
        nics: float = np.nan,
        nic_gbit: float = np.nan,
        node_size: float = np.nan,
    ) -> "Fabric":
        """The fabric of a measurement row, with nominal rates unless stated.

        Adapters (`nics` of `nic_gbit` each per node) count before the interconnect's name.
        """
        return _fabric_of_row(device, interconnect, ranks_per_node, nics, nic_gbit, node_size)

    def share_between(self, level: int, ranks_per_node: float, concurrent: float) -> float:
        """One-way bytes/s between nodes per rank of a group.

        A level's bandwidth is per device with all devices busy, so a node owns `node_size` times
        that, which `concurrent` groups share. A rank alone gets at most one adapter (or the stated
        share, where that is more): eight adapters serve eight ranks, not one. What crosses several
        levels gets the narrowest.
        """
        # levels beyond the node; the outermost where a group does not leave it
        crossed = self.levels[0 if self.flat else 1 : level + 1] or self.levels[-1:]
        per_device = min(x.bandwidth for x in crossed)
        node = per_device * self.node_size
        one_rank = max(per_device, min(self.levels[level].adapter, node))
        return min(node / (concurrent * ranks_per_node), one_rank)

    def carries_lines(self, level: int) -> bool:
        """Whether groups that reach this level may use LL128, because all their links support
        it."""
        return not self.flat and all(x.link_class.lines for x in self.levels[: level + 1])

    def latency_shift_s(self, level: int, between: bool) -> float:
        """Stated latency of the slowest crossed level, beyond the usual latency."""
        # The first level joins the devices of a node, where nodes have several.
        first_between = 0 if self.flat else 1
        crossed = self.levels[first_between : level + 1] if between else self.levels[:1]
        return max(x.latency_s - x.link_class.latency_s for x in crossed or self.levels[-1:])


def device_name(name: str) -> str:
    """Catalog name of a device, or the name itself."""
    return _known_device(name)[0]


@lru_cache(maxsize=512)
def names_of_parts(device: str) -> tuple[str, ...]:
    """Names of devices whose links may resemble this part's, nearest first: those with the same die
    and equally fast memory (collectives read and write it), those with the same die, and the part
    itself if its die is unknown."""
    try:
        part = catalog_device(device)
    except UnknownNameError:
        return (device,)
    if not part.die:
        return (part.name,)
    return f"{part.die}@{part.memory_bandwidth_bytes_per_s / 1e9:g}GB/s", part.die


@lru_cache(maxsize=512)
def _known_device(name: str) -> tuple[str, float | None]:
    """Name in the catalog and bytes/s of the device's own link; the name itself and None if it is
    not in the catalog."""
    # tables may put a remark behind the name: `A100(PCIe)`
    for candidate in (name, name.split("(")[0]):
        try:
            device = catalog_device(candidate)
        except UnknownNameError:
            continue
        return device.name, device.link_bandwidth_bytes_per_s
    return name, None


@lru_cache(maxsize=1024)
def _fabric(
    device: str, node_size: int, stated: Sequence[tuple[str, float, float, bool]]
) -> Fabric:
    """The fabric of a device with these levels: name, bandwidth, latency and whether it slows at
    scale."""
    flat = is_flat([name for name, *_ in stated], device)
    levels = []
    for index, (name, bandwidth, latency_s, slows_at_scale) in enumerate(stated):
        between_nodes = flat or index > 0
        link = link_class(name, device, between_nodes)
        if not between_nodes:
            link = in_node_of(node_size, link, name.lower())
        # the name gives the rate of one adapter, the stated rate a device's share of it when all
        # devices are busy
        adapter = bandwidth if not link.known else link.bandwidth_bytes_per_s
        levels.append(Level(link, bandwidth, adapter, latency_s, slows_at_scale))
    return Fabric(device_name(device), 1 if flat else node_size, tuple(levels))


@lru_cache(maxsize=4096)
def _fabric_of_row(
    device: str,
    interconnect: str,
    ranks_per_node: float,
    nics: float,
    nic_gbit: float,
    node_size: float,
) -> Fabric:
    """The fabric that a row was measured on, by its device, links and adapters."""
    name = interconnect.lower()
    size = int(node_size) if node_size >= 1 else _usual_node(name, device)
    size = max(size, int(ranks_per_node))

    # The network: the row's own adapters count before the interconnect's name.
    outer = link_class(interconnect, device, between_nodes=True)
    adapter = outer.bandwidth_bytes_per_s
    if nic_gbit > 0:
        adapter = nic_gbit / 8 * 1e9
    # beyond a whole number per device adapters serve storage
    if nics > size:
        nics -= nics % size
    between_nodes = adapter * nics / size if nics > 0 else adapter
    network = Level(outer, between_nodes, adapter, outer.latency_s)
    one_device_per_node = is_network(interconnect, device) and ranks_per_node < 2
    if one_device_per_node:
        return Fabric(device_name(device), 1, (network,))

    # Inside a node: the device's own link rate, unless the name states a rate or names a bridge or
    # an unknown link.
    inner = in_node_of(size, link_class(interconnect, device, between_nodes=False), name)
    known, figure = _known_device(device)
    by_name = states_rate(interconnect) or not inner.known or "bridge" in inner.name
    bandwidth = figure if figure and not by_name else inner.bandwidth_bytes_per_s
    # a device may have fewer lanes than its slot, or bridges beside it
    if inner.name.startswith("PCIe"):
        bandwidth = min(bandwidth, inner.bandwidth_bytes_per_s)
    adapter = bandwidth if not inner.known else inner.bandwidth_bytes_per_s
    return Fabric(known, size, (Level(inner, bandwidth, adapter, inner.latency_s), network))


def _usual_node(name: str, device: str) -> int:
    """Usual number of devices per node for a device and interconnect, if a row does not state
    it."""
    if is_rack(name, device):
        return NVL72_DEVICES
    if _NODE_OF_FOUR.search(name) or _NODE_OF_FOUR.search(device.lower()):
        known, _ = _known_device(device)
        return 4 * _DIES_OF_MODULE.get(known, 1)
    return DEVICES_PER_NODE


# --- constants of a fabric's links
# ---------------------------------------------------------------------
#
# Constants of the physical curve of a collective on a fabric.
#
# They are sums of effects (of the kind of collective, of the link class, of both), each with an
# expected value and a standard deviation. A fit moves an effect as far as measurements require. A
# link class that was never measured keeps the expected effect, so that it is priced by the common
# behaviour of all links. Efficiencies are logistic: below one whatever the fit, so that no link
# carries more than its rate.
