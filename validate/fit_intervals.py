"""Half-widths of 90 % intervals from the residuals of published runs.

python validate/fit_intervals.py --data DIR

Writes perfmodel/prediction/unknown.json: for predictions all sources count, and for the validation of each source all
but its group. Run it again after anything that moves predicted step times, `validate/fit_frameworks.py` included.
"""

import argparse
from pathlib import Path

import pandas as pd

from perfmodel.display import progress
from perfmodel.io import write_json
from perfmodel.validation import fit_unknown, predict_cases, read_tables

OUT = Path(__file__).parents[1] / "perfmodel" / "prediction" / "unknown.json"


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    data = arguments.parse_args().data / "published"
    runs, _ = read_tables(sorted(data.glob("*.csv")))
    timed = pd.DataFrame(runs[(runs["status"] == "ok") & runs["measured_iter_time_s"].notna()]).reset_index(drop=True)
    with progress("runs") as report:
        predicted = predict_cases(timed, progress=report)
    found = fit_unknown(timed, predicted)
    write_json(OUT, found)
    for name, sides in found.items():
        print(f"{name or 'all':12s} faster {sides['faster']} slower {sides['slower']}")


if __name__ == "__main__":
    main()
