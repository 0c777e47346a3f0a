"""Events between a model's blocks: sends, gradient reductions, weight gathers, optimizer steps."""

from collections.abc import Iterable

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._blocks import BlockTable
from perfmodel.prediction._memory import stored_dtype_bytes
from perfmodel.prediction._placement import Group, Placement
from perfmodel.program import Kind, ProgramSpec
from perfmodel.spec import Cluster, Collective, Job, Layout, Op
from perfmodel.units import dtype_bytes
from perfmodel.workload import optimizer_op

ClassEvent = tuple[Kind, tuple[int, int, int], Op]
"""An event that a class (kind, (stage, segment, micro-batches)) holds; a class may hold several."""


def communication_events(
    layout: Layout,
    table: BlockTable,
    spec: ProgramSpec,
    spans: Iterable[int],
    counts: Float[np.ndarray, "stages segments blocks"],
    job: Job,
    cluster: Cluster,
) -> list[ClassEvent]:
    """Every event of the step that belongs to no block; `spans`: how many micro-batches transfers may carry."""
    events = _sends(layout, table, spec, spans, counts, job, cluster) if layout.pp > 1 else []
    groups: dict[Group, Float[np.ndarray, "stages segments"]] = {
        "dp": counts @ table.dense_params(layout.pp > 1),
        "expert_dp": counts @ table.expert_params,
    }
    for group, params in groups.items():
        place = Placement.of(group, layout).times(spec.replicas, layout)
        if place.size > 1:
            events += _sharded_state(layout, place, params, job, cluster)
        if job.mode == "train":
            events += _optimizer(layout, place, params, spec, job)
    if spec.tied_embedding:
        n_bytes = table.tied_params * dtype_bytes(job.grad_dtype)
        op = Placement.of("embedding", layout).collective("all_reduce", n_bytes, job.grad_dtype, cluster)
        events += [(Kind.EMBEDDING_REDUCE, (stage, 0, 1), op) for stage in (0, counts.shape[0] - 1)]
    return events


def _sends(
    layout: Layout,
    table: BlockTable,
    spec: ProgramSpec,
    spans: Iterable[int],
    counts: Float[np.ndarray, "stages segments blocks"],
    job: Job,
    cluster: Cluster,
) -> list[ClassEvent]:
    """Transfers between stages; of replicas the first stands for all, whose hops cross the same links.

    What passes between two stages is the output of the last block of the earlier one.
    """
    stride = Placement.of("pp", layout).stride
    holder = {int(stage): rank for rank, stages in reversed([*enumerate(spec.stage_map)]) for stage in stages}
    events: list[ClassEvent] = []
    last_block = [int(np.flatnonzero(of_stage)[-1]) for of_stage in counts.sum(axis=1)]
    hops = [(Kind.SEND_FORWARD, stage, stage + 1, last_block[stage]) for stage in range(spec.n_stages - 1)]
    hops += [(Kind.SEND_BACKWARD, stage + 1, stage, last) for _, stage, _, last in hops]
    for span in spans:
        share = span / spec.scheduler.slices
        for kind, source, target, last in hops:
            block = table.blocks[last]
            hop = send(
                block.boundary_bytes * share, holder[source] * stride, holder[target] * stride, job.dtype, cluster
            )
            # what was sent sharded is completed by the receiver before it can start
            complete = [
                Placement.of(comm.group, layout).collective(comm.collective, comm.bytes * share, job.dtype, cluster)
                for comm in block.boundary_comm
                for _ in range(comm.count)
            ]
            events += [(kind, (source, 0, span), op) for op in (hop, *complete)]
    return events


def send(n_bytes: float, source: int, target: int, dtype: str, cluster: Cluster) -> Collective:
    """Point-to-point between two ranks; when it leaves the node, all devices of the node send at once."""
    node = cluster.devices_per_node
    same = source // node == target // node
    levels = [i for i, level in enumerate(cluster.levels) if source // level.size == target // level.size]
    return Collective(
        collective="send_recv",
        bytes=float(n_bytes),
        num_ranks=2,
        ranks_per_node=2 if same else 1,
        dtype=dtype,
        level=levels[0] if levels else len(cluster.levels) - 1,
        concurrent=1 if same else node,
    )


def _sharded_state(
    layout: Layout, place: Placement, params: Float[np.ndarray, "stages segments"], job: Job, cluster: Cluster
) -> list[ClassEvent]:
    reduce = "reduce_scatter" if layout.zero else "all_reduce"
    wanted = [(Kind.GRAD_REDUCE, reduce, dtype_bytes(job.grad_dtype), job.grad_dtype)]
    if layout.zero:
        weight = stored_dtype_bytes(job)
        wanted += [(kind, "all_gather", weight, job.dtype) for kind in (Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD)]
    return [
        (kind, (s, g, 1), place.collective(collective, params[s, g] * size, dtype, cluster))
        for kind, collective, size, dtype in wanted
        for s, g in np.argwhere(params > 0).tolist()
    ]


def _optimizer(
    layout: Layout,
    place: Placement,
    params: Float[np.ndarray, "stages segments"],
    spec: ProgramSpec,
    job: Job,
) -> list[ClassEvent]:
    """One update per pipeline rank over all its chunks, on its shard of the states."""
    per_rank = params.sum(axis=1)[spec.stage_map].sum(axis=1)
    shards = place.size if layout.zero else 1
    return [
        (Kind.OPTIMIZER, (int(spec.stage_map[rank, 0]), 0, 1), optimizer_op(-(-int(per_rank[rank]) // shards), job))
        for rank in np.flatnonzero(per_rank > 0).tolist()
    ]
