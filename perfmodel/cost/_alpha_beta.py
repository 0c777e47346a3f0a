"""Collectives on a cluster: from ops and network levels to the arrays that the physical curve takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64, Int64

from perfmodel.learn import is_network, link_class
from perfmodel.spec import Cluster, Collective

MOST_HOP_SHIFT: Final = 0.5
"""A level faster than its class's usual latency takes at most this share off the fitted hop."""


@dataclass(frozen=True)
class Tiers:
    """The network levels of a cluster beside the nominal figures of their link classes, innermost first."""

    flat: bool
    """Whether every device is a node of its own (Piz Daint, processes joined by a loopback)."""
    node_size: int
    stated_bandwidth: Float64[np.ndarray, "levels"]
    """One-way bytes/s per device, as the cluster states it."""
    nominal_bandwidth: Float64[np.ndarray, "levels"]
    """Of the link class: of one adapter, between nodes."""
    latency_shift_s: Float64[np.ndarray, "levels"]
    """Stated latency beyond the one usual for the link class."""

    @classmethod
    def of(cls, cluster: Cluster) -> "Tiers":
        """Look up the link classes of a cluster."""
        device, levels = cluster.device.name, cluster.levels
        flat = is_network(levels[0].name, device)
        links = [link_class(level.name, device, flat or i > 0) for i, level in enumerate(levels)]
        return cls(
            flat=flat,
            node_size=1 if flat else cluster.devices_per_node,
            stated_bandwidth=np.array([level.bandwidth_bytes_per_s for level in levels]),
            nominal_bandwidth=np.array([link.bandwidth_bytes_per_s for link in links]),
            latency_shift_s=np.array(
                [level.latency_s - link.latency_s for level, link in zip(levels, links, strict=True)]
            ),
        )

    def hops(self, fitted_s: Float64[np.ndarray, "levels"]) -> Float64[np.ndarray, "levels"]:
        """Fitted hop of each level, moved by how far its latency is from the usual one."""
        return np.maximum(fitted_s + self.latency_shift_s, (1 - MOST_HOP_SHIFT) * fitted_s)


@dataclass(frozen=True)
class Groups:
    """`n` collectives of one kind as columns."""

    buffer_bytes: Float64[np.ndarray, "n"]
    ranks: Float64[np.ndarray, "n"]
    ranks_per_node: Float64[np.ndarray, "n"]
    level: Int64[np.ndarray, "n"]
    """Outermost network level, at least 1 where the group spans nodes of a cluster that has one."""
    concurrent: Float64[np.ndarray, "n"]

    @classmethod
    def of(cls, ops: Sequence[Collective], tiers: Tiers) -> "Groups":
        """Columns of ops of one kind."""
        table = np.array(
            [(op.bytes, op.num_ranks, op.ranks_per_node, op.level, op.concurrent) for op in ops], np.float64
        ).reshape(-1, 5)
        ranks, last = table[:, 1], len(tiers.stated_bandwidth) - 1
        level = np.clip(table[:, 3].astype(np.int64), 0, last)
        if tiers.flat:
            per_node = np.ones(len(ranks))
        else:
            per_node = np.clip(table[:, 2], 1, ranks)
            level = np.where(ranks > per_node, np.maximum(level, min(1, last)), 0)
        return cls(table[:, 0], ranks, per_node, level, np.maximum(table[:, 4], 1.0))


def share_between_nodes(groups: Groups, tiers: Tiers) -> Float64[np.ndarray, "n"]:
    """One-way bytes/s between nodes that each rank of a group has to itself.

    A level's bandwidth is stated per device with all devices busy, so a node owns `node_size` times that;
    `concurrent` groups share it. A rank alone gets at most one adapter (or the stated share, where that is
    more): eight adapters serve eight ranks, not one. What crosses several levels gets the narrowest.
    """
    stated = tiers.stated_bandwidth
    narrowest = stated.copy()  # the innermost level counts only where it is the network itself
    narrowest[1 - tiers.flat :] = np.minimum.accumulate(stated[1 - tiers.flat :])
    per_device = narrowest[groups.level]
    node = per_device * tiers.node_size
    one_rank = np.maximum(per_device, np.minimum(tiers.nominal_bandwidth[groups.level], node))
    return np.minimum(node / (groups.concurrent * groups.ranks_per_node), one_rank)
