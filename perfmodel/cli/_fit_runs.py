"""`perfmodel fit --runs`: parameters of the cost models from measured steps."""

import argparse
from math import expm1
from pathlib import Path
from typing import Any

from perfmodel.display import Report
from perfmodel.errors import PerfModelError

_SHOWN = 8
"""Runs that are named where many stand apart."""


def check(arguments: argparse.Namespace) -> None:
    """Refuse contradictory or missing arguments.

    Raises:
        PerfModelError: naming them.
    """
    if not arguments.tables and not arguments.runs:
        raise PerfModelError("fit: nothing to fit to; give TABLE... (kernels, collectives) or --runs RUNS.csv")
    if arguments.base and (arguments.tables or not arguments.runs):
        raise PerfModelError("fit: --base DIR is what --runs corrects in place of TABLEs; give --runs and no TABLE")


def run(arguments: argparse.Namespace, progress: Report) -> dict[str, Any]:
    """Fit and save; by device what was found, and rows that are no runs."""
    from perfmodel.calibration import calibrate_end_to_end
    from perfmodel.validation import read_runs

    runs, skipped = read_runs(arguments.runs)
    base = arguments.out if arguments.tables else arguments.base
    found = calibrate_end_to_end(runs, out=arguments.out, base=base, strict=arguments.strict, progress=progress)
    return {"end_to_end": {device: fitted.to_dict() for device, fitted in found.items()}, "skipped_runs": skipped}


def show(report: dict[str, Any], out: Path) -> None:
    """Parameters before and after, then contradictions."""
    from rich.table import Table

    from perfmodel.cli import _show
    from perfmodel.prediction import GAUSS_90, LOSSES

    console = _show.new_console()
    for device, fitted in report["end_to_end"].items():
        table = Table(box=None, pad_edge=False, title_justify="left", title=f"{device}, {fitted['runs']} runs")
        for head in ("parameter", "prior, 90 %", "posterior", "90 %", "sigmas", "kernels behind it", "runs", ""):
            table.add_column(head, justify="left" if head in ("parameter", "") else "right", no_wrap=True)
        for p in fitted["parameters"]:
            amount = p["name"] in LOSSES
            edge = GAUSS_90 * p["prior_sd"]
            word = (lambda x: f"{x:.3g}") if amount else (lambda x: f"{expm1(x):+.1%}")
            table.add_row(
                p["name"],
                f"{word(0.0 if amount else -edge)} .. {word(edge)}",
                word(p["value"]),
                f"{word(p['lo'])} .. {word(p['hi'])}",
                f"{p['sigmas']:+.1f}",
                "-" if p["measured_kernels"] is None else f"{p['measured_kernels']:,}",
                str(p["runs"]),
                "contradicts" if p["contradiction"] else "" if p["informed"] else "as before",
            )
        console.print(table)
        for text in fitted["contradictions"]:
            console.print(f"warning: {text}")
        for name, excess in [*fitted["unexplained"].items()][:_SHOWN]:
            console.print(f"no parameter explains {name}: {excess:+.0%}")
        console.print(
            f"mean error of these runs {fitted['error_before']:.1%} before, {fitted['error_after']:.1%} after the fit "
            f"to them; {fitted['noise']:.1%} is left to noise"
        )
    for reason, count in report["skipped_runs"].items():
        console.print(f"{count} rows are no runs: {reason}")
    console.print(f"wrote {out}")
