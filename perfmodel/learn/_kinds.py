"""Kinds (`dtype/op/pass`): their one-hot code and the flags that follow from them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


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
    flags = {"bwd": float(direction == "bwd"), "nongated": float(op == "moe_nongated")}
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
        value = 4.0 * (other_dtype != dtype) + 3.0 * (other_pass != direction)
        if other_op != op:
            theirs = set(other_op.split("_"))
            value += 2.0 - 1.0 * bool(words & theirs) - 0.5 * (other_op == "gelu")
            value += 1.5 * (("unfused" in words) != ("unfused" in theirs))
        return value, other

    return min(known, key=cost)
