"""The time of an event in a step: all corrections of the cost models, from the first to the last.

    physics -> regressor -> laws -> the framework's kernels -> growth -> clock -> divided attention
    -> runs of the site

1. **`times_alone`**: the time of a kernel by itself (`perfmodel.cost.KernelModel`, whose file lists
   physics, regressor and laws), or of a collective on idle links
   (`perfmodel.cost.CollectiveModel`). Tables of kernels and collectives.
2. **`kernels_of_framework`**: the kernels that a framework runs instead of the fastest ones.
   Published benchmarks of kernels beside each other.
3. **`no_longer_than_backward`**, **`no_longer_than_single_products`**: kernels for which the tables
   time something slower than training runs. Counts of products; source code of Transformer Engine.
4. **`MonotoneGrid.times`**: twice the work takes as long at least, and twice as long at most. A
   property of steps, whose kernels a framework may cut in two.
5. **`slowdown_under_load`**: a device that works without a pause lowers its clock. The user's own
   tables; else measured energies of dies; elsewhere what published runs show.
6. **`no_faster_than_undivided`**: parts of a divided attention run at no higher rate than all of
   it.
7. **`moved_by_runs`**: the user's own runs, or those of the published record.

Each takes the times that the one before it returns. A new correction is a function here that states
its evidence, and a line in `event_prices`. Whether operands are cast to 8 bits at all is decided
block by block, by whether it pays (`_block_times`).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import ceil
from types import MappingProxyType
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.cost import (
    EventTimes,
    MonotoneGrid,
    event_times,
    has_power_law,
    slowed_unit_seconds,
    sustained_share,
    under_load,
)
from perfmodel.ops import Attention, Collective, Gemm, KernelOp, Op
from perfmodel.prediction._problem import StepProblem, session_cached, session_cached_each
from perfmodel.prediction.blocks import shard_events
from perfmodel.prediction.phases import PASSED, Phase
from perfmodel.prediction.sites import FORWARD_SHARE, framework_slowdown
from perfmodel.spec import Layout
from perfmodel.workload import fuses_experts, undivided

_FULL_TOKENS: Final = 8192
"""Tokens of a micro-batch that fills a device, so that hardly any kernel waits for the host."""


class EventPrice(NamedTuple):
    """Seconds of one event before corrections by measured runs."""

    time_s: float
    lo_s: float
    """Lower end of the 90 % interval."""
    hi_s: float
    """Upper end of the 90 % interval."""
    provenance: str
    load: float
    """Time relative to that at the clock of a kernel timed alone (`slowdown_under_load`)."""


PriceTable = Mapping[Op, EventPrice]
"""Prices of events, before corrections by measured runs."""
NO_PRICES: Final[PriceTable] = MappingProxyType({})
"""The table where no event has been priced yet."""


def price_table(problem: StepProblem, ops: Sequence[Op]) -> PriceTable:
    """Prices of many events at once: regressors are much faster on one long batch than on hundreds
    of short ones."""
    return dict(zip(ops, event_prices(problem.unadjusted, ops), strict=True))


def priced_events(
    problem: StepProblem, ops: Sequence[Op], table: PriceTable = NO_PRICES
) -> EventTimes:
    """Times of events in a step, after all corrections.

    Args:
        table: prices that the caller has; events that it lacks are priced here.
    """
    return moved_by_runs(problem, ops, EventTimes.of_rows(_looked_up(problem, ops, table)))


def _looked_up(problem: StepProblem, ops: Sequence[Op], table: PriceTable) -> list[EventPrice]:
    """The price of each event, from a table where that has all of them."""
    if all(op in table for op in ops):
        return [table[op] for op in ops]
    # A fit of runs changes their corrections hundreds of times. Prices before them stay the same
    # and are cached separately.
    return event_prices(problem.unadjusted, ops)


class StepPrices(NamedTuple):
    """Times of events in a step, and the corrections in them that an account shows apart."""

    times: EventTimes
    """Times after all corrections."""
    clock_slowdown: Float[np.ndarray, " ops"]
    """Slowdown by the clock of a training step, relative to events timed alone
    (`slowdown_under_load`)."""
    slowdown_of_runs: Float[np.ndarray, " ops"]
    """Time of kernels corrected by runs (`moved_by_runs`) relative to that without runs; 1 for
    collectives."""


def step_prices(problem: StepProblem, ops: Sequence[Op], table: PriceTable) -> StepPrices:
    """`priced_events` with the slowdown of each event by its clock and by measured runs."""
    prices = _looked_up(problem, ops, table)
    clock_slowdown = np.array([price.load for price in prices], float)
    slowdown_of_runs = np.ones(len(ops))
    times = EventTimes.of_rows(prices)
    if problem.adjustment is None:
        return StepPrices(times, clock_slowdown, slowdown_of_runs)

    corrected = moved_by_runs(problem, ops, times)
    takes_time = np.array([not isinstance(op, Collective) for op in ops], bool) & (times.time_s > 0)
    np.divide(corrected.time_s, times.time_s, out=slowdown_of_runs, where=takes_time)
    return StepPrices(corrected, clock_slowdown, slowdown_of_runs)


@session_cached_each
def event_prices(problem: StepProblem, ops: list[Op]) -> Iterator[tuple[Op, EventPrice]]:
    """The price of each event; each distinct event is computed once (DistSim, observation 1)."""
    # With every event come the kernels of more and less work that its time is compared with.
    grid = MonotoneGrid.of(ops)
    ops = list(grid.ops)

    times = times_alone(problem, ops)
    times = kernels_of_framework(problem, ops, times)
    times = no_longer_than_backward(problem, ops, times)
    times = no_longer_than_single_products(problem, ops, times)
    times = grid.times(times)
    slowdown = slowdown_under_load(problem, ops, times)
    times = times.scaled(slowdown)
    times = no_faster_than_undivided(problem, ops, times)

    columns = (
        times.time_s.tolist(),
        times.lo_s.tolist(),
        times.hi_s.tolist(),
        times.provenance,
        slowdown.tolist(),
    )
    return zip(ops, map(EventPrice, *columns), strict=True)


def times_alone(problem: StepProblem, ops: Sequence[Op]) -> EventTimes:
    """Times of events in isolation: kernels on a cool device, collectives on idle links."""
    return event_times(ops, problem.cluster, problem.kernels, problem.collectives)


def kernels_of_framework(problem: StepProblem, ops: Sequence[Op], times: EventTimes) -> EventTimes:
    """Scale times to the kernels that the framework runs.

    Tables hold the fastest fused attention of a device and, of AMD's, tuned products. The ratios of
    older generations of attention and of products by a library's heuristic are in
    `perfmodel.prediction.sites`, with their benchmarks.
    """
    device = problem.cluster.device
    return times.scaled(np.array([framework_slowdown(problem.framework, op, device) for op in ops]))


def no_longer_than_backward(
    problem: StepProblem, ops: Sequence[Op], times: EventTimes
) -> EventTimes:
    """Cap the time of a training forward of attention on TPUs, in proportion to its backward.

    For TPUs the tables hold the paged attention of inference servers, whose forward takes longer
    than a backward. A training kernel keeps its keys and values in one piece, and its forward has
    no atomics and fewer products: of those of a flash attention 2 are forward and 5 backward.
    """
    if problem.cluster.device.vendor != "Google" or problem.job.mode != "train":
        return times
    forwards: list[int] = []
    backwards: list[Op] = []
    for i, op in enumerate(ops):
        if isinstance(op, Attention) and op.pass_ == "fwd":
            forwards.append(i)
            backwards.append(replace(op, pass_="bwd"))
    backward_times = times_alone(problem, backwards)
    return times.at_most(forwards, backward_times.scaled(np.full(len(forwards), FORWARD_SHARE)))


def no_longer_than_single_products(
    problem: StepProblem, ops: Sequence[Op], times: EventTimes
) -> EventTimes:
    """Let a grouped product of fused experts take no longer than its groups one after another.

    The tables time Transformer Engine's default, a product per expert on several streams. The
    kernel of `fused_experts` deals the tiles of all experts to the multiprocessors at once, so that
    no group leaves some of them idle.
    """
    job = problem.job
    grouped: list[int] = []
    singles: list[Op] = []
    groups: list[int] = []
    for i, op in enumerate(ops):
        if (
            isinstance(op, Gemm)
            and op.grouped
            and fuses_experts(problem.model, job, op.dtype, job.narrow.fp8_recipe)
        ):
            grouped.append(i)
            singles.append(_product_of_group(op))
            groups.append(op.groups)
    if not grouped:
        return times
    single_times = times_alone(problem, singles)
    return times.at_most(grouped, single_times.scaled(np.array(groups, float)))


def _product_of_group(grouped: Gemm) -> Gemm:
    """The product of one group, as a layer without experts runs it."""
    # Grouped gradient products carry the shape of their forward product, others that of their own.
    m, n, k = grouped.m, grouped.n, grouped.k
    if grouped.pass_ == "dgrad":
        n, k = k, n
    elif grouped.pass_ == "wgrad":
        m, n, k = n, k, m
    return replace(grouped, op="linear", groups=1, m=m, n=n, k=k)


def slowdown_under_load(
    problem: StepProblem, ops: Sequence[Op], times: EventTimes
) -> Float[np.ndarray, " ops"]:
    """Time of events in a step relative to those at the clock of a kernel timed alone.

    It follows from the user's tables of kernels after the device has worked for a while
    (`Site.measured_load`), if there are any. Else by the power limit, from the energies of a FLOP
    and of a byte that were measured on a die (`perfmodel.cost.under_load`); and by what published
    runs show of dies whose energies nobody measured (`Site.clock`). A kernel that is timed over and
    over again draws more power than the same kernel between cooler ones, so that of either slowdown
    a step shows a share (`sustained_share`).
    """
    device, site = problem.cluster.device, problem.site
    slowdown = np.ones(len(ops))
    share = _sustained_share(problem) if site.power_limited else 1.0
    if site.power_limited:
        slowdown = under_load(device, ops, times.time_s, share)
    slowdown = slowdown * np.array([site.clock(op, device) for op in ops])
    if not site.loads:
        return slowdown
    for i, op in enumerate(ops):
        measured = site.measured_load(op, device)
        if measured is not None:
            slowdown[i] = max(share * measured, 1.0)
    return slowdown


@session_cached
def _sustained_share(problem: StepProblem) -> float:
    """The share of their sustained times that kernels above the power limit take in a step
    (`sustained_share`).

    It is that of the whole model's passes on one device with micro-batches that fill it. All
    layouts share it: dividing the model changes the sizes of the kernels, but hardly their kinds.
    Waits for communication, which would raise it, are left out.
    """
    device, job = problem.cluster.device, problem.job
    if not has_power_law(device):
        return 1.0
    # The kernels of a whole model's step on one device, and how often each of them runs.
    micro_batch = ceil(_FULL_TOKENS / job.seq_len)
    setting = replace(problem.setting, job=replace(job, global_batch=micro_batch))
    blocks = shard_events(setting, Layout(micro_batch=micro_batch))
    passes = PASSED if job.mode == "train" else [Phase.FORWARD]
    counts = np.array(blocks.repeats, float) @ blocks.counts[:, passes].sum(axis=1)
    ops: list[KernelOp] = []
    op_counts: list[float] = []
    for op, count in zip(blocks.ops, counts.tolist(), strict=True):
        if isinstance(op, KernelOp) and count > 0:
            ops.append(op)
            op_counts.append(count)
    # Corrections that depend on this share cannot be part of it.
    alone = times_alone(problem, ops)
    alone = kernels_of_framework(problem, ops, alone)
    return sustained_share(device, ops, np.array(op_counts), alone.time_s)


def no_faster_than_undivided(
    problem: StepProblem, ops: Sequence[Op], times: EventTimes
) -> EventTimes:
    """Limit the time of a part of an attention from below, by the time of the whole attention times
    the part's share of the FLOPs.

    Regressors see each part by itself and may promise the parts more than the undivided attention
    can give.
    """
    parts: list[int] = []
    undivided_ops: list[Op] = []
    shares: list[float] = []
    for i, op in enumerate(ops):
        undivided_attention = undivided(problem.model, problem.job, op)
        if isinstance(op, Attention) and undivided_attention is not None:
            parts.append(i)
            undivided_ops.append(undivided_attention)
            shares.append(op.flops / undivided_attention.flops)
    if not parts:
        return times
    undivided_times = EventTimes.of_rows(event_prices(problem, undivided_ops))
    return times.at_least(parts, undivided_times.scaled(np.array(shares)))


def moved_by_runs(problem: StepProblem, ops: Sequence[Op], times: EventTimes) -> EventTimes:
    """Correct times by measured runs: the user's own, or those of the published record
    (`Adjustment.times`).

    Most runs are of a die's whole parts. The waits of kernels there do not grow where tensor units
    are slower, so the time by which slow tensor units lengthen a product is not scaled.
    """
    if problem.adjustment is None:
        return times
    latency_s = np.array(_latencies_s(problem.unadjusted, ops), float)
    certain_s = slowed_unit_seconds(problem.cluster.device, ops)
    return problem.adjustment.times(ops, times, latency_s, certain_s)


@session_cached_each
def _latencies_s(problem: StepProblem, ops: list[Op]) -> Iterator[tuple[Op, float]]:
    """Latency of each event in seconds; 0 for kernels."""
    collectives = [op for op in ops if isinstance(op, Collective)]
    # Measured curves begin at some bytes, so that a byte stands for nothing.
    empty = [replace(op, bytes=1.0) for op in collectives]
    times = problem.collectives.times(problem.cluster, empty)
    latency_s = dict.fromkeys(ops, 0.0) | dict(zip(collectives, times.time_s.tolist(), strict=True))
    return iter(latency_s.items())
