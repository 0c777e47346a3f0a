"""`perfmodel validate`: predictions against measured kernels, and against published runs."""

import argparse
from pathlib import Path
from typing import Any

from perfmodel.cli import _show
from perfmodel.cli._emit import emit
from perfmodel.cli._flags import add_calibration, add_framework, add_json
from perfmodel.display import progress


def add_command(commands: Any) -> None:
    """Register the command and its kinds."""
    command: argparse.ArgumentParser = commands.add_parser("validate", help="hold predictions against measurements")
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, text, run in (
        ("kernels", "tables of measured kernels and collectives", _kernels),
        ("cases", "published end-to-end runs", _cases),
    ):
        one: argparse.ArgumentParser = kinds.add_parser(kind, help=text)
        one.add_argument("files", nargs="+", type=Path, metavar="FILE")
        one.add_argument("--out", type=Path, metavar="FILE", help="write a prediction per row (csv)")
        if kind == "cases":
            add_framework(one, "for every run, instead of the framework that its row names")
            one.add_argument(
                "--explain",
                nargs="?",
                const="",
                metavar="CASE_ID",
                help="why a run's prediction missed (the five largest errors without an id)",
            )
            one.add_argument(
                "--tables", nargs="+", type=Path, default=[], metavar="FILE",
                help="with --explain: measured kernels, to show the nearest",
            )  # fmt: skip
        add_calibration(one)
        add_json(one)
        one.set_defaults(run=run)


def _kernels(arguments: argparse.Namespace) -> int:
    from perfmodel.validation import validate_kernels

    report = validate_kernels(arguments.files, arguments.calibration, arguments.out)
    emit(arguments, report, lambda: _show.kernels(report))
    return 0


def _cases(arguments: argparse.Namespace) -> int:
    from perfmodel.validation import explain_cases, validate_cases

    if arguments.explain is not None:
        found = explain_cases(
            arguments.files, arguments.explain or None, arguments.calibration, arguments.tables, arguments.framework
        )
        emit(arguments, {"cases": [one.to_dict() for one in found]}, lambda: _show.residuals(found))
        return 0
    with progress("cases", silent=arguments.json) as report:
        result = validate_cases(
            arguments.files, arguments.calibration, arguments.out, framework=arguments.framework, progress=report
        )
    emit(arguments, result, lambda: _show.cases(result))
    return 0
