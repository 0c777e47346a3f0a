"""Clusters from the words in which published tables describe them."""

import re
from typing import Final

from perfmodel.catalog._devices import device
from perfmodel.catalog._toml import package_tables
from perfmodel.errors import PerfModelError
from perfmodel.spec import Cluster, Device, NetworkLevel

UNBOUNDED = 1 << 20
"""Least number of devices of the outermost level where the words state no size."""
DEVICES_PER_NODE: Final = 8
"""Of servers where nobody says."""
NVL72_DEVICES: Final = 72
"""That one NVLink domain joins, in trays of four."""
LARGEST_TPU_HOST = 8
"""Chips of the largest TPU host (v5e, Google Cloud TPU documentation); slices are joined beyond hosts."""

_LATENCY_S = {
    "nvlink": 2e-6, "infinity": 2e-6, "xgmi": 2e-6, "ici": 1e-6, "pcie": 5e-6, "infiniband": 5e-6, "edr": 5e-6,
    "hdr": 5e-6, "ndr": 5e-6, "xdr": 5e-6, "roce": 6e-6, "omni-path": 5e-6, "omnipath": 5e-6,
    "slingshot": 5e-6, "efa": 15e-6, "dcn": 50e-6, "ethernet": 25e-6, "gbe": 25e-6, "tcp": 25e-6,
}  # fmt: skip
"""One hop of a collective: NCCL's tuning tables for NVLink, PCIe and verbs networks, published
message latencies for EFA (SRD) and data-centre Ethernet. The first word found counts."""
_DEFAULT_LATENCY_S = 5e-6

_LINK_GBIT = {"edr": 100, "hdr": 200, "ndr": 400, "xdr": 800, "omni-path": 100, "omnipath": 100, "slingshot": 200}
"""Gbit/s of one link of a named network."""

_EFA_NODE_GBIT = {"Ampere": 400, "Hopper": 3200, "Blackwell": 3200}
"""EC2 p4d; p5 and later (AWS instance type pages)."""

_REFERENCE_GBIT = {
    "Pascal": 100, "Volta": 50, "Ampere": 200, "Hopper": 400, "Blackwell": 400, "CDNA2": 200, "CDNA3": 400,
    "CDNA4": 400, "Gaudi2": 300, "Gaudi3": 600,
    "TPU-v3": 25, "TPU-v4": 50, "TPU-v5e": 25, "TPU-v5p": 50, "Trillium": 100,
}  # fmt: skip
"""Gbit/s per device of the maker's reference system: DGX-1 (4 EDR for 8), DGX A100, H100 and B200
data sheets; three ports of each Gaudi (HLS-Gaudi2 and Gaudi 3 server documentation); TPU data-centre network per chip
(Google Cloud TPU documentation)."""
_BLACKWELL_ULTRA_GBIT = 800
_OTHER_GBIT = 12.5
"""100 Gbit/s Ethernet shared by a server of 8, for devices that no reference system holds."""
_PCIE_GB = {"Kepler": 15.75, "Pascal": 15.75, "Volta": 15.75, "Turing": 15.75, "Ampere": 31.5, "Ada": 31.5}

EFA_RANK_LATENCY_S = 33e-6
"""What all-reduces, all-gathers and reduce-scatters over AWS EFA take for each rank beyond what the collective model
says: medians of 256 MB over 2 to 64 nodes in a shared cluster (Ultra-Scale Playbook, cluster measurements), of which
`validate/networks.py` takes the median. It hardly depends on the number of ranks. No step time went into it."""

OMNI_PATH_DELIVERED = 0.36
OMNI_PATH_CONTENTION = 0.29
"""Share of the links' rate that collectives of NCCL get over Omni-Path, and the exponent of the number of nodes, beside
the collective model: the all-reduces that BigScience timed on Jean Zay (10.6 and 6.8 GB/s of 50 with V100 on 4 and 16
nodes, 5.1 with A100 on 4), fitted by `validate/networks.py`. No step time went into it."""
_SHARED = {
    "efa": (1.0, 0.0, EFA_RANK_LATENCY_S),
    "omni-path": (OMNI_PATH_DELIVERED, OMNI_PATH_CONTENTION, 0.0),
    "omnipath": (OMNI_PATH_DELIVERED, OMNI_PATH_CONTENTION, 0.0),
}
"""Share of the nominal rate, contention, and latency per rank of networks that collectives were measured on."""


def cluster_for(device_name: str, devices_per_node: int | None, intra_link: str, inter_link: str) -> Cluster:
    """The cluster that a published table's words most likely mean; empty words are allowed.

    Rules, per device and one way:

    1. Between nodes, rates are taken at their word: `4x 100 Gb RoCE per node` is 400 Gbit/s shared
       by the node's devices, `400 Gbps RoCE per GPU` is each device's own; a rate with no `per` is
       the node's.
    2. A count of links without a rate has the network's link rate: EDR and Omni-Path 100, HDR and
       Slingshot-11 200, NDR 400, XDR 800 Gbit/s. A named InfiniBand or Slingshot rate without a
       count is one link per device.
    3. EFA without a rate: 400 Gbit/s per node with A100 (p4d), 3,200 with H100 and later (p5).
       Omni-Path delivers `OMNI_PATH_DELIVERED` of its rate.
    4. Anything else, and nothing: the reference system of the device (DGX and the like).
    5. `none ...`: a single node (for TPUs: a single slice).
    6. Inside a node: the device's own link, `PCIe` the host link. `NVL72`, in words or a device's name, joins 72.
    7. Of networks for several purposes (`Compute: ..., Management: ...`) the one for computing counts, see
       `compute_network`.
    8. TPU: the node is the slice, which is a whole pod where only the host's size is told; its torus counts as one
       level at the rate of all links together, which is right for collectives over the whole slice and optimistic
       along one axis.

    Raises:
        UnknownNameError: for a device that the catalog does not know.
        PerfModelError: for a node size below 1.
    """
    found = device(device_name)
    if devices_per_node is not None and devices_per_node < 1:
        raise PerfModelError(f"devices_per_node must be at least 1, got {devices_per_node}")
    inner = _intra(found, devices_per_node or DEVICES_PER_NODE, _ports(found, intra_link))
    outer = _inter(found, inner.size, _ports(found, compute_network(inter_link)))
    words = "; ".join(w.strip() for w in (intra_link, inter_link) if w.strip())
    return Cluster(
        name=f"{found.name} x{inner.size}" + (f" ({words})" if words else ""),
        device=found,
        levels=(inner,) if outer is None else (inner, outer),
        source="from the words of a published table",
    )


def _ports(found: Device, words: str) -> str:
    """The words for a network: Gaudi's ports are adapters for RoCE v2 on the die, though tables call them Ethernet
    (Intel Gaudi 2 and 3 white papers)."""
    plain = not found.architecture.startswith("Gaudi") or re.search(r"roce|^none", words.lower())
    return words if plain else f"{words} RoCE".strip()


def compute_network(words: str) -> str:
    """The words for the network that the devices' collectives use, of those for all networks of a machine.

    Clauses for computing (`Compute:`, `for EW`) count alone; else all but those for management, storage, north-south
    traffic and the host's own buses, and Ethernet without a rate only where InfiniBand is not named beside it.
    """
    clauses = [clause.strip() for clause in re.split(r"[,;]| and ", words) if clause.strip()]
    if chosen := [_unlabelled(clause) for clause in clauses if _FOR_COMPUTE.search(clause)]:
        return ", ".join(chosen)
    kept = [clause for clause in clauses if not _FOR_OTHERS.search(clause)]
    if any(_INFINIBAND.search(clause) for clause in kept):
        kept = [clause for clause in kept if not _BARE_ETHERNET.fullmatch(clause)]
    return words.strip() if len(kept) == len(clauses) else ", ".join(kept)


def states_rate(words: str) -> bool:
    """Whether the words for a network name a rate, or links of known rate."""
    return _stated_gbit(words.lower(), 1) is not None


def _unlabelled(clause: str) -> str:
    return re.sub(r"^[^:]*:\s*", "", clause)


_FOR_COMPUTE = re.compile(r"^[^:]*\bcompute\b[^:]*:|\bfor ew\b|\beast-west\b", re.IGNORECASE)
_FOR_OTHERS = re.compile(
    r"^[^:]*\b(management|storage|host|in-band|out-of-band)\b[^:]*:"
    r"|\bfor ns\b|\bnorth-south\b|pcie|^gig(a|abit)? ?ethernet$",
    re.IGNORECASE,
)
_INFINIBAND = re.compile(r"infiniband|\bib\b|\b[ehnx]dr\b", re.IGNORECASE)
_BARE_ETHERNET = re.compile(r"(gig(a|abit)? ?)?ethernet", re.IGNORECASE)


def _intra(found: Device, size: int, words: str) -> NetworkLevel:
    text = words.lower()
    if "nvl72" in f"{text} {found.name.lower()}":
        size = NVL72_DEVICES
    if found.vendor == "Google" and not text and size <= LARGEST_TPU_HOST:
        size = _largest_slice(found) or size
    bandwidth = found.link_bandwidth_bytes_per_s
    if "pcie" in text and "nvlink" not in text:
        bandwidth = min(bandwidth, _PCIE_GB.get(found.architecture, 63.0) * 1e9)
    name = words.strip() or ("ICI" if found.vendor == "Google" else "scale-up link")
    fallback = "ici" if found.vendor == "Google" else "nvlink"
    return NetworkLevel(
        name=name,
        size=size,
        bandwidth_bytes_per_s=bandwidth,
        latency_s=_latency_s(text, _LATENCY_S[fallback]),
        source=found.source,
    )


def _largest_slice(found: Device) -> int:
    """Devices of the largest slice of such devices that the catalog has; 0 where it has none."""
    entries = [entry for tables in package_tables("clusters").values() for entry in tables.values()]
    alike = (entry for entry in entries if isinstance(of := entry.get("device"), str) and device(of) == found)
    return max((entry["levels"][0]["size"] for entry in alike), default=0)


def _inter(found: Device, node: int, words: str) -> NetworkLevel | None:
    text = words.lower().strip()
    if text.startswith("none"):
        return None
    gbit = _stated_gbit(text, node)
    source = "stated by the table"
    if gbit is None and "efa" in text:
        gbit, source = _EFA_NODE_GBIT.get(found.architecture, 400) / min(node, 8), "AWS EC2 instance pages"
    if gbit is None:
        gbit, source = _reference_gbit(found), "reference system of the device"
    delivered, contention, rank_latency_s = next((of for word, of in _SHARED.items() if word in text), (1.0, 0.0, 0.0))
    return NetworkLevel(
        name=words.strip() or "scale-out network",
        size=-(-UNBOUNDED // node) * node,
        bandwidth_bytes_per_s=gbit * 1e9 / 8 * delivered,
        latency_s=_latency_s(text, _LATENCY_S["dcn"] if found.vendor == "Google" else _DEFAULT_LATENCY_S),
        source=source,
        contention=contention,
        rank_latency_s=rank_latency_s,
    )


def _stated_gbit(text: str, node: int) -> float | None:
    """Gbit/s per device if the words state a rate or a count of links of known rate."""
    share = 1 if re.search(r"per (gpu|device|chip|accelerator|card)", text) else node
    if many := re.search(r"(\d+)\s*x\s*(?:[a-z][\w-]*\s+)*(\d+)\s*gb", text):
        return int(many[1]) * int(many[2]) / share
    if rate := re.search(r"([\d.]+)\s*(g|t)b(?:ps|it|/s|\b)", text):
        return float(rate[1]) * (1000 if rate[2] == "t" else 1) / share
    link = next((gbit for name, gbit in _LINK_GBIT.items() if name in text), None)
    if link is None:
        return None
    if count := re.search(r"(\d+)(?:x| links?| hcas?| nics?)\b", text):
        return int(count[1]) * link / share
    return link / node if re.search(r"\b(one|single)\b", text) else float(link)


def _reference_gbit(found: Device) -> float:
    if "300" in found.name and found.architecture == "Blackwell":
        return _BLACKWELL_ULTRA_GBIT
    return _REFERENCE_GBIT.get(found.architecture, _OTHER_GBIT)


def _latency_s(text: str, default: float) -> float:
    return next((s for word, s in _LATENCY_S.items() if word in text), default)
