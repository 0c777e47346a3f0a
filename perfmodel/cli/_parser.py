"""Commands and flags, and the script by which a shell completes them, files and catalog names.

Names are a contract: others script against them.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Final, NoReturn

import perfmodel
from perfmodel.cli import (
    _calibrate,
    _catalog,
    _compare,
    _compare_clusters,
    _doctor,
    _emulate,
    _fit,
    _import_model,
    _import_table,
    _init,
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
from perfmodel.cli._examples import epilog

_COMMANDS: Final = (
    _init.add_init,
    _predict.add_predict,
    _search.add_command,
    _report.add_command,
    _compare_clusters.add_command,
    _serve.add_command,
    _whatif.add_design,
    _predict.add_timeline,
    _compare.add_explain,
    _fit.add_command,
    _validate.add_command,
    _whatif.add_whatif,
    _plot.add_command,
    _calibrate.add_command,
    _schedules.add_command,
    _programs.add_distribute,
    _programs.add_simulate,
    _run.add_command,
    _import_model.add_command,
    _import_table.add_command,
    _compare.add_compare,
    _emulate.add_command,
    _catalog.add_command,
    _init.add_samples,
    _doctor.add_command,
)
"""In the order of --help, `completion` after them; each sets `run`, which takes the arguments and returns the exit
status."""


class _Parser(argparse.ArgumentParser):
    """One line on stderr and exit status 2, instead of the whole usage; help that ends in examples."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)

    def format_help(self) -> str:
        self.epilog = epilog(" ".join(self.prog.split()[1:]), self)
        return super().format_help()

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        if action.option_strings and arg_strings == ["--"]:  # argparse drops it, and hands on an empty list
            self.error(f"argument {'/'.join(action.option_strings)}: '--' is no value")
        return super()._get_values(action, arg_strings)

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
    _add_completion(commands, top)
    return top


def given(argv: Sequence[str] | None) -> frozenset[str]:
    """Names of the arguments that a command line states, as its namespace has them."""
    bare = parser()
    for one in parsers(bare):
        one._defaults.clear()
        for action in one._actions:
            action.default = argparse.SUPPRESS
    return frozenset(vars(bare.parse_args(argv)))


_FILES: Final = ("FILE", "TABLE", "RUNS.csv", "JOB.toml")


def _add_completion(commands: Any, top: argparse.ArgumentParser) -> None:
    """Register `completion SHELL`; `top`: the whole command line, that it completes."""
    command: argparse.ArgumentParser = commands.add_parser(
        "completion", help='shell completion: eval "$(perfmodel completion bash)"'
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"))
    command.set_defaults(run=partial(_complete, top))


def _complete(top: argparse.ArgumentParser, arguments: argparse.Namespace) -> int:
    print(_script(arguments.shell, top))
    return 0


def _script(shell: str, top: argparse.ArgumentParser) -> str:
    """What the shell reads. `top`, the whole command line, parses nothing afterwards: names become choices in it."""
    import shtab

    from perfmodel import catalog

    names = {"model": catalog.models(), "cluster": catalog.clusters(), "framework": catalog.frameworks()}
    for one in parsers(top):
        for action in one._actions:
            if action.dest in names and action.option_strings:
                action.choices = list(names[action.dest])
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(top, shell)


def parsers(one: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser, its commands and their commands."""
    yield one
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)
