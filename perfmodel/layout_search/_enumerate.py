"""From a space to grids of layouts: every combination of degrees and options that can run."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product

import numpy as np
from jaxtyping import Bool

from perfmodel.errors import LayoutError
from perfmodel.layout_search._space import LOOPED, Space
from perfmodel.prediction import (
    LayoutGrid,
    PipelineChoice,
    RecomputeChoice,
    ShardChoice,
    StateChoice,
    check_layout,
    placement_on_network,
)
from perfmodel.schedule import get_schedule
from perfmodel.spec import Cluster, Job, Layout, Model, Transformer
from perfmodel.workload import Shard, blocks


def enumerate_layouts(
    space: Space, model: Model, cluster: Cluster, job: Job, devices: int, rejected: Counter[str]
) -> Iterator[Layout]:
    """All valid layouts of `space` one by one; `rejected` counts why other combinations are not."""
    for grid in enumerate_grids(space, model, cluster, job, devices, rejected):
        yield from grid.layouts()


def enumerate_grids(
    space: Space, model: Model, cluster: Cluster, job: Job, devices: int, rejected: Counter[str]
) -> Iterator[LayoutGrid]:
    """All valid layouts of `space` on `devices` devices (or fewer, if it says so), by degrees and micro-batch.

    Args:
        space, model, cluster, job, devices: what to lay out.
        rejected: gets the number of combinations that are not possible, by reason.
    """
    layers = model.layers + model.decoder_layers if isinstance(model, Transformer) else 0
    misfit = cache(lambda shard: _misfit(model, job, shard))
    orders = cache(lambda degrees: _orders(space, degrees, cluster))
    for degrees in _degrees(space, job, devices, rejected):
        try:
            check_layout(model, cluster, job, degrees, None if space.fewer_devices else devices)
        except LayoutError as error:
            rejected[_short(error)] += 1
            continue
        pipelines = tuple(_pipelines(space, degrees, layers, job, rejected))
        shards = tuple(_shards(space, degrees, orders(degrees.replace(micro_batch=1)), misfit, rejected))
        if not pipelines or not shards:
            continue
        recomputes = tuple(
            RecomputeChoice(mode, n)  # pyright: ignore[reportArgumentType]
            for mode in space.recompute
            for n in (space.recompute_full_layers if mode != "full" else (None,))
        )
        states = tuple(_states(space, degrees))
        valid = _few_enough(pipelines, recomputes, degrees.pp, layers)
        yield LayoutGrid(degrees, pipelines, shards, recomputes, states, valid[:, None, :, None])


def _degrees(space: Space, job: Job, devices: int, rejected: Counter[str]) -> Iterator[Layout]:
    for tp, cp, pp in product(space.tp, space.cp, space.pp):
        if space.fewer_devices:
            replicas = [n for n in range(1, devices // (tp * cp * pp) + 1) if job.global_batch % n == 0]
        elif devices % (tp * cp * pp):
            rejected["tp*cp*pp does not divide the devices"] += 1
            continue
        else:
            replicas = [devices // (tp * cp * pp)]
        for dp, ep, micro_batch in product(replicas, space.ep, space.micro_batch):
            if (dp * cp) % ep:
                rejected["ep does not divide dp*cp"] += 1
            elif job.global_batch % (dp * micro_batch):
                rejected["global batch not divisible by dp*micro_batch"] += 1
            else:
                yield Layout(tp=tp, cp=cp, pp=pp, dp=dp, ep=ep, micro_batch=micro_batch)


def _pipelines(
    space: Space, degrees: Layout, layers: int, job: Job, rejected: Counter[str]
) -> Iterator[PipelineChoice]:
    pp = degrees.pp
    if pp == 1:
        # one stage runs micro-batches one after the other whatever the schedule's name
        yield PipelineChoice("gpipe" if space.schedule == ("gpipe",) else "1f1b", 1)
        return
    for vpp, name in product(space.vpp, space.schedule):
        if vpp > 1 and name not in LOOPED:
            continue
        if vpp > 1 and layers % (pp * vpp):
            rejected["layers not divisible by pp*vpp"] += 1
        elif vpp == 1 and name == "breadth-first" and "gpipe" in space.schedule:
            continue  # the same with one chunk
        elif _possible(name if vpp == 1 else LOOPED[name], vpp, degrees, layers, job, rejected):
            yield PipelineChoice(name if vpp == 1 else LOOPED[name], vpp)


def _possible(name: str, vpp: int, degrees: Layout, layers: int, job: Job, rejected: Counter[str]) -> bool:
    scheduler = get_schedule(name)
    chunks = scheduler.chunks_for(vpp)
    try:
        scheduler.require(degrees.pp, job.num_microbatches(degrees), chunks)
    except LayoutError:
        rejected[f"schedule {name} cannot do these stages and micro-batches"] += 1
        return False
    if scheduler.chunks and layers and int(scheduler.stage_map(degrees.pp, chunks).max()) + 1 > layers:
        rejected[f"schedule {name} has more stages than layers"] += 1
        return False
    if job.seq_len % scheduler.slices:
        rejected[f"sequence not divisible into the slices of schedule {name}"] += 1
        return False
    return True


def _orders(space: Space, degrees: Layout, cluster: Cluster) -> list[str]:
    """Orders of dimensions that place some process group differently."""
    orders = {placement_on_network(degrees.replace(order=order), cluster): order for order in reversed(space.order)}
    return [order for order in space.order if order in orders.values()]


def _shards(
    space: Space,
    degrees: Layout,
    orders: list[str],
    misfit: Callable[[Shard], str],
    rejected: Counter[str],
) -> Iterator[ShardChoice]:
    split = degrees.tp > 1
    for sequence_parallel in space.sequence_parallel if split else (False,):
        shard = Shard.of(degrees.replace(sequence_parallel=sequence_parallel))
        if reason := misfit(shard):
            rejected[reason] += 1
            continue
        for tp_overlap, order in product(space.tp_overlap if split else space.tp_overlap[:1], orders):
            yield ShardChoice(sequence_parallel, tp_overlap, order)


def _states(space: Space, degrees: Layout) -> Iterator[StateChoice]:
    replicated = degrees.dp * degrees.cp > 1
    zeros = space.zero if replicated else tuple(z for z in space.zero if z == 0) or (0,)
    reduces = space.overlap_grad_reduce if replicated else space.overlap_grad_reduce[:1]
    for zero, reduce, offload in product(zeros, reduces, space.offload if degrees.pp > 1 else space.offload[:1]):
        for gather in space.overlap_param_gather if zero else space.overlap_param_gather[:1]:
            yield StateChoice(zero, reduce, gather, offload)


def _few_enough(
    pipelines: tuple[PipelineChoice, ...], recomputes: tuple[RecomputeChoice, ...], pp: int, layers: int
) -> Bool[np.ndarray, "pipelines recomputes"]:
    """Whether a choice recomputes fewer layers than the fullest stage has (all of them is a choice of its own)."""
    chunks = [get_schedule(p.schedule).chunks_for(p.vpp) for p in pipelines]
    stages = [get_schedule(p.schedule).stage_map(pp, n).max() + 1 for p, n in zip(pipelines, chunks, strict=True)]
    most = -(-layers // np.array(stages))
    return np.array([sum(c.recompute_full_layers or ()) for c in recomputes]) < np.maximum(most, 1)[:, None]


def _misfit(model: Model, job: Job, shard: Shard) -> str:
    """Why the model cannot be divided so; empty if it can."""
    try:
        blocks(model, job, shard)
    except LayoutError as error:
        return _short(error)
    return ""


def _short(error: LayoutError) -> str:
    text = str(error)
    for words, reason in (
        ("attention heads", "attention heads not divisible by tp"),
        ("heads", "attention heads not divisible by tp"),
        ("need sequence_parallel", "experts need sequence parallelism"),
        ("experts", "experts not divisible by ep"),
        ("sequence length", "sequence not divisible by cp (and tp)"),
        ("stages are too many", "more stages than layers"),
    ):
        if words in text:
            return reason
    return text
