"""Prices the events of a layout and the phases of its blocks."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from math import ceil
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.cost import EventTimes, MonotoneGrid, event_times, has_power_law, sustained_share, under_load
from perfmodel.ops import Attention, Collective, Gemm, KernelOp, Op
from perfmodel.prediction._problem import StepProblem, session_cached, session_cached_each
from perfmodel.prediction.blocks import (
    BlockTimes,
    PlacedShard,
    ShardBlocks,
    block_events,
    of_span,
    placed_events,
    placed_shard,
    shard_events,
)
from perfmodel.prediction.overlap import BlockEvents, time_phases
from perfmodel.prediction.phases import PASSED, PLAIN, Phase, Variant
from perfmodel.prediction.sites import FORWARD_SHARE, factors_of, generation, training_forward
from perfmodel.program import COMBINED
from perfmodel.spec import Layout
from perfmodel.workload import fuses_experts, is_cast, storage_dtype, undivided

_FULL_TOKENS: Final = 8192
"""Tokens of a micro-batch that fills a device, so that hardly any kernel waits for the host."""
_HALVINGS: Final = 12
"""Halvings of the range in which the share of casts that pay is searched."""


def priced_events(problem: StepProblem, ops: Sequence[Op]) -> EventTimes:
    """Times of events, with corrections by measured runs."""
    # A fit of runs moves parameters hundreds of times. The prices behind them stay, and so are kept without them.
    times = EventTimes.of_rows(event_prices(problem.unadjusted, ops))
    if problem.adjustment is None:
        return times
    return problem.adjustment.times(ops, times, np.array(_latencies_s(problem.unadjusted, ops), float))


def under_training_load(problem: StepProblem, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
    """Slowdown of events in a training step relative to a kernel timed alone, by the power limit and the site."""
    load = np.array([price.load for price in event_prices(problem.unadjusted, ops)], float)
    if problem.adjustment is None:
        return load
    log_factors = problem.adjustment.of
    log_load = np.zeros(len(ops))
    for i, op in enumerate(ops):
        if not isinstance(op, Collective):
            _, throughput = factors_of(op)
            log_load[i] = log_factors[throughput]
    return load * np.exp(log_load)


class EventPrice(NamedTuple):
    """Seconds of one event before corrections by measured runs."""

    time_s: float
    lo_s: float
    """Lower end of the 90 % interval."""
    hi_s: float
    """Upper end of the 90 % interval."""
    provenance: str
    load: float
    """Time relative to that at the clock of a kernel timed alone (`under_training_load`)."""


@session_cached_each
def event_prices(problem: StepProblem, ops: list[Op]) -> Iterator[tuple[Op, EventPrice]]:
    """The price of each event; each distinct event is computed once (DistSim, observation 1)."""
    device, site = problem.cluster.device, problem.site
    in_steps = MonotoneGrid.of(ops)
    ops = list(in_steps.ops)

    # Each event as if it ran alone, with the kernels of the framework's generation.
    alone = event_times(ops, problem.cluster, problem.kernels, problem.collectives)
    alone = alone.scaled(np.array([generation(problem.framework, op, device) for op in ops]))

    # Kernels of a step may not get faster with their work, nor slower than others that do more.
    in_step = in_steps.times(alone.at_most(*_bounds(problem, ops)))

    # A training step keeps the device near its power limit, where the clock is lower.
    load = np.ones(len(ops))
    if site.power_limited:
        load = under_load(device, ops, in_step.time_s, _sustained_share(problem))
    load = load * np.array([site.clock(op, device) for op in ops])
    times = in_step.scaled(load)

    # Regressors see each part of a divided attention by itself and may promise it more than the whole can give.
    times = times.at_least(*_shares_of_undivided_attention(problem, ops))
    columns = (times.time_s.tolist(), times.lo_s.tolist(), times.hi_s.tolist(), times.provenance, load.tolist())
    return zip(ops, map(EventPrice, *columns), strict=True)


def _shares_of_undivided_attention(problem: StepProblem, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
    """Which events are parts of an attention, with their share of its time by FLOPs: parts run at no higher rate."""
    parts: list[int] = []
    undivided_ops: list[Op] = []
    shares: list[float] = []
    for i, op in enumerate(ops):
        whole_attention = undivided(problem.model, problem.job, op)
        if isinstance(op, Attention) and whole_attention is not None:
            parts.append(i)
            undivided_ops.append(whole_attention)
            shares.append(op.flops / whole_attention.flops)
    return parts, EventTimes.of_rows(event_prices(problem, undivided_ops)).scaled(np.array(shares))


@session_cached_each
def _latencies_s(problem: StepProblem, ops: list[Op]) -> Iterator[tuple[Op, float]]:
    """Latency of each event in seconds; 0 for kernels."""
    collectives = [op for op in ops if isinstance(op, Collective)]
    # Measured curves begin at some bytes, so that a byte stands for nothing.
    empty = [replace(op, bytes=1.0) for op in collectives]
    times = problem.collectives.times(problem.cluster, empty)
    latency_s = dict.fromkeys(ops, 0.0) | dict(zip(collectives, times.time_s.tolist(), strict=True))
    return iter(latency_s.items())


@session_cached
def _sustained_share(problem: StepProblem) -> float:
    """The share of their sustained times that kernels above the power limit take in a step (`sustained_share`).

    It is that of the whole model's passes on one device with micro-batches that fill it. Layouts share it: what they
    divide changes the kernels' sizes, but hardly what they are. Waits for communication, which would raise it, are
    left out.
    """
    device, job = problem.cluster.device, problem.job
    if not has_power_law(device):
        return 1.0
    micro_batch = ceil(_FULL_TOKENS / job.seq_len)
    setting = replace(problem.setting, job=replace(job, global_batch=micro_batch))
    blocks = shard_events(setting, Layout(micro_batch=micro_batch))
    passes = PASSED if job.mode == "train" else [Phase.FORWARD]
    counts = np.array(blocks.repeats, float) @ blocks.counts[:, passes].sum(axis=1)
    ops: list[KernelOp] = []
    often: list[float] = []
    for op, count in zip(blocks.ops, counts.tolist(), strict=True):
        if isinstance(op, KernelOp) and count > 0:
            ops.append(op)
            often.append(count)
    alone = event_times(ops, problem.cluster, problem.kernels, problem.collectives)
    alone_s = alone.time_s * np.array([generation(problem.framework, op, device) for op in ops])
    return sustained_share(device, ops, np.array(often), alone_s)


def _bounds(problem: StepProblem, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
    """Events (places in `ops`) that cannot take longer than some others do, with those times
    (`training_forward`, `_product_of_group`)."""
    job = problem.job
    bounded: list[int] = []
    others: list[Op] = []
    multiples: list[float] = []
    for i, op in enumerate(ops):
        backward = training_forward(op, problem.cluster.device, job)
        if backward is not None:
            bounded.append(i)
            others.append(backward)
            multiples.append(FORWARD_SHARE)
        elif isinstance(op, Gemm) and op.grouped and fuses_experts(problem.model, job, op.dtype, job.narrow.fp8_recipe):
            bounded.append(i)
            others.append(_product_of_group(op))
            multiples.append(op.groups)
    times = event_times(others, problem.cluster, problem.kernels, problem.collectives)
    return bounded, times.scaled(np.array(multiples))


def _product_of_group(grouped: Gemm) -> Gemm:
    """The product of one group, as a layer without experts runs it.

    The tables time Transformer Engine's default, a product per expert on several streams. The kernel of
    `fused_experts` deals the tiles of all experts to the multiprocessors at once, so that no group leaves some of them
    idle: together they take no longer than one after another.
    """
    # Grouped gradient products carry the shape of their forward product, others that of their own.
    m, n, k = grouped.m, grouped.n, grouped.k
    if grouped.pass_ == "dgrad":
        n, k = k, n
    elif grouped.pass_ == "wgrad":
        m, n, k = n, k, m
    return replace(grouped, op="linear", groups=1, m=m, n=n, k=k)


def block_times(problem: StepProblem, layout: Layout, variant: Variant = PLAIN, slices: int = 1) -> BlockTimes:
    """Times of the blocks of a layout's shard in a pass.

    Args:
        variant: micro-batches that the pass computes at once, slice of the sequence, and what it runs beside.
        slices: slices that the schedule cuts the sequence into.

    Raises:
        LayoutError: the model does not divide.
    """
    span, index, beside = variant
    placed = placed_shard(problem.setting, of_span(layout, span))
    ring_steps = layout.tp if layout.tp_overlap else 1
    checked = problem.framework.communication.checks(layout.pp)
    combined = beside == COMBINED and placed.shard.ep_overlap
    return _times_of(problem, placed, ring_steps, checked, slices, index, combined)


@session_cached
def _times_of(
    problem: StepProblem, placed: PlacedShard, ring_steps: int, checked: bool, slices: int, index: int, combined: bool
) -> BlockTimes:
    """`block_times` by exactly what it depends on, so that layouts which differ in anything else share a result."""
    blocks = placed_events(problem.setting, placed, slices, index)
    blocks = blocks if combined else blocks.alone
    framework, device = problem.adjusted_framework, problem.cluster.device
    blocks = blocks.in_order if framework.communication.tp_gradients_wait else blocks
    kernel_spread = problem.site.kernel_spread(device)

    def events_of(blocks: ShardBlocks) -> BlockEvents:
        return block_events(blocks, framework, device, ring_steps, kernel_spread, checked)

    blocks, times = _casts_that_pay(problem, blocks, priced_events(problem, blocks.ops), events_of)
    phases = time_phases(events_of(blocks), times.time_s, framework.host.issue_s, framework.host.kernel_gap_s)
    counted = {field.name: getattr(blocks, field.name) for field in fields(blocks)}
    return BlockTimes(**vars(phases), **counted, times=times, load=under_training_load(problem, blocks.ops))


def _casts_that_pay(
    problem: StepProblem, blocks: ShardBlocks, times: EventTimes, events_of: Callable[[ShardBlocks], BlockEvents]
) -> tuple[ShardBlocks, EventTimes]:
    """Leave operands in 16 bits where casting them to 8 or 4 bits does not pay: no phase of a block may take longer
    than in 16 bits.

    Returns:
        The blocks with the casts that are launched, and the times of their events.
    """
    # Modules that would gain nothing stay in 16 bits: torchtitan's `auto_filter_small_kn`, which is torchao's
    # `_auto_filter_for_recipe`; Transformer Engine leaves it to the caller, module by module (`fp8_autocast(enabled)`).
    # Where no recipe says which operands these are, casts are no kernels that the host would issue.
    cast = np.array([is_cast(op) for op in blocks.ops], bool)
    if not cast.any():
        return blocks, times

    # The same products in the type that their operands are stored in.
    narrow = [i for i, op in enumerate(blocks.ops) if isinstance(op, KernelOp) and op.dtype == problem.job.dtype]
    in_16_bits = [replace(blocks.ops[i], dtype=storage_dtype(problem.job.dtype)) for i in narrow]
    wide = times.replaced(narrow, priced_events(problem, in_16_bits))

    # An event has one time in all blocks, so the block that gains least decides.
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
    """Share of each block's casts, the largest, with which none of its phases takes longer than in 16 bits.

    Args:
        times: of the events where all operands are cast.
        wide: of the events where none is.
        cast: which events are casts.
        events_of: the events of some blocks as arrays.
    """
    framework, trains = problem.adjusted_framework, problem.job.mode == "train"
    none_cast = events_of(blocks.casting(np.zeros(len(cast)), problem.job))
    all_cast = events_of(blocks.casting(np.ones(len(cast)), problem.job))

    def phases_s(share: Float[np.ndarray, " blocks"], times: EventTimes) -> Float[np.ndarray, "blocks phases"]:
        # What the host does for a phase is linear in the share.
        by_host = {}
        for name in ("launches", "issued", "beyond_operators_s"):
            without, additional = getattr(none_cast, name), getattr(all_cast, name) - getattr(none_cast, name)
            by_host[name] = without + share[:, None] * additional
        counts = blocks.counts * np.where(cast, share[:, None, None], 1.0)
        events = none_cast._replace(counts=counts, **by_host)
        phase_s = time_phases(events, times.time_s, framework.host.issue_s, framework.host.kernel_gap_s).phase_s
        # Collectives of input gradients hide behind kernels of weight gradients: both are judged together.
        phase_s[:, Phase.BACKWARD_INPUT] += phase_s[:, Phase.BACKWARD_WEIGHT]
        return phase_s if trains else phase_s[:, [Phase.FORWARD]]

    # The share is the same for all phases of a block, and none may lose: what one gains may be lost to communication
    # that hid behind it. What a phase takes is convex in the share, and no more than in 16 bits without any cast. So
    # the shares that pay are all those up to the largest, which is found by halving.
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
