"""Compares two calibrations row by row."""

from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any, Final

from perfmodel.errors import TableError
from perfmodel.ingest.tables import read_table
from perfmodel.measure.tables._card import Card, card_path, read_card
from perfmodel.measure.tables._rows import Row, is_suspect, present, row_key

SUFFIXES: Final = (".csv", ".csv.gz", ".parquet")
CARD_FIELDS: Final = ("device", "machine", "software", "collector_sha256", "method")


def compare(first: Path | str, second: Path | str) -> dict[str, Any]:
    """Compare two tables, or all tables with cards in two folders.

    Rows are matched by op, shape and cache; those that were disturbed to the end stay out. Where
    one side has several rows of one identity (other people's tables), their median counts.

    Returns:
        `families`: per op family or collective its `rows` on both sides, the median of
        second / first (`median_ratio`), the share of rows with two confidence intervals
        (`with_intervals` of them) whose intervals do not meet (`beyond_intervals`), and rows
        `only_in_first`, `only_in_second`. `suspect_rows` left out per side. `cards`: what differs,
        name -> both values.

    Raises:
        TableError: if a side is missing, unreadable, or a folder without tables.
    """
    sides = [_rows(Path(path)) for path in (first, second)]
    first_rows = _by_key(sides[0])
    second_rows = _by_key(sides[1])

    # Each row on both sides gives its family a ratio, and where both tell intervals whether these
    # are apart.
    families: dict[str, dict[str, Any]] = {}
    for key in first_rows | second_rows:
        a = first_rows.get(key)
        b = second_rows.get(key)
        no_counts = {"ratios": [], "apart": [], "only_in_first": 0, "only_in_second": 0}
        counts = families.setdefault(_family(a or b or {}), no_counts)
        if a is None or b is None:
            counts["only_in_second" if a is None else "only_in_first"] += 1
            continue
        counts["ratios"].append(b["time_us"] / a["time_us"])
        if present(a.get("ci95_half_width")) and present(b.get("ci95_half_width")):
            counts["apart"].append(_intervals_disjoint(a, b))
    return {
        "first": str(first),
        "second": str(second),
        "families": {name: _figures(counts) for name, counts in families.items()},
        "suspect_rows": [sum(map(is_suspect, rows)) for rows in sides],
        "cards": _card_differences(*(_cards(Path(path)) for path in (first, second))),
    }


def _figures(counts: dict[str, Any]) -> dict[str, Any]:
    """A family's figures in the form that `compare` returns."""
    ratios, apart = counts["ratios"], counts["apart"]
    return {
        "rows": len(ratios),
        "median_ratio": median(ratios) if ratios else None,
        "with_intervals": len(apart),
        "beyond_intervals": sum(apart) / len(apart) if apart else None,
        "only_in_first": counts["only_in_first"],
        "only_in_second": counts["only_in_second"],
    }


def _intervals_disjoint(a: Row, b: Row) -> bool:
    """Whether the medians' confidence intervals do not meet."""
    # Half-widths are shares of the medians.
    half_us = a["time_us"] * a["ci95_half_width"] + b["time_us"] * b["ci95_half_width"]
    return abs(a["time_us"] - b["time_us"]) > half_us


def _tables(path: Path) -> list[Path]:
    """The table at a path, or all tables with cards in a folder."""
    # A single table may be other people's, without a card; in a folder, the card distinguishes
    # tables from other files.
    if not path.is_dir():
        return [path]
    paths = sorted(p for p in path.iterdir() if p.name.endswith(SUFFIXES) and card_path(p).exists())
    if not paths:
        raise TableError(
            f"{path}: there is no table with a card; give a table or folder made by perfmodel calibrate"
        )
    return paths


def _rows(path: Path) -> list[Row]:
    """Rows of all tables at a path."""
    rows: list[Row] = []
    for table_path in _tables(path):
        for record in read_table(table_path).to_dict("records"):
            rows.append({str(name): value for name, value in record.items()})
    return rows


def _by_key(rows: Iterable[Row]) -> dict[str, Row]:
    """Undisturbed rows by their identity, the median of several of one identity."""
    # Columns besides the time are those of the first.
    grouped: dict[str, list[Row]] = {}
    for row in rows:
        if not is_suspect(row):
            grouped.setdefault(row_key(row), []).append(row)
    by_key = {}
    for key, repeats in grouped.items():
        by_key[key] = {**repeats[0], "time_us": median(row["time_us"] for row in repeats)}
    return by_key


def _family(row: Row) -> str:
    """The collective, or the op's family."""
    kind = row["collective"] if present(row.get("collective")) else row["op_family"]
    return str(kind)


def _cards(path: Path) -> list[Card]:
    """Cards of the tables at a path that have one."""
    return [read_card(table) for table in _tables(path) if card_path(table).exists()]


def _card_differences(first: list[Card], second: list[Card]) -> dict[str, list[Any]]:
    """Both values by name, joined over several tables; `None` for a side without cards."""
    first_values = _flat(first)
    second_values = _flat(second)
    differences = {}
    for name in first_values | second_values:
        pair = [first_values.get(name), second_values.get(name)]
        if pair[0] != pair[1]:
            differences[name] = pair
    return differences


def _leaves(path: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Values inside nested tables, each with its dotted path."""
    if not isinstance(value, dict):
        yield path, " ".join(map(str, value)) if isinstance(value, list | tuple) else value
        return
    for name, inner in value.items():
        yield from _leaves(f"{path}.{name}", inner)


def _flat(cards: list[Card]) -> dict[str, Any]:
    """Values of the cards' compared fields by dotted path; a list where cards differ."""
    # A folder may hold cards of several tables, measured on one machine or not.
    values: dict[str, list[Any]] = {}
    for card in cards:
        for name in CARD_FIELDS:
            value = asdict(card)[name]
            for path, leaf in _leaves(name, value):
                values.setdefault(path, []).append(leaf)
    flat = {}
    for name, card_values in values.items():
        distinct = list(dict.fromkeys(map(str, card_values)))
        flat[name] = distinct[0] if len(distinct) == 1 else distinct
    return flat
