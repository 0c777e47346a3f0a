"""Parses clauses of a network description; each describes one set of equal adapters."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from perfmodel.catalog.networks._network import INFINIBAND_GBIT
from perfmodel.catalog.networks._tokens import (
    NUMBER_WORDS,
    PREFIX_GBIT,
    Token,
    part_named,
    tokens_of,
)

_QUANTUM: Final = {None: "HDR", "2": "NDR", "3": "XDR", "x800": "XDR"}
_CONNECTX_GBIT: Final = {3: 56, 4: 100, 5: 100, 6: 200, 7: 400, 8: 800, 9: 1600}
_CONNECTX_LX_GBIT: Final = 50
_BLUEFIELD_GBIT: Final = {1: 100, 2: 200, 3: 400, 4: 800}
"""Fastest port that NVIDIA's data sheets give each generation of adapters."""
_SLINGSHOT_GBIT: Final = {"10": 100, "11": 200, "400": 400}
_OMNI_PATH_GBIT: Final = 100
_ARIES_GBIT: Final = 81.6
"""10.2 GB/s (Cray XC series network white paper WP-Aries01, 2012)."""
_FAMILY_OF_TOKEN: Final = {
    "generation": "InfiniBand",
    "infiniband": "InfiniBand",
    "quantum": "InfiniBand",
    "roce": "RoCE",
    "efa": "AWS EFA",
    "slingshot": "Slingshot",
    "omni_path": "Omni-Path",
    "aries": "Aries",
    "tcpxo": "GPUDirect-TCPXO FasTrak",
    "tcpx": "GPUDirect-TCPX",
    "dcn": "DCN",
    "ethernet": "Ethernet",
    "bare": "Ethernet",
    "rdma": "RDMA",
}
CARRIES: Final = {
    "RoCE": ("Ethernet", "RDMA"),
    "GPUDirect-TCPX": ("Ethernet",),
    "GPUDirect-TCPXO FasTrak": ("Ethernet",),
    "InfiniBand": ("RDMA", "Ethernet"),
    "AWS EFA": ("RDMA", "Ethernet"),
    "Slingshot": ("RDMA", "Ethernet"),
    "DCN": ("Ethernet",),
    "Omni-Path": ("RDMA", "Ethernet"),
    "Ethernet": ("RDMA",),
}
"""Pairs of names that may occur in one clause and mean the same adapters, the more specific name
first."""
NEVER_ON_ETHERNET: Final = ("InfiniBand", "Omni-Path", "Aries")
"""Networks with links of their own: a rate in Ethernet's unit (`100GbE`) is not theirs."""
_COMPUTE: Final = re.compile(
    r"\bcompute\b|\beast-?west\b|\bEW\b|\bback-?end\b|\bscale-?out\b|\bGPU network\b", re.I
)
_OTHERS: Final = re.compile(
    r"\bmanage\w*\b|\bstorage\b|\bhost\b|\bin-?band\b|\bout-?of-?band\b|\boob\b|\bnorth-?south\b|\bNS\b|\bfront-?end\b"
    r"|\bipmi\b|\bbmc\b|\bpcie?\b",
    re.I,
)
_LABEL: Final = re.compile(r"^\s*([^:]{1,60}):(?!\d)\s*")


@dataclass(frozen=True)
class AdapterSet:
    """Equal network adapters that one clause of a description states."""

    count: int | None = None
    """Number of adapters. None, here and below, if the clause does not state it."""
    gbit_per_s: float | None = None
    """Stated rate, of one adapter or of all together."""
    link_gbit_per_s: float | None = None
    """Highest rate of adapters with this name."""
    family: str = ""
    generation: str = ""
    scope: str = ""
    """Unit that the figures are stated per: `node`, `device`, `rack` or `adapter`; empty if the
    text names none."""
    is_total: bool = False
    """Whether the rate is that of all adapters together."""
    only_management: bool = False
    """Whether it is Ethernet of 1 Gbit/s, which carries no data."""
    for_computing: bool = False
    """Whether the clause states that collectives use it."""
    for_others: bool = False
    """Whether the clause states another purpose: storage, management, the host."""
    ethernet_beside: tuple["AdapterSet", ...] = ()
    """Ethernet adapters that the clause states beside a network of another kind
    (`100GbE InfiniBand`)."""

    @property
    def is_fragment(self) -> bool:
        """Whether the clause is incomplete (only a rate, count or name) and must be joined with its
        neighbour."""
        has_figures = self.count is not None or self.gbit_per_s is not None
        return not (has_figures and self.family)

    @property
    def total_gbit_per_s(self) -> float:
        """Rate of all adapters together in Gbit/s; -1 if it is not known."""
        rate = self.gbit_per_s if self.gbit_per_s is not None else self.link_gbit_per_s
        if rate is None:
            return -1.0
        return rate if self.is_total else rate * (self.count or 1)


def read_clause(clause: str) -> tuple[AdapterSet, list[str]]:
    """Return the set of adapters that a clause describes, and the words of it that are not
    understood."""
    label = _LABEL.match(clause)
    body, purpose = clause, clause
    if label is not None:
        # A label is a network's name with prose behind it (`InfiniBand: data bandwidth ...`), or
        # its purpose.
        named, _ = read_clause(label[1])
        if named.family:
            return named, []
        body = clause[label.end() :]
        purpose = label[1]
    for_computing = bool(_COMPUTE.search(purpose))
    for_others = bool(_OTHERS.search(purpose)) and not for_computing
    tokens = [(kind, match) for kind, match in tokens_of(body) if kind != "filler"]
    # PCIe always means the link from a device to its host.
    if any(kind == "host" for kind, _ in tokens):
        for_others = True
    adapters = AdapterSet(for_computing=for_computing, for_others=for_others)
    unknown = []
    for place, (kind, match) in enumerate(tokens):
        if kind == "unknown":
            if not _COMPUTE.fullmatch(match[0]) and not _OTHERS.fullmatch(match[0]):
                unknown.append(match[0])
        elif kind == "number":
            before = adapters
            # The meaning of a bare number depends on the word after it.
            adapters = _with_bare_number(adapters, match[0], tokens[place + 1 :])
            if adapters is before:
                unknown.append(match[0])
        elif kind == "rate" and match["ethernet"] and _is_beside(tokens, _gbit_per_s(match)):
            # The count of `4x 100GbE, InfiniBand` belongs to its rate.
            is_counted = place > 0 and tokens[place - 1][0] == "count"
            ethernet = AdapterSet(
                count=adapters.count if is_counted else None,
                gbit_per_s=_gbit_per_s(match),
                family="Ethernet",
            )
            adapters = replace(
                adapters,
                count=None if is_counted else adapters.count,
                ethernet_beside=(*adapters.ethernet_beside, ethernet),
            )
        else:
            adapters = _with_token(adapters, kind, match)
    # `100 Gb/s Ethernet InfiniBand` leaves open which of two networks has the rate. A generation
    # (`HDR`) tells, and so does an adapter's own name.
    families = {_FAMILY_OF_TOKEN.get(kind, "") for kind, _ in tokens}
    other_families = sorted(families & set(NEVER_ON_ETHERNET)) if "Ethernet" in families else []
    is_told = adapters.link_gbit_per_s is not None or adapters.ethernet_beside
    if other_families and adapters.gbit_per_s is not None and not is_told:
        unknown.append(f"Ethernet and {other_families[0]} at one rate")
    return adapters, unknown


def _is_beside(tokens: Sequence[Token], gbit_per_s: float) -> bool:
    """Whether a rate in Ethernet's unit is that of another network than the one that a clause
    names."""
    # GbE is a unit of Ethernet alone. Authors write it of InfiniBand too where both have the same
    # rate: `ConnectX-5 EDR 100GbE` states one adapter.
    named = [
        _generation_and_rate(kind, match)[1]
        for kind, match in tokens
        if _FAMILY_OF_TOKEN.get(kind) in NEVER_ON_ETHERNET
    ]
    return bool(named) and gbit_per_s not in named


def _with_bare_number(adapters: AdapterSet, number: str, rest: Sequence[Token]) -> AdapterSet:
    """A number without unit: a count before a name or a noun (`8 NDR adapters`), else Gbit/s after
    a name (`EFA v2 3200`)."""
    # Servers have at most some tens of adapters, and no adapter is slower than
    # 10 Gbit/s: the two readings hardly overlap.
    value = float(number.replace(",", ""))
    following = rest[0][0] if rest else ""
    names_adapters = following in _FAMILY_OF_TOKEN or following in (
        "adapter",
        "part",
        "noun",
        "unknown",
    )
    if names_adapters and adapters.count is None and value == int(value) and 1 <= value < 100:
        return replace(adapters, count=int(value))
    if adapters.gbit_per_s is None and (adapters.family or names_adapters) and value >= 10:
        return replace(adapters, gbit_per_s=value)
    return adapters


def _with_token(adapters: AdapterSet, kind: str, match: re.Match[str]) -> AdapterSet:
    """A set of adapters updated with one more token."""
    if kind == "count":
        groups = match.groupdict()
        # Counts multiply: `2x dual-port` are four.
        count = (
            groups.get("count")
            or groups.get("times")
            or NUMBER_WORDS[str(groups.get("word")).lower()]
        )
        return replace(adapters, count=max(1, int(count)) * (adapters.count or 1))
    if kind == "rate":
        rate = _gbit_per_s(match)
        if match["ethernet"] and not adapters.family:
            adapters = replace(adapters, family="Ethernet")
        # `10Gb/25Gb/100Gb`: rates that the adapter can be set to; the fastest counts
        return replace(adapters, gbit_per_s=max(rate, adapters.gbit_per_s or 0.0))
    if kind in ("per_node", "per_device", "per_adapter", "per_rack"):
        return replace(adapters, scope=kind.removeprefix("per_"))
    if kind == "total":
        return replace(adapters, is_total=True)
    # Makers add up both directions; every rate here is one way.
    if kind == "both_ways" and adapters.gbit_per_s is not None:
        return replace(adapters, gbit_per_s=adapters.gbit_per_s / 2)
    if kind == "adapter":
        return replace(adapters, link_gbit_per_s=_adapter_gbit_per_s(match))
    if kind == "part":
        part = part_named(match["part"])
        # Ports of 1 Gbit/s are for administrators.
        is_for_management = adapters.only_management or part.gbit_per_s <= 1
        family = more_special(adapters.family, part.family) if part.family else adapters.family
        return replace(
            adapters,
            link_gbit_per_s=part.gbit_per_s,
            family=family,
            only_management=is_for_management,
        )
    # "Gigabit Ethernet" without a number is the network for administrators.
    if kind == "bare":
        adapters = replace(adapters, only_management=True)
    family = _FAMILY_OF_TOKEN.get(kind)
    if family is None:
        return adapters
    generation, link = _generation_and_rate(kind, match)
    return replace(
        adapters,
        family=more_special(adapters.family, family),
        generation=generation or adapters.generation,
        link_gbit_per_s=link or adapters.link_gbit_per_s,
    )


def _gbit_per_s(match: re.Match[str]) -> float:
    """A rate in Gbit/s."""
    number = float(match["number"].replace(",", ""))
    if match["ethernet"]:
        return number
    # "Gb" are bits and "GB" bytes; the case of the b is all that tells them apart.
    unit = (match["bytes"] or match["bits"]).lower()
    return number * PREFIX_GBIT[unit[0]] * (8 if match["bytes"] else 1)


def _adapter_gbit_per_s(match: re.Match[str]) -> float | None:
    """The fastest port of a generation of adapters; None for an unknown one."""
    # Lx cards are the narrow ones of a generation.
    if match["lx"]:
        return _CONNECTX_LX_GBIT
    if match["connectx"]:
        return _CONNECTX_GBIT.get(int(match["connectx"]))
    return _BLUEFIELD_GBIT.get(int(match["bluefield"]))


def _generation_and_rate(kind: str, match: re.Match[str]) -> tuple[str, float | None]:
    """The generation that a name states, and the rate of one of its links."""
    groups = match.groupdict()
    # `NDR200` is a link of half the lanes: the number behind the generation is its rate.
    if kind == "generation":
        generation = groups["generation"].upper()
        return generation, float(groups["lane"] or INFINIBAND_GBIT[generation])
    if kind == "quantum":
        generation = _QUANTUM[groups["quantum"] and groups["quantum"].lower()]
        return generation, INFINIBAND_GBIT[generation]
    if kind == "slingshot":
        generation = groups["slingshot"] or ""
        return generation, _SLINGSHOT_GBIT[generation or "11"]
    if kind == "omni_path":
        return "", _OMNI_PATH_GBIT
    if kind == "aries":
        return "", _ARIES_GBIT
    if kind == "efa" and groups["efa"]:
        return f"v{groups['efa']}", None
    return "", None


def more_special(family: str, candidate: str) -> str:
    """The more specific of two names for one network."""
    if not family or family in CARRIES.get(candidate, ()):
        return candidate
    return family
