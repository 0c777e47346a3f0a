"""Constants of the physical curve of a collective on a fabric.

They are sums of effects (of the kind of collective, of the link class, of both), each with an
expected value and a standard deviation. A fit moves an effect as far as measurements ask; a link class never measured
keeps the expected effect, so that it is priced by what all links have in common. Efficiencies are logistic: below one
whatever the fit, so that no link carries more than its rate.
"""

from collections.abc import Mapping
from math import exp, log
from typing import Final, NamedTuple

from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._physics import LINE_SHARE, PAIRS, LinkConstants
from perfmodel.cost.learn.collectives.links import LINK_CLASSES, UNNAMED, LinkClass

_DEFAULT_HOP_S: Final = {"hop_inside": 2e-6, "hop_between": 20e-6}
"""Hops of links that no class is known for."""
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
_OF_LINKS_BETWEEN: Final = ("between", "hop_between", "hop_ratio_between", "post", "peer_s", "nodes")
"""Effects of a link class between nodes."""
_OF_ALL: Final = ("hop_ratio", "hop_line", "hop_switch", "switch", "network")
"""Effects of all links alike."""
_OF_ALL_BETWEEN: Final = ("neighbours", "low_latency_between", "hop_line_between", "hop_pair", "tree")
"""Effects of all links between nodes alike."""
BETWEEN: Final = frozenset((*_OF_LINKS_BETWEEN, *_OF_ALL_BETWEEN))
"""Effects (`Effect.part`) that say nothing inside a node."""


def effects(kind: str, inside: str, between: str) -> tuple[Effect, ...]:
    """All effects on a collective of this kind and these link classes."""
    kind_effects = (Effect("launch", kind=kind), Effect("inside", kind=kind), Effect("between", kind=kind))
    near = (Effect(name, inside) for name in _OF_LINKS_INSIDE)
    far = (Effect(name, between) for name in _OF_LINKS_BETWEEN)
    alone = (Effect(name) for name in (*_OF_ALL, *_OF_ALL_BETWEEN))
    both = (Effect("inside", inside, kind), Effect("between", between, kind), Effect("hop_between", between, kind))
    return (*kind_effects, *near, *far, *alone, *both)


_EXPECTED: Final = {
    "launch": (log(5e-6), 0.5),
    "low_latency": (-0.6, 0.4),
    # NCCL's latencies of a hop in LL, LL128 and Simple: 0.6, 1.9 and 3.4 us by NVLink, 5, 8.5 and 14 us by the network
    "hop_ratio": (log(3.4 / 0.6 - 1), 0.5),
    "hop_line": (log(1.9 / 0.6 - 1), 0.3),
    "hop_line_between": (log(8.5 / 5 - 1), 0.5),
    "hop_pair": (0.0, 0.5),
    "hop_switch": (log(8e-6), 0.5),
    "hop_ratio_between": (log(1.5), 0.6),
    "switch": (1.0, 0.5),
    "network": (1.0, 0.5),
    # a healthy fabric loses nothing from 2 to 64 nodes, a weaker one 3.4 % with each doubling
    "nodes": (log(0.01), 1.0),
    # NCCL's trees: 0.92 * 0.85 of a ring, and limits of their own for each channel
    "tree": (1.4, 0.7),
    "neighbours": (0.0, 0.5),
    # NCCL: 1 us on Intel's and Arm's hosts, 2 us on AMD's
    "post": (log(2**0.5 * 1e-6), 0.5),
    "low_latency_between": (-0.6, 0.5),
}
"""Expected value and standard deviation of effects that follow from no link class: logs of times and of ratios, logits
of shares."""
_EFFICIENCY: Final = {"inside": (1.1, 0.7), "between": (2.2, 0.4)}
"""Expected logit of the efficiency of a kind, and its standard deviation."""
PEER_HOPS: Final = 0.5
"""Expected time that a peer costs an exchange, in hops between nodes."""


def expected(effect: Effect) -> tuple[float, float]:
    """Expected value of an effect and its standard deviation."""
    part, link_name, kind = effect
    link = next((link for link in (*LINK_CLASSES, UNNAMED) if link.name == link_name), None)

    # Efficiencies: the kind's own has a value to expect, what a link adds to it may go either way. An exchange depends
    # on topology and routing more than neighbours in a ring do.
    if part in _EFFICIENCY:
        if not link_name:
            return _EFFICIENCY[part]
        return 0.0, 1.0 if kind == "all_to_all" else 0.5

    # Latencies follow the link class, where there is one of the name.
    if part in _DEFAULT_HOP_S:
        if kind:
            return 0.0, 0.3
        return log(link.hop_s if link else _DEFAULT_HOP_S[part]), 0.5
    if part == "peer_s":
        return log(PEER_HOPS * (link.hop_s if link else _DEFAULT_HOP_S["hop_between"])), 0.8
    return _peers(link) if part == "peers" else _EXPECTED[part]


def _peers(link: LinkClass | None) -> tuple[float, float]:
    """Return how bandwidth depends on the peers: in a mesh it grows, on a host bridge it is shared, behind a switch it
    stays."""
    if link and link.mesh:
        return 0.8, 0.2
    if link and link.bridged:
        return -0.2, 0.3
    return 0.0, 0.02


def constants(
    values: Mapping[Effect, float],
    kind: str,
    fabric: Fabric,
    level: int,
    ranks_per_node: float,
    concurrent: float,
    in_network: bool,
    spans_nodes: bool,
) -> LinkConstants:
    """Constants of the curve for groups of `ranks_per_node` on a fabric that reach network level `level`.

    Over several nodes the links inside count at their full rate: what they lack is in the time of the group inside its
    node, below which no price of a larger one falls.
    """
    near, far = fabric.inside.link_class, fabric.levels[level].link_class
    inside, between = near.name, far.name

    # what no measurement moved keeps its expected value
    def value(*key: str) -> float:
        effect = Effect(*key)
        fitted = values.get(effect)
        return expected(effect)[0] if fitted is None else fitted

    def efficiency(tier: str, link: str) -> float:
        logit = value(tier, "", kind) + value(tier, link) + value(tier, link, kind)
        return max(1 / (1 + exp(-logit)), _LEAST_EFFICIENCY)

    # Hops: latency in the low-latency protocol, and by how much more the other two take.
    near_s = exp(value("hop_inside", inside))
    far_s = exp(value("hop_between", between) + value("hop_between", between, kind))
    near_ratio = 1 + exp(value("hop_ratio"))
    far_ratio = 1 + exp(value("hop_ratio_between", between))
    near_line = 1 + exp(value("hop_line"))
    far_line = 1 + exp(value("hop_line_between"))

    at_scale = fabric.levels[level].slows_at_scale
    low_latency = value("low_latency_between") if spans_nodes else value("low_latency", inside)
    return LinkConstants(
        # latencies of the three protocols, inside a node and between nodes
        launch_s=exp(value("launch", "", kind)),
        hop_inside_s=near_s,
        hop_inside_full_s=near_ratio * near_s,
        hop_inside_line_s=near_line * near_s,
        hop_switch_s=exp(value("hop_switch")),
        hop_between_s=far_s,
        hop_between_full_s=far_ratio * far_s * (exp(value("hop_pair")) if kind in PAIRS else 1.0),
        hop_between_line_s=far_line * far_s,
        # what the cluster states beyond the latency that such links usually have
        shift_inside_s=fabric.latency_shift_s(level, False),
        shift_between_s=fabric.latency_shift_s(level, True),
        usual_inside_s=near.latency_s,
        usual_between_s=far.latency_s,
        post_s=exp(value("post", between)),
        peer_s=exp(value("peer_s", between)),
        # effective rates, and the share of them that each protocol reaches
        bandwidth_inside=fabric.inside.bandwidth * (1.0 if spans_nodes else efficiency("inside", inside)),
        bandwidth_between=fabric.share_between(level, ranks_per_node, concurrent) * efficiency("between", between),
        low_latency_share=1 / (1 + exp(-low_latency)),
        line_share=LINE_SHARE if fabric.carries_lines(level if spans_nodes else 0) else 0.0,
        # how the rates change with ranks and nodes
        peer_exponent=value("peers", inside) if near.mesh or near.bridged else 0.0,
        node_exponent=exp(value("nodes", between)) if at_scale else 0.0,
        neighbour_share=1 / (1 + exp(-value("neighbours"))) if at_scale else 1.0,
        eager_bytes=far.eager_bytes,
        # trees and reductions in switches, relative to a ring; 0 where the fabric has no such switch
        tree_share=1 / (1 + exp(-value("tree"))),
        switch_share=1 / (1 + exp(-value("switch"))) if near.reduces else 0.0,
        network_share=1 / (1 + exp(-value("network"))) if in_network else 0.0,
    )
