"""Edges between nodes as at most two predecessors per op: further ones go through joins."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Int

Ids = Int[np.ndarray, " edges"]


class Joined(NamedTuple):
    """Ops in which every node of a graph has been preceded by the joins that it needs."""

    position: Int[np.ndarray, " nodes"]
    """Op of each node."""
    pred: Int[np.ndarray, "ops 2"]
    """Predecessors of each op, -1 for none."""


def binary_joins(n_nodes: int, source: Ids, destination: Ids) -> Joined:
    """Chains of joins before every node of more than two predecessors.

    A node with k predecessors p0, .., p(k-1) becomes k - 1 ops: join(p0, p1), join(that, p2), .. and last the
    node itself, so that the count of ops is linear in the count of edges.

    Args:
        n_nodes: nodes, numbered so that edges go to higher numbers.
        source: node where each edge comes from.
        destination: node where it goes to.
    """
    order = np.argsort(destination, kind="stable")
    source, destination = source[order], destination[order]
    degree = np.bincount(destination, minlength=n_nodes)
    joins = np.maximum(degree - 2, 0)
    position = (np.arange(n_nodes) + np.cumsum(joins)).astype(np.int32)
    pred = np.full((int(position[-1]) + 1, 2), -1, np.int32)
    first = position - joins.astype(np.int32)
    place = np.arange(len(source)) - (np.cumsum(degree) - degree)[destination]
    row = first[destination] + np.maximum(place - 1, 0)
    pred[row, np.minimum(place, 1)] = position[source]
    chained = place >= 2
    pred[row[chained], 0] = row[chained] - 1
    return Joined(position, pred)
