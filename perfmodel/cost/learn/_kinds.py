"""Kinds of kernels: their distances and codes, and rows as the inputs of a regressor."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from perfmodel.cost.learn._rows import Rows
from perfmodel.cost.learn._stack import Figures
from perfmodel.ingest.tables import factorise
from perfmodel.ops import FAMILIES, KernelKind, Machine


@dataclass(frozen=True)
class KindCode:
    """Vocabulary of dtype classes, ops and passes of one regressor."""

    dtypes: tuple[str, ...]
    ops: tuple[str, ...]
    passes: tuple[str, ...]

    @classmethod
    def of(cls, kinds: Sequence[KernelKind]) -> "KindCode":
        """Vocabulary of the given kinds, sorted."""
        return cls(*(tuple(sorted({getattr(kind, part) for kind in kinds})) for part in ("dtype", "op", "pass_")))

    @property
    def size(self) -> int:
        return len(self.dtypes) + len(self.ops) + len(self.passes)

    def one_hot(self, kind: KernelKind) -> np.ndarray:
        """Code of one kind [K]; parts outside the vocabulary stay zero."""
        code = np.zeros(self.size)
        offset = 0
        for part, known in ((kind.dtype, self.dtypes), (kind.op, self.ops), (kind.pass_, self.passes)):
            if part in known:
                code[offset + known.index(part)] = 1.0
            offset += len(known)
        return code


def kind_distance(a: KernelKind, b: KernelKind) -> float:
    """How unlike two kinds are: differing pass 1, op 2, dtype 4 (forward is the best stand-in)."""
    distance = 4.0 * (a.dtype != b.dtype) + 2.0 * (a.op != b.op)
    if a.pass_ != b.pass_:
        distance += 1.0 if b.pass_ == "fwd" else 1.5
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


def stand_in(kind: KernelKind, known: Sequence[KernelKind]) -> KernelKind:
    """The known kind closest to one that was never measured; `kind` itself if it was.

    Ops that share a word (`layer_norm`, `rms_norm`) are alike, unless one is several unfused kernels;
    failing that an element-wise activation stands in. The pass matters more than the op, the dtype most.
    """
    if kind in known:
        return kind
    words = set(kind.op.split("_"))

    def cost(other: KernelKind) -> tuple[float, KernelKind]:
        value = 4.0 * (other.dtype != kind.dtype) + _pass_cost(kind.pass_, other.pass_)
        if other.op != kind.op:
            theirs = set(other.op.split("_"))
            value += 2.0 - 1.0 * bool(words & theirs) - 0.5 * (other.op == "gelu")
            value += 1.5 * (("unfused" in words) != ("unfused" in theirs))
        return value, other

    return min(known, key=cost)


def shape_with_flags(rows: Rows) -> dict[str, np.ndarray]:
    """The rows' shape columns with what their kinds fix: whether both gradients are computed, gated or masked."""
    shape = rows.shape | {"bwd": rows.by_kind(lambda kind: float(kind.pass_ == "bwd"))}
    flags = {kind: FAMILIES[rows.family].kind_flags(kind) for kind in rows.kinds}
    for name in dict.fromkeys(name for of in flags.values() for name in of):
        of_kind = rows.by_kind(lambda kind, name=name: flags[kind].get(name, np.nan))
        shape[name] = np.where(np.isnan(of_kind), shape.get(name, of_kind), of_kind)
    return shape


def machine_of(figures: Sequence[Figures], index: np.ndarray, dtypes: np.ndarray) -> Machine:
    """Device figures per row: `figures[index[i]]` at dtype class `dtypes[i]`."""
    codes, names = factorise(dtypes)
    peaks = np.array([[f.peak(name) for name in names] for f in figures])
    rest = np.array([[f.bandwidth, f.units, f.l2, f.clock] for f in figures])[index]
    return Machine(peaks[index, codes], rest[:, 0], rest[:, 1], rest[:, 2], rest[:, 3])


def one_hot(code: KindCode, rows: Rows) -> np.ndarray:
    """Kind codes of rows [n, K]."""
    return np.stack([code.one_hot(kind) for kind in rows.kinds])[rows.kind]
