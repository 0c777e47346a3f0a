"""Ops of ONNX and ATen that reshape, order, join, pad and roll."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref
from perfmodel.ir.importers.foreign_ops._call import (
    Call,
    ForeignOp,
    axes_of,
    foreign_ops,
    with_axis,
)
from perfmodel.ir.importers.foreign_ops._parts import range_of, strided

# Shapes and orders of axes.


def _reshape(call: Call) -> Ref:
    """Reshape to known sizes, of which -1 takes the rest and (in ONNX) 0 keeps the old size."""
    x = call.ref("x")
    target = call.integers("shape")
    shape = call.shape(x)
    # ONNX: 0 keeps the size of the operand's axis.
    if 0 in target and not call.value("allowzero", 0):
        target = [shape[axis] if size == 0 else size for axis, size in enumerate(target)]
    return call.reshape(x, _resolved_shape(target, prod(shape)))


def _resolved_shape(target: Sequence[int], n_elements: int) -> list[int]:
    """A shape whose -1, if any, is replaced by the size that the number of elements implies."""
    stated = prod(size for size in target if size != -1)
    return [n_elements // stated if size == -1 else size for size in target]


def _flatten(call: Call) -> Ref:
    """Flatten to two axes: all axes before the call's axis, and all others."""
    x = call.ref("x")
    shape = call.shape(x)
    # Here the axis may be the rank itself, which is not one of the tensor's axes.
    axis = int(call.value("axis", 1))
    return call.reshape(x, (prod(shape[:axis]), prod(shape[axis:])))


def _flatten_range(call: Call) -> Ref:
    """Flatten axes start to end, both included, to one."""
    x = call.ref("x")
    shape = call.shape(x)
    start, end = axes_of([call.value("start"), call.value("end")], len(shape))
    return call.reshape(x, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))


def _view_as(call: Call) -> Item:
    return reshaped(call, call.item("x"), call.shape(call.item("target")))


def reshaped(call: Call, item: Item, shape: Sequence[int]) -> Item:
    """A value, known or not, in another shape."""
    if isinstance(item, Ref):
        return call.reshape(item, shape)
    return Known(item.array.reshape(tuple(shape)))  # pyright: ignore[reportAttributeAccessIssue]


def _unflatten(call: Call) -> Ref:
    """Divide an axis into several."""
    x = call.ref("x")
    shape = call.shape(x)
    axis = call.axis(len(shape))
    sizes = _resolved_shape(call.value("sizes"), shape[axis])
    return call.reshape(x, with_axis(shape, axis, *sizes))


def _squeeze(call: Call) -> Ref:
    """Remove axes of size 1: the stated ones, or all."""
    x = call.ref("x")
    shape = call.shape(x)
    stated_axes = call.value("axes", None)
    axes = range(len(shape)) if stated_axes is None else axes_of(stated_axes, len(shape))
    return call.reshape(
        x, [size for axis, size in enumerate(shape) if size != 1 or axis not in axes]
    )


def _unsqueeze(call: Call) -> Ref:
    """Insert axes of size 1."""
    x = call.ref("x")
    new_axes = call.integers("axes")
    # Axes are those of the result, so the smallest comes first.
    shape = list(call.shape(x))
    for axis in sorted(axes_of(new_axes, len(shape) + len(new_axes))):
        shape.insert(axis, 1)
    return call.reshape(x, shape)


def _permute(call: Call) -> Ref:
    x = call.ref("x")
    rank = call.rank(x)
    backwards = list(range(rank))[::-1]
    return call.transpose(x, axes_of(call.value("perm", backwards), rank))


def _swap(call: Call) -> Ref:
    return _swapped(call, int(call.value("first")), int(call.value("second")))


def _swapped(call: Call, first: int, second: int) -> Ref:
    x = call.ref("x")
    order = list(range(call.rank(x)))
    order[first], order[second] = order[second], order[first]
    return call.transpose(x, order)


def _expand(call: Call) -> Ref:
    return call.expanded(call.ref("x"), call.integers("shape"))


def _repeated(call: Call) -> Ref:
    """Each part of an axis several times in succession."""
    x = call.ref("x")
    repeats = int(call.value("repeats"))
    shape = call.shape(x)
    axis = call.axis(len(shape))
    expanded = call.reshape(x, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    copies = call.expanded(expanded, (*shape[: axis + 1], repeats, *shape[axis + 1 :]))
    return call.reshape(copies, with_axis(shape, axis, shape[axis] * repeats))


def _tile(call: Call) -> Ref:
    """The whole tensor several times along each axis."""
    x = call.ref("x")
    for axis, repeats in enumerate(call.integers("repeats")):
        shape = call.shape(x)
        expanded = call.reshape(x, (*shape[:axis], 1, *shape[axis:]))
        copies = call.expanded(expanded, (*shape[:axis], repeats, *shape[axis:]))
        x = call.reshape(copies, with_axis(shape, axis, shape[axis] * repeats))
    return x


# Joining.


def _concat(call: Call) -> Ref:
    """Join operands along an axis, without empty ones."""
    # Key-value caches of exported decoders begin empty, before the first token.
    refs = []
    for part in call.operands["parts"]:
        if not (isinstance(part, Known) and part.array.size == 0):
            refs.append(call.as_ref(part))
    axis = call.axis(call.rank(refs[0]), default=0)
    return joined(call, refs, axis)


def joined(call: Call, refs: Sequence[Ref], axis: int) -> Ref:
    return refs[0] if len(refs) == 1 else call.op("concat", *refs, axis=axis)


def _stack(call: Call) -> Ref:
    """Join operands along a new axis."""
    refs = [call.as_ref(part) for part in call.operands["parts"]]
    shape = call.shape(refs[0])
    axis = call.axis(len(shape) + 1, default=0)
    rows = [call.reshape(ref, (*shape[:axis], 1, *shape[axis:])) for ref in refs]
    return call.op("concat", *rows, axis=axis)


def _pad_by_sides(call: Call) -> Item:
    """ONNX's padding: the starts of all axes, then all ends."""
    rank = call.rank(call.ref("x"))
    axes = axes_of(call.value("axes", list(range(rank))), rank)
    starts, ends = np.reshape(call.integers("pads"), (2, -1)).tolist()
    sides = dict(zip(axes, zip(starts, ends, strict=True), strict=True))
    return _padded(call, sides)


def _pad_by_axes(call: Call) -> Item:
    """ATen's padding: start and end of the last axis, then of the one before it."""
    rank = call.rank(call.ref("x"))
    pads = call.integers("pads")
    sides = {}
    for k in range(len(pads) // 2):
        sides[rank - 1 - k] = (pads[2 * k], pads[2 * k + 1])
    return _padded(call, sides)


def _padded(call: Call, sides: Mapping[int, tuple[int, int]]) -> Item:
    """Elements of one value before and after the call's operand, by axis; negative numbers cut."""
    mode = call.value("mode", "constant")
    if mode not in ("constant", b"constant"):
        raise CannotMapError(f"padding of mode {mode!r}")
    value = float(np.asarray(call.value("value", 0)))
    x: Item = call.ref("x")
    for axis, (before, after) in sides.items():
        if before < 0 or after < 0:
            size = call.shape(x)[axis]
            x = strided(call, call.as_ref(x), axis, max(0, -before), size + min(0, after), 1)
        if before > 0 or after > 0:
            x = call.op(
                "pad",
                call.as_ref(x),
                axis=axis,
                before=max(0, before),
                after=max(0, after),
                value=value,
            )
    return x


def _roll(call: Call) -> Ref:
    """Translate a roll into slices and a concatenation per axis."""
    x = call.ref("x")
    shape = call.shape(x)
    axes = axes_of(call.value("axes", []), len(shape))
    if not axes:
        raise CannotMapError("a roll over all axes as one")
    for shift, axis in zip(call.integers("shifts"), axes, strict=True):
        # A roll swaps the two parts of the axis.
        size = shape[axis]
        cut = -shift % size
        if cut:
            front = range_of(call, x, axis, 0, cut)
            back = range_of(call, x, axis, cut, size)
            x = call.op("concat", back, front, axis=axis)
    return x


SHAPES: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops(
            "Reshape(x, shape)",
            "view(x, shape)",
            "reshape(x, shape)",
            "_unsafe_view(x, shape)",
            rule=_reshape,
        ),
        **foreign_ops("Flatten(x)", rule=_flatten),
        **foreign_ops("flatten.using_ints(x, start, end)", rule=_flatten_range),
        **foreign_ops("view_as(x, target)", "reshape_as(x, target)", rule=_view_as),
        **foreign_ops("unflatten.int(x, axis, sizes)", rule=_unflatten),
        **foreign_ops(
            "Squeeze(x, axes)",
            "squeeze.dim(x, axes)",
            "squeeze.dims(x, axes)",
            "squeeze(x)",
            rule=_squeeze,
        ),
        **foreign_ops("Unsqueeze(x, axes)", "unsqueeze(x, axes)", rule=_unsqueeze),
        **foreign_ops("Transpose(x)", "permute(x, perm)", rule=_permute),
        **foreign_ops("transpose.int(x, first, second)", rule=_swap),
        **foreign_ops("t(x)", "numpy_T(x)", rule=lambda call: _swapped(call, 0, 1)),
        **foreign_ops("mT(x)", rule=lambda call: _swapped(call, -2, -1)),
        **foreign_ops("Expand(x, shape)", "expand(x, shape)", rule=_expand),
        **foreign_ops("repeat_interleave.self_int(x, repeats, axis)", rule=_repeated),
        **foreign_ops("Tile(x, repeats)", rule=_tile),
        **foreign_ops("Concat(*parts)", "cat(parts, axis)", rule=_concat),
        **foreign_ops("stack(parts, axis)", rule=_stack),
        **foreign_ops("Pad(x, pads, value, axes)", rule=_pad_by_sides),
        **foreign_ops(
            "pad(x, pads, mode, value)", "constant_pad_nd(x, pads, value)", rule=_pad_by_axes
        ),
        **foreign_ops("roll(x, shifts, axes)", rule=_roll),
    }
)
"""Ops by name."""
