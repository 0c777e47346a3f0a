"""Names of a package that come from their modules on first use."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy_names(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package whose names are those that it imports `if TYPE_CHECKING`: each comes
    from its module on first use, so that a process imports what it uses alone.
    """
    spec: Any = sys.modules[package].__spec__
    home = {
        alias.asname or alias.name: (node.module or "", alias.name)
        for block in ast.parse(spec.loader.get_source(package)).body
        if isinstance(block, ast.If)
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }

    def found(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, own = home[name]
        value = getattr(import_module(module), own)
        setattr(sys.modules[package], name, value)
        if isinstance(value, type):
            from perfmodel.display import shorten_reprs

            shorten_reprs(package)
        return value

    def names() -> list[str]:
        own = vars(sys.modules[package])
        return sorted([*(name for name in ("__doc__", "__version__") if name in own), *home])

    return found, names
