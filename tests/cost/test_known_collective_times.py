"""The physics of collectives, without any fitted constant, is that of the table."""

from known_collective_times import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/cost/known_collective_times.py` and review it"


def test_collectives_take_the_times_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
