"""The physical curve of a communication library: two tiers, two algorithms, two protocols, the best of all.

A library such as NCCL runs a ring or a double binary tree in a low-latency or a bandwidth protocol (LL and
Simple: half the bandwidth at a fraction of the latency), and a tuner picks the fastest. The curve has the
same form with eight interpretable constants, which `_collective_constants` fits to measurements.
"""

from dataclasses import dataclass, fields
from types import ModuleType
from typing import Final

import numpy as np

from perfmodel.learn._collective_alpha_beta import Array, larger, namespace, smaller

KINDS: Final = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")


REFERENCE_PEERS: Final = 7
"""Peers in a node of eight; larger nodes are switched, their bandwidth grows no further."""
HOP_RATIO_BETWEEN_NODES: Final = 2.5
"""Latency of a bandwidth-protocol message between nodes over that of a low-latency one (NCCL's tuning table
has factors from 2 to 5 by fabric)."""
MOST_HOP_RATIO_OF_MANY_NODES: Final = 3.0
OVERLAP_INSIDE: Final = 3.0
"""Sharpness of the smooth maximum (`larger`) of latency and transfer inside a node."""
SUM: Final = 1.0
PIPELINED: Final = 0.5
"""The same between nodes, where 1 gives the sum and 1/2 the optimally pipelined tree."""


@dataclass(frozen=True)
class LinkConstants:
    """Constants of the curve; every field a number or an array of one common shape."""

    launch_s: Array
    """Time that no message size and rank count changes: kernel launch, dispatch."""
    hop_intra_s: Array
    """Latency of one message inside a node in the low-latency protocol."""
    hop_inter_s: Array
    """Latency of one message between nodes in the low-latency protocol."""
    bandwidth_intra: Array
    """Effective bytes/s of one rank inside the node in the bandwidth protocol, with `REFERENCE_PEERS` peers."""
    bandwidth_inter: Array
    """Effective bytes/s between nodes of one rank (its share of the node's links)."""
    low_latency_share: Array
    """Bandwidth of the low-latency protocol as a share of the full one."""
    bandwidth_hop_ratio: Array
    """Latency of a hop in the bandwidth protocol over that in the low-latency protocol."""
    peer_exponent: Array
    """How bandwidth inside a node grows with the peers of a rank: 0 behind a switch, towards 1 in a mesh of
    direct links (each pair has its own), negative where ranks share a host bridge. Any sign."""

    @classmethod
    def from_vector(cls, vector: Array) -> "LinkConstants":
        """From float64[8] or [8, n]: natural logarithms of the fields in order, the last one as it is."""
        launch, hop_intra, hop_inter, intra, inter, share, ratio = np.exp(vector[:-1])
        return cls(launch, hop_intra, hop_inter, intra, inter, share, ratio, vector[-1])

    def take(self, index: Array) -> "LinkConstants":
        """The constants at `index` of every field."""
        return LinkConstants(**{f.name: np.asarray(getattr(self, f.name))[index] for f in fields(self)})


def collective_curve(
    kind: str, buffer_bytes: Array, ranks: Array, ranks_per_node: Array, constants: LinkConstants
) -> Array:
    """Time [s] of one collective kind on `ranks` ranks, `ranks_per_node` of them to a node.

    `launch + min over algorithm and protocol of join(latency, max(transfer intra, transfer inter))`, with smooth
    extrema. Inside a node latency hides behind transfer (a smooth maximum fits the tables best). Between nodes
    a ring waits for its hops (`latency + transfer`), and a tree is pipelined: with the best number of chunks it
    takes `(sqrt(latency) + sqrt(transfer))^2` (Sanders et al. 2009, section 2: `k alpha + S beta + 2 sqrt(k
    alpha S beta)`). Differentiable in bytes, ranks and all constants; 0 for one rank.

    Hops of a ring: each of its passes walks every node boundary once; of a tree: a chain inside the node and
    log2 of the nodes up (and down). A ring sends 2 (n - 1) / n of the buffer over each node's links, shared
    by the r ranks of the node; a double binary tree 2 (1 - 2^(1 - N)): half as much for two nodes.
    """
    xp = namespace(buffer_bytes, ranks, ranks_per_node, constants.bandwidth_intra, constants.hop_intra_s)
    n, r = ranks * 1.0, ranks_per_node * 1.0
    nodes = xp.maximum(n / r, 1.0)
    several = xp.minimum(nodes - 1.0, 1.0)  # 0 inside one node, 1 from two nodes on
    peers = xp.clip(xp.minimum(r, n) - 1.0, 1.0, REFERENCE_PEERS)
    bandwidth_intra = constants.bandwidth_intra * (peers / REFERENCE_PEERS) ** constants.peer_exponent
    # the fitted ratio shapes the knee of one node; along thousands of hops it must be a latency again
    ratio = constants.bandwidth_hop_ratio
    hop_ratio = xp.where(nodes > 1.0, xp.minimum(ratio, MOST_HOP_RATIO_OF_MANY_NODES), ratio)
    best = None
    for hops_intra, hops_inter, volume_intra, volume_inter, join in _ways(kind, xp, n, r, nodes, several):
        sharpness = xp.where(nodes > 1.0, join, OVERLAP_INSIDE)
        for intra_ratio, inter_ratio, share in (
            (1.0, 1.0, constants.low_latency_share),
            (hop_ratio, HOP_RATIO_BETWEEN_NODES, 1.0),
        ):
            latency_s = intra_ratio * hops_intra * constants.hop_intra_s
            latency_s += inter_ratio * hops_inter * constants.hop_inter_s
            intra_s = volume_intra * buffer_bytes / (bandwidth_intra * share)
            inter_s = volume_inter * buffer_bytes / (constants.bandwidth_inter * share)
            time_s = larger(latency_s, larger(intra_s, inter_s, 6.0), sharpness)
            best = time_s if best is None else smaller(best, time_s)
    return (constants.launch_s + best) * xp.minimum(n - 1.0, 1.0)


def _ways(
    kind: str, xp: ModuleType, n: Array, r: Array, nodes: Array, several: Array
) -> tuple[tuple[Array, Array, Array, Array, float], ...]:
    """Per algorithm: hops inside and between nodes, volume inside a node and per rank between nodes, and how
    latency joins transfer between nodes (see `SUM`, `PIPELINED`)."""
    inside, share = xp.minimum(r, n), (n - 1) / n
    local = xp.minimum(inside - 1, 1.0)  # 0 where every rank of the group has a node to itself
    ring_intra, ring_inter = n - nodes, nodes * several
    tree_intra, tree_inter = smaller(inside - 1, 2 * xp.log2(inside)), xp.log2(nodes)
    if kind == "all_reduce":
        tree_volume = 2 * (1 - 2.0 ** (1 - nodes))
        return (
            (2 * ring_intra, 2 * ring_inter, 2 * share * local, 2 * share * several / r, SUM),
            (2 * tree_intra, 2 * tree_inter, 2 * share * local, tree_volume / r, PIPELINED),
        )
    if kind in ("all_gather", "reduce_scatter"):
        return ((ring_intra, ring_inter, share * local, share * several / r, SUM),)
    if kind == "all_to_all":
        # sends to all peers are posted at once: they queue for the link, they do not wait for one another
        hops_intra, hops_inter = 1 + 0.1 * (inside - 1), several + 0.2 * (nodes - 1)
        return ((hops_intra, hops_inter, (inside - 1) / n, (n - inside) / n, SUM),)
    if kind == "send_recv":
        return ((local, several, local, several, SUM),)
    return (
        (ring_intra, ring_inter, local, several / r, SUM),
        (tree_intra, tree_inter, local, several / r, PIPELINED),
    )
