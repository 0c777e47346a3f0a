"""Commands and flags. Names are a contract: others script against them."""

import argparse
import sys
from pathlib import Path
from typing import NoReturn

import perfmodel
from perfmodel.cli import (
    _calibrate,
    _catalog,
    _compare,
    _completion,
    _design,
    _doctor,
    _emulate,
    _import_model,
    _import_table,
    _plot,
    _run,
    _schedules,
    _search,
    _whatif,
)


class _Parser(argparse.ArgumentParser):
    """One line on stderr and exit status 2, instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = _Parser(
        prog="perfmodel",
        description="Step time, memory and the best layout of distributed training, before a cluster is booked.",
    )
    top.add_argument("--version", action="version", version=f"perfmodel {perfmodel.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _predict(commands)
    _search.add_command(commands, _job)
    _design.add_command(commands, _job)
    _timeline(commands)
    _fit(commands)
    _validate(commands)
    _whatif.add_command(commands, _job)
    _plot.add_command(commands, _job, _calibration, _json)
    _json(_calibrate.add_command(commands))
    _json(_schedules.add_command(commands))
    _json(_run.add_command(commands))
    _json(_import_model.add_command(commands))
    _json(_import_table.add_command(commands))
    _json(_compare.add_command(commands))
    _json(_emulate.add_command(commands))
    _json(_catalog.add_command(commands))
    _json(_doctor.add_command(commands))
    _completion.add_command(commands)
    return top


def _json(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print one JSON object to stdout and nothing else")


def _calibration(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--calibration",
        type=Path,
        metavar="DIR",
        help="directory made by 'perfmodel fit', instead of the shipped one",
    )


def _job(command: argparse.ArgumentParser, batches: bool = False) -> None:
    command.add_argument("--model", required=True, help="catalog name, Hugging Face config.json or TOML")
    command.add_argument("--cluster", required=True, help="catalog name or TOML")
    command.add_argument("--devices", type=int, metavar="N", help="devices used (default: what the layout needs)")
    if batches:
        command.add_argument(
            "--global-batch", "--batches", type=_search.whole_numbers, required=True, metavar="B[,B...]",
            help="sequences per step; several are ranked together",
        )  # fmt: skip
    else:
        command.add_argument("--global-batch", type=int, required=True, metavar="B", help="sequences per step")
    command.add_argument("--seq-len", type=int, metavar="S", help="tokens per sequence (default: the model's)")
    command.add_argument("--dtype", default="bf16", choices=("bf16", "fp16", "fp32", "tf32", "fp8"))
    command.add_argument("--mode", default="train", choices=("train", "inference"))
    command.add_argument(
        "--attention",
        default="flash",
        choices=("flash", "unfused"),
        help="fused attention, or materialised scores",
    )
    command.add_argument("--strict", action="store_true", help="refuse to extrapolate beyond the measurements")
    _calibration(command)
    _json(command)


def _predict(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser("predict", help="step time, memory and critical path of one layout")
    _job(command)
    command.add_argument(
        "--layout",
        required=True,
        help='e.g. "tp=8,pp=16,dp=8,zero=1,recompute=selective" or DistSim\'s 8M16P8D',
    )
    command.set_defaults(run="predict")


def _timeline(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser("timeline", help="what every device does when: Chrome trace and Gantt chart")
    _job(command)
    command.add_argument("--layout", required=True, help="as for predict")
    command.add_argument("--out", type=Path, metavar="FILE", help="Chrome trace, opens in Perfetto (json or json.gz)")
    command.add_argument("--png", type=Path, metavar="FILE", help="Gantt chart")
    command.add_argument("--html", type=Path, metavar="FILE", help="interactive timeline, opens in any browser")
    command.set_defaults(run="timeline")


def _fit(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser("fit", help="train cost models from tables of measurements and of runs")
    command.add_argument("tables", nargs="*", type=Path, metavar="TABLE", help="csv, csv.gz or parquet")
    command.add_argument(
        "--runs", type=Path, metavar="RUNS.csv", help="measured steps of whole runs (columns of validate cases)"
    )
    command.add_argument(
        "--base", type=Path, metavar="DIR", help="calibration that --runs corrects (default: TABLEs, else the shipped)"
    )
    command.add_argument("--strict", action="store_true", help="refuse runs that contradict the tables")
    command.add_argument("--out", type=Path, required=True, metavar="DIR", help="calibration directory to write")
    command.add_argument("--family", metavar="F", help="only this op family")
    command.add_argument("--seed", type=int, default=0)
    _json(command)
    command.set_defaults(run="fit")


def _validate(commands: "argparse._SubParsersAction[_Parser]") -> None:
    command = commands.add_parser("validate", help="hold predictions against measurements")
    kinds = command.add_subparsers(dest="kind", required=True, metavar="KIND")
    for kind, text in (
        ("kernels", "tables of measured kernels and collectives"),
        ("cases", "published end-to-end runs"),
    ):
        one = kinds.add_parser(kind, help=text)
        one.add_argument("files", nargs="+", type=Path, metavar="FILE")
        one.add_argument("--out", type=Path, metavar="FILE", help="write a prediction per row (csv)")
        if kind == "cases":
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
        _calibration(one)
        _json(one)
        one.set_defaults(run=f"validate_{kind}")
