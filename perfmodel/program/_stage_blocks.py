"""Divides the blocks of a model among the stages of a pipeline.

Pipelines are cut between layers. Every other block stays with the layer before it, except at the
ends of the model: the embedding is on the first stage, the head on the last.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError, Reason
from perfmodel.schedule import even_split, leading_layers
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
        LayoutError: if there are fewer layers than stages, or the partition does not fit stages and
            layers.
    """
    # The model written out block by block, and the positions of its layers.
    order = np.repeat(np.arange(len(kinds)), [repeats for _, repeats in kinds])
    is_layer = np.array([is_layer for is_layer, _ in kinds], bool)[order]
    layers = np.flatnonzero(is_layer)
    position = np.arange(len(order))
    first, last = layers[0], layers[-1]

    # Slots are the segments of all stages, one after another, each filled with its number of
    # layers.
    if partition is None:
        per_stage = even_split(len(layers), stages)
    else:
        has_embedding = bool(first > 0)
        has_head = bool(last < len(order) - 1)
        per_stage = _checked(
            partition, len(layers), stages, has_embedding=has_embedding, has_head=has_head
        )
    sizes = np.concatenate(per_segment or [segment_sizes(n, segments) for n in per_stage.tolist()])
    slot_of_layer = np.repeat(np.arange(stages * segments), sizes)

    # Other blocks join the layer before them. The embedding goes to the first segment of the first
    # stage, the head to the last segment of the last stage that has a layer.
    layers_before = np.searchsorted(layers, position, side="right") - 1
    slot = slot_of_layer[np.maximum(layers_before, 0)]
    slot[position < first] = 0
    last_stage = sizes.reshape(stages, segments)[-1]
    slot[position > last] = (stages - 1) * segments + max(0, np.count_nonzero(last_stage) - 1)

    counts = np.zeros((stages * segments, len(kinds)))
    np.add.at(counts, (slot, order), 1.0)
    return counts.reshape(stages, segments, len(kinds))


class BlocksByLayer(NamedTuple):
    """Blocks of a model, cumulated over the cuts between layers."""

    before: Float[np.ndarray, " blocks"]
    """Before the first layer."""
    cumulative: Float[np.ndarray, "layers+1 blocks"]
    """Blocks of the layers (each with the blocks attached to it) before every cut, from none to
    all."""
    after: Float[np.ndarray, " blocks"]
    """After the last layer."""


def by_layer(blocks: Sequence[tuple[BlockOps, int]]) -> BlocksByLayer:
    """Count a model's blocks before every cut between its layers."""
    order = np.repeat(np.arange(len(blocks)), [repeats for _, repeats in blocks])
    one_hot = np.eye(len(blocks))[order]
    layers = np.flatnonzero(np.array([block.is_layer for block, _ in blocks], bool)[order])
    end = layers[-1] + 1
    cumulative = np.zeros((len(layers) + 1, len(blocks)))
    cumulative[1:] = np.add.reduceat(one_hot[:end], layers, axis=0).cumsum(axis=0)
    return BlocksByLayer(one_hot[: layers[0]].sum(axis=0), cumulative, one_hot[end:].sum(axis=0))


def segment_sizes(layers: int, segments: int) -> Int[np.ndarray, " segments"]:
    """Layers of each segment of a stage; the last segments are empty if there are too few
    layers."""
    sizes = np.zeros(segments, int)
    filled = min(layers, segments)
    if filled:
        sizes[:filled] = even_split(layers, filled)
    return sizes


def _checked(
    partition: tuple[int, ...], layers: int, stages: int, *, has_embedding: bool, has_head: bool
) -> Int[np.ndarray, " stages"]:
    """Layers of every stage as a partition states them.

    Args:
        has_embedding: whether blocks precede the first layer.
        has_head: whether blocks follow the last layer.

    Raises:
        LayoutError: they are not the model's layers, or leave a stage empty.
    """
    sizes = np.array(partition)
    has_blocks = sizes > 0
    has_blocks[0] |= has_embedding
    has_blocks[-1] |= has_head
    if len(sizes) != stages or sizes.sum() != layers or not has_blocks.all():
        raise LayoutError(
            f"partition={'-'.join(map(str, partition))} must divide {layers} layers into {stages} pipeline "
            "stages, with at least one layer each (only a first stage with an embedding or a last with a head "
            "may have none)",
            Reason.PER_STAGE,
            "partition",
        )
    return sizes


def fully_recomputed(
    counts: Float[np.ndarray, "stages *segments blocks"],
    layers: Bool[np.ndarray, " blocks"],
    per_stage: PerStage,
) -> Float[np.ndarray, "stages *segments blocks"]:
    """Number of each block that every segment recomputes in full, starting with the first layers of
    the stage.

    Raises:
        LayoutError: not a number per stage (nor one for all), or more layers than a stage has.
    """
    if per_stage is None:
        return np.zeros_like(counts)
    layers_of_stage = counts[..., layers].reshape(len(counts), -1).sum(axis=1)
    # One number holds for all stages, of which some may have fewer layers.
    if len(per_stage) > 1 and (
        len(per_stage) != len(counts) or (np.array(per_stage) > layers_of_stage).any()
    ):
        raise LayoutError(
            f"recompute_full_layers={'-'.join(map(str, per_stage))} must not exceed the layers of the "
            f"{len(counts)} stages, which are {'-'.join(f'{n:.0f}' for n in layers_of_stage)}",
            Reason.PER_STAGE,
            "recompute_full_layers",
        )
    return leading_layers(counts, layers, np.array(per_stage))
