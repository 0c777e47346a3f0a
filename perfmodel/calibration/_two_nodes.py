"""Measurements on two nodes that determine a collective's time on more (DistSim section 4.2)."""

from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from perfmodel.ops import Collective
from perfmodel.spec import Cluster
from perfmodel.units import dtype_bytes

ALL_REDUCE_RANKS: Final = 8
"""Ranks beyond which an all-reduce is extrapolated (DistSim section 4.2)."""


@dataclass(frozen=True)
class Reachable:
    """The measurements that determine a collective's time."""

    ops: tuple[Collective, ...]
    """The collective itself, or similar collectives with fewer ranks from which it is extrapolated,
    the largest first."""
    exact: bool
    """Whether the collective itself is measured."""


def reachable(op: Collective, cluster: Cluster, *, nodes: int = 2) -> Reachable:
    """Find measurements on at most `nodes` nodes that determine the time of `op`.

    A collective that fits is measured alone; `CollectiveModel` accounts for equal groups that share
    the links. A collective over more nodes, or an all-reduce of more than `ALL_REDUCE_RANKS` ranks,
    is measured with the same bytes at the largest feasible number of ranks and at half of it, with
    the same ranks per node where possible. `CollectiveModel` extrapolates from both (hops grow with
    the ranks, the bytes that a rank sends with 2 (n - 1) / n), `distsim_all_reduce_time` from the
    larger one.
    """
    most_ranks = ALL_REDUCE_RANKS if op.collective == "all_reduce" else op.num_ranks
    if op.num_nodes <= nodes and op.num_ranks <= most_ranks:
        return Reachable((_on_ranks(op, op.num_ranks, op.ranks_per_node),), exact=True)

    # Full nodes and half-full nodes: two sizes show how time grows with ranks.
    span = min(op.num_nodes, nodes)
    per_node = min(op.ranks_per_node, max(1, most_ranks // span), cluster.devices_per_node)
    ops = []
    for size in dict.fromkeys((per_node, per_node // 2)):
        # A group of one rank sends nothing.
        if size and span * size > 1:
            ops.append(_on_ranks(op, span * size, size))
    return Reachable(tuple(ops), exact=False)


def _on_ranks(op: Collective, ranks: int, per_node: int) -> Collective:
    """The collective over other ranks, alone and with whole elements on each rank."""
    unit = dtype_bytes(op.dtype) * ranks
    n_bytes = max(unit, int(op.bytes) // unit * unit)
    return replace(
        op,
        bytes=float(n_bytes),
        num_ranks=ranks,
        ranks_per_node=per_node,
        level=int(ranks > per_node),
        concurrent=1,
    )


def distsim_all_reduce_time(
    time_of_8_s: float | np.ndarray, ranks: float | np.ndarray
) -> float | np.ndarray:
    """All-reduce time [s] of more than 8 ranks from the measured time of 8 (DistSim section 4.2).

    The bytes a device sends are 2 (N - 1) P / N, so the time scales by
    `[2 (N - 1) / N] / [2 * 7 / 8]`; the latency, which does grow with N, is left out: a baseline,
    not what `CollectiveModel` uses.
    """
    return time_of_8_s * ((ranks - 1) / ranks) / (7 / 8)
