"""Memory of pipeline ranks: static state, activations in flight, transient buffers.

Everything is counted in blocks that ranks hold, times bytes per block. The leading axes of all
arrays are layouts and broadcast against each other, so that one call covers a whole grid; the
arithmetic is NumPy's or JAX's.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._memory_inputs import (
    BlockBytes,
    RankBlocks,
    RankParams,
    ShardedParams,
    Sharding,
    count_params,
    largest_of_blocks,
    sum_over_blocks,
)
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import (
    gradient_dtype_bytes,
    has_master_alone,
    held_dtype_bytes,
    is_trained,
    kept_gradient_bytes,
    optimizer_bytes_per_param,
    resident_dtype_bytes,
    shards_gradients,
)
from perfmodel.spec import OPTIMIZERS, Framework, Job, Transformer
from perfmodel.units import dtype_bytes

CATEGORIES = ("weights", "gradients", "optimizer", "activations", "buffers")
"""Categories of memory, in the order of the fields of `MemoryBatch`."""


@dataclass(frozen=True)
class MemoryBatch:
    """Bytes per layout and pipeline rank, by category (broadcastable arrays)."""

    weights: Float[Any, "*#layouts ranks"]
    """All versions of the weights, and copies in other types."""
    gradients: Float[Any, "*#layouts ranks"]
    """Accumulated gradients, without the part that reuses memory of freed activations."""
    optimizer: Float[Any, "*#layouts ranks"]
    """States of the optimizer, with master weights."""
    activations: Float[Any, "*#layouts ranks"]
    """Bytes saved for backward, of all micro-batches in flight."""
    buffers: Float[Any, "*#layouts ranks"]
    """Transient workspace, communication buckets, gathered weights, context of the framework."""

    @cached_property
    def total(self) -> Float[Any, "*layouts ranks"]:
        """Bytes of all categories."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers

    @cached_property
    def _fullest(self) -> Int[np.ndarray, "*layouts 1"]:
        return self.total.argmax(axis=-1)[..., None]

    @property
    def largest(self) -> Int[np.ndarray, "*layouts"]:
        """Index in `CATEGORIES` of the largest category on each layout's fullest rank."""
        on_fullest_rank = []
        for name in CATEGORIES:
            category_bytes = np.broadcast_to(getattr(self, name), self.total.shape)
            on_fullest_rank.append(np.take_along_axis(category_bytes, self._fullest, -1)[..., 0])
        return np.stack(on_fullest_rank).argmax(axis=0)

    @property
    def peak(self) -> Float[np.ndarray, "*layouts"]:
        """The fullest rank of each layout."""
        return np.take_along_axis(self.total, self._fullest, -1)[..., 0]


def rank_memory(
    ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, setting: Setting
) -> MemoryBatch:
    """Bytes of every category on every pipeline rank at the rank's peak.

    That is while the largest block runs beside all saved activations, or in the optimizer's step if
    this takes more. Axes of layouts broadcast against one another; the array namespace is that of
    `ranks.stored`.

    Args:
        ranks: number of blocks that each rank stores, and that it keeps activations of.
        blocks: memory of each block.
        sharding: sharding of model states over ranks.
        setting: job, framework and cluster.
    """
    xp = ranks.stored.__array_namespace__()
    job = setting.job
    framework = setting.framework
    costs = setting.framework.memory
    trains_weights = is_trained(job)
    runs_backward = job.mode == "train"
    params = count_params(ranks, blocks, sharding, setting)

    # Model states, and the buffers that their gradients are reduced in.
    accumulates = ~sharding.one_backward
    gradients_sharded = shards_gradients(
        sharding.zero, sharding.pipelined, ranks.replicas, job, accumulates
    )
    gradients = _gradient_bytes(params, gradients_sharded, sharding, job)
    permanent = _permanent_bytes(params, sharding, setting)
    buffers = _bucket_bytes(gradients, sharding, setting) + permanent

    # Weights that ZeRO 3 has gathered.
    gathers_weights = (sharding.zero == 3) & (sharding.reduced | (sharding.on_host > 1))
    if gathers_weights.any():
        gathered = _gathered_at_once(params, ranks, blocks, sharding, setting)
        buffers = buffers + xp.where(
            gathers_weights, resident_dtype_bytes(job, framework) * gathered, 0.0
        )

    saved_bytes, copying = _saved_bytes(ranks, blocks, sharding, setting)

    # The largest block while it runs, with the reduction of its gradients where ZeRO 3 reduces
    # them block by block.
    running_blocks = blocks
    if gathers_weights.any():
        running_blocks = _with_reductions(blocks, gradients_sharded, sharding, setting)
    transient = _transient(ranks, running_blocks, copying, trains=runs_backward)

    # Gradients that do not outlive the step come one by one while a single backward drops
    # activations. Both shrink and grow layer by layer, so that together they are largest at either
    # end: all activations, or all gradients.
    all_gradients = gradients
    if costs.frees_gradients and trains_weights:
        beyond_activations = xp.maximum(gradients - saved_bytes, 0.0)
        gradients = xp.where(sharding.one_backward, beyond_activations, gradients)

    # The optimizer's step runs when activations and gathered weights are gone, so only its memory
    # beyond theirs counts.
    if costs.step_bytes_per_param and trains_weights:
        in_optimizer_step = step_bytes(params.updated, sharding, framework) + permanent
        in_optimizer_step = in_optimizer_step + (all_gradients - gradients) - saved_bytes
        buffers = xp.maximum(buffers + transient, in_optimizer_step) + costs.context_bytes
    else:
        # `transient` has all axes of a grid: it is added last.
        buffers = buffers + (transient + costs.context_bytes)
    return MemoryBatch(
        weights=_weight_bytes(params, ranks, blocks, sharding, setting),
        gradients=gradients,
        optimizer=_optimizer_bytes(params, ranks, blocks, sharding, job),
        activations=saved_bytes * runs_backward,
        buffers=buffers,
    )


def _with_reductions(
    blocks: BlockBytes, gradients_sharded: Any, sharding: Sharding, setting: Setting
) -> BlockBytes:
    """Blocks with what the reduction of their own gradients takes while they run.

    Not so where weights stay gathered after their use (`MemoryCosts.live_params`), whose gradients
    are reduced from one bucket (`reduction_bucket_bytes`), or where memory is planned ahead.
    """
    job, costs = setting.job, setting.framework.memory
    if not is_trained(job) or costs.live_params or costs.planned_memory:
        return blocks
    reduced_bytes = dtype_bytes(job.gradients.grad_dtype)
    return blocks.reducing(sharding, gradients_sharded, held_dtype_bytes(job), reduced_bytes)


def _saved_bytes(
    ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, setting: Setting
) -> tuple[Float[Any, "*layouts ranks"], Any]:
    """Bytes of activations that are saved for backward, without those of layers that wait on the
    host; and the part of them that is copied to or from it."""
    costs = setting.framework.memory
    saved_bytes = blocks.saved(ranks.in_flight, ranks.in_flight_full)
    if costs.autocast or costs.keeps_keys_values:
        checkpoints = blocks.checkpoints(ranks.in_flight, ranks.in_flight_full)
        saved_bytes = saved_bytes + checkpoint_share(setting) * checkpoints
    if setting.job.mode != "train" or not sharding.offloaded.any():
        return saved_bytes, 0.0
    on_host, copying = copied_bytes(ranks.stored, blocks, sharding.offloaded)
    return saved_bytes - on_host + copying, copying


def _optimizer_bytes(
    params: RankParams, ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, job: Job
) -> Float[Any, "*layouts ranks"]:
    """Bytes of optimizer states, which are sharded from ZeRO 1 on; none where the host holds
    them."""
    xp = ranks.stored.__array_namespace__()
    optimizer = optimizer_bytes_per_param(job) * xp.where(sharding.zero >= 1, *params.updated)

    # Embeddings and head may be updated by another optimizer, whose states take more or less.
    kind = OPTIMIZERS[job.optimizer]
    if kind.other_state_bytes is not None:
        outside_layers = xp.where(blocks.layers, 0.0, blocks.dense - blocks.frozen)
        spread_outside_layers = sharding.spread(sum_over_blocks(ranks.stored, outside_layers))
        more_bytes = kind.other_state_bytes - kind.state_bytes
        optimizer = optimizer + more_bytes * xp.where(sharding.zero >= 1, *spread_outside_layers)
    return xp.where(sharding.on_host > 0, 0.0, optimizer * is_trained(job))


def _gradient_bytes(
    params: RankParams, is_sharded: Bool[Any, "*layouts ranks"], sharding: Sharding, job: Job
) -> Float[Any, "*layouts ranks"]:
    """Bytes of gradients at the end of a backward pass.

    Where the host updates, reduced ones leave at once; what is not sharded is kept until the step
    ends. Those that are added up before they are sharded have the type that they are reduced in.
    """
    xp = params.updated.unsharded.__array_namespace__()
    kept_bytes = kept_gradient_bytes(job)
    added_up_bytes = gradient_dtype_bytes(job)
    whole_bytes = params.updated.unsharded * xp.where(
        sharding.zero >= 2, added_up_bytes, kept_bytes
    )
    gradients = xp.where(is_sharded, params.updated.sharded * kept_bytes, whole_bytes) * is_trained(
        job
    )
    return xp.where((sharding.on_host > 0) & (is_sharded | ~sharding.reduced), 0.0, gradients)


def _bucket_bytes(
    gradients: Float[Any, "*layouts ranks"], sharding: Sharding, setting: Setting
) -> Float[Any, "*layouts ranks"]:
    """Bytes of the buckets of reductions, which are no larger than the gradients.

    Those of a size that is asked for are allocated whole, whatever fills them.
    """
    xp = gradients.__array_namespace__()
    job, costs = setting.job, setting.framework.memory
    reduces_gradients = sharding.reduced & is_trained(job)
    filled_buckets = xp.minimum(costs.bucket_bytes, gradients)
    buckets = xp.where((sharding.zero < 3) & reduces_gradients, filled_buckets, 0.0)
    if job.gradients.bucket_bytes is None:
        return buckets

    # The permanent bucket of ZeRO 3 is counted by `_permanent_bytes`.
    highest_stage = 2 if costs.live_params else 3
    asked_for = (sharding.zero >= 1) & (sharding.zero <= highest_stage) & reduces_gradients
    return xp.where(asked_for, job.gradients.bucket_bytes, buckets)


def _permanent_bytes(
    params: RankParams, sharding: Sharding, setting: Setting
) -> Float[Any, "*layouts ranks"]:
    """Bytes of buffers that stay between the passes and the optimizer's step.

    They are those of communicators, the buckets of data-parallel wrappers, which keep a copy of all
    gradients, and the one that ZeRO 3 allocates once where weights stay live.
    """
    xp = params.updated.unsharded.__array_namespace__()
    job, costs = setting.job, setting.framework.memory
    reduces_gradients = sharding.reduced & is_trained(job)
    permanent = costs.communicator_bytes * sharding.communicators
    if costs.ddp_buckets:
        in_wrapper = held_dtype_bytes(job) * params.updated.unsharded
        permanent = permanent + xp.where((sharding.zero == 0) & reduces_gradients, in_wrapper, 0.0)
    if costs.live_params:
        is_bucketed = (sharding.zero == 3) & reduces_gradients
        bucket_bytes = reduction_bucket_bytes(job, setting.framework)
        permanent = permanent + xp.where(is_bucketed, bucket_bytes, 0.0)
    return permanent


def _gathered_at_once(
    params: RankParams, ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, setting: Setting
) -> Float[Any, "*layouts ranks"]:
    """Parameters of gathered weights in memory at once, where ZeRO 3 gathers weights."""
    xp = ranks.stored.__array_namespace__()
    job, costs = setting.job, setting.framework.memory
    block_params = (blocks.dense + blocks.expert) * params.layer_share
    by_layer = gathered_params(block_params, blocks.layers, ranks.stored, sharding.ahead)
    gathered = by_layer
    if costs.planned_memory:
        # A compiler gathers each weight where it is used, while at most the one before it is in use
        # (OpenXLA's SPMD partitioner puts an all-gather before each product; its latency-hiding
        # scheduler starts it early).
        weight = largest_of_blocks(blocks.largest_weight * params.layer_share, ranks.stored > 0)
        gathered = xp.minimum(gathered, 2 * weight)
    if costs.live_params:
        # Weights stay gathered after their use, as long as no more than so many parameters are.
        still_gathered = xp.minimum(costs.live_params, params.unsharded)
        gathered = xp.where(sharding.on_host > 1, gathered, xp.maximum(gathered, still_gathered))
    if job.gradients.saves_gathered_weights and job.mode == "train":
        # A product of torch saves a view of its gathered weight, which stays in memory though ZeRO
        # lets go of it (DeepSpeed runtime/zero/linear.py, whose own product saves a reference
        # instead). Backward gathers anew.
        saved_params = sum_over_blocks(
            ranks.stored - ranks.stored_full, block_params * blocks.saves_operands
        )
        gathered = xp.maximum(gathered, saved_params + by_layer)
    return gathered


def _weight_bytes(
    params: RankParams, ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, setting: Setting
) -> Float[Any, "*layouts ranks"]:
    """Bytes of all versions of the weights on ranks, and of their copies in other types."""
    xp = ranks.stored.__array_namespace__()
    job, framework = setting.job, setting.framework
    weight_bytes = (
        held_dtype_bytes(job) if is_trained(job) else resident_dtype_bytes(job, framework)
    )
    weights = weight_bytes * xp.where(sharding.zero >= 3, *params.stored) * ranks.versions

    # Where the master copy is all that ranks keep of trained weights, it counts among the
    # optimizer's states. Frozen weights have none.
    if has_master_alone(job, framework):
        frozen = (
            sharding.spread(sum_over_blocks(ranks.stored, blocks.frozen)).sharded * ranks.versions
        )
        weights = xp.where(
            (sharding.zero >= 3) & (sharding.on_host == 0), weight_bytes * frozen, weights
        )
    weights = xp.where(sharding.on_host > 1, 0.0, weights)

    # Secondary shards inside a node.
    if job.gradients.secondary_shards > 1:
        secondary = weight_bytes * params.stored.unsharded / job.gradients.secondary_shards
        weights = weights + xp.where(sharding.zero >= 3, secondary, 0.0)

    # 8-bit copies of every weight that is trained in 8 bits, row-wise and, for the products of
    # backward, column-wise.
    keeps_wide_weights = not (job.fine_tuning.frozen or job.narrow.fp8_params)
    if (
        framework.memory.fp8_copy_bytes > 0
        and job.dtype == "fp8"
        and is_trained(job)
        and keeps_wide_weights
    ):
        params_of_layers = (blocks.dense + blocks.expert) * blocks.layers
        weights = weights + framework.memory.fp8_copy_bytes * sum_over_blocks(
            ranks.stored, params_of_layers
        )
    return weights


def reduction_bucket_bytes(job: Job, framework: Framework) -> float:
    """Bytes of the one bucket that ZeRO 3 reduces gradients from, where gathered weights stay live.

    DeepSpeed allocates it once, beside the buffer of the rank's gradients, so that it is there in
    the optimizer's step too (DeepSpeed 0.12 runtime/zero/stage3.py, `_setup_for_real_optimizer`:
    `__ipg_bucket_flat_buffer` of `reduce_bucket_size` elements; stages 1 and 2 allocate theirs in
    every backward and let go of them after it). The other half of the buckets of lower stages is
    that of their gathers.
    """
    if job.gradients.bucket_bytes is not None:
        return job.gradients.bucket_bytes
    return framework.memory.bucket_bytes / 2


def checkpoint_share(setting: Setting) -> float:
    """Bytes that layers recomputed in full keep in addition to their inputs, relative to the bytes
    of these inputs in the type of products.

    Under autocast the inputs themselves are in fp32: an fp32 embedding, plus what sub-layers add,
    is of the wider type (PyTorch documentation, autocast op reference: operators that promote to
    the widest input type). Keys and values that layers return stay with the model's output
    (Transformers 4.31 models/llama/modeling_llama.py, `past_key_values`): two heads' widths of each
    key-value head, in the type of products.
    """
    model = setting.model
    job = setting.job
    costs = setting.framework.memory
    if not isinstance(model, Transformer) or job.mode != "train":
        return 0.0
    share = 1.0 if costs.autocast and dtype_bytes(job.dtype) < 4 else 0.0
    if costs.keeps_keys_values:
        share += 2 * model.kv_heads * model.head_dim / model.hidden
    return share


def step_bytes(
    updated: ShardedParams,
    sharding: Sharding,
    framework: Framework,
) -> Float[Any, "*layouts ranks"]:
    """Temporary bytes that the optimizer's step allocates on the device.

    Args:
        updated: parameters that have optimizer states.
    """
    xp = updated[0].__array_namespace__()
    params = xp.where(sharding.zero >= 1, *updated)
    params = xp.where(sharding.zero >= 3, xp.minimum(params, framework.memory.step_params), params)
    return xp.where(sharding.on_host > 0, 0.0, framework.memory.step_bytes_per_param * params)


def gathered_params(
    params: Float[np.ndarray, "*layouts blocks"],
    layers: Bool[np.ndarray, "*layouts blocks"],
    on_ranks: Float[Any, "*layouts ranks blocks"],
    ahead: Int[np.ndarray, "*layouts 1"],
) -> Float[Any, "*layouts ranks"]:
    """Parameters that ZeRO 3 holds unsharded at once.

    Args:
        params: parameters of every block.
        layers: which blocks are layers.
        on_ranks: number of each block on every rank.
        ahead: layers that are gathered ahead.
    """
    # The layer in use and those prefetched, if the rank has as many. torch's `fully_shard` keeps
    # weights outside of layers from forward to backward.
    xp = on_ranks.__array_namespace__()
    layer_params = largest_of_blocks(xp.where(layers, params, 0.0), on_ranks > 0)
    layers_at_once = xp.minimum(
        1 + ahead, xp.maximum(1, sum_over_blocks(on_ranks, layers.astype(float)))
    )
    return sum_over_blocks(on_ranks, xp.where(layers, 0.0, params)) + layers_at_once * layer_params


def copied_bytes(
    on_ranks: Float[Any, "*layouts ranks blocks"],
    blocks: BlockBytes,
    offloaded: Int[np.ndarray, "*layouts 1"],
) -> tuple[Float[Any, "*layouts ranks"], Float[Any, "*layouts ranks"]]:
    """Activation bytes in host memory, and the bytes of one layer that are in transfer
    (`layer_copies`).

    Args:
        on_ranks: number of each block on every rank.
        offloaded: layers, the first ones, whose activations wait there.
    """
    xp = on_ranks.__array_namespace__()
    layers = xp.where(blocks.layers[..., None, :], on_ranks, 0.0)
    layers_before = xp.cumsum(layers, axis=-1) - layers
    # As many of each kind as are left after the kinds before it.
    copied_layers = xp.clip(offloaded[..., None] - layers_before, 0.0, layers)
    copied_bytes = sum_over_blocks(copied_layers, blocks.kept_bytes)
    largest_bytes = largest_of_blocks(blocks.kept_bytes, copied_layers > 0)
    return copied_bytes, largest_bytes


def _transient(
    ranks: RankBlocks,
    blocks: BlockBytes,
    copying: Float[Any, "*layouts ranks"] | float,
    *,
    trains: bool,
) -> Float[Any, "*layouts ranks"]:
    """Bytes of the largest block while it runs, on each rank, and dummy gradients beside it.

    Args:
        copying: bytes of a layer's activations on their way to or from the host.
        trains: whether forward keeps anything for a backward.
    """
    xp = ranks.stored_full.__array_namespace__()
    # The head, like every block behind the layers, runs its backward first. While a layer's
    # backward runs, the head's activations of that micro-batch are gone, and while the head runs,
    # no layer is on its way to or from the host.
    stands_behind = np.flip(np.cumsum(np.flip(blocks.layers, -1), -1), -1) == 0
    kept_behind = (
        sum_over_blocks(
            xp.minimum(ranks.in_flight, ranks.stored), blocks.kept_bytes * stands_behind
        )
        * trains
    )
    while_head_runs = largest_of_blocks(blocks.transient_bytes * stands_behind, ranks.stored > 0)
    while_head_runs = xp.maximum(while_head_runs - copying, 0.0)
    while_layer_runs = largest_of_blocks(blocks.transient_bytes * ~stands_behind, ranks.stored > 0)
    # JAX's traced arrays cannot be asked whether any block is recomputed in full.
    if xp is not np or ranks.stored_full.any():
        in_full = largest_of_blocks(blocks.transient_full_bytes, ranks.stored_full > 0)
        while_layer_runs = xp.maximum(while_layer_runs, in_full)
    return (
        xp.maximum(while_head_runs, while_layer_runs - kept_behind)
        + blocks.dummy_gradients[..., None]
    )
