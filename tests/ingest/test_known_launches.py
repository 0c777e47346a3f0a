"""What is read from each of the launch files of the tests is what the table says."""

from known_launches import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/ingest/known_launches.py` and review it"


def test_launch_files_are_read_as_the_table_says() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
