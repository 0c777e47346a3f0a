"""Everything measured against everything predicted: writes validate/report.json and report.md, and
out/report.html, the same with plots.

python validate/run.py --data DIR [--runs-only]
"""

import argparse
import json
from pathlib import Path
from tempfile import TemporaryDirectory

import pandas as pd
from prepared_runs import prepared
from studies.record import published_record
from studies.record_html import record_html
from studies.record_text import record_text

from perfmodel.display import progress
from perfmodel.ingest.tables import write_text
from perfmodel.validation import validate_kernels

HERE = Path(__file__).parent


def main() -> None:
    """Predict all runs and kernels, and write the reports."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    arguments.add_argument(
        "--runs-only", action="store_true", help="kernels as they were in the last report"
    )
    options = arguments.parse_args()
    with progress("runs") as report, TemporaryDirectory() as folder:
        files = prepared(sorted((options.data / "published").glob("*.csv")), Path(folder))
        record, frame = published_record(files, progress=report)
    # the report is committed: file names, not the folders of this machine
    record["skipped_files"] = {
        Path(file).name: reason for file, reason in record["skipped_files"].items()
    }
    if options.runs_only:
        # Kernels take most of the time, and only change with the cost model.
        kernels = json.loads((HERE / "report.json").read_text())["kernels"]
    else:
        kernels = validate_kernels(
            [f for f in sorted(options.data.glob("*/*.csv.gz")) if measured(f)], marked=False
        )
    live = json.loads((HERE / "live.json").read_text())
    text = record_text(record, kernels, live)
    write_text(
        HERE / "report.json", json.dumps({"cases": record, "kernels": kernels}, indent=1) + "\n"
    )
    write_text(HERE / "report.md", text)
    write_text(HERE.parent / "out" / "report.html", record_html(text, frame, record["pairs"]))
    print(text.partition("## Kernels")[0])


def measured(path: Path) -> bool:
    """Whether a file holds kernels or collectives that its source does not itself distrust."""
    columns = set(pd.read_csv(path, nrows=1).columns)
    kernels = {"op_family", "dtype", "time_us"} <= columns
    return not path.name.startswith("suspect") and (kernels or {"collective", "time_us"} <= columns)


if __name__ == "__main__":
    main()
