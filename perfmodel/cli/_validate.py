"""`perfmodel validate`: predictions against measured kernels, and against published runs."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.cli._flags import add_calibration, add_framework, add_json
from perfmodel.cli._show import emit, error_figure, error_head, reporting
from perfmodel.display import new_console, progress, say, table
from perfmodel.units import duration, span

if TYPE_CHECKING:
    from perfmodel.validation import CaseResidual


def add_command(commands: Any) -> None:
    """Register the command and its kinds."""
    command: argparse.ArgumentParser = commands.add_parser(
        "validate", help="compare predictions with measurements"
    )
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, text, run in (
        (
            "kernels",
            "tables of measured kernels and collectives",
            reporting(_kernels, _show_kernels),
        ),
        ("cases", "published end-to-end runs", _cases),
    ):
        kind_command: argparse.ArgumentParser = kinds.add_parser(kind, help=text)
        kind_command.add_argument("files", nargs="+", type=Path, metavar="FILE")
        kind_command.add_argument(
            "--out",
            type=Path,
            metavar="FILE",
            help="write a prediction per row (csv, csv.gz, parquet)",
        )
        if kind == "cases":
            add_framework(
                kind_command, "used for every run instead of the framework that its row names"
            )
            kind_command.add_argument(
                "--explain",
                nargs="?",
                const="",
                metavar="CASE_ID",
                help="explain the error of this run's prediction (without an id: explain the five "
                "largest errors)",
            )
            kind_command.add_argument(
                "--tables",
                nargs="+",
                type=Path,
                default=[],
                metavar="FILE",
                help="with --explain: table of measured kernels, whose nearest rows are shown",
            )
        add_calibration(kind_command)
        add_json(kind_command)
        kind_command.set_defaults(run=run)


def _kernels(arguments: argparse.Namespace) -> dict[str, Any]:
    from perfmodel.validation import validate_kernels

    return validate_kernels(arguments.files, arguments.calibration, arguments.out)


def _cases(arguments: argparse.Namespace) -> int:
    """Compare published runs with predictions, or explain single runs."""
    from perfmodel.validation import explain_cases, validate_cases

    if arguments.explain is not None:
        # With --explain, single runs are taken apart instead of counted.
        residuals = explain_cases(
            arguments.files,
            arguments.explain or None,
            arguments.calibration,
            arguments.tables,
            arguments.framework,
        )
        cases = [residual.to_dict() for residual in residuals]
        emit(arguments, {"cases": cases}, lambda: _show_residuals(residuals))
        return 0
    with progress("cases", silent=arguments.json) as report:
        result = validate_cases(
            arguments.files,
            arguments.calibration,
            arguments.out,
            framework=arguments.framework,
            progress=report,
        )
    emit(arguments, result, lambda: _show_cases(result))
    return 0


_KERNEL_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape", "bias", "coverage_90")


def _show_kernels(report: dict[str, Any]) -> None:
    """Errors per op family and device."""
    rows = []
    for family, devices in report["families"].items():
        for device, figures in devices.items():
            rows.append(
                (
                    family,
                    device,
                    *(error_figure(name, figures[name]) for name in _KERNEL_COLUMNS),
                )
            )
    rows.append(
        (
            "all",
            "all",
            *(error_figure(name, report["all"][name]) for name in _KERNEL_COLUMNS),
        )
    )
    new_console().print(
        table(
            "Predicted against measured",
            ("family", "device", *map(error_head, _KERNEL_COLUMNS)),
            rows,
        )
    )
    _print_nothing_compared("row", report)
    _skipped(report["skipped"])


_MEMORY_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape")
_CASE_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape", "spearman", "coverage_90")


def _show_cases(report: dict[str, Any]) -> None:
    """Errors per source of published runs."""
    rows, memory = [], []
    for source, figures in report["sources"].items():
        rows.append((source, *(error_figure(name, figures[name]) for name in _CASE_COLUMNS)))
        # Few sources state their memory.
        if figures["memory"]["n"]:
            memory.append(
                (
                    source,
                    *(error_figure(name, figures["memory"][name]) for name in _MEMORY_COLUMNS),
                )
            )
    rows.append(("all", *(error_figure(name, report["all"][name]) for name in _CASE_COLUMNS)))
    console = new_console()
    console.print(
        table(
            "Step time, predicted against measured",
            ("source", *map(error_head, _CASE_COLUMNS)),
            rows,
        )
    )
    _print_nothing_compared("step time", report)
    if memory:
        console.print(
            table(
                "Peak memory, predicted against measured",
                ("source", *map(error_head, _MEMORY_COLUMNS)),
                memory,
            )
        )
    _skipped(report["skipped"])


def _show_residuals(residuals: "list[CaseResidual]") -> None:
    """Print for each run its largest parts and events, and possible explanations of the error."""
    console = new_console()

    # Per run: where the predicted time goes, which events take most, and which single term would
    # explain the error.
    for residual in residuals:
        console.print(
            f"{residual.case_id}: measured {duration(residual.measured_s)}, predicted {duration(residual.predicted_s)} "
            f"({residual.error:+.1%}; 90 %: {span(duration(residual.lo_s), duration(residual.hi_s))}), "
            f"{residual.extrapolated:.0%} extrapolated"
        )
        parts = sorted(residual.breakdown_s.items(), key=lambda item: -item[1])
        rows = [
            (name, duration(s), f"{s / residual.predicted_s:.1%}")
            for name, s in parts
            if s > 1e-3 * residual.predicted_s
        ]
        console.print(table("predicted", ("part", "time", "share"), rows))
        events = []
        for event in residual.events:
            nearest_time = "" if event.nearest_us is None else duration(1e-6 * event.nearest_us)
            doublings = "" if event.doublings is None else f"{event.doublings:.1f}"
            events.append(
                (
                    event.event,
                    duration(event.time_s),
                    event.provenance,
                    event.nearest,
                    nearest_time,
                    doublings,
                )
            )
        names = (
            "event",
            "time",
            "provenance",
            "nearest measured",
            "its time",
            "doublings off",
        )
        console.print(table("largest events", names, events))
        terms = [
            (t.parameter, f"{t.share:.2f}", f"{t.needed:+.2f}", f"{t.deviations:+.1f}")
            for t in residual.terms[:8]
        ]
        names = (
            "if a single term explained it",
            "share",
            "change (log factor, or amount)",
            "in standard deviations",
        )
        console.print(table("possible explanations of the error", names, terms))


def _print_nothing_compared(subject: str, report: dict[str, Any]) -> None:
    if not report["all"]["n"]:
        say(f"no {subject} could be compared" if report["skipped"] else "the tables hold no rows")


def _skipped(skipped: dict[str, int]) -> None:
    if skipped:
        new_console().print(
            table("skipped", ("why", "rows"), [(k, f"{v:,}") for k, v in skipped.items()])
        )
