"""Activations alive at a device's peak, against a walk through its order."""

import numpy as np
import pytest

from perfmodel.schedule import Phase, alive_at_peak, get_schedule, in_flight, peak_live


@pytest.mark.parametrize(("name", "p", "m", "v"), [("1f1b", 4, 8, 1), ("gpipe", 3, 5, 1), ("interleaved", 4, 8, 2)])
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
