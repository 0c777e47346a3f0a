"""Command-line arguments of a Python script that is followed: their values as its `argparse` parser
reads them."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, NoReturn

from perfmodel.ingest.launch._python_values import MISSING, Choice, Symbol, Unknown

PARSER: Final = "argparse.ArgumentParser"
NAMESPACE: Final = "argparse.Namespace"
GROUPS: Final = ("add_argument_group", "add_mutually_exclusive_group")
"""Methods whose result adds arguments to the same parser."""
_SWITCHES: Final = {"store_true": False, "store_false": True}
"""Actions without a value, with the value of the argument if it is not given."""
_KEEPS: Final = (str, int, float, bool)


@dataclass(frozen=True)
class Option:
    """One argument that a script declares by `add_argument`."""

    names: tuple[str, ...]
    keywords: Mapping[str, Any]

    @property
    def is_positional(self) -> bool:
        return not self.names[0].startswith("-")

    @property
    def destination(self) -> str:
        """Attribute of the parsed arguments that holds it."""
        stated = self.keywords.get("dest")
        if isinstance(stated, str):
            return stated
        long_names = [name for name in self.names if name.startswith("--")]
        return (long_names or list(self.names))[0].lstrip("-").replace("-", "_")

    @property
    def default(self) -> Any:
        """Its value if it is not given; unknown for an argument that must be given."""
        is_needed = self.is_positional and self.keywords.get("nargs") not in ("?", "*")
        if self.keywords.get("required") is True or is_needed:
            return Unknown(self.names[-1])
        action = self.keywords.get("action")
        usual = _SWITCHES.get(action) if isinstance(action, str) else None
        return self.keywords.get("default", usual)

    @property
    def is_switch(self) -> bool:
        """Whether it takes no value."""
        action = self.keywords.get("action")
        return action == Symbol("argparse.BooleanOptionalAction") or action in (
            *_SWITCHES,
            "store_const",
            "count",
        )


def option(positional: Sequence[Any], keywords: Mapping[str, Any]) -> Option | None:
    """The argument that a call of `add_argument` declares; None if its names are not known."""
    names = tuple(name for name in positional if isinstance(name, str) and name)
    if not names or len(names) != len(positional) or keywords.get("action") in ("help", "version"):
        return None
    return Option(names, keywords)


class _Parser(argparse.ArgumentParser):
    """A parser that raises its errors, and prints nothing."""

    def error(self, message: str) -> NoReturn:
        raise ValueError(message)


def parsed(
    options: Sequence[Option], argv: Sequence[str], convert: Callable[[Any, str], Any]
) -> tuple[dict[str, Any], list[str]]:
    """Parse a script's arguments; returns their values, and the words that belong to no argument.

    Args:
        options: arguments that the script declares.
        argv: words behind the script's name.
        convert: applies an argument's `type` to a word.

    Raises:
        ValueError: words that the script would refuse; says why.
    """
    parser = _Parser(add_help=False)
    values: dict[str, Any] = {}
    for declared in options:
        # Defaults are filled in below, because they may be values that argparse cannot represent.
        settings: dict[str, Any] = {"default": argparse.SUPPRESS}
        if not declared.is_positional:
            settings["dest"] = declared.destination
        action = declared.keywords.get("action")
        nargs = declared.keywords.get("nargs")
        if isinstance(action, str) and action != "extend":
            settings["action"] = action
        elif action == Symbol("argparse.BooleanOptionalAction"):
            settings["action"] = argparse.BooleanOptionalAction
        if action == "store_const":
            settings["const"] = declared.keywords.get("const")
        if not declared.is_switch:
            settings["nargs"] = nargs if isinstance(nargs, (int, str)) else None
            # Words that must be given may be missing here: their values are then unknown.
            if declared.is_positional:
                settings["nargs"] = "?" if settings["nargs"] is None else "*"
        if nargs == "?" and not declared.is_positional:
            settings["const"] = declared.keywords.get("const")
        with suppress(argparse.ArgumentError, TypeError, ValueError):
            parser.add_argument(*declared.names, **settings)
        values[declared.destination] = declared.default
    namespace, rest = parser.parse_known_args(list(argv))
    by_destination = {declared.destination: declared for declared in options}
    for name, value in vars(namespace).items():
        declared = by_destination.get(name)
        kind = declared.keywords.get("type", MISSING) if declared is not None else MISSING
        values[name] = _converted(kind, value, convert)
    return values, rest


def _converted(kind: Any, value: Any, convert: Callable[[Any, str], Any]) -> Any:
    if isinstance(value, list):
        return [_converted(kind, inner, convert) for inner in value]
    if kind is MISSING or not isinstance(value, str):
        return value if value is None or isinstance(value, _KEEPS) else Unknown(str(value))
    return convert(kind, value)


_SET_BY_LAUNCHERS: Final = (
    "SLURM_",
    "OMPI_",
    "PMI_",
    "WORLD_SIZE",
    "RANK",
    "LOCAL_",
    "GROUP_",
    "MASTER_",
    "CUDA_",
)
"""Beginnings of variables that launchers set, so that their default in a script says nothing of a
run."""


def environment_variable(name: Any, variables: Mapping[str, str], default: Any) -> Any:
    """The value of an environment variable in a script.

    Args:
        name: name of the variable.
        variables: environment variables that are set.
        default: value that the script uses otherwise.
    """
    if not isinstance(name, str):
        return Unknown("os.environ[...]")
    if name in variables:
        return variables[name]
    if default is MISSING or name.startswith(_SET_BY_LAUNCHERS) or isinstance(default, Choice):
        return Unknown(f"os.environ[{name!r}]")
    return default
