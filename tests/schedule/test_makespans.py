"""Times of every schedule: as early as its own order allows, by a slow event loop; makespan and
steady interval."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from schedule_times import live_micro_batches, makespan, uniform
from thinned import one_in

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.schedule import (
    PassTimes,
    Phase,
    Schedule,
    check,
    chimera_model,
    get_schedule,
    schedule_facts,
    schedule_names,
)
from perfmodel.schedule.facts import ChunkTimes, chunk_facts, starts_and_ends

SIZES = [(2, 4), (4, 4), (4, 8), (8, 8), (8, 24), (8, 64), (16, 192)]
ONES = ChunkTimes(Fraction(1), Fraction(1), Fraction(1))


def built(name: str, p: int, m: int) -> Schedule:
    scheduler = get_schedule(name)
    return scheduler(p, m, 2 if scheduler.looped else scheduler.chunks_for(1))


def event_loop(schedule: Schedule, forward: float, of_input: float, of_weight: float) -> float:
    """End of the last pass when every device runs its list in order, each pass once what it reads
    is there.

    Read off the definition of a pass: forwards follow the stage before, gradients the stage after;
    slices of a sequence follow the one before (forward) or after (gradients); the two of a pair
    start and hand on together.
    """
    seconds = {
        Phase.FORWARD: forward,
        Phase.BACKWARD: of_input + of_weight,
        Phase.BACKWARD_INPUT: of_input,
    }
    last = schedule.n_stages - 1
    ready: dict[tuple[str, int, int], float] = {}
    orders = [list(schedule.order(d)) for d in range(schedule.devices)]
    paired = np.split(schedule.paired, schedule.offsets[1:-1])
    here, free = [0] * schedule.devices, [0.0] * schedule.devices

    def reads(stage: int, phase: Phase, batch: int) -> list[tuple[str, int, int]]:
        if phase == Phase.BACKWARD_WEIGHT:
            return [("gradient", stage, batch)]
        name, before, beside = (
            ("forward", stage - 1, -1) if phase == Phase.FORWARD else ("gradient", stage + 1, 1)
        )
        found = [] if phase == Phase.FORWARD else [("forward", stage, batch)]
        if 0 <= before <= last:
            found.append((name, before, batch))
        if (batch + beside) // schedule.slices == batch // schedule.slices and batch + beside >= 0:
            found.append((name, stage, batch + beside))
        return found

    moved = True
    while moved:
        moved = False
        for d, order in enumerate(orders):
            while here[d] < len(order):
                together = order[here[d] : here[d] + 1 + int(paired[d][here[d]])]
                needs = [
                    need
                    for one in together
                    for batch in range(one.micro_batch, one.micro_batch + one.span)
                    for need in reads(int(schedule.stage[d, one.chunk]), one.phase, batch)
                ]
                inside = {
                    (
                        "gradient" if one.phase else "forward",
                        int(schedule.stage[d, one.chunk]),
                        batch,
                    )
                    for one in together
                    for batch in range(one.micro_batch, one.micro_batch + one.span)
                }
                if any(need not in ready for need in needs if need not in inside):
                    break
                start = max([free[d], *(ready[need] for need in needs if need not in inside)])
                free[d] = start + sum(
                    seconds.get(one.phase, of_weight) * one.span for one in together
                )
                for one in together:
                    if one.phase != Phase.BACKWARD_WEIGHT:
                        name = "gradient" if one.phase else "forward"
                        for batch in range(one.micro_batch, one.micro_batch + one.span):
                            ready[name, int(schedule.stage[d, one.chunk]), batch] = free[d]
                here[d] += len(together)
                moved = True
    assert here == [len(order) for order in orders]
    return max(free)


@pytest.mark.parametrize(("p", "m"), one_in(3, SIZES))
@pytest.mark.parametrize("name", [*schedule_names(), "seq1f1b:4", "nf1b:1"])
def test_no_pass_starts_later_than_its_order_allows(name: str, p: int, m: int) -> None:
    schedule = built(name, p, m)
    for forward, of_input, of_weight in ((1, 1, 1), (2, 3, 1)):
        times = uniform(schedule.n_stages, forward, of_input + of_weight, of_weight)
        assert makespan(schedule, times) == event_loop(schedule, forward, of_input, of_weight)


@given(
    name=st.sampled_from([*schedule_names(), "chimera:4", "seq1f1b:3"]),
    p=st.integers(1, 9),
    m=st.integers(1, 20),
    times=st.tuples(*[st.integers(0, 5)] * 3),
)
def test_facts_are_those_of_an_event_loop(
    name: str, p: int, m: int, times: tuple[int, int, int]
) -> None:
    assume(any(times) and (times[0] or name != "forward"))
    try:
        schedule = built(name, p, m)
    except LayoutError:
        assume(False)
    else:
        scheduler = get_schedule(name)
        thirds = [Fraction(time, 3) for time in times]
        facts = chunk_facts(
            name, p, m, ChunkTimes(*thirds), chunks=schedule.chunks if scheduler.looped else 1
        )
        exact = Fraction(
            int(event_loop(schedule, *(float(time) for time in times))), 3 * schedule.slices
        )
        assert facts.makespan_s == float(exact)
        assert facts.steady_interval_s <= facts.makespan_s * (1 + 1e-12)
        overlaps = scheduler.asynchronous or scheduler.staggered
        assert overlaps or facts.steady_interval_s == facts.makespan_s
        assert 0 <= facts.bubble_fraction < 1
        assert 0 <= facts.makespan_bubble_fraction < 1


@pytest.mark.parametrize(
    ("name", "p", "m", "makespan_s"),
    [
        ("v-half", 8, 24, 161),
        ("v-half", 8, 64, 401),
        ("v-half", 16, 192, 1193),
        ("v-half", 4, 8, 53),
        ("v-min", 8, 24, 171),
        ("v-min", 6, 12, 89),
        ("v-min", 4, 8, 59),
    ],
)
def test_v_shapes_take_as_long_as_their_authors_order(
    name: str, p: int, m: int, makespan_s: int
) -> None:
    """Of the implementation that Qi et al. 2024b published with the paper, all passes a slot
    long."""
    assert chunk_facts(name, p, m, ONES).makespan_s == makespan_s


@pytest.mark.parametrize("p", range(1, 17))
def test_squeezed_blocks_hold_no_more_than_the_repeated_block(p: int) -> None:
    """About a half and a third of 1F1B's p micro-batches (section 3; here of chunks, two to a
    micro-batch)."""
    for name, most in (("v-half", p + 2), ("v-min", 2 * p / 3 + 4)):
        for m in (1, 2, p, 3 * p + 1):
            schedule = get_schedule(name)(p, m)
            assert check(schedule) == ()
            assert 2 * live_micro_batches(schedule).max() <= most
            assert makespan(schedule, uniform(2 * p, 1, 2)) == schedule.slot.max() + 1


@pytest.mark.parametrize("name", ["chimera-doubling", "chimera-halving"])
@pytest.mark.parametrize("p", [2, 4, 6, 8, 16])
def test_one_unit_is_not_doubled(name: str, p: int) -> None:
    """Li and Hoefler 2021, section 3.5: what is left of p micro-batches keeps the order of the
    basic unit."""
    passes = uniform(p, 1, 2)
    for m in range(1, p + 1):
        assert makespan(get_schedule(name)(p, m), passes) == makespan(
            get_schedule("chimera")(p, m), passes
        )
    assert p != 8 or makespan(get_schedule(name)(p, p), passes) == 36


@pytest.mark.parametrize(
    ("name", "makespan_s", "interval_s"),
    [
        ("1f1b", 69, 69),
        ("zb-h1", 55, 55),
        ("zb-h2", 55, 48),
        ("pipedream", 69, 48),
        ("zb-v", 103, 96),
    ],
)
def test_makespan_and_steady_interval(name: str, makespan_s: int, interval_s: int) -> None:
    facts = chunk_facts(name, 8, 16, ONES)
    assert (facts.makespan_s, facts.steady_interval_s) == (makespan_s, interval_s)
    busy = 48 if get_schedule(name).chunks_for(1) == 1 else 96
    assert facts.bubble_fraction == pytest.approx(1 - busy / interval_s)
    assert facts.makespan_bubble_fraction == pytest.approx(1 - busy / makespan_s)


def test_the_steady_interval_is_that_of_a_long_stream() -> None:
    """Rank 0 of pipedream sets the pace only after many steps where it is but a little slower than
    the others."""
    for name in ("zb-h2", "zb-v", "pipedream", "pipedream-2bw", "nf1b", "nf1b:1"):
        scheduler = get_schedule(name)
        facts = schedule_facts(name, 4, 6, forward_s=1.1, backward_s=2.3, transfer_s=0.4)
        schedule = scheduler(4, 6)
        part = 4 / schedule.n_stages
        times = PassTimes.uniform(schedule.n_stages, 1.1 * part, 2.3 * part, transfer_s=0.4)
        ends = [
            float(starts_and_ends(scheduler(4, 6, 1, steps), times)[1].max()) for steps in (60, 120)
        ]
        assert facts.steady_interval_s == pytest.approx((ends[1] - ends[0]) / 60)


def test_transfers_are_no_bubble() -> None:
    """A bubble is idle time that is there without them too."""
    free, slow = (schedule_facts("1f1b", 4, 8, transfer_s=transfer_s) for transfer_s in (0.0, 0.5))
    assert slow.makespan_s > free.makespan_s
    assert slow.bubble_fraction * slow.makespan_s == pytest.approx(
        free.bubble_fraction * free.makespan_s
    )


def test_times_of_chunks_are_added_exactly() -> None:
    """A tenth is no binary fraction: 1F1B's (m + p - 1) (f + b) is the nearest number to it all the
    same."""
    tenth = ChunkTimes(Fraction("0.1"), Fraction("0.1"), Fraction("0.1"))
    for m in (7, 50, 333):
        assert chunk_facts("1f1b", 8, m, tenth).makespan_s == float(Fraction(3 * (m + 7), 10))
    with pytest.raises(PerfModelError, match="digits"):
        chunk_facts("1f1b", 8, 16, ChunkTimes(Fraction("1e-30"), Fraction(1), Fraction(1)))
    with pytest.raises(PerfModelError, match="one of them above 0"):
        ChunkTimes(Fraction(0), Fraction(0), Fraction(0))


@pytest.mark.parametrize(
    ("p", "pipelines"), [(4, 2), (8, 2), (8, 4), (12, 4), (12, 6), (16, 4), (16, 8), (8, 8)]
)
def test_chimeras_model_counts_passes_of_2k_pipelines(p: int, pipelines: int) -> None:
    """n_f and n_b (section 3.4) are the gradient of the evaluator's makespan: p, and p + 2 (p / 2k
    - 1) for m = p."""
    from perfmodel.program import Kind, ProgramSpec, build
    from perfmodel.timeline import compile_structure, makespan_and_grad

    for m in (p, 2 * p):
        found = chimera_model(p, m, forward_s=1, backward_s=2, pipelines=pipelines)
        structure = build(
            ProgramSpec(schedule=f"chimera:{pipelines}", stages=p, micro_batches=m, optimizer=False)
        )
        kind = structure.class_kind
        durations = np.where(kind == Kind.FORWARD, 1.0, np.where(kind == Kind.BACKWARD, 2.0, 0.0))
        span, gradient = makespan_and_grad(compile_structure(structure), durations)
        assert found.step_s == found.compute_s == float(span)
        counts = [float(gradient[kind == of].sum()) for of in (Kind.FORWARD, Kind.BACKWARD)]
        assert counts[0] + 2 * counts[1] == found.forwards + 2 * found.backwards
        if m == p:
            assert [found.forwards, found.backwards] == counts == [p, p + 2 * (p // pipelines - 1)]


def test_chimeras_model_reduces_over_all_pipelines() -> None:
    """Four stages per device are reduced in a row: longer all-reduces show sooner than with two."""
    two, four = (
        chimera_model(8, 8, forward_s=1, backward_s=2, all_reduce_s=4, pipelines=pipelines)
        for pipelines in (2, 4)
    )
    assert four.compute_s < two.compute_s
    assert four.unoverlapped_s > two.unoverlapped_s
    with pytest.raises(LayoutError, match="use one of"):
        chimera_model(8, 8, forward_s=1, backward_s=2, pipelines=6)
