"""Memory by live ranges against adding up who holds what at every instant."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from timeline_cases import distinct_durations, structure_of, structures, tied_durations

from perfmodel.errors import PerfModelError
from perfmodel.program import Kind, ProgramSpec, build
from perfmodel.timeline import memory, times

CLASS_BYTES = np.array([0.0, 10.0, 200.0, 3000.0])


@given(structures(), st.integers(0, 99), st.booleans())
def test_equals_brute_force(structure, seed, tied):
    durations = tied_durations(structure, seed) if tied else distinct_durations(structure, seed)
    timeline = times(structure, durations)
    static = np.arange(1.0, structure.devices + 1)
    result = memory(timeline, CLASS_BYTES, static)
    for device, steps in enumerate(result.steps):
        assert (np.diff(steps.time_s) >= 0).all()
        here = structure.device == device
        for instant in np.unique(np.r_[timeline.start_s, timeline.end_s]):
            taken = CLASS_BYTES[structure.alloc[here & (timeline.start_s <= instant)]].sum()
            given_back = CLASS_BYTES[structure.free[here & (timeline.end_s <= instant)]].sum()
            last = np.flatnonzero(steps.time_s <= instant)[-1]
            assert steps.in_use_bytes[last] == static[device] + taken - given_back
        assert result.peak_bytes[device] == steps.in_use_bytes.max()


def test_what_ends_makes_room_for_what_starts():
    structure = structure_of([(-1, -1), (0, -1)], [1, 1], alloc=[1, 1], free=[1, 1])
    result = memory(times(structure, np.array([0, 1.0])), np.array([0, 8.0]), np.array([1.0]))
    assert result.peak_bytes.tolist() == [9.0]
    assert result.steps[0].time_s.tolist() == [0, 0, 1, 1, 2]
    assert result.steps[0].in_use_bytes.tolist() == [1, 9, 1, 9, 1]


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_micro_batches_in_flight(schedule):
    """GPipe holds all m; 1F1B holds p - s on stage s (Megatron SC21, section 2.2)."""
    stages, micro_batches = 4, 10
    structure = build(ProgramSpec(schedule=schedule, stages=stages, micro_batches=micro_batches))
    durations = np.where(np.isin(structure.class_kind, (Kind.FORWARD, Kind.BACKWARD)), 1.0, 0.0)
    result = memory(times(structure, durations), np.ones(stages + 1), np.zeros(stages))
    in_flight = [micro_batches] * stages if schedule == "gpipe" else [4, 3, 2, 1]
    assert result.peak_bytes.tolist() == in_flight
    assert [steps.in_use_bytes[-1] for steps in result.steps] == [0] * stages


def test_bad_input():
    structure = structure_of([(-1, -1)], [1], alloc=[2])
    timeline = times(structure, np.array([0, 1.0]))
    with pytest.raises(PerfModelError, match="class_bytes needs 3 entries"):
        memory(timeline, np.ones(2), np.ones(1))
    with pytest.raises(PerfModelError, match="one entry for each of 1 devices"):
        memory(timeline, np.ones(3), np.ones(2))
    homeless = dataclasses.replace(
        timeline, structure=dataclasses.replace(structure, stream=np.array([-1]))
    )
    with pytest.raises(PerfModelError, match="op 0 allocates or frees memory but has no device"):
        memory(homeless, np.ones(3), np.ones(1))
