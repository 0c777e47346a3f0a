"""Follows Python scripts symbolically: values of names and attributes, without executing anything.

Assignments, calls of the script's own functions, loops over known values and conditions are
followed. Objects made by code from outside the script are records of the call with the attributes
that the script assigns later. A condition that the script alone does not decide leaves every value
open that its branches change (`Choice`). Nothing is known here of any framework, and Python's
standard library only as far as scripts take settings from it: `argparse`, the environment, `copy`,
`dataclasses`, `functools` and `math`.
"""

import ast
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from perfmodel.display import shorten_reprs
from perfmodel.ingest.launch._entries import Neighbours
from perfmodel.ingest.launch._python_calls import Call
from perfmodel.ingest.launch._python_statements import Follower
from perfmodel.ingest.launch._python_values import (
    MISSING,
    Choice,
    Class,
    Function,
    Scope,
    ScriptObject,
    Symbol,
    Unknown,
    parsed_module,
)


class Followed:
    """The known state of a script after it was followed."""

    def __init__(self, follower: Follower, scope: Scope) -> None:
        self._follower = follower
        self._scope = scope

    @property
    def names(self) -> Mapping[str, Any]:
        """Values of the module's names."""
        return self._scope.names

    @property
    def calls(self) -> Sequence[Call]:
        """Calls of code from outside the script, in their order."""
        return tuple(self._follower.calls)

    @property
    def unused_functions(self) -> tuple[str, ...]:
        """Functions of the module that nothing in it has called, and that no other function
        names."""
        functions = {}
        for name, value in self._scope.names.items():
            if isinstance(value, Function) and value.scope is self._scope:
                functions[name] = value.node
        named: set[str] = set()
        for name, function in functions.items():
            names = {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}
            named |= names - {name}
        called = self._follower.was_called
        return tuple(
            name for name, node in functions.items() if name not in named and id(node) not in called
        )

    def call(self, name: str) -> Any:
        """The result of a function of the module that is called with its defaults."""
        function = self._scope.names[name]
        return self._follower.guarded(lambda: self._follower.call_function(function, [], {}))


def follow(
    text: str,
    place: str,
    *,
    arguments: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
    fields_of: Callable[
        [str, list[Any], dict[str, Any]], Mapping[str, Any]
    ] = lambda maker, positional, keywords: {},
    module_text: Callable[[str], str | None] = lambda name: None,
    result_of: Callable[[str], Any] = lambda path: MISSING,
) -> Followed:
    """Follow a Python script from top to bottom.

    Args:
        text: the script.
        place: path of the script, for messages.
        arguments: words behind its name on the command line.
        variables: environment variables of the script.
        fields_of: attributes (with dots) of an object that a call from outside makes, beyond its
            keyword arguments.
        module_text: the text of an imported module of the script's own; None for those from
            outside.
        result_of: the result of a function from outside by its full name, `MISSING` where it is not
            known.

    Raises:
        LaunchFileError: text that is not Python, that ends with an error, or that does too much to
            be followed.
    """
    follower = Follower(place, arguments, variables or {}, fields_of, module_text, result_of)
    scope = Scope({"__name__": "__main__", "__file__": place})
    module = parsed_module(text, place)
    follower.guarded(lambda: follower.block(module.body, scope))
    return Followed(follower, scope)


_FROM_OUTSIDE: Final = ("lightning", "megatron", "nemo", "nemo_run", "torch", "transformers", "trl")
"""Packages that are never the script's own, whatever lies beside it."""


def module_beside(name: str, neighbours: Neighbours) -> str | None:
    """The text of a module beside a script; None for those from outside."""
    plain = name.lstrip(".")
    if not plain or plain.split(".")[0] in _FROM_OUTSIDE:
        return None
    path = neighbours.folder / f"{plain.replace('.', '/')}.py"
    named = neighbours.find(str(path)) if path.is_file() else None
    return None if named is None else named.text


shorten_reprs(__name__)
