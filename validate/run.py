"""Everything measured against everything predicted: writes validate/report.json and report.md.

python validate/run.py --data DIR
"""

import argparse
import json
from pathlib import Path

import pandas as pd

from perfmodel.io import write_text
from perfmodel.validation import validate_cases, validate_kernels

HERE = Path(__file__).parent
FIGURES = ("n", "median_ape", "mean_ape", "p90_ape", "coverage_90")


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--data", type=Path, required=True)
    data = arguments.parse_args().data
    runs = sorted((data / "published").glob("*.csv"))
    tables = [f for f in sorted(data.glob("*/*.csv.gz")) if measured(f)]
    cases = validate_cases(runs)
    # the report is committed: file names, not the folders of this machine
    cases["skipped_files"] = {Path(file).name: reason for file, reason in cases["skipped_files"].items()}
    kernels = validate_kernels(tables)
    write_text(HERE / "report.json", json.dumps({"cases": cases, "kernels": kernels}, indent=1) + "\n")
    write_text(HERE / "report.md", markdown(cases, kernels))
    print((HERE / "report.md").read_text())


def measured(path: Path) -> bool:
    """Whether a file holds kernels or collectives that its source does not itself distrust."""
    columns = set(pd.read_csv(path, nrows=1).columns)
    kernels = {"op_family", "dtype", "time_us"} <= columns
    return not path.name.startswith("suspect") and (kernels or {"collective", "time_us"} <= columns)


def markdown(cases: dict, kernels: dict) -> str:
    lines = ["# Predicted against measured", "", "Made by `make validate`.", "", "## Step time of published runs", ""]
    lines += table("source", [(s, f) for s, f in cases["sources"].items() if f["n"]] + [("all", cases["all"])])
    lines += ["", "## Peak memory of published runs", ""]
    lines += table("source", [(s, f["memory"]) for s, f in cases["sources"].items() if f["memory"]["n"]])
    lines += ["", "## Rows of published runs that are not predicted", "", "| why | rows |", "|---|--:|"]
    lines += [f"| {reason} | {count} |" for reason, count in cases["skipped"].items()]
    lines += ["", "## Kernels and collectives (training rows included)", ""]
    rows = [(f"{family}, {device}", f) for family, d in kernels["families"].items() for device, f in d.items()]
    return "\n".join(lines + table("family, device", rows)) + "\n"


def table(head: str, rows: list[tuple[str, dict]]) -> list[str]:
    def cell(name: str, value: float | None) -> str:
        return "-" if value is None else f"{value:,}" if name == "n" else f"{100 * value:.1f} %"

    lines = [f"| {head} | " + " | ".join(FIGURES) + " |", "|---" + "|--:" * len(FIGURES) + "|"]
    return lines + [f"| {name} | " + " | ".join(cell(k, f.get(k)) for k in FIGURES) + " |" for name, f in rows]


if __name__ == "__main__":
    main()
