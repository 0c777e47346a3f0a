"""Commands and flags. Names are a contract: others script against them."""

import argparse
import sys
from typing import Final, NoReturn

import perfmodel
from perfmodel.cli import (
    _calibrate,
    _catalog,
    _compare,
    _compare_clusters,
    _completion,
    _design,
    _doctor,
    _emulate,
    _explain,
    _fit,
    _import_model,
    _import_table,
    _plot,
    _predict,
    _programs,
    _report,
    _run,
    _schedules,
    _search,
    _serve,
    _validate,
    _whatif,
)

_COMMANDS: Final = (
    _predict.add_predict,
    _search.add_command,
    _report.add_command,
    _compare_clusters.add_command,
    _serve.add_command,
    _design.add_command,
    _predict.add_timeline,
    _explain.add_command,
    _fit.add_command,
    _validate.add_command,
    _whatif.add_command,
    _plot.add_command,
    _calibrate.add_command,
    _schedules.add_command,
    _programs.add_distribute,
    _programs.add_simulate,
    _run.add_command,
    _import_model.add_command,
    _import_table.add_command,
    _compare.add_command,
    _emulate.add_command,
    _catalog.add_command,
    _doctor.add_command,
    _completion.add_command,
)
"""In the order of --help; each sets `run`, which takes the arguments and returns the exit status."""


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
    for add in _COMMANDS:
        add(commands)
    return top
