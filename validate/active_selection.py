"""Active selection against uniform grids, random points and pure uncertainty: writes active_selection.json and .md.

python validate/active_selection.py --data DIR [--report]

Interrupted, it goes on with the next run; `--report` only writes the report of the runs there are.
"""

import argparse
import json
from itertools import product
from pathlib import Path

from studies.selection_report import selection_report
from studies.selection_study import study as selection_study
from studies.selection_tables import (
    PREFILL_DEVICES,
    PREFILL_MODELS,
    TRAINING_DEVICES,
    TRAINING_WIDTHS,
    prefill_case,
    training_case,
)

from perfmodel.ingest.tables import write_text

HERE = Path(__file__).parent
SEEDS = (0, 1)
CASES = [
    *(("training", width, device) for width in TRAINING_WIDTHS for device in TRAINING_DEVICES),
    *(("prefill", model, device) for model in PREFILL_MODELS for device in PREFILL_DEVICES),
]


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
        case = (training_case if kind == "training" else prefill_case)(chosen.data, device, model, seed)
        runs.append({"run": run, "points": selection_study(case, exclude_needed=held_out, seed=seed)})
        write_text(results, "[\n" + ",\n".join(map(json.dumps, runs)) + "\n]\n")
        print(*run, flush=True)
    write_text(HERE / "active_selection.md", selection_report(runs))


if __name__ == "__main__":
    main()
