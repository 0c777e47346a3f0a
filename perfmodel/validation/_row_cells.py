"""Cells of a row of published runs."""

from collections.abc import Mapping
from typing import Any, Final

import numpy as np
import pandas as pd

from perfmodel.errors import PerfModelError

MOST: Final = 10**9
"""More than any size, degree or batch."""
Row = Mapping[str, Any]
"""Cells of one row; empty ones are None."""


FROM_OTHERS: Final = "cells_of_other_rows"
"""Column that names the cells which `with_heads` filled."""


class Unusable(PerfModelError):
    """A row that states too little, or runs something that is not modelled."""


def with_heads(table: pd.DataFrame) -> pd.DataFrame:
    """The table with heads where they are empty and the other rows of the same source and hidden size agree on theirs;
    the column `FROM_OTHERS` marks those rows."""
    if not {"source", "hidden", "heads"} <= set(table.columns):
        return table
    by_size = table.groupby(["source", "hidden"])["heads"]
    agreed = by_size.transform("first").where(by_size.transform("nunique") == 1)
    filled = np.asarray(table["heads"].isna() & agreed.notna(), bool)
    if not filled.any():
        return table
    heads = table["heads"].where(~filled, agreed)
    return table.assign(heads=heads, **{FROM_OTHERS: np.where(filled, "heads", "")})


def text(row: Row, name: str, default: str = "") -> str:
    """A cell as text; `default` where it is empty."""
    value = row.get(name)
    return default if value is None else str(value).strip()


def number(row: Row, name: str) -> float | None:
    """A cell as a number; None where it is empty.

    Raises:
        Unusable: it is something else.
    """
    value = row.get(name)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    try:
        found = float(value)
    except (TypeError, ValueError):
        raise Unusable(f"{name} is not a number") from None
    if found != found or abs(found) == float("inf"):
        raise Unusable(f"{name} is not a number")
    return found


def count(row: Row, name: str, default: int | None = None, least: int = 1) -> int:
    """A cell as a whole number of at least `least`.

    Raises:
        Unusable: it is none, or is empty and there is no default.
    """
    found = number(row, name)
    if found is None:
        if default is None:
            raise Unusable(f"{name} is not stated")
        return default
    if not least <= found <= MOST or found != int(found):
        raise Unusable(f"{name} is not a whole number {'above' if least else 'of at least'} zero, up to {MOST:,}")
    return int(found)
