"""Columns of a table as plain arrays, whatever pandas made of them."""

from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float64


def text(table: pd.DataFrame, name: str, default: str = "") -> np.ndarray:
    """A column as `str` objects [n]; `default` where empty or absent."""
    if name not in table:
        return np.full(len(table), default, object)
    column: Any = table[name]
    values = column.astype(object).where(column.notna(), "").astype(str).to_numpy(object, copy=True)
    values[values == ""] = default
    return values


def number(table: pd.DataFrame, name: str) -> Float64[np.ndarray, "n"]:
    """A column as float64 [n]; NaN where empty, absent or not a number."""
    if name not in table:
        return np.full(len(table), np.nan)
    values: Any = pd.to_numeric(table[name], errors="coerce")
    return np.array(values, np.float64)


def factorise(labels: np.ndarray) -> tuple[np.ndarray, list[str]]:
    """Codes [n] and the distinct labels in order of appearance."""
    codes, uniques = pd.factorize(labels)
    return codes, [str(u) for u in uniques]


def relabel(labels: np.ndarray, rule: Any) -> np.ndarray:
    """`rule(label)` of every label, computed once per distinct label (object dtype)."""
    codes, uniques = factorise(labels)
    return np.array([rule(u) for u in uniques] or [""], object)[codes]
