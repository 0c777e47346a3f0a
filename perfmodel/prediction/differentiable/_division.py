"""Real numbers of layers dealt to stages: blocks of every stage and segment as a function that JAX traces.

Whole numbers give what `stage_blocks` deals; between them blocks are interpolated along the model, so that a cut
inside a layer gives both stages their part of it.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._stages import by_layer, leading_layers, segment_sizes


class Cuts(NamedTuple):
    """A model that is cut between its layers."""

    upto: Float[Any, "layers+1 blocks"]
    """Blocks before each layer, without what comes before the first and after the last."""
    ends: Float[Any, "2 blocks"]
    """What comes before the first layer, and after the last."""
    bounds: Float[Any, "layers+1 segments+1"]
    """Where the segments of a stage of so many layers begin, and the last one ends."""
    layers: Float[Any, " blocks"]
    """1 for blocks that are layers."""

    @classmethod
    def of(cls, blocks: ShardBlocks, segments: int) -> "Cuts":
        """Of a shard's blocks in stages of so many segments."""
        before, layers, after = by_layer(blocks.pairs)
        upto = np.concatenate([np.zeros((1, layers.shape[1])), np.cumsum(layers, axis=0)])
        bounds = np.cumsum([np.append(0, segment_sizes(n, segments)) for n in range(len(upto))], axis=1)
        return cls(upto, np.stack([before, after]), bounds.astype(float), blocks.layers.astype(float))

    def counts(self, layers: Float[Array, " stages"]) -> Float[Array, "stages segments blocks"]:
        """Blocks of every segment of every stage, which hold so many layers and follow one another."""
        starts = jnp.cumsum(layers) - layers
        held = jnp.diff(along(self.upto, starts[:, None] + along(self.bounds, layers)), axis=1)
        last = self.bounds.shape[1] - 2
        filled = jnp.clip(jnp.ceil(layers[-1]).astype(int) - 1, 0, last)  # segment that ends with the last layer
        return held.at[0, 0].add(self.ends[0]).at[-1, filled].add(self.ends[1])

    def held(
        self, layers: Float[Array, " stages"], recompute: Float[Array, " stages"]
    ) -> tuple[Float[Array, "stages segments blocks"], Float[Array, "stages segments blocks"]]:
        """`counts`, and those of them in the first layers of each stage, a share of it, that recompute all."""
        counts = self.counts(layers)
        of_stage = (counts * self.layers).sum(axis=(1, 2))
        return counts, leading_layers(counts, self.layers > 0, recompute * of_stage)

    def alike(self, layers: int, starts: Int[np.ndarray, " stages"]) -> Float[np.ndarray, "stages segments blocks"]:
        """Blocks of stages that all hold so many layers, near where they start, whether or not the model has them."""
        begin = np.clip(starts, 0, len(self.upto) - 1 - layers)[:, None]
        held = np.diff(self.upto[begin + self.bounds[layers].astype(int)], axis=1)
        held[0, 0] += self.ends[0]
        held[-1, min(max(layers - 1, 0), held.shape[1] - 1)] += self.ends[1]
        return held


def along(
    table: Float[Array, "rows columns"], at: Float[Array, "*places"], knots: Float[Any, " rows"] | None = None
) -> Float[Array, "*places columns"]:
    """Rows of a table at real places, linear between knots (by default 0, 1, 2 ...) and on beyond the outer ones; at
    inner knots the slope is the mean of both sides."""
    rows = len(table)
    if rows == 1:
        return jnp.broadcast_to(table[0], (*at.shape, table.shape[1]))
    where = jnp.arange(rows, dtype=at.dtype) if knots is None else jnp.asarray(knots, at.dtype)
    low, high = np.zeros(rows - 1), np.ones(rows - 1)
    low[0], high[-1] = -np.inf, np.inf
    passed = jnp.clip((at[..., None] - where[:-1]) / jnp.diff(where), low, high)
    return table[0] + passed @ jnp.diff(table, axis=0)
