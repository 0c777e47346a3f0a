"""Ops of ONNX and ATen that write into a part of a value.

Values of the IR are assigned once, so that writing is joining what is left with the new part.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, ForeignOp, foreign_ops, with_axis
from perfmodel.ir.importers.foreign_ops._parts import NO_END, known_indices, range_of
from perfmodel.ir.importers.foreign_ops._shapes import joined, reshaped

_NOT_A_RANGE: Final = "indices that are not a range of one axis"


def _with_part(call: Call, x: Item, part: Item, axis: int, start: int, stop: int) -> Item:
    """A value in which elements start to stop of an axis are replaced."""
    shape = call.shape(x)
    if isinstance(part, Known):
        part = Known(np.broadcast_to(part.array, with_axis(shape, axis, stop - start)))
    pieces = []
    if start > 0:
        pieces.append(_known_or_data_range(call, x, axis, 0, start))
    pieces.append(call.as_ref(part))
    if stop < shape[axis]:
        pieces.append(_known_or_data_range(call, x, axis, stop, shape[axis]))
    return joined(call, pieces, axis)


def _known_or_data_range(call: Call, x: Item, axis: int, start: int, stop: int) -> Ref:
    if isinstance(x, Ref):
        return range_of(call, x, axis, start, stop)
    array: np.ndarray = x.array  # pyright: ignore[reportAttributeAccessIssue]
    return call.as_ref(Known(array.take(np.arange(start, stop), axis)))


def _slice_scatter(call: Call) -> Item:
    """Write a part into a slice of an axis."""
    x = call.item("x")
    shape = call.shape(x)
    axis = call.axis(len(shape), default=0)
    written = slice(call.value("start", 0), call.value("end", NO_END), call.value("step", 1))
    start, stop, step = written.indices(shape[axis])
    if step != 1:
        raise CannotMapError(f"a slice with step {step}")
    return _with_part(call, x, call.item("part"), axis, start, stop)


def _select_scatter(call: Call) -> Item:
    """Write a part into one position of an axis."""
    x = call.item("x")
    part = call.item("part")
    shape = call.shape(x)
    axis = call.axis(len(shape))
    index = int(call.value("index")) % shape[axis]
    # The part has no such axis; one number stands for a part full of it.
    if isinstance(part, Ref):
        part = call.reshape(part, with_axis(shape, axis, 1))
    elif isinstance(part, Known) and part.array.ndim:
        part = Known(np.expand_dims(part.array, axis))
    return _with_part(call, x, part, axis, index, index + 1)


def _check_overwrites(call: Call) -> None:
    """Refuse a scatter that adds to what is there."""
    if call.value("reduction", "none") not in (b"none", "none"):
        raise CannotMapError("a scatter with a reduction")


def _scatter_nd(call: Call) -> Item:
    """Write parts at indices that form a block of all axes except one."""
    x = call.item("x")
    indices = known_indices(call)
    _check_overwrites(call)
    shape = call.shape(x)
    if not indices.size:
        raise CannotMapError(_NOT_A_RANGE)

    # Number all elements; the places that are written must be exactly a block of them, cut along
    # one axis at most.
    numbers = np.arange(prod(shape)).reshape(shape)
    written = numbers[tuple(np.moveaxis(indices, -1, 0))]
    lowest = np.unravel_index(written.min(), shape)
    highest = np.unravel_index(written.max(), shape)
    ranges = [(int(low), int(high) + 1) for low, high in zip(lowest, highest, strict=True)]
    block = numbers[tuple(slice(start, stop) for start, stop in ranges)]
    cut_axes = [axis for axis, size in enumerate(shape) if ranges[axis] != (0, size)]
    if len(cut_axes) > 1 or not np.array_equal(written.ravel(), block.ravel()):
        raise CannotMapError(_NOT_A_RANGE)
    axis = cut_axes[0] if cut_axes else 0
    part = reshaped(call, call.item("part"), block.shape)
    return _with_part(call, x, part, axis, *ranges[axis])


def _scatter_elements(call: Call) -> Item:
    """Write parts at indices along an axis, which must be the same range everywhere."""
    x = call.item("x")
    indices = known_indices(call)
    _check_overwrites(call)
    shape = call.shape(x)
    axis = call.axis(len(shape), default=0)
    # Caches and shifted masks write the same range of an axis everywhere, which is a slice.
    size = indices.shape[axis]
    start = int(indices.min()) if indices.size else 0
    along_axis = with_axis((1,) * len(shape), axis, -1)
    expected = np.arange(start, start + size).reshape(along_axis)
    if indices.shape != with_axis(shape, axis, size) or (indices != expected).any():
        raise CannotMapError(_NOT_A_RANGE)
    return _with_part(call, x, call.item("part"), axis, start, start + size)


WRITES: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops("slice_scatter(x, part, axis, start, end, step)", rule=_slice_scatter),
        **foreign_ops("select_scatter(x, part, axis, index)", rule=_select_scatter),
        **foreign_ops("ScatterND(x, indices, part)", rule=_scatter_nd),
        **foreign_ops("ScatterElements(x, indices, part)", rule=_scatter_elements),
    }
)
"""Ops by name."""
