"""Assignments against all of them."""

from itertools import product

import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.planning.optimise import NothingFitsError, assign


@pytest.mark.parametrize("seed", range(6))
def test_assignment_is_the_best_of_all(seed: int) -> None:
    rng = np.random.default_rng(seed)
    seconds = rng.uniform(1e-4, 1e-3, (3, 6))
    seconds[0, 1] = np.inf
    n_bytes, capacity = rng.uniform(1e9, 2e9, 6), np.array([4e9, 4e9, 5e9])
    best = np.inf
    for at in product(range(3), repeat=6):
        held = np.bincount(at, n_bytes, minlength=3)
        if (held <= capacity).all():
            best = min(best, np.bincount(at, seconds[at, range(6)], minlength=3).max())
    if np.isinf(best):
        with pytest.raises(NothingFitsError):
            assign(seconds, n_bytes, capacity)
        return
    found = assign(seconds, n_bytes, capacity)
    assert found.value_s == pytest.approx(best, rel=1e-5)
    assert found.gap < 1e-4
    assert (np.bincount(found.device, n_bytes, minlength=3) <= capacity * (1 + 1e-6)).all()


def test_assignments_need_bytes_and_capacity_together() -> None:
    with pytest.raises(PerfModelError, match="or neither"):
        assign(np.ones((2, 3)), n_bytes=np.ones(3))
