"""Calls of foreign ops, and helpers for their rules."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np

from perfmodel.ir import INTEGER_DTYPES, ITEM_BYTES
from perfmodel.ir.importers._emitter import CannotMapError, Emitter, IndexCheck, Item, Known, Ref, collapsed
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers._program_rules import mapped

_ABSENT: Final = object()
LOWEST: Final = {"fp64": -1.7e308, "fp32": -3.4e38, "bf16": -3.3e38, "fp16": -65504.0}
"""Finite stand-in for minus infinity in masks: times 0 it is 0."""


@dataclass(frozen=True)
class Call:
    """A node of a foreign graph."""

    d: Emitter
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]

    def has(self, position: int) -> bool:
        """Whether an operand is present."""
        return position < len(self.args) and self.args[position] is not None

    def item(self, position: int) -> Item:
        """An operand; numbers become known values."""
        value = self.args[position] if self.has(position) else None
        if value is None:
            raise CannotMapError(f"operand {position} is missing")
        return value if isinstance(value, (Known, Ref, IndexCheck)) else Known.of(value)

    def ref(self, position: int) -> Ref:
        """An operand as a value of the program."""
        return self.as_ref(self.item(position))

    def as_ref(self, item: Item) -> Ref:
        """Emit a known item in the element type of the call's other operands."""
        if isinstance(item, Ref):
            return item
        if not isinstance(item, Known):
            raise CannotMapError("it depends on comparing data")
        if self.dtype.startswith("int"):
            return self.d.literal(item.array, self.dtype)
        return self.d.literal(self.finite(item).array, self.dtype)

    def broadcast_ref(self, item: Item) -> Ref:
        """An item that the op broadcasts, written down as small as broadcasting allows."""
        return self.as_ref(Known(collapsed(item.array)) if isinstance(item, Known) else item)

    def finite(self, item: Known) -> Known:
        """Replace infinities in a known item by large finite floats."""
        lowest = LOWEST[self.dtype]
        return Known(np.clip(np.asarray(item.array, float), lowest, -lowest))

    @property
    def dtype(self) -> str:
        """Element type of the operands that are values of the program."""
        # Lists of operands (of a concatenation) count too.
        kinds = []
        for arg in self.args:
            for item in arg if isinstance(arg, list) else [arg]:
                if isinstance(item, Ref):
                    kinds.append(self.d.builder.types[item.name].dtype)
        # Integers are indices beside what the call computes with.
        return next((kind for kind in kinds if not kind.startswith("int")), kinds[0])

    def shape(self, item: Item) -> tuple[int, ...]:
        return self.d.shape(item) if isinstance(item, Ref) else np.shape(item.array)  # pyright: ignore

    def value(self, name: str, position: int, default: Any = _ABSENT) -> Any:
        """A plain value: ONNX's attribute of a name, or the known operand at a position."""
        # One name serves ONNX's attributes of old operator sets and its inputs of new ones, where axes and the like
        # moved.
        if name in self.attributes:
            return self.attributes[name]
        operand = self.args[position] if 0 <= position < len(self.args) else None
        if isinstance(operand, Known):
            operand = operand.array.tolist()
        if isinstance(operand, Ref):
            raise CannotMapError(f"{name} depends on data; give its value")
        if operand is None and default is _ABSENT:
            raise CannotMapError(f"{name} is not given")
        return default if operand is None else operand

    def op(self, op: str, /, *refs: Ref, **attributes: Any) -> Ref:
        return self.d.op(op, *refs, **attributes)

    def expanded(self, x: Ref, wanted: Sequence[int]) -> Ref:
        """The value repeated along axes of size 1 where another size is wanted; -1 leaves an axis as it is."""
        # Broadcasting aligns axes at the right.
        have = (1,) * (len(wanted) - len(self.shape(x))) + self.shape(x)
        x = self.d.reshape(x, have)
        copies = [n if size == 1 and n > 1 else 1 for n, size in zip(wanted, have, strict=True)]
        if prod(copies) == 1:
            return x
        dtype = self.d.dtype(x)
        if dtype not in INTEGER_DTYPES:
            # A product with ones keeps how samples are dealt out, which copies joined along their axis would not.
            return self.op("mul", x, self.d.literal(np.ones(copies), dtype))
        for axis, n in enumerate(copies):
            x = self.op("concat", *[x] * n, axis=axis) if n > 1 else x
        return x

    def scaled(self, ref: Ref, factor: float) -> Ref:
        return ref if factor == 1 else self.op("scale", ref, factor=float(factor))


Rule = Callable[[Call], Any]


def graph_dtype(name: str) -> str:
    """Element type of a program's value, by the name that PyTorch, NumPy or ONNX has for it."""
    is_float = name.startswith(("float", "bfloat"))
    return Array.of(name, ()).dtype if is_float else "int32"


def primitive(c: Call, name: str, *items: Item) -> Item:
    """Emit the operation of a JAX primitive."""
    # ONNX and ATen share their element-wise semantics with JAX, so the JAX rules write the instructions.
    items = promoted(c, items)
    dtypes = {c.d.dtype(item) for item in items if isinstance(item, Ref)}
    if any(dtype.startswith("int") for dtype in dtypes):
        raise CannotMapError("the IR cannot compute integers; give the value of the input that they come from")
    out = Array(next(iter(dtypes), c.dtype), (), 4)
    floats = [Known.of(i.array, float) if isinstance(i, Known) else i for i in items]
    return mapped(name, c.d, {}, floats, [Array(c.dtype, c.shape(i), 4) for i in items], out, integer=False)


def promoted(c: Call, items: Sequence[Item]) -> tuple[Item, ...]:
    """Promote operands to the widest float type, as PyTorch does; integers become floats."""
    dtypes = {c.d.dtype(item) for item in items if isinstance(item, Ref)}
    floats = dtypes - set(INTEGER_DTYPES)
    if len(dtypes) < 2 or not floats:
        return tuple(items)
    # The IR wants one dtype per op, so casts are written out.
    widest = max(floats, key=lambda dtype: ITEM_BYTES[dtype])
    if len({dtype for dtype in floats if ITEM_BYTES[dtype] == ITEM_BYTES[widest]}) > 1:
        widest = "fp32"  # neither of fp16 and bf16 holds the other
    return tuple(c.d.cast(item, widest) if isinstance(item, Ref) else item for item in items)


def axes_of(values: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from 0; negative ones count from the end."""
    return tuple(int(a) % rank for a in np.atleast_1d(values).tolist())


def spelled(*names: str, rule: Rule) -> dict[str, Rule]:
    """Return a table that maps several names to one rule."""
    return dict.fromkeys(names, rule)
