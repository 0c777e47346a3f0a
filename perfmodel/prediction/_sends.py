"""Transfers between pipeline stages: what is sent, how far, and what the receiver completes it with."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.ops import Collective, CollectiveKind, Op
from perfmodel.prediction._placement import Placement, rank_strides
from perfmodel.program import ProgramSpec
from perfmodel.spec import Cluster, Job, Layout, interleaved_groups
from perfmodel.workload import BlockOps

NO_EVENT: Final = -1


@dataclass(frozen=True, eq=False)
class Transfers:
    """Events of sending every block's output over every distance; `tier` 0: inside a node, then 1 + network level."""

    ops: tuple[Op, ...]
    send: Int[np.ndarray, "blocks tiers"]
    """Place in `ops` of the send."""
    completions: Int[np.ndarray, "most blocks"]
    """Places of the collectives by which the receiver completes what was sent sharded, `NO_EVENT` for none."""

    def seconds(self, time_s: Float[np.ndarray, " ops"]) -> Float[np.ndarray, "blocks tiers"]:
        """Seconds of every transfer, from those of `ops`."""
        after_s = np.append(time_s, 0.0)[self.completions].sum(axis=0)
        return time_s[self.send] + after_s[:, None]


def transfers(layout: Layout, blocks: Sequence[BlockOps], share: float, job: Job, cluster: Cluster) -> Transfers:
    """The transfers of a shard that carry `share` of a micro-batch."""
    ops: list[Op] = []

    def place(op: Op) -> int:
        ops.append(op)
        return len(ops) - 1

    tiers = range(len(cluster.levels) + 1)
    stride = rank_strides(layout)["pp"]
    sends = []
    for block in blocks:
        n_bytes = block.boundary_bytes * share
        sends.append([place(_send(n_bytes, tier, job.dtype, cluster, stride)) for tier in tiers])
    completed = [
        [
            place(Placement.of(comm.group, layout).collective(comm.collective, comm.bytes * share, job.dtype, cluster))
            for comm in block.boundary_comm
            for _ in range(comm.count)
        ]
        for block in blocks
    ]
    by_step = np.array([*zip_longest(*completed, fillvalue=NO_EVENT)], int).reshape(-1, len(blocks))
    return Transfers(tuple(ops), np.array(sends), by_step)


def _send(
    n_bytes: float, tier: int, dtype: str, cluster: Cluster, stride: int, kind: CollectiveKind = "send_recv"
) -> Collective:
    """Point-to-point between two ranks that are `stride` apart.

    The ranks between them send to theirs at the same time, and if the message leaves the node all of its devices do.
    """
    return Collective(
        collective=kind,
        bytes=n_bytes,
        num_ranks=2,
        ranks_per_node=1 if tier else 2,
        dtype=dtype,
        level=max(0, tier - 1),
        concurrent=cluster.devices_per_node if tier else 1,
        interleaved=1 if tier else interleaved_groups(2, stride + 1),
    )


@dataclass(frozen=True, eq=False)
class Hops:
    """Where the transfers out of every stage go, forwards and backwards."""

    block: Int[np.ndarray, "2 stages"]
    """Block whose output is sent: the last of the earlier stage."""
    tier: Int[np.ndarray, "2 stages"]
    """See `Transfers`."""
    exists: Bool[np.ndarray, "2 stages"]
    """Whether a stage has a neighbour to send to."""

    def seconds(self, table: Float[np.ndarray, "blocks tiers"]) -> Float[np.ndarray, "2 stages"]:
        """Seconds of every transfer, from `Transfers.seconds`."""
        return table[self.block, self.tier] * self.exists


def hops(
    spec: ProgramSpec, counts: Float[np.ndarray, "stages segments blocks"], layout: Layout, cluster: Cluster
) -> Hops:
    """The hops of a pipeline; of replicas the first stands for all, whose hops cross the same links.

    On several kinds of nodes ranks count on their own kind, and what goes to another crosses the outermost level.
    """
    rank = rank_of_stage(spec)
    kind, at = _on_kinds(layout)
    rank, kind = at[rank] * rank_strides(layout)["pp"], kind[rank]
    last = counts.shape[2] - 1 - (counts.sum(axis=1)[:, ::-1] > 0).argmax(axis=1)
    block, tier, exists = (np.zeros((2, spec.n_stages), int) for _ in range(3))
    for way, source, target in ((0, slice(None, -1), slice(1, None)), (1, slice(1, None), slice(None, -1))):
        near = _tiers(rank[source], rank[target], cluster)
        tier[way, source] = np.where(kind[source] == kind[target], near, outermost_tier(cluster))
        block[way, source] = last[:-1]
        exists[way, source] = 1
    return Hops(block, tier, exists.astype(bool))


def rank_of_stage(spec: ProgramSpec) -> Int[np.ndarray, " stages"]:
    """The first pipeline rank that holds each stage."""
    holds = spec.stage_map == np.arange(spec.n_stages)[:, None, None]
    return holds.any(axis=2).argmax(axis=1)


def outermost_tier(cluster: Cluster) -> int:
    """Distance of what leaves a cluster: a single level is all that there is to cross."""
    return len(cluster.levels) if len(cluster.levels) > 1 else 0


def across(op: Collective, cluster: Cluster) -> Collective:
    """What two ranks exchange, from one end of a link whose cluster is given."""
    return _send(op.bytes, outermost_tier(cluster), op.dtype, cluster, stride=1, kind=op.collective)


def _on_kinds(layout: Layout) -> tuple[Int[np.ndarray, " ranks"], Int[np.ndarray, " ranks"]]:
    """Kind of nodes of every pipeline rank, and which of its pipeline ranks it is."""
    if layout.kinds is None:
        return np.zeros(layout.pp, int), np.arange(layout.pp)
    kinds = np.unique(layout.kinds, return_inverse=True)[1]
    return kinds, np.array([(kinds[:rank] == kind).sum() for rank, kind in enumerate(kinds.tolist())])


def _tiers(
    source: Int[np.ndarray, " hops"], target: Int[np.ndarray, " hops"], cluster: Cluster
) -> Int[np.ndarray, " hops"]:
    """Distance of pairs of ranks: 0 inside a node, else 1 + the innermost level that joins them (the last if none)."""
    joined = np.stack([source // level.size == target // level.size for level in cluster.levels])
    level = np.where(joined.any(axis=0), joined.argmax(axis=0), len(cluster.levels) - 1)
    return np.where(joined[0], 0, 1 + level)
