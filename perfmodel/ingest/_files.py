"""Reads text, JSON and checked values from files; every fault raises a `TableError` that names its
place."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from perfmodel import files
from perfmodel.errors import TableError, first_line

_LARGEST: Final = 1e30
"""Larger than any valid time or size; greater numbers are damage."""


def read_bytes(path: Path) -> bytes:
    """A file's bytes, expanded if they are compressed.

    Raises:
        TableError: no such file, an empty one, one that is too large once it is expanded, or
            damaged or truncated compressed data.
    """
    try:
        data = files.read_data(path)
    except files.DAMAGED as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise TableError(
                f"{path}: {(error.strerror or 'cannot be read').lower()}; give a file that can be read"
            ) from None
        raise TableError(
            f"{path}: the compressed data are damaged or cut short ({first_line(error)}); copy the file again"
        ) from None
    except ValueError as error:
        raise TableError(f"{path}: {error}") from None
    if not data.strip():
        raise TableError(f"{path}: the file is empty; export it again")
    return data


def read_text(path: Path) -> str:
    """A text file (UTF-8).

    Raises:
        TableError: as `read_bytes`, or bytes that are not text.
    """
    try:
        text = read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise TableError(
            f"{path}: this is not UTF-8 text (byte {error.start}); name its format"
        ) from None
    # UTF-16 and binary files may decode as UTF-8, but no text has NUL characters.
    if "\0" in text:
        raise TableError(
            f"{path}: this is not a text file, because it has NUL characters; name its format"
        )
    return text


def read_json(path: Path, list_key: str = "") -> dict[str, Any]:
    """A JSON file that holds one object.

    Args:
        path: the file.
        list_key: the key of the object that a file may hold alone, if it may.

    Raises:
        TableError: as `read_text`, not JSON, or JSON of another kind.
    """
    text = read_text(path)
    try:
        value = files.parse_json(text)
    except json.JSONDecodeError as error:
        raise TableError(
            f"{path}: not complete JSON (line {error.lineno}: {error.msg}); was the export cut short?"
        ) from None
    except ValueError as error:
        raise TableError(
            f"{path}: this JSON cannot be read ({first_line(error)}); export it again"
        ) from None
    if list_key and isinstance(value, list):
        return {list_key: value}
    if not isinstance(value, dict):
        raise TableError(
            f"{path}: the JSON must be an object, got {type(value).__name__}; name its format"
        )
    return value


def number(value: Any, description: str, place: object, low: float = -math.inf) -> float:
    """`value` as a finite float of at least `low`; text that is a number counts.

    Raises:
        TableError: naming `description` and `place` (file and line or record).
    """
    try:
        # Python takes True for 1, and the bytes of a damaged SQLite cell for text.
        parsed = math.nan if isinstance(value, bool | bytes) else float(value)
    except (TypeError, ValueError, OverflowError):
        parsed = math.nan
    if not (low <= parsed < _LARGEST and parsed > -_LARGEST):
        limit = f" of at least {low:g}" if low > -math.inf else ""
        raise TableError(
            f"{place}: {description} must be a finite number{limit}, got {_short_text(value)}; {_REMEDY}"
        )
    return parsed


def integer(value: Any, description: str, place: object, low: int = 0) -> int:
    """`value` as a whole number from `low` to below 2^62 (raises `TableError` as `number` does)."""
    parsed = number(value, description, place, low)
    if parsed != int(parsed) or parsed >= 2**62:
        raise TableError(
            f"{place}: {description} must be a whole number, got {_short_text(value)}; {_REMEDY}"
        )
    # Nanoseconds of an epoch have more digits than a float: an integer stays as it is.
    return value if isinstance(value, int) else int(parsed)


def text(value: Any, description: str, place: object) -> str:
    """`value` as text (raises `TableError` for anything else)."""
    if not isinstance(value, str):
        raise TableError(
            f"{place}: {description} must be text, got {_short_text(value)}; {_REMEDY}"
        )
    return value


def mapping(value: Any, description: str, place: object) -> Mapping[str, Any]:
    """`value` as a JSON object (raises `TableError` for anything else)."""
    if not isinstance(value, dict):
        raise TableError(
            f"{place}: {description} must be an object, got {_short_text(value)}; {_REMEDY}"
        )
    return value


def listing(value: Any, description: str, place: object) -> list[Any]:
    """`value` as a JSON array (raises `TableError` for anything else)."""
    if not isinstance(value, list):
        raise TableError(
            f"{place}: {description} must be a list, got {_short_text(value)}; {_REMEDY}"
        )
    return value


_REMEDY: Final = "repair the record or export the file again"


def _short_text(value: Any) -> str:
    try:
        text = repr(value)
    except ValueError:  # an integer of too many digits
        return "a number of thousands of digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
