"""The gate on accuracy: the published runs before and after a change.

python validate/gate.py --data DIR [--subset] [--write]

Exit status 1 where a source is less accurate than the committed report says (`validate/studies/gate.py` has the
tolerance). Kernel families are reported by `make validate`, which takes longer. `--subset`:
a few runs of every source, of `validate/gate.json`, which `--write` renews.
"""

import argparse
import json
import sys
from pathlib import Path

import pandas as pd
from studies.gate import worse

from perfmodel.ingest.tables import write_json
from perfmodel.prediction import Site
from perfmodel.validation import cases_report, predict_cases, read_tables

HERE = Path(__file__).parent
SUBSET = HERE / "gate.json"
OF_A_SOURCE = 4


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--subset", action="store_true")
    arguments.add_argument("--write", action="store_true", help="renew the subset's figures")
    asked = arguments.parse_args()
    runs, _ = read_tables(sorted((asked.data / "published").glob("*.csv")))
    if asked.write:
        chosen = subset(runs)
        write_json(SUBSET, figures(chosen) | {"runs": chosen["case_id"].tolist()})
        return
    before = json.loads((SUBSET if asked.subset else HERE / "report.json").read_text())
    if asked.subset:
        runs = runs[runs["case_id"].isin(before["runs"])].reset_index(drop=True)
    told = worse({"cases": before["cases"], "kernels": {}}, figures(runs))
    print("\n".join(told) or f"{len(runs)} published runs: no source is less accurate than before")
    sys.exit(1 if told else 0)


def subset(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs spread evenly over every source's timed ones."""
    timed = runs[runs["measured_iter_time_s"].notna()]
    parts = [part.iloc[:: max(1, len(part) // OF_A_SOURCE)].head(OF_A_SOURCE) for _, part in timed.groupby("source")]
    return pd.concat(parts, ignore_index=True)


def figures(runs: pd.DataFrame) -> dict:
    """As `validate/report.json`, of published runs alone."""
    sources = cases_report(runs, predict_cases(runs, site_of=Site.without))["sources"]
    kept = ("n", "mean_ape")
    return {
        "cases": {
            "sources": {
                name: {key: of[key] for key in kept} | {"memory": {key: of["memory"][key] for key in kept}}
                for name, of in sources.items()
            }
        },
        "kernels": {},
    }


if __name__ == "__main__":
    main()
