"""What is read from the logs of every format is what the table says."""

from known_logs import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests:tests/ingest python tests/ingest/known_logs.py` and review it"


def test_logs_of_every_format_are_read_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
