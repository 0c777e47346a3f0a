"""Formulas, quantities and robustness are those of the table."""

from known_goals import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/planning/layouts/known_goals.py` and review it"
SINGLE_PRECISION = 1e-5
"""Steps are evaluated in float32."""


def test_goals_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE, SINGLE_PRECISION)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
