"""The network between nodes, read from the words that engineers use for it by a small grammar.

    network   = "none" ... | clause {("," | ";" | "+" | "and") clause}
    clause    = [purpose ":"] {count | rate | name | per | noun | remark}
    count     = N "x" | "x" N | N noun | "one" | "two" | ...
    rate      = number unit; "b" is bits and "B" bytes ("400 Gb/s", "50 GB/s", "3.2 Tbps", "100GbE", "200G")
    name      = "InfiniBand" | "HDR" | "NDR200" | "EFA v2" | "RoCE" | "ConnectX-7" | "Slingshot-11" | ...
    per       = ("per" | "/") ("node" | "GPU" | "NIC" | ...)

Order and punctuation do not matter within a clause. A clause is one set of equal adapters. The fabric is the set for
computing, if one is called so; else the fastest that is not called one for storage, management or the host.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from perfmodel.catalog._network_tokens import (
    NUMBER_WORDS,
    PREFIX_GBIT,
    Token,
    rack_size,
    tokens_of,
    without_brackets,
)
from perfmodel.errors import PerfModelError

Per = Literal["node", "device", "rack"]
NETWORK_WORDS: Final = (
    "write it like '8x 400 Gb/s InfiniBand NDR per node' (b is bits, B bytes; perfmodel.catalog.read_network)"
)


@dataclass(frozen=True, kw_only=True)
class Network:
    """A network between nodes, as far as words tell it."""

    family: str = ""
    """`InfiniBand`, `RoCE`, `AWS EFA` and so on; empty where no word names one."""
    generation: str = ""
    """Of InfiniBand (`NDR`), Slingshot (`11`) or EFA (`v2`); empty where it is not known."""
    adapters: int | None = None
    """Of a node or a device, see `per`. None: not told; the rate is then a node's, or of one adapter per device."""
    gbit_per_s: float | None = None
    """One way, of one adapter (of a whole node where `adapters` is None and `per` is `node`); None: not told."""
    per: Per = "node"
    is_adapter_rate: bool = False
    """Whether the rate may be that of one of several adapters: one that adapters have, and the words say neither how
    many there are nor what the rate is per."""
    absent: bool = False
    """Whether the words say that there is none: a single node."""
    domain: int = 0
    """Devices of the NVLink rack that the words name (`NVL72`); 0 where they name none."""
    not_understood: tuple[str, ...] = ()
    """Words that the grammar does not have, none of which was used."""

    @property
    def name(self) -> str:
        """Family and generation, as tables of measured collectives name them."""
        joined = f"-{self.generation}" if self.family in ("Slingshot",) else f" {self.generation}"
        return f"{self.family}{joined}" if self.generation else self.family

    @property
    def words(self) -> str:
        """The network in the words of the grammar; reading them gives this network again."""
        rack = f"NVL{self.domain}, " if self.domain else ""
        if self.absent:
            return f"{rack}none (one node)"
        if self.gbit_per_s is None:
            counted = f"{self.adapters}x {self.name}" if self.adapters else self.name
            return f"{rack}{counted}".strip().removesuffix(",")
        rate = f"{self.gbit_per_s:.12g} Gb/s"
        if self.adapters is not None:
            per, rate = self.per, f"{self.adapters}x {rate}"
        else:
            per = "adapter" if self.per == "device" else self.per
        return f"{rack}{rate} {self.name}".rstrip() + ("" if self.is_adapter_rate else f" per {per}")

    def gbit_per_s_per_device(self, devices_per_node: int, devices_per_rack: int = 0) -> float | None:
        """Rate that each device gets when all communicate; None where no rate is told.

        Adapters of a node beyond a whole number for each device serve storage.

        Args:
            devices_per_node: that share the adapters of a node (of a tray, in a rack of NVLink).
            devices_per_rack: that share what is told per rack.
        """
        if self.gbit_per_s is None:
            return None
        adapters = 1 if self.adapters is None else self.adapters
        if self.per == "device":
            return adapters * self.gbit_per_s
        sharing = devices_per_node if self.per == "node" else devices_per_rack or devices_per_node
        # 10 adapters for 8 devices: two of them serve storage and management.
        if adapters > sharing:
            adapters -= adapters % sharing
        return adapters * self.gbit_per_s / sharing

    @property
    def detail(self) -> int:
        """Detail of the words on its rate: 2 if adapters are counted, 1 if there is a rate, else 0."""
        if self.gbit_per_s is None:
            return 0
        return 1 if self.adapters is None else 2

    def with_adapters(self, count: int | None, gbit_per_s: float | None) -> "Network":
        """The network with adapters of a node as numbers tell them, which win over words.

        Numbers that repeat the words' own (`3x 100 GbE per card`, 3, 100) mean what the words mean.
        """
        repeats = self.gbit_per_s is not None and count in (None, self.adapters)
        if (count is None and gbit_per_s is None) or (repeats and gbit_per_s in (None, self.gbit_per_s)):
            return self
        changed = replace(self, is_adapter_rate=False)
        counted_per_node = self.adapters is not None and self.per == "node"
        if gbit_per_s is None:
            if self.gbit_per_s is None or self.family == "AWS EFA":
                return replace(changed, adapters=count, per="node")
            is_total = self.per != "device" and self.adapters is None
            each = self.gbit_per_s / count if is_total and count else self.gbit_per_s
            return _with_generation(replace(changed, adapters=count, gbit_per_s=each, per="node"))
        if count is None:
            count = self.adapters
            per: Per = "node" if counted_per_node else "device"
            return _with_generation(replace(changed, adapters=count, gbit_per_s=gbit_per_s, per=per))
        return _with_generation(replace(changed, adapters=count, gbit_per_s=gbit_per_s, per="node"))


# --- what names stand for ------------------------------------------------------------------------------

_ADAPTER_GBIT: Final = frozenset({1, 10, 20, 25, 40, 50, 56, 100, 200, 400, 800})
"""Rates of Ethernet and InfiniBand adapters."""
_INFINIBAND_GBIT: Final = {
    "SDR": 10,
    "DDR": 20,
    "QDR": 40,
    "FDR": 56,
    "EDR": 100,
    "HDR": 200,
    "NDR": 400,
    "XDR": 800,
    "GDR": 1600,
}
"""Gbit/s of a link of four lanes by generation (InfiniBand Trade Association, roadmap)."""
_QUANTUM: Final = {None: "HDR", "2": "NDR", "3": "XDR", "x800": "XDR"}
_CONNECTX_GBIT: Final = {3: 56, 4: 100, 5: 100, 6: 200, 7: 400, 8: 800, 9: 1600}
_CONNECTX_LX_GBIT: Final = 50
_BLUEFIELD_GBIT: Final = {1: 100, 2: 200, 3: 400, 4: 800}
"""Fastest port that NVIDIA's data sheets give each generation of adapters."""
_SLINGSHOT_GBIT: Final = {"10": 100, "11": 200, "400": 400}
_OMNI_PATH_GBIT: Final = 100
_ARIES_GBIT: Final = 81.6
"""10.2 GB/s (Cray XC series network white paper WP-Aries01, 2012)."""
_TCPX_NODE_GBIT: Final = {"GPUDirect-TCPX": 800, "GPUDirect-TCPXO FasTrak": 1600}
"""Four and eight adapters of 200 Gbit/s for the GPUs of an A3 High and an A3 Mega machine (Google Cloud, GPU network
bandwidth)."""
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
_CARRIES: Final = {
    "RoCE": ("Ethernet", "RDMA"),
    "GPUDirect-TCPX": ("Ethernet",),
    "GPUDirect-TCPXO FasTrak": ("Ethernet",),
    "InfiniBand": ("RDMA", "Ethernet"),
    "AWS EFA": ("RDMA", "Ethernet"),
    "Slingshot": ("RDMA", "Ethernet"),
    "DCN": ("Ethernet",),
    "Omni-Path": ("RDMA",),
    "Ethernet": ("RDMA",),
}
"""Names that may stand beside a family's in one clause and mean the same adapters, the more special name first."""
_PREFERENCE: Final = (
    "InfiniBand",
    "AWS EFA",
    "Slingshot",
    "RoCE",
    "Omni-Path",
    "RDMA",
    "Aries",
)
"""Families for computing, before Ethernet, where no rates tell which network is the fabric."""
_MANAGEMENT_GBIT: Final = 1.0
"""Rate of Ethernet that only administrators use, where words give it no number (`Giga Ethernet`)."""


# --- clauses -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Adapters:
    """One set of equal adapters: what a clause says of it."""

    count: int | None = None
    gbit_per_s: float | None = None
    link_gbit_per_s: float | None = None
    """What adapters of the name carry at most."""
    family: str = ""
    generation: str = ""
    per: str = ""
    is_total: bool = False
    only_management: bool = False
    for_computing: bool = False
    for_others: bool = False

    @property
    def is_fragment(self) -> bool:
        """Whether it is less than a network: rate, count or name alone, to be joined with its neighbour."""
        has_figures = self.count is not None or self.gbit_per_s is not None
        return not (has_figures and self.family)

    @property
    def total_gbit_per_s(self) -> float:
        """Rate of all adapters together in Gbit/s; -1 if it is not known."""
        rate = self.gbit_per_s if self.gbit_per_s is not None else self.link_gbit_per_s
        if rate is None:
            return -1.0
        return rate if self.is_total else rate * (self.count or 1)


_COMPUTE: Final = re.compile(r"\bcompute\b|\beast-?west\b|\bEW\b|\bback-?end\b|\bscale-?out\b|\bGPU network\b", re.I)
_OTHERS: Final = re.compile(
    r"\bmanage\w*\b|\bstorage\b|\bhost\b|\bin-?band\b|\bout-?of-?band\b|\boob\b|\bnorth-?south\b|\bNS\b|\bfront-?end\b"
    r"|\bipmi\b|\bbmc\b|\bpcie?\b",
    re.I,
)
_LABEL: Final = re.compile(r"^\s*([^:]{1,60}):(?!\d)\s*")
_COUNT_BEFORE_NAME: Final = re.compile(r"(?<![\w.])(\d+)\s*[xX\u00d7*]\s*(?=[A-Za-z])(?!xlarge|large)")
_SEPARATOR: Final = re.compile(r"[;+]|,(?!\d{3}(?!\d))|\s+(?:and|plus|&)\s+", re.I)
_ABSENT: Final = re.compile(r"^\s*(?:none\b|no network\b|(?:one|single|1)[- ](?:node|slice|server|machine)\b)", re.I)


def read_network(text: str) -> Network:
    """The network that words describe: `8x400 Gb/s`, `3.2 Tbps`, `4x HDR`, `EFA v2 3200`, `RoCE 200G`, ...

    A rate without `per` is the whole node's; one that is the rate of the adapter or link that is named (`InfiniBand
    NDR 400 Gb/s`), and a name alone, is that of each device's own adapter. Of several networks the one for computing
    counts, see the module. Words that the grammar does not have are returned in `not_understood`, and not used.

    Raises:
        PerfModelError: a rate that no adapter of the name has, such as `4x HDR 400 GB/s`.
    """
    # `8xHDR` is a count and a name: apart, each is a token.
    apart = _COUNT_BEFORE_NAME.sub(r"\1x ", text)
    clauses = [clause for clause in _SEPARATOR.split(without_brackets(apart)) if clause.strip()]
    described: list[_Adapters] = []
    not_understood: list[str] = []
    absent = bool(_ABSENT.match(text))
    if absent:
        return Network(absent=True, domain=rack_size(text))
    for clause in clauses:
        if re.search(r"(?i)\bnone\b", clause) and len(clauses) > 1:
            absent = True
            continue
        adapters, unknown = _read_clause(clause)
        if not adapters.for_others:
            not_understood += unknown
        described.append(adapters)
    fabric = _fabric(_joined(described))
    unknown_words = tuple(dict.fromkeys(not_understood))
    if fabric is None:
        return Network(absent=absent, domain=rack_size(text), not_understood=unknown_words)
    return replace(_network(fabric, text), domain=rack_size(text), not_understood=unknown_words)


def _read_clause(clause: str) -> tuple[_Adapters, list[str]]:
    """The set of adapters that a clause describes, and its words that are not understood."""
    label = _LABEL.match(clause)
    body = clause[label.end() :] if label else clause
    # A label may be the network's name with prose behind it, or what a network is for.
    is_named = label is not None and bool(_read_clause(label[1])[0].family)  # `InfiniBand: data bandwidth ...`
    purpose = label[1] if label else clause
    for_computing = bool(_COMPUTE.search(purpose))
    for_others = bool(_OTHERS.search(purpose)) and not for_computing
    if is_named and label is not None:
        named, _ = _read_clause(label[1])
        return named, []
    tokens = [(kind, match) for kind, match in tokens_of(body) if kind != "filler"]
    if any(kind == "host" for kind, _ in tokens):
        for_others = True
    adapters = _Adapters(for_computing=for_computing, for_others=for_others)
    unknown = []
    for place, (kind, match) in enumerate(tokens):
        if kind == "unknown":
            if not _COMPUTE.fullmatch(match[0]) and not _OTHERS.fullmatch(match[0]):
                unknown.append(match[0])
        elif kind == "number":
            before = adapters
            adapters = _with_bare_number(adapters, match[0], tokens[place + 1 :])
            if adapters is before:
                unknown.append(match[0])
        else:
            adapters = _with_token(adapters, kind, match)
    return adapters, unknown


def _with_bare_number(adapters: _Adapters, number: str, rest: Sequence[Token]) -> _Adapters:
    """A number without unit: a count before a name or a noun (`8 NDR adapters`), else Gbit/s after a name
    (`EFA v2 3200`)."""
    # Servers have at most some tens of adapters, and no adapter is slower than
    # 10 Gbit/s: the two readings hardly overlap.
    value = float(number.replace(",", ""))
    following = rest[0][0] if rest else ""
    names_adapters = following in _FAMILY_OF_TOKEN or following in (
        "adapter",
        "noun",
        "unknown",
    )
    if names_adapters and adapters.count is None and value == int(value) and 1 <= value < 100:
        return replace(adapters, count=int(value))
    if adapters.gbit_per_s is None and (adapters.family or names_adapters) and value >= 10:
        return replace(adapters, gbit_per_s=value)
    return adapters


def _with_token(adapters: _Adapters, kind: str, match: re.Match[str]) -> _Adapters:
    """A set of adapters with what one more token says of it."""
    if kind == "count":
        groups = match.groupdict()
        count = groups.get("count") or groups.get("times") or NUMBER_WORDS[str(groups.get("word")).lower()]
        return replace(adapters, count=max(1, int(count)) * (adapters.count or 1))
    if kind == "rate":
        rate = _gbit_per_s(match)
        if match["ethernet"] and not adapters.family:
            adapters = replace(adapters, family="Ethernet")
        # `10Gb/25Gb/100Gb`: what the adapter can be set to, of which the fastest counts
        return replace(adapters, gbit_per_s=max(rate, adapters.gbit_per_s or 0.0))
    if kind in ("per_node", "per_device", "per_adapter", "per_rack"):
        return replace(adapters, per=kind.removeprefix("per_"))
    if kind == "total":
        return replace(adapters, is_total=True)
    # Makers add up both directions; every rate here is one way.
    if kind == "both_ways" and adapters.gbit_per_s is not None:
        return replace(adapters, gbit_per_s=adapters.gbit_per_s / 2)
    if kind == "adapter":
        return replace(adapters, link_gbit_per_s=_adapter_gbit_per_s(match))
    if kind == "bare":
        adapters = replace(adapters, only_management=True)
    family = _FAMILY_OF_TOKEN.get(kind)
    if family is None:
        return adapters
    generation, link = _generation_and_rate(kind, match)
    return replace(
        adapters,
        family=_special(adapters.family, family),
        generation=generation or adapters.generation,
        link_gbit_per_s=link or adapters.link_gbit_per_s,
    )


def _gbit_per_s(match: re.Match[str]) -> float:
    """A rate in Gbit/s."""
    number = float(match["number"].replace(",", ""))
    if match["ethernet"]:
        return number
    unit = (match["bytes"] or match["bits"]).lower()
    return number * PREFIX_GBIT[unit[0]] * (8 if match["bytes"] else 1)


def _adapter_gbit_per_s(match: re.Match[str]) -> float | None:
    """The fastest port of a generation of adapters, None for one that is not known."""
    if match["lx"]:
        return _CONNECTX_LX_GBIT
    if match["connectx"]:
        return _CONNECTX_GBIT.get(int(match["connectx"]))
    return _BLUEFIELD_GBIT.get(int(match["bluefield"]))


def _generation_and_rate(kind: str, match: re.Match[str]) -> tuple[str, float | None]:
    """The generation that a name tells, and the rate of one of its links."""
    groups = match.groupdict()
    if kind == "generation":
        generation = groups["generation"].upper()
        return generation, float(groups["lane"] or _INFINIBAND_GBIT[generation])
    if kind == "quantum":
        generation = _QUANTUM[groups["quantum"] and groups["quantum"].lower()]
        return generation, _INFINIBAND_GBIT[generation]
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


def _special(family: str, candidate: str) -> str:
    """The more special of two names for one network."""
    if not family or family in _CARRIES.get(candidate, ()):
        return candidate
    return family


# --- from clauses to one network -----------------------------------------------------------------------


def _joined(described: Sequence[_Adapters]) -> list[_Adapters]:
    """Sets of adapters with fragments (`Omni-Path`, `4 links per node`) put together where they fit."""
    # Commas divide clauses that belong together as often as networks: a
    # fragment joins its neighbour if they contradict each other in nothing.
    joined: list[_Adapters] = []
    for adapters in described:
        if joined and _fit_together(joined[-1], adapters):
            joined[-1] = _put_together(joined[-1], adapters)
        else:
            joined.append(adapters)
    return joined


def _fit_together(first: _Adapters, second: _Adapters) -> bool:
    """Whether two clauses say different things of one set of adapters."""
    if first.for_others != second.for_others or (first.for_computing and second.for_computing):
        return False
    if not (first.is_fragment or second.is_fragment):
        return False
    both_have = [
        name
        for name in ("count", "gbit_per_s", "per")
        if getattr(first, name) not in (None, "") and getattr(second, name) not in (None, "")
    ]
    if both_have:
        return False
    families = {first.family, second.family} - {""}
    if len(families) <= 1:
        return True
    first_family, second_family = families
    return second_family in _CARRIES.get(first_family, ()) or first_family in _CARRIES.get(second_family, ())


def _put_together(first: _Adapters, second: _Adapters) -> _Adapters:
    counted, rated = (first, second) if first.count is not None else (second, first)
    rate = first.gbit_per_s if first.gbit_per_s is not None else second.gbit_per_s
    link = first.link_gbit_per_s or second.link_gbit_per_s
    # `4x InfiniBand per node, 800 Gbps`: a rate by itself beside adapters that are counted per node is the node's,
    # unless it is what each of them carries
    is_apart = counted.count is not None and counted.gbit_per_s is None and rated.gbit_per_s is not None
    of_node = is_apart and counted.per == "node" and rate != link and not rated.family
    return _Adapters(
        count=counted.count,
        gbit_per_s=rate,
        link_gbit_per_s=link,
        family=_special(first.family, second.family) if second.family else first.family,
        generation=first.generation or second.generation,
        per=first.per or second.per,
        is_total=first.is_total or second.is_total or of_node,
        only_management=first.only_management or second.only_management,
        for_computing=first.for_computing or second.for_computing,
        for_others=first.for_others and second.for_others,
    )


def _fabric(described: Sequence[_Adapters]) -> _Adapters | None:
    """The set of adapters that the devices' collectives use: the fastest."""
    useful = [a for a in described if a.family or a.gbit_per_s is not None or a.link_gbit_per_s or a.count]
    candidates = [a for a in useful if a.for_computing] or [a for a in useful if not a.for_others]
    if not candidates:
        return None
    # A network for computing that has no rate goes before Ethernet that has one (`100G Ethernet + InfiniBand`).
    verbs = [a for a in candidates if a.family in _PREFERENCE and a.total_gbit_per_s < 0]
    fastest = max(candidates, key=lambda a: a.total_gbit_per_s)
    if verbs and fastest.family in ("", "Ethernet"):
        return min(verbs, key=lambda a: _PREFERENCE.index(a.family))
    if fastest.only_management and fastest.gbit_per_s is None:
        for_data = [a for a in candidates if not a.only_management]
        return for_data[0] if for_data else None
    return fastest


def _network(fabric: _Adapters, text: str) -> Network:
    """The network of one set of adapters."""
    count, rate, link, is_adapter_rate = (
        fabric.count,
        fabric.gbit_per_s,
        fabric.link_gbit_per_s,
        False,
    )
    # What is left open follows from what is told: a name gives the rate of its
    # link, `per` or the lack of a count says whose it is.
    by_word: dict[str, Per] = {"device": "device", "rack": "rack"}
    per = by_word.get(fabric.per, "node")
    if rate is None and fabric.family in _TCPX_NODE_GBIT and count is None:
        rate, per = float(_TCPX_NODE_GBIT[fabric.family]), "node"
    elif rate is None and link is not None:
        rate = link
        if count is None:
            # a name alone: an adapter per device, or one of the node where the words say so
            count, per = (1, per) if fabric.per in ("node", "device", "rack") else (None, "device")
    elif rate is not None and count is None:
        if fabric.per == "device":
            count = 1
        elif fabric.per == "adapter" or (fabric.per == "" and not fabric.is_total and rate == link):
            per = "device"
        is_adapter_rate = per == "node" and fabric.per == "" and not fabric.is_total and rate in _ADAPTER_GBIT
    elif rate is not None and count is not None:
        rate = _rate_of_each(fabric, count, rate, text)
    network = Network(
        family=fabric.family,
        generation=fabric.generation,
        adapters=count,
        gbit_per_s=None if rate is None else float(rate),
        per=per,
        is_adapter_rate=is_adapter_rate,
    )
    return _with_generation(network)


def _rate_of_each(fabric: _Adapters, count: int, rate: float, text: str) -> float:
    """The rate of one of several adapters, where words may give that of all together."""
    # `8x NDR 3200 Gb/s` is the sum of eight links of 400; any other rate above a link's is a mistake (bytes for bits).
    link = fabric.link_gbit_per_s
    if fabric.is_total:
        return rate / count
    if link is None or rate <= link * 1.01:
        return rate
    if abs(rate / count - link) <= 0.01 * link:
        return float(link)
    raise PerfModelError(
        f"network {text!r}: {rate:g} Gb/s is more than one of its adapters carries ({link:g} Gb/s); {NETWORK_WORDS}"
    )


def _with_generation(network: Network) -> Network:
    """InfiniBand with the generation whose links have its adapters' rate, where words name none."""
    if network.family != "InfiniBand" or network.generation:
        return network
    if network.gbit_per_s is None or (network.adapters is None and network.per == "node"):
        return network
    # No two generations have the same rate, so that it tells the generation.
    by_rate = {rate: generation for generation, rate in _INFINIBAND_GBIT.items()}
    return replace(network, generation=by_rate.get(round(network.gbit_per_s), ""))
