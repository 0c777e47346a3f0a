"""Link classes: nominal figures by interconnect name, the scale that fitted efficiencies refer to."""

import re
from dataclasses import dataclass
from typing import Final


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


LINK_CLASSES: Final = (
    LinkClass("NVLink1", r"nvlink[- ]?1", 80e9, 2e-6, 1e-6),
    LinkClass("NVLink2", r"nvlink[- ]?2|nvswitch[- ]?v100", 150e9, 2e-6, 1e-6),
    LinkClass("NVLink3", r"nvlink[- ]?3", 300e9, 2e-6, 1e-6),
    LinkClass("NVLink4", r"nvlink[- ]?4", 450e9, 2e-6, 1e-6),
    LinkClass("NVLink5", r"nvlink[- ]?5|nvl72", 900e9, 2e-6, 1e-6),
    LinkClass("NVLink-bridge", r"bridge", 56e9, 2e-6, 1e-6),
    LinkClass("XGMI", r"xgmi|infinity", 100e9, 2e-6, 2e-6),
    LinkClass("ICI", r"\bici\b|tpu", 100e9, 1e-6, 1e-6),
    LinkClass("PCIe3", r"pcie[- ]?(gen)?3", 16e9, 5e-6, 2e-6),
    LinkClass("PCIe4", r"pcie[- ]?(gen)?4", 32e9, 5e-6, 2e-6),
    LinkClass("PCIe5", r"pcie[- ]?(gen)?5", 64e9, 5e-6, 2e-6),
    LinkClass("PCIe", r"pcie|upi|qpi", 16e9, 5e-6, 2e-6),
    LinkClass("InfiniBand-FDR", r"fdr", 7e9, 5e-6, 6e-6, True),
    LinkClass("InfiniBand-EDR", r"edr|infiniband.*100", 12.5e9, 5e-6, 6e-6, True),
    LinkClass("InfiniBand-NDR", r"ndr", 50e9, 5e-6, 6e-6, True),
    LinkClass("InfiniBand-XDR", r"xdr", 100e9, 5e-6, 6e-6, True),
    LinkClass("InfiniBand-HDR", r"hdr|infiniband|\bib\b", 25e9, 5e-6, 6e-6, True),
    LinkClass("OmniPath", r"omni", 12.5e9, 5e-6, 6e-6, True),
    LinkClass("Aries", r"aries|cray", 10e9, 1.5e-6, 6e-6, True),
    LinkClass("Slingshot", r"slingshot", 25e9, 5e-6, 8e-6, True),
    LinkClass("RoCE", r"roce", 25e9, 6e-6, 10e-6, True),
    LinkClass("EFA", r"efa|elastic fabric", 12.5e9, 15e-6, 30e-6, True),
    LinkClass("Ethernet", r"ethernet|gcp|gbe|tcp|socket|dcn|fastrak|gloo|loopback", 12.5e9, 25e-6, 30e-6, True),
    LinkClass("NVLink", r"nvlink|nvswitch", 300e9, 2e-6, 1e-6),
)
"""Sources: the vendors' data sheets (NVLink per GPU one way; PCIe x16; InfiniBand and Ethernet per port)."""

UNKNOWN_INTRA: Final = LinkClass("unknown-intra", "", 25e9, 2e-6, 2e-6)
UNKNOWN_INTER: Final = LinkClass("unknown-inter", "", 12.5e9, 10e-6, 20e-6, True)

_GENERATION: Final = (
    (r"p100", "NVLink1"), (r"v100", "NVLink2"), (r"a100|a800", "NVLink3"), (r"h[128]00|h20|h800", "NVLink4"),
    (r"[bg]b?[23]00", "NVLink5"),
)  # fmt: skip


def link_class(interconnect: str, device: str, between_nodes: bool) -> LinkClass:
    """The class of one tier of an interconnect name; mixed names (`NVLink4-intra+Slingshot11-inter`) hold both.

    A bare `NVLink` or `NVSwitch` takes the generation of the device. A name that matches nothing gives
    `UNKNOWN_INTRA` or `UNKNOWN_INTER`.
    """
    name = interconnect.lower()
    for link in LINK_CLASSES:
        if link.between_nodes == between_nodes and re.search(link.pattern, name):
            if link.name == "NVLink":
                return _by_device(device.lower(), link)
            return link
    return UNKNOWN_INTER if between_nodes else UNKNOWN_INTRA


def is_network(interconnect: str, device: str) -> bool:
    """Whether a name is known only as a link between nodes: a machine with one device to a node."""
    outside = link_class(interconnect, device, True)
    return outside is not UNKNOWN_INTER and link_class(interconnect, device, False) is UNKNOWN_INTRA


def _by_device(device: str, default: LinkClass) -> LinkClass:
    for pattern, name in _GENERATION:
        if re.search(pattern, device):
            return next(link for link in LINK_CLASSES if link.name == name)
    return default
