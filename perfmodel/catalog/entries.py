"""Reads and checks TOML entries of the catalog, and looks up names (ignoring case and separators,
with aliases)."""

import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import is_dataclass
from difflib import get_close_matches
from functools import cache
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, TypeVar

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.files import TooLargeError, parse_toml, read_text
from perfmodel.spec import Sectioned, flat_location, key_fields, nested

T = TypeVar("T")


def key(name: str) -> str:
    """Normalise a name for comparison: lower case, with hyphens for spaces and underscores."""
    return name.strip().lower().replace(" ", "-").replace("_", "-")


def index(entries: Iterable[tuple[str, Iterable[str]]]) -> dict[str, str]:
    """Map the key of every name and alias to the name.

    Raises:
        PerfModelError: if two entries share a name or alias.
    """
    names: dict[str, str] = {}
    for name, aliases in entries:
        for text in (name, *aliases):
            if names.setdefault(key(text), name) != name:
                raise PerfModelError(
                    f"catalog: {text!r} is a name of both {names[key(text)]!r} and {name!r}; rename one"
                )
    return names


def resolve(kind: str, name: str, names: Mapping[str, str], table: Mapping[str, T]) -> T:
    """Look up the entry of `table` with this name or alias.

    A hyphen between a letter and a number is optional where only one entry can be meant: `GPT-3` is
    `gpt3`, and `resnet50` is `resnet-50`.

    Raises:
        UnknownNameError: with the nearest known names.
    """
    if key(name) in names:
        return table[names[key(name)]]
    meant = {entry for known, entry in names.items() if _joined(known) == _joined(name)}
    if len(meant) != 1:
        raise UnknownNameError(kind, name, {*table, *names})
    return table[meant.pop()]


def _joined(name: str) -> str:
    """The key of a name without hyphens between a letter and the number after it.

    Those between two numbers stay: `gpt3-6.7b` and `gpt-36.7b` are models of different sizes.
    """
    return re.sub(r"(?<=[a-z])-(?=\d)", "", key(name))


def package_tables(folder: str) -> dict[str, dict[str, Any]]:
    """Contents of every TOML file in a folder of the packaged data, by file name."""
    root = files("perfmodel.catalog") / "data" / folder
    names = sorted(f.name for f in root.iterdir() if f.name.endswith(".toml"))
    return {name: tomllib.loads((root / name).read_text("utf-8")) for name in names}


@cache
def stated_entries(folder: str) -> MappingProxyType[str, tuple[str, dict[str, Any]]]:
    """Map each name in a folder of the packaged data to its file and its unchecked table."""
    entries = {}
    for file, tables in package_tables(folder).items():
        entries |= {name: (file, entry) for name, entry in tables.items()}
    return MappingProxyType(entries)


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a user's TOML file (raises `PerfModelError` as `parsed`)."""
    return parsed(path, parse_toml, "TOML")


_LFS_POINTER: Final = "version https://git-lfs.github.com/spec/"
"""Start of the small file that stands for a large one until Git LFS fetches it."""


def parsed(path: Path, parse: Callable[[str], Any], notation: str) -> Any:
    """The content of a user's TOML file.

    Raises:
        PerfModelError: if it cannot be read or is not in the notation; names file and line.
    """
    try:
        content = read_text(path)
        if content.startswith(_LFS_POINTER):
            raise PerfModelError(
                f"{path}: is a pointer of Git LFS, not the file itself; run git lfs pull"
            )
        return parse(content)
    except IsADirectoryError:
        raise PerfModelError(f"{path}: is a folder; give a {notation} file") from None
    except OSError as error:
        raise PerfModelError(f"{path}: cannot be read ({error.strerror})") from None
    except TooLargeError as error:
        raise PerfModelError(f"{path}: {error}") from None
    except UnicodeDecodeError:
        raise PerfModelError(f"{path}: not a text file in UTF-8; give a {notation} file") from None
    except ValueError as error:  # numbers of thousands of digits are a plain ValueError
        raise PerfModelError(f"{path}: not valid {notation}: {error}") from None


def checked(kind: type[T], data: Mapping[str, Any], place: str) -> T:
    """Build a dataclass from parsed TOML or JSON; unknown keys are ignored, or refused for
    `spec.Stated`.

    Raises:
        PerfModelError: names `place` and, for every missing, unknown or malformed key, the key and
            what is wrong with it.
    """
    from pydantic import ValidationError

    # A file has no sections: its keys are put into them, and errors name the keys alone.
    sectioned = issubclass(kind, Sectioned)
    tables = nested(kind, data) if sectioned else data
    problems = (
        [f"{key}: {_unknown(kind, key)}" for key in data if key not in key_fields(kind)]
        if sectioned
        else []
    )
    try:
        # strict JSON takes lists for tuples and whole numbers for floats, but no text for numbers
        record = _adapter(kind).validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        stated = []
        for e in error.errors():
            reason = _reason(e["type"], e["msg"])
            if reason == _UNKNOWN and len(e["loc"]) == 1:
                reason = _unknown(kind, str(e["loc"][0]))
            stated.append(f"{_location(kind, e['loc'])}: {reason}")
        raise PerfModelError(f"{place}: {'; '.join([*stated, *problems])}") from None
    if problems:
        raise PerfModelError(f"{place}: {'; '.join(problems)}")
    return record


def _unknown(kind: type, key: str) -> str:
    """The reason why a key is refused, with the keys that it may stand for."""
    if not is_dataclass(kind):
        return _UNKNOWN
    names = sorted(key_fields(kind))
    close = get_close_matches(key, names, n=1, cutoff=0.7)
    if close:
        return f"{_UNKNOWN} (did you mean {close[0]!r}?)"
    # Records of models have a hundred keys, which nobody reads in an error.
    return f"{_UNKNOWN} (known: {', '.join(names)})" if len(names) <= _MOST_KEYS else _UNKNOWN


def _location(kind: type, location: tuple[str | int, ...]) -> str:
    """Return the key of a wrong value in a file; nested tables are joined by dots."""
    inner = flat_location(kind, location) if issubclass(kind, Sectioned) else location
    return ".".join(map(str, inner)) or "entry"


def checked_fields(
    kind: type, data: Mapping[str, Any], place: str, known: Iterable[str]
) -> dict[str, Any]:
    """Check some fields of a dataclass from parsed TOML; lists become tuples where needed.

    Raises:
        PerfModelError: names `place`, the key, and what is wrong with it.
    """
    from pydantic import ValidationError

    # Each field is checked by itself, since the others are stated elsewhere (by the framework, on
    # the command line).
    by_key = key_fields(kind)
    known = tuple(known)
    values = {}
    for key, value in data.items():
        if key not in known:
            raise PerfModelError(f"{place}: {UnknownNameError('key', key, known)}")
        try:
            values[key] = _adapter(by_key[key].hint).validate_json(
                json.dumps(value, default=str), strict=True
            )
        except ValidationError as error:
            reason = _reason(error.errors()[0]["type"], error.errors()[0]["msg"])
            raise PerfModelError(
                f"{place}: {key}: {reason[0].lower() + reason[1:]}, got {value!r}"
            ) from None
    return values


_UNKNOWN: Final = "unknown key"
_MOST_KEYS: Final = 24
_REASONS: Final = {
    "missing": "missing",
    "unexpected_keyword_argument": _UNKNOWN,
    "extra_forbidden": _UNKNOWN,
    "bool_type": "must be true or false",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "string_type": "must be text",
}
"""Words for pydantic's kinds of errors."""


def _reason(kind: str, message: str) -> str:
    """The reason why pydantic refused a value, in words for the author of the file."""
    return _REASONS.get(kind, message.removeprefix("Value error, "))


@cache
def _adapter(kind: type[T]) -> Any:
    # pydantic takes a tenth of a second to import, so it is loaded only when a file is checked
    from pydantic import TypeAdapter

    return TypeAdapter(kind)
