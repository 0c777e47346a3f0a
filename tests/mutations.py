"""Parsed files with one thing wrong, for tests that everything a user may write ends in a value or
in one line."""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any

DROPPED = object()
VALUES: tuple[Any, ...] = (
    DROPPED,
    None,
    0,
    -1,
    2.5,
    0.5,
    10**30,
    1e300,
    float("nan"),
    float("inf"),
    "",
    "many",
    "8",
    True,
    [],
    [4, 8],
    {},
    {"x": {"y": 1}},
)
"""Put in place of every value: nothing, null, zero, negative, fractions, huge, not finite, text,
lists, nested."""


def mutations(
    data: dict[str, Any], values: tuple[Any, ...] = VALUES
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each value of a parsed file, however deep, replaced by each of `values`; with words for what
    was done."""
    for path in _paths(data):
        for value in values:
            changed = deepcopy(data)
            at: Any = changed
            for step in path[:-1]:
                at = at[step]
            if value is DROPPED:
                del at[path[-1]]
            else:
                at[path[-1]] = value
            yield (
                f"{'.'.join(map(str, path))} -> {'dropped' if value is DROPPED else repr(value)[:40]}",
                changed,
            )


def _paths(data: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    items = ()
    if isinstance(data, dict):
        items = data.items()
    elif isinstance(data, list):
        items = enumerate(data)
    for key, value in items:
        yield (*before, key)
        yield from _paths(value, (*before, key))


def toml_text(data: dict[str, Any]) -> str:
    """The data as TOML, nulls left out."""
    return "\n".join(f"{_value(k)} = {_value(v)}" for k, v in data.items() if v is not None) + "\n"


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, dict):
        return (
            "{"
            + ", ".join(f"{_value(k)} = {_value(v)}" for k, v in value.items() if v is not None)
            + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_value(v) for v in value if v is not None) + "]"
    return repr(value)


def refusal(error: Exception, what: str) -> str:
    """The message of a refusal, which must be one short line for people."""
    text = str(error)
    if "\n" in text or "object at 0x" in text or len(text) > 1500:
        raise AssertionError(f"{what}: refused in other than one short line: {text}")
    return text
