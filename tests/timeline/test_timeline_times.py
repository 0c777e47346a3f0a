"""Start and end of every op, and what a timeline says about devices."""

import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_cases import (
    distinct_durations,
    event_loop,
    first_path,
    pipeline_1f1b,
    structure_of,
    structures,
    tied_durations,
)

from perfmodel.errors import PerfModelError
from perfmodel.program import ProgramSpec, build
from perfmodel.timeline import compile_structure, makespan, times

PIPELINE = pipeline_1f1b(3, 5)


@given(structures(), st.integers(0, 99), st.booleans())
def test_equals_event_loop(structure, seed, tied):
    durations = tied_durations(structure, seed) if tied else distinct_durations(structure, seed)
    start, end = event_loop(structure, durations)
    timeline = times(compile_structure(structure), durations)
    np.testing.assert_array_equal(timeline.start_s, start)
    np.testing.assert_array_equal(timeline.end_s, end)
    assert timeline.critical_path().tolist() == first_path(structure, end, durations)
    assert timeline.makespan_s == makespan(compile_structure(structure), durations)


@pytest.mark.parametrize("sends", ["lag", "op", "blocking"])
def test_built_programs_equal_the_event_loop(sends):
    spec = ProgramSpec(
        schedule="interleaved",
        stages=4,
        micro_batches=8,
        chunks=2,
        sends=sends,
        grad_reduce="overlap",
    )
    structure = build(spec)
    durations = distinct_durations(structure)
    start, end = event_loop(structure, durations)
    timeline = times(structure, durations)
    np.testing.assert_array_equal(timeline.start_s, start)
    np.testing.assert_array_equal(timeline.end_s, end)


def test_a_structure_need_not_be_compiled_by_hand_and_single_precision_is_widened():
    structure = pipeline_1f1b(3, 5)
    durations = distinct_durations(structure).astype(np.float32)
    timeline = times(structure, durations)
    assert timeline.end_s.dtype == np.float64
    np.testing.assert_array_equal(timeline.end_s, event_loop(structure, durations.astype(float))[1])


def test_the_page_of_a_timeline_ends_with_its_last_event():
    timeline = times(PIPELINE, distinct_durations(PIPELINE))
    (end_s,) = re.findall(r'"end_s": ?([\d.e+-]+)', timeline.to_html())
    assert float(end_s) == timeline.makespan_s


def test_devices():
    structure = structure_of(
        [(-1, -1), (0, -1), (0, -1), (1, 2)], [1, 2, 3, 0], devices=2, device=[0, 0, 1, -1]
    )
    timeline = times(structure, np.array([0, 1.0, 2.0, 4.0]))
    assert timeline.device_busy_s().tolist() == [3.0, 4.0]
    assert timeline.idle_fraction() == pytest.approx(1 - 7 / 10)
    assert timeline.critical_path().tolist() == [0, 2, 3]
    frame = timeline.to_frame()
    assert frame.loc[2].to_dict() == {
        "device": 1,
        "stream": "compute",
        "kind": "forward",
        "stage": 0,
        "segment": 0,
        "micro_batch": -1,
        "start_s": 1.0,
        "end_s": 5.0,
    }
    assert frame.loc[3, "stream"] == ""


def test_an_empty_step_is_not_idle():
    assert times(structure_of([(-1, -1)], [0], n_classes=2), np.zeros(2)).idle_fraction() == 0


def test_bad_durations():
    with pytest.raises(PerfModelError, match="durations"):
        times(pipeline_1f1b(2, 2), np.ones(7))
