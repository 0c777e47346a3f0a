"""Pipelines of a grid, counted in blocks: paths and fullest ranks, padded to one shape for many
pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._memory_inputs import RankBlocks
from perfmodel.prediction._pipeline import Pipeline
from perfmodel.program import ProgramSpec

_INPUT_GRADIENTS: Final = 1
_WEIGHT_GRADIENTS: Final = 2
"""Places of these passes along the last axis of `Paths.passes`, behind forward passes."""


@dataclass(frozen=True, eq=False)
class PipelineBlocks:
    """One pipeline counted in blocks of a model instead of stages; quantities are computed on first
    use."""

    spec: ProgramSpec
    """Pipeline program that the blocks run in."""
    pipeline: Pipeline
    """Paths and fullest ranks of the pipeline, in stages."""
    counts: Float[np.ndarray, "stages blocks"]
    """Number of blocks in every stage."""
    full: Float[np.ndarray, "fulls stages blocks"]
    """Blocks of every stage that are recomputed in full, in several choices."""
    slots_per_stage: int
    """Micro-batches per stage that memory is reserved for (`MemoryCosts.slots_per_stage`)."""

    @property
    def variants(self) -> Int[np.ndarray, "variants 3"]:
        """Variants of a stage's passes, as in `Structure.variants`."""
        return self.pipeline.paths.variants

    @property
    def cycle(self) -> Float[np.ndarray, " paths"]:
        """Number of steps over which each path repeats, as in `Paths.cycle`."""
        return self.pipeline.paths.cycle

    @cached_property
    def blocks(self) -> Float[np.ndarray, " blocks"]:
        """Number of times that the model has each block."""
        return self.counts.sum(axis=0)

    @cached_property
    def work(self) -> Float[np.ndarray, "paths variants*3*blocks"]:
        """Blocks that each path passes forwards, in input gradients and in weight gradients."""
        return self._in_blocks(self.pipeline.paths.passes)

    @cached_property
    def transit(self) -> Float[np.ndarray, "paths variants*3*blocks"]:
        """Blocks on the way to each path and back (`Paths.transit`)."""
        return self._in_blocks(self.pipeline.paths.transit)

    def _in_blocks(
        self, passes: Float[np.ndarray, "paths variants stages 3"]
    ) -> Float[np.ndarray, "paths values"]:
        return np.einsum("kvsp,sb->kvpb", passes, self.counts).reshape(len(passes), -1)

    @cached_property
    def recomputed(self) -> Float[np.ndarray, "paths variants*blocks"]:
        """Blocks that each path recomputes: those whose input gradient it passes."""
        passes = self.pipeline.paths.passes[..., _INPUT_GRADIENTS]
        return np.einsum("kvs,sb->kvb", passes, self.counts).reshape(len(passes), -1)

    @cached_property
    def recomputed_in_full(self) -> Float[np.ndarray, "fulls paths variants*blocks"]:
        """Blocks that each path recomputes in full, under each choice of such blocks."""
        passes = self.pipeline.paths.passes[..., _INPUT_GRADIENTS]
        blocks = np.einsum("kvs,lsb->lkvb", passes, self.full)
        return blocks.reshape(len(self.full), len(passes), -1)

    @cached_property
    def reductions(self) -> float:
        """Weight gradients that every path passes on one rank, per chunk."""
        # On the last micro-batch's way back, no rank but the last waits for weight gradients.
        passes = self.pipeline.paths.passes[..., _WEIGHT_GRADIENTS]
        _, _, stages = passes.shape
        chunks = self.pipeline.live.stage.shape[1]
        return max(0.0, passes.sum(axis=(1, 2)).min() - stages) / chunks

    @property
    def sends(self) -> Float[np.ndarray, "paths 2*stages"]:
        """Transfers that each path waits for."""
        return self.pipeline.paths.sends.reshape(len(self.cycle), -1)

    @cached_property
    def ranks(self) -> RankBlocks:
        """Ranks that may be the fullest."""
        # With slots, too, the fullest rank is one that holds no fewer blocks than any other.
        live = self.pipeline.live.with_slots(self.slots_per_stage, len(self.counts))
        return RankBlocks.of(self.counts, self.full, live)


def stacked_ranks(
    pipelines: Sequence[RankBlocks], full: Int[np.ndarray, " recomputes"]
) -> RankBlocks:
    """The fullest ranks of many pipelines; axes pipelines, shards, recomputes, states, ranks.

    Pipelines with fewer ranks are padded by ranks that hold nothing, which are never the fullest.

    Args:
        full: index of each recompute choice among the pipelines' choices of blocks recomputed in
            full.
    """

    def padded(name: str, axis: int) -> np.ndarray:
        return _stacked([getattr(ranks, name) for ranks in pipelines], axis)

    return RankBlocks(
        stored=padded("stored", 0)[:, None, None, None],
        versions=padded("versions", 0)[:, None, None, None],
        in_flight=padded("in_flight", 0)[:, None, None, None],
        in_flight_full=padded("in_flight_full", 1)[:, None, full, None],
        stored_full=padded("stored_full", 1)[:, None, full, None],
        replicas=padded("replicas", 0)[:, None, None, None],
    )


def _stacked(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    """Stack arrays of different lengths along an axis, padded by zeros."""
    longest = max(array.shape[axis] for array in arrays)
    shape = list(arrays[0].shape)
    shape[axis] = longest
    stacked = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in zip(stacked, arrays, strict=True):
        row[(*[slice(None)] * axis, slice(array.shape[axis]))] = array
    return stacked


def longest_path_s(
    pipeline: PipelineBlocks,
    phase_s: Float[np.ndarray, "variants blocks 3 shards"],
    recompute_s: Float[np.ndarray, "recomputes variants blocks shards"],
    full_s: Float[np.ndarray, "recomputes variants blocks shards"],
    full: Int[np.ndarray, " recomputes"],
    send_s: Float[np.ndarray, "2 stages shards"],
) -> Float[np.ndarray, "shards recomputes"]:
    """Seconds of the longest path; if steps overlap, the least seconds that one more step adds.

    Args:
        phase_s: seconds of forward, input gradient and weight gradient of each block.
        recompute_s: seconds that recomputing adds to each block.
        full_s: seconds that blocks recomputed in full take beyond that.
        full: index of each recompute choice among `PipelineBlocks.full`.
        send_s: seconds of the transfers out of every stage, forwards and backwards.
    """
    shards = phase_s.shape[-1]
    work = phase_s.transpose(0, 2, 1, 3).reshape(-1, shards)
    path_recompute_s = pipeline.recomputed @ recompute_s.reshape(len(recompute_s), -1, shards)
    path_recompute_s = path_recompute_s + pipeline.recomputed_in_full[full] @ full_s.reshape(
        len(full_s), -1, shards
    )
    sends_s = pipeline.sends @ send_s.reshape(-1, shards)
    if pipeline.spec.steps == 1:
        return (pipeline.work @ work + sends_s + path_recompute_s).max(axis=1).T

    # Where steps run into each other, the step time is (y(2 s) - y(s)) / s with y(n) the makespan
    # of n steps. A path that stays on a rank of work w and passes c on its way there and back takes
    # c + n w; c is at most `whole_s`, one micro-batch through all stages. Let a be where the
    # longest path of s steps stays: y(2 s) - y(s) is at least s w_a, and at least c_b + 2 s w_b -
    # (c_a + s w_a) for every other b. The smallest that both allow is s w_b - (c_a - c_b) / 2.
    steady = pipeline.cycle == 0
    steady_s = (pipeline.work @ work + path_recompute_s)[:, steady]
    transit_s = (pipeline.transit @ work + sends_s)[steady]
    longest_block_s = phase_s.sum(axis=2).max(axis=0) + (recompute_s + full_s).max(axis=(0, 1))
    whole_s = np.tensordot(pipeline.blocks, longest_block_s, axes=1)
    missing_s = np.maximum(whole_s + send_s.sum(axis=(0, 1)) - transit_s, 0.0) / pipeline.spec.steps
    least_s = np.maximum(steady_s.min(axis=1), (steady_s - missing_s).max(axis=1))
    if steady.all():
        return least_s.T

    # A device's next step begins when its last has ended, so a path through one step from its first
    # pass to its last repeats: from whichever device the shorter stream ends on, the longer one
    # still has s - 1 such cycles before it.
    share = 1 - 1 / pipeline.cycle[~steady]
    cycle_s = (pipeline.work @ work + sends_s + path_recompute_s)[:, ~steady] * share[:, None]
    return np.maximum(least_s, cycle_s.max(axis=1)).T
