"""How a model's blocks are dealt to pipeline stages and, inside them, to segments."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import LayoutError
from perfmodel.workload import BlockOps

ENDS = 2
"""Stages that may hold no layer: the first with the embedding alone, the last with the head alone."""


def is_layer(block: BlockOps) -> bool:
    """Embeddings and heads ride along with the neighbouring layer; all else is partitioned."""
    return "embedding" not in block.name and "head" not in block.name


def layer_count(blocks: Sequence[tuple[BlockOps, int]]) -> int:
    """Layers that a pipeline can be cut between."""
    return sum(n for block, n in blocks if is_layer(block))


def even_split(items: int, parts: int) -> Int[np.ndarray, " parts"]:
    """Sizes of a contiguous split; a remainder goes to the middle parts.

    First and last stage also carry embedding and head, so they are the ones to keep short
    (Megatron and zero-bubble runs do the same with L = k p - 2 layers).
    """
    if items < parts - ENDS:
        raise LayoutError(f"{items} layers cannot fill {parts} pipeline stages (pp * vpp); use at most {items}")
    sizes = np.full(parts, items // parts)
    extra = items % parts
    first = (parts - extra) // 2
    sizes[first : first + extra] += 1
    return sizes


def stage_blocks(
    blocks: Sequence[tuple[BlockOps, int]], stages: int, segments: int
) -> Float[np.ndarray, "stages segments blocks"]:
    """How many of each block every segment of every stage holds.

    Raises:
        LayoutError: if there are fewer layers than stages.
    """
    order = [i for i, (block, n) in enumerate(blocks) for _ in range(n)]
    layers = [pos for pos, i in enumerate(order) if is_layer(blocks[i][0])]
    per_stage = even_split(len(layers), stages)
    sizes = np.concatenate([_segment_sizes(n, segments) for n in per_stage.tolist()])
    slot_of_layer = np.repeat(np.arange(stages * segments), sizes)
    counts = np.zeros((stages * segments, len(blocks)))
    # embedding and head stand at the ends, other riders join the layer before them
    seen = np.searchsorted(np.array(layers), np.arange(len(order)), side="right") - 1
    slot = slot_of_layer[np.maximum(seen, 0)]
    ends = np.arange(len(order))
    slot[ends < layers[0]] = 0
    last_stage = sizes.reshape(stages, segments)[-1]
    slot[ends > layers[-1]] = (stages - 1) * segments + max(0, np.count_nonzero(last_stage) - 1)
    np.add.at(counts, (slot, np.array(order)), 1.0)
    return counts.reshape(stages, segments, len(blocks))


def _segment_sizes(layers: int, segments: int) -> Int[np.ndarray, " segments"]:
    """Layers of each segment of a stage; the last are empty where there are fewer layers than segments."""
    sizes = np.zeros(segments, int)
    filled = min(layers, segments)
    if filled:
        sizes[:filled] = even_split(layers, filled)
    return sizes
