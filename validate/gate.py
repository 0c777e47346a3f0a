"""The gate on accuracy: the published runs before and after a change.

python validate/gate.py --data DIR [--subset] [--write]

Exit status 1 where a source is less accurate than the committed report says, beyond a tolerance.
`--subset`: a few runs of every source, of `validate/gate.json`, which `--write` renews.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
from prepared_runs import prepared

from perfmodel.ingest.tables import write_json
from perfmodel.prediction import Site
from perfmodel.validation import cases_report, predict_cases
from perfmodel.validation.rows import read_tables

HERE = Path(__file__).parent
SUBSET = HERE / "gate.json"
OF_A_SOURCE = 4
TOLERANCE = 0.005
"""Growth of an error, a fraction of the measured value, that is let pass."""
RELATIVE = 0.05
"""The same, relative to the error before."""


def main() -> None:
    """Predict the runs and compare with the committed figures, or renew the subset's."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--subset", action="store_true")
    arguments.add_argument("--write", action="store_true", help="renew the subset's figures")
    options = arguments.parse_args()
    with TemporaryDirectory() as folder:
        runs, _ = read_tables(
            prepared(sorted((options.data / "published").glob("*.csv")), Path(folder))
        )
    # Renewing chooses the runs anew and ends: there is nothing to compare them with.
    if options.write:
        chosen = subset(runs)
        write_json(
            SUBSET, {"cases": {"sources": figures(chosen)}, "runs": chosen["case_id"].tolist()}
        )
        return
    # The committed report is the state before the change.
    before = json.loads((SUBSET if options.subset else HERE / "report.json").read_text())
    if options.subset:
        runs = runs[runs["case_id"].isin(before["runs"])].reset_index(drop=True)
    complaints = worse(before["cases"]["sources"], figures(runs))
    print(
        "\n".join(complaints)
        or f"{len(runs)} published runs: no source is less accurate than before"
    )
    sys.exit(1 if complaints else 0)


def subset(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs spread evenly over every source's timed ones."""
    timed = runs[runs["measured_iter_time_s"].notna()]
    # Evenly over a source's rows, which tables sort by model and size.
    parts = [
        part.iloc[:: max(1, len(part) // OF_A_SOURCE)].head(OF_A_SOURCE)
        for _, part in timed.groupby("source")
    ]
    return pd.concat(parts, ignore_index=True)


def figures(runs: pd.DataFrame) -> dict[str, Any]:
    """Figures by source, as `cases_report` has them: rows and mean error of step times and of
    `memory`."""
    sources = cases_report(runs, predict_cases(runs, site_of=Site.without))["sources"]
    by_source = {}
    for name, figures_of_source in sources.items():
        memory = figures_of_source["memory"]
        by_source[name] = {
            "n": figures_of_source["n"],
            "mean_ape": figures_of_source["mean_ape"],
            "memory": {"n": memory["n"], "mean_ape": memory["mean_ape"]},
        }
    return by_source


def worse(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Sentences on what became less accurate; both arguments hold figures by source (`figures`).

    Compared are the mean errors of step times and of peak memory, on the same rows: a source whose
    rows have become fewer is named too.
    """
    complaints = []
    old = dict(_errors(before))
    new = dict(_errors(after))
    for name, (old_rows, old_error) in old.items():
        if name not in new:
            complaints.append(f"{name}: no longer predicted ({old_rows} rows before)")
            continue
        rows, error = new[name]
        # An error over fewer rows is no gain: the hardest may be those that are missing.
        if rows < old_rows:
            complaints.append(f"{name}: {rows} rows predicted, {old_rows} before")
        elif error > old_error + max(TOLERANCE, RELATIVE * old_error):
            complaints.append(f"{name}: mean error {error:.1%}, {old_error:.1%} before")
    return complaints


def _errors(sources: dict[str, Any]) -> Iterator[tuple[str, tuple[int, float]]]:
    """Yield the name of a source and its quantity, with its number of rows and mean error."""
    for source, times in sources.items():
        for quantity, errors in (("step time", times), ("peak memory", times["memory"])):
            # A source that measured no memory has no error of it.
            if errors["n"]:
                yield f"{source}, {quantity}", (errors["n"], errors["mean_ape"])


if __name__ == "__main__":
    main()
