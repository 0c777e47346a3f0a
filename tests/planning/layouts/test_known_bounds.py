"""The bound of a search is as close to the step time as it was when it was last looked at."""

import pytest
from known_bounds import read, shares

MEANT = "if the change is meant, run `python tests/planning/layouts/known_bounds.py` and review the difference"


def test_bounds_are_as_close_as_the_table_says() -> None:
    now, then = shares(), read()
    assert now.keys() == then.keys(), MEANT
    assert max(map(max, now.values())) <= 1 + 1e-5
    moved = {
        layout: (shares_now, then[layout])
        for layout, shares_now in now.items()
        if shares_now != pytest.approx(then[layout], abs=5e-4)
    }
    assert not moved, f"{len(moved)} of {len(now)} moved, {next(iter(moved.items()))}; {MEANT}"
