"""Writes IR from other representations, tracking known values."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import numpy as np

from perfmodel.ir import INTEGER_DTYPES, Builder, Shape, attributes
from perfmodel.ir.importers._graph import Array

_LARGEST_CONSTANT: Final = 1 << 16
"""Most elements of a constant tensor that is written into a program."""


_MOVING: Final = ("concat", "pad", "reshape", "transpose", "slice")
"""Ops whose results consist of elements of their operands."""


class CannotMapError(Exception):
    """Raised, with the reason, if no op of the IR can express an equation."""


@dataclass(frozen=True, slots=True)
class Known:
    """A constant value, independent of the inputs."""

    array: np.ndarray

    @classmethod
    def of(cls, value: Any, dtype: Any = None) -> "Known":
        """The known value of a number, nested lists of numbers or a framework's CPU array."""
        return cls(np.asarray(value, dtype))


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a program value; broadcast axes have size 1.

    Broadcasts are not written: ops of the IR broadcast by themselves, and a stored copy would cost
    memory and traffic.
    """

    name: str
    layer: int = -1
    unstopped: bool = False
    """Whether the value is a maximum that the IR cannot differentiate and that no `stop_gradient`
    has protected yet."""


@dataclass(frozen=True, slots=True)
class IndexCheck:
    """A check with a known result: `negative` is always false, `valid` always true."""

    kind: Literal["negative", "valid"]


@dataclass(frozen=True, slots=True)
class Shifted:
    """An index shifted by the axis size, as for negative indices."""


@dataclass(frozen=True, slots=True)
class Missing:
    """A value that depends on an unmapped equation."""


Item = Known | Ref | IndexCheck | Shifted | Missing


class Emitter:
    """Emits instructions into a builder, with the shorthands that rules are written in."""

    def __init__(self, builder: Builder, differentiable: bool) -> None:
        self.builder = builder
        self.differentiable = differentiable
        """Whether gradients will be needed, so that every op must have a correct one."""
        self._transposed: dict[str, tuple[Ref, tuple[int, ...]]] = {}

    def shape(self, ref: Ref) -> Shape:
        """Shape in the program, with size 1 along broadcast axes."""
        return self.builder.types[ref.name].shape

    def dtype(self, ref: Ref) -> str:
        """Element type of a tensor."""
        return self.builder.types[ref.name].dtype

    def cast(self, ref: Ref, dtype: str) -> Ref:
        """The value in another element type.

        Raises:
            CannotMapError: a float that becomes an integer.
        """
        # The IR has one integer type for indices, so casts between integers are names only.
        have = self.dtype(ref)
        if have == dtype or (have in INTEGER_DTYPES and dtype in INTEGER_DTYPES):
            return ref
        if dtype in INTEGER_DTYPES:
            raise CannotMapError(
                "the IR cannot convert floats to integers; give the value of the input that they come from"
            )
        return self.op("cast", ref, dtype=dtype)

    def op(self, op: str, /, *refs: Ref, **attributes: Any) -> Ref:
        """Emit an instruction whose layer is the last of its operands'."""
        if self.differentiable and any(ref.unstopped for ref in refs):
            raise CannotMapError("a maximum has no gradient in the IR; wrap it in stop_gradient")
        # Data flow orders the layers: what needs layer 3 cannot come before it.
        layer = max((ref.layer for ref in refs), default=-1)
        with self.builder.tagged(phase="forward", layer=layer):
            return Ref(self.builder.op(op, *(ref.name for ref in refs), **attributes), layer)

    def ops(self, op: str, refs: Sequence[Ref], outputs: int, **values: Any) -> list[Ref]:
        """Emit an instruction of several outputs, whose layer is the last of its operands'."""
        if self.differentiable and any(ref.unstopped for ref in refs):
            raise CannotMapError("a maximum has no gradient in the IR; wrap it in stop_gradient")
        layer = max((ref.layer for ref in refs), default=-1)
        names = [ref.name for ref in refs]
        hints = (f"{refs[0].name}_{op}",) * outputs
        with self.builder.tagged(phase="forward", layer=layer):
            return [
                Ref(name, layer)
                for name in self.builder.emit(op, names, hints, attributes(**values))
            ]

    def settle_layers(self) -> None:
        """Give every instruction a layer: those without a layer (before the first, or on weights
        without a number) join the first layer that uses their results. Layers are then numbered
        without gaps."""
        # An embedding of positions or a mask depends on no numbered weight; on a pipeline it should
        # sit where it is used.
        instructions = self.builder.instructions
        first_use = dict[str, int]()
        # Backwards, so that the layers of all users are known before what they use.
        for place in reversed(range(len(instructions))):
            instruction = instructions[place]
            layer = instruction.tag.layer
            if layer < 0:
                layer = min(
                    (first_use[name] for name in instruction.outputs if name in first_use),
                    default=0,
                )
                instructions[place] = replace(
                    instruction, tag=replace(instruction.tag, layer=layer)
                )
            for name in instruction.inputs:
                first_use[name] = min(layer, first_use.get(name, layer))

        # Stages are dealt out by layer number, so gaps (stacks that start at large offsets, unused
        # layers) are closed.
        layers = sorted({instruction.tag.layer for instruction in instructions})
        renumbered = {layer: new_layer for new_layer, layer in enumerate(layers)}
        for place, instruction in enumerate(instructions):
            tag = replace(instruction.tag, layer=renumbered[instruction.tag.layer])
            instructions[place] = replace(instruction, tag=tag)

    def constant(self, array: np.ndarray, dtype: str) -> Ref:
        """Emit a constant, as small as broadcasting allows."""
        return self.literal(collapsed(array), dtype)

    def literal(self, array: np.ndarray, dtype: str) -> Ref:
        """Emit a constant in its full shape."""
        if array.size > _LARGEST_CONSTANT:
            raise CannotMapError(
                f"a constant of {array.size} elements is too large for the program text; pass it as data"
            )
        return self.op("constant", dtype=dtype, value=_nested(array.tolist()), device=0)

    def known_elements(self, ref: Ref) -> np.ma.MaskedArray:
        """The known elements of a value, such as a join of known values and data; elements that
        depend on inputs are masked.

        Only ops that move elements are followed.
        """
        # Shifted labels of a language model are data with a known end: how many of them count
        # decides the mean of the loss.
        maker = next(
            (i for i in reversed(self.builder.instructions) if ref.name in i.outputs), None
        )
        shape = self.shape(ref)
        unknown = np.ma.masked_all(shape)
        if maker is None:
            return unknown
        parts = (
            [self.known_elements(Ref(name)) for name in maker.inputs] if maker.op in _MOVING else []
        )
        match maker.op:
            case "constant":
                return np.ma.array(np.asarray(maker.attribute("value"), float))
            case "concat":
                return np.ma.concatenate(parts, axis=maker.attribute("axis"))
            case "reshape":
                return parts[0].reshape(shape)
            case "transpose":
                return parts[0].transpose(maker.attribute("permutation"))
            case "pad":
                sizes = [(0, 0)] * len(shape)
                sizes[maker.attribute("axis")] = (
                    maker.attribute("before"),
                    maker.attribute("after"),
                )
                value = maker.attribute("value", 0.0)
                inside = np.pad(parts[0].filled(value), sizes, constant_values=value)
                return np.ma.array(inside, mask=np.pad(np.ma.getmaskarray(parts[0]), sizes))
            case "slice":
                axis = maker.attribute("axis")
                start = maker.attribute("start")
                stop = maker.attribute("stop")
                return parts[0][(slice(None),) * (axis % len(shape)) + (slice(start, stop),)]
        return unknown

    def reshape(self, ref: Ref, shape: Sequence[int]) -> Ref:
        """Reshape a value to a shape with equally many elements."""
        if self.shape(ref) == tuple(shape):
            return ref
        # A maximum stays a maximum in another shape; the mark is put aside for the moment and
        # carried over.
        unstopped = replace(ref, unstopped=False)
        return replace(self.op("reshape", unstopped, shape=tuple(shape)), unstopped=ref.unstopped)

    def transpose(self, ref: Ref, order: Sequence[int]) -> Ref:
        """Transpose; consecutive transpositions are merged."""
        # Exported graphs transpose back and forth; each transposition that is written is a copy.
        if ref.name in self._transposed:
            ref, before = self._transposed[ref.name]
            order = [before[k] for k in order]
        if list(order) == sorted(order):
            return ref
        transposed = self.op("transpose", ref, permutation=tuple(order))
        self._transposed[transposed.name] = ref, tuple(order)
        return transposed

    def parts(self, ref: Ref, axis: int, n: int) -> list[Ref]:
        """Equal parts along an axis."""
        with self.builder.tagged(phase="forward", layer=ref.layer):
            hints = (f"{ref.name}_part",) * n
            names = self.builder.emit("split", (ref.name,), hints, (("axis", axis), ("parts", n)))
        return [Ref(name, ref.layer) for name in names]

    def materialised(self, ref: Ref, array: Array) -> Ref:
        """The value in its full shape, without implicit broadcasting."""
        if self.shape(ref) == array.shape:
            return ref
        if array.n_elements > _LARGEST_CONSTANT:
            raise CannotMapError(
                f"a broadcast to shape {array.shape} would have to be stored, and it is too large"
            )
        return self.op("mul", ref, self.literal(np.ones(array.shape), array.dtype))


def collapsed(array: np.ndarray) -> np.ndarray:
    """The array with size 1 along axes that do not matter; a scalar if none does."""
    # Masks and positions come broadcast over batch and heads; one copy of each distinct element
    # suffices.
    for axis in range(array.ndim):
        first = array.take([0], axis)
        if array.shape[axis] > 1 and np.array_equal(np.broadcast_to(first, array.shape), array):
            array = first
    return array.reshape(()) if array.size == 1 else array


def _nested(value: object) -> object:
    return tuple(_nested(item) for item in value) if isinstance(value, list) else value
