"""Types of values: tensors of one device, and what is known of their contents."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Final

from perfmodel.units import DTYPE_BYTES

ITEM_BYTES: Final[dict[str, int]] = {
    name: size for name, size in DTYPE_BYTES.items() if name not in ("tf32", "int8", "fp4")
} | {"int8": 1, "int32": 4, "int64": 8, "bool": 1}
"""Bytes of one element by dtype."""

INTEGER_DTYPES: Final = ("int8", "int32", "int64", "bool")

Shape = tuple[int, ...]
Constant = int | float | tuple["Constant", ...]
"""A known value: a number, or nested tuples of numbers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array on one device.

    `value` is set where the contents are known beforehand (shapes, indices): the concrete half of mixed
    abstract and concrete interpretation (DistIR, section 3.3).
    """

    dtype: str
    shape: Shape
    device: int = 0
    value: Constant | None = None

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}] @{self.device}"

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.shape)

    @property
    def n_elements(self) -> int:
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        return self.n_elements * ITEM_BYTES[self.dtype]

    def with_shape(self, shape: Sequence[int]) -> "Tensor":
        """The same dtype and device, of another shape and with unknown contents."""
        return Tensor(self.dtype, tuple(shape), self.device)

    def on(self, device: int) -> "Tensor":
        """The same tensor on another device."""
        return replace(self, device=device)


def shape_of_constant(value: Constant) -> Shape:
    """Shape of a known value; ragged nesting raises `ValueError`."""
    if not isinstance(value, tuple):
        return ()
    inner = {shape_of_constant(item) for item in value}
    if len(inner) > 1:
        raise ValueError(f"a constant must not be ragged, got {value}")
    return (len(value), *next(iter(inner), ()))
