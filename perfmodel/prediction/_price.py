"""Price: how long the events of a layout take, and with them the phases of its blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes, MonotoneGrid, event_times, under_load
from perfmodel.ops import Attention, Collective, KernelOp, Op
from perfmodel.prediction._adjustment import factors_of
from perfmodel.prediction._blocks import BlockTimes, ShardBlocks, block_events, time_blocks
from perfmodel.prediction._overlap import BlockEvents, time_phases
from perfmodel.prediction._phases import PLAIN, Phase, Variant
from perfmodel.prediction._problem import StepProblem, session_cached
from perfmodel.prediction._shard import PlacedShard, of_span, placed_events, placed_shard
from perfmodel.prediction._site import FORWARD_SHARE, generation, training_forward
from perfmodel.program import COMBINED
from perfmodel.spec import Layout
from perfmodel.workload import is_cast, storage_dtype, undivided

_HALVINGS: Final = 12
"""Of the range in which the share of casts that pay is looked for."""


def priced_events(problem: StepProblem, ops: Sequence[Op]) -> EventTimes:
    """Times of events; each distinct one is computed once (DistSim, observation 1)."""
    prices = event_prices(problem.unadjusted)
    times = EventTimes.of_rows(prices.of(ops))
    if problem.adjustment is None:
        return times
    return problem.adjustment.times(ops, times, prices.latency_s(ops))


def under_training_load(problem: StepProblem, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
    """Time of events in a training step relative to their time at the clock of a kernel timed alone: under the power
    limit, and as the site has them."""
    load = np.array([price.load for price in event_prices(problem.unadjusted).of(ops)], float)
    if problem.adjustment is None:
        return load
    at = problem.adjustment.of
    return load * np.exp([0.0 if isinstance(op, Collective) else at[factors_of(op)[1]] for op in ops])


class EventPrice(NamedTuple):
    """What one event takes before runs said anything of the machine."""

    time_s: float
    lo_s: float
    hi_s: float
    provenance: str
    load: float
    """Its time relative to that at the clock of a kernel timed alone (`under_training_load`)."""


class EventPrices:
    """Prices of a problem's events, each worked out the first time that it is asked for."""

    def __init__(self, problem: StepProblem) -> None:
        self._problem = problem
        self._prices: dict[Op, EventPrice] = {}
        self._latencies_s: dict[Op, float] = {}

    def of(self, ops: Sequence[Op]) -> list[EventPrice]:
        """The price of each event."""
        new = MonotoneGrid.of(op for op in ops if op not in self._prices)
        if new.ops:
            self._prices.update(zip(new.ops, self._worked_out(new), strict=True))
        return [self._prices[op] for op in ops]

    def _worked_out(self, in_steps: MonotoneGrid) -> Iterator[EventPrice]:
        problem, ops = self._problem, in_steps.ops
        device, site = problem.cluster.device, problem.site

        # Each event as if it ran alone, with the kernels of the framework's generation.
        alone = event_times(ops, problem.cluster, problem.kernels, problem.collectives)
        alone = alone.scaled(np.array([generation(problem.framework, op, device) for op in ops]))

        # Kernels of a step may not get faster with their work, nor slower than others that do more.
        in_step = in_steps.times(alone.at_most(*_bounds(problem, ops)))

        # A training step keeps the device near its power limit, where the clock is lower.
        load = under_load(device, ops, in_step.time_s) if site.power_limited else np.ones(len(ops))
        load = load * np.array([site.clock(op, device) for op in ops])
        times = in_step.scaled(load).at_least(*self._shares_of_undivided_attention(ops))
        columns = (times.time_s.tolist(), times.lo_s.tolist(), times.hi_s.tolist(), times.provenance, load.tolist())
        return map(EventPrice, *columns)

    def _shares_of_undivided_attention(self, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
        """Which events are parts of an attention, with their share of its time by FLOPs: parts run at no higher
        rate."""
        parts: list[int] = []
        undivided_ops: list[Op] = []
        shares: list[float] = []
        for i, op in enumerate(ops):
            whole_attention = undivided(self._problem.model, self._problem.job, op)
            if isinstance(op, Attention) and whole_attention is not None:
                parts.append(i)
                undivided_ops.append(whole_attention)
                shares.append(op.flops / whole_attention.flops)
        return parts, EventTimes.of_rows(self.of(undivided_ops)).scaled(np.array(shares))

    def latency_s(self, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
        """What collectives take that carry next to nothing; 0 for kernels."""
        collectives = [op for op in ops if isinstance(op, Collective) and op not in self._latencies_s]
        new = list(dict.fromkeys(collectives))
        if new:
            empty = [replace(op, bytes=1.0) for op in new]
            times = self._problem.collectives.times(self._problem.cluster, empty)
            self._latencies_s.update(zip(new, times.time_s.tolist(), strict=True))
        return np.array([self._latencies_s.get(op, 0.0) for op in ops])


@session_cached
def event_prices(problem: StepProblem) -> EventPrices:
    """The prices of a problem's events, one table in a session."""
    return EventPrices(problem)


def _bounds(problem: StepProblem, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
    """Which events cannot take longer than some others do, with those times (`training_forward`)."""
    device, job = problem.cluster.device, problem.job
    bounded = [i for i, op in enumerate(ops) if training_forward(op, device, job) is not None]
    by = [training_forward(ops[i], device, job) for i in bounded]
    times = event_times([op for op in by if op is not None], problem.cluster, problem.kernels, problem.collectives)
    return bounded, times.scaled(np.full(len(bounded), FORWARD_SHARE))


def block_times(problem: StepProblem, layout: Layout, variant: Variant = PLAIN, slices: int = 1) -> BlockTimes:
    """Times of the blocks of a layout's shard in a pass that computes several micro-batches, or one of `slices` slices
    of the sequence (raises `LayoutError` if the model does not divide)."""
    span, index, beside = variant
    placed = placed_shard(problem.setting, of_span(layout, span))
    checked = problem.framework.checks(layout.pp)
    combined = beside == COMBINED and placed.shard.ep_overlap
    return _times_of(problem, placed, layout.tp if layout.tp_overlap else 1, checked, slices, index, combined)


@session_cached
def _times_of(
    problem: StepProblem, placed: PlacedShard, ring_steps: int, checked: bool, slices: int, index: int, combined: bool
) -> BlockTimes:
    blocks = placed_events(problem.setting, placed, slices, index)
    blocks = blocks if combined else blocks.alone
    host, device = problem.host, problem.cluster.device
    kernel_spread = problem.site.kernel_spread(device)

    def events_of(of: ShardBlocks) -> BlockEvents:
        return block_events(of, host, device, ring_steps, kernel_spread, checked)

    blocks, times = _casts_that_pay(problem, blocks, priced_events(problem, blocks.ops), events_of)
    return time_blocks(blocks, events_of(blocks), times, host)


def _casts_that_pay(
    problem: StepProblem, blocks: ShardBlocks, times: EventTimes, events_of: Callable[[ShardBlocks], BlockEvents]
) -> tuple[ShardBlocks, EventTimes]:
    """A shard's blocks and times of its events where only so many operands are brought to 8 or 4 bits as pay, so that
    no phase of a block takes longer than in 16 bits.

    Modules that would gain nothing stay in 16 bits: torchtitan's `auto_filter_small_kn`, which is torchao's
    `_auto_filter_for_recipe`; Transformer Engine leaves it to the caller, module by module (`fp8_autocast(enabled)`).
    Where no recipe says which operands these are, casts are no kernels that the host would issue.
    """
    cast = np.array([is_cast(op) for op in blocks.ops], bool)
    if not cast.any():
        return blocks, times
    narrow = [i for i, op in enumerate(blocks.ops) if isinstance(op, KernelOp) and op.dtype == problem.job.dtype]
    in_16_bits = [replace(blocks.ops[i], dtype=storage_dtype(problem.job.dtype)) for i in narrow]
    wide = times.replaced(narrow, priced_events(problem, in_16_bits))
    pays = _shares_that_pay(problem, blocks, times, wide, cast, events_of)
    share = np.where(blocks.counts > 0, pays[:, None, None], 1.0).min(axis=(0, 1))
    if (share == 1.0).all():
        return blocks, times
    return blocks.casting(share, problem.job), times.scaled(np.where(cast, share, 1.0))


def _shares_that_pay(
    problem: StepProblem,
    blocks: ShardBlocks,
    times: EventTimes,
    wide: EventTimes,
    cast: Bool[np.ndarray, " ops"],
    events_of: Callable[[ShardBlocks], BlockEvents],
) -> Float[np.ndarray, " blocks"]:
    """The largest share of its casts with which no phase of each block takes longer than in 16 bits (`wide`), the same
    for all phases. What one of them gains may be lost to communication that hid behind it, so no other may lose.

    What a phase takes is convex in the share, and no more than in 16 bits without any: the shares that pay are all up
    to the largest. What the host does for a phase is linear in it.
    """
    host, trains = problem.host, problem.job.mode == "train"
    bare, all_cast = (events_of(blocks.casting(np.full(len(cast), share), problem.job)) for share in (0.0, 1.0))

    def phases_s(share: Float[np.ndarray, " blocks"], of: EventTimes) -> Float[np.ndarray, "blocks phases"]:
        counts = blocks.counts * np.where(cast, share[:, None, None], 1.0)
        by_host = {name: getattr(bare, name) + share[:, None] * (getattr(all_cast, name) - getattr(bare, name))
                   for name in ("launches", "issued", "beyond_operators_s")}  # fmt: skip
        events = bare._replace(counts=counts, **by_host)
        phase_s = time_phases(events, of.time_s, host.issue_s, host.kernel_gap_s).phase_s
        # collectives of the one hide behind kernels of the other
        phase_s[:, Phase.BACKWARD_INPUT] += phase_s[:, Phase.BACKWARD_WEIGHT]
        return phase_s if trains else phase_s[:, [Phase.FORWARD]]

    low, high = np.zeros(len(blocks.blocks)), np.ones(len(blocks.blocks))
    most_s = phases_s(low, wide) * (1 + 1e-9)
    share = high
    for _ in range(1 + _HALVINGS):
        gains = (phases_s(share, times) <= most_s).all(axis=1)
        low, high = np.where(gains, share, low), np.where(gains, high, share)
        if (low == high).all():
            break
        share = (low + high) / 2
    return low
