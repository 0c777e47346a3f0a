"""Activations alive at a device's peak, against a walk through its order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.schedule import Phase, get_schedule
from perfmodel.schedule.memory import alive_at_peak, in_flight, peak_live


@pytest.mark.parametrize(
    ("name", "p", "m", "v"), [("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved", 4, 8, 2)]
)
def test_alive_at_peak_matches_a_walk(name, p, m, v):
    schedule = get_schedule(name)(p, m, v)
    alive = alive_at_peak(schedule)
    for device in range(p):
        held, best = np.zeros(v, int), np.zeros(v, int)
        for i in range(schedule.offsets[device], schedule.offsets[device + 1]):
            held[schedule.chunk[i]] += 1 if schedule.phase[i] == Phase.FORWARD else -1
            best = held.copy() if held.sum() > best.sum() else best
        assert alive[device].tolist() == best.tolist()
    assert (alive <= in_flight(schedule)).all()
    assert alive.sum(axis=1).tolist() == peak_live(schedule, np.ones(p * v)).tolist()


@given(st.integers(1, 8), st.integers(1, 20), st.integers(2, 3))
def test_micro_batches_in_flight_are_as_the_schedules_papers_say(p, m, v):
    """GPipe keeps all; 1F1B p - r on rank r, fewer where the step has fewer (PipeDream-Flush, arXiv
    2006.09503); interleaved 2 (p - r - 1) + (v - 1) p + 1 chunks (Megatron-LM's warm-up, arXiv
    2104.04473); ZB-H1 no more than 1F1B holds on its first rank (Zero Bubble, arXiv 2401.10241,
    section 4)."""
    held = {
        name: alive_at_peak(get_schedule(name)(p, m, 1)).sum(axis=1)
        for name in ("gpipe", "1f1b", "zb-h1")
    }
    ranks = np.arange(p)
    assert held["gpipe"].tolist() == [m] * p
    assert held["1f1b"].tolist() == np.minimum(p - ranks, m).tolist()
    assert held["zb-h1"].max() <= min(p, m)
    if p > 1:
        chunks = alive_at_peak(get_schedule("interleaved")(p, m * p, v)).sum(axis=1)
        assert (
            chunks.tolist() == np.minimum(2 * (p - ranks - 1) + (v - 1) * p + 1, m * p * v).tolist()
        )
