"""Where on a cluster a group of devices lies, and so which network it uses."""

from collections import Counter
from dataclasses import replace

from perfmodel.ops import Collective, Op
from perfmodel.spec import Cluster


def placed(op: Op, group: tuple[int, ...], cluster: Cluster | None, n_devices: int) -> Op:
    """A collective with the nodes and network level of its group; kernels are returned as they are.

    Devices fill nodes in order of their numbers. Where a group spans nodes, all devices of a node are taken
    to communicate in the same way at the same time, as replicas do.
    """
    if not isinstance(op, Collective) or cluster is None:
        return op
    node = cluster.devices_per_node
    level = next(
        (k for k, tier in enumerate(cluster.levels) if len({d // tier.size for d in group}) == 1),
        len(cluster.levels) - 1,
    )
    per_node = max(Counter(d // node for d in group).values())
    spans_nodes = len({d // node for d in group}) > 1
    concurrent = max(1, min(node, n_devices) // per_node) if spans_nodes else 1
    return replace(op, ranks_per_node=per_node, level=level, concurrent=concurrent)
