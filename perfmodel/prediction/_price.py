"""Price: how long the events of a layout take, and with them the phases of its blocks."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Final

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes, InSteps, event_times, under_load
from perfmodel.ops import Attention, Collective, KernelOp, Op
from perfmodel.prediction._adjustment import factors_of
from perfmodel.prediction._blocks import BlockTimes, ShardBlocks, block_events, time_blocks
from perfmodel.prediction._overlap import BlockEvents, time_phases
from perfmodel.prediction._phases import PLAIN, Phase, Variant
from perfmodel.prediction._problem import StepProblem, kept
from perfmodel.prediction._shard import PlacedShard, of_span, placed_events, placed_shard
from perfmodel.prediction._site import FORWARD_SHARE, generation, training_forward
from perfmodel.program import COMBINED
from perfmodel.spec import Layout
from perfmodel.workload import is_cast, storage_dtype, undivided

_HALVINGS: Final = 12
"""Of the range in which the share of casts that pay is looked for."""
_Row = tuple[float, float, float, str, float]


def priced_events(problem: StepProblem, ops: Sequence[Op]) -> EventTimes:
    """Times of events; each distinct one is computed once (DistSim, observation 1)."""
    times = EventTimes.of_rows(_rows(problem.unadjusted, ops))
    return problem.adjustment.times(ops, times, _latency_s(problem, ops)) if problem.adjustment else times


def under_training_load(problem: StepProblem, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
    """Time of events in a training step relative to their time at the clock of a kernel timed alone: under the power
    limit, and as the site has them."""
    load = np.array([row[4] for row in _rows(problem.unadjusted, ops)], float)
    if problem.adjustment is None:
        return load
    at = problem.adjustment.of
    return load * np.exp([0.0 if isinstance(op, Collective) else at[factors_of(op)[1]] for op in ops])


def _rows(problem: StepProblem, ops: Sequence[Op]) -> list[_Row]:
    known = _known_prices(problem)
    every = InSteps.of(op for op in ops if op not in known)
    if new := every.ops:
        device, site = problem.cluster.device, problem.site
        alone = event_times(new, problem.cluster, problem.kernels, problem.collectives)
        alone = alone.scaled(np.array([generation(problem.framework, op, device) for op in new]))
        found = every.times(alone.at_most(*_bounds(problem, new)))
        load = under_load(device, new, found.time_s) if site.power_limited else np.ones(len(new))
        load = load * np.array([site.clock(op, device) for op in new])
        times = found.scaled(load).at_least(*_of_whole_attention(problem, new))
        columns = (times.time_s.tolist(), times.lo_s.tolist(), times.hi_s.tolist(), times.provenance, load.tolist())
        known.update(zip(new, zip(*columns, strict=True), strict=True))
    return [known[op] for op in ops]


@kept
def _known_prices(problem: StepProblem) -> dict[Op, _Row]:
    """By event its time, the ends of its interval, its provenance and `under_training_load`; grows."""
    return {}


@kept
def _known_latencies(problem: StepProblem) -> dict[Op, float]:
    """Seconds of collectives that carry next to nothing; grows."""
    return {}


def _bounds(problem: StepProblem, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
    """Which events cannot take longer than some others do, with those times (`training_forward`)."""
    device, job = problem.cluster.device, problem.job
    bounded = [i for i, op in enumerate(ops) if training_forward(op, device, job) is not None]
    by = [training_forward(ops[i], device, job) for i in bounded]
    times = event_times([op for op in by if op is not None], problem.cluster, problem.kernels, problem.collectives)
    return bounded, times.scaled(np.full(len(bounded), FORWARD_SHARE))


def _of_whole_attention(problem: StepProblem, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
    """Which events are parts of an attention, with their share of its time by FLOPs: parts run at no higher rate."""
    found = [(i, op, undivided(problem.model, problem.job, op)) for i, op in enumerate(ops)]
    parts = [(i, op, whole) for i, op, whole in found if isinstance(op, Attention) and whole is not None]
    share = np.array([op.flops / whole.flops for _, op, whole in parts])
    return [i for i, _, _ in parts], EventTimes.of_rows(_rows(problem, [whole for _, _, whole in parts])).scaled(share)


def _latency_s(problem: StepProblem, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
    """What collectives take that carry next to nothing; 0 for kernels."""
    known = _known_latencies(problem.unadjusted)
    new = list(dict.fromkeys(op for op in ops if isinstance(op, Collective) and op not in known))
    if new:
        empty = problem.collectives.times(problem.cluster, [replace(op, bytes=1.0) for op in new])
        known.update(zip(new, empty.time_s.tolist(), strict=True))
    return np.array([known.get(op, 0.0) for op in ops])


def block_times(problem: StepProblem, layout: Layout, variant: Variant = PLAIN, slices: int = 1) -> BlockTimes:
    """Times of the blocks of a layout's shard in a pass that computes several micro-batches, or one of `slices` slices
    of the sequence (raises `LayoutError` if the model does not divide)."""
    span, index, beside = variant
    placed = placed_shard(problem.setting, of_span(layout, span))
    checked = problem.framework.checks(layout.pp)
    combined = beside == COMBINED and placed.shard.ep_overlap
    return _times_of(problem, placed, layout.tp if layout.tp_overlap else 1, checked, slices, index, combined)


@kept
def _times_of(
    problem: StepProblem, placed: PlacedShard, ring_steps: int, checked: bool, slices: int, index: int, combined: bool
) -> BlockTimes:
    blocks = placed_events(problem.setting, placed, slices, index)
    blocks = blocks if combined else blocks.alone
    host, device, spread_s = problem.host, problem.cluster.device, problem.site.spread_s(problem.host)

    def events_of(of: ShardBlocks) -> BlockEvents:
        return block_events(of, host, device, ring_steps, spread_s, checked)

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
