"""Seconds of the transfers between stages, by what is sent and how far."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._communication import completions, hop_tiers, send, senders
from perfmodel.prediction._placement import Placement, rank_strides
from perfmodel.program import ProgramSpec
from perfmodel.spec import Cluster, Job, Layout, Op
from perfmodel.workload import BlockOps


@dataclass(frozen=True, eq=False)
class SendDraft:
    """Transfers of every block's output over every distance, before they are timed."""

    ops: tuple[Op, ...]
    block: Int[np.ndarray, " ops"]
    tier: Int[np.ndarray, " ops"]
    """Distance of a send (see `hop_tier`), -1 where the event completes what was sent over any."""
    tiers: int

    def seconds(self, time_s: Float[np.ndarray, " ops"], blocks: int) -> Float[np.ndarray, "blocks tiers"]:
        """Seconds of sending each block's output over each distance."""
        table = np.zeros((blocks, self.tiers))
        sent = self.tier >= 0
        table[self.block[sent], self.tier[sent]] = time_s[sent]
        return table + np.bincount(self.block[~sent], time_s[~sent], blocks)[:, None]


def send_draft(layout: Layout, blocks: Sequence[BlockOps], share: float, job: Job, cluster: Cluster) -> SendDraft:
    """The events of a shard's transfers, which carry `share` of a micro-batch."""
    ops: list[tuple[Op, int, int]] = []
    for b, block in enumerate(blocks):
        for tier in range(len(cluster.levels) + 1):
            op = send(block.boundary_bytes * share, max(0, tier - 1), tier == 0, job.dtype, cluster)
            ops.append((op, b, tier))
        for comm in completions(block):
            group = Placement.of(comm.group, layout)
            op = group.collective(comm.collective, comm.bytes * share, job.dtype, cluster)
            ops.append((op, b, -1))
    events, block_of, tier_of = zip(*ops, strict=True)
    return SendDraft(events, np.array(block_of), np.array(tier_of), len(cluster.levels) + 1)


@dataclass(frozen=True, eq=False)
class Hops:
    """Transfers out of every stage; `tier` 0: inside a node, then 1 + network level."""

    block: Int[np.ndarray, "2 stages"]
    """Block whose output is sent, forwards and backwards."""
    tier: Int[np.ndarray, "2 stages"]
    exists: Float[np.ndarray, "2 stages"]
    """1 where a stage has a neighbour to send to."""

    def seconds(self, table: Float[np.ndarray, "blocks tiers"]) -> Float[np.ndarray, "2 stages"]:
        """Seconds of every transfer, from `SendDraft.seconds`."""
        return table[self.block, self.tier] * self.exists


def hops_of(
    spec: ProgramSpec, counts: Float[np.ndarray, "stages segments blocks"], layout: Layout, cluster: Cluster
) -> Hops:
    """Where the transfers of a pipeline go."""
    rank, last = senders(spec, counts)
    rank = rank * rank_strides(layout)["pp"]
    block, tier, exists = (np.zeros((2, spec.n_stages), int) for _ in range(3))
    for way, source, target in ((0, slice(None, -1), slice(1, None)), (1, slice(1, None), slice(None, -1))):
        level, same = hop_tiers(rank[source], rank[target], cluster)
        tier[way, source] = np.where(same, 0, 1 + level)
        block[way, source] = last[:-1]
        exists[way, source] = 1
    return Hops(block, tier, exists.astype(float))
