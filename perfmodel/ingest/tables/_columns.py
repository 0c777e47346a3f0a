"""Columns of a table as plain arrays, independent of pandas' types."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from jaxtyping import Float64, Int64

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")


def text(table: "pd.DataFrame", name: str, default: str = "") -> np.ndarray:
    """A column as `str` objects [n]; `default` if empty or absent."""
    if name not in table:
        return np.full(len(table), default, object)
    column: Any = table[name]
    # pandas reads empty cells as NaN, whose text would be "nan".
    values = column.astype(object).where(column.notna(), "").astype(str).to_numpy(object, copy=True)
    values[values == ""] = default
    return values


def number(table: "pd.DataFrame", name: str, default: float = np.nan) -> Float64[np.ndarray, "n"]:
    """A column as float64 [n]; `default` if empty, absent, infinite or not a number."""
    import pandas as pd

    if name not in table:
        return np.full(len(table), default)
    column: Any = pd.to_numeric(table[name], errors="coerce")
    values = np.array(column, np.float64)
    return np.where(np.isfinite(values), values, default)


def codes_by_appearance(values: Sequence[T]) -> tuple[Int64[np.ndarray, "n"], list[T]]:
    """Integer codes of values, and the distinct values that they index, in order of appearance."""
    code_of = {value: code for code, value in enumerate(dict.fromkeys(values))}
    codes = np.array([code_of[value] for value in values], np.int64)
    return codes, list(code_of)


def factorise(labels: np.ndarray) -> tuple[Int64[np.ndarray, "n"], list[str]]:
    """Codes of labels [n], and the distinct labels in order of appearance."""
    codes, distinct = codes_by_appearance(labels.tolist())
    return codes, [str(label) for label in distinct]


def relabel(labels: np.ndarray, rule: Callable[[str], Any]) -> np.ndarray:
    """`rule(label)` of every label, computed once per distinct label (object dtype)."""
    # Tables have millions of rows and few distinct labels: a rule (often a search in the catalog)
    # runs once for each.
    codes, uniques = factorise(labels)
    return np.array([rule(u) for u in uniques] or [""], object)[codes]


def hashed(columns: Sequence[np.ndarray]) -> np.ndarray:
    """A stable hash per row, uint64[n], for folds that do not depend on row order."""
    import pandas as pd

    pandas: Any = pd
    # Python's own hash of texts differs from one process to the next.
    frame = pd.DataFrame(dict(enumerate(columns)))
    return pandas.util.hash_pandas_object(frame, index=False).to_numpy(np.uint64)


def groups_of(*columns: np.ndarray) -> list[tuple[tuple[Any, ...], np.ndarray]]:
    """The distinct combinations of values in the columns [n], sorted, each with its row indices."""
    if not len(columns[0]):
        return []
    code = np.zeros(len(columns[0]), np.int64)
    for column in columns:
        sortable = column.astype(str) if column.dtype == object else column
        values, value_index = np.unique(sortable, return_inverse=True)
        # A mixed-radix number is sorted as the combinations are: the first column counts most.
        code = code * len(values) + value_index
    inverse = np.unique(code, return_inverse=True)[1]
    # A stable sort keeps the rows of a group in the order of the table.
    rows_by_group = np.split(
        np.argsort(inverse, kind="stable"), np.cumsum(np.bincount(inverse))[:-1]
    )
    groups = []
    for rows in rows_by_group:
        key = tuple(_python_value(column[rows[0]]) for column in columns)
        groups.append((key, rows))
    return groups


def median_ratio(
    values: Sequence[tuple[Hashable, float]], references: Mapping[Any, Sequence[float]]
) -> float | None:
    """Median of values over the median reference of their key; None if no key has references."""
    ratios = [
        value / float(np.median(references[key])) for key, value in values if key in references
    ]
    return float(np.median(ratios)) if ratios else None


def _python_value(value: Any) -> Any:
    return value.item() if isinstance(value, np.generic) else value
