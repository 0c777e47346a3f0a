"""The searches of papers and the study over published runs as Markdown."""

from collections.abc import Iterable
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


def held(rows: Iterable[bool]) -> str:
    """How many of some rows meet their bar."""
    rows = list(rows)
    return f"**{sum(rows)} of {len(rows)}**"


def percent(share: float | None) -> str:
    """A share, to a tenth of a per cent."""
    return "-" if share is None else f"{share:.1%}"
