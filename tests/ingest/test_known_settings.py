"""What is read of each setting of each format of launch files is what the table says."""

from known_settings import TABLE, cases
from stored_figures import moved_figures

MEANT = "if it is meant, run `PYTHONPATH=tests:tests/ingest python tests/ingest/known_settings.py` and review it"


def test_settings_are_read_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
