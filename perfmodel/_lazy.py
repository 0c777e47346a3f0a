"""Imports the names of a package from their modules on first use."""

import ast
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from itertools import chain
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` for a package that offers the names it imports under
    `if TYPE_CHECKING`.

    Each comes from its module on first use, so that a process imports only what it uses.
    """
    source_of = _type_checking_imports(package)

    def get_name(name: str) -> Any:
        if name not in source_of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, name_there = source_of[name]
        value = getattr(import_module(module), name_there)

        # From now on the package has it, and is not asked again.
        setattr(sys.modules[package], name, value)
        _take_loaded_classes(package, source_of)
        return value

    def list_names() -> list[str]:
        present = vars(sys.modules[package])
        special = [name for name in ("__doc__", "__version__") if name in present]
        return sorted([*special, *source_of])

    return get_name, list_names


def _take_loaded_classes(package: str, source_of: Mapping[str, tuple[str, str]]) -> None:
    """Give a package the classes of its modules that are loaded by now, and shorten their reprs.

    A function of the package may return such an object before anybody names its class.
    """
    from perfmodel.display import shorten_reprs

    door = sys.modules[package]
    for name, (module, name_there) in source_of.items():
        # A module that is still being imported may lack the name. One whose names are lazy is not
        # asked for more than it has: the question would import the module behind the name.
        present = vars(sys.modules[module]) if module in sys.modules else {}
        value = present.get(name_there)
        if isinstance(value, type):
            setattr(door, name, value)
    shorten_reprs(package)


def _type_checking_imports(package: str) -> dict[str, tuple[str, str]]:
    """Module of each name that a package imports inside an `if`, and its name there."""
    # Read from the source, as Python never executes this block. So names stand once, where type
    # checkers see them.
    spec: Any = sys.modules[package].__spec__
    statements = ast.parse(spec.loader.get_source(package)).body
    blocks = [statement for statement in statements if isinstance(statement, ast.If)]
    source_of = {}
    for node in chain.from_iterable(block.body for block in blocks):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                source_of[alias.asname or alias.name] = (node.module or "", alias.name)
    return source_of
