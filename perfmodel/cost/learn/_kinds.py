"""Kinds (`dtype/op/pass`): their distances and codes, and rows as the inputs of a regressor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.learn._rows import Rows
from perfmodel.cost.learn._stack import Figures
from perfmodel.ingest.tables import factorise
from perfmodel.ops import NONGATED_MOE, Machine


@dataclass(frozen=True)
class KindCode:
    """Vocabulary of dtype classes, ops and passes of one regressor."""

    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    passes: tuple[str, ...]

    @classmethod
    def of(cls, kinds: Sequence[str]) -> "KindCode":
        """Vocabulary of the given kinds, sorted."""
        parts = [kind.split("/") for kind in kinds]
        return cls(*(tuple(sorted({p[i] for p in parts})) for i in range(3)))

    @property
    def size(self) -> int:
        return len(self.dtypes) + len(self.ops) + len(self.passes)

    def one_hot(self, kind: str) -> np.ndarray:
        """Code of one kind [K]; parts outside the vocabulary stay zero."""
        code = np.zeros(self.size)
        offset = 0
        for part, known in zip(kind.split("/"), (self.dtypes, self.ops, self.passes), strict=True):
            if part in known:
                code[offset + known.index(part)] = 1.0
            offset += len(known)
        return code


def kind_flags(kind: str) -> dict[str, float]:
    """Shape flags that a kind fixes: whether both gradients are computed, masked or gated.

    Causal and full attention keep the mask of their rows, which may stand in for each other.
    """
    _, op, direction = kind.split("/")
    flags = {"bwd": float(direction == "bwd"), "nongated": float(op == NONGATED_MOE)}
    if op in ("decode", "mixed"):
        flags["causal"] = 1.0
    return flags


def kind_distance(a: str, b: str) -> float:
    """How unlike two kinds are: differing pass 1, op 2, dtype 4 (forward is the best stand-in)."""
    (dtype_a, op_a, pass_a), (dtype_b, op_b, pass_b) = a.split("/"), b.split("/")
    distance = 4.0 * (dtype_a != dtype_b) + 2.0 * (op_a != op_b)
    if pass_a != pass_b:
        distance += 1.0 if pass_b == "fwd" else 1.5
    return distance


_ONE_PRODUCT = ("dgrad", "wgrad", "bwd_one_gemm", "fwd")


def _pass_cost(asked: str, other: str) -> float:
    """How badly a pass stands in for another. A gradient of a product is a product as forward is; both gradients
    together, or their addition to others, are not, and a gradient product of which nobody says which (`bwd_one_gemm`)
    was timed on too few shapes to speak for others."""
    if asked == other:
        return 0.0
    if asked in _ONE_PRODUCT:
        return {"fwd": 2.5, "bwd_one_gemm": 3.5}.get(other, 3.0 if other in _ONE_PRODUCT else 6.0)
    if "grad_accum" in (asked, other):
        return 6.0
    return 3.0 if other == "fwd" or other not in _ONE_PRODUCT else 3.5


def stand_in(kind: str, known: Sequence[str]) -> str:
    """The known kind closest to one that was never measured; `kind` itself if it was.

    Ops that share a word (`layer_norm`, `rms_norm`) are alike, unless one is several unfused kernels;
    failing that an element-wise activation stands in. The pass matters more than the op, the dtype most.
    """
    if kind in known:
        return kind
    dtype, op, direction = kind.split("/")
    words = set(op.split("_"))

    def cost(other: str) -> tuple[float, str]:
        other_dtype, other_op, other_pass = other.split("/")
        value = 4.0 * (other_dtype != dtype) + _pass_cost(direction, other_pass)
        if other_op != op:
            theirs = set(other_op.split("_"))
            value += 2.0 - 1.0 * bool(words & theirs) - 0.5 * (other_op == "gelu")
            value += 1.5 * (("unfused" in words) != ("unfused" in theirs))
        return value, other

    return min(known, key=cost)


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
