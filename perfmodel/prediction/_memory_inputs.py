"""Inputs of the memory of pipeline ranks: blocks that ranks hold, bytes per block, and how states
are sharded.

The leading axes of all arrays are layouts and broadcast against each other; the arithmetic is
NumPy's or JAX's.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import (
    fp8_weight_bytes,
    is_trained,
    layer_weight_share,
    stored_dtype_bytes,
)
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.schedule.memory import LiveState
from perfmodel.spec import Framework, Job, Layout, StateOffload


@dataclass(frozen=True, eq=False)
class RankBlocks:
    """Weights and activations of pipeline ranks, counted in blocks."""

    stored: Float[Any, "*layouts ranks blocks"]
    """Blocks whose weights a rank stores."""
    versions: Float[np.ndarray, "*layouts ranks"]
    """Versions of the weights that a rank keeps at once: several in pipelines without a flush
    (PipeDream)."""
    in_flight: Float[Any, "*layouts ranks blocks"]
    """Blocks times micro-batches whose activations a rank keeps at the peak."""
    in_flight_full: Float[Any, "*layouts ranks blocks"]
    """Blocks of `in_flight` that are recomputed in full even if the layout recomputes the others
    differently."""
    stored_full: Float[Any, "*layouts ranks blocks"]
    """Blocks of `stored` that are recomputed in full."""
    replicas: Int[np.ndarray, "*layouts ranks"]
    """Ranks of the pipeline that hold the same stages, as in bidirectional pipelines (Chimera,
    DualPipe)."""

    @classmethod
    def of(
        cls,
        counts: Float[Any, "stages blocks"],
        full: Float[Any, "*choices stages blocks"],
        live: LiveState,
    ) -> "RankBlocks":
        """Count the blocks of ranks.

        Args:
            counts: blocks of every stage.
            full: blocks of them that are recomputed in full, in several choices.
            live: stages of every rank, and micro-batches that it keeps alive.
        """
        micro_batches = live.activations[..., None]
        on_rank = counts[live.stage]
        in_full = full[..., live.stage, :]
        return cls(
            stored=on_rank.sum(axis=-2),
            versions=live.versions.astype(float),
            in_flight=(on_rank * micro_batches).sum(axis=-2),
            in_flight_full=(in_full * micro_batches).sum(axis=-2),
            stored_full=in_full.sum(axis=-2),
            replicas=np.full(len(live.stage), live.replicas),
        )


@dataclass(frozen=True, eq=False)
class BlockBytes:
    """Parameters and bytes of every block on one device."""

    dense: Float[np.ndarray, "*layouts blocks"]
    """Parameters outside routed experts."""
    expert: Float[np.ndarray, "*layouts blocks"]
    """Parameters of routed experts."""
    frozen: Float[np.ndarray, "*layouts blocks"]
    """Parameters of `dense` that have no gradients although others have."""
    shared: Float[np.ndarray, "*layouts blocks"]
    """Parameters that a block shares with an earlier one; a rank without that one holds a copy."""
    shares_with: Int[np.ndarray, "*layouts blocks"]
    """Place of that earlier block."""
    largest_weight: Float[np.ndarray, "*layouts blocks"]
    """Parameters of the largest weight of a block; the weights of all experts count as one."""
    layers: Bool[np.ndarray, "*layouts blocks"]
    """Whether a block is a layer."""
    saves_operands: Bool[np.ndarray, "*layouts blocks"]
    """Whether a block is a layer whose products save their operands, because it is not recomputed
    in full."""
    kept_bytes: Float[np.ndarray, "*layouts blocks"]
    """Bytes of activations saved per micro-batch under the layout's recompute."""
    kept_full_bytes: Float[np.ndarray, "*layouts blocks"]
    """Bytes of activations saved per micro-batch if the block is recomputed in full."""
    transient_bytes: Float[np.ndarray, "*layouts blocks"]
    """Bytes while the block runs: its workspace, and tensors that are recomputed."""
    transient_full_bytes: Float[np.ndarray, "*layouts blocks"]
    """`transient_bytes` where the block is recomputed in full."""
    dummy_gradients: Float[np.ndarray, "*layouts"]
    """Bytes of placeholder gradients (`dummy_gradient_bytes`)."""

    @classmethod
    def of(
        cls,
        shards: Sequence[ShardBlocks],
        modes: Int[np.ndarray, "#shards *choices"],
        pipelined: bool,
        job: Job,
        framework: Framework,
    ) -> "BlockBytes":
        """Collect the blocks of shards along the first axis.

        Args:
            modes: places in `RECOMPUTE_MODES`, along further axes.
            pipelined: whether the pipeline has several stages.
        """

        def spread(values: Sequence[np.ndarray]) -> np.ndarray:
            stacked = np.stack(values)
            return stacked.reshape(len(shards), *[1] * (modes.ndim - 1), *stacked.shape[1:])

        by_mode = spread([shard.activation_bytes for shard in shards])
        kept_bytes = np.take_along_axis(by_mode, modes[..., None, None], axis=-1)[..., 0]
        # The first mode recomputes nothing, the last one everything.
        all_activations, checkpoints = by_mode[..., 0], by_mode[..., -1]
        workspace = spread([shard.workspace_bytes for shard in shards])
        layers = spread([shard.layers for shard in shards])
        recomputed = modes[..., None] == by_mode.shape[-1] - 1
        dummies = [np.zeros(())] * len(shards)
        if framework.memory.cached_weight_gradients and is_trained(job):
            dummies = [np.array(dummy_gradient_bytes(shard, job)) for shard in shards]

        # Recomputed activations come back while a block's backward runs. Without backward, forward
        # holds all of them.
        return cls(
            dense=spread([shard.dense_params(pipelined) for shard in shards]),
            expert=spread([shard.expert_params for shard in shards]),
            frozen=spread([shard.frozen_params(pipelined, job) for shard in shards]),
            shared=spread([shard.shared_params for shard in shards]),
            shares_with=spread([shard.shares_with for shard in shards]),
            largest_weight=spread([largest_weights(shard) for shard in shards]),
            layers=layers,
            saves_operands=layers & ~recomputed,
            kept_bytes=kept_bytes,
            kept_full_bytes=checkpoints,
            transient_bytes=workspace
            + (all_activations - kept_bytes if job.mode == "train" else all_activations),
            transient_full_bytes=workspace + all_activations - checkpoints,
            dummy_gradients=spread(dummies),
        )

    def reducing(
        self,
        sharding: "Sharding",
        each_backward: Bool[Any, "*layouts ranks"],
        made_bytes_per_param: float,
        reduced_bytes_per_param: float,
    ) -> "BlockBytes":
        """Add to the blocks the two gradients that ZeRO 3 holds when a backward pass ends: the
        whole gradient, and the copy in the type of reductions that is reduced (PyTorch
        torch/distributed/fsdp/_fully_shard/ _fsdp_collectives.py `foreach_reduce`, whose input is
        filled before the gradients are freed).

        Args:
            each_backward: whether each backward reduces its own; else the whole gradient is added
                to those before it.
            made_bytes_per_param: bytes of a gradient as backward made it.
            reduced_bytes_per_param: bytes of the copy that is reduced.
        """
        # An axis of one stands for blocks here, as it does for ranks elsewhere. All ranks reduce
        # alike.
        bytes_per_param = made_bytes_per_param + reduced_bytes_per_param * each_backward[..., :1]
        params = self.dense - self.frozen + self.expert
        reduced = np.where((sharding.zero == 3) & sharding.reduced, params * bytes_per_param, 0.0)
        return replace(
            self,
            transient_bytes=self.transient_bytes + reduced,
            transient_full_bytes=self.transient_full_bytes + reduced,
        )

    def saved(
        self, blocks: Float[Any, "*layouts ranks blocks"], full: Float[Any, "*layouts ranks blocks"]
    ) -> Float[Any, "*layouts ranks"]:
        """Activation bytes of a number of blocks times micro-batches, `full` of which are
        recomputed in full."""
        return sum_over_blocks(blocks, self.kept_bytes) - sum_over_blocks(
            full, self.kept_bytes - self.kept_full_bytes
        )

    def checkpoints(
        self, blocks: Float[Any, "*layouts ranks blocks"], full: Float[Any, "*layouts ranks blocks"]
    ) -> Float[Any, "*layouts ranks"]:
        """Bytes of the inputs of layers recomputed in full, for a number of blocks times
        micro-batches; `full` of these are recomputed in full even if the layout recomputes the
        others differently."""
        in_every_layer = np.where(self.layers & ~self.saves_operands, self.kept_bytes, 0.0)
        in_some_layers = np.where(self.saves_operands, self.kept_full_bytes, 0.0)
        return sum_over_blocks(blocks, in_every_layer) + sum_over_blocks(full, in_some_layers)


@dataclass(frozen=True, eq=False)
class Sharding:
    """How model states are sharded over ranks; an axis of size one stands for all ranks."""

    zero: Int[np.ndarray, "*layouts 1"]
    """Stage of ZeRO, as in `Layout.zero`."""
    dense: Int[np.ndarray, "*layouts 1"]
    """Ranks over which states of parameters outside routed experts are sharded."""
    expert: Int[np.ndarray, "*layouts 1"]
    """Ranks over which states of routed experts are sharded."""
    reduced: Bool[np.ndarray, "*layouts 1"]
    """Whether several ranks hold the same parameters, so that gradients are reduced."""
    ahead: Int[np.ndarray, "*layouts 1"]
    """Layers whose weights ZeRO 3 gathers before they are needed: `Layout.prefetch`, or none if
    gathers do not overlap with passes."""
    on_host: Int[np.ndarray, "*layouts 1"]
    """Index of `Layout.offload_states` among its choices: 1 for optimizer states, 2 for weights
    too."""
    communicators: Int[np.ndarray, "*layouts 1"]
    """Groups of several ranks that a layout's ranks are in."""
    pipelined: Bool[np.ndarray, "*layouts 1"]
    """Whether a pipeline has several stages."""
    offloaded: Int[np.ndarray, "*layouts 1"]
    """First layers whose activations wait in host memory (`Layout.offload_layers`)."""
    one_backward: Bool[np.ndarray, "*layouts 1"]
    """Whether a step has a single backward pass, so that no gradients are accumulated."""

    @classmethod
    def of(cls, layouts: Sequence[Layout], job: Job) -> "Sharding":
        """Collect the sharding of layouts, one after another."""
        places_of_states = get_args(StateOffload)

        def column(values: Iterable[int]) -> Int[np.ndarray, "layouts 1"]:
            return np.array(list(values))[:, None]

        return cls(
            zero=column(layout.zero for layout in layouts),
            dense=column(layout.dp * layout.cp // layout.replicate for layout in layouts),
            expert=column(layout.edp // layout.replicate for layout in layouts),
            reduced=column(layout.replicated for layout in layouts) > 0,
            ahead=column(
                layout.prefetch if layout.overlap.overlap_param_gather else 0 for layout in layouts
            ),
            on_host=column(places_of_states.index(layout.offload_states) for layout in layouts),
            communicators=column(communicators(layout) for layout in layouts),
            pipelined=column(layout.pp > 1 for layout in layouts) > 0,
            offloaded=column(layout.offload_layers for layout in layouts),
            # A single micro-batch in a single stage.
            one_backward=column(
                layout.pp == 1 and job.global_batch <= layout.dp * layout.micro_batch
                for layout in layouts
            )
            > 0,
        )

    def spread(
        self,
        dense: Float[Any, "*layouts ranks"],
        expert: Float[Any, "*layouts ranks"] | float = 0.0,
    ) -> "ShardedParams":
        """Parameters per rank with sharded and with unsharded states."""
        return ShardedParams(dense / self.dense + expert / self.expert, dense + expert)


class ShardedParams(NamedTuple):
    """Parameters that each rank holds."""

    sharded: Float[Any, "*layouts ranks"]
    """Parameters of the rank's shard, for states that are sharded."""
    unsharded: Float[Any, "*layouts ranks"]
    """All parameters of the rank's stages, for states that are not sharded."""


class RankParams(NamedTuple):
    """Parameters that ranks hold."""

    stored: ShardedParams
    """All parameters of the rank. Narrow weights of layers (`Job.base_weights`, `Job.fp8_params`)
    are counted as the number of weights of the products' type that take the same bytes."""
    updated: ShardedParams
    """Parameters of the rank that have gradients and optimizer states."""
    unsharded: Float[Any, "*layouts ranks"]
    """Number of all parameters of the rank's stages, as if no state were sharded, whatever type
    they have."""
    layer_share: Float[Any, "*layouts blocks"] | float
    """Bytes of each block's weights relative to their bytes in the type of products."""


def count_params(
    ranks: RankBlocks, blocks: BlockBytes, sharding: Sharding, setting: Setting
) -> RankParams:
    """Count the parameters of ranks by the states that are kept for them."""
    xp = ranks.stored.__array_namespace__()
    dense = sum_over_blocks(ranks.stored, blocks.dense)
    expert = sum_over_blocks(ranks.stored, blocks.expert)
    copied = 0.0
    if blocks.shared.any():
        copied = copied_params(ranks.stored, blocks.shared, blocks.shares_with)
        dense = dense + copied
    stored = updated = sharding.spread(dense, expert)
    if blocks.frozen.any():
        updated = sharding.spread(dense - sum_over_blocks(ranks.stored, blocks.frozen), expert)

    # Bytes of a layer's weight in device memory over those of one that is stored in the products'
    # type.
    job = setting.job
    layer_share = width_share = 1.0
    if job.narrow.fp8_params and job.dtype == "fp8" and is_trained(job):
        width_share = fp8_weight_bytes(job, setting.cluster.device) / stored_dtype_bytes(job)
    elif job.fine_tuning.base_weights:
        width_share = layer_weight_share(job)
    if width_share != 1.0:
        layer_share = xp.where(blocks.layers, width_share, 1.0)
        stored_dense = (
            sum_over_blocks(ranks.stored, blocks.dense * layer_share) + copied * width_share
        )
        stored_expert = sum_over_blocks(ranks.stored, blocks.expert * layer_share)
        stored = sharding.spread(stored_dense, stored_expert)
    return RankParams(stored, updated, dense + expert, layer_share)


def copied_params(
    on_ranks: Float[Any, "*layouts ranks blocks"],
    shared: Float[np.ndarray, "*layouts blocks"],
    shares_with: Int[np.ndarray, "*layouts blocks"],
) -> Float[Any, "*layouts ranks"]:
    """Parameters of layers that share an earlier layer's weights, on ranks that hold a copy because
    they lack that layer.

    Args:
        on_ranks: number of each block on every rank.
        shared: parameters that each block shares with an earlier one.
        shares_with: place of that one.
    """
    # A block finds its weights on the rank if the owner is there, or an earlier block with the same
    # owner.
    xp = on_ranks.__array_namespace__()
    places = np.arange(shared.shape[-1])
    is_owner = places == shares_with[..., :, None]
    same_owner = (shares_with[..., :, None] == shares_with[..., None, :]) & (
        shared[..., None, :] > 0
    )
    provides = is_owner | (same_owner & (places < places[:, None]))
    has_block = xp.where(on_ranks > 0, 1.0, 0.0)
    n_providing = xp.sum(has_block[..., None, :] * provides[..., None, :, :], axis=-1)
    return sum_over_blocks(xp.where(n_providing > 0, 0.0, has_block), shared)


def communicators(layout: Layout) -> int:
    """Number of groups of several ranks that a rank communicates in."""
    # All ranks; data, model, tensor and pipeline parallel ones.
    sizes = (layout.devices, layout.dp * layout.cp, layout.tp * layout.pp, layout.tp, layout.pp)
    return sum(size > 1 for size in sizes)


def dummy_gradient_bytes(shard: ShardBlocks, job: Job) -> float:
    """Bytes of dummy gradients, one per distinct weight shape, where a framework keeps them
    (`MemoryCosts.cached_weight_gradients`)."""
    shapes: set[tuple[int, int]] = set()
    for block in shard.blocks:
        if block.is_layer:
            shapes.update(block.weight_shapes(experts=False), block.weight_shapes(experts=True))
    return float(sum(m * n for m, n in shapes) * stored_dtype_bytes(job))


def largest_weights(shard: ShardBlocks) -> Float[np.ndarray, " blocks"]:
    """Parameters of the largest weight of every block; experts' weights of one shape
    count together."""
    largest = np.zeros(len(shard.blocks))
    for i, block in enumerate(shard.blocks):
        dense = [m * n for m, n in block.weight_shapes(experts=False)]
        expert_elements = [
            m * n * count for (m, n), count in block.weight_shapes(experts=True).items()
        ]
        largest[i] = max([*dense, *expert_elements], default=0)
    return largest


def sum_over_blocks(
    on_ranks: Float[Any, "*layouts ranks blocks"], of_blocks: Float[np.ndarray, "*layouts blocks"]
) -> Float[Any, "*layouts ranks"]:
    """Sum of a quantity over the blocks of every rank."""
    return on_ranks.__array_namespace__().einsum("...rb,...b->...r", on_ranks, of_blocks)


def largest_of_blocks(
    of_blocks: Float[np.ndarray, "*layouts blocks"], on_ranks: Bool[Any, "*layouts ranks blocks"]
) -> Float[Any, "*layouts ranks"]:
    """Largest quantity among the blocks of every rank."""
    return on_ranks.__array_namespace__().where(on_ranks, of_blocks[..., None, :], 0.0).max(axis=-1)
