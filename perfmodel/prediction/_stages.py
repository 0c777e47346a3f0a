"""Divides a model's blocks into pipeline stages and segments.

Pipelines are cut between layers. Every other block rides with a layer, or stands at an end of the model: the embedding
on the first stage, the head on the last.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError, Reason
from perfmodel.schedule import even_split
from perfmodel.spec.notation import PerStage
from perfmodel.workload import BlockOps


def stage_blocks(
    kinds: Sequence[tuple[bool, int]],
    stages: int,
    segments: int,
    partition: PerStage = None,
    per_segment: Sequence[Sequence[int]] | None = None,
) -> Float[np.ndarray, "stages segments blocks"]:
    """Number of each block in every segment of every stage.

    Args:
        kinds: whether each block is a layer, and how often it occurs, in model order.
        stages: stages of the pipeline.
        segments: segments of each stage.
        partition: layers of every stage; None: as even as can be.
        per_segment: layers of every segment of every stage; None: as even as can be.

    Raises:
        LayoutError: if there are fewer layers than stages, or the partition does not fit stages and layers.
    """
    # The model written out block by block, and the positions of its layers.
    order = np.repeat(np.arange(len(kinds)), [repeats for _, repeats in kinds])
    is_layer = np.array([is_layer for is_layer, _ in kinds], bool)[order]
    layers = np.flatnonzero(is_layer)
    position = np.arange(len(order))
    first, last = layers[0], layers[-1]

    # Slots are the segments of all stages, one after another, each filled with its number of layers.
    if partition is None:
        per_stage = even_split(len(layers), stages)
    else:
        per_stage = _checked(partition, len(layers), stages, (first > 0, last < len(order) - 1))
    sizes = np.concatenate(per_segment or [segment_sizes(n, segments) for n in per_stage.tolist()])
    slot_of_layer = np.repeat(np.arange(stages * segments), sizes)

    # Embedding and head stand at the ends, other riders join the layer before them.
    layers_before = np.searchsorted(layers, position, side="right") - 1
    slot = slot_of_layer[np.maximum(layers_before, 0)]
    slot[position < first] = 0
    # The head goes with the last segment of the last stage that has a layer.
    last_stage = sizes.reshape(stages, segments)[-1]
    slot[position > last] = (stages - 1) * segments + max(0, np.count_nonzero(last_stage) - 1)

    counts = np.zeros((stages * segments, len(kinds)))
    np.add.at(counts, (slot, order), 1.0)
    return counts.reshape(stages, segments, len(kinds))


class BlocksByLayer(NamedTuple):
    """Blocks of a model, cumulated over the cuts between layers."""

    before: Float[np.ndarray, " blocks"]
    """Before the first layer."""
    upto: Float[np.ndarray, "layers+1 blocks"]
    """Blocks of the layers (each with the blocks attached to it) before every cut, from none to all."""
    after: Float[np.ndarray, " blocks"]
    """After the last layer."""


def by_layer(blocks: Sequence[tuple[BlockOps, int]]) -> BlocksByLayer:
    """Count a model's blocks before every cut between its layers."""
    order = np.repeat(np.arange(len(blocks)), [repeats for _, repeats in blocks])
    one_hot = np.eye(len(blocks))[order]
    layers = np.flatnonzero(np.array([block.is_layer for block, _ in blocks], bool)[order])
    end = layers[-1] + 1
    upto = np.zeros((len(layers) + 1, len(blocks)))
    upto[1:] = np.add.reduceat(one_hot[:end], layers, axis=0).cumsum(axis=0)
    return BlocksByLayer(one_hot[: layers[0]].sum(axis=0), upto, one_hot[end:].sum(axis=0))


def segment_sizes(layers: int, segments: int) -> Int[np.ndarray, " segments"]:
    """Layers of each segment of a stage; the last segments are empty if there are too few layers."""
    sizes = np.zeros(segments, int)
    filled = min(layers, segments)
    if filled:
        sizes[:filled] = even_split(layers, filled)
    return sizes


def _checked(
    partition: tuple[int, ...], layers: int, stages: int, riders: tuple[bool, bool]
) -> Int[np.ndarray, " stages"]:
    """Layers of every stage as a partition states them.

    Args:
        riders: whether an embedding stands before the layers, and a head behind them.

    Raises:
        LayoutError: they are not the model's layers, or leave a stage empty.
    """
    sizes = np.array(partition)
    has_blocks = sizes > 0
    has_blocks[0] |= riders[0]
    has_blocks[-1] |= riders[1]
    if len(sizes) != stages or sizes.sum() != layers or not has_blocks.all():
        raise LayoutError(
            f"partition={'-'.join(map(str, partition))} must divide {layers} layers into {stages} pipeline "
            "stages, with at least one layer each (only a first stage with an embedding or a last with a head "
            "may have none)",
            Reason.PER_STAGE,
            "partition",
        )
    return sizes


def leading_layers(
    counts: Float[Any, "stages *segments blocks"],
    layers: Bool[Any, " blocks"],
    per_stage: Int[Any, "#stages"] | Float[Any, "#stages"],
) -> Float[Any, "stages *segments blocks"]:
    """Blocks that are among the first layers of every stage.

    Args:
        counts: blocks of every stage.
        layers: which blocks are layers.
        per_stage: how many of a stage's layers are taken; fractions take part of a layer.
    """
    xp = counts.__array_namespace__()
    # Segments and blocks of a stage in model order: each holds what is left to take when its turn comes.
    in_order = xp.where(layers, counts, 0.0).reshape(len(counts), -1)
    before = xp.cumsum(in_order, axis=1) - in_order
    return xp.clip(per_stage[:, None] - before, 0.0, in_order).reshape(counts.shape)


def fully_recomputed(
    counts: Float[np.ndarray, "stages *segments blocks"], layers: Bool[np.ndarray, " blocks"], per_stage: PerStage
) -> Float[np.ndarray, "stages *segments blocks"]:
    """Number of each block that every segment recomputes in full, starting with the first layers of the stage.

    Raises:
        LayoutError: not a number per stage (nor one for all), or more layers than a stage has.
    """
    if per_stage is None:
        return np.zeros_like(counts)
    layers_of_stage = counts[..., layers].reshape(len(counts), -1).sum(axis=1)
    # One number holds for all stages, of which some may have fewer layers.
    if len(per_stage) > 1 and (len(per_stage) != len(counts) or (np.array(per_stage) > layers_of_stage).any()):
        raise LayoutError(
            f"recompute_full_layers={'-'.join(map(str, per_stage))} must not exceed the layers of the "
            f"{len(counts)} stages, which are {'-'.join(f'{n:.0f}' for n in layers_of_stage)}",
            Reason.PER_STAGE,
            "recompute_full_layers",
        )
    return leading_layers(counts, layers, np.array(per_stage))
