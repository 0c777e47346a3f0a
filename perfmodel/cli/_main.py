"""The whole command line: commands, flags, exit status, and shell completion.

Names are a contract: others script against them.
"""

import argparse
import errno
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NoReturn

import perfmodel
from perfmodel.cli import (
    _calibrate,
    _catalog,
    _check,
    _compare,
    _compare_clusters,
    _doctor,
    _emulate,
    _fit,
    _hook,
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
from perfmodel.cli._files import complete_from_job, complete_from_launch
from perfmodel.cli._idle_flags import idle_changes, refuse_idle_flags
from perfmodel.cli._interrupts import INTERRUPTED, uninterrupted
from perfmodel.cli._show import note
from perfmodel.display import PlainStream, require_picture, say, say_verbatim
from perfmodel.errors import PerfModelError, plain_text
from perfmodel.units import plain_number, plain_whole

_COMMANDS: Final = MappingProxyType(
    {
        "init": _init.add_init,
        "predict": _predict.add_predict,
        "search": _search.add_command,
        "report": _report.add_command,
        "compare-clusters": _compare_clusters.add_command,
        "serve": _serve.add_command,
        "check": _check.add_command,
        "design": _whatif.add_design,
        "timeline": _predict.add_timeline,
        "explain": _compare.add_explain,
        "fit": _fit.add_command,
        "validate": _validate.add_command,
        "whatif": _whatif.add_whatif,
        "plot": _plot.add_command,
        "calibrate": _calibrate.add_command,
        "schedules": _schedules.add_command,
        "distribute": _programs.add_distribute,
        "simulate": _programs.add_simulate,
        "run": _run.add_command,
        "hook": _hook.add_command,
        "import-model": _import_model.add_command,
        "import": _import_table.add_command,
        "compare": _compare.add_compare,
        "emulate": _emulate.add_command,
        "catalog": _catalog.add_command,
        "samples": _init.add_samples,
        "doctor": _doctor.add_command,
    }
)
"""Commands in the order of --help, `completion` after them; each sets `run`, which takes arguments
and returns the exit status."""
_FOLDERS: Final = ("calibrate", "fit", "emulate")
"""Commands whose --out is a folder."""
_TABLES: Final = ("compare", "import", "import-model", "validate")
"""Commands whose --out is a table."""
_TRACE: Final = (".json", ".json.gz")
_PAGE: Final = (".html", ".htm")
_ENDINGS: Final = MappingProxyType(
    {
        ("timeline", "out"): _TRACE,
        ("timeline", "html"): _PAGE,
        ("search", "trace"): _TRACE,
        ("search", "out"): (".json",),
        ("simulate", "trace"): _TRACE,
        ("run", "out"): _TRACE,
        ("import", "timeline"): _TRACE,
        ("report", "html"): _PAGE,
        ("check", "html"): _PAGE,
        ("distribute", "out"): (".ir",),
    }
)
"""Endings of files that a flag of a command can write. Tables and pictures have their own checks;
an order of passes may have any name."""
_FILES: Final = ("FILE", "TABLE", "RUNS.csv", "JOB.toml")
"""Placeholders that stand for files in --help."""


_WITHOUT_PREDICTIONS: Final = ("catalog", "completion", "doctor", "hook", "init", "samples")
"""Commands that predict nothing: JAX, which takes seconds to import, is not set up for them."""


def run(argv: Sequence[str] | None = None) -> int:
    """Run one command; return its exit status (0 ok, 2 bad input or output, 130 interrupted)."""
    if sys.stdout is None:
        say(
            "perfmodel: standard output is closed; redirect it to a file or to /dev/null",
            file=sys.stderr,
        )
        return 2
    try:
        try:
            with _plain_output():
                return _run_command(argv)
        finally:
            # Otherwise, writing the rest of the buffer could fail after the exit status is decided.
            sys.stdout.flush()
    # A reader such as `head` has seen enough, which is not an error.
    except BrokenPipeError:
        _drop_output()
        return 0
    except OSError as error:
        _drop_output()
        say(
            f"perfmodel: standard output cannot be written: {error.strerror or error}",
            file=sys.stderr,
        )
        return 2


@contextmanager
def _plain_output() -> Iterator[None]:
    """Keep escape sequences, which names in files may contain, away from the terminal."""
    out, err = sys.stdout, sys.stderr
    with redirect_stdout(PlainStream(out)), redirect_stderr(PlainStream(err)):
        yield


def _drop_output() -> None:
    """Discard output that could not be written; Python would try again when it ends."""
    with suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _run_command(argv: Sequence[str] | None) -> int:
    """Run a command and return its exit status; bad input gives one line on stderr and status 2."""
    arguments = _parser_for(argv).parse_args(argv)
    try:
        measures = arguments.command == "calibrate" and not arguments.for_decision
        if not measures and arguments.command not in _WITHOUT_PREDICTIONS:
            # The model's own arrays are small: an accelerator would only add latency.
            os.environ.setdefault("JAX_PLATFORMS", "cpu")
            if arguments.command == "fit" and arguments.sites:
                # Thousands of small equations: threads of BLAS would mostly spin while they wait
                # for one another. NumPy reads this when it is imported, which JAX does below.
                os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            from perfmodel.timeline import keep_compilations

            keep_compilations()

        # Flags in order: outputs that cannot be written, then what files fill in, then flags
        # without effect. Only then the command runs.
        _require_outputs(arguments)
        complete_from_job(arguments, given(argv))
        complete_from_launch(arguments)
        refuse_idle_flags(arguments)
        note(idle_changes(arguments))
        return arguments.run(arguments)
    except PerfModelError as error:
        say(plain_text(f"perfmodel: {error}"), file=sys.stderr)
        # Notes are text to copy, such as the TOML of a model.
        say_verbatim(*map(plain_text, getattr(error, "__notes__", ())), file=sys.stderr)
        return 2
    except MemoryError:
        say(
            "perfmodel: not enough memory; give smaller files or fewer devices",
            file=sys.stderr,
        )
        return 2
    except OSError as error:
        # Without a name it is standard output, which the caller closed.
        if error.filename is None:
            raise
        say(f"perfmodel: {error.filename}: {error.strerror}{_remedy(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt as stop:
        with uninterrupted():
            say(f"perfmodel: {str(stop) or 'interrupted'}", file=sys.stderr)
            return INTERRUPTED


def _remedy(error: OSError) -> str:
    """Advice on an error of the file system, to end its message; empty if there is none."""
    path = Path(os.fsdecode(error.filename))
    if isinstance(error, FileNotFoundError):
        if path.parent.is_dir():
            return "; give a file that exists"
        return f"; create the folder {path.parent}, or give another path"
    if isinstance(error, (NotADirectoryError, PermissionError)) or error.errno == errno.EROFS:
        return "; give another path"
    return ""


def _require_outputs(arguments: argparse.Namespace) -> None:
    """Refuse outputs that cannot be written before anything is computed for them."""
    for name in ("png", "html", "trace", "out", "export", "timeline"):
        path: Path | None = getattr(arguments, name, None)
        if path is None:
            continue
        if name == "png" or (name == "out" and arguments.command == "plot"):
            require_picture(path)
        # The training curves of `schedules` are a table, its order of passes is text.
        is_curve = arguments.command == "schedules" and arguments.train
        if name == "out" and (arguments.command in _TABLES or is_curve):
            from perfmodel.ingest.tables import require_table_file

            require_table_file(path)

        # `--out` is a file for some commands and a folder for others.
        folder = name == "out" and arguments.command in _FOLDERS
        if path.exists() and path.is_dir() != folder:
            raise PerfModelError(
                f"{path}: is a {'file, not a folder' if folder else 'folder'}; give another --{name}"
            )

        # Devices and pipes are written to as they are. Missing folders are made.
        if path.exists() and not (path.is_file() or path.is_dir()):
            continue
        endings = _ENDINGS.get((arguments.command, name), ("",))
        if not path.name.endswith(endings):
            raise PerfModelError(
                f"{path}: the name of this file must end in {' or '.join(endings)}; give another --{name}"
            )
        nearest = next(parent for parent in path.absolute().parents if parent.exists())
        if not nearest.is_dir():
            raise PerfModelError(f"{path}: {nearest} is a file; give another --{name}")
        if not os.access(nearest, os.W_OK):
            raise PerfModelError(
                f"{path}: nothing can be written in {nearest}; give another --{name}"
            )


def _number_type(read: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of numbers for argparse, which reports errors with the name of the flag."""

    def read_flag(text: str) -> Any:
        try:
            return read(text)
        except PerfModelError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return read_flag


_MOST_NAMED: Final = 3
"""How many commands are named that have a flag which another lacks."""


class _Parser(argparse.ArgumentParser):
    """A parser that reports errors in one line on stderr, and whose help ends in examples."""

    def __init__(self, **settings: Any) -> None:
        settings.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**settings)
        # Numeric flags of all commands take plain digits and quantities with units.
        self.register("type", int, _number_type(plain_whole))
        self.register("type", float, _number_type(plain_number))

    def format_help(self) -> str:
        self.epilog = epilog(" ".join(self.prog.split()[1:]), self)
        return super().format_help()

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # argparse drops the `--` and hands on an empty list.
        if action.option_strings and arg_strings == ["--"]:
            self.error(f"argument {'/'.join(action.option_strings)}: '--' is not a value")
        return super()._get_values(action, arg_strings)

    def _print_message(self, message: str, file: Any = None) -> None:
        (file or sys.stderr).write(message)  # argparse's own swallows the error of a full disk

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse unknown names, with the nearest known one."""
        # argparse checks the default of an argument that may be left out, too.
        if action.choices is None or value is argparse.SUPPRESS or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        matches = get_close_matches(str(value), choices, 1)
        hint = f"; did you mean {matches[0]!r}?" if matches else ""
        raise argparse.ArgumentError(
            action,
            f"invalid choice: {value!r}{hint} (choose from {', '.join(choices)})",
        )

    def parse_known_args(
        self, args: Any = None, namespace: Any = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse arguments as argparse does, but refuse unknown ones at once."""
        # A command refuses unknown flags itself: the main parser could not say which command lacks
        # them.
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(
                f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown[0].partition('=')[0])}"
            )
        return known, unknown

    def _hint(self, flag: str) -> str:
        """A hint for an unknown flag: commands that have it, or this one's most similar flag."""
        commands = [command.prog for command in parsers(parser()) if flag in _flags_of(command)]
        if commands:
            more = " and others" if len(commands) > _MOST_NAMED else ""
            return f" ({flag} is a flag of {', '.join(commands[:_MOST_NAMED])}{more})"
        matches = get_close_matches(flag, sorted(_flags_of(self)), 1)
        return f" (did you mean {matches[0]}?)" if matches else ""

    def error(self, message: str) -> NoReturn:
        message = plain_text(message)
        # argparse takes a value that begins with a dash for another flag.
        if message.endswith("expected one argument"):
            flag = message.removeprefix("argument ").partition(":")[0].split("/")[0]
            message += f" (write {flag}=VALUE if the value begins with -)"
        say(f"{self.prog}: {message}; see '{self.prog} --help'", file=sys.stderr)
        raise SystemExit(2)


def _flags_of(command: argparse.ArgumentParser) -> set[str]:
    flags: set[str] = set()
    for action in command._actions:
        flags.update(action.option_strings)
    return flags


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """The parser of the whole command line, or of a single command."""
    top = _Parser(
        prog="perfmodel",
        description="Predict step time and memory of distributed training, and find the best layout, before you book a "
        "cluster.",
    )
    top.add_argument("--version", action="version", version=f"perfmodel {perfmodel.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, add in _COMMANDS.items():
        if only in (None, name):
            add(commands)
    if only is None:
        _add_completion(commands)
    return top


def _parser_for(argv: Sequence[str] | None) -> argparse.ArgumentParser:
    """The parser of the command that a command line begins with, or of all commands if it begins
    with no known one.

    To describe all flags of all commands takes longer than some commands do.
    """
    arguments = sys.argv[1:] if argv is None else argv
    name = arguments[0] if arguments else ""
    return parser(name if name in _COMMANDS else None)


def given(argv: Sequence[str] | None) -> frozenset[str]:
    """Names of the arguments given on a command line."""
    # Parse once more without any defaults: what is in the namespace then was stated. Comparing
    # with defaults would miss a flag that states its default.
    bare = _parser_for(argv)
    for command in parsers(bare):
        command._defaults.clear()
        for action in command._actions:
            action.default = argparse.SUPPRESS
    return frozenset(vars(bare.parse_args(argv)))


def parsers(parent: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Iterate over a parser, its commands and their sub-commands."""
    yield parent
    for action in parent._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from parsers(command)


def _add_completion(commands: Any) -> None:
    """Register `completion SHELL`."""
    command: argparse.ArgumentParser = commands.add_parser(
        "completion", help='shell completion: eval "$(perfmodel completion bash)"'
    )
    command.add_argument("shell", choices=("bash", "zsh", "fish"))
    command.set_defaults(run=_complete)


def _complete(arguments: argparse.Namespace) -> int:
    say_verbatim(_script(arguments.shell, parser()))
    return 0


def _script(shell: str, top: argparse.ArgumentParser) -> str:
    """The completion script of a shell.

    `top`, the whole command line, parses nothing afterwards: names of the catalog become choices in
    it.
    """
    import shtab

    from perfmodel import catalog

    # Names of the catalog become choices, and placeholders become files or folders.
    names = {
        "model": catalog.models(),
        "cluster": catalog.clusters(),
        "framework": catalog.frameworks(),
    }
    for command in parsers(top):
        for action in command._actions:
            if action.dest in names and action.option_strings:
                action.choices = list(names[action.dest])
            elif action.metavar in _FILES:
                action.complete = shtab.FILE  # pyright: ignore[reportAttributeAccessIssue]
            elif action.metavar == "DIR":
                action.complete = shtab.DIRECTORY  # pyright: ignore[reportAttributeAccessIssue]
    return shtab.complete(top, shell)
