"""A node of a foreign graph as the rules see it, and what they share."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Emitter, Item, Known, Ref
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers._program_rules import mapped

_ABSENT: Final = object()
LOWEST: Final = {"fp64": -1.7e308, "fp32": -3.4e38, "bf16": -3.3e38, "fp16": -65504.0}
"""What stands for minus infinity in masks: times 0 it is 0."""


@dataclass(frozen=True)
class Call:
    """A node of a foreign graph."""

    d: Emitter
    args: tuple[Any, ...]
    attributes: Mapping[str, Any]

    def has(self, position: int) -> bool:
        """Whether an operand is given."""
        return position < len(self.args) and self.args[position] is not None

    def item(self, position: int) -> Item:
        """An operand, numbers as known values."""
        value = self.args[position] if self.has(position) else None
        if value is None:
            raise CannotMapError(f"operand {position} is missing")
        return value if isinstance(value, (Known, Ref)) else Known.of(value)

    def ref(self, position: int) -> Ref:
        """An operand as a value of the program."""
        return self.as_ref(self.item(position))

    def as_ref(self, item: Item) -> Ref:
        """A known item written down, in the element type of the call's other operands."""
        if isinstance(item, Ref):
            return item
        if not isinstance(item, Known):
            raise CannotMapError("depends on what is missing")
        if item.array.dtype.kind in "iub":
            raise CannotMapError("the IR computes no integers")
        return self.d.literal(np.clip(item.array, LOWEST[self.dtype], None), self.dtype)

    @property
    def dtype(self) -> str:
        """Element type of the operands that are values of the program."""
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

    def op(self, op: str, *refs: Ref, **attributes: Any) -> Ref:
        return self.d.op(op, *refs, **attributes)

    def scaled(self, ref: Ref, factor: float) -> Ref:
        return ref if factor == 1 else self.op("scale", ref, factor=float(factor))


Rule = Callable[[Call], Any]


def primitive(c: Call, name: str, *items: Item) -> Item:
    """Write what the JAX primitive of a name does."""
    if any(isinstance(i, Ref) and c.d.builder.types[i.name].dtype.startswith("int") for i in items):
        raise CannotMapError("the IR computes no integers; give the value of the input that they come from")
    out = Array(c.dtype, (), 4)
    floats = [Known.of(i.array, float) if isinstance(i, Known) else i for i in items]
    return mapped(name, c.d, {}, floats, [Array(c.dtype, c.shape(i), 4) for i in items], out, integer=False)


def axes_of(values: Any, rank: int) -> tuple[int, ...]:
    """Axes counted from 0; negative ones count from the end."""
    return tuple(int(a) % rank for a in np.atleast_1d(values).tolist())


def spelled(*names: str, rule: Rule) -> dict[str, Rule]:
    """One rule under several names."""
    return dict.fromkeys(names, rule)
