"""The work of one device in each block, not yet timed.

Passes may also compute several micro-batches at once, or one slice of a sequence. Every function is kept by the part of
a layout that it depends on, so that the thousands of layouts of a search share a few hundred shards.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.errors import LayoutError, Reason
from perfmodel.prediction._problem import Setting, session_cached
from perfmodel.prediction.blocks import ShardBlocks, count_events
from perfmodel.prediction.placement import BLOCK_GROUPS, Network, Placement
from perfmodel.spec import DIMENSIONS, Job, Layout, PerRank
from perfmodel.workload import BlockOps, Shard, blocks


def sliced_job(job: Job, slices: int, index: int = 0) -> Job:
    """The job on one slice of the sequence; its causal attention also covers the earlier slices.

    Raises:
        LayoutError: the sequence does not divide.
    """
    if slices > 1 and job.varied_lengths:
        raise LayoutError("sequence slices need sequences of equal length; leave mean_tokens out", Reason.SLICES)
    if job.seq_len % slices:
        raise LayoutError(f"sequence length {job.seq_len} is not divisible by {slices} slices", Reason.SLICES)
    tokens = job.seq_len // slices
    return replace(job, seq_len=tokens, cached_tokens=index * tokens) if slices > 1 else job


@dataclass(frozen=True)
class PlacedShard:
    """Everything that determines the events of a layout's blocks."""

    shard: Shard
    """Part of every block that one device computes."""
    networks: tuple[Network, ...]
    """Networks that the groups of `BLOCK_GROUPS` use."""


def placed_shard(setting: Setting, layout: Layout) -> PlacedShard:
    """The shard of a layout, and where its process groups lie."""
    return PlacedShard(Shard.of(layout), _networks(setting, ranks_of(setting, layout)))


def ranks_of(setting: Setting, layout: Layout) -> Layout:
    """A layout with only the fields that determine the numbering of ranks."""
    return _ranks(setting, layout.order, layout.degrees, layout.kinds)


@session_cached
def _ranks(setting: Setting, order: str, degrees: tuple[int, ...], kinds: PerRank) -> Layout:
    """One object for all layouts that number their ranks alike: others are kept by it, and need not compare it."""
    degree_of_dimension: dict[str, Any] = {}
    for dimension, degree in zip(DIMENSIONS, degrees, strict=True):
        degree_of_dimension[dimension.key] = degree
    return Layout(order=order, kinds=kinds, **degree_of_dimension)


@session_cached
def _networks(setting: Setting, ranks: Layout) -> tuple[Network, ...]:
    """Networks of `BLOCK_GROUPS`."""
    return tuple(Placement.of(group, ranks).on_network(setting.cluster) for group in BLOCK_GROUPS)


@session_cached
def shard_blocks(setting: Setting, shard: Shard, slices: int, index: int = 0) -> Sequence[tuple[BlockOps, int]]:
    """Blocks of the model on a shard with their counts, for one of `slices` slices of the sequence.

    Raises:
        LayoutError: the sequence does not divide.
    """
    return blocks(setting.model, sliced_job(setting.job, slices, index), shard)


@session_cached
def placed_events(setting: Setting, placed: PlacedShard, slices: int, index: int) -> ShardBlocks:
    """Counted events of a shard's blocks, for one of `slices` slices of the sequence."""
    blocks_of_shard = shard_blocks(setting, placed.shard, slices, index)
    networks: dict[str, Network] = dict(zip(BLOCK_GROUPS, placed.networks, strict=True))
    return count_events(blocks_of_shard, networks, setting.job)


def shard_events(setting: Setting, layout: Layout, slices: int = 1, index: int = 0) -> ShardBlocks:
    """Counted events of the blocks of a layout's shard.

    Raises:
        LayoutError: the model or the sequence does not divide.
    """
    return placed_events(setting, placed_shard(setting, layout), slices, index)


def of_span(layout: Layout, span: int) -> Layout:
    """The layout for a pass that computes several micro-batches at once."""
    return layout.replace(micro_batch=layout.micro_batch * span) if span > 1 else layout
