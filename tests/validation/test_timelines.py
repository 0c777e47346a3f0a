"""Errors between timelines of one structure: closed forms, a plain loop as oracle, refusals."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import program_structure, simulate
from perfmodel.ir.models import mlp, training_step
from perfmodel.program import N_STREAMS, Kind, Structure
from perfmodel.timeline import Timeline, times
from perfmodel.validation import TimelineErrors, compare_timelines


def two_stage_step() -> Structure:
    """Two devices, two micro-batches: forwards, then backwards, one class per (stage, phase)."""
    orders = ((0, 1, 2, 3), (0, 1, 2, 3))
    kinds = (Kind.ZERO, Kind.FORWARD, Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD)
    duration, stream, micro_batch, pred = [], [], [], []
    place: dict[tuple[int, int], int] = {}
    for device, order in enumerate(orders):
        for position, what in enumerate(order):
            backward, mb = divmod(what, 2)
            place[device, what] = len(duration)
            duration.append(1 + 2 * backward + device)
            stream.append(device * N_STREAMS)
            micro_batch.append(mb)
            before = [place[device, order[position - 1]]] if position else []
            before += [place[0, what]] if device and not backward else []
            pred.append([*before, -1, -1][:2])
    duration.append(0)
    stream.append(-1)
    micro_batch.append(-1)
    pred.append([place[0, 3], place[1, 3]])
    n = len(duration)
    return Structure(
        duration=np.array(duration),
        pred=np.array(pred),
        lag=np.zeros((n, 2), np.int32),
        stream=np.array(stream),
        micro_batch=np.array(micro_batch),
        class_kind=np.array(kinds),
        class_stage=np.array([0, 0, 1, 0, 1]),
        class_segment=np.zeros(5, np.int32),
        alloc=np.zeros(n, np.int32),
        free=np.zeros(n, np.int32),
        devices=2,
    )


def oracle(
    predicted: Timeline, runs: list[Timeline]
) -> tuple[dict[int, float], dict[tuple, float]]:
    """Activity error per device and stage error per pass, by plain loops over the ops."""
    s = predicted.structure
    shown = [
        i
        for i in range(s.n_ops)
        if s.stream[i] >= 0 and s.stream[i] % N_STREAMS == 0 and s.kind[i] != Kind.ZERO
    ]
    first = min(shown, key=lambda i: (predicted.start_s[i], s.device[i]))
    by_device: dict[int, list[float]] = {}
    by_pass: dict[tuple, list[float]] = {}
    for run in runs:
        p0, m0 = predicted.start_s[first], run.start_s[first]
        passes: dict[tuple, list[int]] = {}
        for i in shown:
            for p, m in (
                (predicted.start_s[i], run.start_s[i]),
                (predicted.end_s[i], run.end_s[i]),
            ):
                by_device.setdefault(int(s.device[i]), []).append(
                    abs((p - p0) - (m - m0)) / run.makespan_s
                )
            key = (
                int(s.device[i]),
                int(s.class_stage[s.duration[i]]),
                int(s.kind[i]),
                int(s.micro_batch[i]),
            )
            if s.kind[i] in (Kind.FORWARD, Kind.BACKWARD):
                passes.setdefault(key, []).append(i)
        for key, ops in passes.items():
            start = min(predicted.start_s[i] - p0 for i in ops) - min(
                run.start_s[i] - m0 for i in ops
            )
            end = max(predicted.end_s[i] - p0 for i in ops) - max(run.end_s[i] - m0 for i in ops)
            by_pass.setdefault(key, []).append((abs(start) + abs(end)) / 2 / run.makespan_s)
    return (
        {d: float(np.mean(v)) for d, v in by_device.items()},
        {key: float(np.median(v)) for key, v in by_pass.items()},
    )


def assert_as_the_oracle(errors: TimelineErrors, predicted: Timeline, runs: list[Timeline]) -> None:
    by_device, by_pass = oracle(predicted, runs)
    for device, error in by_device.items():
        assert errors.activity_error[device] == pytest.approx(error, rel=1e-9, abs=1e-12)
    found = {
        (row.device, row.stage, int(Kind[row.phase.upper()]), row.micro_batch): row.error
        for row in errors.stages.itertuples()
    }
    assert found.keys() == by_pass.keys()
    for key, error in by_pass.items():
        assert found[key] == pytest.approx(error, rel=1e-9, abs=1e-12)


def test_by_hand() -> None:
    structure = two_stage_step()
    predicted = times(structure, [0.0, 1, 1, 2, 2])
    measured = times(structure, [0.0, 2, 1, 2, 2])  # forwards of stage 0 take twice as long
    errors = compare_timelines(predicted, measured)
    # predicted: device 0 F[0,1][1,2] B[2,4][4,6], device 1 the same a second later; measured:
    # device 0 F[0,2][2,4] B[4,6][6,8], device 1 F[2,3][4,5] B[5,7][7,9]
    assert (errors.predicted_batch_s, errors.measured_batch_s) == (7, 9)
    assert errors.batch_time_error == pytest.approx(2 / 9)
    late = np.array([0, 1, 1, 2, 2, 2, 2, 2]), np.array([1, 1, 2, 2, 2, 2, 2, 2])
    np.testing.assert_allclose(errors.activity_error, [late[0].mean() / 9, late[1].mean() / 9])
    np.testing.assert_allclose(errors.activity_bias, -errors.activity_error)
    np.testing.assert_allclose(errors.predicted_idle, [1 / 7, 1 / 7])
    np.testing.assert_allclose(errors.measured_idle, [1 / 9, 3 / 9])
    first = errors.stages[
        (errors.stages["device"] == 0) & (errors.stages["phase"] == "forward")
    ].iloc[0]
    assert (first["start_error"], first["end_error"], first["time_error"]) == pytest.approx(
        (0, 1 / 9, -0.5)
    )
    assert errors.largest_stage_error == pytest.approx(2 / 9)
    assert errors.to_dict()["measured_bubble_fraction"] == pytest.approx(2 / 9)
    assert len(errors.to_frame()) == 8


def test_itself_has_no_error_whatever_its_clock() -> None:
    predicted = times(two_stage_step(), [0.0, 1, 1, 2, 2])
    shifted = dataclasses.replace(
        predicted, start_s=predicted.start_s + 5, end_s=predicted.end_s + 5
    )
    errors = compare_timelines(predicted, shifted)
    assert errors.activity_error.max() < 1e-15
    assert errors.largest_stage_error < 1e-15
    # the batch time counts from the origin of the run's clock, at which a run begins
    assert errors.measured_batch_s == 12


@settings(max_examples=25)
@given(st.lists(st.lists(st.floats(0.1, 9), min_size=4, max_size=4), min_size=2, max_size=4))
def test_against_plain_loops(durations: list[list[float]]) -> None:
    structure = two_stage_step()
    predicted, *runs = (times(structure, [0.0, *d]) for d in durations)
    errors = compare_timelines(predicted, runs)
    assert_as_the_oracle(errors, predicted, runs)
    assert errors.measured_batch_s == pytest.approx(np.mean([run.makespan_s for run in runs]))


def test_program_of_single_instructions() -> None:
    program = distribute(
        training_step(mlp(8, (4, 8, 4), "fp32")), Degrees(pipeline=2, micro_batches=4)
    )
    predicted = simulate(program.function, lambda ops: np.full(len(ops), 1e-3))
    # the same program prepared anew, with times of its own
    rng = np.random.default_rng(0)
    runs = [
        simulate(program_structure(program.function), lambda ops: rng.uniform(5e-4, 2e-3, len(ops)))
        for _ in range(3)
    ]
    errors = compare_timelines(predicted, runs)
    assert_as_the_oracle(errors, predicted, runs)
    assert len(errors.stages) == 2 * 2 * 4
    assert errors.runs == 3


def test_refusals() -> None:
    structure = two_stage_step()
    predicted = times(structure, [0.0, 1, 1, 2, 2])
    other = dataclasses.replace(structure, micro_batch=structure.micro_batch[::-1].copy())
    with pytest.raises(PerfModelError, match="micro_batch of op 0 differs"):
        compare_timelines(predicted, times(other, [0.0, 1, 1, 2, 2]))
    with pytest.raises(PerfModelError, match="no measured timeline"):
        compare_timelines(predicted, [])
    with pytest.raises(PerfModelError, match="measured step takes 0 s"):
        compare_timelines(predicted, times(structure, np.zeros(5)))
    program = distribute(training_step(mlp(8, (4, 8, 4), "fp32")), Degrees(data=2))
    with pytest.raises(PerfModelError, match="n_ops"):
        compare_timelines(predicted, simulate(program.function, lambda ops: np.ones(len(ops))))
