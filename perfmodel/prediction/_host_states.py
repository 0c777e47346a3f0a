"""Model states in host memory: what copying them and updating them there adds to a step.

Reduced gradients are copied to the host after each reduction, which updates the states there (ZeRO-Offload, arXiv
2101.06840, section 4) and sends back new weights; or weights stay there too and are copied before each gather
(ZeRO-Infinity, arXiv 2104.07857; torch's `CPUOffload`).
"""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._memory import host_bandwidth
from perfmodel.prediction._placement import Group
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import StatePlace, is_trained, state_params, stored_dtype_bytes, trained_params
from perfmodel.program import WHOLE, Kind, ProgramSpec, Structure
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
    return HostSeconds(weight_s * on_host, gradient_s * reduced, update_s + back_s + gradient_s * (not reduced))


def shard_params(
    layout: Layout, params: Mapping[Group, Float[np.ndarray, " blocks"]], replicas: int
) -> Float[np.ndarray, " blocks"]:
    """Of so many parameters of every block, those that are a rank's own to update."""
    places = {group: StatePlace.of(group, layout, layout.replicate, replicas) for group in params}
    return np.sum([of / (places[g].shards.size if layout.zero else 1) for g, of in params.items()], axis=0)


def host_state_s(
    setting: Setting,
    layout: Layout,
    blocks: ShardBlocks,
    spec: ProgramSpec,
    structure: Structure,
    counts: Float[np.ndarray, "stages segments blocks"],
) -> Float[np.ndarray, " classes"]:
    """What states on the host add to every class of a program."""
    seconds = host_seconds(setting, layout, spec.grad_reduce != "none")
    pipelined = layout.pp > 1
    held, trained = (
        counts @ shard_params(layout, params, spec.replicas)
        for params in (state_params(blocks, pipelined), trained_params(blocks, pipelined, setting.job))
    )
    kind, stage, segment = structure.class_kind, structure.class_stage, structure.class_segment
    gathered, of_class = (np.where(segment == WHOLE, n.sum(axis=1)[stage], n[stage, segment]) for n in (held, trained))
    of_rank = np.zeros(len(held))
    of_rank[spec.stage_map[:, 0]] = trained.sum(axis=1)[spec.stage_map].sum(axis=1)
    out = np.where(np.isin(kind, (Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD)), gathered * seconds.gather, 0.0)
    out += np.where(kind == Kind.GRAD_REDUCE, of_class * seconds.reduce, 0.0)
    return out + np.where(kind == Kind.OPTIMIZER, of_rank[stage] * seconds.update, 0.0)
