"""What the factors of named frameworks are worth: errors of published runs without them, in
`factors.json`.

    python validate/factors.py --data DIR

Naming a framework tells what it does, and multiplies times by the factors of its median site
(`perfmodel/prediction/sites/population.md`). Here it tells what the framework does alone, for the
runs that the report also predicts as `generic`, which tells neither.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from prepared_runs import prepared
from studies.record import MOST_GENERIC

from perfmodel.display import progress
from perfmodel.ingest.tables import write_text
from perfmodel.prediction import Site
from perfmodel.prediction.sites import NEUTRAL
from perfmodel.validation import cases_report, drawn_of_sources, predict_cases
from perfmodel.validation.rows import read_tables

HERE = Path(__file__).parent


def without_factors(source: str) -> Site:
    """Site constants fitted without a source's teams, with no factor for the framework's name."""
    return replace(Site.without(source), population=NEUTRAL)


def main() -> None:
    """Predict the runs that the report predicts as `generic`, and write the errors."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--data", type=Path, required=True)
    options = arguments.parse_args()
    with progress("runs") as report, TemporaryDirectory() as folder:
        files = sorted((options.data / "published").glob("*.csv"))
        runs, _ = read_tables(prepared(files, Path(folder)))
        # The same runs as the report's `generic`, or the two could not be compared.
        sample = drawn_of_sources(runs, MOST_GENERIC).reset_index(drop=True)
        predicted = predict_cases(sample, None, report, site_of=without_factors)
    figures = {"over_sources": cases_report(sample, predicted)["over_sources"]}
    write_text(HERE / "factors.json", json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
