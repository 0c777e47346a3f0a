"""Python's own functions and methods, applied to the plain data of a followed script."""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Final

from perfmodel.ingest.launch._python_values import (
    MISSING,
    MOST_ELEMENTS,
    PLAIN,
    elements_of,
    guarded,
    is_hashable,
    is_known,
    truth,
)


def _pairs(*columns: list[Any], strict: bool = False) -> list[tuple[Any, ...]]:
    return list(zip(*columns, strict=strict))


_OF_NUMBERS: Final[Mapping[str, Callable[..., Any]]] = {
    "abs": abs,
    "round": round,
    "max": max,
    "min": min,
    "sum": sum,
    "divmod": divmod,
    "int": int,
    "float": float,
    "str": str,
    "bool": bool,
    "math.ceil": math.ceil,
    "math.floor": math.floor,
    "math.gcd": math.gcd,
    "math.lcm": math.lcm,
    "math.prod": math.prod,
    "math.sqrt": math.sqrt,
    "math.log2": math.log2,
}
"""Functions of known plain data."""
_OF_COLLECTIONS: Final[Mapping[str, Callable[..., Any]]] = {
    "len": len,
    "list": list,
    "tuple": tuple,
    "set": set,
    "reversed": lambda values: values[::-1],
    "enumerate": lambda values, start=0: list(enumerate(values, start)),
    "zip": _pairs,
    "range": range,
    "sorted": sorted,
}
"""Functions of collections, whose elements may be unknown."""


def _any_or_all(function: Callable[[list[Any]], bool], arguments: list[Any]) -> Any:
    """The result of `any` or `all`; `MISSING` if an element has no known truth."""
    elements = elements_of(arguments[0]) if arguments else None
    if elements is None:
        return MISSING
    outcomes = [truth(value) for value in elements]
    return MISSING if None in outcomes else function(outcomes)


def called(name: str, arguments: list[Any], keywords: Mapping[str, Any]) -> Any:
    """The result of one of Python's own functions; `MISSING` for other functions, and where it is
    not known."""
    known = all(is_known(argument) for argument in (*arguments, *keywords.values()))
    if name in _OF_NUMBERS:
        if known and not keywords:
            return guarded(_OF_NUMBERS[name], *arguments, **keywords)
        return MISSING
    if name in ("any", "all"):
        return _any_or_all(any if name == "any" else all, arguments)
    if name == "dict":
        if not arguments:
            return dict(keywords)
        return {**arguments[0], **keywords} if isinstance(arguments[0], dict) else MISSING
    if name not in _OF_COLLECTIONS or (name == "sorted" and (not known or keywords)):
        return MISSING
    if name == "range":
        return guarded(range, *arguments) if known else MISSING
    collections = [
        elements_of(argument) if not isinstance(argument, int) else argument
        for argument in arguments
    ]
    if None in collections:
        return MISSING
    return guarded(partial(_OF_COLLECTIONS[name], *collections, **keywords))


_TEXT_METHODS: Final = [
    "lower",
    "upper",
    "strip",
    "lstrip",
    "rstrip",
    "startswith",
    "endswith",
    "removeprefix",
    "removesuffix",
    "split",
    "rsplit",
    "partition",
    "rpartition",
    "isdigit",
    "isdecimal",
    "isnumeric",
    "title",
    "capitalize",
    "count",
    "find",
    "replace",
    "join",
    "splitlines",
]
_DICT_READERS: Final = ("items", "keys", "values", "get", "copy")


def method_result(owner: Any, name: str, arguments: list[Any], keywords: Mapping[str, Any]) -> Any:
    """The result of a method of plain data that changes nothing; `MISSING` where it is not
    known."""
    known = all(is_known(argument) for argument in arguments)
    if isinstance(owner, str) and name in _TEXT_METHODS and known and not keywords:
        text = guarded(getattr(owner, name), *arguments)
        return MISSING if isinstance(text, str) and len(text) > MOST_ELEMENTS else text
    if isinstance(owner, dict) and name in _DICT_READERS:
        if name == "get":
            if not arguments or not is_known(arguments[0]) or not is_hashable(arguments[0]):
                return MISSING
            return owner.get(arguments[0], arguments[1] if len(arguments) > 1 else None)
        return dict(owner) if name == "copy" else list(getattr(owner, name)())
    if (
        isinstance(owner, (list, tuple))
        and name in ("index", "count")
        and known
        and is_known(owner)
    ):
        return guarded(getattr(owner, name), *arguments)
    if isinstance(owner, list) and name == "copy":
        return list(owner)
    if isinstance(owner, (int, float)) and name == "bit_length":
        return guarded(getattr(owner, name))
    return MISSING


def formatted(value: Any, specification: str) -> str | None:
    """A value in an f-string; None if it is not known."""
    # A width of a billion would fill the memory.
    if not isinstance(value, PLAIN) or not re.fullmatch(
        r"[<>^+,]?0?\d{0,2},?(\.\d)?[a-zA-Z%]?", specification
    ):
        return None
    text = guarded(format, value, specification)
    return text if isinstance(text, str) else None
