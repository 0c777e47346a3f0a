"""Time of a collective from first principles: launch, hops and bytes over bandwidth, the best of
the algorithms.

The time is `launch + min over algorithm and protocol of join(hops x latency, transfer)` with
`transfer = max(bytes / bandwidth inside a node, bytes / bandwidth between nodes)`, as NCCL itself
models it (`src/graph/tuning.cc`, `ncclTopoTuneModel` and `ncclTopoGetAlgoTime`).

Algorithms: ring, double binary tree (Sanders, Speck and Traeff, Parallel Computing 35, 2009),
reduction in the switches of a node (NVLS) and of the network (SHARP), pairwise exchange. Protocols
as NCCL's LL, LL128 and Simple: a share of the bandwidth at a fraction of the latency, nearly all of
it at little more, and all of it at several times the latency. Every term grows with bytes, ranks
and latency and falls with bandwidth, and so does their minimum.

Functions take NumPy or JAX arrays alike and are differentiable in all real arguments.
"""

import sys
from types import ModuleType
from typing import Final, NamedTuple, get_args

import numpy as np

from perfmodel.cost.learn.collectives.links import (
    REFERENCE_PEERS,
    Array,
    LinkConstants,
    TierConstants,
)
from perfmodel.ops import CollectiveKind

KINDS: Final = get_args(CollectiveKind)
PAIRS: Final = ("send_recv", "all_to_all")
"""Kinds that are messages between pairs."""

OVERLAP_INSIDE: Final = 3.0
"""Sharpness of the smooth maximum (`larger`) of latency and transfer inside a node."""
OVERLAP_BETWEEN: Final = 1.0
"""Sharpness between nodes: the sum (Hockney's alpha and beta)."""
OVERLAP_TREE: Final = 0.65
"""Sharpness of a tree. 1/2 is the optimally pipelined tree, `(sqrt(latency) + sqrt(transfer))^2`
(Sanders et al., section 2); the value lies between that and the sum, because chunk sizes are
fixed."""
CHANNELS_UNTIL: Final = 4.0
"""Nodes up to which a send to a neighbour keeps all its channels: beyond, a rank has more peers
than the library has channels to give them (`ncclTopoComputeP2pChannels`)."""
POSTED: Final = 0.1
"""Share of a hop that each further message costs if several are posted at once inside a node."""
LINE_SHARE: Final = 0.92
"""Bandwidth of LL128 as a share of the full one: 120 bytes of data in a line of 128 (NCCL
`src/graph/tuning.cc`)."""
LINE_START_S: Final = 7.4e-6
"""Extra start time of a collective in the LL128 protocol over one in the low-latency protocol: 14
and 6.6 us (NCCL `src/graph/tuning.cc`)."""
FULL_START_S: Final = 1.8e-6
"""Extra start time of a collective in the Simple protocol over one in the low-latency protocol: 8.4
and 6.6 us (NCCL `src/graph/tuning.cc`)."""
SPREAD: Final = 0.5
"""Share of a low-latency hop between nodes that a ring takes if its nodes have several ranks: its
channels cross the network at different ranks (NCCL `src/graph/tuning.cc`: 2.7 of 5 us in LL, 4 of
8.5 us in LL128, where one rank per node pays all)."""
ASKS: Final = 4
"""Sharpness of the transition to large messages, which ask the receiver before they are sent."""
FULL_POSTS: Final = 3.0
"""Posts to the network that a step of a ring takes in full bandwidth, where the other protocols
take one (NCCL `src/graph/tuning.cc`, `netOverhead`)."""
LEAST_HOP: Final = 0.25
"""Share of the fitted hop that is software, which remains however low the stated latency is."""
HOST_SHARPNESS: Final = 8.0
"""Sharpness of the maximum of a collective's time and the host's time between calls: the host runs
ahead, so the longer one shows alone."""
IMPOSSIBLE_S: Final = 1e6
"""Time of an algorithm that the fabric lacks."""


def namespace(*arrays: Array) -> ModuleType:
    """`jax.numpy` if any argument is a JAX array or tracer, else `numpy`; JAX is imported only if
    needed."""
    jax = sys.modules.get("jax")
    if jax is not None and any(isinstance(a, jax.Array) for a in arrays):
        return jax.numpy
    return np


def larger(a: Array, b: Array, sharpness: float) -> Array:
    """Smooth maximum of positive numbers: their `sharpness`-norm (1 gives the sum)."""
    xp = namespace(a, b)
    high = xp.maximum(a, b)
    low = xp.minimum(a, b)
    ratio = low / xp.maximum(high, 1e-300)
    return high * (1 + ratio**sharpness) ** (1 / sharpness)


def smaller(a: Array, b: Array, sharpness: float = 16.0) -> Array:
    """Smooth minimum of positive numbers."""
    xp = namespace(a, b)
    low = xp.minimum(a, b)
    high = xp.maximum(a, b)
    ratio = low / xp.maximum(high, 1e-300)
    return low * (1 + ratio**sharpness) ** (-1 / sharpness)


ALGORITHMS: Final = ("ring", "tree", "nvls", "nvls_tree", "collnet")
"""Algorithms that a run may be forced to use."""

DIRECT: Final = "direct"
"""All-reduce of an inference server inside a node: kernels that read the memory of all peers, and
the library's where those are slower (vLLM `csrc/custom_all_reduce.cuh`, TensorRT-LLM
`customAllReduceKernels.cu`)."""

SIMPLE_ONLY: Final = ("nvls", "nvls_tree", "collnet")
"""Algorithms that reduce in switches, which have no low-latency protocol (NCCL
`src/graph/tuning.cc`)."""


class _Algorithm(NamedTuple):
    """Work of the busiest rank: messages one after another, and bytes as multiples of the
    buffer."""

    hops_inside: Array
    hops_between: Array
    volume_inside: Array
    volume_between: Array
    other_s: Array = 0.0
    """Time in addition to both; `IMPOSSIBLE_S` if the fabric lacks the algorithm."""


class _Protocol(NamedTuple):
    """A protocol for sending messages, which trades latency against bandwidth."""

    hop_inside_s: Array
    hop_between_s: Array
    share: Array
    """Share of the bandwidth that it reaches."""
    start_s: Array
    """Extra start time over the low-latency protocol."""


def collective_time(
    kind: str,
    buffer_bytes: Array,
    ranks: Array,
    ranks_per_node: Array,
    link: LinkConstants,
    algorithm: str = "",
) -> Array:
    """Seconds of one kind of collective on `ranks` ranks, `ranks_per_node` per node; 0 for one
    rank.

    Sizes as nccl-tests counts them (`perfmodel.ops.Collective`). Inside a node latency hides behind
    transfer (a smooth maximum fits the tables best); between nodes it adds to it. `algorithm`: the
    one of `ALGORITHMS` that the run is held to; by default, and where the kind has no such choice,
    the fastest.
    """
    rates = link.inside.bytes_per_s, link.between.bytes_per_s
    xp = namespace(buffer_bytes, ranks, ranks_per_node, *rates, link.inside.hop_s)
    ranks, per_node = ranks * 1.0, xp.minimum(ranks_per_node * 1.0, ranks)
    nodes = xp.maximum(ranks / per_node, 1.0)

    # 1 from two nodes, and from two ranks of a node, on; in between differentiable
    several = xp.minimum(nodes - 1.0, 1.0)
    local = xp.minimum(per_node - 1.0, 1.0)
    inside, between = _bandwidths(kind, xp, per_node, nodes, link)

    # Every algorithm with every protocol that it may use; a smooth minimum over all of them, as
    # libraries choose by the same estimate (`ncclTopoGetAlgoTime`).
    algorithms = _algorithms(kind, xp, ranks, per_node, nodes, link)
    best = None
    for name, work in algorithms.items():
        if algorithm in algorithms and algorithm != name:
            continue
        is_tree = name in ("tree", "nvls_tree")

        latencies = 1.0
        if name:
            message_bytes = buffer_bytes if is_tree else buffer_bytes / ranks
            latencies = _latencies_between_nodes(message_bytes, link)
        sharpness = xp.where(
            nodes > 1.0, OVERLAP_TREE if is_tree else OVERLAP_BETWEEN, OVERLAP_INSIDE
        )
        for number, protocol in enumerate(_protocols(kind, name, xp, local, several, link)):
            hops_near, hops_far = work.hops_inside, work.hops_between
            is_low_latency = number == 1
            if is_low_latency and kind == "broadcast":
                # in low latency its ranks do not wait for one another
                hops_near, hops_far = local, several

            # Latency: hops one after another. A cluster's stated latency beyond the usual one is a
            # term of its own.
            near_s = protocol.hop_inside_s
            far_s = protocol.hop_between_s * latencies
            latency_s = hops_near * near_s + hops_far * far_s + work.other_s + protocol.start_s
            shift_s = hops_near * _shift(xp, near_s, link.inside)
            shift_s = shift_s + hops_far * _shift(xp, far_s, link.between)

            # Transfer: both tiers carry the same data at the same time, so that the slower one sets
            # the pace.
            inside_s = work.volume_inside * buffer_bytes / (inside * protocol.share)
            between_s = work.volume_between * buffer_bytes / (between * protocol.share)
            transfer_s = larger(inside_s, between_s, 6.0)

            # inside a node transfer hides what latency is stated, too
            time_s = (
                larger(latency_s + shift_s * (1 - several), transfer_s, sharpness)
                + shift_s * several
            )
            best = time_s if best is None else smaller(best, time_s)

    time_s = link.launch_s + best
    if algorithm == DIRECT and kind == "all_reduce":
        time_s = smaller(time_s, _direct_time(xp, buffer_bytes, ranks, several, inside, link))
    time_s = larger(time_s, link.host_s, HOST_SHARPNESS)
    # a group of one rank takes no time at all
    return time_s * xp.minimum(ranks - 1.0, 1.0)


def _latencies_between_nodes(message_bytes: Array, link: LinkConstants) -> Array:
    """Latencies that a message between nodes takes: 1 if it is sent at once, 2 if it asks first."""
    # Half of the bytes that LL sends are flags. The change is no steeper than that more ranks, and
    # smaller messages, still take longer.
    wire_bytes = 2 * message_bytes
    return 1 + 1 / (1 + (link.eager_bytes / wire_bytes) ** ASKS)


def _direct_time(
    xp: ModuleType,
    buffer_bytes: Array,
    ranks: Array,
    several: Array,
    bandwidth: Array,
    link: LinkConstants,
) -> Array:
    """Seconds of an all-reduce that reads the memory of its peers instead of passing messages.

    In one shot every rank reads the buffers of all others, between two barriers. In two shots it
    adds up its share of them and, after a third barrier, reads the sums of the others. A barrier
    sends a flag to all peers at once, so its time does not depend on their number (vLLM
    `csrc/custom_all_reduce.cuh`, `cross_device_reduce_1stage` and `cross_device_reduce_2stage`).
    """
    stated_s = _shift(xp, link.inside.hop_s, link.inside)
    flag_s = link.inside.hop_s + stated_s
    one_shot_s = 2 * flag_s + (ranks - 1) * buffer_bytes / bandwidth
    two_shots_s = 3 * flag_s + 2 * (ranks - 1) / ranks * buffer_bytes / bandwidth
    # Peers on other nodes, or beyond the only one that a host bridge joins, cannot be read.
    out_of_reach = xp.where(ranks - 1 > link.direct_peers, 1.0, 0.0)
    impossible_s = IMPOSSIBLE_S * xp.maximum(several, out_of_reach)
    return link.direct_s + smaller(one_shot_s, two_shots_s) + impossible_s


def peers_of(ranks: Array) -> Array:
    """Number of peers inside a node that affect a rank's bandwidth."""
    return namespace(ranks).clip(ranks - 1.0, 1.0, REFERENCE_PEERS)


def _bandwidths(
    kind: str, xp: ModuleType, per_node: Array, nodes: Array, link: LinkConstants
) -> tuple[Array, Array]:
    """Bytes/s of one rank inside its node, by its peers there, and between nodes, by their
    number."""
    # In a mesh the rate stated is that with all peers; on a bridge, which ranks share, that with
    # one.
    stated_peers = xp.where(link.peer_exponent < 0, 1, link.mesh_peers)
    inside = link.inside.bytes_per_s * (peers_of(per_node) / stated_peers) ** link.peer_exponent
    between = link.between.bytes_per_s * xp.maximum(nodes / 2, 1.0) ** -link.node_exponent
    if kind == "send_recv":
        channels_left = xp.minimum(CHANNELS_UNTIL / nodes, 1.0) ** 2
        between = between * (link.neighbour_share + (1 - link.neighbour_share) * channels_left)
    return inside, between


def _protocols(
    kind: str, name: str, xp: ModuleType, local: Array, several: Array, link: LinkConstants
) -> tuple[_Protocol, ...]:
    """Protocols that an algorithm may use: full bandwidth, then low latency and lines."""
    # switches that reduce have the bandwidth protocol alone
    if name in SIMPLE_ONLY:
        return (_Protocol(link.hop_switch_s, link.between.hop_full_s, 1.0, FULL_START_S),)

    # A ring over nodes of several ranks crosses the network at a different rank for each of its
    # channels, which divides the latency. Every step waits for a message to be handed to the
    # network.
    ring = name == "ring"
    spread = 1 - (1 - SPREAD) * local if ring else 1.0
    post_s = link.post_s * several if ring and kind != "broadcast" else 0.0

    # messages of pairs have one protocol between nodes
    quick_s = link.between.hop_full_s if kind in PAIRS else link.between.hop_s
    both_protocols = (
        _Protocol(
            xp.maximum(link.inside.hop_full_s, FULL_POSTS * post_s),
            link.between.hop_full_s,
            1.0,
            FULL_START_S,
        ),
        _Protocol(
            xp.maximum(link.inside.hop_s, post_s), quick_s * spread, link.low_latency_share, 0.0
        ),
    )
    if kind in PAIRS:
        return both_protocols

    # Lines: where the links do not carry them their time is out of reach instead, so that shapes
    # stay those of arrays.
    share = xp.where(link.line_share > 0, link.line_share, 1.0)
    no_lines_s = xp.where(link.line_share > 0, 0.0, IMPOSSIBLE_S)
    line_s = xp.maximum(link.inside.hop_line_s, post_s)
    return (
        *both_protocols,
        _Protocol(line_s, link.between.hop_line_s * spread, share, LINE_START_S + no_lines_s),
    )


def _algorithms(
    kind: str, xp: ModuleType, ranks: Array, per_node: Array, nodes: Array, link: LinkConstants
) -> dict[str, _Algorithm]:
    """Work of each algorithm of a kind on a number of ranks, `per_node` of them on each node."""
    share = (ranks - 1) / ranks
    several = xp.minimum(nodes - 1.0, 1.0)
    # 0 where every rank of the group has a node to itself
    local = xp.minimum(per_node - 1, 1.0)

    # Hops of a ring: once around, of which one per node crosses the network. Of a tree: along the
    # ranks of a node, or through a tree of them where that is shorter, and up the tree of nodes.
    ring_in = ranks - nodes
    ring_out = nodes * several
    tree_in = smaller(per_node - 1, 2 * xp.log2(per_node))
    tree_out = xp.log2(nodes)
    match kind:
        case "all_reduce":
            return _reductions(
                xp, share, per_node, nodes, (ring_in, ring_out), (tree_in, tree_out), link
            )
        case "all_gather" | "reduce_scatter":
            ring = _Algorithm(
                hops_inside=ring_in,
                hops_between=ring_out,
                volume_inside=share * local,
                volume_between=share * several / per_node,
            )
            return {"ring": ring}
        case "all_to_all":
            # sends to all peers are posted at once; what stays in the node does not load its
            # adapters
            pairwise = _Algorithm(
                hops_inside=local * (1 + POSTED * (per_node - 1)),
                hops_between=several,
                volume_inside=(per_node - 1) / ranks,
                volume_between=(ranks - per_node) / ranks,
                other_s=(ranks - per_node) * link.peer_s,
            )
            return {"": pairwise}
        case "send_recv":
            in_node = local * (1 - several)
            return {"": _Algorithm(in_node, several, volume_inside=in_node, volume_between=several)}
    # a broadcast passes the whole buffer on, around or down
    volumes = {"volume_inside": local, "volume_between": several / per_node}
    return {
        "ring": _Algorithm(ring_in, ring_out, **volumes),
        "tree": _Algorithm(tree_in, tree_out, **volumes),
    }


def _reductions(
    xp: ModuleType,
    share: Array,
    per_node: Array,
    nodes: Array,
    ring_hops: tuple[Array, Array],
    tree_hops: tuple[Array, Array],
    link: LinkConstants,
) -> dict[str, _Algorithm]:
    """Work of the algorithms of an all-reduce, which reduce, then distribute: every hop and every
    byte twice.

    Args:
        share: share of the buffer that a rank gets from others.
        ring_hops, tree_hops: inside and between nodes, one way.
    """
    several = xp.minimum(nodes - 1.0, 1.0)
    local = xp.minimum(per_node - 1, 1.0)
    (ring_in, ring_out), (tree_in, tree_out) = ring_hops, tree_hops
    ring_volume = 2 * share * several / per_node
    # one of two nodes sends its buffer once; one inside a tree sends half of it up, once more to
    # two children
    tree_volume = xp.minimum(nodes - 1, 2.0)
    in_pairs = 2 * share * local

    # a switch that reduces gets every rank's buffer once and sends the sum once
    switched, no_switch_s = _reduced(xp, link.switch_share)
    networked, no_network_s = _reduced(xp, link.network_share)
    in_switch = switched * local
    no_collnet_s = no_switch_s + no_network_s
    return {
        "ring": _Algorithm(2 * ring_in, 2 * ring_out, in_pairs, ring_volume),
        "tree": _Algorithm(
            2 * tree_in, 2 * tree_out, in_pairs, tree_volume / per_node / link.tree_share
        ),
        "nvls": _Algorithm(2 * local, 2 * ring_out, in_switch, ring_volume, no_switch_s),
        "nvls_tree": _Algorithm(
            2 * local, 2 * tree_out, in_switch, tree_volume / per_node, no_switch_s
        ),
        "collnet": _Algorithm(
            2 * local, 2 * several, in_switch, networked * several / per_node, no_collnet_s
        ),
    }


def _shift(xp: ModuleType, hop_s: Array, tier: TierConstants) -> Array:
    """Time that a stated latency adds to a hop: its excess over the usual one, in proportion for
    shorter hops, so that twice the latency never gives more than twice the time. However low the
    stated latency is, a hop keeps the share `LEAST_HOP` of the fitted one, which is software."""
    stated_s = tier.latency_shift_s * xp.minimum(hop_s / tier.usual_latency_s, 1.0)
    return xp.maximum(stated_s, (LEAST_HOP - 1) * hop_s)


def _reduced(xp: ModuleType, share: Array) -> tuple[Array, Array]:
    """Volume, in buffers, of a reduction in switches of this efficiency, and the time [s] that
    rules it out without such switches."""
    return 1 / xp.where(share > 0, share, 1.0), xp.where(share > 0, 0.0, IMPOSSIBLE_S)


def least_volume(
    kind: str, ranks: np.ndarray, ranks_per_node: np.ndarray, reduces: np.ndarray | bool
) -> np.ndarray:
    """Least share of the buffer (as nccl-tests counts it) that a rank moves one way over the
    group's outermost tier.

    Whatever the algorithm: inside a node each of n ranks must receive the n - 1 shares that it
    lacks; for an all-reduce twice (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms",
    JPDC 69, 2009, section 3), or its whole buffer once where switches add (`reduces`). Between N
    nodes the same holds of nodes, whose traffic r ranks share. Copies inside one device are no
    traffic: 0 for one rank. float64[n].

    >>> least_volume("all_reduce", np.array([8.0]), np.array([8.0]), False).tolist()
    [1.75]
    """
    n = np.asarray(ranks, np.float64)
    r = np.minimum(np.maximum(ranks_per_node, 1.0), n)
    between_nodes = n > r
    # The parties of the outermost tier are nodes, or the ranks of one node; ranks of a node share
    # its traffic.
    parties = np.where(between_nodes, np.ceil(n / r), n)
    share = np.where(between_nodes, r, 1.0)
    lacking = (parties - 1) / np.maximum(parties, 1.0)
    if kind == "all_reduce":
        volume = np.where(reduces, 1.0, 2 * lacking) / share
    elif kind in ("all_gather", "reduce_scatter"):
        volume = lacking / share
    elif kind == "all_to_all":
        volume = np.where(between_nodes, n - r, n - 1) / n
    elif kind == "send_recv":
        volume = np.ones(len(n))
    else:  # a broadcast: every party but the root receives the buffer
        volume = 1 / share
    return volume * (n > 1)
