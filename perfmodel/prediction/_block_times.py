"""Times of the phases of a layout's blocks, and the share of casts to 8 or 4 bits that saves
time."""

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes
from perfmodel.ops import KernelOp
from perfmodel.prediction._price import NO_PRICES, PriceTable, priced_events, step_prices
from perfmodel.prediction._problem import StepProblem, store_of
from perfmodel.prediction.blocks import (
    BlockTimes,
    PlacedShard,
    ShardBlocks,
    block_events,
    placed_events,
    placed_shard,
)
from perfmodel.prediction.overlap import BlockEvents, time_phases
from perfmodel.prediction.phases import PLAIN, Phase, Variant
from perfmodel.program import COMBINED
from perfmodel.spec import Layout
from perfmodel.workload import is_cast, storage_dtype

_HALVINGS: Final = 12
"""Bisection steps in the search for the share of casts that saves time."""


class _Timed(NamedTuple):
    """The part of a layout and a pass that the times of the blocks depend on, so that layouts which
    differ in the rest share them."""

    placed: PlacedShard
    ring_steps: int
    """Steps of the rings in which products overlap tensor-parallel collectives; 1 without
    overlap."""
    checked: bool
    """Whether hosts check collectives before they issue them."""
    slices: int
    """Slices of the sequence."""
    slice_index: int
    combined: bool
    """Whether the pass runs beside exchanges of experts."""


def block_times(
    problem: StepProblem,
    layout: Layout,
    variant: Variant = PLAIN,
    slices: int = 1,
    table: PriceTable = NO_PRICES,
) -> BlockTimes:
    """Times of the blocks of a layout's shard in a pass.

    Args:
        variant: micro-batches that the pass computes at once, slice of the sequence, and what it
            runs beside.
        slices: slices that the schedule cuts the sequence into.
        table: prices that the caller has; events that it lacks are priced here.

    Raises:
        LayoutError: the model does not divide.
    """
    # A pass may compute several micro-batches at once.
    if variant.span > 1:
        layout = layout.replace(micro_batch=layout.micro_batch * variant.span)
    placed = placed_shard(problem.setting, layout)
    ring_steps = layout.tp if layout.overlap.tp_overlap else 1
    checked = problem.framework.communication.checks(layout.pp)
    combined = variant.beside == COMBINED and placed.shard.ep_overlap
    timed = _Timed(placed, ring_steps, checked, slices, variant.slice, combined)
    # Prices follow from the problem, so that results do not depend on whether a table has them.
    return store_of(problem).get_or_compute(
        (block_times, timed), lambda: _times_of(problem, timed, table)
    )


def _times_of(problem: StepProblem, timed: _Timed, table: PriceTable) -> BlockTimes:
    """Compute `block_times` from the arguments that it depends on."""
    blocks = placed_events(problem.setting, timed.placed, timed.slices, timed.slice_index)
    blocks = blocks if timed.combined else blocks.alone
    framework, device = problem.adjusted_framework, problem.cluster.device
    blocks = blocks.in_order if framework.communication.tp_gradients_wait else blocks
    kernel_spread = problem.site.kernel_spread(device)

    def events_of(blocks: ShardBlocks) -> BlockEvents:
        return block_events(
            blocks, framework, device, timed.ring_steps, kernel_spread, timed.checked
        )

    prices = step_prices(problem, blocks.ops, table)
    times = prices.times
    cast = np.array([is_cast(op) for op in blocks.ops], bool)
    if cast.any():
        # Operands stay in 16 bits where casting them to 8 or 4 bits does not pay: torchtitan's
        # `auto_filter_small_kn`, which is torchao's `_auto_filter_for_recipe`; Transformer Engine
        # leaves it to the caller, module by module (`fp8_autocast(enabled)`). Where no recipe says
        # which operands these are, casts are not kernels that the host would issue.
        wide = times.replaced(*_in_16_bits(problem, blocks, table))
        pays = _shares_that_pay(problem, blocks, times, wide, cast, events_of)

        # No phase of a block may take longer than in 16 bits. An event has one time in all blocks,
        # so the block that gains least decides.
        share = np.where(blocks.counts > 0, pays[:, None, None], 1.0).min(axis=(0, 1))
        if (share != 1.0).any():
            blocks = blocks.casting(share, problem.job)
            times = times.scaled(np.where(cast, share, 1.0))

    # With the times of all events known, the phases follow.
    phases = time_phases(
        events_of(blocks), times.time_s, framework.host.issue_s, framework.host.kernel_gap_s
    )
    counted = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    return BlockTimes(
        **vars(phases),
        **counted,
        times=times,
        clock_slowdown=prices.clock_slowdown,
        slowdown_of_runs=prices.slowdown_of_runs,
    )


def _in_16_bits(
    problem: StepProblem, blocks: ShardBlocks, table: PriceTable
) -> tuple[list[int], EventTimes]:
    """Places of the products of narrow operands, and their times in the type that the operands are
    stored in."""
    # Attention too, which may multiply in 8 bits beside products of 4.
    narrow = [
        i
        for i, op in enumerate(blocks.ops)
        if isinstance(op, KernelOp) and storage_dtype(op.dtype) != op.dtype
    ]
    stored = [replace(blocks.ops[i], dtype=storage_dtype(blocks.ops[i].dtype)) for i in narrow]
    return narrow, priced_events(problem, stored, table)


def _shares_that_pay(
    problem: StepProblem,
    blocks: ShardBlocks,
    times: EventTimes,
    wide: EventTimes,
    cast: Bool[np.ndarray, " ops"],
    events_of: Callable[[ShardBlocks], BlockEvents],
) -> Float[np.ndarray, " blocks"]:
    """Largest share of each block's casts with which none of its phases takes longer than in 16
    bits.

    Args:
        times: times of the events where all operands are cast.
        wide: times of the events where none is.
        cast: which events are casts.
        events_of: the events of some blocks as arrays.
    """
    framework = problem.adjusted_framework
    trains = problem.job.mode == "train"
    none_cast = events_of(blocks.casting(np.zeros(len(cast)), problem.job))
    all_cast = events_of(blocks.casting(np.ones(len(cast)), problem.job))

    def phases_s(
        share: Float[np.ndarray, " blocks"], times: EventTimes
    ) -> Float[np.ndarray, "blocks phases"]:
        # The host's time for a phase is linear in the share.
        by_host = {}
        for name in ("launches", "issued", "beyond_operators_s"):
            without = getattr(none_cast, name)
            additional = getattr(all_cast, name) - getattr(none_cast, name)
            by_host[name] = without + share[:, None] * additional
        counts = blocks.counts * np.where(cast, share[:, None, None], 1.0)
        events = none_cast._replace(counts=counts, **by_host)
        phase_s = time_phases(
            events, times.time_s, framework.host.issue_s, framework.host.kernel_gap_s
        ).phase_s
        # Collectives of input gradients hide behind kernels of weight gradients: both are judged
        # together.
        phase_s[:, Phase.BACKWARD_INPUT] += phase_s[:, Phase.BACKWARD_WEIGHT]
        return phase_s if trains else phase_s[:, [Phase.FORWARD]]

    # The share is the same for all phases of a block, and no phase may become slower, because
    # communication that hid behind it could cost the gain of another. The time of a phase is convex
    # in the share, and no more than in 16 bits without any cast. So the shares that pay are all
    # those up to the largest, which is found by halving.
    low = np.zeros(len(blocks.blocks))
    high = np.ones(len(blocks.blocks))
    most_s = phases_s(low, wide) * (1 + 1e-9)
    share = high
    for _ in range(1 + _HALVINGS):
        gains = (phases_s(share, times) <= most_s).all(axis=1)
        low = np.where(gains, share, low)
        high = np.where(gains, high, share)
        if (low == high).all():
            break
        share = (low + high) / 2
    return low
