"""Steps on changed machines are those of the table."""

from known_machines import TABLE, cases
from stored_figures import moved_figures

MEANT = (
    "if it is meant, run `PYTHONPATH=tests python tests/planning/known_machines.py` and review it"
)


def test_changed_machines_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
