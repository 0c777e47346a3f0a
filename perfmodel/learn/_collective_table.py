"""Collective tables in canonical form: what identifies a measured series, and why a row cannot be used."""

import re
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Final

import numpy as np
import pandas as pd

from perfmodel.learn._collective_curve import KINDS

_TEXT: Final = ("source", "device", "interconnect", "collective", "algorithm", "dtype", "software", "variant")
_SUFFIX: Final = re.compile(r"(^|;)(in_place|out_of_place)$|^\d+_concurrent_groups$|^allreduce(_large)?$")
"""Variants that name how a run was repeated, not another way of communicating."""
DEFAULT_RANKS_PER_NODE: Final = 8


@dataclass(frozen=True)
class CollectiveRows:
    """Rows of one or more tables, one array element per row."""

    kind: np.ndarray
    """Collective kind, str[n]."""
    series: np.ndarray
    """Source, device, interconnect, kind, algorithm and way of running, joined by `|`: one set of constants."""
    stack: np.ndarray
    """Software version, str[n]."""
    dtype: np.ndarray
    buffer_bytes: np.ndarray
    """As nccl-tests counts them, float64[n]."""
    ranks: np.ndarray
    ranks_per_node: np.ndarray
    time_s: np.ndarray
    """NaN where the table has none."""
    skipped: np.ndarray
    """Why a row cannot be used, `""` for those that can; str[n]."""

    def __len__(self) -> int:
        return len(self.kind)

    def take(self, index: np.ndarray) -> "CollectiveRows":
        """The rows at `index` (integers or a mask)."""
        return CollectiveRows(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def part(self, index: int) -> np.ndarray:
        """Field `index` of every series name: 0 source, 1 device, 2 interconnect, 4 algorithm, 5 variant."""
        names, inverse = np.unique(self.series, return_inverse=True)
        return np.array([name.split("|")[index] for name in names], dtype=object)[inverse]


def collective_rows(table: pd.DataFrame) -> CollectiveRows:
    """Canonical rows of a collective table (columns of the data README); never raises for a strange row.

    Missing text columns count as empty, missing `ranks_per_node` as `num_ranks / num_nodes` or, if neither
    is there, as up to eight ranks to a node.
    """
    n = len(table)
    text = {name: _text(table, name, n) for name in _TEXT}
    names = ("num_ranks", "num_nodes", "ranks_per_node", "bytes", "time_us")
    number = {name: numbers(table, name) for name in names}
    ranks = number["num_ranks"]
    per_node = number["ranks_per_node"]
    by_nodes = np.ceil(ranks / np.maximum(number["num_nodes"], 1))
    per_node = np.where(np.isfinite(per_node) & (per_node >= 1), per_node, by_nodes)
    per_node = np.where(np.isfinite(per_node), per_node, DEFAULT_RANKS_PER_NODE)
    # a send between two ranks of a larger run is a group of two, on one node or on two
    is_send = text["collective"] == "send_recv"
    between = is_send & (per_node < 2) & (ranks >= 2)
    group = np.where(is_send & (ranks >= 2), 2.0, ranks)
    per_node = np.where(between, 1.0, np.minimum(per_node, group))
    variant = _mapped(text["variant"], lambda v: _SUFFIX.sub("", v))
    series = _joined(
        text["source"], text["device"], text["interconnect"], text["collective"], text["algorithm"], variant
    )
    return CollectiveRows(
        kind=text["collective"],
        series=series,
        stack=text["software"],
        dtype=text["dtype"],
        buffer_bytes=number["bytes"],
        ranks=group,
        ranks_per_node=per_node,
        time_s=number["time_us"] * 1e-6,
        skipped=_reasons(text["collective"], number["bytes"], ranks),
    )


def _reasons(kind: np.ndarray, size: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    reason = np.full(len(kind), "", dtype=object)
    known = np.isin(kind, KINDS)
    reason[~known] = np.array([f"no model of collective {k!r}" for k in kind[~known]], dtype=object)
    for bad, why in (
        (~(np.isfinite(size) & (size > 0)), "no bytes"),
        (~(np.isfinite(ranks) & (ranks >= 1)), "no num_ranks"),
    ):
        reason[known & bad & (reason == "")] = why
    return reason


def numbers(table: pd.DataFrame, name: str, default: float = np.nan) -> np.ndarray:
    """A column as float64[n], `default` where it is missing or holds no number."""
    if name not in table:
        return np.full(len(table), default)
    values = np.asarray(pd.to_numeric(table[name], errors="coerce"), np.float64)
    return np.where(np.isfinite(values), values, default)


def _text(table: pd.DataFrame, name: str, n: int) -> np.ndarray:
    if name not in table:
        return np.full(n, "", dtype=object)
    return table[name].astype(object).where(table[name].notna(), "").astype(str).to_numpy(dtype=object)


def _mapped(values: np.ndarray, change: Callable[[str], str]) -> np.ndarray:
    names, inverse = np.unique(values.astype(str), return_inverse=True)
    return np.array([change(name) for name in names], dtype=object)[inverse] if len(names) else values


def _joined(*columns: np.ndarray) -> np.ndarray:
    frame = pd.DataFrame({str(i): c for i, c in enumerate(columns)})
    unique = frame.drop_duplicates()
    names = unique.agg("|".join, axis=1) if len(unique) else pd.Series([], dtype=object)
    return frame.merge(unique.assign(name=names), how="left").name.to_numpy(dtype=object)
