"""Memory of pipeline ranks: static state, activations in flight, transient buffers. Arrays broadcast over layouts."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._pipeline import LiveState
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import (
    gradient_dtype_bytes,
    held_dtype_bytes,
    is_trained,
    layer_weight_share,
    optimizer_bytes_per_param,
    other_optimizer_bytes_per_param,
    shards_gradients,
    stored_dtype_bytes,
)
from perfmodel.spec import Framework, Job, Layout, StateOffload

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers")


@dataclass(frozen=True)
class MemoryBatch:
    """Bytes per layout and pipeline rank, by category; the parts broadcast."""

    weights: Float[Any, "*#layouts ranks"]
    gradients: Float[Any, "*#layouts ranks"]
    optimizer: Float[Any, "*#layouts ranks"]
    activations: Float[Any, "*#layouts ranks"]
    buffers: Float[Any, "*#layouts ranks"]

    @cached_property
    def total(self) -> Float[Any, "*layouts ranks"]:
        """Bytes of all categories."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @cached_property
    def _fullest(self) -> Int[np.ndarray, "*layouts 1"]:
        return self.total.argmax(axis=-1)[..., None]

    @property
    def largest(self) -> Int[np.ndarray, "*layouts"]:
        """The category (its place in `CATEGORIES`) that takes most of each layout's fullest rank."""
        of_category = (np.broadcast_to(getattr(self, name), self.total.shape) for name in CATEGORIES)
        return np.stack([np.take_along_axis(part, self._fullest, -1)[..., 0] for part in of_category]).argmax(axis=0)

    @property
    def peak(self) -> Float[np.ndarray, "*layouts"]:
        """The fullest rank of each layout."""
        return np.take_along_axis(self.total, self._fullest, -1)[..., 0]


@dataclass(frozen=True, eq=False)
class RankBlocks:
    """What pipeline ranks hold, in blocks."""

    held: Float[Any, "*layouts ranks blocks"]
    versions: Float[np.ndarray, "*layouts ranks"]
    """Copies of the weights."""
    alive: Float[Any, "*layouts ranks blocks"]
    """Blocks times micro-batches alive at the peak."""
    alive_full: Float[Any, "*layouts ranks blocks"]
    """Those of them that are recomputed in full whatever the layout says of the others."""
    held_full: Float[Any, "*layouts ranks blocks"]
    replicas: Int[np.ndarray, "*layouts ranks"]
    """Ranks of the pipeline that hold the same stages."""

    @classmethod
    def of(
        cls,
        counts: Float[Any, "stages blocks"],
        full: Float[Any, "*choices stages blocks"],
        live: LiveState,
    ) -> "RankBlocks":
        """Ranks whose stages hold the blocks counted, `full` of them recomputed in full (in several choices)."""
        micro_batches = live.activations[..., None]
        on_rank, in_full = counts[live.stage], full[..., live.stage, :]
        return cls(
            held=on_rank.sum(axis=-2),
            versions=live.versions.astype(float),
            alive=(on_rank * micro_batches).sum(axis=-2),
            alive_full=(in_full * micro_batches).sum(axis=-2),
            held_full=in_full.sum(axis=-2),
            replicas=np.full(len(live.stage), live.replicas),
        )


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """Parameters and bytes of every block on one device."""

    dense: Float[np.ndarray, "*layouts blocks"]
    expert: Float[np.ndarray, "*layouts blocks"]
    frozen: Float[np.ndarray, "*layouts blocks"]
    """The part of `dense` that has no gradients."""
    layers: Bool[np.ndarray, "*layouts blocks"]
    kept: Float[np.ndarray, "*layouts blocks"]
    """Activations left behind per micro-batch under the layout's recompute."""
    least: Float[np.ndarray, "*layouts blocks"]
    """The same where the block is recomputed in full."""
    transient: Float[np.ndarray, "*layouts blocks"]
    """While the block runs: its workspace, and what is materialised again while it is recomputed."""
    transient_full: Float[np.ndarray, "*layouts blocks"]
    """The same where the block is recomputed in full."""
    dummy_gradients: Float[np.ndarray, "*layouts"]
    """See `dummy_gradient_bytes`."""

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardBlocks],
        modes: Int[np.ndarray, "#shards *choices"],
        pipelined: bool,
        job: Job,
        framework: Framework,
    ) -> "BlockBytes":
        """Blocks of shards, an axis of their own, under modes of recompute (`RECOMPUTE_MODES`) along further axes."""

        def spread(values: Sequence[np.ndarray]) -> np.ndarray:
            stacked = np.stack(values)
            return stacked.reshape(len(shards), *[1] * (modes.ndim - 1), *stacked.shape[1:])

        saved = spread([shard.activation_bytes for shard in shards])
        kept = np.take_along_axis(saved, modes[..., None, None], axis=-1)[..., 0]
        whole, least = saved[..., 0], saved[..., -1]
        workspace = spread([shard.workspace_bytes for shard in shards])
        return cls(
            dense=spread([shard.dense_params(pipelined) for shard in shards]),
            expert=spread([shard.expert_params for shard in shards]),
            frozen=spread([shard.frozen_params(pipelined, job) for shard in shards]),
            layers=spread([shard.layers for shard in shards]),
            kept=kept,
            least=least,
            transient=workspace + (whole - kept if job.mode == "train" else whole),
            transient_full=workspace + whole - least,
            dummy_gradients=spread([np.array(dummy_gradient_bytes(shard, job, framework)) for shard in shards]),
        )

    def saved(
        self, blocks: Float[Any, "*layouts ranks blocks"], full: Float[Any, "*layouts ranks blocks"]
    ) -> Float[Any, "*layouts ranks"]:
        """Activation bytes of so many blocks, `full` of them recomputed in full."""
        return _dot(blocks, self.kept) - _dot(full, self.kept - self.least)


@dataclass(frozen=True, eq=False)
class Sharding:
    """How model states lie on ranks; an axis of one stands for the ranks."""

    zero: Int[np.ndarray, "*layouts 1"]
    dense: Int[np.ndarray, "*layouts 1"]
    """Ranks that parameters outside routed experts are sharded over, as `Layout.zero` says."""
    expert: Int[np.ndarray, "*layouts 1"]
    """The same inside them."""
    reduced: Bool[np.ndarray, "*layouts 1"]
    """Whether several ranks hold the same parameters."""
    ahead: Int[np.ndarray, "*layouts 1"]
    """See `Layout.prefetch`."""
    on_host: Int[np.ndarray, "*layouts 1"]
    """Place of `Layout.offload_states` among its choices: 1 from the optimizer on, 2 weights too."""
    communicators: Int[np.ndarray, "*layouts 1"]
    """Groups of several ranks that a layout's ranks are in."""
    pipelined: Bool[np.ndarray, "*layouts 1"]
    """Whether a pipeline has several stages."""
    offloaded: Int[np.ndarray, "*layouts 1"]
    """See `Layout.offload_layers`."""

    @classmethod
    def of(cls, layouts: Sequence[Layout]) -> "Sharding":
        """Of layouts, one after another."""
        rows = [
            (lay.zero, lay.dp * lay.cp // lay.replicate, lay.edp // lay.replicate, lay.replicated, lay.prefetch,
             get_args(StateOffload).index(lay.offload_states), communicators(lay), lay.pp > 1,
             lay.offload_layers)
            for lay in layouts
        ]  # fmt: skip
        zero, dense, expert, reduced, ahead, on_host, joined, pipelined, offloaded = np.array(rows).T[..., None]
        return cls(zero, dense, expert, reduced > 0, ahead, on_host, joined, pipelined > 0, offloaded)

    def spread(
        self, dense: Float[Any, "*layouts ranks"], expert: Float[Any, "*layouts ranks"] | float = 0.0
    ) -> tuple[Float[Any, "*layouts ranks"], Float[Any, "*layouts ranks"]]:
        """So many parameters sharded, and whole."""
        return dense / self.dense + expert / self.expert, dense + expert


def communicators(layout: Layout) -> int:
    """Groups of several ranks that a rank communicates in: all ranks, data, model, tensor and pipeline parallel."""
    return sum(n > 1 for n in (layout.devices, layout.dp * layout.cp, layout.tp * layout.pp, layout.tp, layout.pp))


def rank_memory(ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, setting: Setting) -> MemoryBatch:
    """Memory of pipeline ranks; axes of layouts broadcast against one another; the array namespace is
    that of `ranks.held`."""
    xp, job, framework = ranks.held.__array_namespace__(), setting.job, setting.framework
    dense, expert = _dot(ranks.held, blocks.dense), _dot(ranks.held, blocks.expert)

    held = updated = sharding.spread(dense, expert)
    if blocks.frozen.any():
        updated = sharding.spread(dense - _dot(ranks.held, blocks.frozen), expert)
    layer_share = xp.where(blocks.layers, layer_weight_share(job), 1.0) if job.base_weights else 1.0
    stored = held
    if job.base_weights:
        stored = sharding.spread(
            _dot(ranks.held, blocks.dense * layer_share), _dot(ranks.held, blocks.expert * layer_share)
        )
    optimizer = optimizer_bytes_per_param(job) * xp.where(sharding.zero >= 1, *updated)
    if more := other_optimizer_bytes_per_param(job):
        others = xp.where(blocks.layers, 0.0, blocks.dense - blocks.frozen)
        optimizer = optimizer + more * xp.where(sharding.zero >= 1, *sharding.spread(_dot(ranks.held, others)))
    weight, trained = held_dtype_bytes(job), is_trained(job)
    sharded = shards_gradients(sharding.zero, sharding.pipelined, ranks.replicas, job)
    gradients = gradient_dtype_bytes(job) * xp.where(sharded, *updated) * trained
    # reduced gradients leave at once; what is not sharded is kept until the step ends
    gradients = xp.where((sharding.on_host > 0) & (sharded | ~sharding.reduced), 0.0, gradients)
    reduced = sharding.reduced & trained
    buffers = xp.where((sharding.zero < 3) & reduced, xp.minimum(framework.bucket_bytes, gradients), 0.0)
    if job.bucket_bytes is not None:
        # Buckets of a size that is asked for are allocated whole, whatever fills them.
        buffers = xp.where((sharding.zero >= 1) & reduced, job.bucket_bytes, buffers)
    buffers = buffers + framework.communicator_bytes * sharding.communicators
    if framework.ddp_buckets:
        buffers = buffers + xp.where((sharding.zero == 0) & reduced, weight * updated[1], 0.0)
    gathers = (sharding.zero == 3) & (sharding.reduced | (sharding.on_host > 1))
    if gathers.any():
        gathered = gathered_params(
            (blocks.dense + blocks.expert) * layer_share, blocks.layers, ranks.held, sharding.ahead
        )
        if framework.live_params:
            live = xp.minimum(framework.live_params, dense + expert)
            gathered = xp.where(sharding.on_host > 1, gathered, xp.maximum(gathered, live))
            # Such a ZeRO 3 reduces from one bucket; the other half of the buckets is that of gathers below it.
            is_bucketed = (sharding.zero == 3) & reduced & (job.bucket_bytes is None)
            buffers = buffers + xp.where(is_bucketed, framework.bucket_bytes / 2, 0.0)
        buffers = buffers + xp.where(gathers, weight * gathered, 0.0)
    saved, moving = blocks.saved(ranks.alive, ranks.alive_full), 0.0
    if job.mode == "train" and sharding.offloaded.any():
        gone, moving = copied_bytes(ranks.held, blocks, sharding.offloaded)
        saved = saved - gone + moving
    transient = _transient(ranks, blocks, moving, trains=job.mode == "train")
    weights = xp.where(sharding.on_host > 1, 0.0, weight * xp.where(sharding.zero >= 3, *stored) * ranks.versions)
    if job.secondary_shards > 1:
        weights = weights + xp.where(sharding.zero >= 3, weight * stored[1] / job.secondary_shards, 0.0)
    if has_fp8_copies(job, framework):
        weights = weights + framework.fp8_copy_bytes * _dot(ranks.held, (blocks.dense + blocks.expert) * blocks.layers)
    if framework.step_bytes_per_param and trained:
        # The step runs when activations and gathered weights are gone: only what it takes beyond these counts.
        in_step = step_bytes(updated, sharding, framework) - saved
        buffers = xp.maximum(buffers + transient, in_step) + framework.context_bytes
    else:
        buffers = buffers + (transient + framework.context_bytes)  # many layouts: joined last
    parts = (
        weights, gradients,
        xp.where(sharding.on_host > 0, 0.0, optimizer * trained),
        saved * (job.mode == "train"), buffers,
    )  # fmt: skip
    return MemoryBatch(*parts)


def has_fp8_copies(job: Job, framework: Framework) -> bool:
    """Whether weights have 8-bit copies beside them: of every weight that is trained in 8 bits, row-wise and, for the
    products of backward, column-wise."""
    return (
        framework.fp8_copy_bytes > 0 and job.dtype == "fp8" and is_trained(job) and not (job.frozen or job.fp8_params)
    )


def step_bytes(
    updated: tuple[Float[Any, "*layouts ranks"], Float[Any, "*layouts ranks"]],
    sharding: Sharding,
    framework: Framework,
) -> Float[Any, "*layouts ranks"]:
    """Bytes that the optimizer's step allocates on the device beside its states.

    Args:
        updated: parameters of a rank that have optimizer states, sharded and whole.
    """
    xp = updated[0].__array_namespace__()
    params = xp.where(sharding.zero >= 1, *updated)
    params = xp.where(sharding.zero >= 3, xp.minimum(params, framework.step_params), params)
    return xp.where(sharding.on_host > 0, 0.0, framework.step_bytes_per_param * params)


def gathered_params(
    params: Float[np.ndarray, "*layouts blocks"],
    layers: Bool[np.ndarray, "*layouts blocks"],
    held: Float[Any, "*layouts ranks blocks"],
    ahead: Int[np.ndarray, "*layouts 1"],
) -> Float[Any, "*layouts ranks"]:
    """Parameters that ZeRO 3 holds unsharded at once on ranks that hold so many of each block: what is outside of
    layers, which torch's `fully_shard` keeps from forward to backward, the layer in use and those prefetched."""
    xp = held.__array_namespace__()
    layer = _largest(xp.where(layers, params, 0.0), held > 0)
    at_once = xp.minimum(1 + ahead, xp.maximum(1, _dot(held, layers.astype(float))))
    return _dot(held, xp.where(layers, 0.0, params)) + at_once * layer


def dummy_gradient_bytes(shard: ShardBlocks, job: Job, framework: Framework) -> float:
    """Bytes of a gradient of every distinct weight shape of the layers, where the framework keeps such dummies."""
    if not framework.cached_weight_gradients or not is_trained(job):
        return 0.0
    layers = [block for block, is_one in zip(shard.blocks, shard.layers.tolist(), strict=True) if is_one]
    shapes = {shape for block in layers for of in (False, True) for shape in block.weight_shapes(experts=of)}
    return float(sum(m * n for m, n in shapes) * stored_dtype_bytes(job))


def copied_bytes(
    held: Float[Any, "*layouts ranks blocks"], blocks: BlockBytes, offloaded: Int[np.ndarray, "*layouts 1"]
) -> tuple[Float[Any, "*layouts ranks"], Float[Any, "*layouts ranks"]]:
    """Activations of the first layers of ranks that hold so many of each block, which wait in host memory, and the
    largest of these layers alone, which is on its way to or from there while layers run (`_layer_copies`)."""
    xp = held.__array_namespace__()
    layers = xp.where(blocks.layers[..., None, :], held, 0.0)
    before = xp.cumsum(layers, axis=-1) - layers
    copied = xp.clip(offloaded[..., None] - before, 0.0, layers)
    return _dot(copied, blocks.kept), _largest(blocks.kept, copied > 0)


def _transient(
    ranks: RankBlocks, blocks: BlockBytes, moving: Float[Any, "*layouts ranks"] | float, *, trains: bool
) -> Float[Any, "*layouts ranks"]:
    """The largest block while it runs, on each rank, and dummy gradients beside it. While a layer's backward runs, what
    the blocks behind all layers (the head) kept of its micro-batch is gone; while these run, no layer is on its way
    (`moving`) to or from the host."""
    xp = ranks.held_full.__array_namespace__()
    behind = np.flip(np.cumsum(np.flip(blocks.layers, -1), -1), -1) == 0
    gone = _dot(xp.minimum(ranks.alive, ranks.held), blocks.kept * behind) * trains
    of_head = xp.maximum(_largest(blocks.transient * behind, ranks.held > 0) - moving, 0.0)
    largest = _largest(blocks.transient * ~behind, ranks.held > 0)
    if xp is not np or ranks.held_full.any():
        largest = xp.maximum(largest, _largest(blocks.transient_full, ranks.held_full > 0))
    return xp.maximum(of_head, largest - gone) + blocks.dummy_gradients[..., None]


def _dot(
    on_ranks: Float[Any, "*layouts ranks blocks"], of_blocks: Float[np.ndarray, "*layouts blocks"]
) -> Float[Any, "*layouts ranks"]:
    return on_ranks.__array_namespace__().einsum("...rb,...b->...r", on_ranks, of_blocks)


def _largest(
    of_blocks: Float[np.ndarray, "*layouts blocks"], on_ranks: Bool[Any, "*layouts ranks blocks"]
) -> Float[Any, "*layouts ranks"]:
    return on_ranks.__array_namespace__().where(on_ranks, of_blocks[..., None, :], 0.0).max(axis=-1)
