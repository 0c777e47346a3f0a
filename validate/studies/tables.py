"""Tables of reports as Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd


def markdown_table(table: pd.DataFrame) -> str:
    """Format a frame as a Markdown table, with numbers right-aligned and of four digits."""
    # Truth values are numbers to pandas, and words to a reader.
    numeric = [
        pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind)
        for kind in table.dtypes
    ]
    rows = [list(map(_cell, row)) for row in table.itertuples(index=False)]
    head = list(map(str, table.columns))
    rule = ["--:" if is_number else "---" for is_number in numeric]
    return _lines(head, rule, rows) + "\n"


def _cell(value: Any) -> str:
    """Format a value for a report: `-` for none, and a miss in bold."""
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "**no**"
    # Empty cells of frames are NaN.
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "-"
    if isinstance(value, float):
        return "does not fit" if np.isinf(value) else f"{value:.4g}"
    return str(value)


def rows_table(head: Sequence[str], rows: Iterable[Sequence[Any]], columns_on_left: int = 1) -> str:
    """Format rows of text as a Markdown table; the first columns are aligned on the left, the
    others on the right."""
    columns_on_right = len(head) - columns_on_left
    return _lines(head, ["---"] * columns_on_left + ["--:"] * columns_on_right, rows)


def frame_table(table: pd.DataFrame, digits: str) -> str:
    """Format a frame as a Markdown table with all cells on the left, and floats in a format such as
    `.4f`."""
    rows = []
    for row in table.itertuples(index=False):
        rows.append([f"{value:{digits}}" if isinstance(value, float) else value for value in row])
    head = list(map(str, table.columns))
    return rows_table(head, rows, columns_on_left=len(table.columns)) + "\n"


def _lines(head: Sequence[str], rule: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Lines of a Markdown table from its cells."""
    rows_text = ("| " + " | ".join(map(str, row)) + " |" for row in rows)
    return "\n".join(["| " + " | ".join(head) + " |", "|" + "|".join(rule) + "|", *rows_text])


def percent(value: float | None, sign: bool = False) -> str:
    """Format a share in per cent with one digit; a dash for None."""
    if value is None:
        return "-"
    return f"{100 * value:+.1f} %" if sign else f"{100 * value:.1f} %"


def held(rows: Iterable[bool]) -> str:
    """Text on how many of some rows meet their bar."""
    # Rows may be a generator, and are counted twice.
    rows = list(rows)
    return f"**{sum(rows)} of {len(rows)}**"
