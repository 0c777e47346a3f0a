"""Goodput, checkpoints and costs of runs are those of the table."""

from known_goodput import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/planning/known_goodput.py` and review it"


def test_goodput_is_that_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
