"""Checks whether a layout is valid, before anything is computed."""

from collections import Counter
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from perfmodel.errors import LayoutError, Reason
from perfmodel.prediction.blocks import sliced_job
from perfmodel.schedule import get_schedule
from perfmodel.spec import Cluster, Job, Layout, Model
from perfmodel.units import number_of
from perfmodel.workload import BlockOps, Shard, blocks, layer_count


def check_layout(
    model: Model, cluster: Cluster, job: Job, layout: Layout, devices: int | None = None
) -> None:
    """Raise `LayoutError` (or `UnknownNameError`) for the first inconsistency of a layout."""
    get_schedule(layout.schedule)
    if cluster.kinds or layout.kinds is not None:
        hosted(cluster, layout)
    if devices is not None and layout.devices != devices:
        raise LayoutError(
            f"layout {layout.label} uses tp*cp*pp*dp = {layout.tp}*{layout.cp}*{layout.pp}*{layout.dp} = "
            f"{number_of(layout.devices, 'device')}, not {devices}; {_suggest_dp(layout, devices)}",
            Reason.DEVICES,
        )
    if layout.devices > cluster.capacity:
        cluster.require(layout.devices, f"layout {layout.label}")
    for kind in cluster.kinds or (cluster,):
        kind.device.require(job.dtype)

    # The workload refuses degrees that its blocks cannot be sharded by; the pipeline is checked
    # against the number of layers.
    layers, without_layer = _sharded_layers(model, job, Shard.of(layout))
    check_pipeline(model, job, layout, layers, without_layer)
    if layout.offload_layers:
        check_offloaded_layers(layers, layout.offload_layers)


@lru_cache(maxsize=2**10)
def _sharded_layers(model: Model, job: Job, shard: Shard) -> tuple[int, int]:
    """`layer_count` and `stages_without_layer` of a model's blocks on a shard.

    Raises:
        LayoutError: the shard does not divide the model.
    """
    # Kept, because a run with open settings is checked under thousands of layouts, most of which
    # differ only in what no block depends on.
    sharded_blocks = blocks(model, job, shard)
    return layer_count(sharded_blocks), stages_without_layer(sharded_blocks)


def hosted(cluster: Cluster, layout: Layout) -> Layout:
    """The layout with its kinds of nodes filled in (`_with_kinds`).

    Raises:
        LayoutError: also for replicas of a stage on nodes of several kinds, which would reduce
            gradients over them.
    """
    # A pipeline on nodes of one kind needs no further check.
    layout = _with_kinds(cluster, layout)
    if layout.kinds is None or len(set(layout.kinds)) == 1:
        return layout
    # Bidirectional schedules hold each stage on two ranks, which add up its gradients.
    scheduler = get_schedule(layout.effective_schedule)
    stage_map = scheduler.stage_map(layout.pp, scheduler.chunks_for(layout.vpp))
    for stage in range(int(stage_map.max()) + 1):
        ranks = np.flatnonzero((stage_map == stage).any(axis=1)).tolist()
        kinds = {layout.kinds[rank] for rank in ranks}
        if len(kinds) > 1:
            raise LayoutError(
                f"layout {layout.label}: schedule={layout.schedule} puts the replicas of stage {stage} on "
                f"different kinds of nodes ({', '.join(sorted(kinds))}), and a data-parallel group cannot span "
                "kinds; give all its ranks the same kind",
                Reason.KINDS,
            )
    return layout


def _with_kinds(cluster: Cluster, layout: Layout) -> Layout:
    """The layout with the kind of nodes of each pipeline rank filled in; unchanged on a single
    kind.

    Raises:
        LayoutError, UnknownNameError: unknown kinds, too few nodes of a kind, or a pipeline
            rank on several kinds.
    """
    if not cluster.kinds:
        if layout.kinds is not None:
            raise LayoutError(
                f"layout {layout.label}: cluster {cluster.name} has nodes of one kind; leave kinds= out",
                Reason.KINDS,
            )
        return layout

    # Ranks of a stage have consecutive numbers only if stages are outermost.
    if layout.pp > 1 and not layout.order.endswith("pp"):
        raise LayoutError(
            f"layout {layout.label}: order={layout.order} spreads the ranks of a stage over the kinds of nodes of "
            f"cluster {cluster.name}; let it end with pp",
            Reason.KINDS,
        )

    # Left open, the first kind takes as many pipeline ranks as it has room for, then the next.
    room = cluster.stages_of(layout)
    if layout.kinds is None:
        names_by_rank: list[str] = []
        for name, stages in room.items():
            names_by_rank += [name] * min(stages, layout.pp)
        if len(names_by_rank) < layout.pp:
            raise LayoutError(
                f"layout {layout.label}: {_too_small(cluster, layout, room)}", Reason.KINDS
            )
        return layout.replace(kinds=tuple(names_by_rank[: layout.pp]))

    # Written out, each kind needs room for the ranks that name it.
    for name, stages in Counter(layout.kinds).items():
        if stages > room[cluster.kind(name).name]:
            raise LayoutError(
                f"layout {layout.label}: {_too_small(cluster, layout, room)}", Reason.KINDS
            )
    return layout


def _too_small(cluster: Cluster, layout: Layout, room: dict[str, int]) -> str:
    """Say how many nodes of each kind a layout takes, and how many there are."""
    room_by_kind = [
        f"{kind.name} ({kind.capacity} devices) for {room[kind.name]}" for kind in cluster.kinds
    ]
    return (
        f"each of {layout.pp} pipeline ranks takes {layout.devices // layout.pp} devices (tp*cp*dp) of one kind; "
        f"cluster {cluster.name} has room on {', '.join(room_by_kind)}"
    )


def check_machine(cluster: Cluster, job: Job, devices: int, subject: str = "the job") -> None:
    """Raise `PerfModelError` if the cluster has too few devices, or they do not support the job's
    dtype."""
    cluster.require(devices, subject)
    for kind in cluster.kinds or (cluster,):
        kind.device.require(job.dtype)


def check_pipeline(model: Model, job: Job, layout: Layout, layers: int, without_layer: int) -> None:
    """Raise `LayoutError` if the layers, the batch or the sequence cannot fill the pipeline of a
    layout.

    Args:
        layers: layers of the model, between which a pipeline can be cut (`layer_count` of its
            blocks on the layout's shard).
        without_layer: see `stages_without_layer`.
    """
    scheduler = get_schedule(layout.effective_schedule)
    chunks = scheduler.chunks_for(layout.vpp)
    stages = int(scheduler.stage_map(layout.pp, chunks).max()) + 1
    if stages > layers + without_layer:
        raise LayoutError(
            f"{model.name} has {number_of(layers, 'layer')}, fewer than the {stages} pipeline stages; use a smaller pp or vpp",
            Reason.STAGES,
        )
    scheduler.require(layout.pp, job.num_microbatches(layout), chunks)
    sliced_job(job, scheduler.slices)


def check_offloaded_layers(layers: int, offloaded: int) -> None:
    """Raise `LayoutError` if all layers are offloaded, because copies need a layer to overlap with
    (Megatron-Core transformer_config.py, `cpu_offloading_num_layers`, refuses as many as there
    are)."""
    if offloaded and offloaded >= layers:
        raise LayoutError(
            f"layout: offload_layers={offloaded} must be below the {layers} layers of a rank; use at most "
            f"{max(layers - 1, 0)}",
            Reason.OFFLOADED_LAYERS,
        )


def stages_without_layer(blocks: Sequence[tuple[BlockOps, int]]) -> int:
    """Number of pipeline stages that can hold no layer: the embedding's and the head's."""
    (first, _), (last, _) = blocks[0], blocks[-1]
    return (not first.is_layer) + (not last.is_layer)


def _suggest_dp(layout: Layout, devices: int) -> str:
    """A remedy for a layout that does not use all devices."""
    per_replica = layout.tp * layout.cp * layout.pp
    if devices % per_replica == 0:
        return f"use dp={devices // per_replica}"
    return f"choose tp, pp and cp whose product divides {devices}"
