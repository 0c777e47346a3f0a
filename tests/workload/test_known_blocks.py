"""Blocks of models of every kind are those of the table as it was last written."""

from known_blocks import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/workload/known_blocks.py` and review it"


def test_blocks_of_every_kind_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
