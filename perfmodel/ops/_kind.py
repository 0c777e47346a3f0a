"""What tells kernels of a family apart besides their shape: element type, op and pass."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np


@dataclass(frozen=True, order=True, slots=True)
class KernelKind:
    """A category of kernels, as a regressor knows it."""

    dtype: str
    """Class of element types that run alike: `half` for fp16 and bf16, `fp8` for all 8-bit floats."""
    op: str
    pass_: str

    @classmethod
    def parse(cls, text: str) -> "KernelKind":
        """Inverse of `str`."""
        return cls(*text.split("/"))

    def __str__(self) -> str:
        """`dtype/op/pass`, as files have it."""
        return f"{self.dtype}/{self.op}/{self.pass_}"


class KindColumns(NamedTuple):
    """Kinds of rows as columns [n] of words (object dtype)."""

    dtype: np.ndarray
    op: np.ndarray
    pass_: np.ndarray

    @classmethod
    def of(cls, kinds: Sequence[KernelKind], index: np.ndarray) -> "KindColumns":
        """Columns of `kinds[index[i]]`."""
        return cls(*(np.array([getattr(kind, part) for kind in kinds], object)[index] for part in cls._fields))

    def same_op_and_pass(self, other: "KindColumns") -> np.ndarray:
        """Where both have one op and pass, bool[n]."""
        return (self.op == other.op) & (self.pass_ == other.pass_)
