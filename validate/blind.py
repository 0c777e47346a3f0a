"""The blind record: what every source was predicted to take before anything was changed for it,
beside today.

python validate/blind.py --data DIR [--record | --first-looks] [--sources PATTERN]

Reads the collections of DIR (folders `published2`, `published3` ...). `--record` predicts the
sources that have no first look yet and keeps the answers with the commit in validate/blind; it
never changes what is recorded. Without it every source is predicted as today, with the settings
that its notes state and its teams left out of all that is fitted, and validate/blind/README.md and
blind.json say how that compares with the first look; some minutes. `--first-looks` predicts nothing
and writes them without today's figures. `--sources` prints the page for some sources only.
"""

import argparse
import json
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path

import numpy as np
from studies.blind_record import (
    FOLDER,
    KnownSources,
    Look,
    blind_figures,
    blind_page,
    collections,
    commit_of_package,
    not_predicted,
    predicted_today,
    record_first_looks,
    recorded_looks,
    runs_of,
)

from perfmodel.display import progress
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_text
from perfmodel.prediction import Site
from perfmodel.validation import predict_cases


def main() -> None:
    """Record first looks or score them, as the options say."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument(
        "--record", action="store_true", help="record sources that have no first look"
    )
    arguments.add_argument(
        "--first-looks", action="store_true", help="leave out today's predictions"
    )
    arguments.add_argument(
        "--sources", default="*", help="pattern of the sources to print, such as 'MLPerf*'"
    )
    options = arguments.parse_args()
    folders = collections(options.data)
    if not folders:
        raise SystemExit(f"{options.data}: no collection of runs beside the first one")
    try:
        if options.record:
            record(folders)
        else:
            score(folders, options.sources, predicts=not options.first_looks)
    except PerfModelError as error:
        raise SystemExit(str(error)) from None


def record(folders: Sequence[Path]) -> None:
    """Record first looks at all sources that have none."""
    # A look is worth something only with the code that gave it: the commit is kept beside it.
    commit = commit_of_package(FOLDER.parents[1])
    for folder in folders:
        new, late = record_first_looks(folder.name, runs_of(folder), commit, predict_cases)
        print(
            f"{folder.name}: {len(new)} sources recorded at {commit}"
            + "".join(f"\n  {name}" for name in new)
        )
        if late:
            print(
                f"  {len(late)} rows came after their source's first look and stay without one: {', '.join(late)}"
            )


def score(folders: Sequence[Path], pattern: str, predicts: bool) -> None:
    """Predict everything as today, where that is asked for, and write the page; with a pattern of
    sources only print it."""
    known = KnownSources.read()
    first = []
    today = []
    all_looks = []
    with progress("runs") as report:
        for folder in folders:
            runs = runs_of(folder)
            looks = recorded_looks(folder.name)
            # Rows without a first look have nothing to be compared with.
            is_recorded = runs["case_id"].isin(set(looks["case_id"]))
            matches = np.array([fnmatchcase(str(source), pattern) for source in runs["source"]])
            runs = runs[is_recorded & matches].reset_index(drop=True)
            if runs.empty:
                continue
            looks_of_runs = looks.set_index("case_id").loc[runs["case_id"]].reset_index()
            first.append(Look.of(runs, looks_of_runs))
            # A source is predicted by constants that were fitted without its teams.
            if predicts:
                predict = partial(predict_cases, progress=report, site_of=Site.without)
                today.append(predicted_today(runs, predict))
            else:
                today.append(Look.of(runs, not_predicted(runs)))
            all_looks.append(looks_of_runs)
    if not first:
        raise PerfModelError(
            f"no recorded source matches {pattern!r}; record new ones with --record"
        )
    now = Look.joined(today)
    figures = blind_figures(Look.joined(first), now, known)
    page = blind_page(figures, all_looks, now, known)
    # A page of some sources only is for reading; it would overwrite that of all of them.
    if pattern == "*":
        write_text(FOLDER / "README.md", page)
        write_text(FOLDER / "blind.json", json.dumps(figures, indent=1) + "\n")
    print(page)


if __name__ == "__main__":
    main()
