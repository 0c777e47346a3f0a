"""Calls of foreign ops, and helpers for their rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from perfmodel.ir import INTEGER_DTYPES, ITEM_BYTES, Shape
from perfmodel.ir.importers._emitter import (
    CannotMapError,
    Emitter,
    IndexCheck,
    Item,
    Known,
    Ref,
    collapsed,
)
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers._program_rules import mapped

_ABSENT: Final = object()
_OF_INTEGERS: Final = ("add", "sub", "mul")
"""JAX primitives that the IR also computes for integers."""
LOWEST: Final = {"fp64": -1.7e308, "fp32": -3.4e38, "bf16": -3.3e38, "fp16": -65504.0}
"""Finite replacement for minus infinity in masks, which gives 0 when multiplied by 0."""


@dataclass(frozen=True)
class Call:
    """A node of a foreign graph, in the form that rules take."""

    emitter: Emitter
    """Emitter to which the rule writes its instructions."""
    operands: Mapping[str, Any]
    """Items, lists of items and plain values, by their names in the table of ops."""
    attributes: Mapping[str, Any]
    """Plain values that ONNX, or the reader, keeps separately from the operands."""

    def has(self, name: str) -> bool:
        """Whether an operand is present."""
        return self.operands.get(name) is not None

    def item(self, name: str) -> Item:
        """An operand; numbers become known values."""
        value = self.operands.get(name)
        if value is None:
            raise CannotMapError(f"operand {name} is missing")
        return value if isinstance(value, (Known, Ref, IndexCheck)) else Known.of(value)

    def ref(self, name: str) -> Ref:
        """An operand as a value of the program."""
        return self.as_ref(self.item(name))

    def as_ref(self, item: Item) -> Ref:
        """Emit a known item in the element type of the call's other operands."""
        if isinstance(item, Ref):
            return item
        if not isinstance(item, Known):
            raise CannotMapError("it depends on comparing data")
        if self.dtype.startswith("int"):
            return self.emitter.literal(item.array, self.dtype)
        return self.emitter.literal(self.finite(item).array, self.dtype)

    def broadcast_ref(self, item: Item) -> Ref:
        """An item that the op broadcasts, written down as small as broadcasting allows."""
        if isinstance(item, Known):
            return self.as_ref(Known(collapsed(item.array)))
        return self.as_ref(item)

    def finite(self, item: Known) -> Known:
        """Replace infinities in a known item by large finite floats."""
        lowest = LOWEST[self.dtype]
        return Known(np.clip(np.asarray(item.array, float), lowest, -lowest))

    @property
    def dtype(self) -> str:
        """Element type of the operands that are values of the program."""
        # Lists of operands (of a concatenation) count too.
        dtypes = []
        for operand in self.operands.values():
            for item in operand if isinstance(operand, list) else [operand]:
                if isinstance(item, Ref):
                    dtypes.append(self.emitter.dtype(item))
        # Integers are indices beside what the call computes with.
        floats = [dtype for dtype in dtypes if not dtype.startswith("int")]
        return floats[0] if floats else dtypes[0]

    def value(self, name: str, default: Any = _ABSENT) -> Any:
        """A plain value: an attribute, or else a known operand, of this name."""
        # One name serves ONNX's attributes of old operator sets and its inputs of new ones, where
        # axes and the like moved.
        if name in self.attributes:
            return self.attributes[name]
        operand = self.operands.get(name)
        if isinstance(operand, Known):
            operand = operand.array.tolist()
        if isinstance(operand, Ref):
            raise CannotMapError(f"{name} depends on data; give its value")
        if operand is None and default is _ABSENT:
            raise CannotMapError(f"{name} is not given")
        return default if operand is None else operand

    def integers(self, name: str) -> list[int]:
        """The numbers of a plain value, which may be a single number or a list."""
        return [int(n) for n in np.atleast_1d(self.value(name))]

    def axis(self, rank: int, default: Any = _ABSENT) -> int:
        """The call's `axis`, counted from 0 in a tensor of `rank` axes."""
        (axis,) = axes_of(self.value("axis", default), rank)
        return axis

    def shape(self, item: Item) -> Shape:
        """Shape of a value of the program or of a known one."""
        if isinstance(item, Ref):
            return self.emitter.shape(item)
        return np.shape(item.array)  # pyright: ignore[reportAttributeAccessIssue]

    def rank(self, item: Item) -> int:
        """Number of axes."""
        return len(self.shape(item))

    def op(self, op: str, /, *refs: Ref, **attributes: Any) -> Ref:
        """Emit an instruction of the IR."""
        return self.emitter.op(op, *refs, **attributes)

    def reshape(self, x: Ref, shape: Sequence[int]) -> Ref:
        """The value in another shape."""
        return self.emitter.reshape(x, shape)

    def transpose(self, x: Ref, order: Sequence[int]) -> Ref:
        """The value with its axes in another order."""
        return self.emitter.transpose(x, order)

    def expanded(self, x: Ref, shape: Sequence[int]) -> Ref:
        """The value repeated along axes of size 1 up to `shape`; -1 leaves an axis unchanged."""
        # Broadcasting aligns axes at the right.
        missing_axes = len(shape) - self.rank(x)
        aligned = (1,) * missing_axes + self.shape(x)
        x = self.reshape(x, aligned)
        copies = [n if size == 1 and n > 1 else 1 for n, size in zip(shape, aligned, strict=True)]
        if prod(copies) == 1:
            return x
        dtype = self.emitter.dtype(x)
        if dtype not in INTEGER_DTYPES:
            # A product with ones keeps how samples are dealt out, which copies joined along their
            # axis would not.
            return self.op("mul", x, self.emitter.literal(np.ones(copies), dtype))
        for axis, n in enumerate(copies):
            if n > 1:
                x = self.op("concat", *[x] * n, axis=axis)
        return x

    def scaled(self, x: Ref, factor: float) -> Ref:
        """The value times a number."""
        if factor == 1:
            return x
        return self.op("scale", x, factor=float(factor))


Rule = Callable[[Call], Any]
"""Writes the instructions of a call; returns the item of its output, or a list of several."""


@dataclass(frozen=True)
class ForeignOp:
    """An op of ONNX or ATen, with its operands and its translation into the IR."""

    operands: tuple[str, ...]
    """Names of the operands in the order of the foreign graph; the last may be `*name` for all
    remaining ones."""
    rule: Rule

    def write(self, emitter: Emitter, args: Sequence[Any], attributes: Mapping[str, Any]) -> Any:
        """Emit a call with operands `args`; returns the item of its output, or a list of several.

        Raises:
            CannotMapError: a call that no op of the IR can express.
        """
        operands: dict[str, Any] = {}
        for position, name in enumerate(self.operands):
            if name.startswith("*"):
                operands[name[1:]] = list(args[position:])
            elif position < len(args):
                operands[name] = args[position]
        return self.rule(Call(emitter, operands, attributes))


def foreign_ops(*signatures: str, rule: Rule) -> dict[str, ForeignOp]:
    """Foreign ops that the same rule translates, by name.

    Args:
        signatures: an op's name and operands, as `slice.Tensor(x, axes, starts, ends)`. Operands
            that the rule does not look at may be left out at the end.
    """
    ops = {}
    for signature in signatures:
        name, _, arguments = signature.removesuffix(")").partition("(")
        ops[name] = ForeignOp(tuple(arguments.split(", ")), rule)
    return ops


def graph_dtype(name: str) -> str:
    """Element type of a program's value, by its name in PyTorch, NumPy or ONNX."""
    is_float = name.startswith(("float", "bfloat"))
    return Array.of(name, ()).dtype if is_float else "int32"


def primitive(call: Call, name: str, *items: Item) -> Item:
    """Emit the operation of a JAX primitive."""
    # ONNX and ATen share their element-wise semantics with JAX, so the JAX rules write the
    # instructions.
    items = promoted(call, items)
    dtypes = [call.emitter.dtype(item) for item in items if isinstance(item, Ref)]
    if (
        name in _OF_INTEGERS
        and dtypes
        and set(dtypes) <= set(INTEGER_DTYPES)
        and _are_integers(items)
    ):
        refs = [
            call.emitter.constant(x.array, dtypes[0]) if isinstance(x, Known) else x for x in items
        ]
        return call.op(name, *refs)  # pyright: ignore[reportArgumentType]
    if any(dtype.startswith("int") for dtype in dtypes):
        raise CannotMapError(
            "the IR cannot compute integers; give the value of the input that they come from"
        )
    out = Array(dtypes[0] if dtypes else call.dtype, (), 4)
    floats = [Known.of(item.array, float) if isinstance(item, Known) else item for item in items]
    arrays = [Array(call.dtype, call.shape(item), 4) for item in items]
    return mapped(name, call.emitter, {}, floats, arrays, out, integer=False)


def _are_integers(items: Sequence[Item]) -> bool:
    """Whether all known items are whole numbers by their type."""
    return all(
        np.asarray(item.array).dtype.kind in "iub" for item in items if isinstance(item, Known)
    )


def promoted(call: Call, items: Sequence[Item]) -> tuple[Item, ...]:
    """Promote operands to the widest float type, as PyTorch does; integers become floats."""
    dtypes = {call.emitter.dtype(item) for item in items if isinstance(item, Ref)}
    floats = dtypes - set(INTEGER_DTYPES)
    if len(dtypes) < 2 or not floats:
        return tuple(items)
    # The IR wants one dtype per op, so casts are written out. Neither of fp16 and bf16 holds the
    # other.
    most_bytes = max(ITEM_BYTES[dtype] for dtype in floats)
    widest = [dtype for dtype in floats if ITEM_BYTES[dtype] == most_bytes]
    common = widest[0] if len(widest) == 1 else "fp32"
    return tuple(
        call.emitter.cast(item, common) if isinstance(item, Ref) else item for item in items
    )


def axes_of(values: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from 0; negative ones count from the end."""
    return tuple(int(axis) % rank for axis in np.atleast_1d(values).tolist())


def with_axis(shape: Sequence[int], axis: int, *sizes: int) -> tuple[int, ...]:
    """A shape with other sizes in the place of one axis; without any sizes the axis is left out."""
    return (*shape[:axis], *sizes, *shape[axis + 1 :])
