"""Memory of every pipeline rank: static state, activations in flight, transient buffers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.errors import LayoutError
from perfmodel.prediction._blocks import RECOMPUTE_MODES, BlockTable
from perfmodel.prediction._framework import Framework
from perfmodel.prediction._live import LiveState
from perfmodel.spec import Device, Job, Layout
from perfmodel.units import dtype_bytes

BUCKET_BYTES = 2 * 40e6 * 4
"""Two gradient buckets of 40 M fp32 elements in flight (Megatron-LM's default bucket size)."""


CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class MemoryBatch:
    """Bytes per lane (a layout) and pipeline rank, by category."""

    weights: Float[np.ndarray, "lanes ranks"]
    gradients: Float[np.ndarray, "lanes ranks"]
    optimizer: Float[np.ndarray, "lanes ranks"]
    activations: Float[np.ndarray, "lanes ranks"]
    buffers: Float[np.ndarray, "lanes ranks"]

    @property
    def largest(self) -> list[str]:
        """The category that takes most of each lane's fullest rank."""
        parts = np.stack([getattr(self, name) for name in CATEGORIES])
        fullest = parts.sum(axis=0).argmax(axis=1)
        return [CATEGORIES[i] for i in parts[:, np.arange(len(fullest)), fullest].argmax(axis=0).tolist()]

    @property
    def peak(self) -> Float[np.ndarray, " lanes"]:
        """The fullest rank of each lane."""
        total = self.weights + self.gradients + self.optimizer + self.activations + self.buffers
        return total.max(axis=1)


def optimizer_bytes_per_param(job: Job) -> float:
    """Adam: two fp32 moments, and an fp32 master copy where weights are narrower (ZeRO, section 3.1)."""
    master = 4.0 if dtype_bytes(job.dtype) < 4 else 0.0
    return master + (8.0 if job.optimizer == "adam" else 4.0)


def stored_dtype_bytes(job: Job) -> int:
    """Bytes per stored weight: fp8 runs keep 16-bit weights and cast on the fly."""
    return max(dtype_bytes(job.dtype), 2)


def host_bandwidth(device: Device) -> float:
    """Bytes per second, one way, between a device and its host's memory.

    Raises:
        LayoutError: the device entry does not tell.
    """
    if device.host_bandwidth_bytes_per_s is None:
        raise LayoutError(f"offload needs the host link of {device.name}; add host_gb_per_s to its device entry")
    return device.host_bandwidth_bytes_per_s


def saved_bytes(layouts: Sequence[Layout], tables: Sequence[BlockTable]) -> Float[np.ndarray, "lanes blocks"]:
    """Activation bytes that a micro-batch leaves behind for backward in each block, under each layout's recompute."""
    mode = [RECOMPUTE_MODES.index(layout.recompute) for layout in layouts]
    return np.stack([t.activation_bytes for t in tables])[np.arange(len(layouts)), :, mode]


def memory_batch(
    layouts: Sequence[Layout],
    tables: Sequence[BlockTable],
    counts: Float[np.ndarray, "stages segments blocks"],
    live: LiveState,
    job: Job,
    framework: Framework,
) -> MemoryBatch:
    """Memory of layouts that share one program (and so stages, segments and what is alive)."""
    training = job.mode == "train"
    stage = counts.sum(axis=1)

    def per_rank(values: Float[np.ndarray, "lanes blocks"]) -> Float[np.ndarray, "lanes ranks"]:
        return (values @ stage.T)[:, live.stage].sum(axis=2)

    def column(value: "list[float]") -> Float[np.ndarray, "lanes 1"]:
        return np.array(value, float)[:, None]

    held = np.stack([t.dense_params(lay.pp > 1) for lay, t in zip(layouts, tables, strict=True)])
    dense = per_rank(held)
    expert = per_rank(np.stack([t.expert_params for t in tables]))
    shards = column([lay.dp * lay.cp for lay in layouts])
    expert_shards = column([lay.dp * lay.cp // lay.ep for lay in layouts])
    zero = column([lay.zero for lay in layouts])

    def state(n_bytes: float, sharded_from: int) -> Float[np.ndarray, "lanes ranks"]:
        sharded = zero >= sharded_from
        return n_bytes * np.where(sharded, dense / shards + expert / expert_shards, dense + expert)

    weight = stored_dtype_bytes(job)
    weights = state(weight, 3) * live.versions
    gradients = state(dtype_bytes(job.grad_dtype), 2) if training else 0 * dense
    optimizer = state(optimizer_bytes_per_param(job), 1) if training else 0 * dense

    saved = np.stack([t.activation_bytes for t in tables])
    per_block = saved_bytes(layouts, tables)
    if training:
        activations = ((per_block @ stage.T)[:, live.stage] * live.activations).sum(axis=2)
    else:
        activations = np.zeros_like(dense)
    # one block is materialised in full while it is recomputed, beside its own workspace
    workspace = np.stack([t.workspace_bytes for t in tables])
    transient = workspace + (saved[:, :, 0] - per_block if training else saved[:, :, 0])
    present = (stage > 0)[live.stage].any(axis=1)
    buffers = np.where(present[None], transient[:, None, :], 0.0).max(axis=2)
    buffers += framework.context_bytes
    buffers += np.where((zero < 3) & (shards > 1) & training, np.minimum(BUCKET_BYTES, gradients), 0.0)
    # ZeRO-3 holds two gathered segments: the one in use and the one prefetched
    segment = (held + np.stack([t.expert_params for t in tables])) @ counts.reshape(-1, counts.shape[2]).T
    buffers += np.where(zero == 3, 2 * weight * segment.max(axis=1)[:, None], 0.0)
    return MemoryBatch(weights, gradients, optimizer, activations, buffers)
