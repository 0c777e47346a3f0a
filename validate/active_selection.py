"""Active selection against uniform grids, random points and pure uncertainty: writes
active_selection.json and .md.

python validate/active_selection.py --data DIR [--report]

Interrupted, it goes on with the next run; `--report` only writes the report of the runs there are.
"""

import argparse
import json
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
from studies.selection_study import study as selection_study
from studies.selection_tables import (
    PREFILL_DEVICES,
    PREFILL_MODELS,
    TRAINING_DEVICES,
    TRAINING_WIDTHS,
    prefill_case,
    training_case,
)
from studies.tables import rows_table

from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
SEEDS = (0, 1)
CASES = [
    *(("training", width, device) for width in TRAINING_WIDTHS for device in TRAINING_DEVICES),
    *(("prefill", model, device) for model in PREFILL_MODELS for device in PREFILL_DEVICES),
]
STRATEGIES: Final = ("ours", "uncertainty", "random")
CORNERS: Final = 32
"""Grids of fewer points have two levels per size."""
Run = dict[str, Any]
"""`run`: kind, device, model, seed, whether needed shapes were kept out; `points`: of
`selection_study.study`."""


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument("--report", action="store_true")
    chosen = arguments.parse_args()
    results = HERE / "active_selection.json"
    runs = json.loads(results.read_text()) if results.exists() else []
    done = [run["run"] for run in runs]
    settings = [(seed, False) for seed in SEEDS] + [(SEEDS[0], True)]
    for (seed, held_out), (kind, model, device) in product(settings, CASES):
        run = [kind, device, str(model), seed, held_out]
        if chosen.report or run in done:
            continue
        case = (training_case if kind == "training" else prefill_case)(
            chosen.data, device, model, seed
        )
        runs.append(
            {"run": run, "points": selection_study(case, exclude_needed=held_out, seed=seed)}
        )
        write_text(results, "[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
        print(*run, flush=True)
    write_text(HERE / "active_selection.md", selection_report(runs))


def selection_report(runs: Sequence[Run]) -> str:
    """The study as Markdown."""
    lines = [_HEAD]
    for held_out, title in (
        (False, "Any shape may be measured"),
        (True, "Shapes that the layouts need are kept out"),
    ):
        chosen = [run for run in runs if run["run"][4] == held_out]
        if not chosen:
            continue
        lines += [
            f"\n## {title}\n",
            *_grids(chosen),
            "\n### Interval and error of ours\n",
            _intervals(chosen),
        ]
    return "\n".join(lines) + "\n"


def _grids(runs: Sequence[Run]) -> list[str]:
    """Per device and grid: points and error of the grid, and points at which a strategy is as
    good."""
    head = (
        "step, device",
        "runs",
        "grid: points",
        "grid: error",
        "ours: points",
        "share",
        "uncertainty",
        "random",
    )
    rows, devices = [], _devices(runs)
    shares: list[tuple[float, float]] = []
    for name, members in [*devices.items(), ("all", list(runs))]:
        curves = {s: _mean([run["points"][s] for run in members]) for s in STRATEGIES}
        for points, error in zip(*_mean([run["points"]["grid"] for run in members]), strict=True):
            needed = {s: _as_good(*curves[s], error) for s in STRATEGIES}
            ours = needed["ours"]
            share = f"{ours / points:.2f}" if ours else "-"
            if name in devices:
                shares.append((points, ours / points if ours else np.inf))
            cells = [
                f"{needed[s]:.0f}" if needed[s] else f"over {curves[s][0][-1]:.0f}"
                for s in STRATEGIES
            ]
            rows.append(
                (name, len(members), f"{points:.0f}", f"{error:.2%}", cells[0], share, *cells[1:])
            )
    few = [share for points, share in shares if points < CORNERS]
    more = [share for points, share in shares if points >= CORNERS]
    return [
        rows_table(head, rows),
        f"\nOurs needs at most a third of the grid's points in {sum(s <= 1 / 3 for s in more)} of {len(more)} pairs of "
        f"device and grid with {CORNERS} points or more, and in {sum(s <= 1 / 3 for s in few)} of {len(few)} with "
        "fewer (two levels per size: the corners of the range).",
    ]


def _intervals(runs: Sequence[Run]) -> str:
    head = ("points", "mean error", "mean half-width of the 90 % interval", "layouts inside it")
    shortest = min(len(run["points"]["ours"]) for run in runs)
    table = np.array([run["points"]["ours"][:shortest] for run in runs]).mean(axis=0)
    rows = [
        (f"{n:.0f}", f"{error:.2%}", f"{half:.2%}", f"{inside:.0%}")
        for n, error, half, inside in table[::2]
    ]
    return rows_table(head, rows, left=0)


def _devices(runs: Sequence[Run]) -> dict[str, list[Run]]:
    found: dict[str, list[Run]] = {}
    for run in runs:
        found.setdefault(f"{run['run'][0]}, {run['run'][1]}", []).append(run)
    return found


def _mean(curves: Sequence[Sequence[Sequence[float]]]) -> tuple[np.ndarray, np.ndarray]:
    """Mean number of points and mean error at each place of curves, as far as all go."""
    shortest = min(map(len, curves))
    table = np.array([[point[:2] for point in curve[:shortest]] for curve in curves]).mean(axis=0)
    return table[:, 0], table[:, 1]


def _as_good(points: np.ndarray, error: np.ndarray, wanted: float) -> float | None:
    """Points from which on the error stays at or below `wanted`."""
    good = np.flatnonzero(error > wanted)
    after = good[-1] + 1 if len(good) else 0
    return float(points[after]) if after < len(points) else None


_HEAD: Final = """# Active selection against uniform grids

Written by `python validate/active_selection.py --data DIR`; every run is in `active_selection.json`.

Measuring a kernel is reading its row of a public table. *Training*: steps of GPTs of 16 layers (linear layers forward
and backward, fp16, estimate_train_time). *Prefill*: forward steps of published models (linear layers and causal
attention, bf16, aiconfigurator). A run has 6 layouts of one model, drawn by its seed (tensor-parallel degree,
micro-batch, sequence length, pipeline stages), all of whose studied kernels stand in the table: the true step time is
the timeline with each at its table time, and nothing of it is interpolated. All else of the step (other kernels,
collectives, launch gaps) has the same analytic time on both sides. The error is the mean over the 6 layouts of
|predicted / true - 1| of the whole step time. Nothing was chosen by these models: while this was built, training at the
widths 4096 and 5120 was looked at, which is not reported.

All strategies have the same regressor: kriging on log(time / wave-quantised roofline), no other table behind it. The
uniform grid is equally spaced in log size over the range that the layouts need, for each kind of kernel, each point
moved to the nearest row. *Random* draws rows of that range, *uncertainty* takes the most uncertain ones, *ours* those
that take most off the variance of the step times. *Points* is how many measurements a strategy needs from which on its
mean error stays at or below the grid's; *share* is ours over the grid's; curves are means over runs."""


if __name__ == "__main__":
    main()
