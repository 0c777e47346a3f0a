"""Iterations cut at their calls and replayed on the timeline, against closed forms: without
torch."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.emulate import (
    EmulatedRun,
    EmulationError,
    emulated_curve,
    iteration,
    measured_trace,
    replay,
    typical,
)
from perfmodel.emulate.runs import COLLECTIVE_COLUMNS, RankRun, User, done_at_s, own_s

FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.010, 0.030, 0.005
CALLS_S = ((0.020, 0.008), (0.030, 0.008), (0.040, 0.004))
"""When each all-reduce is called, and what it takes."""

LATER = ("backward_end", "optimizer", "iteration_end")


def overlapped(
    delays_s: Sequence[float], calls_s: Sequence[tuple[float, float]] = CALLS_S
) -> RankRun:
    """Iterations as DistributedDataParallel makes them: calls in backward, at whose end all are
    waited for."""
    calls, marks, now_s = [], [("iteration_end", 100.0, 0.0, 0.0)], 100.0
    thread_s = 0.0
    for number, delay_s in enumerate(delays_s, 1):
        free_s = 0.0
        for place, (issued_s, span_s) in enumerate(calls_s):
            start_s = max(issued_s, free_s)
            free_s = start_s + span_s + delay_s
            values = {
                "group": "0",
                "lane": "",
                "ranks": 2,
                "sequence": place,
                "kind": "all_reduce",
                "bytes": 8,
                "iteration": number,
                "issued_s": now_s + issued_s,
                "thread_s": thread_s + issued_s,
                "start_s": now_s + start_s,
                "end_s": now_s + free_s,
                "delay_s": span_s + delay_s,
                "core_s": 0.0,
                "wait_start_s": 0.0,
                "wait_end_s": 0.0,
            }
            calls.append([values[name] for name in COLLECTIVE_COLUMNS])
        done_s = max(FORWARD_S + BACKWARD_S, free_s)
        for name, moment_s, work_s in (
            ("backward", FORWARD_S, FORWARD_S),
            ("backward_end", done_s, FORWARD_S + BACKWARD_S),
            ("optimizer", done_s, FORWARD_S + BACKWARD_S),
            ("iteration_end", done_s + OPTIMIZER_S, FORWARD_S + BACKWARD_S + OPTIMIZER_S),
        ):
            marks.append((name, now_s + moment_s, thread_s + work_s, thread_s + work_s))
        now_s += done_s + OPTIMIZER_S
        thread_s += FORWARD_S + BACKWARD_S + OPTIMIZER_S
    return RankRun(
        0,
        2,
        pd.DataFrame(calls, columns=list(COLLECTIVE_COLUMNS)),
        pd.DataFrame(marks, columns=["name", "wall_s", "thread_s", "process_s"]),
        200,
        100,
    )


def closed_form_s(delay_s: float) -> float:
    """Ends of three calls in turn, the last after backward."""
    end_s = 0.0
    for issued_s, span_s in CALLS_S:
        end_s = max(issued_s, end_s) + span_s + delay_s
    return max(FORWARD_S + BACKWARD_S, end_s) + OPTIMIZER_S


@pytest.mark.parametrize("delay_s", [0.0, 0.001, 0.002, 0.004, 0.02])
def test_replay_answers_delays_as_the_closed_form_does(delay_s: float) -> None:
    found = replay(iteration(overlapped([0.0, 0.0]), 1))
    assert found.time_s("all_reduce", delay_s) == pytest.approx(closed_form_s(delay_s))
    assert found.time_s("all_gather", delay_s) == pytest.approx(closed_form_s(0.0))


def test_replay_knows_what_collectives_were_told_to_take() -> None:
    found = replay(iteration(overlapped([0.0, 0.001]), 2))
    is_reduction = found.is_of_kind("all_reduce")
    assert found.stated_s[is_reduction > 0] == pytest.approx(
        [span_s + 0.001 for _, span_s in CALLS_S]
    )
    assert found.stated_s.sum() == pytest.approx(found.stated_s @ is_reduction)


def test_slack_and_what_is_felt() -> None:
    found = replay(iteration(overlapped([0.0, 0.0]), 1))
    assert found.calls_felt("all_reduce") == 1  # the last one, after backward
    # the second is 2 ms before the third's call, the first 2 ms before the second's
    assert found.slack_s("all_reduce") == pytest.approx(0.002, abs=1e-6)
    assert found.calls_felt("all_reduce", 0.01) == 3
    assert replay(iteration(overlapped([0.0], [(0.02, 0.001)]), 1)).calls_felt("all_reduce") == 0


def test_spans_cover_what_the_thread_does() -> None:
    found = iteration(overlapped([0.0]), 1)
    work_s = sum(span.end_s - span.start_s for span in found.spans)
    assert work_s == pytest.approx(FORWARD_S + BACKWARD_S + OPTIMIZER_S)
    assert [span.issues for span in found.spans if span.issues >= 0] == [0, 1, 2]
    assert {span.phase for span in found.spans} == {"forward", "backward", "optimizer"}


def test_iterations_table() -> None:
    row = overlapped([0.0, 0.0]).iterations().iloc[-1]
    assert row.time_s == pytest.approx(closed_form_s(0.0))
    assert row.communication_s == pytest.approx(0.020)
    assert row.exposed_s == pytest.approx(0.004)
    assert row.overlap == pytest.approx(0.8)
    assert row.forward_s == pytest.approx(FORWARD_S)


def test_waits_of_the_scripts_own() -> None:
    run = overlapped([0.0, 0.0])
    waited = run.collectives.wait_start_s.astype(float) + run.collectives.issued_s + 0.001
    late = pd.DataFrame({"start": waited, "end": np.maximum(waited, run.collectives.end_s)})
    own = run.collectives.assign(wait_start_s=late.start, wait_end_s=late.end)
    found = replay(iteration(RankRun(0, 2, own, run.marks, 1, 0), 1))
    assert found.calls_felt("all_reduce") == 3  # each is waited for before the next is called


def test_curve_of_a_sweep() -> None:
    delays_s, every = (0.0, 0.002, 0.004, 0.006), 3
    run = EmulatedRun((overlapped([delays_s[i // every % 4] for i in range(1, 61)]),))
    curve = emulated_curve(run, "all_reduce", delays_s, every)
    assert curve.emulated_s == pytest.approx([closed_form_s(d) for d in delays_s])
    assert curve.errors == pytest.approx(np.zeros(4), abs=1e-9)
    assert (curve.felt, curve.felt_at_most) == (1, 3)
    assert curve.knees_s[0] == pytest.approx(0.002, abs=1e-4)
    assert curve.knees_s[1] == pytest.approx(0.002, abs=1e-4)
    with pytest.raises(EmulationError, match="too few"):
        emulated_curve(EmulatedRun((overlapped([0.0] * 8),)), "all_reduce", delays_s, every)


def test_trace_of_a_run() -> None:
    run = EmulatedRun((overlapped([0.0] * 4),))
    trace = measured_trace(run, steps=2)
    assert len(trace.steps()) == 2
    assert trace.steps()[0].batch_time_s == pytest.approx(closed_form_s(0.0))
    frame = trace.to_frame()
    assert (frame[frame.stream > 0].phase == "grad_reduce").all()
    assert typical(run.ranks[0], np.array([1, 2, 3])).number in (1, 2, 3)


def test_collectives_that_take_the_core_slow_the_script() -> None:
    """One call at 20 ms of 8 ms, 4 of them on the core; backward has 20 ms left to do, then the
    optimizer 5."""
    run = overlapped([0.0], [(0.020, 0.008)])
    late = run.marks.name.isin(LATER) & (run.marks.index > 0)
    marks = run.marks.assign(wall_s=run.marks.wall_s + 0.004 * late)
    found = replay(iteration(RankRun(0, 2, run.collectives.assign(core_s=0.004), marks, 1, 0), 1))
    assert found.time_s() == pytest.approx(0.049)
    assert found.time_s("all_reduce", 0.010) == pytest.approx(0.049)
    assert found.time_s("all_reduce", 0.016) == pytest.approx(0.049)  # 24 ms: as long as backward
    assert found.time_s("all_reduce", 0.100) == pytest.approx(0.020 + 0.108 + 0.005)
    assert found.slack_s("all_reduce") == pytest.approx(0.016, abs=1e-6)


@given(
    work_s=st.floats(0, 1),
    starts=st.lists(st.tuples(st.floats(0, 1), st.floats(0.01, 1), st.floats(0, 0.9)), max_size=4),
)
def test_work_on_a_shared_core_and_back(
    work_s: float, starts: list[tuple[float, float, float]]
) -> None:
    users = [User(start, start + span, span * share / len(starts)) for start, span, share in starts]
    end_s = done_at_s(0.1, work_s, users)
    assert end_s >= 0.1 + work_s - 1e-9
    assert own_s(0.1, end_s, users) == pytest.approx(work_s, abs=1e-9)
