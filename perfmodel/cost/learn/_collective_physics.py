"""Time of a collective from first principles: launch, hops and bytes over bandwidth, the best of the algorithms.

`launch + min over algorithm and protocol of join(hops x latency, max(bytes / bandwidth inside, bytes / bandwidth
between))`, as NCCL itself models it (`src/graph/tuning.cc`, `ncclTopoTuneModel` and `ncclTopoGetAlgoTime`).

Algorithms: ring, double binary tree (Sanders, Speck and Traeff, Parallel Computing 35, 2009), reduction in the
switches of a node (NVLS) and of the network (SHARP), pairwise exchange. Protocols as NCCL's LL, LL128 and Simple: a
share of the bandwidth at a fraction of the latency, nearly all of it at little more, and all of it at several times
the latency. Every term grows with bytes, ranks and latency and falls with bandwidth, and so does their minimum.

Functions take NumPy or JAX arrays alike and are differentiable in all real arguments.

The constants of the curve are sums of effects (of the kind of collective, of the link class, of both), each with an
expected value and a standard deviation. A fit moves an effect as far as measurements ask; a link class never measured
keeps the expected effect, so that it is priced by what all links have in common. Efficiencies are logistic: below one
whatever the fit, so that no link carries more than its rate.
"""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from math import exp, log
from types import ModuleType
from typing import Any, Final, NamedTuple, get_args

import numpy as np

from perfmodel.cost.learn._fabrics import Fabric, LinkClass, link_named
from perfmodel.ops import CollectiveKind

Array = Any
"""A NumPy or JAX array, or a Python number."""
KINDS: Final = get_args(CollectiveKind)
PAIRS: Final = ("send_recv", "all_to_all")
"""Kinds that are messages between pairs."""

REFERENCE_PEERS: Final = 7
"""Peers in a node of eight; larger nodes are switched, their bandwidth grows no further."""
OVERLAP_INSIDE: Final = 3.0
"""Sharpness of the smooth maximum (`larger`) of latency and transfer inside a node."""
OVERLAP_BETWEEN: Final = 1.0
"""The same between nodes: the sum (Hockney's alpha and beta)."""
OVERLAP_TREE: Final = 0.65
"""The same of a tree, where 1/2 is the optimally pipelined one, `(sqrt(latency) + sqrt(transfer))^2` (Sanders et al.,
section 2). Between it and the sum, since chunks have sizes of their own."""
CHANNELS_UNTIL: Final = 4.0
"""Nodes up to which a send to a neighbour keeps all its channels: beyond, a rank has more peers than the library has
channels to give them (`ncclTopoComputeP2pChannels`)."""
POSTED: Final = 0.1
"""Share of a hop that each further message costs which is posted at once, inside a node."""
LINE_SHARE: Final = 0.92
"""Bandwidth of LL128 as a share of the full one: 120 bytes of data in a line of 128 (NCCL `src/graph/tuning.cc`)."""
LINE_START_S: Final = 7.4e-6
FULL_START_S: Final = 1.8e-6
"""What a collective in lines, and one in full bandwidth, takes longer to begin than one in low latency (the same: 14,
8.4 and 6.6 us)."""
SPREAD: Final = 0.5
"""Share of a low-latency hop between nodes that a ring pays whose nodes have several ranks: its channels cross the
network at different ranks (the same: 2.7 of 5 us in LL, 4 of 8.5 us in LL128, where one rank per node pays all)."""
ASKS: Final = 4
"""Sharpness of the size from which messages ask before they are sent."""
NEVER: Final = 1e30
"""Bytes of no message, ranks of no ring."""
IMPOSSIBLE_S: Final = 1e6
"""Time of an algorithm that the fabric lacks."""


@dataclass(frozen=True)
class LinkConstants:
    """What the curve needs to know of a fabric for one kind; every field a number or arrays of one common shape."""

    launch_s: Array
    """Time that no message size and rank count changes: kernel launch, dispatch."""
    hop_inside_s: Array
    """Latency of one message inside a node in the low-latency protocol."""
    hop_inside_full_s: Array
    """The same in the bandwidth protocol."""
    hop_inside_line_s: Array
    """The same in the protocol of lines (LL128)."""
    hop_switch_s: Array
    """Latency of a node's switch that adds: a rank's way to it or back."""
    hop_between_s: Array
    hop_between_full_s: Array
    hop_between_line_s: Array
    shift_inside_s: Array
    """Stated latency of a hop inside a node beyond the usual one: it adds to time as it is, whatever the size."""
    shift_between_s: Array
    usual_inside_s: Array
    """Latency that clusters usually state of such links."""
    usual_between_s: Array
    peer_s: Array
    """What each peer on another node costs one rank of an all-to-all."""
    bandwidth_inside: Array
    """Effective bytes/s of one rank inside its node in the bandwidth protocol: with `REFERENCE_PEERS` peers, where they
    share a bridge with one."""
    bandwidth_between: Array
    """Effective bytes/s between nodes of one rank (its share of the node's links), on two nodes."""
    low_latency_share: Array
    """Bandwidth of the low-latency protocol as a share of the full one."""
    line_share: Array
    """The same of the protocol of lines; 0: the links do not carry it."""
    peer_exponent: Array
    """How bandwidth inside a node grows with the peers of a rank: 0 behind a switch, towards 1 in a mesh of
    direct links (each pair has its own), negative where ranks share a host bridge."""
    node_exponent: Array
    """Bandwidth between nodes falls as (nodes / 2) to the minus this."""
    neighbour_share: Array
    """Share of the bandwidth that a send to a neighbour keeps on many nodes."""
    long_ring: Array
    """Ranks of a ring from which its low-latency hops between nodes take twice as long."""
    eager_bytes: Array
    """Bytes on the wire from which a message between nodes asks before it is sent: twice the latency."""
    tree_share: Array
    """Bandwidth between nodes of a tree whose nodes add without a switch, relative to a ring's: half of its channels'
    traffic goes through the devices of others (NCCL's `perChMaxTreeBws`)."""
    switch_share: Array
    """Efficiency of reduction in the node's switch relative to a ring's; 0: no such switch."""
    network_share: Array
    """The same of reduction in the network's switches."""


def namespace(*arrays: Array) -> ModuleType:
    """`jax.numpy` if any argument is a JAX array (or tracer), else `numpy`; imports JAX for nobody else."""
    jax = sys.modules.get("jax")
    if jax is not None and any(isinstance(a, jax.Array) for a in arrays):
        return jax.numpy
    return np


def larger(a: Array, b: Array, sharpness: float) -> Array:
    """Smooth maximum of positive numbers: their `sharpness`-norm (1 gives the sum)."""
    xp = namespace(a, b)
    high, low = xp.maximum(a, b), xp.minimum(a, b)
    ratio = low / xp.maximum(high, 1e-300)
    return high * (1 + ratio**sharpness) ** (1 / sharpness)


def smaller(a: Array, b: Array, sharpness: float = 16.0) -> Array:
    """Smooth minimum of positive numbers."""
    xp = namespace(a, b)
    low, high = xp.minimum(a, b), xp.maximum(a, b)
    ratio = low / xp.maximum(high, 1e-300)
    return low * (1 + ratio**sharpness) ** (-1 / sharpness)


ALGORITHMS: Final = ("ring", "tree", "nvls", "nvls_tree", "collnet")
"""Algorithms that a run may be held to."""

SIMPLE_ONLY: Final = ("nvls", "nvls_tree", "collnet")
"""Those that reduce in switches, which have no low-latency protocol (NCCL `src/graph/tuning.cc`)."""


def collective_time(
    kind: str, buffer_bytes: Array, ranks: Array, ranks_per_node: Array, c: LinkConstants, algorithm: str = ""
) -> Array:
    """Seconds of one kind on `ranks` ranks, `ranks_per_node` of them to a node; 0 for one rank.

    Sizes as nccl-tests counts them (`perfmodel.spec.Collective`). Inside a node latency hides behind transfer
    (a smooth maximum fits the tables best); between nodes it adds to it. `algorithm`: the one of `ALGORITHMS` that the
    run is held to; by default, and where the kind has no such choice, the fastest.
    """
    xp = namespace(buffer_bytes, ranks, ranks_per_node, c.bandwidth_inside, c.bandwidth_between, c.hop_inside_s)
    n, r = ranks * 1.0, xp.minimum(ranks_per_node * 1.0, ranks)
    nodes = xp.maximum(n / r, 1.0)
    several = xp.minimum(nodes - 1.0, 1.0)  # 0 inside one node, 1 from two nodes on
    peers = xp.clip(r - 1.0, 1.0, REFERENCE_PEERS)
    inside = c.bandwidth_inside * (peers / xp.where(c.peer_exponent < 0, 1, REFERENCE_PEERS)) ** c.peer_exponent
    between = c.bandwidth_between * xp.maximum(nodes / 2, 1.0) ** -c.node_exponent
    if kind == "send_recv":
        kept = xp.minimum(CHANNELS_UNTIL / nodes, 1.0) ** 2
        between = between * (c.neighbour_share + (1 - c.neighbour_share) * kept)
    skew = 1 + n / c.long_ring
    local = xp.minimum(r - 1, 1.0)
    table, best = _algorithms(kind, xp, n, r, nodes, c), None
    for name, (hops_in, hops_out, fixed_s, volume_in, volume_out) in table.items():
        if algorithm in table and algorithm != name:
            continue
        is_tree = name in ("tree", "nvls_tree")
        asks = _asks(buffer_bytes if is_tree else buffer_bytes / n, c.eager_bytes) if name else 1.0
        sharpness = xp.where(nodes > 1.0, OVERLAP_TREE if is_tree else OVERLAP_BETWEEN, OVERLAP_INSIDE)
        waits, spread = (skew, 1 - (1 - SPREAD) * local) if name == "ring" else (1.0, 1.0)
        # messages of pairs have one protocol between nodes; a broadcast's ranks do not wait for one another
        quick_s = c.hop_between_full_s if kind in PAIRS else c.hop_between_s
        least_in, least_out = (local, several) if kind == "broadcast" else (hops_in, hops_out)
        low_latency = least_in, c.hop_inside_s, least_out, quick_s, waits * spread, c.low_latency_share
        full_s = c.hop_switch_s if name in SIMPLE_ONLY else c.hop_inside_full_s
        bandwidth = hops_in, full_s, hops_out, c.hop_between_full_s, 1.0, 1.0
        protocols = [(*bandwidth, fixed_s + FULL_START_S)]
        if name not in SIMPLE_ONLY:
            protocols += [(*low_latency, fixed_s)]
        if name in ("ring", "tree"):
            lines, no_lines_s = xp.where(c.line_share > 0, c.line_share, 1.0), _absent_s(xp, c.line_share)
            in_lines = hops_in, c.hop_inside_line_s, hops_out, c.hop_between_line_s, waits * spread, lines
            protocols += [(*in_lines, fixed_s + LINE_START_S + no_lines_s)]
        for near, near_s, far, far_s, slower, share, other_s in protocols:
            latency_s = near * near_s + far * far_s * asks * slower + other_s
            shift_s = near * _shift(xp, near_s, c.shift_inside_s, c.usual_inside_s)
            shift_s = shift_s + far * _shift(xp, far_s * asks * slower, c.shift_between_s, c.usual_between_s)
            inside_s, between_s = (
                volume_in * buffer_bytes / (inside * share),
                volume_out * buffer_bytes / (between * share),
            )
            transfer_s = larger(inside_s, between_s, 6.0)
            # inside a node transfer hides what latency is stated, too
            time_s = larger(latency_s + shift_s * (1 - several), transfer_s, sharpness) + shift_s * several
            best = time_s if best is None else smaller(best, time_s)
    return (c.launch_s + best) * xp.minimum(n - 1.0, 1.0)


def _algorithms(
    kind: str, xp: ModuleType, n: Array, r: Array, nodes: Array, c: LinkConstants
) -> dict[str, tuple[Array, Array, Array, Array, Array]]:
    """Per algorithm: hops inside and between nodes, other latency [s], and bytes of the busiest rank inside a node and
    between nodes as multiples of the buffer."""
    share, several = (n - 1) / n, xp.minimum(nodes - 1.0, 1.0)
    local = xp.minimum(r - 1, 1.0)  # 0 where every rank of the group has a node to itself
    ring_in, ring_out = n - nodes, nodes * several
    tree_in, tree_out = smaller(r - 1, 2 * xp.log2(r)), xp.log2(nodes)
    if kind == "all_reduce":
        # one of two nodes sends its buffer once; one inside a tree sends half of it up, once more to two children
        tree_volume = xp.minimum(nodes - 1, 2.0)
        # a switch that reduces gets every rank's buffer once and sends the sum once
        (switched, no_switch_s), (networked, no_network_s) = _reduced(xp, c.switch_share), _reduced(xp, c.network_share)
        ring_volume, over = 2 * share * several / r, 2 * share * local
        return {
            "ring": (2 * ring_in, 2 * ring_out, 0.0, over, ring_volume),
            "tree": (2 * tree_in, 2 * tree_out, 0.0, over, tree_volume / r / c.tree_share),
            "nvls": (2 * local, 2 * ring_out, no_switch_s, switched * local, ring_volume),
            "nvls_tree": (2 * local, 2 * tree_out, no_switch_s, switched * local, tree_volume / r),
            "collnet": (2 * local, 2 * several, no_switch_s + no_network_s, switched * local, networked * several / r),
        }
    if kind in ("all_gather", "reduce_scatter"):
        return {"ring": (ring_in, ring_out, 0.0, share * local, share * several / r)}
    if kind == "all_to_all":
        # sends to all peers are posted at once; what stays in the node does not load its adapters
        fixed_s = (n - r) * c.peer_s
        return {"": (local * (1 + POSTED * (r - 1)), several, fixed_s, (r - 1) / n, (n - r) / n)}
    if kind == "send_recv":
        return {"": (local * (1 - several), several, 0.0, local * (1 - several), several)}
    return {
        "ring": (ring_in, ring_out, 0.0, local, several / r),
        "tree": (tree_in, tree_out, 0.0, local, several / r),
    }


def _shift(xp: ModuleType, hop_s: Array, stated_s: Array, usual_s: Array) -> Array:
    """What a stated latency adds to a hop: as much as it is beyond the usual one, of hops that take less than that in
    proportion, so that twice the latency is never more than twice the time. However low the stated latency, a hop keeps
    `LEAST_HOP` of the fitted one: software."""
    return xp.maximum(stated_s * xp.minimum(hop_s / usual_s, 1.0), (LEAST_HOP - 1) * hop_s)


def _reduced(xp: ModuleType, share: Array) -> tuple[Array, Array]:
    """Volume in buffers of a reduction in switches of this efficiency, and what keeps those without from it [s]."""
    return 1 / xp.where(share > 0, share, 1.0), _absent_s(xp, share)


def _asks(message_bytes: Array, eager_bytes: Array) -> Array:
    """Latencies of a message: 1 of one sent at once, 2 of one that asks first. On the wire half of what LL sends is
    flags. No steeper than that more ranks, and smaller messages, still take longer."""
    return 1 + 1 / (1 + (eager_bytes / (2 * message_bytes)) ** ASKS)


def _absent_s(xp: ModuleType, share: Array) -> Array:
    return xp.where(share > 0, 0.0, IMPOSSIBLE_S)


LEAST_HOP: Final = 0.25
"""Share of the fitted hop that is software: it stays however low a stated latency."""
_DEFAULT_HOP_S: Final = {"hop_inside": 2e-6, "hop_between": 20e-6}
_LEAST_EFFICIENCY: Final = 0.02


class Effect(NamedTuple):
    """One term of a constant's sum."""

    of: str
    """What it is a part of, such as the efficiency `inside` a node."""
    link: str = ""
    """Link class that it holds for; empty for all."""
    kind: str = ""
    """Kind of collective that it holds for; empty for all."""

    def __str__(self) -> str:
        return "|".join(part for part in self if part)


def effects(kind: str, inside: str, between: str) -> tuple[Effect, ...]:
    """All effects that a collective of this kind on these link classes depends on."""
    of_kind = (Effect("launch", kind=kind), Effect("inside", kind=kind), Effect("between", kind=kind))
    near = (Effect(of, inside) for of in ("inside", "hop_inside", "peers", "low_latency"))
    tiers = ("between", "hop_between", "hop_ratio_between", "long_ring", "peer_s", "nodes")
    far = (Effect(of, between) for of in tiers)
    names = (
        "hop_ratio", "hop_line", "hop_switch", "switch", "network", "neighbours", "low_latency_between",
        "hop_line_between", "hop_pair", "tree",
    )  # fmt: skip
    alone = (Effect(of) for of in names)
    both = (Effect("inside", inside, kind), Effect("between", between, kind), Effect("hop_between", between, kind))
    return (*of_kind, *near, *far, *alone, *both)


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
    "tree": (1.4, 0.7),  # NCCL's trees: 0.92 * 0.85 of a ring, and limits of their own for each channel
    "neighbours": (0.0, 0.5),
    "long_ring": (log(16384.0), 1.5),
    "low_latency_between": (-0.6, 0.5),
}
_EFFICIENCY: Final = {"inside": (1.1, 0.7), "between": (2.2, 0.4)}
PEER_HOPS: Final = 0.5
"""Expected time that a peer costs an exchange, in hops between nodes."""


def expected(effect: Effect) -> tuple[float, float]:
    """Expected value of an effect and its standard deviation."""
    of, name, kind = effect
    link = link_named(name)
    if of in _EFFICIENCY:
        # an exchange depends on topology and routing more than neighbours in a ring do
        return (0.0, 1.0 if kind == "all_to_all" else 0.5) if name else _EFFICIENCY[of]
    if of in _DEFAULT_HOP_S:
        return (0.0, 0.3) if kind else (log(link.hop_s if link else _DEFAULT_HOP_S[of]), 0.5)
    if of == "peer_s":
        return log(PEER_HOPS * (link.hop_s if link else _DEFAULT_HOP_S["hop_between"])), 0.8
    return _peers(link) if of == "peers" else _EXPECTED[of]


def _peers(link: LinkClass | None) -> tuple[float, float]:
    """In a mesh bandwidth grows with the peers, on a host bridge it is shared, behind a switch it stays."""
    if link and link.mesh:
        return 0.8, 0.2
    if link and link.name.startswith("PCIe"):
        return -0.2, 0.3
    return 0.0, 0.02


def constants(
    values: Mapping[Effect, float], kind: str, fabric: Fabric, level: int, ranks_per_node: float, concurrent: float,
    in_network: bool, spans_nodes: bool,
) -> LinkConstants:  # fmt: skip
    """Constants of the curve for groups of `ranks_per_node` on a fabric that reach network level `level`.

    Over several nodes the links inside count at their full rate: what they lack is in the time of the group inside its
    node, below which no price of a larger one falls.
    """
    inside, between = fabric.inside.link, fabric.levels[level].link

    def value(*of: str) -> float:
        found = values.get(Effect(*of))
        return expected(Effect(*of))[0] if found is None else found

    def efficiency(tier: str, link: str) -> float:
        logit = value(tier, "", kind) + value(tier, link) + value(tier, link, kind)
        return max(1 / (1 + exp(-logit)), _LEAST_EFFICIENCY)

    near_s = exp(value("hop_inside", inside))
    far_s = exp(value("hop_between", between) + value("hop_between", between, kind))
    near_ratio, far_ratio = 1 + exp(value("hop_ratio")), 1 + exp(value("hop_ratio_between", between))
    near_line, far_line = 1 + exp(value("hop_line")), 1 + exp(value("hop_line_between"))
    link, at_scale = link_named(inside), fabric.levels[level].slows_at_scale
    low_latency = value("low_latency_between") if spans_nodes else value("low_latency", inside)
    return LinkConstants(
        launch_s=exp(value("launch", "", kind)),
        hop_inside_s=near_s,
        hop_inside_full_s=near_ratio * near_s,
        hop_inside_line_s=near_line * near_s,
        hop_switch_s=exp(value("hop_switch")),
        hop_between_s=far_s,
        hop_between_full_s=far_ratio * far_s * (exp(value("hop_pair")) if kind in PAIRS else 1.0),
        hop_between_line_s=far_line * far_s,
        shift_inside_s=fabric.latency_shift_s(level, False),
        shift_between_s=fabric.latency_shift_s(level, True),
        usual_inside_s=fabric.inside.usual_latency_s,
        usual_between_s=fabric.levels[level].usual_latency_s,
        peer_s=exp(value("peer_s", between)),
        bandwidth_inside=fabric.inside.bandwidth * (1.0 if spans_nodes else efficiency("inside", inside)),
        bandwidth_between=fabric.share_between(level, ranks_per_node, concurrent) * efficiency("between", between),
        low_latency_share=1 / (1 + exp(-low_latency)),
        line_share=LINE_SHARE if fabric.carries_lines(level if spans_nodes else 0) else 0.0,
        peer_exponent=value("peers", inside) if link and (link.mesh or link.name.startswith("PCIe")) else 0.0,
        node_exponent=exp(value("nodes", between)) if at_scale else 0.0,
        neighbour_share=1 / (1 + exp(-value("neighbours"))) if at_scale else 1.0,
        long_ring=exp(value("long_ring", between)) if at_scale else NEVER,
        eager_bytes=network.eager_bytes if (network := link_named(between)) else NEVER,
        tree_share=1 / (1 + exp(-value("tree"))),
        switch_share=1 / (1 + exp(-value("switch"))) if link and link.reduces else 0.0,
        network_share=1 / (1 + exp(-value("network"))) if in_network else 0.0,
    )


def least_volume(kind: str, ranks: np.ndarray, ranks_per_node: np.ndarray, reduces: np.ndarray | bool) -> np.ndarray:
    """Least share of the buffer (as nccl-tests counts it) that a rank moves one way over the group's outermost tier.

    Whatever the algorithm: inside a node each of n ranks must receive the n - 1 shares that it lacks; for an all-reduce
    twice (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", JPDC 69, 2009, section 3), or its whole
    buffer once where switches add (`reduces`). Between N nodes the same holds of nodes, whose traffic r ranks share.
    Copies inside one device are no traffic: 0 for one rank. float64[n].

    >>> least_volume("all_reduce", np.array([8.0]), np.array([8.0]), False).tolist()
    [1.75]
    """
    n = np.asarray(ranks, np.float64)
    r = np.minimum(np.maximum(ranks_per_node, 1.0), n)
    between = n > r
    parties = np.where(between, np.ceil(n / r), n)
    share = np.where(between, r, 1.0)
    lacking = (parties - 1) / np.maximum(parties, 1.0)
    if kind == "all_reduce":
        volume = np.where(reduces, np.minimum(2 * lacking, 1.0), 2 * lacking) / share
    elif kind in ("all_gather", "reduce_scatter"):
        volume = lacking / share
    elif kind == "all_to_all":
        volume = np.where(between, n - r, n - 1) / n
    elif kind == "send_recv":
        volume = np.ones(len(n))
    else:  # a broadcast: every party but the root receives the buffer
        volume = 1 / share
    return volume * (n > 1)
