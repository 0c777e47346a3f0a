"""Turning rows into regressor inputs: kind flags, device figures and one-hot codes per row."""

from collections.abc import Sequence

import numpy as np

from perfmodel.learn._frame import factorise
from perfmodel.learn._kinds import KindCode, kind_flags
from perfmodel.learn._machine import Figures, Machine
from perfmodel.learn._rows import Rows


def shape_with_flags(rows: Rows) -> dict[str, np.ndarray]:
    """The rows' shape columns with the flags that their kinds fix."""
    codes, kinds = factorise(rows.kind)
    flags = [kind_flags(kind) for kind in kinds]
    shape = dict(rows.shape)
    for name in ("bwd", "nongated"):
        shape[name] = np.array([f[name] for f in flags])[codes]
    if rows.family == "attention":
        given = np.array([f.get("causal", -1.0) for f in flags])[codes]
        shape["causal"] = np.where(given >= 0, given, shape["causal"])
    return shape


def machine_of(figures: Sequence[Figures], index: np.ndarray, dtypes: np.ndarray) -> Machine:
    """Device figures per row: `figures[index[i]]` at dtype class `dtypes[i]`."""
    codes, names = factorise(dtypes)
    peaks = np.array([[f.peak(name) for name in names] for f in figures])
    rest = np.array([[f.bandwidth, f.units, f.l2, f.clock] for f in figures])[index]
    return Machine(peaks[index, codes], rest[:, 0], rest[:, 1], rest[:, 2], rest[:, 3])


def one_hot(code: KindCode, kinds: np.ndarray) -> np.ndarray:
    """Kind codes of rows [n, K]."""
    index, names = factorise(kinds)
    return np.stack([code.one_hot(name) for name in names])[index]
