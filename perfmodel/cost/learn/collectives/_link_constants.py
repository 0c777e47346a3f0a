"""Constants of a fabric's links, as sums of effects that are expected or fitted to measurements."""

from collections.abc import Mapping
from math import exp, log
from typing import Final, NamedTuple

from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._physics import LINE_SHARE, PAIRS
from perfmodel.cost.learn.collectives.links import (
    LINK_CLASSES,
    REFERENCE_PEERS,
    UNNAMED,
    LinkClass,
    LinkConstants,
    TierConstants,
)

_DEFAULT_HOP_S: Final = {"hop_inside": 2e-6, "hop_between": 20e-6}
"""Hop time of links of unknown class."""
_LEAST_EFFICIENCY: Final = 0.02
"""Share of the links' rate below which no fit may fall."""


class Effect(NamedTuple):
    """One term of a constant's sum."""

    part: str
    """Part that the effect belongs to, such as the efficiency `inside` a node."""
    link: str = ""
    """Link class to which the effect applies; empty for all."""
    kind: str = ""
    """Kind of collective to which the effect applies; empty for all."""

    def __str__(self) -> str:
        return "|".join(part for part in self if part)


_OF_LINKS_INSIDE: Final = ("inside", "hop_inside", "peers", "low_latency")
"""Effects of a link class inside nodes."""
_OF_LINKS_BETWEEN: Final = (
    "between",
    "hop_between",
    "hop_ratio_between",
    "post",
    "peer_s",
    "nodes",
)
"""Effects of a link class between nodes."""
_OF_ALL: Final = ("hop_ratio", "hop_line", "hop_switch", "switch", "network", "direct", "host")
"""Effects common to all links."""
_OF_ALL_BETWEEN: Final = (
    "neighbours",
    "low_latency_between",
    "hop_line_between",
    "hop_pair",
    "tree",
)
"""Effects common to all links between nodes."""
BETWEEN: Final = frozenset((*_OF_LINKS_BETWEEN, *_OF_ALL_BETWEEN))
"""Effects (`Effect.part`) that do not apply inside a node."""


def effects(kind: str, inside: str, between: str) -> tuple[Effect, ...]:
    """All effects on a collective of this kind and these link classes."""
    kind_effects = (
        Effect("launch", kind=kind),
        Effect("inside", kind=kind),
        Effect("between", kind=kind),
    )
    inside_effects = (Effect(name, inside) for name in _OF_LINKS_INSIDE)
    between_effects = (Effect(name, between) for name in _OF_LINKS_BETWEEN)
    common_effects = (Effect(name) for name in (*_OF_ALL, *_OF_ALL_BETWEEN))
    effects_of_kind = (
        Effect("inside", inside, kind),
        Effect("between", between, kind),
        Effect("hop_between", between, kind),
    )
    return (*kind_effects, *inside_effects, *between_effects, *common_effects, *effects_of_kind)


_EXPECTED: Final = {
    "launch": (log(5e-6), 0.5),
    "low_latency": (-0.6, 0.4),
    # NCCL's latencies of a hop in LL, LL128 and Simple: 0.6, 1.9 and 3.4 us by NVLink, 5, 8.5 and
    # 14 us by the network
    "hop_ratio": (log(3.4 / 0.6 - 1), 0.5),
    "hop_line": (log(1.9 / 0.6 - 1), 0.3),
    "hop_line_between": (log(8.5 / 5 - 1), 0.5),
    "hop_pair": (0.0, 0.5),
    "hop_switch": (log(8e-6), 0.5),
    "hop_ratio_between": (log(1.5), 0.6),
    "switch": (1.0, 0.5),
    "network": (1.0, 0.5),
    # a kernel that a graph launches, and the first reads that it waits for
    "direct": (log(3e-6), 0.5),
    # a call from Python with its checks, and a launch
    "host": (log(20e-6), 0.5),
    # a healthy fabric loses nothing from 2 to 64 nodes, a weaker one 3.4 % with each doubling
    "nodes": (log(0.01), 1.0),
    # NCCL's trees: 0.92 * 0.85 of a ring, and limits of their own for each channel
    "tree": (1.4, 0.7),
    "neighbours": (0.0, 0.5),
    # NCCL: 1 us on Intel's and Arm's hosts, 2 us on AMD's
    "post": (log(2**0.5 * 1e-6), 0.5),
    "low_latency_between": (-0.6, 0.5),
}
"""Expected value and standard deviation of effects that do not depend on the link class: logs of
times and of ratios, logits of shares."""
_EFFICIENCY: Final = {"inside": (1.1, 0.7), "between": (2.2, 0.4)}
"""Expected logit of the efficiency of a kind, and its standard deviation."""
PEER_HOPS: Final = 0.5
"""Expected time that a peer costs an exchange, in hops between nodes."""


class Expectation(NamedTuple):
    """What is known of an effect before any measurement."""

    value: float
    sd: float
    """Standard deviation of the value."""


def expected(effect: Effect) -> Expectation:
    """Expected value of an effect and its standard deviation."""
    part, link_name, kind = effect
    link = next((link for link in (*LINK_CLASSES, UNNAMED) if link.name == link_name), None)

    # The efficiency of a kind has an expected value, which a link may raise or lower. Exchanges
    # depend more on topology and routing than neighbours in a ring do.
    if part in _EFFICIENCY:
        if not link_name:
            return Expectation(*_EFFICIENCY[part])
        return Expectation(0.0, sd=1.0 if kind == "all_to_all" else 0.5)

    # Latencies are those of the link class, if the name has one.
    if part in _DEFAULT_HOP_S:
        if kind:
            return Expectation(0.0, sd=0.3)
        return Expectation(log(link.hop_s if link else _DEFAULT_HOP_S[part]), sd=0.5)
    if part == "peer_s":
        return Expectation(
            log(PEER_HOPS * (link.hop_s if link else _DEFAULT_HOP_S["hop_between"])), sd=0.8
        )
    return _peer_exponent(link) if part == "peers" else Expectation(*_EXPECTED[part])


def _peer_exponent(link: LinkClass | None) -> Expectation:
    """Exponent of bandwidth in the number of peers: bandwidth grows in a mesh, is shared on a host
    bridge, and is constant behind a switch."""
    if link and link.mesh:
        return Expectation(0.8, sd=0.2)
    if link and link.bridged:
        return Expectation(-0.2, sd=0.3)
    return Expectation(0.0, sd=0.02)


def constants(
    values: Mapping[Effect, float],
    kind: str,
    fabric: Fabric,
    *,
    level: int,
    ranks_per_node: float,
    concurrent: float,
    in_network: bool,
    spans_nodes: bool,
    host_launches: bool = False,
) -> LinkConstants:
    """Constants of the curve for groups of `ranks_per_node` on a fabric that reach network level
    `level`.

    For groups over several nodes, the links inside a node count at their full rate. Their losses
    are part of the time of the group inside its node, and the price of a larger group is never
    below that.
    """
    effects_of_kind = _Values(values, kind)
    value = effects_of_kind.value
    near, far = fabric.inside.link_class, fabric.levels[level].link_class
    at_scale = fabric.levels[level].slows_at_scale
    low_latency = value("low_latency_between") if spans_nodes else value("low_latency", near.name)
    concurrent_share = fabric.share_between(level, ranks_per_node, concurrent)
    outermost_level = level if spans_nodes else 0
    return LinkConstants(
        inside=_inside(effects_of_kind, fabric, level, spans_nodes),
        between=_between(effects_of_kind, fabric, level, concurrent_share),
        launch_s=exp(value("launch", "", kind)),
        hop_switch_s=exp(value("hop_switch")),
        post_s=exp(value("post", far.name)),
        peer_s=exp(value("peer_s", far.name)),
        # the share of the rates that each other protocol reaches
        low_latency_share=1 / (1 + exp(-low_latency)),
        line_share=LINE_SHARE if fabric.carries_lines(outermost_level) else 0.0,
        # how the rates change with ranks and nodes
        peer_exponent=value("peers", near.name) if near.mesh or near.bridged else 0.0,
        node_exponent=exp(value("nodes", far.name)) if at_scale else 0.0,
        neighbour_share=1 / (1 + exp(-value("neighbours"))) if at_scale else 1.0,
        eager_bytes=far.eager_bytes,
        # trees and reductions in switches, relative to a ring; 0 where the fabric has no such
        # switch
        tree_share=1 / (1 + exp(-value("tree"))),
        switch_share=1 / (1 + exp(-value("switch"))) if near.reduces else 0.0,
        network_share=1 / (1 + exp(-value("network"))) if in_network else 0.0,
        # A mesh reaches its stated rate with all devices of the node. Servers read the memory of
        # peers behind a host bridge in pairs alone.
        mesh_peers=min(max(fabric.node_size - 1, 1), REFERENCE_PEERS),
        direct_s=exp(value("direct")),
        direct_peers=1.0 if near.bridged else fabric.node_size - 1.0,
        host_s=exp(value("host")) if host_launches else 0.0,
    )


class _Values(NamedTuple):
    """Values of effects on one kind of collective: the fitted ones, else the expected ones."""

    fitted: Mapping[Effect, float]
    kind: str

    def value(self, part: str, link: str = "", kind: str = "") -> float:
        """Value of one effect."""
        effect = Effect(part, link, kind)
        fitted = self.fitted.get(effect)
        return expected(effect).value if fitted is None else fitted

    def efficiency(self, tier: str, link: str) -> float:
        """Share of the rate of a link class that the kind reaches."""
        effect_of_kind = self.value(tier, "", self.kind)
        effect_of_link = self.value(tier, link)
        logit = effect_of_kind + effect_of_link + self.value(tier, link, self.kind)
        return max(1 / (1 + exp(-logit)), _LEAST_EFFICIENCY)


def _inside(values: _Values, fabric: Fabric, level: int, spans_nodes: bool) -> TierConstants:
    """Constants of the links inside a node."""
    link = fabric.inside.link_class
    # The latency of a hop in the low-latency protocol, and the ratios of the other two to it.
    hop_s = exp(values.value("hop_inside", link.name))
    full_ratio = 1 + exp(values.value("hop_ratio"))
    line_ratio = 1 + exp(values.value("hop_line"))
    efficiency = 1.0 if spans_nodes else values.efficiency("inside", link.name)
    return TierConstants(
        hop_s=hop_s,
        hop_full_s=full_ratio * hop_s,
        hop_line_s=line_ratio * hop_s,
        latency_shift_s=fabric.latency_shift_s(level, between=False),
        usual_latency_s=link.latency_s,
        bytes_per_s=fabric.inside.bandwidth * efficiency,
    )


def _between(values: _Values, fabric: Fabric, level: int, bytes_per_s: float) -> TierConstants:
    """Constants of the links between nodes, of whose rate a rank's share is `bytes_per_s`."""
    link = fabric.levels[level].link_class
    effect_of_all = values.value("hop_between", link.name, "")
    effect_of_kind = values.value("hop_between", link.name, values.kind)
    hop_s = exp(effect_of_all + effect_of_kind)
    full_ratio = 1 + exp(values.value("hop_ratio_between", link.name))
    line_ratio = 1 + exp(values.value("hop_line_between"))
    pair_ratio = exp(values.value("hop_pair")) if values.kind in PAIRS else 1.0
    return TierConstants(
        hop_s=hop_s,
        hop_full_s=full_ratio * hop_s * pair_ratio,
        hop_line_s=line_ratio * hop_s,
        latency_shift_s=fabric.latency_shift_s(level, between=True),
        usual_latency_s=link.latency_s,
        bytes_per_s=bytes_per_s * values.efficiency("between", link.name),
    )
