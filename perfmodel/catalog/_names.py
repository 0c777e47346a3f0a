"""Name lookup: case-insensitive, with aliases, indifferent to separators."""

from collections.abc import Iterable, Mapping
from typing import TypeVar

from perfmodel.errors import PerfModelError, UnknownNameError

T = TypeVar("T")


def key(name: str) -> str:
    """What names are compared by: lower case, with spaces and underscores as hyphens."""
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def index(entries: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """Map the key of every name and alias to the name.

    Raises:
        PerfModelError: if two entries share a name or alias.
    """
    found: dict[str, str] = {}
    for name, aliases in entries:
        for text in (name, *aliases):
            if found.setdefault(key(text), name) != name:
                raise PerfModelError(f"catalog: {text!r} names both {found[key(text)]!r} and {name!r}")
    return found


def resolve(kind: str, name: str, names: Mapping[str, str], table: Mapping[str, T]) -> T:
    """The entry of `table` that `name` stands for.

    Raises:
        UnknownNameError: with the nearest known names.
    """
    try:
        return table[names[key(name)]]
    except KeyError:
        raise UnknownNameError(kind, name, {*table, *names}) from None
