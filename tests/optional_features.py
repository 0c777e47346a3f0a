"""Every optional feature of a record switched on: each of its fields with other values than its
own.

Tables of stored answers are made of these, so that a new field is in them from the day on which it
is added.
"""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

_SMALL_BY_UNIT = (("_per_s", 1e9), ("_s", 1e-4), ("_bytes", 2e8), ("_params", 1e8))
"""Values of figures that are 0 or unknown by default, by the end of the name that has their
unit."""


def other_values(record: Any) -> Iterator[tuple[str, Any]]:
    """Name and value of every change of one field, those of sections included, which are named by
    their field alone."""
    hints = get_type_hints(type(record))
    for field in fields(record):
        value = getattr(record, field.name)
        if is_dataclass(value):
            yield from other_values(value)
            continue
        for other in _others(field.name, value, hints[field.name]):
            yield field.name, other


def _others(name: str, value: Any, hint: Any) -> list[Any]:
    """Other values of a field by its type; none of names and of records."""
    choices = [hint]
    if get_origin(hint) in (Union, UnionType):
        choices = [choice for choice in get_args(hint) if choice is not type(None)]
    (first, *_) = choices
    if get_origin(first) is Literal:
        return [choice for choice in get_args(first) if choice != value]
    if first is bool:
        return [not value]
    if first is int:
        return [2 if not value else 2 * value]
    if first is float:
        return [_float_of_unit(name) if not value or value == float("inf") else value * 1.5]
    if get_origin(first) is tuple:
        return _tuples(value, *get_args(first))
    return []


def _float_of_unit(name: str) -> float:
    for end, value in _SMALL_BY_UNIT:
        if name.endswith(end):
            return value
    return 0.25


def _tuples(value: tuple[Any, ...] | None, element: Any, *more: Any) -> list[tuple[Any, ...]]:
    """Tuples of one literal each, or of as many whole numbers as the type has."""
    if get_origin(element) is Literal:
        return [(choice,) for choice in get_args(element) if (choice,) != value]
    if element is int and int in more:
        return [(2,) * (1 + len(more))]
    return []
