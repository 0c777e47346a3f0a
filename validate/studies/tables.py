"""Tables of reports as Markdown."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd


def markdown_table(table: pd.DataFrame) -> str:
    """A frame as a Markdown table: numbers right-aligned, four digits."""
    numeric = [pd.api.types.is_numeric_dtype(kind) and not pd.api.types.is_bool_dtype(kind) for kind in table.dtypes]
    rule = ["--:" if right else "---" for right in numeric]
    rows = [[_cell(value) for value in row] for row in table.itertuples(index=False)]
    return "\n".join("| " + " | ".join(line) + " |" for line in [list(map(str, table.columns)), rule, *rows]) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "**no**"
    if value is None or (isinstance(value, float) and np.isnan(value)):
        return "-"
    if isinstance(value, float):
        return "does not fit" if np.isinf(value) else f"{value:.4g}"
    return str(value)


def rows_table(head: Sequence[str], rows: Iterable[Sequence[Any]], left: int = 1) -> str:
    """Rows of cells as they are; the first `left` columns stand on the left, the others on the right."""
    lines = ["| " + " | ".join(head) + " |", "|---" * left + "|--:" * (len(head) - left) + "|"]
    return "\n".join([*lines, *("| " + " | ".join(map(str, row)) + " |" for row in rows)])


def percent(value: float | None, sign: bool = False) -> str:
    """A share, to a tenth of a per cent; a dash for None."""
    return "-" if value is None else f"{100 * value:{'+' if sign else ''}.1f} %"


def held(rows: Iterable[bool]) -> str:
    """How many of some rows meet their bar."""
    rows = list(rows)
    return f"**{sum(rows)} of {len(rows)}**"
