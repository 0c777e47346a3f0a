"""References between the values of a launch file, `${a.b}` and `${oc.env:NAME,default}`, replaced
as OmegaConf does."""

import ast
import operator
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

from perfmodel.ingest.launch._entries import Entry, broken

MOST_RESOLVED: Final = 1_000_000
"""Longest value, in characters, with its references replaced; each reference may double the length
of the one before it."""
MOST_OPERANDS: Final = 16
"""Most operands of one product or sum; more factors would give numbers with thousands of digits."""
MOST_REFERENCES: Final = 100_000
"""Most values that are visited while the references of a file are replaced."""
_REFERENCE: Final = re.compile(r"\$\{([^${}]*)\}")


def resolved(entries: dict[str, Entry], place: str) -> dict[str, Entry]:
    """Entries with their references replaced; raises for those that refer to themselves."""
    looked_at = 0
    # Variables at the head of a file (`base_path: /models/x`) mean nothing by themselves: what they
    # do is in the settings that refer to them.
    variables: set[str] = set()

    def resolve(key: str, value: Any, line: int, path: tuple[str, ...]) -> Any:
        nonlocal looked_at
        looked_at += 1
        # Ten keys that each refer twice to the next already stand for a thousand values.
        if looked_at > MOST_REFERENCES:
            raise broken(
                place,
                line,
                f"its references expand to more than {MOST_REFERENCES:,} values; write the values out",
            )
        if isinstance(value, list):
            return [resolve(key, item, line, path) for item in value]
        if not isinstance(value, str) or "${" not in value:
            return value
        # The innermost reference has no other in it, so that it is replaced first; then the one
        # around it can be read.
        for _ in range(value.count("${") + 1):
            match = _REFERENCE.search(value)
            if match is None:
                return value
            referred = _referred(match[1], key, entries)
            if referred is None:
                return value
            name, target = referred
            if "." not in name:
                variables.add(name)
            if name in path and len(path) == 1 and match[1] != name:
                # The reference is to a block that is elsewhere, with a key of the same name.
                return value
            if name in path:
                raise broken(
                    place, line, f"{key} refers to itself through ${{{match[1]}}}; write its value"
                )
            target = resolve(name or key, target, line, (*path, name) if name else path)
            # A value that is one reference keeps the type of its target; inside a text it becomes
            # text.
            if match[0] == value:
                return target
            value = value[: match.start()] + str(target) + value[match.end() :]
            if len(value) > MOST_RESOLVED:
                raise broken(
                    place,
                    line,
                    f"{key} becomes longer than {MOST_RESOLVED:,} characters; write its value",
                )
        return value

    try:
        values = {
            key: resolve(key, entry.value, entry.line, (key,)) for key, entry in entries.items()
        }
    except RecursionError:
        raise broken(place, 0, "its references are nested too deeply; write the values") from None
    return {
        key: replace(entry, value=values[key], is_default=entry.is_default or key in variables)
        for key, entry in entries.items()
    }


def _referred(text: str, key: str, entries: Mapping[str, Entry]) -> tuple[str, Any] | None:
    """Key (empty for none) and value of a reference; None if unknown."""
    kind, colon, target = text.partition(":")
    if colon:
        first, comma, default = (part.strip() for part in target.partition(","))
        # Resolvers of OmegaConf and of NeMo; all others need the framework to run.
        if kind in ("oc.env", "env"):
            value = os.environ.get(first, default if comma else None)
            return None if value is None else ("", _scalar(value))
        if kind == "oc.decode":
            return "", _scalar(target.strip())
        if kind == "oc.select" and first in entries:
            return first, entries[first].value
        if kind == "oc.select":
            return ("", _scalar(default)) if comma else None
        if kind == "eval":
            value = _arithmetic(target.strip("'\""))
            return None if value is None else ("", value)
        if kind in RESOLVERS and comma:
            operands = [_scalar(part.strip()) for part in target.split(",")]
            are_known = all(isinstance(operand, int) for operand in operands)
            if len(operands) <= MOST_OPERANDS and are_known:
                result = RESOLVERS[kind](operands)
                return None if result is None else ("", _scalar(str(result)))
        return None
    dots = len(text) - len(text.lstrip("."))
    name = text.strip(". ")
    if dots:
        parents = key.split(".")[:-dots]
        name = ".".join([*parents, name])
    # A file of a Hydra group names itself from the root of the configuration: `training.model.X` is
    # its `model.X`.
    while name not in entries and "." in name and not dots:
        name = name.partition(".")[2]
    return (name, entries[name].value) if name in entries else None


_OPERATIONS: Final[Mapping[type[ast.operator], Callable[[float, float], float]]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
}
_LARGEST: Final = 10**15
_LONGEST_EXPRESSION: Final = 200


def _arithmetic(text: str) -> int | None:
    """The whole number that an expression of numbers has (`4*4096//3`); None for other texts."""
    if len(text) > _LONGEST_EXPRESSION:
        return None
    try:
        value = _evaluated(ast.parse(text.strip(), mode="eval").body)
    except (SyntaxError, ValueError, ArithmeticError, RecursionError, MemoryError):
        return None
    return int(value) if value == int(value) else None


def _evaluated(node: ast.expr) -> float:
    """The value of an expression; raises `ValueError` for one that is not of numbers alone."""
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            result: float = value
        case ast.BinOp() if type(node.op) in _OPERATIONS:
            result = _OPERATIONS[type(node.op)](_evaluated(node.left), _evaluated(node.right))
        case ast.UnaryOp(op=ast.USub()):
            result = -_evaluated(node.operand)
        case _:
            raise ValueError("not an expression of numbers")
    if abs(result) > _LARGEST:
        raise ValueError("too large")
    return result


def _quotient(operands: Sequence[int]) -> int | None:
    """Quotient of two whole numbers, rounded down; None for other values."""
    return operands[0] // operands[1] if len(operands) == 2 and operands[1] else None


def _quotient_up(operands: Sequence[int]) -> int | None:
    """Quotient of two whole numbers, rounded up; None for other values."""
    return -(-operands[0] // operands[1]) if len(operands) == 2 and operands[1] else None


RESOLVERS: Final[Mapping[str, Callable[[Sequence[int]], int | None]]] = {
    "multiply": prod,
    "mul": prod,
    "sum": sum,
    "add": sum,
    "subtract": lambda operands: operands[0] - sum(operands[1:]),
    "divide_ceil": _quotient_up,
    "divide_floor": _quotient,
    "int_div": _quotient,
    "min": min,
    "max": max,
}
"""Arithmetic in configurations of NeMo (`nemo/core/config`, the launcher's own and its users')."""


def _scalar(text: str) -> Any:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else text
