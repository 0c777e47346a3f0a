"""Peak memory of published runs, and whether they were told to fit.

python validate/memory.py --data DIR [--most N] [--collection NAME] [--out TABLE.csv]

Reads the collections of DIR (folders `published*`), what notes state made columns, and predicts at
most N rows of every source, spread evenly over it, with the source's teams left out of all that is
fitted. Prints for each collection the error of peak memory by source and software, over rows with a
measured peak, and over those of them that say all that decides it; and of the probability to fit
the Brier score and reliability. `--out` keeps the predictions.
"""

import argparse
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pandas as pd
from prepared_runs import prepared
from studies.blind_record import UNLIKELY, WITHOUT_A_LOOK, KnownSources, collections
from studies.tables import percent, rows_table

from perfmodel.display import progress
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Site
from perfmodel.validation import memory_bytes, predict_cases
from perfmodel.validation.rows import read_tables
from perfmodel.validation.unstated import OPEN_CHOICES

MOST = 60
"""Rows of a source that are predicted unless --most says otherwise: some sweeps have thousands."""
OUTCOMES = {"ok": True, "oom": False, "oom_or_crash": False}
"""Whether a run of a status fitted into memory."""
TAKE_NO_MEMORY = frozenset(choice.name for choice in OPEN_CHOICES if not choice.takes_memory)
"""Open choices of runs that move their step time alone."""
EDGES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
"""Ranges of probabilities in the table of reliability."""


def main() -> None:
    """Predict each collection's rows and print its page."""
    arguments = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--most", type=int, default=MOST, help="rows of a source")
    arguments.add_argument("--collection", help="this one alone, such as published2")
    arguments.add_argument("--out", type=Path, help="CSV file for the predictions")
    options = arguments.parse_args()
    folders = [options.data / WITHOUT_A_LOOK, *collections(options.data)]
    # Each collection is printed as soon as it is predicted.
    tables = []
    try:
        for folder in folders:
            if options.collection in (None, folder.name):
                table = predicted_memory(sorted(folder.glob("*.csv")), options.most)
                print(f"# {folder.name}\n\n{memory_page(table)}\n")
                tables.append(table.assign(collection=folder.name))
    except PerfModelError as error:
        raise SystemExit(str(error)) from None
    if options.out and tables:
        pd.concat(tables, ignore_index=True).to_csv(options.out, index=False)


def predicted_memory(files: Sequence[Path], most: int) -> pd.DataFrame:
    """Predict the rows of tables that ran, or ran out of memory.

    Returns:
        Columns `case_id`, `source`, `framework`, `measured_bytes` (NaN if not measured),
        `peak_bytes`, `fits_probability`, `ran`, `assumed` and `says_all` (`says_all_of_memory`);
        rows that cannot be predicted are left out.
    """
    with TemporaryDirectory() as folder:
        runs, _ = read_tables(prepared(files, Path(folder)))
    # Runs that ended otherwise (errors, time limits) say nothing of memory.
    runs = runs[runs["status"].isin(OUTCOMES)].reset_index(drop=True)
    runs = spread_rows(runs, most)
    with progress("runs") as report:
        predicted = predict_cases(runs, None, report, site_of=Site.without)
    table = pd.DataFrame(
        {
            "case_id": runs["case_id"],
            "source": runs["source"],
            "framework": runs["framework"].fillna("unnamed"),
            "measured_bytes": memory_bytes(runs),
            "peak_bytes": pd.to_numeric(predicted["predicted_peak_memory_bytes"]),
            "fits_probability": pd.to_numeric(predicted["fits_probability"]),
            "ran": runs["status"].map(OUTCOMES),
            "assumed": predicted["assumed"],
            "says_all": [
                says_all_of_memory(assumed) for assumed in predicted["assumed"].fillna("")
            ],
        }
    )
    return pd.DataFrame(table[table["fits_probability"].notna()]).reset_index(drop=True)


def says_all_of_memory(assumed: str) -> bool:
    """Whether a row states everything that decides the run's memory.

    Args:
        assumed: what was assumed of it, as `predict_cases` lists it: names, with what they do to
            the step time.
    """
    # That a run needs more memory than there is, is said by the prediction, and not by the run. It
    # comes last.
    left_open = assumed.partition("memory: ")[0]
    names = {
        re.split(r" \(|: ", assumption)[0] for assumption in left_open.split(", ") if assumption
    }
    return names <= TAKE_NO_MEMORY


def spread_rows(runs: pd.DataFrame, most: int) -> pd.DataFrame:
    """At most a given number of rows of every source, spread evenly over those with a measured peak
    and over the others."""
    # Rows without a peak still say whether the run fitted, and are drawn beside the others.
    has_peak = np.isfinite(memory_bytes(runs))
    chosen = []
    for _, rows in runs.groupby([runs["source"], has_peak], sort=False):
        places = np.unique(np.linspace(0, len(rows) - 1, min(most, len(rows))).astype(int))
        chosen.append(rows.iloc[places])
    return pd.concat(chosen).sort_index().reset_index(drop=True)


def memory_page(table: pd.DataFrame) -> str:
    """The figures of a collection as Markdown."""
    peaks = table[table["ran"] & table["measured_bytes"].notna()]
    unlikely = table[table["ran"] & (table["fits_probability"] < UNLIKELY)]
    # Mean errors are over groups: a sweep of thousands of rows is one of them.
    parts = [
        "Peak memory, by source and software:",
        memory_table(memory_errors(peaks)),
        f"Mean over these: {_mean_error(peaks)}; over rows that say all that decides memory: "
        f"{_mean_error(peaks[peaks['says_all']])}.",
        f"Brier score of the probability to fit: {brier_score(table):.4f}; "
        f"mean over sources {brier_over_sources(table):.4f}.",
        reliability_table(table),
        f"Runs that ran, though told to fit with less than {UNLIKELY}: {len(unlikely)}.",
        *unlikely_lines(unlikely),
    ]
    return "\n\n".join(parts)


def unlikely_lines(unlikely: pd.DataFrame) -> list[str]:
    """Lines on runs that ran although predicted not to fit, with the reason where it is known."""
    known = KnownSources.read()
    lines = []
    for case_id, probability in zip(unlikely["case_id"], unlikely["fits_probability"], strict=True):
        lines.append(
            f"- {case_id} ({probability:.3f}): {known.why_not_to_fit(case_id) or 'not known'}"
        )
    return ["\n".join(lines)] if lines else []


def memory_errors(peaks: pd.DataFrame) -> pd.DataFrame:
    """`runs`, mean relative `error` and `bias` of peak memory by source and software."""
    relative = peaks["peak_bytes"] / peaks["measured_bytes"] - 1
    groups = [peaks["source"], peaks["framework"]]
    columns = {
        "runs": relative.groupby(groups).size(),
        "error": relative.abs().groupby(groups).mean(),
    }
    return pd.DataFrame(columns | {"bias": relative.groupby(groups).mean()})


def memory_table(errors: pd.DataFrame) -> str:
    """Format errors as a Markdown table, largest first."""
    rows = []
    for (source, framework), figures in errors.sort_values("error", ascending=False).iterrows():  # pyright: ignore[reportGeneralTypeIssues]
        rows.append(
            (
                source,
                framework,
                int(figures["runs"]),
                percent(figures["error"]),
                f"{100 * figures['bias']:+.1f} %",
            )
        )
    return rows_table(("source", "software", "runs", "mean error", "bias"), rows)


def brier_score(table: pd.DataFrame) -> float:
    """Mean squared distance between the predicted probability to fit and the outcome (Brier
    score)."""
    return float(_squared_distance(table).mean())


def brier_over_sources(table: pd.DataFrame) -> float:
    """The Brier score with equal weight by source."""
    return float(_squared_distance(table).groupby(table["source"]).mean().mean())


def reliability_table(table: pd.DataFrame) -> str:
    """Share of runs that ran, by their predicted probability to fit."""
    # Narrow ranges at both ends, where a probability says most.
    ranges = pd.cut(table["fits_probability"], EDGES, include_lowest=True)
    rows = []
    for probabilities, members in table.groupby(ranges, observed=True):
        # The lowest range is open below by pandas' rule, and begins at -0.001.
        low, high = max(probabilities.left, 0), probabilities.right  # pyright: ignore[reportAttributeAccessIssue]
        mean_probability = members["fits_probability"].mean()
        share_that_ran = members["ran"].mean()
        rows.append(
            (
                f"{low:.2f} to {high:.2f}",
                len(members),
                percent(mean_probability),
                percent(share_that_ran),
            )
        )
    return rows_table(("probability", "runs", "mean", "ran"), rows)


def _squared_distance(table: pd.DataFrame) -> pd.Series:
    """Squared distance of each run's probability to fit from 1 if it ran, else from 0."""
    return (table["fits_probability"] - table["ran"].astype(float)) ** 2


def _mean_error(peaks: pd.DataFrame) -> str:
    """The mean over groups of their mean errors, so that long sweeps count no more than others."""
    errors = memory_errors(peaks)
    return (
        f"{percent(errors['error'].mean())} ({len(errors)} groups, {len(peaks)} rows)"
        if len(errors)
        else "none"
    )


if __name__ == "__main__":
    main()
