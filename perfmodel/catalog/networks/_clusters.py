"""Builds clusters from descriptions in words."""

from dataclasses import replace
from typing import Final

from perfmodel.catalog._devices import device
from perfmodel.catalog.entries import package_tables
from perfmodel.catalog.networks._network import NETWORK_WORDS, Network
from perfmodel.catalog.networks._tokens import makers_of_links, pcie_generation, rack_size
from perfmodel.catalog.networks._words import read_network
from perfmodel.errors import PerfModelError
from perfmodel.spec import Cluster, Device, NetworkLevel

UNBOUNDED = 1 << 20
"""Least number of devices of the outermost level if no size is stated."""
DEVICES_PER_NODE: Final = 8
"""Devices of a server if their number is not stated."""
NVL72_DEVICES: Final = 72
"""Devices that one NVLink domain joins, in trays of four."""
NVL_TRAY_DEVICES: Final = 4
LARGEST_NVLINK_NODE: Final = 16
"""Devices of the largest server that NVSwitch joins (DGX-2); more are a rack."""
LARGEST_TPU_HOST = 8
"""Chips of the largest TPU host (v5e, Google Cloud TPU documentation); larger slices join several
hosts."""

_LATENCY_S = {
    "nvlink": 2e-6,
    "infinity": 2e-6,
    "xgmi": 2e-6,
    "ici": 1e-6,
    "pcie": 5e-6,
    "infiniband": 5e-6,
    "edr": 5e-6,
    "hdr": 5e-6,
    "ndr": 5e-6,
    "xdr": 5e-6,
    "roce": 6e-6,
    "omni-path": 5e-6,
    "omnipath": 5e-6,
    "slingshot": 5e-6,
    "efa": 15e-6,
    "dcn": 50e-6,
    "ethernet": 25e-6,
    "gbe": 25e-6,
    "tcp": 25e-6,
    "aries": 1.5e-6,
}
"""Latency of one hop of a collective: NCCL's tuning tables for NVLink, PCIe and verbs networks,
published message latencies for EFA (SRD) and data-centre Ethernet. The first word found counts."""
_DEFAULT_LATENCY_S = 5e-6

_EFA_NODE_GBIT: Final = {
    "Volta": 100,
    "Ampere": 400,
    "Ada": 400,
    "Hopper": 3200,
    "Blackwell": 3200,
    "Trainium1": 800,
    "Trainium2": 3200,
}
"""EC2 p3dn; p4d; g6e; p5 and p6; trn1; trn2 (AWS instance type pages)."""

_REFERENCE_GBIT = {
    "Pascal": 100,
    "Volta": 50,
    "Ampere": 200,
    "Hopper": 400,
    "Blackwell": 400,
    "CDNA2": 200,
    "CDNA3": 400,
    "CDNA4": 400,
    "Gaudi2": 300,
    "Gaudi3": 600,
    "TPU-v2": 25,
    "TPU-v3": 25,
    "TPU-v4": 50,
    "TPU-v5e": 25,
    "TPU-v5p": 50,
    "Trillium": 100,
    "Ironwood": 100,
    "XeHPC": 133,
    "DaVinci1": 100,
    "DaVinci2": 200,
    "Trainium1": 50,
    "Trainium2": 200,
}
"""Gbit/s per device of the maker's reference system: DGX-1 (4 EDR for 8), DGX A100, H100 and B200
data sheets; three ports of each Gaudi (HLS-Gaudi2 and Gaudi 3 server documentation); TPU
data-centre network per chip (Google Cloud TPU documentation); Aurora's eight Slingshot-11 for
twelve tiles; Huawei Atlas 800 9000 and 800T A2; trn1 and trn2 of EC2."""
_BLACKWELL_ULTRA_GBIT = 800
_OTHER_GBIT = 12.5
"""100 Gbit/s Ethernet shared by a server of 8, for devices without a reference system."""
_PCIE_GB = {
    "Kepler": 15.75,
    "Pascal": 15.75,
    "Volta": 15.75,
    "Turing": 15.75,
    "Ampere": 31.5,
    "Ada": 31.5,
}
_PCIE_GENERATION_GB: Final = {3: 15.75, 4: 31.5, 5: 63.0, 6: 126.0}
"""One-way GB/s of 16 lanes, by the device's architecture and by generation."""
_MOST_ADAPTERS_PER_HOST_LINK: Final = 2.5
"""Ratio of the adapters' rate to a device's host link above which the words must be wrong: a switch
of the next generation of PCIe may sit between both (ConnectX-8 of 100 GB/s beside B300), a second
adapter per device may not matter."""

EFA_RANK_LATENCY_S = 33e-6
"""Extra time per rank of all-reduces, all-gathers and reduce-scatters over AWS EFA, beyond the
collective model: medians of 256 MB over 2 to 64 nodes in a shared cluster (Ultra-Scale Playbook,
cluster measurements), of which `validate/networks.py` takes the median. It hardly depends on the
number of ranks. No step time went into it."""

OMNI_PATH_DELIVERED = 0.36
OMNI_PATH_CONTENTION = 0.29
"""Share of the links' rate that collectives of NCCL get over Omni-Path, and the exponent of the
number of nodes, in addition to the collective model: the all-reduces that BigScience timed on Jean
Zay (10.6 and 6.8 GB/s of 50 with V100 on 4 and 16 nodes, 5.1 with A100 on 4), fitted by
`validate/networks.py`. No step time went into it."""
_SHARED = {
    "efa": (1.0, 0.0, EFA_RANK_LATENCY_S),
    "omni-path": (OMNI_PATH_DELIVERED, OMNI_PATH_CONTENTION, 0.0),
    "omnipath": (OMNI_PATH_DELIVERED, OMNI_PATH_CONTENTION, 0.0),
}
"""Share of the nominal rate, contention, and latency per rank of networks that collectives were
measured on."""


REFERENCE_NETWORK = "reference system of the device"
"""Source text of a network without a stated rate."""
ADAPTERS_NOT_STATED = "the stated rate of one adapter is taken as that of the node"
"""Source text of a network with a stated rate but an unknown number of adapters."""


def cluster_for(
    device_name: str,
    devices_per_node: int | None,
    intra_link: str,
    inter_link: str | Network,
    nics_per_node: int | None = None,
    nic_gbit_per_s: float | None = None,
) -> Cluster:
    """The most likely cluster for a published table's words; empty words are allowed.

    Rules, per device and one way:

    1. Between nodes, rates are taken at their word (`read_network`): `4x 100 Gb RoCE per node` is
       400 Gbit/s shared by the node's devices, `400 Gbps RoCE per GPU` is each device's own; a rate
       with no `per` is the node's. `nics_per_node` and `nic_gbit_per_s` win over words.
    2. A count of links without a rate has the network's link rate: EDR and Omni-Path 100, HDR and
       Slingshot-11 200, NDR 400, XDR 800 Gbit/s. A named InfiniBand or Slingshot rate without a
       count is one link per device.
    3. EFA without a rate: 400 Gbit/s per node with A100 (p4d), 3,200 with H100 and later (p5). This
       rate or a device's share of it, stated without a count of adapters, is the same.
       Omni-Path delivers `OMNI_PATH_DELIVERED` of its rate.
    4. Anything else, and nothing: the reference system of the device (DGX and the like).
    5. `none ...`: a single node (for TPUs: a single slice).
    6. Inside a node: the device's own link, `PCIe` the host link. `NVL72`, in words or a device's
       name, joins 72; adapters of a node are then those of its trays of `devices_per_node` devices.
    7. Of networks for several purposes (`Compute: ..., Management: ...`) the one for computing
       counts.
    8. On TPUs the node is the slice: a whole pod where only the host's size is stated. Its torus
       counts as one level at the rate of all links together, which is exact for collectives over
       the whole slice and optimistic along one axis.

    Raises:
        UnknownNameError: for a device that the catalog does not know.
        PerfModelError: for a node size below 1; for links or adapters that the device cannot have.
    """
    accelerator = device(device_name)
    if devices_per_node is not None and devices_per_node < 1:
        raise PerfModelError(f"devices_per_node must be at least 1, got {devices_per_node}")
    network = read_network(inter_link) if isinstance(inter_link, str) else inter_link
    # First the numbers of the table, then the device's own ports: both change what the words mean.
    network = _on_ports(accelerator, network.with_adapters(nics_per_node, nic_gbit_per_s))
    # Either description may name the rack.
    rack = max(rack_size(intra_link), network.domain)
    _check_links(accelerator, devices_per_node, intra_link, rack)
    # Gaudi's links inside a node are ports for RoCE too, whose latency they have.
    is_gaudi = accelerator.architecture.startswith("Gaudi")
    inner = _inner_level(
        accelerator,
        devices_per_node,
        f"{intra_link} RoCE".strip() if is_gaudi else intra_link,
        rack,
    )
    node = inner.size
    if _is_rack(accelerator, rack):
        # Adapters are stated for a tray, not for the rack.
        if devices_per_node and devices_per_node < inner.size:
            node = devices_per_node
        else:
            node = NVL_TRAY_DEVICES
    outer = None if network.absent else _outer_level(accelerator, network, node, inner.size)
    inter_words = inter_link if isinstance(inter_link, str) else network.words
    stated_links = "; ".join(text.strip() for text in (intra_link, inter_words) if text.strip())
    return Cluster(
        name=f"{accelerator.name} x{inner.size}" + (f" ({stated_links})" if stated_links else ""),
        device=accelerator,
        levels=(inner,) if outer is None else (inner, outer),
        source="from the words of a published table",
    )


def devices_of_adapters(cluster: Cluster) -> int:
    """Devices that share the network adapters of a node; of a tray, in a rack of NVLink."""
    size = cluster.levels[0].size
    return size if size <= LARGEST_NVLINK_NODE else NVL_TRAY_DEVICES


def network_level(
    accelerator: Device,
    devices_per_node: int,
    network: Network,
    nics_per_node: int | None,
    nic_gbit_per_s: float | None,
) -> NetworkLevel:
    """The network between nodes of a device, from the words and columns that `cluster_for` reads.

    Raises:
        PerfModelError: adapters that the device cannot have.
    """
    network = _on_ports(accelerator, network.with_adapters(nics_per_node, nic_gbit_per_s))
    node = NVL_TRAY_DEVICES if _is_rack(accelerator, network.domain) else devices_per_node
    return _outer_level(accelerator, network, node, devices_per_node)


def stated_network(name: str, as_stated: str) -> tuple[Network, tuple[str, ...]]:
    """Merge two descriptions of a network, and list their contradictions.

    The description with more detail on adapters and rates is used, or the first if both have as
    much. A name that it lacks comes from the other.
    """
    first = read_network(name)
    second = read_network(as_stated)
    if first.absent:
        return first, ()
    chosen, secondary = (
        (second, first) if second.detail > first.detail or second.detail == 2 else (first, second)
    )
    # Two full descriptions of eight devices per node must give the same rate
    # per device; the source decides which is right.
    contradictions = ()
    rates = {network.gbit_per_s_per_device(8) for network in (chosen, secondary)}
    if chosen.detail == secondary.detail == 2 and len(rates) > 1:
        contradictions = (
            f"inter_link says {first.words!r} and inter_link_as_stated {second.words!r}",
        )
    if not chosen.family and secondary.family:
        chosen = replace(chosen, family=secondary.family, generation=secondary.generation)
    unread = tuple(dict.fromkeys((*first.not_understood, *second.not_understood)))
    merged = replace(
        chosen,
        domain=max(first.domain, second.domain),
        not_understood=unread,
        other_counts=first.other_counts + second.other_counts,
        other_gbit_per_s=first.other_gbit_per_s + second.other_gbit_per_s,
    )
    return merged, contradictions


def _on_ports(accelerator: Device, network: Network) -> Network:
    """Gaudi's ports are adapters for RoCE v2 on the die, though tables call them Ethernet (Intel
    Gaudi 2 and 3 white papers)."""
    if (
        accelerator.architecture.startswith("Gaudi")
        and not network.absent
        and network.family in ("", "Ethernet")
    ):
        return replace(network, family="RoCE")
    return network


def _is_rack(accelerator: Device, rack: int) -> bool:
    """Whether NVLink joins trays beyond a node."""
    return rack > LARGEST_NVLINK_NODE or "nvl72" in accelerator.name.lower()


def _check_links(
    accelerator: Device, devices_per_node: int | None, intra_link: str, rack: int
) -> None:
    """Refuse links within a node that the device does not have.

    Raises:
        PerfModelError: naming the words and what the device has.
    """
    # A row that says NVLink of an MI300X has a wrong device or a wrong link; either way its figures
    # mean nothing.
    makers = makers_of_links(intra_link) - {accelerator.vendor}
    if makers:
        maker = min(makers)
        raise PerfModelError(
            f"intra_link {intra_link!r}: only devices of {maker} have such links, and {accelerator.name} is made by "
            f"{accelerator.vendor}; correct the device or the link, or leave intra_link empty for the device's own"
        )
    # Only boards with a Grace or Vera CPU are built into racks of NVLink.
    if rack > LARGEST_NVLINK_NODE and not accelerator.name.startswith(("GB", "VR")):
        raise PerfModelError(
            f"NVL{rack}: {accelerator.name} has no NVLink racks of {rack}; name GB200 or GB300, or leave the rack out"
        )
    if rack and devices_per_node and devices_per_node > rack:
        raise PerfModelError(
            f"devices_per_node={devices_per_node} exceeds the devices of NVL{rack}; correct one of them"
        )


def _inner_level(
    accelerator: Device, devices_per_node: int | None, links: str, rack: int
) -> NetworkLevel:
    """The network within a node, a rack of NVLink or a slice of TPUs."""
    text = links.lower()
    # The innermost level joins a rack of NVLink or a slice of TPUs as it joins a server: all links
    # have one rate.
    size = devices_per_node or DEVICES_PER_NODE
    if _is_rack(accelerator, rack):
        size = max(rack, NVL72_DEVICES) if "nvl72" in accelerator.name.lower() else rack
    elif accelerator.vendor == "Google" and (
        devices_per_node is None or (not text and size <= LARGEST_TPU_HOST)
    ):
        size = _largest_slice(accelerator) or size
    # A data sheet's link rate is of the SXM part; the same chip on a card talks to its neighbours
    # over PCIe.
    bandwidth = accelerator.link_bandwidth_bytes_per_s
    generation = pcie_generation(text)
    if generation is not None and "nvlink" not in text:
        text = f"{text} pcie"
        bandwidth = min(bandwidth, _host_link_gb_per_s(accelerator, generation) * 1e9)
    name = links.strip() or ("ICI" if accelerator.vendor == "Google" else "scale-up link")
    fallback = "ici" if accelerator.vendor == "Google" else "nvlink"
    return NetworkLevel(
        name=name,
        size=size,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=_latency_s(text, _LATENCY_S[fallback]),
        source=accelerator.source,
    )


def _host_link_gb_per_s(accelerator: Device, generation: int) -> float:
    """GB/s of a device's PCIe, of a generation (0: not stated) or else that of its architecture."""
    if generation in _PCIE_GENERATION_GB:
        return _PCIE_GENERATION_GB[generation]
    return _PCIE_GB.get(accelerator.architecture, _PCIE_GENERATION_GB[5])


def _largest_slice(accelerator: Device) -> int:
    """Number of devices of the largest slice in the catalog; 0 if there is none."""
    # The catalog's pods of this chip: a slice can be as large as these.
    sizes = [0]
    for tables in package_tables("clusters").values():
        for entry in tables.values():
            name = entry.get("device")
            if isinstance(name, str) and device(name) == accelerator:
                sizes.append(entry["levels"][0]["size"])
    return max(sizes)


def _outer_level(accelerator: Device, network: Network, node: int, domain: int) -> NetworkLevel:
    """The network between nodes, at the stated rate or that of the device's reference system.

    Args:
        node: devices that share the adapters of a node.
        domain: devices that the level below joins.
    """
    # Seventy-two adapters "per node" of an NVL72 are the whole rack's: a tray of four has four to
    # eight.
    if (
        network.scope == "node"
        and network.adapters is not None
        and network.adapters > 2 * node < domain
    ):
        network = replace(network, scope="rack")
    gbit = network.gbit_per_s_per_device(node, domain)
    source = "stated by the table"
    # No adapter is so fast that the device cannot take a fraction of it: such a rate is the node's.
    if network.is_adapter_rate and _can_take(accelerator, network.gbit_per_s or 0.0):
        source = ADAPTERS_NOT_STATED
    # EFA is not a link with a rate of its own: the instance type says how much a node gets, and the
    # device tells the type. A rate alone that is the instance's, or a device's share of it, says
    # the same; it is no adapter's of which there may be several.
    instance_gbit = _EFA_NODE_GBIT.get(accelerator.architecture, 400)
    device_gbit = instance_gbit / (node if node <= LARGEST_NVLINK_NODE else DEVICES_PER_NODE)
    is_of_instance = gbit is None or (
        network.is_adapter_rate and network.gbit_per_s in (instance_gbit, device_gbit)
    )
    if network.family == "AWS EFA" and is_of_instance:
        gbit = device_gbit
        source = "AWS EC2 instance pages"
    elif gbit is None:
        gbit = float(_reference_gbit(accelerator))
        source = REFERENCE_NETWORK
        # A stated number of adapters counts, though their rate is the reference system's.
        if network.adapters is not None:
            network = replace(network, gbit_per_s=gbit)
            gbit = network.gbit_per_s_per_device(node, domain) or gbit
        elif network.family == "InfiniBand":
            network = replace(network, gbit_per_s=gbit, scope="device").with_adapters(None, gbit)
    _check_adapters(accelerator, network, gbit)
    # The name keeps the network's words, since collectives measured on networks are looked up by
    # it.
    name = network.words if network.family or network.gbit_per_s else "scale-out network"
    shared = next(
        (rates for word, rates in _SHARED.items() if word in name.lower()), (1.0, 0.0, 0.0)
    )
    delivered, contention, rank_latency_s = shared
    return NetworkLevel(
        name=name,
        # Whole domains, as a level must be a multiple of the one below.
        size=-(-UNBOUNDED // domain) * domain,
        bandwidth_bytes_per_s=gbit * 1e9 / 8 * delivered,
        latency_s=_latency_s(
            name.lower(),
            _LATENCY_S["dcn"] if accelerator.vendor == "Google" else _DEFAULT_LATENCY_S,
        ),
        source=source,
        contention=contention,
        rank_latency_s=rank_latency_s,
    )


def _check_adapters(accelerator: Device, network: Network, gbit: float) -> None:
    """Refuse adapters that are much faster than a device's link to its host.

    Raises:
        PerfModelError: naming both rates.
    """
    # Adapters reach a device over PCIe; a rate far above it was stated in another unit.
    if _can_take(accelerator, gbit):
        return
    host = accelerator.host_bandwidth_bytes_per_s or 0.0
    raise PerfModelError(
        f"network {network.words!r}: {gbit / 8:g} GB/s per device exceed the {host / 1e9:g} GB/s between "
        f"{accelerator.name} and its host; check bits (Gb/s) against bytes (GB/s): {NETWORK_WORDS}"
    )


def _can_take(accelerator: Device, gbit: float) -> bool:
    """Whether a device's link to its host is fast enough for adapters of this rate."""
    host = accelerator.host_bandwidth_bytes_per_s
    has_own_ports = accelerator.architecture.startswith("Gaudi")
    if host is None or has_own_ports:
        return True
    return gbit * 1e9 / 8 <= host * _MOST_ADAPTERS_PER_HOST_LINK


def _reference_gbit(accelerator: Device) -> float:
    # B300 and GB300 come with ConnectX-8, twice the rate of their generation.
    if "300" in accelerator.name and accelerator.architecture == "Blackwell":
        return _BLACKWELL_ULTRA_GBIT
    return _REFERENCE_GBIT.get(accelerator.architecture, _OTHER_GBIT)


def _latency_s(text: str, default: float) -> float:
    return next((s for word, s in _LATENCY_S.items() if word in text), default)
