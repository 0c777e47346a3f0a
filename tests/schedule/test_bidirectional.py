"""Chimera and GEMS against the formulas of Li and Hoefler 2021 (sections 2 and 3, tables 2 and
3)."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from schedule_times import bubble_fraction, live_micro_batches, makespan, uniform

from perfmodel.errors import LayoutError
from perfmodel.program import Kind, ProgramSpec, build
from perfmodel.schedule import (
    bidirectional_stages,
    check,
    chimera_model,
    get_schedule,
    rabenseifner_s,
    weight_versions,
)
from perfmodel.schedule.memory import in_flight
from perfmodel.timeline import compile_structure, makespan_and_grad, times

DEPTHS = [4, 6, 8, 16, 32]


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_bubble_of_gpipe_and_dapple(p: int, rounds: int) -> None:
    m = p * rounds
    for name in ("gpipe", "1f1b"):
        assert bubble_fraction(get_schedule(name)(p, m), uniform(p, 1, 2)) == pytest.approx(
            (p - 1) / (m + p - 1)
        )


@pytest.mark.parametrize("p", DEPTHS)
def test_bubble_of_chimera(p: int) -> None:
    chimera = get_schedule("chimera")(p, p)
    assert bubble_fraction(chimera, uniform(p, 1, 2)) == pytest.approx(
        (p - 2) / (3 * p / 2 + p - 2)
    )
    for units in (1, 2, 5):  # equal passes: units join without a seam
        many = get_schedule("chimera")(p, p * units)
        assert bubble_fraction(many, uniform(p, 1, 1)) == pytest.approx(
            (p - 2) / (2 * p * units + p - 2)
        )


@pytest.mark.parametrize("p", DEPTHS)
@pytest.mark.parametrize("name", ["chimera-doubling", "chimera-halving"])
def test_doubling_leaves_p_minus_2_idle_slots(name: str, p: int) -> None:
    """A forward of two micro-batches and a backward of one take a slot each (section 3.5, figure
    7d)."""
    for m in (2 * p, 4 * p, 6 * p):
        schedule = get_schedule(name)(p, m)
        assert check(schedule) == ()
        assert makespan(schedule, uniform(p, 0.5, 1)) == pytest.approx(3 * m / 2 + p - 2)
        assert live_micro_batches(schedule).max() <= 2 * p


@pytest.mark.parametrize("p", DEPTHS)
def test_direct_concatenation_has_middle_bubbles_that_doubling_has_not(p: int) -> None:
    m = 4 * p
    direct = makespan(get_schedule("chimera")(p, m), uniform(p, 1, 2))
    equalised = makespan(get_schedule("chimera-doubling")(p, m), uniform(p, 1, 2))
    assert direct > equalised == pytest.approx(3 * m + 2 * (p - 2))


def test_gradients_of_the_makespan_are_the_papers_n_f_and_n_b() -> None:
    """Figure 6: six forwards and ten backwards on the critical path for p = m = 6."""
    structure = build(ProgramSpec(schedule="chimera", stages=6, micro_batches=6, optimizer=False))
    durations = np.where(structure.class_kind == Kind.FORWARD, 1.0, 0.0)
    durations += np.where(structure.class_kind == Kind.BACKWARD, 2.0, 0.0)
    span, gradient = makespan_and_grad(compile_structure(structure), durations)
    assert float(span) == 26
    assert gradient[structure.class_kind == Kind.FORWARD].sum() == 6
    assert gradient[structure.class_kind == Kind.BACKWARD].sum() == 10


@pytest.mark.parametrize("p", [4, 8, 16, 32])
def test_table_2_weights_and_activations(p: int) -> None:
    """In units of one stage's weights and of a micro-batch's activations of one stage; m = 2 p."""
    m = 2 * p

    def row(name: str, steps: int = 1) -> tuple[list[int], list[float]]:
        scheduler = get_schedule(name)
        schedule = scheduler(p, m, 1, steps)
        weights = weight_versions(schedule, scheduler.weights).stored * schedule.chunks
        alive = live_micro_batches(schedule)
        return sorted({int(weights.min()), int(weights.max())}), [
            float(alive.min()),
            float(alive.max()),
        ]

    assert row("pipedream") == ([1, p], [1, p])
    assert row("pipedream-2bw", steps=4) == ([2], [1, p])
    assert row("gpipe") == ([1], [m, m])
    assert row("gems") == ([2], [1, 1])
    assert row("1f1b") == ([1], [1, p])
    assert row("chimera") == ([2], [p / 2 + 1, p])


@pytest.mark.parametrize("p", [4, 8, 16, 32])
def test_2k_pipelines_trade_bubbles_for_replicas_and_balance(p: int) -> None:
    """Section 3.6 and table 3: 2 (p / 2k - 1) bubbles, activations in [p - p / 2k + 1, p]."""
    for k in (k for k in range(1, p // 2 + 1) if (p // 2) % k == 0):
        schedule = get_schedule(f"chimera:{2 * k}")(p, p)
        assert check(schedule) == ()
        assert schedule.replicas == schedule.chunks == 2 * k
        assert makespan(schedule, uniform(p, 1, 1)) == 2 * p + 2 * (p // (2 * k) - 1)
        alive = in_flight(schedule).sum(axis=1)
        assert (alive.min(), alive.max()) == (p - p // (2 * k) + 1, p)


def test_stage_maps_of_figure_8() -> None:
    stage = bidirectional_stages(8, 4)
    workers = [np.argsort(stage[:, chunk]).tolist() for chunk in range(4)]
    assert workers[0] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert workers[1] == [7, 6, 5, 4, 3, 2, 1, 0]
    assert workers[2] == [4, 5, 6, 7, 0, 1, 2, 3]
    assert workers[3] == [3, 2, 1, 0, 7, 6, 5, 4]


@given(half=st.integers(1, 5), m=st.integers(1, 25))
def test_any_number_of_micro_batches_is_shared_evenly(half: int, m: int) -> None:
    schedule = get_schedule("chimera")(2 * half, m)
    assert check(schedule) == ()
    first = np.bincount(schedule.chunk[(schedule.device == 0) & (schedule.phase == 0)], minlength=2)
    assert abs(int(first[0]) - int(first[1])) <= 1


def test_gems_takes_4p_plus_2_slots_for_two_micro_batches() -> None:
    for p in (4, 8):
        spans = [makespan(get_schedule("gems")(p, m), uniform(p, 1, 2)) for m in (4, 6)]
        assert spans[1] - spans[0] == 4 * p + 2


def test_gradient_reductions_wait_for_both_replicas_and_hide_in_bubbles() -> None:
    spans = {}
    for mode in ("end", "overlap", "eager_opt"):
        structure = build(
            ProgramSpec(schedule="chimera", stages=4, micro_batches=4, grad_reduce=mode)
        )
        seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.GRAD_REDUCE: 1.5}
        durations = np.array([seconds.get(Kind(kind), 0.0) for kind in structure.class_kind])
        timeline = times(structure, durations)
        reductions = structure.kind == Kind.GRAD_REDUCE
        stage = structure.class_stage[structure.duration]
        for s in range(4):
            own = reductions & (stage == s)
            backwards = (structure.kind == Kind.BACKWARD) & (stage == s)
            assert own.sum() == 2
            assert timeline.start_s[own].min() >= timeline.end_s[backwards].max()
        spans[mode] = timeline.makespan_s
    # 16 of compute; at the end two reductions follow it, started early all but one hide in bubbles
    assert spans == {"end": 19.0, "overlap": 17.5, "eager_opt": 17.5}


def test_eager_opt_starts_only_what_bubbles_follow() -> None:
    """Section 3.2, figure 4b: the last stage is reduced early, the middle ones at the end."""
    schedule = get_schedule("chimera")(4, 4)
    structure = build(
        ProgramSpec(schedule="chimera", stages=4, micro_batches=4, grad_reduce="eager_opt")
    )
    durations = np.where(np.isin(structure.class_kind, (Kind.FORWARD, Kind.BACKWARD)), 1.0, 0.0)
    timeline = times(structure, durations)
    reductions = structure.kind == Kind.GRAD_REDUCE
    stage = structure.class_stage[structure.duration]
    last_pass = schedule.slot.max() + 1
    assert (timeline.start_s[reductions & (stage == 3)] < last_pass - 1).all()
    middle = reductions & np.isin(stage, (1, 2))
    own_end = [
        timeline.end_s[(structure.device == d) & (structure.kind == Kind.BACKWARD)].max()
        for d in (1, 2)
    ]
    assert (timeline.start_s[middle] >= min(own_end)).all()


@pytest.mark.parametrize(("name", "p"), [("chimera", 5), ("chimera:6", 8), ("chimera:3", 6)])
def test_impossible_pipelines_name_the_remedy(name: str, p: int) -> None:
    with pytest.raises(LayoutError, match=r"even number|use one of"):
        get_schedule(name)(p, 8)


@pytest.mark.parametrize(("p", "m"), [(4, 4), (6, 6), (8, 8), (8, 16), (16, 16)])
def test_the_papers_performance_model_beside_the_evaluator(p: int, m: int) -> None:
    """Section 3.4: exact without communication; with transfers and all-reduce close to what the
    evaluator finds."""
    alone = chimera_model(p, m, forward_s=1, backward_s=2)
    assert alone.step_s == makespan(get_schedule("chimera")(p, m), uniform(p, 1, 2))
    if m == p:
        assert (alone.forwards, alone.backwards) == (p, 2 * p - 2)
    reduce_s = rabenseifner_s(1.5e9, 2, 1e-6, 1e9)
    assert reduce_s == pytest.approx(1.5, rel=1e-5)
    model = chimera_model(p, m, forward_s=1, backward_s=2, transfer_s=0.02, all_reduce_s=reduce_s)
    structure = build(
        ProgramSpec(schedule="chimera", stages=p, micro_batches=m, grad_reduce="eager_opt")
    )
    seconds = {
        Kind.FORWARD: 1.0,
        Kind.BACKWARD: 2.0,
        Kind.GRAD_REDUCE: reduce_s,
        Kind.SEND_FORWARD: 0.02,
        Kind.SEND_BACKWARD: 0.02,
    }
    durations = np.array([seconds.get(Kind(kind), 0.0) for kind in structure.class_kind])
    assert times(structure, durations).makespan_s == pytest.approx(model.step_s, rel=0.05)


def test_all_reduce_hides_in_the_free_regions_of_figure_6() -> None:
    assert chimera_model(6, 6, forward_s=1, backward_s=2, all_reduce_s=0.5).unoverlapped_s < 1
    spans = [
        chimera_model(6, 6, forward_s=1, backward_s=2, all_reduce_s=s).unoverlapped_s
        for s in (0, 1, 2, 4, 8)
    ]
    assert spans[0] == 0
    assert (np.diff(spans) >= 0).all()
    assert spans[-1] - spans[-2] == pytest.approx(8)  # two stages per device, all of both exposed
    assert rabenseifner_s(1e9, 1, 1e-6, 1e9) == 0
