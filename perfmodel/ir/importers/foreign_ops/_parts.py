"""Ops of ONNX and ATen that take a part of a value: cut it, or look elements up."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir import INTEGER_DTYPES, Shape
from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref, collapsed
from perfmodel.ir.importers.foreign_ops._call import (
    Call,
    ForeignOp,
    axes_of,
    foreign_ops,
    with_axis,
)

NO_END: Final = int(np.iinfo(np.int64).max)
"""End of a range that reaches to the end of its axis."""
_FROM_DATA: Final = "indices that depend on data; give the value of the input that they come from"


# Cutting.


def _split(call: Call) -> list[Ref]:
    """Split along an axis, by sizes, `num_outputs` (ONNX) or the size of a part (ATen)."""
    x = call.ref("x")
    axis = call.axis(call.rank(x), default=0)
    if "num_outputs" in call.attributes:
        return _cut(call, x, axis, _part_size(call, x, axis, int(call.attributes["num_outputs"])))
    return _cut(call, x, axis, call.value("split"))


def _chunk(call: Call) -> list[Ref]:
    x = call.ref("x")
    axis = call.axis(call.rank(x), default=0)
    return _cut(call, x, axis, _part_size(call, x, axis, int(call.value("chunks"))))


def _part_size(call: Call, x: Ref, axis: int, n_parts: int) -> int:
    """Size of each of this many parts of an axis; the last may be smaller."""
    return -(-call.shape(x)[axis] // n_parts)


def _cut(call: Call, x: Ref, axis: int, sizes: int | Sequence[int]) -> list[Ref]:
    """Parts of these sizes, or of one size, where the last has the remaining elements."""
    if isinstance(sizes, int):
        size = call.shape(x)[axis]
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    if len(set(sizes)) == 1:
        return call.emitter.parts(x, axis, len(sizes))
    # Parts of unlike sizes are slices; only equal ones are a `split`.
    parts = []
    start = 0
    for size in sizes:
        parts.append(range_of(call, x, axis, start, start + size))
        start += size
    return parts


def _unbind(call: Call) -> list[Ref]:
    """Cut along an axis into single elements, without that axis."""
    x = call.ref("x")
    shape = call.shape(x)
    axis = call.axis(len(shape), default=0)
    return [
        call.reshape(part, with_axis(shape, axis))
        for part in call.emitter.parts(x, axis, shape[axis])
    ]


def _slice(call: Call) -> Item:
    """Ranges of some axes (ONNX), or of one (ATen)."""
    x = call.ref("x")
    rank = call.rank(x)
    starts = np.atleast_1d(call.value("starts", 0)).tolist()
    ends = np.atleast_1d(call.value("ends", NO_END)).tolist()
    axes = axes_of(call.value("axes", list(range(len(starts)))), rank)
    steps = np.atleast_1d(call.value("steps", [1] * len(starts))).tolist()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # Python's slices have the semantics of both: negative and out-of-range bounds are clamped.
        first, last, step = slice(start, end, step).indices(call.shape(x)[axis])
        part = strided(call, x, axis, first, last, step)
        if not isinstance(part, Ref):
            return part
        x = part
    return x


def strided(call: Call, x: Ref, axis: int, start: int, stop: int, step: int) -> Item:
    """Elements start, start + step, ... of an axis; a known, empty value if there are none."""
    shape = call.shape(x)
    size = shape[axis]
    places = np.arange(start, stop, step)
    count = len(places)
    if count == 0:
        return Known(np.zeros(with_axis(shape, axis, 0)))
    if step == 1:
        return range_of(call, x, axis, start, stop)

    # Strides that do not divide the axis, or go backwards, are looked up element by element.
    if step < 0 or size % step or count != size // step:
        return _elements_at(call, x, axis, places)

    # Every step-th element is a column of the axis written as rows of that length.
    rows = call.reshape(x, with_axis(shape, axis, count, step))
    column = call.op("slice", rows, axis=axis + 1, start=start, stop=start + 1)
    return call.reshape(column, with_axis(shape, axis, count))


def range_of(call: Call, x: Ref, axis: int, start: int, stop: int) -> Ref:
    """Elements start to stop of an axis."""
    if stop - start == call.shape(x)[axis]:
        return x
    return call.op("slice", x, axis=axis, start=start, stop=stop)


def _select(call: Call) -> Ref:
    x = call.ref("x")
    return _element(call, x, call.axis(call.rank(x)), int(call.value("index")), ())


def _element(call: Call, x: Ref, axis: int, index: int, axis_shape: Shape) -> Ref:
    """One element of an axis, which is removed or replaced by axes of size 1."""
    shape = call.shape(x)
    index %= shape[axis]
    return call.reshape(
        range_of(call, x, axis, index, index + 1), with_axis(shape, axis, *axis_shape)
    )


# Looking up.


def known_indices(call: Call) -> np.ndarray:
    indices = call.item("indices")
    if not isinstance(indices, Known):
        raise CannotMapError(_FROM_DATA)
    return indices.array


def _index_select(call: Call) -> Ref:
    x = call.ref("x")
    return _elements_at(call, x, call.axis(call.rank(x)), known_indices(call))


def _elements_at(call: Call, x: Ref, axis: int, indices: np.ndarray) -> Ref:
    """Known elements of an axis, which is replaced by the axes of `indices`."""
    shape = call.shape(x)
    indices = np.where(indices < 0, indices + shape[axis], indices)
    # Neighbouring elements are a slice, which costs nothing; the IR's only general look-up is that
    # of a table's rows.
    flat = indices.ravel()
    if (np.diff(flat) == 1).all():
        neighbours = range_of(call, x, axis, int(flat[0]), int(flat[-1]) + 1)
        return call.reshape(neighbours, with_axis(shape, axis, *indices.shape))

    # Others are rows of a table: the axis first, the rest as one.
    other_axes = [k for k in range(len(shape)) if k != axis]
    other_sizes = with_axis(shape, axis)
    axis_first = call.transpose(x, (axis, *other_axes))
    table = call.reshape(axis_first, (shape[axis], prod(other_sizes)))
    rows = call.op("embedding", table, call.emitter.literal(flat, "int32"))
    rows = call.reshape(rows, (*indices.shape, *other_sizes))

    # The axes of the indices go back to where the axis was.
    index_axes = list(range(indices.ndim))
    before = [indices.ndim + k for k in range(axis)]
    after = [indices.ndim + k for k in range(axis, len(other_axes))]
    return call.transpose(rows, (*before, *index_axes, *after))


def _index(call: Call) -> Ref:
    """Elements at known indices of adjacent axes, which are broadcast to one another."""
    by_axis = {
        axis: indices
        for axis, indices in enumerate(call.operands["indices"])
        if indices is not None
    }
    return _indexed(call, call.ref("x"), by_axis)


def _parts_by_data(call: Call, x: Ref, numbers: Ref) -> Ref:
    """Take parts of the first axis by data: each token takes the weights of its expert."""
    if call.emitter.dtype(numbers) not in INTEGER_DTYPES:
        raise CannotMapError(_FROM_DATA)
    count, *sizes = call.shape(x)
    rows = call.op("embedding", call.reshape(x, (count, prod(sizes))), numbers)
    return call.reshape(rows, (*call.shape(numbers), *sizes))


def _gather_nd(call: Call) -> Ref:
    """Gather with indices whose last axis addresses the first axes of the data."""
    numbers = call.item("indices")
    if (
        isinstance(numbers, Ref)
        and call.shape(numbers)[-1] == 1
        and not call.value("batch_dims", 0)
    ):
        return _parts_by_data(call, call.ref("x"), call.reshape(numbers, call.shape(numbers)[:-1]))
    indices = known_indices(call)
    if call.value("batch_dims", 0):
        raise CannotMapError("indices per sample (batch_dims); gather from each sample by itself")
    columns = [Known(column) for column in np.moveaxis(indices, -1, 0)]
    return _indexed(call, call.ref("x"), dict(enumerate(columns)))


def _indexed(call: Call, x: Ref, by_axis: Mapping[int, Item]) -> Ref:
    """Elements at indices of several axes, which are broadcast to one another."""
    parts_along_first = by_axis.get(0)
    if len(by_axis) == 1 and isinstance(parts_along_first, Ref):
        return _parts_by_data(call, x, parts_along_first)

    # Along other axes only known indices: a mask, say, would leave a number of elements that is not
    # known.
    arrays = []
    for indices in by_axis.values():
        if not isinstance(indices, Known):
            raise CannotMapError(_FROM_DATA)
        if indices.array.dtype == bool:
            raise CannotMapError("a number of elements that depends on a mask")
        arrays.append(indices.array)
    first = min(by_axis)
    last = max(by_axis)
    if len(by_axis) != last - first + 1:
        raise CannotMapError("indices in axes that are not adjacent")

    # Several indexed axes are one axis of all their combinations.
    shape = call.shape(x)
    sizes = shape[first : last + 1]
    from_start = [
        np.where(array < 0, array + size, array) for array, size in zip(arrays, sizes, strict=True)
    ]
    combined = np.ravel_multi_index(np.broadcast_arrays(*from_start), sizes)
    merged = call.reshape(x, (*shape[:first], prod(sizes), *shape[last + 1 :]))
    return _elements_at(call, merged, first, np.asarray(combined))


def _gather(call: Call) -> Ref:
    """Rows of a table, or known elements of any axis."""
    x = call.ref("x")
    indices = call.item("indices")
    rank = call.rank(x)
    axis = call.axis(rank, default=0)
    # Picking one element, as the first token of a classifier, is a slice and not a look-up.
    if isinstance(indices, Known) and indices.array.size == 1:
        return _element(call, x, axis, int(indices.array.reshape(())), indices.array.shape)
    if axis == 0 and rank == 2:
        return _rows(call)
    if axis == 0 and isinstance(indices, Ref):
        return _parts_by_data(call, x, indices)
    if not isinstance(indices, Known):
        raise CannotMapError(
            "indices that depend on data, along an axis other than the first; give their value"
        )
    return _elements_at(call, x, axis, indices.array)


def _gather_elements(call: Call) -> Item:
    """Take elements of a known array of equal elements, like a sequence's segment numbers."""
    x = call.item("x")
    indices = call.item("indices")
    if not isinstance(x, Known) or not x.array.size or (x.array != x.array.flat[0]).any():
        raise CannotMapError(_FROM_DATA)
    return Known(np.broadcast_to(x.array.flat[0], call.shape(indices)))


def _rows(call: Call) -> Ref:
    """Rows of a table, where the padding's row is not trained (ATen)."""
    table = call.ref("x")
    indices = call.item("indices")
    if not isinstance(indices, Known):
        # torch counts a missing padding as -1.
        padding = int(call.value("padding", -1))
        untrained = {"padding": padding} if padding >= 0 else {}
        return call.op("embedding", table, call.ref("indices"), **untrained)

    # Positions that are the same for all samples are looked up once.
    small = collapsed(indices.array)
    known = small if small.ndim else indices.array
    flat = known.ravel()
    if (np.diff(flat) == 1).all():
        neighbours = range_of(call, table, 0, int(flat[0]), int(flat[-1]) + 1)
        return call.reshape(neighbours, (*known.shape, call.shape(table)[1]))
    return call.op("embedding", table, call.emitter.literal(known, "int32"))


PARTS: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops(
            "Split(x, split)",
            "split.Tensor(x, split, axis)",
            "split_with_sizes(x, split, axis)",
            "split.sizes(x, split, axis)",
            rule=_split,
        ),
        **foreign_ops("chunk(x, chunks, axis)", rule=_chunk),
        **foreign_ops("unbind.int(x, axis)", rule=_unbind),
        **foreign_ops(
            "Slice(x, starts, ends, axes, steps)",
            "slice.Tensor(x, axes, starts, ends, steps)",
            rule=_slice,
        ),
        **foreign_ops("select.int(x, axis, index)", rule=_select),
        **foreign_ops("index_select(x, axis, indices)", rule=_index_select),
        **foreign_ops("index.Tensor(x, indices)", rule=_index),
        **foreign_ops("GatherND(x, indices)", rule=_gather_nd),
        **foreign_ops("Gather(x, indices)", rule=_gather),
        **foreign_ops(
            "GatherElements(x, indices)", "gather(x, axis, indices)", rule=_gather_elements
        ),
        **foreign_ops("embedding(x, indices, padding)", rule=_rows),
    }
)
"""Ops by name."""
