"""Ops of ONNX and ATen that reshape, order, join, cut and look up."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir import Shape
from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref, collapsed
from perfmodel.ir.importers.foreign_ops._call import Call, ForeignOp, axes_of, foreign_ops, with_axis

_FROM_DATA: Final = "indices that depend on data; give the value of the input that they come from"
_NOT_A_RANGE: Final = "indices that are not a range of one axis"
_NO_END: Final = int(np.iinfo(np.int64).max)


# Shapes and orders of axes.


def _reshape(call: Call) -> Ref:
    x, target = call.ref("x"), call.integers("shape")
    shape = call.shape(x)
    # ONNX: 0 keeps the size of the operand's axis.
    if 0 in target and not call.value("allowzero", 0):
        target = [shape[axis] if size == 0 else size for axis, size in enumerate(target)]
    return call.reshape(x, _resolved_shape(target, prod(shape)))


def _resolved_shape(target: Sequence[int], n_elements: int) -> list[int]:
    """A shape whose -1, if it has one, is replaced by what the elements leave for it."""
    stated = prod(size for size in target if size != -1)
    return [n_elements // stated if size == -1 else size for size in target]


def _flatten(call: Call) -> Ref:
    """Two axes: all before the call's axis as one, the others as one."""
    x = call.ref("x")
    shape = call.shape(x)
    # Here the axis may be the rank itself, which is not one of the tensor's axes.
    axis = int(call.value("axis", 1))
    return call.reshape(x, (prod(shape[:axis]), prod(shape[axis:])))


def _flatten_range(call: Call) -> Ref:
    """Axes start to end, both included, as one."""
    x = call.ref("x")
    shape = call.shape(x)
    start, end = axes_of([call.value("start"), call.value("end")], len(shape))
    return call.reshape(x, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))


def _view_as(call: Call) -> Item:
    return _reshaped(call, call.item("x"), call.shape(call.item("target")))


def _reshaped(call: Call, item: Item, shape: Sequence[int]) -> Item:
    """A value in another shape, whether it is known or not."""
    if isinstance(item, Ref):
        return call.reshape(item, shape)
    return Known(item.array.reshape(tuple(shape)))  # pyright: ignore[reportAttributeAccessIssue]


def _unflatten(call: Call) -> Ref:
    x = call.ref("x")
    shape = call.shape(x)
    axis = call.axis(len(shape))
    sizes = _resolved_shape(call.value("sizes"), shape[axis])
    return call.reshape(x, with_axis(shape, axis, *sizes))


def _squeeze(call: Call) -> Ref:
    x = call.ref("x")
    shape = call.shape(x)
    stated_axes = call.value("axes", None)
    axes = range(len(shape)) if stated_axes is None else axes_of(stated_axes, len(shape))
    return call.reshape(x, [size for axis, size in enumerate(shape) if size != 1 or axis not in axes])


def _unsqueeze(call: Call) -> Ref:
    x, new_axes = call.ref("x"), call.integers("axes")
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


# Joining.


def _concat(call: Call) -> Ref:
    # Key-value caches of exported decoders begin empty, before the first token.
    refs = []
    for part in call.operands["parts"]:
        if not (isinstance(part, Known) and part.array.size == 0):
            refs.append(call.as_ref(part))
    axis = call.axis(call.rank(refs[0]), default=0)
    return _joined(call, refs, axis)


def _joined(call: Call, refs: Sequence[Ref], axis: int) -> Ref:
    return refs[0] if len(refs) == 1 else call.op("concat", *refs, axis=axis)


def _stack(call: Call) -> Ref:
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
            x = _strided(call, call.as_ref(x), axis, max(0, -before), size + min(0, after), 1)
        if before > 0 or after > 0:
            x = call.op("pad", call.as_ref(x), axis=axis, before=max(0, before), after=max(0, after), value=value)
    return x


def _roll(call: Call) -> Ref:
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
            front = _range(call, x, axis, 0, cut)
            back = _range(call, x, axis, cut, size)
            x = call.op("concat", back, front, axis=axis)
    return x


# Cutting.


def _split(call: Call) -> list[Ref]:
    """ONNX: sizes or `num_outputs`; ATen: sizes, or the size of each part."""
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
    """Size of each of so many parts of an axis but the last, which may be smaller."""
    return -(-call.shape(x)[axis] // n_parts)


def _cut(call: Call, x: Ref, axis: int, sizes: int | Sequence[int]) -> list[Ref]:
    """Parts of these sizes, or of one size, of which the last has what is left."""
    if isinstance(sizes, int):
        size = call.shape(x)[axis]
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    if len(set(sizes)) == 1:
        return call.emitter.parts(x, axis, len(sizes))
    # Parts of unlike sizes are slices; only equal ones are a `split`.
    parts = []
    start = 0
    for size in sizes:
        parts.append(_range(call, x, axis, start, start + size))
        start += size
    return parts


def _unbind(call: Call) -> list[Ref]:
    x = call.ref("x")
    shape = call.shape(x)
    axis = call.axis(len(shape), default=0)
    return [call.reshape(part, with_axis(shape, axis)) for part in call.emitter.parts(x, axis, shape[axis])]


def _slice(call: Call) -> Item:
    """Ranges of some axes (ONNX), or of one (ATen)."""
    x = call.ref("x")
    rank = call.rank(x)
    starts = np.atleast_1d(call.value("starts", 0)).tolist()
    ends = np.atleast_1d(call.value("ends", _NO_END)).tolist()
    axes = axes_of(call.value("axes", list(range(len(starts)))), rank)
    steps = np.atleast_1d(call.value("steps", [1] * len(starts))).tolist()
    for axis, start, end, step in zip(axes, starts, ends, steps, strict=True):
        # Python's slices have the semantics of both: negative and out-of-range bounds are clamped.
        first, last, step = slice(start, end, step).indices(call.shape(x)[axis])
        part = _strided(call, x, axis, first, last, step)
        if not isinstance(part, Ref):
            return part
        x = part
    return x


def _strided(call: Call, x: Ref, axis: int, start: int, stop: int, step: int) -> Item:
    """Elements start, start + step, ... of an axis; of none a known, empty value is left."""
    shape = call.shape(x)
    size = shape[axis]
    places = np.arange(start, stop, step)
    count = len(places)
    if count == 0:
        return Known(np.zeros(with_axis(shape, axis, 0)))
    if step == 1:
        return _range(call, x, axis, start, stop)

    # Strides that do not divide the axis, or go backwards, are looked up element by element.
    if step < 0 or size % step or count != size // step:
        return _taken(call, x, axis, places)

    # Every step-th element is a column of the axis written as rows of that length.
    rows = call.reshape(x, with_axis(shape, axis, count, step))
    column = call.op("slice", rows, axis=axis + 1, start=start, stop=start + 1)
    return call.reshape(column, with_axis(shape, axis, count))


def _range(call: Call, x: Ref, axis: int, start: int, stop: int) -> Ref:
    """Elements start to stop of an axis."""
    if stop - start == call.shape(x)[axis]:
        return x
    return call.op("slice", x, axis=axis, start=start, stop=stop)


def _select(call: Call) -> Ref:
    x = call.ref("x")
    return _element(call, x, call.axis(call.rank(x)), int(call.value("index")), ())


def _element(call: Call, x: Ref, axis: int, index: int, axis_shape: Shape) -> Ref:
    """One element of an axis, whose place axes of size 1 may take."""
    shape = call.shape(x)
    index %= shape[axis]
    return call.reshape(_range(call, x, axis, index, index + 1), with_axis(shape, axis, *axis_shape))


# Looking up.


def _known_indices(call: Call) -> np.ndarray:
    indices = call.item("indices")
    if not isinstance(indices, Known):
        raise CannotMapError(_FROM_DATA)
    return indices.array


def _index_select(call: Call) -> Ref:
    x = call.ref("x")
    return _taken(call, x, call.axis(call.rank(x)), _known_indices(call))


def _taken(call: Call, x: Ref, axis: int, indices: np.ndarray) -> Ref:
    """Known elements of an axis, whose place the axes of `indices` take."""
    shape = call.shape(x)
    indices = np.where(indices < 0, indices + shape[axis], indices)
    # Neighbouring elements are a slice, which costs nothing; the IR's only general look-up is that of a table's rows.
    flat = indices.ravel()
    if (np.diff(flat) == 1).all():
        neighbours = _range(call, x, axis, int(flat[0]), int(flat[-1]) + 1)
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
    """Indices of some axes next to one another, known beforehand; they are broadcast to one another."""
    by_axis = {axis: indices for axis, indices in enumerate(call.operands["indices"]) if indices is not None}
    return _indexed(call, call.ref("x"), by_axis)


def _gather_nd(call: Call) -> Ref:
    """The last axis of the indices counts along the first axes of the data."""
    indices = _known_indices(call)
    if call.value("batch_dims", 0):
        raise CannotMapError("indices per sample (batch_dims); gather from each sample by itself")
    columns = [Known(column) for column in np.moveaxis(indices, -1, 0)]
    return _indexed(call, call.ref("x"), dict(enumerate(columns)))


def _indexed(call: Call, x: Ref, by_axis: Mapping[int, Item]) -> Ref:
    """Elements at indices of several axes, which are broadcast to one another."""
    # Only known indices: what is taken by data would have a shape that is not known either.
    arrays = []
    for indices in by_axis.values():
        if not isinstance(indices, Known):
            raise CannotMapError(_FROM_DATA)
        if indices.array.dtype == bool:
            raise CannotMapError("a number of elements that depends on a mask")
        arrays.append(indices.array)
    first, last = min(by_axis), max(by_axis)
    if len(by_axis) != last - first + 1:
        raise CannotMapError("indices in axes that are not adjacent")

    # Several indexed axes are one axis of all their combinations.
    shape = call.shape(x)
    sizes = shape[first : last + 1]
    from_start = [np.where(array < 0, array + size, array) for array, size in zip(arrays, sizes, strict=True)]
    combined = np.ravel_multi_index(np.broadcast_arrays(*from_start), sizes)
    merged = call.reshape(x, (*shape[:first], prod(sizes), *shape[last + 1 :]))
    return _taken(call, merged, first, np.asarray(combined))


def _gather(call: Call) -> Ref:
    """Rows of a table, or known elements of any axis."""
    x, indices = call.ref("x"), call.item("indices")
    rank = call.rank(x)
    axis = call.axis(rank, default=0)
    # Picking one element, as the first token of a classifier, is a slice and not a look-up.
    if isinstance(indices, Known) and indices.array.size == 1:
        return _element(call, x, axis, int(indices.array.reshape(())), indices.array.shape)
    if axis == 0 and rank == 2:
        return _rows(call)
    if not isinstance(indices, Known):
        raise CannotMapError("indices that depend on data, along an axis other than the first; give their value")
    return _taken(call, x, axis, indices.array)


def _rows(call: Call) -> Ref:
    """Rows of a table, of which the one of the padding is not trained (ATen)."""
    table, indices = call.ref("x"), call.item("indices")
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
        neighbours = _range(call, table, 0, int(flat[0]), int(flat[-1]) + 1)
        return call.reshape(neighbours, (*known.shape, call.shape(table)[1]))
    return call.op("embedding", table, call.emitter.literal(known, "int32"))


# Writing into a part. Values are assigned once, so that this is joining what is left with the new part.


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
    return _joined(call, pieces, axis)


def _known_or_data_range(call: Call, x: Item, axis: int, start: int, stop: int) -> Ref:
    if isinstance(x, Ref):
        return _range(call, x, axis, start, stop)
    array: np.ndarray = x.array  # pyright: ignore[reportAttributeAccessIssue]
    return call.as_ref(Known(array.take(np.arange(start, stop), axis)))


def _slice_scatter(call: Call) -> Item:
    x = call.item("x")
    shape = call.shape(x)
    axis = call.axis(len(shape), default=0)
    wanted = slice(call.value("start", 0), call.value("end", _NO_END), call.value("step", 1))
    start, stop, step = wanted.indices(shape[axis])
    if step != 1:
        raise CannotMapError(f"a slice with step {step}")
    return _with_part(call, x, call.item("part"), axis, start, stop)


def _select_scatter(call: Call) -> Item:
    x, part = call.item("x"), call.item("part")
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
    """Parts written at indices that make a block of all axes but one."""
    x, indices = call.item("x"), _known_indices(call)
    _check_overwrites(call)
    shape = call.shape(x)
    if not indices.size:
        raise CannotMapError(_NOT_A_RANGE)

    # Number all elements; the places that are written must be exactly a block of them, cut along one axis at most.
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
    part = _reshaped(call, call.item("part"), block.shape)
    return _with_part(call, x, part, axis, *ranges[axis])


def _scatter_elements(call: Call) -> Item:
    """Parts written at indices along an axis, which are the same range of the axis everywhere."""
    x, indices = call.item("x"), _known_indices(call)
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
        **foreign_ops("Concat(*parts)", "cat(parts, axis)", rule=_concat),
        **foreign_ops("stack(parts, axis)", rule=_stack),
        **foreign_ops("Pad(x, pads, value, axes)", rule=_pad_by_sides),
        **foreign_ops("pad(x, pads, mode, value)", "constant_pad_nd(x, pads, value)", rule=_pad_by_axes),
        **foreign_ops("roll(x, shifts, axes)", rule=_roll),
        **foreign_ops(
            "Split(x, split)",
            "split.Tensor(x, split, axis)",
            "split_with_sizes(x, split, axis)",
            "split.sizes(x, split, axis)",
            rule=_split,
        ),
        **foreign_ops("chunk(x, chunks, axis)", rule=_chunk),
        **foreign_ops("unbind.int(x, axis)", rule=_unbind),
        **foreign_ops("Slice(x, starts, ends, axes, steps)", "slice.Tensor(x, axes, starts, ends, steps)", rule=_slice),
        **foreign_ops("select.int(x, axis, index)", rule=_select),
        **foreign_ops("index_select(x, axis, indices)", rule=_index_select),
        **foreign_ops("index.Tensor(x, indices)", rule=_index),
        **foreign_ops("GatherND(x, indices)", rule=_gather_nd),
        **foreign_ops("Gather(x, indices)", rule=_gather),
        **foreign_ops("embedding(x, indices, padding)", rule=_rows),
        **foreign_ops("slice_scatter(x, part, axis, start, end, step)", rule=_slice_scatter),
        **foreign_ops("select_scatter(x, part, axis, index)", rule=_select_scatter),
        **foreign_ops("ScatterND(x, indices, part)", rule=_scatter_nd),
        **foreign_ops("ScatterElements(x, indices, part)", rule=_scatter_elements),
    }
)
"""By name of the op."""
