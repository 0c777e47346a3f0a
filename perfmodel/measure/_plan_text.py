"""Plans as TOML text that `read_plan` reads back."""

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, Final

from perfmodel.ingest.tables import write_text
from perfmodel.measure._plan import Plan
from perfmodel.ops import Collective, Op

_LABELS: Final = ("family", "op", "collective", "dtype", "pass", "accumulate", "causal", "phase")
"""Keys by which neighbouring ops must agree to share an entry."""


def write_plan(path: Path | str, plan: Plan) -> None:
    """Write a plan that `read_plan` gives back unchanged if its collectives split evenly over their ranks."""
    write_text(path, plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan as TOML; neighbouring ops of one kind share an entry, the sizes in which they differ a joint key."""
    stated = {f.name: value for f in fields(plan) if (value := getattr(plan, f.name)) != f.default}
    ops = {name: stated.pop(name, ()) for name in ("kernels", "cold_kernels", "collectives")}
    tables = {name: stated.pop(name) for name, value in list(stated.items()) if is_dataclass(value)}
    parts = ["\n".join(_lines(stated.items()))]
    parts += [f"[{name}]\n" + "\n".join(_lines(vars(table).items())) for name, table in tables.items()]
    parts += _entries("kernels", map(_columns, ops["kernels"]))
    parts += _entries("kernels", ({**_columns(op), "cache": "cold"} for op in ops["cold_kernels"]))
    parts += _entries("collectives", map(_columns, ops["collectives"]))
    return "\n\n".join(parts) + "\n"


def _entries(table: str, rows: Iterable[dict[str, Any]]) -> list[str]:
    of_kind = groupby(rows, key=lambda row: (list(row), [row.get(name) for name in _LABELS]))
    return [f"[[{table}]]\n" + "\n".join(_grid(list(alike))) for _, alike in of_kind]


def _columns(op: Op) -> dict[str, Any]:
    """Fields that tell the op from the default one."""
    columns: dict[str, Any] = {} if isinstance(op, Collective) else {"family": op.family}
    for f in fields(op):
        value = getattr(op, f.name)
        if value != f.default or f.name in ("dtype", "pass_"):
            # sizes of collectives are whole bytes, which plans state as integers
            columns["pass" if f.name == "pass_" else f.name] = int(value) if f.name == "bytes" else value
    return columns


def _grid(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    names = list(rows[0])
    joint = [name for name in names if any(row[name] != rows[0][name] for row in rows)]
    joint = joint or (names[-1:] if len(rows) > 1 else [])  # the same op twice
    yield from _lines((name, rows[0][name]) for name in names if name not in joint)
    if joint:
        values = [[row[name] for name in joint] if len(joint) > 1 else row[joint[0]] for row in rows]
        yield f"{_key(','.join(joint))} = {_value(values)}"


def _lines(items: Iterable[tuple[str, Any]]) -> Iterator[str]:
    return (f"{_key(name)} = {_value(value)}" for name, value in items)


def _key(name: str) -> str:
    return json.dumps(name) if "," in name else name


def _value(value: Any) -> str:
    """JSON's strings, numbers, booleans and lists are TOML's, but for characters beyond the basic plane and DEL."""
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
