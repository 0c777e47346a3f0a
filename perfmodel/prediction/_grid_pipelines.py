"""What the pipelines of a grid cost in blocks: paths and fullest ranks, padded to one shape for many pipelines."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.prediction._pipeline import Pipeline
from perfmodel.program import ProgramSpec


@dataclass(frozen=True, eq=False)
class PipelineTerms:
    """One pipeline in blocks rather than stages; `fulls`: which of them are recomputed in full."""

    spec: ProgramSpec
    variants: Int[np.ndarray, "variants 3"]
    """See `Structure.variants`."""
    blocks: Float[np.ndarray, " blocks"]
    """Of the whole model."""
    work: Float[np.ndarray, "paths variants*3*blocks"]
    """Blocks that each path passes forwards, in input gradients and in weight gradients."""
    again: Float[np.ndarray, "paths variants*blocks"]
    """Blocks whose input gradient it passes."""
    again_full: Float[np.ndarray, "fulls paths variants*blocks"]
    """Those of them that are recomputed in full."""
    transit: Float[np.ndarray, "paths variants*3*blocks"]
    """Blocks on the way to each path and back (`Paths.transit`)."""
    cycle: Float[np.ndarray, " paths"]
    """See `Paths.cycle`."""
    reductions: float
    """Weight gradients that every path passes on one rank, per chunk."""
    sends: Float[np.ndarray, "paths 2*stages"]
    held: Float[np.ndarray, "ranks blocks"]
    """Blocks on each rank that may be the fullest."""
    versions: Float[np.ndarray, " ranks"]
    alive: Float[np.ndarray, "ranks blocks"]
    """Blocks times micro-batches alive."""
    alive_full: Float[np.ndarray, "fulls ranks blocks"]
    """Those of them that are recomputed in full."""
    recomputes: Bool[np.ndarray, "fulls ranks blocks"]
    """Whether a rank recomputes such a block in full."""


def pipeline_terms(
    spec: ProgramSpec,
    pipeline: Pipeline,
    counts: Float[np.ndarray, "stages blocks"],
    full: Float[np.ndarray, "fulls stages blocks"],
) -> PipelineTerms:
    """Put a model's blocks, and those of them that are recomputed in full, into a pipeline."""
    live, passes = pipeline.live, pipeline.paths.passes
    in_full, alive = full[:, live.stage], live.activations[..., None]
    return PipelineTerms(
        spec=spec,
        variants=pipeline.paths.variants,
        blocks=counts.sum(axis=0),
        work=np.einsum("kvsp,sb->kvpb", passes, counts).reshape(len(passes), -1),
        again=np.einsum("kvs,sb->kvb", passes[..., 1], counts).reshape(len(passes), -1),
        again_full=np.einsum("kvs,lsb->lkvb", passes[..., 1], full).reshape(len(full), len(passes), -1),
        transit=np.einsum("kvsp,sb->kvpb", pipeline.paths.transit, counts).reshape(len(passes), -1),
        cycle=pipeline.paths.cycle,
        # of the last micro-batch's way back, no rank but the last waits for weight gradients
        reductions=max(0.0, passes[..., 2].sum(axis=(1, 2)).min() - passes.shape[2]) / live.stage.shape[1],
        sends=pipeline.paths.sends.reshape(len(passes), -1),
        held=counts[live.stage].sum(axis=1),
        versions=live.versions.astype(float),
        alive=(counts[live.stage] * alive).sum(axis=1),
        alive_full=(in_full * alive).sum(axis=2),
        recomputes=in_full.sum(axis=2) > 0,
    )


@dataclass(frozen=True, eq=False)
class Ranks:
    """The fullest ranks of many pipelines, padded by ranks that hold nothing; see `PipelineTerms`."""

    held: Float[np.ndarray, "pipelines ranks blocks"]
    versions: Float[np.ndarray, "pipelines ranks"]
    alive: Float[np.ndarray, "pipelines ranks blocks"]
    alive_full: Float[np.ndarray, "pipelines fulls ranks blocks"]
    recomputes: Bool[np.ndarray, "pipelines fulls ranks blocks"]

    @classmethod
    def of(cls, pipelines: Sequence[PipelineTerms]) -> "Ranks":
        """Stack the ranks of some pipelines."""
        return cls(*(_stacked([getattr(p, name) for p in pipelines], axis) for name, axis in _RANK_AXIS.items()))


_RANK_AXIS = {"held": 0, "versions": 0, "alive": 0, "alive_full": 1, "recomputes": 1}


def _stacked(arrays: Sequence[np.ndarray], axis: int) -> np.ndarray:
    longest = max(array.shape[axis] for array in arrays)
    shape = list(arrays[0].shape)
    shape[axis] = longest
    out = np.zeros((len(arrays), *shape), arrays[0].dtype)
    for row, array in zip(out, arrays, strict=True):
        row[(*[slice(None)] * axis, slice(array.shape[axis]))] = array
    return out


def longest_path_s(
    terms: PipelineTerms,
    phase_s: Float[np.ndarray, "variants blocks 3 shards"],
    again_s: Float[np.ndarray, "recomputes variants blocks shards"],
    full_s: Float[np.ndarray, "recomputes variants blocks shards"],
    full: Int[np.ndarray, " recomputes"],
    send_s: Float[np.ndarray, "2 stages shards"],
) -> Float[np.ndarray, "shards recomputes"]:
    """Seconds of the longest path; where steps run into each other, what a step more adds at least.

    `again_s` is what recomputing adds to each block, `full_s` what those recomputed in full (`full` of the terms) take
    beyond that.

    Where steps run into each other, the step time is (y(2 s) - y(s)) / s with y(n) the makespan of n steps. A path
    that stays on a rank of work w and passes c on its way there and back takes c + n w; c is at most `whole_s`, one
    micro-batch through all stages. Let a be where the longest path of s steps stays: y(2 s) - y(s) is at least s
    w_a, and at least c_b + 2 s w_b - (c_a + s w_a) for every other b. The smallest that both allow is s w_b - (c_a
    - c_b) / 2.

    A device's next step begins when its last has ended, so a path through one step from its first pass to its last
    repeats: from whichever device the shorter stream ends on, the longer one still has s - 1 such cycles before it.
    """
    shards = phase_s.shape[-1]
    work = phase_s.transpose(0, 2, 1, 3).reshape(-1, shards)
    again = terms.again @ again_s.reshape(len(again_s), -1, shards)
    again = again + terms.again_full[full] @ full_s.reshape(len(full_s), -1, shards)
    sends_s = terms.sends @ send_s.reshape(-1, shards)
    if terms.spec.steps == 1:
        return (terms.work @ work + sends_s + again).max(axis=1).T
    steady = terms.cycle == 0
    steady_s = (terms.work @ work + again)[:, steady]
    transit_s = (terms.transit @ work + sends_s)[steady]
    whole_s = np.tensordot(terms.blocks, phase_s.sum(axis=2).max(axis=0) + (again_s + full_s).max(axis=(0, 1)), axes=1)
    missing_s = np.maximum(whole_s + send_s.sum(axis=(0, 1)) - transit_s, 0.0) / terms.spec.steps
    least_s = np.maximum(steady_s.min(axis=1), (steady_s - missing_s).max(axis=1))
    if steady.all():
        return least_s.T
    share = 1 - 1 / terms.cycle[~steady]
    cycle_s = (terms.work @ work + sends_s + again)[:, ~steady] * share[:, None]
    return np.maximum(least_s, cycle_s.max(axis=1)).T
