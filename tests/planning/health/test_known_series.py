"""Step times of drawn logs are taken apart as the table says."""

from known_series import TABLE, cases
from stored_figures import moved_figures

MEANT = "if the change is meant, run `PYTHONPATH=tests:tests/ingest python tests/planning/health/known_series.py`"


def test_series_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"
