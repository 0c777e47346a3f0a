"""Memory and bounds of grids of layouts are those of the table."""

from known_grids import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/prediction/known_grids.py` and review it"


def test_grids_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
