"""What is read of each column and each kind of words of a published row is what the table says."""

from known_rows import TABLE, cases
from stored_figures import moved_figures

MEANT = "if it is meant, run `PYTHONPATH=tests:tests/validation python tests/validation/known_rows.py` and review it"


def test_rows_are_read_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
