"""How a model's blocks are dealt to pipeline stages and, inside them, to segments."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError, Reason
from perfmodel.schedule import even_split
from perfmodel.spec import PerStage
from perfmodel.workload import BlockOps


def layer_count(blocks: Sequence[tuple[BlockOps, int]]) -> int:
    """Layers that a pipeline can be cut between."""
    return sum(n for block, n in blocks if block.is_layer)


def stage_blocks(
    kinds: Sequence[tuple[bool, int]],
    stages: int,
    segments: int,
    partition: PerStage = None,
    per_segment: Sequence[Sequence[int]] | None = None,
) -> Float[np.ndarray, "stages segments blocks"]:
    """How many of each block every segment of every stage holds.

    Args:
        kinds: whether each block is a layer, and how often it occurs, in model order.
        stages, segments: of the pipeline, and of each stage.
        partition: layers of every stage; None: as even as can be.
        per_segment: layers of every segment of every stage; None: as even as can be.

    Raises:
        LayoutError: if there are fewer layers than stages, or the partition does not fit stages and layers.
    """
    order = [i for i, (_, n) in enumerate(kinds) for _ in range(n)]
    layers = [pos for pos, i in enumerate(order) if kinds[i][0]]
    if partition is None:
        per_stage = even_split(len(layers), stages)
    else:
        per_stage = _checked(partition, len(layers), stages, (layers[0] > 0, layers[-1] < len(order) - 1))
    sizes = np.concatenate(per_segment or [segment_sizes(n, segments) for n in per_stage.tolist()])
    slot_of_layer = np.repeat(np.arange(stages * segments), sizes)
    counts = np.zeros((stages * segments, len(kinds)))
    # embedding and head stand at the ends, other riders join the layer before them
    seen = np.searchsorted(np.array(layers), np.arange(len(order)), side="right") - 1
    slot = slot_of_layer[np.maximum(seen, 0)]
    ends = np.arange(len(order))
    slot[ends < layers[0]] = 0
    last_stage = sizes.reshape(stages, segments)[-1]
    slot[ends > layers[-1]] = (stages - 1) * segments + max(0, np.count_nonzero(last_stage) - 1)
    np.add.at(counts, (slot, np.array(order)), 1.0)
    return counts.reshape(stages, segments, len(kinds))


def by_layer(
    blocks: Sequence[tuple[BlockOps, int]],
) -> tuple[Float[np.ndarray, " blocks"], Float[np.ndarray, "layers+1 blocks"], Float[np.ndarray, " blocks"]]:
    """Blocks that stand before the first layer; those of the layers (each with its riders) before every cut between
    them, from none to all; and those that stand after the last layer."""
    order = [i for i, (_, n) in enumerate(blocks) for _ in range(n)]
    one = np.eye(len(blocks))[order]
    starts = [at for at, i in enumerate(order) if blocks[i][0].is_layer]
    end = starts[-1] + 1
    upto = np.zeros((len(starts) + 1, len(blocks)))
    upto[1:] = np.add.reduceat(one[:end], starts, axis=0).cumsum(axis=0)
    return one[: starts[0]].sum(axis=0), upto, one[end:].sum(axis=0)


def segment_sizes(layers: int, segments: int) -> Int[np.ndarray, " segments"]:
    """Layers of each segment of a stage; the last are empty where there are fewer layers than segments."""
    sizes = np.zeros(segments, int)
    filled = min(layers, segments)
    if filled:
        sizes[:filled] = even_split(layers, filled)
    return sizes


def _checked(
    partition: tuple[int, ...], layers: int, stages: int, riders: tuple[bool, bool]
) -> Int[np.ndarray, " stages"]:
    sizes = np.array(partition)
    held = sizes > 0
    held[0] |= riders[0]
    held[-1] |= riders[1]
    if len(sizes) != stages or sizes.sum() != layers or not held.all():
        raise LayoutError(
            f"partition={'-'.join(map(str, partition))} must share {layers} layers among {stages} pipeline stages, "
            "at least one each (but for a first with an embedding and a last with a head)",
            Reason.PER_STAGE, "partition",
        )  # fmt: skip
    return sizes


def leading_layers(
    counts: Float[Any, "stages *segments blocks"],
    layers: Bool[Any, " blocks"],
    per_stage: Int[Any, "#stages"] | Float[Any, "#stages"],
) -> Float[Any, "stages *segments blocks"]:
    """The first layers of every stage, so many of each; `layers` marks the blocks that are layers."""
    xp = counts.__array_namespace__()
    in_order = xp.where(layers, counts, 0.0).reshape(len(counts), -1)
    before = xp.cumsum(in_order, axis=1) - in_order
    return xp.clip(per_stage[:, None] - before, 0.0, in_order).reshape(counts.shape)


def fully_recomputed(
    counts: Float[np.ndarray, "stages *segments blocks"], layers: Bool[np.ndarray, " blocks"], per_stage: PerStage
) -> Float[np.ndarray, "stages *segments blocks"]:
    """How many of each block every segment of every stage recomputes in full: the first layers of the stage.

    Raises:
        LayoutError: not a number per stage (nor one for all), or more layers than a stage has.
    """
    if per_stage is None:
        return np.zeros_like(counts)
    held = counts[..., layers].reshape(len(counts), -1).sum(axis=1)
    if len(per_stage) > 1 and (len(per_stage) != len(counts) or (np.array(per_stage) > held).any()):
        raise LayoutError(
            f"recompute_full_layers={'-'.join(map(str, per_stage))} must name at most the layers of each of "
            f"{len(counts)} stages, {'-'.join(f'{n:.0f}' for n in held)}",
            Reason.PER_STAGE, "recompute_full_layers",
        )  # fmt: skip
    return leading_layers(counts, layers, np.array(per_stage))
