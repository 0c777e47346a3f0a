"""Work, waves and features of kernels of every family are those of the table."""

from known_physics import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/cost/known_physics.py` and review it"


def test_physics_of_every_family_is_that_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
