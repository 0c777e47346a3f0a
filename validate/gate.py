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
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--subset", action="store_true")
    arguments.add_argument("--write", action="store_true", help="renew the subset's figures")
    asked = arguments.parse_args()
    with TemporaryDirectory() as folder:
        runs, _ = read_tables(
            prepared(sorted((asked.data / "published").glob("*.csv")), Path(folder))
        )
    if asked.write:
        chosen = subset(runs)
        write_json(
            SUBSET, {"cases": {"sources": figures(chosen)}, "runs": chosen["case_id"].tolist()}
        )
        return
    before = json.loads((SUBSET if asked.subset else HERE / "report.json").read_text())
    if asked.subset:
        runs = runs[runs["case_id"].isin(before["runs"])].reset_index(drop=True)
    told = worse(before["cases"]["sources"], figures(runs))
    print("\n".join(told) or f"{len(runs)} published runs: no source is less accurate than before")
    sys.exit(1 if told else 0)


def subset(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs spread evenly over every source's timed ones."""
    timed = runs[runs["measured_iter_time_s"].notna()]
    parts = [
        part.iloc[:: max(1, len(part) // OF_A_SOURCE)].head(OF_A_SOURCE)
        for _, part in timed.groupby("source")
    ]
    return pd.concat(parts, ignore_index=True)


def figures(runs: pd.DataFrame) -> dict[str, Any]:
    """By source, as `cases_report` has them: rows and mean error of step times, and of `memory`."""
    sources = cases_report(runs, predict_cases(runs, site_of=Site.without))["sources"]
    kept = ("n", "mean_ape")
    return {
        name: {key: of[key] for key in kept} | {"memory": {key: of["memory"][key] for key in kept}}
        for name, of in sources.items()
    }


def worse(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """What became less accurate, in words; both by source as `figures` has them.

    Compared are the mean errors of step times and of peak memory, on the same rows: a source whose
    rows have become fewer is named too.
    """
    told = []
    old, new = dict(_errors(before)), dict(_errors(after))
    for name, (n, error) in old.items():
        if name not in new:
            told.append(f"{name}: no longer predicted ({n} rows before)")
        elif new[name][0] < n:
            told.append(f"{name}: {new[name][0]} rows predicted, {n} before")
        elif new[name][1] > error + max(TOLERANCE, RELATIVE * error):
            told.append(f"{name}: mean error {new[name][1]:.1%}, {error:.1%} before")
    return told


def _errors(sources: dict[str, Any]) -> Iterator[tuple[str, tuple[int, float]]]:
    """(what, (rows, mean error))."""
    for source, of_times in sources.items():
        for what, of in (("step time", of_times), ("peak memory", of_times["memory"])):
            if of["n"]:
                yield f"{source}, {what}", (of["n"], of["mean_ape"])


if __name__ == "__main__":
    main()
