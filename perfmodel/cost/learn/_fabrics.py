"""Link classes (nominal figures by interconnect name) and fabrics: a network as the collective model sees it.

A name may state the rate of its links: `NVLink4 NVSwitch@450GB/s + AWS EFA@50GB/s` (one way per device, the tier
inside a node first). Nominal figures are the scale that fitted efficiencies refer to.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

import numpy as np

from perfmodel.catalog import DEVICES_PER_NODE, NVL72_DEVICES
from perfmodel.catalog import device as catalog_device
from perfmodel.errors import UnknownNameError
from perfmodel.spec import Cluster


@dataclass(frozen=True)
class LinkClass:
    """A generation of links; bandwidth and latency are nominal, one way, per device or adapter."""

    name: str
    pattern: str
    """Regular expression over lower-case interconnect names."""
    bandwidth_bytes_per_s: float
    latency_s: float
    """Latency as cluster descriptions usually state it; a cluster that states another moves the hop."""
    hop_s: float
    """Expected time of one small message of a collective, software included: the prior of fits."""
    between_nodes: bool = False
    reduces: bool = False
    """Whether its switches may add up data on the way (NVLS, SHARP): half the volume of an all-reduce."""
    mesh: bool = False
    """Direct links between pairs instead of a switch: a rank's bandwidth grows with the peers that take part."""
    limited: bool = True
    """Whether it is a link at all: ranks on one host exchange data through memory."""
    lines: bool = False
    """Whether NCCL sends lines of 128 bytes over it (LL128): NVLink since Volta, and networks whose adapters sit beside
    the devices and keep a line's order (NCCL `src/graph/tuning.cc`). Slingshot's hang on the host processors, EFA kept
    no order before Hopper's instances (aws-ofi-nccl), Ethernet goes through the host's memory."""
    eager_bytes: float = 1e30
    """Messages up to this size are sent without asking the receiver first."""


LINK_CLASSES: Final = (
    LinkClass("NVLink1", r"nvlink[- ]?1", 80e9, 2e-6, 1e-6, mesh=True),
    LinkClass(
        "NVLink2-switch",
        r"nvlink[- ]?2.*nvswitch|nvswitch.*nvlink[- ]?2|nvswitch[- ]?v100",
        150e9,
        2e-6,
        1e-6,
        lines=True,
    ),
    LinkClass("NVLink2", r"nvlink[- ]?2", 150e9, 2e-6, 1e-6, mesh=True, lines=True),
    LinkClass("NVLink3", r"nvlink[- ]?3", 300e9, 2e-6, 1e-6, lines=True),
    LinkClass("NVLink4-mesh", r"4xgh200", 450e9, 2e-6, 1e-6, mesh=True, lines=True),
    LinkClass("NVLink4", r"nvlink[- ]?4", 450e9, 2e-6, 1e-6, reduces=True, lines=True),
    LinkClass("NVLink5", r"nvlink[- ]?5|nvl72", 900e9, 2e-6, 1e-6, reduces=True, lines=True),
    LinkClass("NVLink-bridge", r"bridge", 56e9, 2e-6, 1e-6),
    LinkClass("XGMI", r"xgmi|infinity", 448e9, 2e-6, 2e-6, mesh=True),
    LinkClass("ICI", r"\bici\b|tpu", 100e9, 1e-6, 1e-6),
    LinkClass("PCIe3", r"pcie[- ]?(gen)?3", 16e9, 5e-6, 2e-6),
    LinkClass("PCIe4", r"pcie[- ]?(gen)?4", 32e9, 5e-6, 2e-6),
    LinkClass("PCIe5", r"pcie[- ]?(gen)?5", 64e9, 5e-6, 2e-6),
    LinkClass("PCIe", r"pcie|upi|qpi", 16e9, 5e-6, 2e-6),
    LinkClass("InfiniBand-FDR", r"fdr", 7e9, 5e-6, 6e-6, True, reduces=True),
    LinkClass("InfiniBand-EDR", r"edr|infiniband.*100", 12.5e9, 5e-6, 6e-6, True, reduces=True, lines=True),
    LinkClass("InfiniBand-NDR", r"ndr", 50e9, 5e-6, 6e-6, True, reduces=True, lines=True),
    LinkClass("InfiniBand-XDR", r"xdr", 100e9, 5e-6, 6e-6, True, reduces=True, lines=True),
    LinkClass("InfiniBand-HDR", r"hdr|infiniband|\bib\b", 25e9, 5e-6, 6e-6, True, reduces=True, lines=True),
    LinkClass("OmniPath", r"omni", 12.5e9, 5e-6, 6e-6, True),
    LinkClass("Aries", r"aries|cray", 10e9, 1.5e-6, 6e-6, True),
    LinkClass("Slingshot", r"slingshot", 25e9, 5e-6, 6e-6, True, eager_bytes=4096),
    LinkClass("RoCE", r"roce", 25e9, 6e-6, 10e-6, True, lines=True),
    LinkClass("EFA", r"efa|elastic fabric", 12.5e9, 15e-6, 30e-6, True),
    LinkClass("loopback", r"loopback", 5e9, 50e-6, 30e-6, limited=False),
    LinkClass("emulated", r"gloo|emulated|veth", 12.5e9, 25e-6, 30e-6, True, limited=False),
    LinkClass("Ethernet", r"ethernet|gcp|gbe|tcp|socket|dcn|fastrak", 12.5e9, 25e-6, 30e-6, True),
    LinkClass("NVLink", r"nvlink|nvswitch", 300e9, 2e-6, 1e-6, lines=True),
)
"""Sources: the vendors' data sheets (NVLink and all Infinity Fabric links of a GPU one way; PCIe x16; InfiniBand and
Ethernet per port)."""

UNKNOWN_INTRA: Final = LinkClass("unknown-intra", "", 25e9, 2e-6, 2e-6)
UNNAMED: Final = LinkClass("unnamed-network", r"(\d{2,4}) ?g(?:b|$|[^a-z0-9])", 50e9, 5e-6, 6e-6, True, lines=True)
"""A network told by the rate of its adapters alone (`RDMA-400G`)."""
UNKNOWN_INTER: Final = LinkClass("unknown-inter", "", 12.5e9, 10e-6, 20e-6, True, lines=True)

_GENERATION: Final = (
    (r"p100", "NVLink1"), (r"v100", "NVLink2"), (r"a100|a800", "NVLink3"), (r"g?h[128]00|h20|h800", "NVLink4"),
    (r"[bg]b?[23]00", "NVLink5"),
)  # fmt: skip
_OF_DEVICE: Final = (
    ("XGMI", r"mi2\d\d", 200e9),
    ("XGMI", r"mi35\d", 537.6e9),
    ("NVLink-bridge", r"a100|h100|h200", 300e9),
    ("NVLink-bridge", r"a30\b", 100e9),
    ("PCIe5", r"b60", 31.5e9),
    ("EFA", r"h[12]00|[bg]b?[23]00", 50e9),
)
"""Links of one name whose rate depends on the device: class, device, bytes/s (data sheets: MI200 die to die, MI350
seven links of 76.8 GB/s, bridges of A100 and H100 PCIe, B60 with eight PCIe lanes, EC2 p5)."""
_ADAPTER: Final = ((r"b300", 100e9), (r"h[12]00|h20\b|h800|gh200|b200|mi3\d\d", 50e9), (r"a100|a800|mi2\d\d", 25e9))
"""One-way bytes/s of the network adapter of each device in the vendors' own systems (DGX A100: HDR, DGX H100, B200 and
GB200 NVL72: NDR, B300: XDR; MI300X platforms: 400 Gbit/s)."""
TRAY: Final = 4
"""Devices of a tray, of which an NVL72 rack has eighteen."""
_RATE: Final = re.compile(r"@\s*(\d+\.?\d*(?:e[-+]?\d+)?)\s*gb/s")


def link_class(interconnect: str, device: str, between_nodes: bool) -> LinkClass:
    """The class of one tier of an interconnect name; mixed names (`NVLink4-intra+Slingshot11-inter`) hold both.

    A bare `NVLink` or `NVSwitch` takes the generation of the device; a rate that the name states replaces the nominal
    one, and makes any link a known one. A name that matches nothing gives `UNKNOWN_INTRA` or `UNKNOWN_INTER`.
    """
    return next(iter(link_classes(interconnect, device, between_nodes)))


def link_classes(interconnect: str, device: str, between_nodes: bool) -> tuple[LinkClass, ...]:
    """All classes of one tier that a name holds (`NVLink-bridge+PCIe`), one of each family, best known first."""
    parts = [(_RATE.sub("", part), _RATE.search(part)) for part in interconnect.lower().split("+")]
    name = "+".join(words for words, _ in parts)
    found: dict[str, LinkClass] = {}
    for link in LINK_CLASSES:
        family = link.name.split("-")[0].rstrip("0123456789")
        if family not in found and link.between_nodes == between_nodes and re.search(link.pattern, name):
            rates = [float(rate[1]) * 1e9 for words, rate in parts if rate and re.search(link.pattern, words)]
            own = _by_device(device.lower(), link, name)
            found[family] = replace(own, bandwidth_bytes_per_s=rates[0]) if rates and rates[0] > 0 else own
    return tuple(found.values()) or (_unnamed(parts, device.lower(), between_nodes),)


def _unnamed(parts: list[tuple[str, re.Match[str] | None]], device: str, between_nodes: bool) -> LinkClass:
    """The class of a tier whose links nobody knows by name, at the rate stated (inside a node first, then between) or,
    of a network, at that of the adapters that such devices come with."""
    usual = next(
        (rate for pattern, rate in _ADAPTER if re.search(pattern, device)), UNKNOWN_INTER.bandwidth_bytes_per_s
    )
    unknown = replace(UNKNOWN_INTER, bandwidth_bytes_per_s=usual) if between_nodes else UNKNOWN_INTRA
    for words, rate in parts[1:] if between_nodes else parts[:1]:
        if rate and float(rate[1]) > 0 and not any(re.search(link.pattern, words) for link in LINK_CLASSES):
            return replace(unknown, bandwidth_bytes_per_s=float(rate[1]) * 1e9, pattern=re.escape(words))
    gbit = re.search(UNNAMED.pattern, "+".join(words for words, _ in parts)) if between_nodes else None
    return replace(UNNAMED, bandwidth_bytes_per_s=float(gbit[1]) / 8 * 1e9) if gbit else unknown


def link_named(name: str) -> LinkClass | None:
    """The class of this name, if there is one."""
    return next((link for link in LINK_CLASSES if link.name == name), UNNAMED if name == UNNAMED.name else None)


def is_network(interconnect: str, device: str) -> bool:
    """Whether a name is known only as a link between nodes: a machine with one device to a node."""
    return is_known(interconnect, device, True) and not is_known(interconnect, device, False)


def is_flat(levels: Sequence[str], device: str) -> bool:
    """Whether every device of a cluster with levels of these names is a node of its own: there is one level, and it is
    known only as a network. Of several the first joins the devices of a node, though by a network's ports (Gaudi)."""
    return len(levels) == 1 and is_network(levels[0], device)


def is_known(interconnect: str, device: str, between_nodes: bool) -> bool:
    """Whether a name tells the links of that tier."""
    return link_class(interconnect, device, between_nodes).pattern != ""


def is_rack(interconnect: str, device: str) -> bool:
    """Whether NVLink joins a whole rack."""
    return "nvl72" in f"{interconnect} {device}".lower()


def states_rate(interconnect: str) -> bool:
    """Whether a name states rates of its own."""
    return _RATE.search(interconnect.lower()) is not None


def _by_device(device: str, link: LinkClass, words: str) -> LinkClass:
    if link.name == "NVLink":
        wanted = next((name for pattern, name in _GENERATION if re.search(pattern, device)), link.name)
        link = next(other for other in LINK_CLASSES if other.name == wanted)
    if link.name == "NVLink4" and "gh200" in device:  # four Grace Hoppers to a node
        return _in_node_of(4, link, words)
    for name, pattern, bandwidth in _OF_DEVICE:
        if name == link.name and re.search(pattern, device):
            # the EFA that Hopper came with keeps the order of lines
            return replace(link, bandwidth_bytes_per_s=bandwidth, lines=link.lines or name == "EFA")
    return link


def _in_node_of(devices: int, link: LinkClass, words: str) -> LinkClass:
    """The link inside a node of so many devices: of NVLink 4, four are joined pair by pair (Grace Hoppers, HGX H100
    4-GPU), more by switches, whichever part of the die they are."""
    if link.name not in ("NVLink4", "NVLink4-mesh") or "4xgh200" in words:
        return link
    wanted = "NVLink4-mesh" if devices <= _PAIRED and "switch" not in words else "NVLink4"
    return replace(next(other for other in LINK_CLASSES if other.name == wanted),
                   bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)  # fmt: skip


_PAIRED: Final = 4
_NODE_OF_FOUR: Final = re.compile(r"slingshot|gh200")


@dataclass(frozen=True)
class Level:
    """One tier of the network."""

    of: LinkClass
    bandwidth: float
    """One-way bytes/s per device when all devices of the tier communicate."""
    adapter: float
    """One-way bytes/s that one rank alone can get."""
    latency_s: float
    slows_at_scale: bool = True

    @property
    def link(self) -> str:
        """Name of the link class."""
        return self.of.name


@dataclass(frozen=True)
class Fabric:
    """A device and the levels of its network, innermost first."""

    device: str
    """Catalog name, or the name as given."""
    node_size: int
    """Devices of a node; 1 where every device is a node of its own."""
    levels: tuple[Level, ...]

    @property
    def flat(self) -> bool:
        """Whether every device is a node of its own (Piz Daint)."""
        return self.node_size == 1

    @property
    def inside(self) -> Level:
        return self.levels[0]

    def key(self, between: bool, level: int = -1) -> str:
        """What measurements of this fabric are filed under: links inside a node, or those and the network's."""
        if not between:
            return self.inside.link
        return self.levels[level].link if self.flat else f"{self.inside.link}+{self.levels[level].link}"

    @classmethod
    def of(cls, cluster: Cluster) -> "Fabric":
        """The fabric of a cluster."""
        names = tuple((x.name, x.bandwidth_bytes_per_s, x.latency_s, x.slows_at_scale) for x in cluster.levels)
        return _fabric(cluster.device.name, cluster.devices_per_node, names)

    @classmethod
    def of_row(
        cls, device: str, interconnect: str, ranks_per_node: float, nics: float = np.nan,
        nic_gbit: float = np.nan, node_size: float = np.nan,
    ) -> "Fabric":  # fmt: skip
        """The fabric that a row of a measurement table tells of, at nominal rates where it states none.

        Adapters (`nics` of `nic_gbit` each per node) count before the interconnect's name.
        """
        return _of_row(device, interconnect, ranks_per_node, nics, nic_gbit, node_size)

    def share_between(self, level: int, ranks_per_node: float, concurrent: float) -> float:
        """One-way bytes/s between nodes that each rank of a group has to itself.

        A level's bandwidth is per device with all devices busy, so a node owns `node_size` times that, which
        `concurrent` groups share. A rank alone gets at most one adapter (or the stated share, where that is
        more): eight adapters serve eight ranks, not one. What crosses several levels gets the narrowest.
        """
        crossed = self.levels[0 if self.flat else 1 : level + 1] or self.levels[-1:]
        per_device = min(x.bandwidth for x in crossed)
        node = per_device * self.node_size
        one_rank = max(per_device, min(self.levels[level].adapter, node))
        return min(node / (concurrent * ranks_per_node), one_rank)

    def carries_lines(self, level: int) -> bool:
        """Whether groups that reach this level may use LL128: all their links carry it, from the devices' own on."""
        return not self.flat and all(x.of.lines for x in self.levels[: level + 1])

    def latency_shift_s(self, level: int, between: bool) -> float:
        """Stated latency beyond the usual one, of the slowest level crossed."""
        crossed = self.levels[0 if self.flat else 1 : level + 1] if between else self.levels[:1]
        return max(x.latency_s - x.of.latency_s for x in crossed or self.levels[-1:])


def device_name(name: str) -> str:
    """Catalog name of a device, or the name itself."""
    return _known_device(name)[0]


@lru_cache(maxsize=512)
def names_of_parts(device: str) -> tuple[str, ...]:
    """Names that parts drive their links alike under, nearest first: those of the device's die with memory as fast
    (which collectives read and write), then all of its die; its own name where it is a part of none."""
    try:
        found = catalog_device(device)
    except UnknownNameError:
        return (device,)
    if not found.die:
        return (found.name,)
    return f"{found.die}@{found.memory_bandwidth_bytes_per_s / 1e9:g}GB/s", found.die


@lru_cache(maxsize=512)
def _known_device(name: str) -> tuple[str, float | None]:
    for known in (name, name.split("(")[0]):
        try:
            found = catalog_device(known)
        except UnknownNameError:
            continue
        return found.name, found.link_bandwidth_bytes_per_s
    return name, None


@lru_cache(maxsize=1024)
def _fabric(device: str, node_size: int, stated: Sequence[tuple[str, float, float, bool]]) -> Fabric:
    flat = is_flat([name for name, *_ in stated], device)
    levels = []
    for index, (name, bandwidth, latency_s, slows_at_scale) in enumerate(stated):
        link = link_class(name, device, flat or index > 0)
        link = link if flat or index else _in_node_of(node_size, link, name.lower())
        adapter = bandwidth if _unknown(link) else link.bandwidth_bytes_per_s
        levels.append(Level(link, bandwidth, adapter, latency_s, slows_at_scale))
    return Fabric(device_name(device), 1 if flat else node_size, tuple(levels))


@lru_cache(maxsize=4096)
def _of_row(
    device: str, interconnect: str, ranks_per_node: float, nics: float, nic_gbit: float, node_size: float
) -> Fabric:
    name = interconnect.lower()
    alone = is_network(interconnect, device)
    size = int(node_size) if node_size >= 1 else _usual_node(name, device)
    size = max(size, int(ranks_per_node))
    outer = link_class(interconnect, device, True)
    adapter = outer.bandwidth_bytes_per_s
    if nic_gbit > 0:
        adapter = nic_gbit / 8 * 1e9
    if nics > size:  # beyond a whole number per device adapters serve storage
        nics -= nics % size
    between = adapter * nics / size if nics > 0 else adapter
    network = Level(outer, between, adapter, outer.latency_s)
    if alone and ranks_per_node < 2:
        return Fabric(device_name(device), 1, (network,))
    inner = link_class(interconnect, device, False)
    known, figure = _known_device(device)
    by_name = states_rate(interconnect) or _unknown(inner) or "bridge" in inner.name
    bandwidth = figure if figure and not by_name else inner.bandwidth_bytes_per_s
    if inner.name.startswith("PCIe"):  # a device may have fewer lanes than its slot, or bridges beside it
        bandwidth = min(bandwidth, inner.bandwidth_bytes_per_s)
    adapter = bandwidth if _unknown(inner) else inner.bandwidth_bytes_per_s
    return Fabric(known, size, (Level(inner, bandwidth, adapter, inner.latency_s), network))


def _usual_node(name: str, device: str) -> int:
    if is_rack(name, device):
        return NVL72_DEVICES
    return 4 if _NODE_OF_FOUR.search(name) or _NODE_OF_FOUR.search(device.lower()) else DEVICES_PER_NODE


def _unknown(link: LinkClass) -> bool:
    return not link.pattern
