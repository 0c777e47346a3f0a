"""Model states in host memory: seconds of their copies, and of optimizer updates on the host.

Reduced gradients are copied to the host after each reduction, which updates the states there
(ZeRO-Offload, arXiv 2101.06840, section 4) and sends back new weights while it updates the next
ones (section 5.1: tiles of parameters in two buffers); or weights stay there too and are copied
before each gather (ZeRO-Infinity, arXiv 2104.07857; torch's `CPUOffload`).
"""

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import shorten_reprs
from perfmodel.errors import LayoutError, Reason
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import (
    STATES,
    StatePlace,
    gathered_again,
    is_trained,
    reuse_params,
    stored_dtype_bytes,
    stored_params,
    trained_params,
)
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.phases import in_classes
from perfmodel.prediction.placement import Group
from perfmodel.program import Kind, ProgramSpec
from perfmodel.spec import OPTIMIZERS, Device, Job, Layout, Model, Transformer
from perfmodel.units import dtype_bytes
from perfmodel.workload import optimizer_op

_NODE_MEMORY_BY_LINK: Final = (
    (15.75e9, 2 * 6 * 2666e6 * 8),
    (31.5e9, 2 * 8 * 3200e6 * 8),
    (63e9, 2 * 8 * 4800e6 * 8),
    (126e9, 2 * 8 * 6400e6 * 8),
)
"""Rate of the link between host and device, which indicates the generation of the host's
processors, and memory bandwidth of two such processors: channels, transfers per second, bytes per
transfer. PCIe 3: Intel Xeon Skylake, six channels of DDR4-2666; 4: AMD EPYC Rome, eight of
DDR4-3200; 5: Intel Xeon Sapphire Rapids, eight of DDR5-4800; 6: Granite Rapids, of which DGX B300
has those with eight of DDR5-6400."""
_COHERENT_HOST_BANDWIDTH: Final = 512e9
"""Bandwidth of the memory of one Grace processor (NVIDIA Grace CPU data sheet), which has 450 GB/s
to its devices."""
_COHERENT_LINK: Final = 450e9
_REACHED_SHARE: Final = 0.46 / 1.3
"""Share of its memory bandwidth that a host reaches while it updates for several ranks.

0.46: DeepSpeed's CPU-Adam for one process on two Xeon 8168 (ZeRO-Offload, Ren et al., USENIX ATC
2021, table 4: ten billion parameters in 2.57 s, of 30 bytes each). Ranks that are not bound to the
cores beside their memory take 1.3 times as long (github.com/deepspeedai/DeepSpeed, pull request
7474)."""
_THREAD_BYTES_PER_S: Final = 12e9
"""Rate at which one core streams from and to memory: ten to fourteen GB/s of server processors,
limited by the cache misses that a core keeps in flight (McCalpin, Memory Bandwidth and System
Balance in HPC Systems, SC16)."""


def node_memory_bandwidth(device: Device, devices: int) -> float:
    """Host memory bandwidth of a node with a number of devices, in bytes per second."""
    link = device.host_bandwidth_bytes_per_s or _NODE_MEMORY_BY_LINK[0][0]
    newest_link, newest = _NODE_MEMORY_BY_LINK[-1]

    # A link faster than PCIe is coherent: there is a processor for every 450 GB/s of it.
    if link > newest_link:
        return devices * link / _COHERENT_LINK * _COHERENT_HOST_BANDWIDTH

    # Devices on PCIe share two processors of the link's generation.
    for (_, bandwidth), (next_link, _) in pairwise(_NODE_MEMORY_BY_LINK):
        if link < next_link:
            return bandwidth
    return newest


_EAGER_ADAM_BYTES: Final = 84 - 28
"""Additional bytes that Adam moves per parameter if every operator is a separate pass over fp32
tensors (torch/optim/adamw.py `_single_tensor_adamw`: decay, first moment, two for the second, root,
division, sum and update) than in one loop."""


def host_bytes_per_parameter(job: Job, *, eager: bool) -> float:
    """Bytes of host memory read and written per parameter by an update on the host.

    They are as many as on the device, and more where it runs operator by operator (`eager`).
    """
    n_bytes = optimizer_op(1, job).bytes_per_param
    is_eager_adam = eager and OPTIMIZERS[job.optimizer].kernel == "adam"
    return n_bytes + (_EAGER_ADAM_BYTES if is_eager_adam else 0)


def host_update_s(setting: Setting, ranks: int) -> float:
    """Seconds per parameter of an update on the host, with several ranks per node.

    The ranks share the memory bandwidth of the node, and each brings as many threads as its
    framework starts.
    """
    framework = setting.framework
    if framework.host.host_updates_per_s is not None:
        return ranks / framework.host.host_updates_per_s
    n_bytes = host_bytes_per_parameter(setting.job, eager=framework.host.eager_host_updates)
    bandwidth = _REACHED_SHARE * node_memory_bandwidth(setting.cluster.device, ranks)
    # Launchers limit the threads of processes that share a node; one alone takes all cores.
    if framework.host.host_threads and ranks > 1:
        bandwidth = min(bandwidth, ranks * framework.host.host_threads * _THREAD_BYTES_PER_S)
    return ranks * n_bytes / bandwidth


def host_bandwidth(device: Device) -> float:
    """One-way bandwidth between a device and host memory, in bytes per second.

    Raises:
        LayoutError: the device entry does not tell.
    """
    if device.host_bandwidth_bytes_per_s is None:
        raise LayoutError(
            f"offload needs the host link of {device.name}; add host_gb_per_s to its device entry",
            Reason.HOST_LINK,
        )
    return device.host_bandwidth_bytes_per_s


class HostSeconds(NamedTuple):
    """Seconds that states in host memory add per parameter of a rank's own shard."""

    gather: float
    """Added before each gather of weights."""
    reduce: float
    """Added after each reduction of gradients."""
    update: float
    """Added at the end of a step."""


def host_seconds(setting: Setting, layout: Layout, reduced: bool) -> HostSeconds:
    """Seconds added by a layout's states in host memory.

    Copies run at the link's nominal rate, updates at that of the host's memory, which the devices
    of a node share (`host_update_s`).

    Args:
        reduced: whether gradients are reduced at all, and so copied then; else they are copied
            before the update.

    Raises:
        LayoutError: the device entry does not tell of its host's link.
    """
    if layout.offload_states == "none":
        return HostSeconds(0.0, 0.0, 0.0)
    rate = host_bandwidth(setting.cluster.device)
    weight_s = stored_dtype_bytes(setting.job) / rate
    gradient_s = dtype_bytes(setting.job.gradients.grad_dtype) / rate
    weights_on_host = layout.offload_states == "weights"
    if not is_trained(setting.job):
        return HostSeconds(weight_s * weights_on_host, 0.0, 0.0)
    update_s = host_update_s(setting, min(setting.cluster.devices_per_node, layout.devices))
    # New weights go back to the device while the host updates the next ones (ZeRO-Offload, section
    # 5.1), unless they stay on the host until they are gathered.
    copy_back_s = 0.0 if weights_on_host else weight_s
    return HostSeconds(
        gather=weight_s * weights_on_host,
        reduce=gradient_s * reduced,
        update=max(update_s, copy_back_s) + gradient_s * (not reduced),
    )


def shard_params(
    layout: Layout, params: Mapping[Group, Float[np.ndarray, " blocks"]], replicas: int
) -> Float[np.ndarray, " blocks"]:
    """Parameters of every block that a rank updates itself, computed from those that its groups
    hold."""
    shards_of_groups = []
    for group, params_of_group in params.items():
        place = StatePlace.of(group, layout, layout.replicate, replicas)
        shards_of_groups.append(params_of_group / (place.shards.size if layout.zero else 1))
    return np.sum(shards_of_groups, axis=0)


def host_block_s(
    setting: Setting, layout: Layout, blocks: ShardBlocks, spec: ProgramSpec
) -> Float[np.ndarray, "4 blocks"]:
    """Seconds that the host adds for every block to a gather for forward, to those for backward, to
    a reduction and to an update.

    They are copies and updates of states that lie in host memory (`HostSeconds`), and the parts of
    weights that the host copies one by one (`Framework.partition_copy_s`).
    """
    seconds = host_seconds(setting, layout, spec.grad_reduce != "none")
    pipelined = layout.pp > 1
    stored = shard_params(layout, stored_params(blocks, pipelined, setting.job), spec.replicas)
    trained = shard_params(layout, trained_params(blocks, pipelined, setting.job), spec.replicas)
    gathered, reduced = _partition_copies(setting.model, layout, blocks, spec)
    copy_s = setting.framework.host.partition_copy_s
    gather_s = stored * seconds.gather + gathered * copy_s
    reduce_s = trained * seconds.reduce + reduced * copy_s
    regathered = gathered_again(
        blocks, pipelined, setting.job, reuse_params(layout, setting.framework)
    )
    return np.stack([gather_s, gather_s * (1 + regathered), reduce_s, trained * seconds.update])


def _partition_copies(
    model: Model, layout: Layout, blocks: ShardBlocks, spec: ProgramSpec
) -> tuple[Float[np.ndarray, " blocks"], Float[np.ndarray, " blocks"]]:
    """Number of parts of parameters, for every block, that ZeRO 3 joins in a gather and separates
    in a reduction: one part per parameter and rank of its sharding group."""
    # Matrices are gathered and reduced. Biases and norms are reduced as well, but stay whole on
    # every rank (`stage3_param_persistence_threshold` of DeepSpeed, 100,000 elements by default).
    gathered = np.zeros(len(blocks.blocks))
    reduced = np.zeros(len(blocks.blocks))
    if layout.zero != 3:
        return gathered, reduced
    for group in STATES:
        shards = StatePlace.of(group, layout, layout.replicate, spec.replicas).shards.size
        if shards == 1:
            continue
        for i, block in enumerate(blocks.blocks):
            matrices = block.weight_shapes(experts=group == "expert_dp").total()
            vectors = _layer_vectors(model, matrices) if blocks.layers[i] and group == "dp" else 0
            gathered[i] += shards * matrices
            reduced[i] += shards * (matrices + vectors)
    return gathered, reduced


def _layer_vectors(model: Model, matrices: int) -> int:
    """Number of vectors of a layer: biases of its matrices, and the scales and shifts of its two
    norms."""
    if not isinstance(model, Transformer):
        return 0
    shifted = model.norms.norm == "layer_norm" and (
        model.block.bias if model.norms.norm_bias is None else model.norms.norm_bias
    )
    return matrices * model.block.bias + 2 * (2 if shifted else 1)


def host_state_s(
    of_block_s: Float[Any, "4 blocks"],
    kind: Int[np.ndarray, " classes"],
    stage: Int[np.ndarray, " classes"],
    segment: Int[np.ndarray, " classes"],
    stage_map: Int[np.ndarray, "ranks chunks"],
    counts: Float[Any, "stages segments blocks"],
) -> Float[Any, " classes"]:
    """Seconds that states in host memory add to each class of a program.

    Args:
        of_block_s: see `host_block_s`.
        kind, stage, segment: kind, stage and segment of every class (`Structure`).
        stage_map: see `ProgramSpec`.
        counts: blocks of every segment of every stage; its array namespace is that of the result.
    """
    gather_s, gather_backward_s, reduce_s, update_s = of_block_s

    # A rank updates all of its stages in one step of its optimizer, whose class is of the first of
    # them.
    rank_update_s = (counts.sum(axis=1) @ update_s)[stage_map].sum(axis=1)
    rank_of_first_stage = np.zeros(len(counts), int)
    rank_of_first_stage[stage_map[:, 0]] = np.arange(len(stage_map))

    # A class is of one kind, and its time comes from the table of this kind alone.
    gathers_s = in_classes(stage, segment, counts @ gather_s)
    gathers_backward_s = in_classes(stage, segment, counts @ gather_backward_s)
    reduces_s = in_classes(stage, segment, counts @ reduce_s)
    return (
        (kind == Kind.PARAM_GATHER) * gathers_s
        + (kind == Kind.PARAM_GATHER_BACKWARD) * gathers_backward_s
        + (kind == Kind.GRAD_REDUCE) * reduces_s
        + (kind == Kind.OPTIMIZER) * rank_update_s[rank_of_first_stage[stage]]
    )


shorten_reprs(__name__)
