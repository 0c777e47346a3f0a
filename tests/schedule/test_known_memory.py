"""What every schedule keeps alive is what the table says."""

from known_memory import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/schedule/known_memory.py` and review it"


def test_memory_of_every_schedule_is_that_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
