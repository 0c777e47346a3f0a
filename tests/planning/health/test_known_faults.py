"""Faults that a layout can have lengthen its step as the table says."""

from known_faults import TABLE, cases
from stored_figures import moved_figures

MEANT = "if it is meant, run `PYTHONPATH=tests python tests/planning/health/known_faults.py`"


def test_faults_lengthen_steps_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
