"""Tensor types, with known contents, and instructions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Final, Literal

from perfmodel.errors import PerfModelError
from perfmodel.units import DTYPE_BYTES

ITEM_BYTES: Final[dict[str, int]] = {
    name: size for name, size in DTYPE_BYTES.items() if name not in ("tf32", "int8", "fp4")
} | {"int8": 1, "int32": 4, "int64": 8, "bool": 1}
"""Bytes of one element by dtype.

`tf32` is a mode of computing whose values are stored as `fp32`, and nothing in a program packs
`fp4`, so neither is a dtype of values.
"""

INTEGER_DTYPES: Final = ("int8", "int32", "int64", "bool")

Shape = tuple[int, ...]
Constant = int | float | tuple["Constant", ...]
"""A known value: a number, or nested tuples of numbers."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """An array on one device.

    `value` is set where the contents are known beforehand (shapes, indices): the concrete half of
    mixed abstract and concrete interpretation (DistIR, section 3.3).
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
        """Number of elements."""
        return prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Size in bytes."""
        return self.n_elements * ITEM_BYTES[self.dtype]

    def with_shape(self, shape: Sequence[int]) -> "Tensor":
        """Return a tensor with the same dtype and device, another shape and unknown contents."""
        return Tensor(self.dtype, tuple(shape), self.device)

    def with_size(self, axis: int, size: int) -> "Tensor":
        """Return a tensor with the same dtype and device, and another size along one axis."""
        return self.with_shape([size if i == axis else n for i, n in enumerate(self.shape)])

    def on(self, device: int) -> "Tensor":
        """Return this tensor on another device."""
        return replace(self, device=device)


def shape_of_constant(value: Constant) -> Shape:
    """Shape of a known value; ragged nesting raises `ValueError`."""
    if not isinstance(value, tuple):
        return ()
    # An empty tuple is one axis of size 0, so the inner shape defaults to none.
    inner = {shape_of_constant(item) for item in value}
    if len(inner) > 1:
        raise ValueError(f"a constant must be a regular array, got {value}")
    return (len(value), *next(iter(inner), ()))


Phase = Literal["", "forward", "backward", "update"]
Stream = Literal["compute", "data_comm", "send"]
STREAMS: Final = ("compute", "data_comm", "send")
PHASES: Final = ("", "forward", "backward", "update")
# A call is written as an ordinary instruction, so that text, builder and inlining handle one kind
# of thing.
CALL: Final = "call"
"""Op of an instruction that calls another function of the module (attribute `function`)."""

Attributes = tuple[tuple[str, Any], ...]
"""(name, value) pairs sorted by name; values are numbers, strings, booleans or nested tuples of
them."""


@dataclass(frozen=True, slots=True)
class Tag:
    """The place of an instruction in the step, for transforms; it does not affect results."""

    phase: Phase = ""
    layer: int = -1
    """Layer of the model, -1 for none."""
    micro_batch: int = -1
    stream: Stream = "compute"
    """Stream of each device that the instruction occupies; streams of a device run side by side."""


UNTAGGED: Final = Tag()


# Programs of a search have millions of instructions, hence slots here and below.
@dataclass(frozen=True, slots=True)
class Instruction:
    """One operation: `outputs = op(inputs) {attributes}`; values are known by name.

    An instruction of several devices (a collective) runs on all of them at once: it starts when the
    last of them is ready for it.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attributes: Attributes = ()
    tag: Tag = UNTAGGED

    def attribute(self, name: str, default: Any = None) -> Any:
        """Value of an attribute, or the default."""
        return next((value for key, value in self.attributes if key == name), default)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A formal parameter; without a type it takes the type of the argument."""

    name: str
    type: Tensor | None = None


def attributes(**values: Any) -> Attributes:
    """Return attributes in canonical, hashable form: sorted by name, lists as tuples."""
    return tuple(sorted((name, frozen(value)) for name, value in values.items()))


def frozen(value: Any) -> Any:
    """Turn lists into tuples, at any depth, so that values can be keys of dictionaries."""
    return tuple(frozen(item) for item in value) if isinstance(value, (list, tuple)) else value


class ProgramError(PerfModelError):
    """A malformed program; the message names function, line and value.

    Lines count from 1 in the text that the program was parsed from, otherwise in its printed form.
    """

    def __init__(self, function: str, line: int, value: str, message: str) -> None:
        self.function = function
        self.line = line
        self.value = value
        super().__init__(f"@{function} line {line}: %{value}: {message}")


class RuleError(PerfModelError):
    """Raised inside an op's rule; the interpreter adds line and value."""
