"""Transfers between pipeline stages."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.ops import Collective, CollectiveKind, Op
from perfmodel.prediction.placement import Placement, rank_strides
from perfmodel.program import ProgramSpec
from perfmodel.spec import Cluster, Job, Layout, interleaved_groups
from perfmodel.workload import BlockOps

NO_EVENT: Final = -1
"""Place of an event that does not exist."""


@dataclass(frozen=True, eq=False)
class Transfers:
    """Events for sending each block's output over each distance.

    Tier 0 is inside a node, tier 1 + n crosses network level n.
    """

    ops: tuple[Op, ...]
    """All of the events."""
    send: Int[np.ndarray, "blocks tiers"]
    """Place in `ops` of the send."""
    completions: Int[np.ndarray, "most blocks"]
    """Places of the collectives by which the receiver completes what was sent sharded, `NO_EVENT` for none."""

    def seconds(self, time_s: Float[np.ndarray, " ops"]) -> Float[np.ndarray, "blocks tiers"]:
        """Seconds of every transfer, from those of `ops`."""
        after_s = np.append(time_s, 0.0)[self.completions].sum(axis=0)
        return time_s[self.send] + after_s[:, None]


def transfers(layout: Layout, blocks: Sequence[BlockOps], share: float, job: Job, cluster: Cluster) -> Transfers:
    """Transfers of a shard, each carrying `share` of a micro-batch."""
    ops: list[Op] = []

    def add(op: Op) -> int:
        ops.append(op)
        return len(ops) - 1

    # Ranks send the part of a block's output that they hold, over any distance.
    tiers = range(len(cluster.levels) + 1)
    stride = rank_strides(layout)["pp"]
    sends = []
    for block in blocks:
        n_bytes = block.boundary_bytes * share
        sends.append([add(_send(n_bytes, tier, job.dtype, cluster, stride)) for tier in tiers])

    # What arrives sharded over tensor-parallel ranks they complete with collectives.
    completions_of_block = []
    for block in blocks:
        completions = []
        for comm in block.boundary_comm:
            place = Placement.of(comm.group, layout)
            for _ in range(comm.count):
                completions.append(add(place.collective(comm.collective, comm.bytes * share, job.dtype, cluster)))
        completions_of_block.append(completions)
    by_step = np.array([*zip_longest(*completions_of_block, fillvalue=NO_EVENT)], int).reshape(-1, len(blocks))
    return Transfers(tuple(ops), np.array(sends), by_step)


def _send(
    n_bytes: float, tier: int, dtype: str, cluster: Cluster, stride: int, kind: CollectiveKind = "send_recv"
) -> Collective:
    """Point-to-point between two ranks that are `stride` apart."""
    # The ranks between the two send at the same time, and if the message leaves the node all of its devices do.
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
    """Destinations of each stage's transfers, forwards and backwards."""

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
    """The hops of a pipeline; the first replica stands for all, because their hops cross equivalent links."""
    # On several kinds of nodes ranks are numbered on their own kind.
    pipeline_rank = rank_of_stage(spec)
    kind_of_rank, number_on_kind = _on_kinds(layout)
    kind = kind_of_rank[pipeline_rank]
    rank = number_on_kind[pipeline_rank] * rank_strides(layout)["pp"]

    # In both directions the output of the earlier stage's last block goes over the wire, or its gradient.
    last_block = counts.shape[2] - 1 - (counts.sum(axis=1)[:, ::-1] > 0).argmax(axis=1)
    earlier, later = slice(None, -1), slice(1, None)
    block = np.zeros((2, spec.n_stages), int)
    tier = np.zeros((2, spec.n_stages), int)
    exists = np.zeros((2, spec.n_stages), bool)
    for direction, source, target in ((0, earlier, later), (1, later, earlier)):
        # What goes to another kind of nodes crosses the outermost level.
        on_one_kind = _tiers(rank[source], rank[target], cluster)
        tier[direction, source] = np.where(kind[source] == kind[target], on_one_kind, outermost_tier(cluster))
        block[direction, source] = last_block[:-1]
        exists[direction, source] = True
    return Hops(block, tier, exists)


def rank_of_stage(spec: ProgramSpec) -> Int[np.ndarray, " stages"]:
    """The first pipeline rank that holds each stage."""
    holds = spec.stage_map == np.arange(spec.n_stages)[:, None, None]
    return holds.any(axis=2).argmax(axis=1)


def outermost_tier(cluster: Cluster) -> int:
    """Network tier of traffic that leaves a cluster."""
    return len(cluster.levels) if len(cluster.levels) > 1 else 0


def across(op: Collective, cluster: Cluster) -> Collective:
    """An exchange between two clusters, as seen from the end on `cluster`."""
    return _send(op.bytes, outermost_tier(cluster), op.dtype, cluster, stride=1, kind=op.collective)


def _on_kinds(layout: Layout) -> tuple[Int[np.ndarray, " ranks"], Int[np.ndarray, " ranks"]]:
    """Kind of nodes of every pipeline rank, and its number among the pipeline ranks on that kind."""
    if layout.kinds is None:
        return np.zeros(layout.pp, int), np.arange(layout.pp)
    kinds = np.unique(layout.kinds, return_inverse=True)[1]
    numbers = [(kinds[:rank] == kind).sum() for rank, kind in enumerate(kinds.tolist())]
    return kinds, np.array(numbers)


def _tiers(
    source: Int[np.ndarray, " hops"], target: Int[np.ndarray, " hops"], cluster: Cluster
) -> Int[np.ndarray, " hops"]:
    """Tier of pairs of ranks: 0 inside a node, else 1 + the innermost level that joins them (the last if none)."""
    joined = np.stack([source // level.size == target // level.size for level in cluster.levels])
    level = np.where(joined.any(axis=0), joined.argmax(axis=0), len(cluster.levels) - 1)
    return np.where(joined[0], 0, 1 + level)
