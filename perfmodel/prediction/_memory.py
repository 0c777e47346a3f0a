"""Memory of every pipeline rank: static state, activations in flight, transient buffers."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError
from perfmodel.prediction._blocks import RECOMPUTE_MODES, BlockDraft, BlockTable
from perfmodel.prediction._framework import Framework
from perfmodel.prediction._live import LiveState
from perfmodel.spec import Device, Gemm, Job, Layout
from perfmodel.units import dtype_bytes

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class MemoryBatch:
    """Bytes per layout and pipeline rank, by category."""

    weights: Float[np.ndarray, "*layouts ranks"]
    gradients: Float[np.ndarray, "*layouts ranks"]
    optimizer: Float[np.ndarray, "*layouts ranks"]
    activations: Float[np.ndarray, "*layouts ranks"]
    buffers: Float[np.ndarray, "*layouts ranks"]

    @property
    def total(self) -> Float[np.ndarray, "*layouts ranks"]:
        """Bytes of all categories."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @property
    def largest(self) -> Int[np.ndarray, "*layouts"]:
        """The category (its place in `CATEGORIES`) that takes most of each layout's fullest rank."""
        fullest = self.total.argmax(axis=-1)[..., None]
        parts = [np.take_along_axis(getattr(self, name), fullest, axis=-1)[..., 0] for name in CATEGORIES]
        return np.stack(parts).argmax(axis=0)

    @property
    def peak(self) -> Float[np.ndarray, "*layouts"]:
        """The fullest rank of each layout."""
        return self.total.max(axis=-1)


def optimizer_bytes_per_param(job: Job) -> float:
    """Adam: two fp32 moments, and an fp32 master copy where weights are narrower (ZeRO, section 3.1). SGD: one moment
    instead of two, or nothing at all if it is plain."""
    if job.optimizer == "plain-sgd":
        return 0.0
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


def _kept_bytes(layouts: Sequence[Layout], tables: Sequence[BlockTable]) -> Float[np.ndarray, "lanes blocks"]:
    """Activation bytes that each block leaves behind per micro-batch under each layout's recompute."""
    mode = [RECOMPUTE_MODES.index(layout.recompute) for layout in layouts]
    return np.stack([table.activation_bytes[:, at] for table, at in zip(tables, mode, strict=True)])


def saved_per_stage(
    layouts: Sequence[Layout],
    tables: Sequence[BlockTable],
    counts: Float[np.ndarray, "stages segments blocks"],
    full: Float[np.ndarray, "stages segments blocks"],
) -> Float[np.ndarray, "lanes stages"]:
    """Activation bytes that a micro-batch leaves behind in every stage; `full`: blocks recomputed in full."""
    saved = _kept_bytes(layouts, tables)
    least = np.stack([t.activation_bytes[:, -1] for t in tables])
    return saved @ counts.sum(axis=1).T - (saved - least) @ full.sum(axis=1).T


def memory_batch(
    layouts: Sequence[Layout],
    tables: Sequence[BlockTable],
    counts: Float[np.ndarray, "stages segments blocks"],
    full: Float[np.ndarray, "stages segments blocks"],
    live: LiveState,
    job: Job,
    framework: Framework,
) -> MemoryBatch:
    """Memory of layouts that share one program (and so stages, segments and what is alive).

    `full`: blocks that are recomputed in full whatever the layouts say of the others.
    """
    held = np.stack([t.dense_params(lay.pp > 1) for lay, t in zip(layouts, tables, strict=True)])
    experts = np.stack([t.expert_params for t in tables])
    saved = np.stack([t.activation_bytes for t in tables])
    workspace = np.stack([t.workspace_bytes for t in tables])
    on_rank, again = (part.sum(axis=1)[live.stage].sum(axis=1) for part in (counts, full))
    # one block is materialised in full while it is recomputed, beside its own workspace
    rebuilt = saved[:, :, 0] - _kept_bytes(layouts, tables) if job.mode == "train" else saved[:, :, 0]
    transient = np.where(on_rank > 0, (workspace + rebuilt)[:, None], 0.0).max(axis=2)
    if again.any():
        in_full = np.where(again > 0, (workspace + saved[:, :, 0] - saved[:, :, -1])[:, None], 0.0)
        transient = np.maximum(transient, in_full.max(axis=2))
    params = held + experts
    gathered = [gathered_params(of_one, t.layers, on_rank) for of_one, t in zip(params, tables, strict=True)]
    return rank_memory(
        dense=held @ on_rank.T,
        expert=experts @ on_rank.T,
        shards=np.array([[lay.dp * lay.cp] for lay in layouts]),
        expert_shards=np.array([[lay.dp * lay.cp // lay.ep] for lay in layouts]),
        zero=np.array([[lay.zero] for lay in layouts]),
        versions=live.versions,
        activations=(saved_per_stage(layouts, tables, counts, full)[:, live.stage] * live.activations).sum(axis=2),
        transient=transient + np.array([[dummy_gradient_bytes(table, job, framework)] for table in tables]),
        gathered=np.stack(gathered),
        job=job,
        framework=framework,
    )


def gathered_params(
    params: Float[np.ndarray, " blocks"], layers: Bool[np.ndarray, " blocks"], held: Float[np.ndarray, "*ranks blocks"]
) -> Float[np.ndarray, "*ranks"]:
    """Parameters that ZeRO 3 holds unsharded at once on ranks that hold so many of each block: what is outside of
    layers, which torch's `fully_shard` keeps from forward to backward, the layer in use and the one prefetched."""
    layer = np.where((held > 0) & layers, params, 0.0).max(axis=-1)
    several = np.where(layers, held, 0.0).sum(axis=-1) > 1
    return held @ np.where(layers, 0.0, params) + np.where(several, 2, 1) * layer


def dummy_gradient_bytes(draft: BlockDraft, job: Job, framework: Framework) -> float:
    """Bytes of a gradient of every distinct weight shape of the layers, where the framework keeps such dummies."""
    if not framework.cached_weight_gradients or job.mode != "train" or job.frozen:
        return 0.0
    layers = [block for block, is_one in zip(draft.blocks, draft.layers.tolist(), strict=True) if is_one]
    products = [op for block in layers for op, _ in block.backward_weight if isinstance(op, Gemm)]
    # a grouped product's gradient has the dimensions of its forward: rows, then the weight's two
    shapes = {(op.n, op.k) if op.groups > 1 else (op.m, op.n) for op in products}
    return float(sum(m * n for m, n in shapes) * stored_dtype_bytes(job))


def rank_memory(
    *,
    dense: Float[np.ndarray, "*layouts ranks"],
    expert: Float[np.ndarray, "*layouts ranks"],
    shards: Int[np.ndarray, "*layouts 1"],
    expert_shards: Int[np.ndarray, "*layouts 1"],
    zero: Int[np.ndarray, "*layouts 1"],
    versions: Int[np.ndarray, "*layouts ranks"],
    activations: Float[np.ndarray, "*layouts ranks"],
    transient: Float[np.ndarray, "*layouts ranks"],
    gathered: Float[np.ndarray, "*layouts ranks"],
    job: Job,
    framework: Framework,
) -> MemoryBatch:
    """Memory of pipeline ranks from what they hold; arguments broadcast.

    Args:
        dense, expert: parameters held, outside and inside routed experts.
        shards, expert_shards: ranks that the two are replicated over, or sharded by `zero`.
        zero: ZeRO stage.
        versions: copies of the weights.
        activations: bytes alive at the peak (if training).
        transient: bytes of the largest block while it runs.
        gathered: parameters that ZeRO 3 holds unsharded at once (`gathered_params`).
        job, framework: element types, optimizer and allocator.
    """
    training = job.mode == "train"
    trained = training and not job.frozen

    def state(n_bytes: float, sharded_from: int) -> Float[np.ndarray, "*layouts ranks"]:
        sharded = zero >= sharded_from
        return n_bytes * np.where(sharded, dense / shards + expert / expert_shards, dense + expert)

    weight = stored_dtype_bytes(job)
    half = 2 if job.half_gradients and dtype_bytes(job.dtype) <= 2 else 0
    gradients = state(dtype_bytes(job.grad_dtype) + half, 2) * trained
    buffers = transient + framework.context_bytes
    reduced = (shards > 1) & trained
    buffers = buffers + np.where((zero < 3) & reduced, np.minimum(framework.bucket_bytes, gradients), 0.0)
    if framework.ddp_buckets:
        buffers = buffers + np.where((zero == 0) & reduced, weight * (dense + expert), 0.0)
    buffers = buffers + np.where(zero == 3, weight * gathered, 0.0)
    parts = (
        state(weight, 3) * versions, gradients, state(optimizer_bytes_per_param(job), 1) * trained,
        activations * training, buffers,
    )  # fmt: skip
    return MemoryBatch(*np.broadcast_arrays(*parts))
