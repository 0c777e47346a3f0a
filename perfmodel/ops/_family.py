"""The definition of a kernel family, and kernel kinds: element type, op and pass."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ops._op import KernelOp
from perfmodel.ops.physics import Machine, Physics
from perfmodel.ops.programs import Program, Tensors


@dataclass(frozen=True, order=True, slots=True)
class KernelKind:
    """A kind of kernels, as used by regressors."""

    dtype: str
    """Class of equally fast element types: `half` for fp16 and bf16, `fp8` for all 8-bit floats."""
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

        def column(field: str) -> np.ndarray:
            return np.array([getattr(kind, field) for kind in kinds], object)[index]

        return cls(dtype=column("dtype"), op=column("op"), pass_=column("pass_"))

    def same_op_and_pass(self, kinds: "KindColumns") -> np.ndarray:
        """Whether the kinds have the same op and pass, per row, bool[n]."""
        return (self.op == kinds.op) & (self.pass_ == kinds.pass_)


@dataclass(frozen=True)
class ShapeColumn:
    """A shape column of the tables."""

    default: float | None = None
    """Value for rows that leave the column empty; without a default, such rows are incomplete."""
    low: float = 1.0
    """Least value that a table may hold."""
    column: str = ""
    """Name of the column in tables, if it differs."""
    from_text: Callable[[str], float] | None = None
    """Reads the number from a column of words."""


@dataclass(frozen=True)
class Axis:
    """An axis of a regressor's tables, over the log2 of a quantity."""

    name: str
    low: float
    """Log2 of the quantity at the first node."""
    high: float
    """Log2 of the quantity at the last node."""
    nodes_per_doubling: int


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """How kernels of a family are measured."""

    passes: tuple[str, ...]
    """Passes with a program."""
    jax_program: Callable[[Any, np.random.Generator], Program]
    """Makes a kernel's JAX program on random inputs."""
    torch_program: Callable[[Any, Tensors], Program]
    """Makes a kernel's torch program on random tensors."""
    jax_dtypes: tuple[str, ...] = ()
    """Element types beyond fp32, bf16 and fp16."""
    torch_dtypes: tuple[str, ...] = ()
    check: Callable[[Any], None] = lambda op: None
    """Raises `PerfModelError` for a kernel without a program."""


@dataclass(frozen=True, kw_only=True)
class GradientProducts:
    """Conversion between a product's backward pass (`bwd`) and its two gradient products (`dgrad`, `wgrad`)."""

    split: Callable[
        [Mapping[str, np.ndarray], KindColumns],
        tuple[dict[str, np.ndarray], dict[str, np.ndarray]],
    ]
    """`(shape columns, kinds of the rows)`: columns of the input's and of the weight's gradient that differ."""
    join: Callable[[Mapping[str, np.ndarray], KindColumns], dict[str, np.ndarray]]
    """`(shape columns, kinds of the rows)` of either product: columns of both gradients, without accumulation."""


@dataclass(frozen=True, kw_only=True)
class Family:
    """A kernel family, listed in `FAMILIES` (`perfmodel/ops/__init__.py`)."""

    op: type[KernelOp]
    """Events of the family."""
    columns: Mapping[str, ShapeColumn]
    """Shape columns of its kernels by name, as tables state them."""
    axes: tuple[Axis, ...]
    """Axes of the tables that a regressor keeps for every stack."""
    physics: Callable[[Any, Any, Machine], Physics]
    """`(xp, shape columns, machine)`: FLOPs rounded up to whole tiles and waves, traffic, and features."""
    known_op: Callable[[str], str]
    """Name under which regressors know an op; empty if its shape determines the op."""
    op_by_shape: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None
    """Names of the ops that their shape determines."""
    kind_flags: Callable[[KernelKind], Mapping[str, float]] = lambda kind: {}
    """Shape columns that a kind fixes."""
    as_measured: Callable[
        [dict[str, np.ndarray], KindColumns, KindColumns, KindColumns],
        dict[str, np.ndarray],
    ] = lambda shape, asked, measured, work: shape
    """`(shape, asked, measured, work)`: converts the shape of rows of the requested kinds to that of the measured kinds
    that stand in for them."""
    gradients: GradientProducts | None = None
    """For products whose gradients are products."""
    complete: Callable[[dict[str, np.ndarray], np.ndarray, np.ndarray, np.ndarray], None] = (
        lambda shape, ops, passes, layout: None
    )
    """`(shape, op names, passes, operand layouts)`: adds columns that follow from others, in place."""
    measurement: Measurement | None = None
    """How the family is timed; None if no program can time it."""

    @property
    def name(self) -> str:
        return self.op.family

    def timed(self) -> Measurement:
        """The measurement of the family.

        Raises:
            PerfModelError: for a family that no program times.
        """
        if self.measurement is None:
            raise PerfModelError(f"{self.name!r} cannot be measured; remove it from the plan")
        return self.measurement
