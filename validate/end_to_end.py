"""End-to-end calibration held against runs that it did not see: writes validate/end_to_end.md.

python validate/end_to_end.py --data DIR

A third of a source's runs (or one model, or one cluster size) is fitted; errors are those of the
other runs.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
from prepared_runs import prepare
from studies.tables import rows_table

from perfmodel.calibration import EndToEnd, Run, calibrate_end_to_end
from perfmodel.ingest.tables import write_text
from perfmodel.prediction import Site, explain, step_problem
from perfmodel.validation import read_runs

HERE = Path(__file__).parent
SEEDS = 3
MOST = 240
"""Runs of a source that are drawn (seed 0) where it has more."""
SOURCES = {  # table, pattern of its case_id
    "vTrain, one node": ("vtrain.csv", "vtrain-single"),
    "llm-foundry": ("llm_foundry.csv", ""),
    "Megatron-LM": ("megatron.csv", ""),
    "NVIDIA NeMo, H100": ("nemo_bridge.csv", "^nemo-"),
    "Ultra-Scale Playbook, pp 1": ("ultrascale_playbook.csv", "-pp1-"),
}
HEAD = """# End-to-end calibration

Made by `python validate/end_to_end.py --data DIR`: fitted to one part of the runs, errors in per cent on the others.
"""


def main() -> None:
    """Fit parts of each source's runs, predict the others, and write the page."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    data = arguments.parse_args().data / "published"

    # vTrain on several nodes has runs enough to ask what a fit is worth beyond what it saw: for
    # other models, other sizes of clusters, deeper pipelines.
    multi = runs_of(data / "vtrain.csv", "vtrain-multi")
    folds = {
        f"random thirds, {SEEDS} seeds": thirds(multi, SEEDS),
        "one model": one_against_rest([run.model.name for run in multi]),
        "one cluster size": one_against_rest([run.layout.devices for run in multi]),
        "pp up to 4, or above": one_against_rest([run.layout.pp > 4 for run in multi]),
    }
    rows = [
        figures(f"vTrain, several nodes: fitted {name}", multi, splits)
        for name, splits in folds.items()
    ]
    for name, (file, pattern) in SOURCES.items():
        runs = runs_of(data / file, pattern)
        print(name, len(runs), flush=True)
        rows.append(figures(f"{name}: fitted random thirds", runs, thirds(runs, 1)))
    lines = [HEAD, table(rows), "", worst(multi), "", parameters(multi)]
    write_text(HERE / "end_to_end.md", "\n".join(lines))
    print((HERE / "end_to_end.md").read_text())


def runs_of(file: Path, pattern: str) -> list[Run]:
    """Timed runs of a table whose id has a pattern, at a site fitted without their source."""
    # Rows without a measured step cannot be fitted, nor tell an error.
    frame = prepare(pd.read_csv(file, low_memory=False))
    frame = frame[frame["case_id"].str.contains(pattern) & frame["measured_iter_time_s"].notna()]
    if len(frame) > MOST:
        frame = frame.sample(MOST, random_state=0)
    # Constants of a site must not have been fitted to the runs that are predicted here.
    source = {row.case_id: row.source for row in frame.itertuples()}
    return [replace(run, site=Site.without(str(source[run.name]))) for run in read_runs(frame)[0]]


def thirds(runs: Sequence[Run], seeds: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices of a random third of runs, which is fitted, and of the others, three times a seed."""
    for seed in range(seeds):
        order = np.random.default_rng(seed).permutation(len(runs))
        yield from ((order[k::3], np.setdiff1d(order, order[k::3])) for k in range(3))


def one_against_rest(keys: Sequence[object]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Indices of the runs of one key, which are fitted, and of the others, for every key."""
    labels = np.array([str(key) for key in keys])
    yield from (
        (np.flatnonzero(labels == key), np.flatnonzero(labels != key)) for key in np.unique(labels)
    )


def predicted(run: Run, fitted: dict[str, EndToEnd]) -> tuple[float, float]:
    """Relative error of a run's prediction, and whether its interval covers the measured time (1 or
    0)."""
    model = step_problem(run.model, run.cluster, run.job, None, run.framework, run.site)
    device = run.cluster.device.name
    if device in fitted:
        model = model.adjusted(fitted[device].adjustment)
    explanation = explain(model, run.layout)
    inside = explanation.step_time_lo_s <= run.measured_s <= explanation.step_time_hi_s
    return explanation.step_time_s / run.measured_s - 1, float(inside)


def figures(
    name: str, runs: list[Run], splits: Iterator[tuple[np.ndarray, np.ndarray]]
) -> dict[str, object]:
    """Means over splits of the errors on what was not fitted."""
    # Without a fit a prediction is the same in all splits.
    before = np.array([predicted(run, {}) for run in runs])
    # By split: (before and after, [mean error, median error, share inside the interval]).
    by_split = []
    for fit, rest in splits:
        fitted = calibrate_end_to_end([runs[i] for i in fit])
        after = np.array([predicted(runs[i], fitted) for i in rest])
        by_split.append([_error_figures(before[rest]), _error_figures(after)])
    means = np.array(by_split).mean(axis=0)
    return {"runs": name, "n": len(runs), "before": means[0], "after": means[1]}


class ErrorFigures(NamedTuple):
    """Relative errors of the predictions of some runs."""

    mean_error: float
    median_error: float
    inside: float
    """Share of the runs inside their 90 % intervals."""


def _error_figures(errors: np.ndarray) -> ErrorFigures:
    """Means over runs of what `predicted` returns for each."""
    absolute = np.abs(errors[:, 0])
    return ErrorFigures(absolute.mean(), float(np.median(absolute)), errors[:, 1].mean())


def table(rows: list[dict]) -> str:
    """The figures before and after the fit side by side, in per cent, as Markdown."""
    head = (
        "runs",
        "n",
        "mean before",
        "mean after",
        "median before",
        "median after",
        "inside 90 % before",
        "after",
    )
    table_rows = []
    for row in rows:
        cells = [row["runs"], row["n"]]
        for before, after in zip(row["before"], row["after"], strict=True):
            cells += [f"{100 * before:.1f}", f"{100 * after:.1f}"]
        table_rows.append(cells)
    return rows_table(head, table_rows)


def worst(runs: list[Run]) -> str:
    """Section on the runs with the largest errors, with parameters fitted to all runs at once."""
    fitted = calibrate_end_to_end(runs)
    # Without what is learned of each run beside the parameters: that would hide how far off it is.
    parameters_only = {device: fit.adjustment.without_runs() for device, fit in fitted.items()}
    errors = []
    for run in runs:
        model = step_problem(run.model, run.cluster, run.job, None, run.framework, run.site)
        adjusted = model.adjusted(parameters_only[run.cluster.device.name])
        step_s = explain(adjusted, run.layout).step_time_s
        errors.append(abs(step_s / run.measured_s - 1))
    # The mean of errors is made by few runs: who are they?
    order = np.argsort(errors)[::-1]
    lines = [
        "Runs of vTrain on several nodes that the parameters, fitted to all of them, leave off by most: they took far",
        "longer than runs beside them that differ in micro-batch or in one degree, and no hardware figure tells why.",
        "",
        rows_table(
            ("run", "off by"), [(runs[i].name, f"{100 * errors[i]:.0f} %") for i in order[:5]]
        ),
    ]
    share = sum(errors[i] for i in order[:5]) / len(runs)
    rest = np.mean([errors[i] for i in order[5:]])
    lines += [
        "",
        f"These five alone are {100 * share:.1f} points of the mean; the mean of the others is {100 * rest:.1f} %.",
    ]
    return "\n".join(lines)


def parameters(runs: list[Run]) -> str:
    """Fit parameters on all multi-node runs of vTrain."""
    (fitted,) = calibrate_end_to_end(runs).values()
    lines = [
        "Parameters from all of them (logs of factors; losses as amounts), those that the runs narrowed:",
        "",
    ]
    rows = [
        (p.name, f"{p.prior_sd:.3f}", f"{p.value:+.3f}", f"{p.lo:+.3f} to {p.hi:+.3f}")
        for p in fitted.parameters
        if p.informed
    ]
    lines.append(rows_table(("parameter", "prior, standard deviation", "posterior", "90 %"), rows))
    return "\n".join([*lines, "", *(f"- {text}" for text in fitted.contradictions)])


if __name__ == "__main__":
    main()
