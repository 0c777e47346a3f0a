"""Model states over data-parallel ranks: their bytes, what ZeRO shards of them, and what it reduces, gathers, updates.

ZeRO (Rajbhandari et al. 2019, section 5): stage 1 shards optimizer states, 2 gradients too, 3 weights too.
"""

from typing import Final, Literal

import numpy as np
from jaxtyping import Float

from perfmodel.ops import Collective, Op
from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._placement import Group, Placement
from perfmodel.spec import Cluster, Job, Layout
from perfmodel.units import dtype_bytes
from perfmodel.workload import optimizer_op

Exchange = Literal["all_reduce", "reduce_scatter", "all_gather"]
"""Of gradients, of gradients to where each is kept or applied, of weights."""
STATES: Final[tuple[Group, ...]] = ("dp", "expert_dp")
"""Ranks that parameters outside and inside routed experts are replicated over."""


def stored_dtype_bytes(job: Job) -> int:
    """Bytes per stored weight: fp8 runs keep 16-bit weights and cast on the fly."""
    return max(dtype_bytes(job.dtype), 2)


def gradient_dtype_bytes(job: Job) -> int:
    """Bytes per kept gradient, with the 16-bit one that a main gradient is accumulated from where both are kept."""
    return dtype_bytes(job.grad_dtype) + (2 if job.half_gradients and dtype_bytes(job.dtype) <= 2 else 0)


def optimizer_bytes_per_param(job: Job) -> float:
    """Adam: two fp32 moments, and an fp32 master copy where weights are narrower (ZeRO, section 3.1). SGD: one moment
    instead of two, or nothing at all if it is plain."""
    if job.optimizer == "plain-sgd":
        return 0.0
    master = 4.0 if dtype_bytes(job.dtype) < 4 else 0.0
    return master + (8.0 if job.optimizer == "adam" else 4.0)


def is_trained(job: Job) -> bool:
    """Whether weights have gradients and are updated."""
    return job.mode == "train" and not job.frozen


def reduces_every_micro_batch(zero: int) -> bool:
    """Whether gradients are reduced after each backward: they are kept sharded."""
    return zero >= 2


def reduction(zero: int, job: Job) -> Exchange:
    """How gradients are reduced: on all ranks, or each part where it is kept or applied."""
    return "all_reduce" if zero == 0 or (zero == 1 and job.all_reduce_gradients) else "reduce_scatter"


def exchanges(zero: int, job: Job) -> tuple[Exchange, ...]:
    """What a step exchanges: gradients if there are any; weights after sharded updates, or where kept sharded."""
    reduced = (reduction(zero, job),) if is_trained(job) else ()
    return (*reduced, "all_gather") if zero == 3 or (zero and is_trained(job)) else reduced


def exchange(kind: Exchange, params: float, place: Placement, job: Job, cluster: Cluster) -> Collective:
    """The collective that exchanges so many parameters' weights or gradients over the ranks of `place`."""
    if kind == "all_gather":
        return place.collective(kind, params * stored_dtype_bytes(job), job.dtype, cluster)
    return place.collective(kind, params * dtype_bytes(job.grad_dtype), job.grad_dtype, cluster)


def update(params: float, shards: int, job: Job) -> Op:
    """The optimizer step over one of `shards` equal parts of so many parameters."""
    return optimizer_op(-(-int(params) // shards), job)


def state_place(group: Group, layout: Layout, replicas: int) -> Placement:
    """Ranks that hold the same parameters: a data-parallel group on all pipeline ranks with replicas of the stage."""
    return Placement.of(group, layout).times(replicas, layout)


def state_params(blocks: ShardBlocks, pipelined: bool) -> dict[Group, Float[np.ndarray, " blocks"]]:
    """Parameters of every block by the ranks that they are replicated over (`STATES`)."""
    return dict(zip(STATES, (blocks.dense_params(pipelined), blocks.expert_params), strict=True))
