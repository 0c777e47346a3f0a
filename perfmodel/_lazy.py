"""Names of a package that come from their modules on first use."""

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, str], renamed: Mapping[str, str] = MappingProxyType({})
) -> Callable[[str], Any]:
    """A package's `__getattr__`: each name from the module that `modules` lists it for, in words separated by spaces,
    so that a process imports what it uses alone.

    Args:
        package: whose names they are.
        modules: below it -> names.
        renamed: names that are others in their modules.
    """
    home = {name: module for module, names in modules.items() for name in names.split()}

    def found(name: str) -> Any:
        if name not in home:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"{package}.{home[name]}"), renamed.get(name, name))
        setattr(sys.modules[package], name, value)
        if isinstance(value, type):
            from perfmodel.display import shorten_reprs

            shorten_reprs(package)
        return value

    return found
