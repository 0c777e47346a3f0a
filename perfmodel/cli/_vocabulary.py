"""Describes keys of layouts, jobs and searches, schedules, and table columns."""

import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, dataclass, fields
from inspect import signature
from types import UnionType
from typing import (
    TYPE_CHECKING,
    Any,
    Final,
    Literal,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from perfmodel.spec import Job, Layout, documented, key_fields
from perfmodel.spec.notation import SCHEDULE_ALIASES, written

if TYPE_CHECKING:
    from perfmodel.ingest.tables import TableKind

VOCABULARY: Final = ("layout", "job", "network", "search", "schedules", "columns")
"""Kinds of entries of `perfmodel catalog` other than names."""


@dataclass(frozen=True)
class Key:
    """A key of a job file or layout."""

    name: str
    values: str
    default: Any
    """Default value; `MISSING` if the key is required."""
    meaning: str


def keys(kind: str) -> list[Key]:
    """Keys of a section of a job file: `layout`, `job`, `network`, `search` or `serving`."""
    return _keys(_fields_of(kind))


def _fields_of(kind: str) -> list[tuple[type, str]]:
    """The fields that the keys of a section set: the record that has each, and its name."""
    if kind == "network":
        from perfmodel.catalog import NetworkEntry

        return [(NetworkEntry, f.name) for f in fields(NetworkEntry)]
    if kind == "serving":
        from perfmodel.serving import SERVING_KEYS, ServingOptions

        return [(ServingOptions, word) for word in SERVING_KEYS]
    if kind == "search":
        from perfmodel.planning.layouts.search_words import SEARCH_WORDS

        return [(home, word) for word, home in SEARCH_WORDS.items()]
    if kind == "layout":
        return [(entry.home, key) for key, entry in key_fields(Layout).items()]
    from perfmodel.catalog.job_files import JOB_WORDS

    return [(key_fields(Job)[word].home, word) for word in JOB_WORDS]


def _keys(named: Iterable[tuple[type, str]]) -> list[Key]:
    """Describe the fields of records as keys of a job file."""
    entries = []
    for home, name in named:
        hint = get_type_hints(home)[name]

        # Fields of `Job` that follow from model or device need not be said in a job file: the
        # defaults of `Job.of` count.
        default = next(f.default for f in fields(home) if f.name == name)
        if default is MISSING and home is Job:
            default = (
                signature(Job.of).parameters[name].default if name != "global_batch" else MISSING
            )
        entries.append(
            Key(
                name,
                _values(hint),
                default,
                documented(home)[name],
            )
        )
    return entries


def _options(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)


def _values(hint: Any) -> str:
    """Values that a key may have, in words."""
    first = next(option for option in _options(hint) if option is not type(None))
    if get_origin(first) is Literal:
        return ", ".join(word or '""' for word in get_args(first))
    # Only sequences have an origin then.
    if get_origin(first) is not None:
        element = get_args(first)[0]
        return "numbers" if element is int else "words"
    return {bool: "true, false", int: "whole number", float: "number"}.get(first, "text")


def entry_count(kind: str) -> int:
    """The number of entries of a kind of `VOCABULARY`, without reading their descriptions."""
    if kind == "schedules":
        from perfmodel.schedule import schedule_names

        return len(schedule_names())
    return len(_columns()) if kind == "columns" else len(_fields_of(kind))


def vocabulary(kind: str) -> list[dict[str, Any]]:
    """A record per key, schedule or column, as `--json` prints them."""
    if kind == "schedules":
        return _schedules()
    if kind == "columns":
        return _columns()
    return [
        {
            "name": k.name,
            "values": k.values,
            "default": _default(k.default),
            "meaning": k.meaning,
        }
        for k in keys(kind)
    ]


def glossary(kind: str, records: Iterable[dict[str, Any]], width: int) -> Iterator[str]:
    """The records as text: a line with the name, and its meaning below."""
    # Each vocabulary has columns of its own; what a record leaves out (`-`) is left out of its
    # line.
    for record in records:
        stated = {name: value for name, value in record.items() if value != "-"}
        if kind == "schedules":
            also = f"also {stated['also']}; " if "also" in stated else ""
            noun = "chunk" if stated["chunks"] == "1" else "chunks"
            chunks = f"{stated['chunks']} {noun} per device"
            summary = f"{also}{chunks}, updates {stated['updates']}"
        elif kind == "columns":
            summary = f"{stated['table']}: {stated['holds']}"
            if "needed" in stated:
                summary += ", needed"
        else:
            summary = stated["values"]
            default = stated.get("default")
            if default == "needed":
                summary += "; needed"
            elif default:
                summary += f"; default {default}"
        yield f"{record['name']}  ({summary})"
        text = record["meaning"]
        if text:
            yield textwrap.indent(textwrap.fill(text, width - 4, break_on_hyphens=False), "    ")


def _default(value: Any) -> str:
    if value is MISSING:
        return "needed"
    return "-" if value in (None, "", ()) else written(value)


def _schedules() -> list[dict[str, Any]]:
    """Schedules by name, with their names in papers."""
    from perfmodel.schedule import get_schedule, schedule_names

    records = []
    for name in schedule_names():
        schedule = get_schedule(name)
        also = ", ".join(alias for alias, target in SCHEDULE_ALIASES.items() if target == name)
        chunks = "any" if schedule.chunks is None else str(schedule.chunks)
        # Schedules with a parameter of their own take it after a colon.
        takes = f"{name}:{schedule.number.upper()}" if schedule.number else name
        text = " ".join((schedule.build.__doc__ or "").split("\n\n")[0].split()).removesuffix(".")
        updates = "after a flush" if not schedule.asynchronous else "without a flush"
        records.append(
            {
                "name": takes,
                "also": also or "-",
                "chunks": chunks,
                "updates": updates,
                "meaning": text,
            }
        )
    return records


def _columns() -> list[dict[str, Any]]:
    """Columns of tables of kernels, of collectives and of runs."""
    from perfmodel.ingest.tables import COLUMNS, NEEDED_OF_RUNS, REQUIRED, RUN_COLUMNS

    tables: tuple[tuple[str, TableKind], ...] = (
        ("kernels", "compute"),
        ("collectives", "collective"),
    )
    records = []
    for table, kind in tables:
        for name, column in COLUMNS.items():
            if column.kind in (None, kind):
                holds = "text" if column.text else column.unit or "number"
                records.append(_column(table, name, holds, name in REQUIRED[kind], column.meaning))
    for name, (holds, text) in RUN_COLUMNS.items():
        records.append(_column("runs", name, holds, name in NEEDED_OF_RUNS, text))
    return records


def _column(table: str, name: str, holds: str, needed: bool, text: str) -> dict[str, Any]:
    """Return the record of one column of a table."""
    return {
        "name": name,
        "table": table,
        "holds": holds,
        "needed": "yes" if needed else "-",
        "meaning": text,
    }
