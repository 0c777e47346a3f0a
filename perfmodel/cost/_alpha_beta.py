"""Collectives on a cluster: from ops and network levels to the arrays that the physical curve takes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.learn import link_class
from perfmodel.spec import Cluster, Collective

MOST_HOP_SHIFT: Final = 0.8
"""A level faster than its class's usual latency takes at most this share off the fitted hop."""


@dataclass(frozen=True)
class Groups:
    """`n` collectives of one kind as columns."""

    buffer_bytes: Float64[np.ndarray, "n"]
    ranks: Float64[np.ndarray, "n"]
    ranks_per_node: Float64[np.ndarray, "n"]
    level: np.ndarray
    """Outermost network level, at least 1 where the group spans nodes of a cluster that has one; int[n]."""
    concurrent: Float64[np.ndarray, "n"]

    @classmethod
    def of(cls, ops: Sequence[Collective], cluster: Cluster) -> "Groups":
        """Columns of ops of one kind."""
        table = np.array(
            [(op.bytes, op.num_ranks, op.ranks_per_node, op.level, op.concurrent) for op in ops], np.float64
        ).reshape(-1, 5)
        ranks, last = table[:, 1], len(cluster.levels) - 1
        per_node = np.clip(table[:, 2], 1, ranks)
        level = np.clip(table[:, 3].astype(np.int64), 0, last)
        level = np.where(ranks > per_node, np.maximum(level, min(1, last)), 0)
        return cls(table[:, 0], ranks, per_node, level, np.maximum(table[:, 4], 1.0))


def share_between_nodes(groups: Groups, cluster: Cluster) -> Float64[np.ndarray, "n"]:
    """One-way bytes/s between nodes that each rank of a group has to itself.

    A level's bandwidth is stated per device with all devices busy, so a node owns `devices_per_node` times
    that; `concurrent` groups share it. A rank alone gets at most one adapter (or the stated share, where
    that is more): eight adapters serve eight ranks, not one.
    """
    node_size = cluster.devices_per_node
    stated = np.array([level.bandwidth_bytes_per_s for level in cluster.levels])
    narrowest = np.minimum.accumulate(np.concatenate([stated[:1] * np.inf, stated[1:]]))
    narrowest[0] = stated[0]  # a cluster of one level: a flat network
    adapter = np.array(
        [
            link_class(level.name, cluster.device.name, i > 0).bandwidth_bytes_per_s
            for i, level in enumerate(cluster.levels)
        ]
    )
    per_device = narrowest[groups.level]
    one_rank = np.maximum(per_device, np.minimum(adapter[groups.level], per_device * node_size))
    return np.minimum(per_device * node_size / (groups.concurrent * groups.ranks_per_node), one_rank)


def hop_between_nodes(
    groups: Groups, cluster: Cluster, fitted_s: Float64[np.ndarray, "levels"]
) -> Float64[np.ndarray, "n"]:
    """Latency [s] of one message at each group's outermost level."""
    return shifted_hops(cluster, fitted_s)[groups.level]


def shifted_hops(cluster: Cluster, fitted_s: Float64[np.ndarray, "levels"]) -> Float64[np.ndarray, "levels"]:
    """Fitted hop per level, moved by how far the level's latency is from its class's usual one."""
    usual = np.array(
        [link_class(level.name, cluster.device.name, i > 0).latency_s for i, level in enumerate(cluster.levels)]
    )
    stated = np.array([level.latency_s for level in cluster.levels])
    return np.maximum(fitted_s + stated - usual, (1 - MOST_HOP_SHIFT) * fitted_s)
