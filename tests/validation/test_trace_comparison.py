"""Measured traces against predictions: matching by names, tags and order, and errors known
beforehand."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from matplotlib.collections import PolyCollection

from perfmodel.errors import PerfModelError
from perfmodel.ingest import MeasuredTrace, read_trace
from perfmodel.ingest.profiles import PHASES, Activity, ActivityKind, trace_of
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import chrome_trace, program_structure, simulate, write_chrome_trace
from perfmodel.ir.models import mlp, training_step
from perfmodel.program import ProgramSpec, build
from perfmodel.timeline import Timeline, times
from perfmodel.validation import compare_timelines, compare_traces, timeline_trace
from perfmodel.viz import draw_comparison, save_figure


def pipeline(forward_s: float = 1.0, backward_s: float = 2.0) -> Timeline:
    """1F1B of two stages and four micro-batches without communication."""
    structure = build(ProgramSpec(stages=2, micro_batches=4))
    kinds = np.array([PHASES[k] for k in structure.class_kind])
    return times(
        structure,
        np.where(kinds == "forward", forward_s, np.where(kinds == "backward", backward_s, 0.0)),
    )


def kernels_of(
    timeline: Timeline, replicas: int = 1, steps: int = 1, tagged: bool = True
) -> MeasuredTrace:
    """A profiler's view: two kernels per pass with a gap between them, on every replica, with a
    collective beside."""
    trace = timeline_trace(timeline)
    found = []
    for step in range(steps):
        for op in range(trace.n):
            for replica in range(replicas):
                start_s, end_s = trace.start_s[op] + 100 * step, trace.end_s[op] + 100 * step
                middle_s = (start_s + end_s) / 2
                tags = (
                    (PHASES[trace.phase[op]], int(trace.stage[op]), int(trace.micro_batch[op]))
                    if tagged
                    else ()
                )
                marks = dict(zip(("phase", "stage", "micro_batch"), tags, strict=False))
                device = int(trace.device[op]) * replicas + replica
                for name, a, b in (("k1", start_s, middle_s - 0.1), ("k2", middle_s + 0.1, end_s)):
                    found.append(
                        Activity(device, 7, a, b, name, ActivityKind.COMPUTE, step=step, **marks)
                    )
                nccl = Activity(
                    device, 20, middle_s, end_s, "nccl", ActivityKind.COMMUNICATION, step=step
                )
                found.append(nccl)
    return trace_of(found, "test")


def test_tagged_kernels_make_up_passes() -> None:
    predicted, measured = pipeline(), pipeline(1.0, 2.5)
    want = compare_timelines(predicted, measured)
    found = compare_traces(predicted, kernels_of(measured))
    assert found.matched_by == "phase, stage, micro_batch"
    assert (found.predicted_share, found.measured_share) == (1, 1)
    np.testing.assert_allclose(found.errors.activity_error, want.activity_error)
    np.testing.assert_allclose(found.errors.measured_idle, want.measured_idle)
    assert found.errors.batch_time_error == pytest.approx(want.batch_time_error)
    for column in ("start_error", "end_error", "error", "time_error"):
        np.testing.assert_allclose(found.errors.stages[column], want.stages[column], atol=1e-12)
    assert found.to_dict()["largest_stage_error"] == pytest.approx(want.largest_stage_error)


def test_replicas_and_steps() -> None:
    predicted, measured = pipeline(), pipeline(1.0, 2.5)
    found = compare_traces(predicted, kernels_of(measured, replicas=3, steps=2), replicas=3)
    want = compare_timelines(predicted, measured)
    assert found.errors.runs == 2
    np.testing.assert_allclose(found.errors.activity_error, np.repeat(want.activity_error, 3))
    with pytest.raises(PerfModelError, match="6 devices measured, 2 predicted with 1 replicas"):
        compare_traces(predicted, kernels_of(measured, replicas=3))


def test_untagged_traces_match_only_in_order() -> None:
    predicted, measured = pipeline(), pipeline(1.0, 2.5)
    nothing = compare_traces(predicted, kernels_of(measured, tagged=False))
    assert nothing.matched_by == "nothing"
    assert nothing.errors.batch_time_error == pytest.approx(
        compare_timelines(predicted, measured).batch_time_error
    )
    assert np.isnan(nothing.errors.activity_error).all()
    assert nothing.to_dict()["mean_activity_error"] is None
    assert nothing.errors.stages.empty
    # as many activities as predicted: in order
    bare = timeline_trace(measured)
    bare = dataclasses.replace(
        bare, phase=np.zeros(bare.n, int), names=tuple("abcdefgh"[: len(bare.names)])
    )
    ordered = compare_traces(predicted, bare)
    assert ordered.matched_by == "order"
    np.testing.assert_allclose(
        ordered.errors.activity_error, compare_timelines(predicted, measured).activity_error
    )


def test_what_the_measurement_does_not_tell_apart_is_not_compared_apart() -> None:
    predicted, measured = pipeline(), pipeline(1.0, 2.5)
    coarse = timeline_trace(measured)
    unknown = np.full(coarse.n, -1)
    coarse = dataclasses.replace(
        coarse, micro_batch=unknown, stage=unknown, names=tuple(f"k{i}" for i in range(2))
    )
    found = compare_traces(predicted, coarse)
    assert found.matched_by == "phase"
    assert found.errors.stages[["device", "phase", "micro_batch"]].to_numpy().tolist() == [
        [0, "backward", -1],
        [0, "forward", -1],
        [1, "backward", -1],
        [1, "forward", -1],
    ]


def test_traces_of_programs_match_by_name(tmp_path: Path) -> None:
    """A simulated trace against one of other times, through their files."""
    program = distribute(
        training_step(mlp(8, (4, 8, 4), "fp32")), Degrees(pipeline=2, micro_batches=4)
    )
    prepared = program_structure(program.function)
    rng = np.random.default_rng(1)
    predicted = simulate(prepared, lambda ops: np.full(len(ops), 1e-3))
    measured = simulate(prepared, lambda ops: rng.uniform(5e-4, 2e-3, len(ops)))
    for name, timeline in (("p.json", predicted), ("m.json.gz", measured)):
        write_chrome_trace(prepared, timeline, tmp_path / name)
    traces = [read_trace("auto", [tmp_path / name]) for name in ("p.json", "m.json.gz")]
    assert traces[0].n == sum(
        event["ph"] == "X" for event in chrome_trace(prepared, predicted)["traceEvents"]
    )
    found = compare_traces(*traces)
    want = compare_timelines(predicted, measured)
    assert found.matched_by == "name"
    assert found.predicted_share == 1
    np.testing.assert_allclose(found.errors.activity_error, want.activity_error, rtol=1e-6)
    assert found.errors.largest_stage_error == pytest.approx(want.largest_stage_error, rel=1e-6)


def test_picture_of_both(tmp_path: Path) -> None:
    predicted, measured = timeline_trace(pipeline()), kernels_of(pipeline(1.0, 2.5), steps=2)
    figure = draw_comparison(predicted, measured, "title")
    panels = [axis for axis in figure.axes if axis.collections]
    assert [axis.get_title(loc="left").split(":")[0] for axis in panels] == [
        "predicted",
        "measured",
    ]
    boxes = [
        sum(len(c.get_paths()) for c in axis.collections if isinstance(c, PolyCollection))
        for axis in panels
    ]
    assert boxes == [predicted.n, measured.steps()[0].n]
    save_figure(figure, tmp_path / "both.png")
    assert (tmp_path / "both.png").read_bytes().startswith(b"\x89PNG")
