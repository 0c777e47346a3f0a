"""Reads descriptions of the network between nodes with a small grammar.

    network   = "none" ... | clause {("," | ";" | "+" | "and") clause}
    clause    = [purpose ":"] {count | rate | name | per | noun | remark}
    count     = N "x" | "x" N | N noun | "one" | "two" | ...
    rate      = number unit, with "b" for bits and "B" for bytes
                ("400 Gb/s", "50 GB/s", "3.2 Tbps", "100GbE", "200G")
    name      = "InfiniBand" | "HDR" | "NDR200" | "EFA v2" | "RoCE" | "ConnectX-7" | ...
    per       = ("per" | "/") ("node" | "GPU" | "NIC" | ...)

Order and punctuation do not matter within a clause. A clause is one set of equal adapters. The
fabric is the set for computing, if one is called so; else the fastest that is not called one for
storage, management or the host. A rate in Ethernet's unit beside InfiniBand (`100GbE InfiniBand`)
is that of another network, and InfiniBand's rate is then not stated.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from perfmodel.catalog.networks._clauses import (
    CARRIES,
    NEVER_ON_ETHERNET,
    AdapterSet,
    more_special,
    read_clause,
)
from perfmodel.catalog.networks._network import NETWORK_WORDS, Network, Scope, with_generation
from perfmodel.catalog.networks._tokens import rack_size, without_brackets
from perfmodel.errors import PerfModelError

_ADAPTER_GBIT: Final = frozenset({1, 10, 20, 25, 40, 50, 56, 100, 200, 400, 800})
"""Rates of Ethernet and InfiniBand adapters."""
_TCPX_NODE_GBIT: Final = {"GPUDirect-TCPX": 800, "GPUDirect-TCPXO FasTrak": 1600}
"""Four and eight adapters of 200 Gbit/s for the GPUs of an A3 High and an A3 Mega machine (Google
Cloud, GPU network bandwidth)."""
_PREFERENCE: Final = (
    "InfiniBand",
    "AWS EFA",
    "Slingshot",
    "RoCE",
    "Omni-Path",
    "RDMA",
    "Aries",
)
"""Families in order of preference as the compute network, if no rates identify it."""
_COUNT_BEFORE_NAME: Final = re.compile(
    r"(?<![\w.])(\d+)\s*[xX\u00d7*]\s*(?=[A-Za-z])(?!xlarge|large)"
)
_SEPARATOR: Final = re.compile(r"[;+]|,(?!\d{3}(?!\d))|\s+(?:and|plus|&)\s+", re.I)
_ABSENT: Final = re.compile(
    r"^\s*(?:none\b|no network\b|(?:one|single|1)[- ](?:node|slice|server|machine)\b)", re.I
)


def read_network(text: str) -> Network:
    """Parse a network description: `8x400 Gb/s`, `3.2 Tbps`, `4x HDR`, `EFA v2 3200`, `RoCE 200G`,
    ...

    A rate without `per` is the whole node's. A name alone means an adapter per device, and so does
    a rate that equals the named adapter's or link's (`InfiniBand NDR 400 Gb/s`). Of several
    networks the one for computing counts, see the module. Words that the grammar does not have are
    returned in `not_understood`, and not used.

    Raises:
        PerfModelError: a rate that no adapter of the name has, such as `4x HDR 400 GB/s`.
    """
    # `8xHDR` is a count and a name: apart, each is a token.
    spaced = _COUNT_BEFORE_NAME.sub(r"\1x ", text)
    clauses = [clause for clause in _SEPARATOR.split(without_brackets(spaced)) if clause.strip()]
    described: list[AdapterSet] = []
    not_understood: list[str] = []
    absent = bool(_ABSENT.match(text))
    if absent:
        return Network(absent=True, domain=rack_size(text))
    for clause in clauses:
        # `NVL72, none`: a rack without a network beyond it.
        if re.search(r"(?i)\bnone\b", clause) and len(clauses) > 1:
            absent = True
            continue
        adapters, unknown = read_clause(clause)
        # Unknown words about a management network have no effect.
        if not adapters.for_others:
            not_understood += unknown
        described += [*adapters.ethernet_beside, replace(adapters, ethernet_beside=())]
    adapter_sets = _joined(described)
    fabric = _fabric(adapter_sets)
    unknown_words = tuple(dict.fromkeys(not_understood))
    if fabric is None:
        return Network(absent=absent, domain=rack_size(text), not_understood=unknown_words)
    others = [adapters for adapters in adapter_sets if adapters is not fabric]
    return replace(
        _network(fabric, text),
        domain=rack_size(text),
        not_understood=unknown_words,
        other_counts=tuple(adapters.count for adapters in others if adapters.count),
        other_gbit_per_s=tuple(adapters.gbit_per_s for adapters in others if adapters.gbit_per_s),
    )


def _joined(described: Sequence[AdapterSet]) -> list[AdapterSet]:
    """Sets of adapters with fragments (`Omni-Path`, `4 links per node`) put together where they
    fit."""
    # Commas divide clauses that belong together as often as networks: a
    # fragment joins its neighbour if they contradict each other in nothing.
    joined: list[AdapterSet] = []
    for adapters in described:
        if joined and _fit_together(joined[-1], adapters):
            joined[-1] = _put_together(joined[-1], adapters)
        else:
            joined.append(adapters)
    return joined


def _fit_together(first: AdapterSet, second: AdapterSet) -> bool:
    """Whether two clauses state different facts about one set of adapters."""
    if first.for_others != second.for_others or (first.for_computing and second.for_computing):
        return False
    if not (first.is_fragment or second.is_fragment):
        return False
    # Two counts or two rates are of two sets.
    for name in ("count", "gbit_per_s", "scope"):
        if getattr(first, name) not in (None, "") and getattr(second, name) not in (None, ""):
            return False
    families = {first.family, second.family} - {""}
    if len(families) <= 1:
        return True
    # `100 Gb/s Ethernet, InfiniBand` are two networks, and the rate is that of Ethernet. Only
    # adapters that run both have one rate for both.
    ethernet = first if first.family == "Ethernet" else second
    has_own_rate = ethernet.gbit_per_s is not None and ethernet.link_gbit_per_s is None
    if "Ethernet" in families and families & {*NEVER_ON_ETHERNET} and has_own_rate:
        return False
    first_family, second_family = families
    return second_family in CARRIES.get(first_family, ()) or first_family in CARRIES.get(
        second_family, ()
    )


def _put_together(first: AdapterSet, second: AdapterSet) -> AdapterSet:
    """One set of adapters, merged from two clauses."""
    counted, rated = (first, second) if first.count is not None else (second, first)
    rate = first.gbit_per_s if first.gbit_per_s is not None else second.gbit_per_s
    link = first.link_gbit_per_s or second.link_gbit_per_s
    # `4x InfiniBand per node, 800 Gbps`: a rate by itself beside adapters that are counted per node
    # is the node's, unless it is what each of them carries.
    is_apart = (
        counted.count is not None and counted.gbit_per_s is None and rated.gbit_per_s is not None
    )
    is_of_node = is_apart and counted.scope == "node" and rate != link and not rated.family
    return AdapterSet(
        count=counted.count,
        gbit_per_s=rate,
        link_gbit_per_s=link,
        family=more_special(first.family, second.family) if second.family else first.family,
        generation=first.generation or second.generation,
        scope=first.scope or second.scope,
        is_total=first.is_total or second.is_total or is_of_node,
        only_management=first.only_management or second.only_management,
        for_computing=first.for_computing or second.for_computing,
        for_others=first.for_others and second.for_others,
    )


def _fabric(described: Sequence[AdapterSet]) -> AdapterSet | None:
    """The set of adapters that the devices' collectives use: the fastest."""
    # A clause without adapters is a remark. A network that is described as the compute network
    # takes precedence.
    useful = [
        a for a in described if a.family or a.gbit_per_s is not None or a.link_gbit_per_s or a.count
    ]
    candidates = [a for a in useful if a.for_computing] or [a for a in useful if not a.for_others]
    if not candidates:
        return None
    # A network for computing that has no rate goes before Ethernet that has one
    # (`100G Ethernet + InfiniBand`).
    with_rdma = [a for a in candidates if a.family in _PREFERENCE and a.total_gbit_per_s < 0]
    fastest = max(candidates, key=lambda a: a.total_gbit_per_s)
    if with_rdma and fastest.family in ("", "Ethernet"):
        return min(with_rdma, key=lambda a: _PREFERENCE.index(a.family))
    if fastest.only_management and fastest.gbit_per_s is None:
        for_data = [a for a in candidates if not a.only_management]
        return for_data[0] if for_data else None
    return fastest


def _network(fabric: AdapterSet, text: str) -> Network:
    """The network of one set of adapters."""
    count, rate, link = fabric.count, fabric.gbit_per_s, fabric.link_gbit_per_s
    is_adapter_rate = False
    # Missing facts follow from the stated ones: a name gives the rate of its link, and "per ..." or
    # the lack of a count says whose the rate is.
    by_word: dict[str, Scope] = {"device": "device", "rack": "rack"}
    scope = by_word.get(fabric.scope, "node")
    # Google names the protocol, and the machine that has it has one rate.
    if rate is None and fabric.family in _TCPX_NODE_GBIT and count is None:
        rate = float(_TCPX_NODE_GBIT[fabric.family])
        scope = "node"
    elif rate is None and link is not None:
        rate = link
        if count is None:
            # A name alone: an adapter per device, or one of the node where the words say so.
            if fabric.scope in ("node", "device", "rack"):
                count = 1
            else:
                scope = "device"
    elif rate is not None and count is None:
        # A rate per device: its adapter, if no count says otherwise.
        if fabric.scope == "device":
            count = 1
        elif fabric.scope == "adapter" or (
            fabric.scope == "" and not fabric.is_total and rate == link
        ):
            scope = "device"
        is_adapter_rate = (
            scope == "node" and fabric.scope == "" and not fabric.is_total and rate in _ADAPTER_GBIT
        )
    elif rate is not None and count is not None:
        rate = _rate_of_each(fabric, count, rate, text)
    network = Network(
        family=fabric.family,
        generation=fabric.generation,
        adapters=count,
        gbit_per_s=None if rate is None else float(rate),
        scope=scope,
        is_adapter_rate=is_adapter_rate,
    )
    return with_generation(network)


def _rate_of_each(fabric: AdapterSet, count: int, rate: float, text: str) -> float:
    """The rate of one of several adapters, if the words may state that of all together."""
    # `8x NDR 3200 Gb/s` is the sum of eight links of 400; any other rate above a link's is a
    # mistake (bytes for bits).
    link = fabric.link_gbit_per_s
    if fabric.is_total:
        return rate / count
    if link is None or rate <= link * 1.01:
        return rate
    if abs(rate / count - link) <= 0.01 * link:
        return float(link)
    raise PerfModelError(
        f"network {text!r}: {rate:g} Gb/s exceeds the {link:g} Gb/s of one of its adapters; {NETWORK_WORDS}"
    )
