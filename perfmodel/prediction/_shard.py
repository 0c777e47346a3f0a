"""Shard: what one device of a layout computes in each block, before any event is timed; in plain passes, and in those
of several micro-batches at once, of slices of a sequence and of overlapped pairs."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from perfmodel.errors import LayoutError, Reason
from perfmodel.prediction._blocks import ShardBlocks, count_events
from perfmodel.prediction._placement import BLOCK_GROUPS, Network, Placement
from perfmodel.prediction._problem import Setting, session_cached
from perfmodel.spec import DIMENSIONS, Job, Layout, PerRank
from perfmodel.workload import BlockOps, Shard, blocks


def sliced_job(job: Job, slices: int, index: int = 0) -> Job:
    """The job on one slice of the sequence, whose causal attention also sees the keys and values of those before it.

    Raises:
        LayoutError: the sequence does not divide.
    """
    if slices > 1 and job.varied_lengths:
        raise LayoutError("slices of a sequence need sequences of equal length; leave mean_tokens out", Reason.SLICES)
    if job.seq_len % slices:
        raise LayoutError(f"sequence length {job.seq_len} is not divisible into {slices} slices", Reason.SLICES)
    tokens = job.seq_len // slices
    return replace(job, seq_len=tokens, cached_tokens=index * tokens) if slices > 1 else job


@dataclass(frozen=True)
class PlacedShard:
    """All that the events of a layout's blocks depend on."""

    shard: Shard
    networks: tuple[Network, ...]
    """Where the groups of `BLOCK_GROUPS` lie."""


def placed_shard(setting: Setting, layout: Layout) -> PlacedShard:
    """The shard of a layout."""
    return PlacedShard(Shard.of(layout), _networks(setting, ranks_of(setting, layout)))


def ranks_of(setting: Setting, layout: Layout) -> Layout:
    """How a layout numbers its ranks, on which the placement of its groups depends: one that says nothing else."""
    return _ranks(setting, layout.order, layout.degrees, layout.kinds)


@session_cached
def _ranks(setting: Setting, order: str, degrees: tuple[int, ...], kinds: PerRank) -> Layout:
    by_name: dict[str, Any] = dict(zip((d.key for d in DIMENSIONS), degrees, strict=True))
    return Layout(order=order, kinds=kinds, **by_name)


@session_cached
def _networks(setting: Setting, ranks: Layout) -> tuple[Network, ...]:
    return tuple(Placement.of(group, ranks).on_network(setting.cluster) for group in BLOCK_GROUPS)


@session_cached
def shard_blocks(setting: Setting, shard: Shard, slices: int, index: int = 0) -> Sequence[tuple[BlockOps, int]]:
    """Blocks of the model on a shard, on one of `slices` slices of the sequence (raises `LayoutError` if it does not
    divide)."""
    return blocks(setting.model, sliced_job(setting.job, slices, index), shard)


@session_cached
def placed_events(setting: Setting, placed: PlacedShard, slices: int, index: int) -> ShardBlocks:
    """Counted events of a shard's blocks on one of `slices` slices of the sequence."""
    of_shard = shard_blocks(setting, placed.shard, slices, index)
    return count_events(of_shard, dict(zip(BLOCK_GROUPS, placed.networks, strict=True)), setting.job)


def shard_events(setting: Setting, layout: Layout, slices: int = 1, index: int = 0) -> ShardBlocks:
    """Counted events of the blocks of a layout's shard (raises `LayoutError` if the model does not divide)."""
    return placed_events(setting, placed_shard(setting, layout), slices, index)


def of_span(layout: Layout, span: int) -> Layout:
    """The layout of a pass that computes so many micro-batches at once."""
    return layout.replace(micro_batch=layout.micro_batch * span) if span > 1 else layout
