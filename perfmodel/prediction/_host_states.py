"""Model states in host memory: what copying them and updating them there adds to a step.

Reduced gradients are copied to the host after each reduction, which updates the states there (ZeRO-Offload, arXiv
2101.06840, section 4) and sends back new weights while it updates the next ones (section 5.1: tiles of parameters in
two buffers); or weights stay there too and are copied before each gather (ZeRO-Infinity, arXiv 2104.07857; torch's
`CPUOffload`).
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._classes import in_classes
from perfmodel.prediction._memory import host_bandwidth
from perfmodel.prediction._placement import Group
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import StatePlace, is_trained, state_params, stored_dtype_bytes, trained_params
from perfmodel.program import Kind, ProgramSpec
from perfmodel.spec import Layout
from perfmodel.units import dtype_bytes


class HostSeconds(NamedTuple):
    """Seconds per parameter of a rank's own shard."""

    gather: float
    """Before each gather of weights."""
    reduce: float
    """After each reduction of gradients."""
    update: float
    """At the end of a step."""


def host_seconds(setting: Setting, layout: Layout, reduced: bool) -> HostSeconds:
    """What a layout with states on the host adds; copies at the link's nominal rate, updates at that of the host's
    processors, which the devices of a node share.

    Args:
        reduced: whether gradients are reduced at all, and so copied then; else they are copied before the update.

    Raises:
        LayoutError: the device entry does not tell of its host's link.
    """
    if layout.offload_states == "none":
        return HostSeconds(0.0, 0.0, 0.0)
    rate = host_bandwidth(setting.cluster.device)
    weight_s, gradient_s = stored_dtype_bytes(setting.job) / rate, dtype_bytes(setting.job.grad_dtype) / rate
    on_host = layout.offload_states == "weights"
    if not is_trained(setting.job):
        return HostSeconds(weight_s * on_host, 0.0, 0.0)
    sharing = min(setting.cluster.devices_per_node, layout.devices)
    update_s = sharing / setting.framework.host_updates_per_s
    back_s = 0.0 if on_host else weight_s
    return HostSeconds(weight_s * on_host, gradient_s * reduced, max(update_s, back_s) + gradient_s * (not reduced))


def shard_params(
    layout: Layout, params: Mapping[Group, Float[np.ndarray, " blocks"]], replicas: int
) -> Float[np.ndarray, " blocks"]:
    """Of so many parameters of every block, those that are a rank's own to update."""
    places = {group: StatePlace.of(group, layout, layout.replicate, replicas) for group in params}
    return np.sum([of / (places[g].shards.size if layout.zero else 1) for g, of in params.items()], axis=0)


def host_block_s(
    setting: Setting, layout: Layout, blocks: ShardBlocks, spec: ProgramSpec
) -> Float[np.ndarray, "3 blocks"]:
    """What states on the host add for every block: to a gather, a reduction and an update (`HostSeconds`)."""
    seconds = host_seconds(setting, layout, spec.grad_reduce != "none")
    pipelined = layout.pp > 1
    held, trained = (
        shard_params(layout, params, spec.replicas)
        for params in (state_params(blocks, pipelined), trained_params(blocks, pipelined, setting.job))
    )
    return np.stack([held * seconds.gather, trained * seconds.reduce, trained * seconds.update])


def host_state_s(
    of_block_s: Float[Any, "3 blocks"],
    kind: Int[np.ndarray, " classes"],
    stage: Int[np.ndarray, " classes"],
    segment: Int[np.ndarray, " classes"],
    stage_map: Int[np.ndarray, "ranks chunks"],
    counts: Float[Any, "stages segments blocks"],
) -> Float[Any, " classes"]:
    """What states on the host add to every class of a program.

    Args:
        of_block_s: see `host_block_s`.
        kind, stage, segment: of every class (`Structure`).
        stage_map: see `ProgramSpec`.
        counts: blocks of every segment of every stage; its array namespace is that of the result.
    """
    gather, reduce, update = of_block_s
    of_rank = (counts.sum(axis=1) @ update)[stage_map].sum(axis=1)
    first = np.zeros(len(counts), int)
    first[stage_map[:, 0]] = np.arange(len(stage_map))
    gathers = np.isin(kind, (Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD))
    return (
        gathers * in_classes(stage, segment, counts @ gather)
        + (kind == Kind.GRAD_REDUCE) * in_classes(stage, segment, counts @ reduce)
        + (kind == Kind.OPTIMIZER) * of_rank[first[stage]]
    )
