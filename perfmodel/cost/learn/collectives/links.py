"""Link classes: nominal figures by interconnect name; and the constants of links that collectives
take.

A name may state the rate of its links: `NVLink4 NVSwitch@450GB/s + AWS EFA@50GB/s` (one way per
device, the tier inside a node first). Nominal figures are the scale that fitted efficiencies refer
to.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from perfmodel.display import shorten_reprs

Array = Any
"""A NumPy or JAX array, or a Python number."""
REFERENCE_PEERS: Final = 7
"""Peers in a node of eight; larger nodes are switched, their bandwidth grows no further."""


@dataclass(frozen=True)
class LinkClass:
    """A generation of links; bandwidth and latency are nominal, one way, per device or adapter."""

    name: str
    """Name of the class: a family and its generation."""
    pattern: str
    """Regular expression over lower-case interconnect names."""
    bandwidth_bytes_per_s: float
    """Nominal rate of one device or adapter, one way."""
    latency_s: float
    """Latency as cluster descriptions usually state it; a cluster that states another moves the
    hop."""
    hop_s: float
    """Expected time of one small message of a collective, software included: the prior of fits."""
    between_nodes: bool = False
    """Whether it joins nodes rather than the devices of one."""
    reduces: bool = False
    """Whether its switches may add up data on the way (NVLS, SHARP): half the volume of an
    all-reduce."""
    mesh: bool = False
    """Direct links between pairs instead of a switch: a rank's bandwidth grows with the peers that
    take part."""
    limited: bool = True
    """Whether it is a link at all: ranks on one host exchange data through memory."""
    lines: bool = False
    """Whether NCCL sends lines of 128 bytes over it (LL128): NVLink since Volta, and networks whose
    adapters sit beside the devices and keep a line's order (NCCL `src/graph/tuning.cc`).
    Slingshot's hang on the host processors, EFA kept no order before Hopper's instances
    (aws-ofi-nccl), Ethernet goes through the host's memory."""
    eager_bytes: float = 1e30
    """Largest message that is sent without asking the receiver first."""

    @property
    def bridged(self) -> bool:
        """Whether devices share a bridge of their host, instead of a switch or links between
        pairs."""
        return self.name.startswith("PCIe")

    @property
    def known(self) -> bool:
        """Whether the links were identified, by their name or a stated rate."""
        return self.pattern != ""


def _device_links(
    name: str,
    pattern: str,
    bandwidth_bytes_per_s: float,
    latency_s: float = 2e-6,
    hop_s: float = 1e-6,
    **traits: bool,
) -> LinkClass:
    """Links between the devices of a node."""
    return LinkClass(name, pattern, bandwidth_bytes_per_s, latency_s, hop_s, **traits)


def _host_bridge(name: str, pattern: str, bandwidth_bytes_per_s: float) -> LinkClass:
    """A bus of the host, which the devices of a node share."""
    return LinkClass(name, pattern, bandwidth_bytes_per_s, latency_s=5e-6, hop_s=2e-6)


def _network(
    name: str,
    pattern: str,
    bandwidth_bytes_per_s: float,
    latency_s: float = 5e-6,
    hop_s: float = 6e-6,
    eager_bytes: float = 1e30,
    **traits: bool,
) -> LinkClass:
    """A network between nodes."""
    return LinkClass(
        name,
        pattern,
        bandwidth_bytes_per_s,
        latency_s,
        hop_s,
        between_nodes=True,
        eager_bytes=eager_bytes,
        **traits,
    )


# The first class of a family that matches a name counts, so special names stand before general
# ones.
LINK_CLASSES: Final = (
    _device_links("NVLink1", r"nvlink[- ]?1", 80e9, mesh=True),
    _device_links(
        "NVLink2-switch",
        r"nvlink[- ]?2.*nvswitch|nvswitch.*nvlink[- ]?2|nvswitch[- ]?v100",
        150e9,
        lines=True,
    ),
    _device_links("NVLink2", r"nvlink[- ]?2", 150e9, mesh=True, lines=True),
    _device_links("NVLink3-mesh", r"4xa100", 300e9, mesh=True, lines=True),
    _device_links("NVLink3", r"nvlink[- ]?3", 300e9, lines=True),
    _device_links("NVLink4-mesh", r"4xgh200", 450e9, mesh=True, lines=True),
    _device_links("NVLink4", r"nvlink[- ]?4", 450e9, reduces=True, lines=True),
    _device_links("NVLink5", r"nvlink[- ]?5|nvl72", 900e9, reduces=True, lines=True),
    _device_links("NVLink-bridge", r"bridge", 56e9),
    _device_links("XGMI", r"xgmi|infinity", 448e9, hop_s=2e-6, mesh=True),
    _device_links("ICI", r"\bici\b|tpu", 100e9, latency_s=1e-6),
    _host_bridge("PCIe3", r"pcie[- ]?(gen)?3", 16e9),
    _host_bridge("PCIe4", r"pcie[- ]?(gen)?4", 32e9),
    _host_bridge("PCIe5", r"pcie[- ]?(gen)?5", 64e9),
    _host_bridge("PCIe", r"pcie|upi|qpi", 16e9),
    _network("InfiniBand-FDR", r"fdr", 7e9, reduces=True),
    _network("InfiniBand-EDR", r"edr|infiniband.*100", 12.5e9, reduces=True, lines=True),
    _network("InfiniBand-NDR", r"ndr", 50e9, reduces=True, lines=True),
    _network("InfiniBand-XDR", r"xdr", 100e9, reduces=True, lines=True),
    _network("InfiniBand-HDR", r"hdr|infiniband|\bib\b", 25e9, reduces=True, lines=True),
    _network("OmniPath", r"omni", 12.5e9),
    _network("Aries", r"aries|cray", 10e9, latency_s=1.5e-6),
    _network("Slingshot", r"slingshot", 25e9, eager_bytes=4096),
    _network("RoCE", r"roce", 25e9, latency_s=6e-6, hop_s=10e-6, lines=True),
    _network("EFA", r"efa|elastic fabric", 12.5e9, latency_s=15e-6, hop_s=30e-6),
    _device_links("loopback", r"loopback", 5e9, latency_s=50e-6, hop_s=30e-6, limited=False),
    _network(
        "emulated", r"gloo|emulated|veth", 12.5e9, latency_s=25e-6, hop_s=30e-6, limited=False
    ),
    _network(
        "Ethernet", r"ethernet|gcp|gbe|tcp|socket|dcn|fastrak", 12.5e9, latency_s=25e-6, hop_s=30e-6
    ),
    _device_links("NVLink", r"nvlink|nvswitch", 300e9, lines=True),
)
"""Sources: the vendors' data sheets (NVLink and all Infinity Fabric links of a GPU one way; PCIe
x16; InfiniBand and Ethernet per port)."""

UNKNOWN_INTRA: Final = _device_links("unknown-intra", "", 25e9, hop_s=2e-6)
UNNAMED: Final = _network("unnamed-network", r"(\d{2,4}) ?g(?:b|$|[^a-z0-9])", 50e9, lines=True)
"""A network that is known by the rate of its adapters alone (`RDMA-400G`)."""
UNKNOWN_INTER: Final = _network(
    "unknown-inter", "", 12.5e9, latency_s=10e-6, hop_s=20e-6, lines=True
)

_GENERATION: Final = (
    (r"p100", "NVLink1"),
    (r"v100", "NVLink2"),
    (r"a100|a800", "NVLink3"),
    (r"g?h[128]00|h20|h800", "NVLink4"),
    (r"[bg]b?[23]00", "NVLink5"),
)
"""Link class of a device whose links are named without their generation."""
_OF_DEVICE: Final = (
    ("XGMI", r"mi2\d\d", 200e9),
    ("XGMI", r"mi35\d", 537.6e9),
    ("NVLink-bridge", r"a100|h100|h200", 300e9),
    ("NVLink-bridge", r"a30\b", 100e9),
    ("PCIe5", r"b60", 31.5e9),
    ("EFA", r"h[12]00|[bg]b?[23]00", 50e9),
)
"""Links of one name whose rate depends on the device: class, device, bytes/s (data sheets: MI200
die to die, MI350 seven links of 76.8 GB/s, bridges of A100 and H100 PCIe, B60 with eight PCIe
lanes, EC2 p5)."""
_ADAPTER: Final = (
    (r"b300", 100e9),
    (r"h[12]00|h20\b|h800|gh200|b200|mi3\d\d", 50e9),
    (r"a100|a800|mi2\d\d", 25e9),
)
"""One-way bytes/s of the network adapter of each device in the vendors' own systems (DGX A100: HDR,
DGX H100, B200 and GB200 NVL72: NDR, B300: XDR; MI300X platforms: 400 Gbit/s)."""
_PAIRED: Final = 4
"""Devices of a node of NVLink 3 or 4 that are joined pair by pair at most."""
TRAY: Final = 4
"""Devices of a tray, of which an NVL72 rack has eighteen."""
_RATE: Final = re.compile(r"@\s*(\d+\.?\d*(?:e[-+]?\d+)?)\s*gb/s")
"""A rate that a name states: `NVLink4@450GB/s`."""


def link_class(interconnect: str, device: str, between_nodes: bool) -> LinkClass:
    """The class of one tier of an interconnect name; mixed names
    (`NVLink4-intra+Slingshot11-inter`) hold both.

    A bare `NVLink` or `NVSwitch` takes the generation of the device; a rate that the name states
    replaces the nominal one, and makes any link a known one. A name that matches nothing gives
    `UNKNOWN_INTRA` or `UNKNOWN_INTER`.
    """
    return next(iter(link_classes(interconnect, device, between_nodes)))


def link_classes(interconnect: str, device: str, between_nodes: bool) -> tuple[LinkClass, ...]:
    """All classes of one tier that a name holds (`NVLink-bridge+PCIe`), one of each family, best
    known first."""
    parts = [
        _NamePart(_RATE.sub("", part), _RATE.search(part))
        for part in interconnect.lower().split("+")
    ]
    name = "+".join(part.name for part in parts)
    links: dict[str, LinkClass] = {}
    for link in LINK_CLASSES:
        # one generation of each family of links: the first that matches, as the list goes from
        # special to general
        family = link.name.split("-")[0].rstrip("0123456789")
        if (
            family in links
            or link.between_nodes != between_nodes
            or not re.search(link.pattern, name)
        ):
            continue
        rates = [
            part.bytes_per_s for part in parts if part.rate and re.search(link.pattern, part.name)
        ]
        links[family] = _by_device(device.lower(), link, name)
        if rates and rates[0] > 0:
            links[family] = replace(links[family], bandwidth_bytes_per_s=rates[0])
    return tuple(links.values()) or (_unnamed(parts, device.lower(), between_nodes),)


class _NamePart(NamedTuple):
    """One of the links that a name holds, in lower case."""

    name: str
    """Without its rate."""
    rate: re.Match[str] | None
    """The rate that it states, if any, in GB/s."""

    @property
    def bytes_per_s(self) -> float:
        """The stated rate; 0 where there is none."""
        return float(self.rate[1]) * 1e9 if self.rate else 0.0


def _unnamed(parts: list[_NamePart], device: str, between_nodes: bool) -> LinkClass:
    """The class of a tier whose links have no known name, by the stated rate (inside a node first,
    then between nodes) or, for a network, by the rate of the adapters that such devices come
    with."""
    unknown = UNKNOWN_INTRA
    if between_nodes:
        rates = (rate for pattern, rate in _ADAPTER if re.search(pattern, device))
        unknown = replace(
            UNKNOWN_INTER, bandwidth_bytes_per_s=next(rates, UNKNOWN_INTER.bandwidth_bytes_per_s)
        )

    # a stated rate makes any link a known one, whatever it is called
    for part in parts[1:] if between_nodes else parts[:1]:
        has_name = any(re.search(link.pattern, part.name) for link in LINK_CLASSES)
        if part.bytes_per_s > 0 and not has_name:
            return replace(
                unknown, bandwidth_bytes_per_s=part.bytes_per_s, pattern=re.escape(part.name)
            )

    # a network told by the rate of its adapters: `RDMA-400G`
    full_name = "+".join(part.name for part in parts)
    gbit = re.search(UNNAMED.pattern, full_name) if between_nodes else None
    return replace(UNNAMED, bandwidth_bytes_per_s=float(gbit[1]) / 8 * 1e9) if gbit else unknown


def is_network(interconnect: str, device: str) -> bool:
    """Whether the catalog knows a name only as a link between nodes, so that each node has a single
    device."""
    return is_known(interconnect, device, between_nodes=True) and not is_known(
        interconnect, device, between_nodes=False
    )


def is_flat(levels: Sequence[str], device: str) -> bool:
    """Whether every device is a node by itself: the cluster has one level, whose name is known only
    as a network.

    The first of several levels always joins the devices of a node, even over ports of a network
    (Gaudi).
    """
    return len(levels) == 1 and is_network(levels[0], device)


def is_known(interconnect: str, device: str, between_nodes: bool) -> bool:
    """Whether a name identifies the links of that tier."""
    return link_class(interconnect, device, between_nodes).known


def is_rack(interconnect: str, device: str) -> bool:
    """Whether NVLink joins a whole rack."""
    return "nvl72" in f"{interconnect} {device}".lower()


def states_rate(interconnect: str) -> bool:
    """Whether a link's name includes a rate."""
    return _RATE.search(interconnect.lower()) is not None


def _by_device(device: str, link: LinkClass, interconnect: str) -> LinkClass:
    """The class with what follows from the device: its generation, or the rate of links that share
    a name."""
    if link.name == "NVLink":
        generation = next(
            (name for pattern, name in _GENERATION if re.search(pattern, device)), link.name
        )
        link = _class_named(generation)
    # four Grace Hoppers to a node
    if link.name == "NVLink4" and "gh200" in device:
        return in_node_of(4, link, interconnect)
    for name, pattern, bandwidth in _OF_DEVICE:
        if name == link.name and re.search(pattern, device):
            # the EFA that Hopper came with keeps the order of lines
            return replace(link, bandwidth_bytes_per_s=bandwidth, lines=link.lines or name == "EFA")
    return link


def in_node_of(devices: int, link: LinkClass, interconnect: str) -> LinkClass:
    """The link inside a node, by its number of devices: NVLink 3 and 4 join up to four in pairs
    (Grace Hopper, HGX A100 and HGX H100 4-GPU), and more by switches."""
    # four to a node under a name of their own are a mesh already
    generation = link.name.removesuffix("-mesh")
    if generation not in ("NVLink3", "NVLink4") or re.search("4x(gh200|a100)", interconnect):
        return link
    is_mesh = devices <= _PAIRED and "switch" not in interconnect
    joined = _class_named(f"{generation}-mesh" if is_mesh else generation)
    return replace(joined, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s)


def _class_named(name: str) -> LinkClass:
    """The listed class of this name, which must be there."""
    return next(link for link in LINK_CLASSES if link.name == name)


@dataclass(frozen=True)
class TierConstants:
    """Constants of the links of one tier, inside a node or between nodes: how long a message takes
    in each protocol, and at which rate."""

    hop_s: Array
    """Latency of one message in the low-latency protocol."""
    hop_full_s: Array
    """Latency of one message in the bandwidth protocol."""
    hop_line_s: Array
    """Latency of one message in the protocol of lines (LL128)."""
    latency_shift_s: Array
    """Stated latency of a hop beyond the usual one: it is added to the time of every size."""
    usual_latency_s: Array
    """Latency that descriptions of clusters usually give for such links."""
    bytes_per_s: Array
    """Effective rate of one rank in the bandwidth protocol. Inside a node: with `REFERENCE_PEERS`
    peers (with one peer on a shared bridge). Between nodes: its share of the node's links, on two
    nodes."""


@dataclass(frozen=True)
class LinkConstants:
    """Constants of a fabric that the curve of one kind needs; every field, of tiers too, a number
    or arrays of one common shape."""

    inside: TierConstants
    """Links inside a node."""
    between: TierConstants
    """Links between nodes."""
    launch_s: Array
    """Time that no message size and rank count changes: kernel launch, dispatch."""
    hop_switch_s: Array
    """Latency of a reduction in the node's switch, one way between a rank and the switch."""
    post_s: Array
    """Least time of each step of a ring over several nodes, also of steps inside a node, because
    every step posts a message to the network."""
    peer_s: Array
    """Time that each peer on another node adds to one rank of an all-to-all."""
    low_latency_share: Array
    """Bandwidth of the low-latency protocol as a share of the full one."""
    line_share: Array
    """Bandwidth of the protocol of lines as a share of the full one; 0: the links do not carry
    it."""
    peer_exponent: Array
    """How bandwidth inside a node grows with the peers of a rank: 0 behind a switch, towards 1 in a
    mesh of direct links (each pair has its own), negative where ranks share a host bridge."""
    node_exponent: Array
    """Bandwidth between nodes falls as (nodes / 2) to the minus this."""
    neighbour_share: Array
    """Share of the bandwidth that a send to a neighbour keeps on many nodes."""
    eager_bytes: Array
    """Message size between nodes above which the sender first asks the receiver, which doubles the
    latency."""
    tree_share: Array
    """Bandwidth between nodes of a tree that reduces without a switch, relative to a ring's: half
    of its channels' traffic goes through the devices of others (NCCL's `perChMaxTreeBws`)."""
    switch_share: Array
    """Efficiency of reduction in the node's switch relative to a ring's; 0: no such switch."""
    network_share: Array
    """Efficiency of reduction in the network's switches; 0: no such switches."""
    mesh_peers: Array = REFERENCE_PEERS
    """Peers of a rank at which a mesh of direct links reaches its stated rate: all others of its
    node."""
    direct_s: Array = 0.0
    """Fixed time of a direct reduction: its launch, and the work around its barriers."""
    direct_peers: Array = 0.0
    """Most peers whose memory a rank may read in a direct reduction; 0: none."""
    host_s: Array = 0.0
    """Least time from one call to the next if the host launches each; 0: a graph replays them."""


shorten_reprs(__name__)
