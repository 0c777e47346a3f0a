"""The source and submitter of rows in tables of runs."""

import re
from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from perfmodel.prediction.sites.constants import source_of_submitter

_SUBMISSION: Final = re.compile(r"training_results_v[^:\s]*:(?P<submitter>[^/\s]+)/")
"""Address of a submission to MLPerf: repository of a round, commit, folder of the submitter."""


def source_of_run(row: Mapping[Any, Any]) -> str:
    """The source of a row, with the submitter if that team has other sources, too."""
    return source_of_submitter(str(row["source"]), submitter_of(row))


def submitter_of(row: Mapping[str, Any]) -> str:
    """The submitter of a benchmark run, by its column, else by the submission's address."""
    # A column of its own wins. Else the address of an MLPerf submission names the submitter's
    # folder, in which teams that submitted together are joined by an underscore.
    stated = row.get("submitter")
    if isinstance(stated, str) and stated:
        return stated
    address = row.get("url_or_repo")
    match = _SUBMISSION.search(address) if isinstance(address, str) else None
    return match["submitter"].replace("_", "+") if match else ""


def drawn_of_sources(runs: pd.DataFrame, limit: int) -> pd.DataFrame:
    """Draw a limited number of rows from each source, with seed 0; rows keep their index."""
    return pd.DataFrame(
        runs.groupby("source").sample(frac=1, random_state=0).groupby("source").head(limit)
    )


def with_submitters(runs: pd.DataFrame) -> pd.DataFrame:
    """Replace each run's `source` by `source_of_run`."""
    return runs.assign(source=[source_of_run(row) for row in runs.to_dict("records")])
