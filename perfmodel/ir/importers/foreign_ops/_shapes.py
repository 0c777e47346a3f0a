"""Ops of ONNX and ATen that reshape, order, join, cut and look up."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref, collapsed
from perfmodel.ir.importers.foreign_ops._call import Call, Rule, axes_of, spelled


def _reshape(c: Call) -> Ref:
    x, wanted = c.ref(0), [int(n) for n in np.atleast_1d(c.value("shape", 1))]
    have = c.shape(x)
    # ONNX: 0 keeps the size of the operand's axis.
    if 0 in wanted and not c.attributes.get("allowzero"):
        wanted = [have[k] if n == 0 else n for k, n in enumerate(wanted)]
    return c.d.reshape(x, _whole_shape(wanted, prod(have)))


def _whole_shape(wanted: Sequence[int], n_elements: int) -> list[int]:
    known = prod(n for n in wanted if n != -1)
    return [n_elements // known if n == -1 else n for n in wanted]


def _flatten(c: Call) -> Ref:
    """ONNX: into two axes; ATen: axes start to end into one."""
    x = c.ref(0)
    shape = c.shape(x)
    if len(c.args) > 1:
        start, end = int(c.value("", 1)) % len(shape), int(c.value("", 2)) % len(shape)
        return c.d.reshape(x, (*shape[:start], prod(shape[start : end + 1]), *shape[end + 1 :]))
    axis = int(c.attributes.get("axis", 1))
    return c.d.reshape(x, (prod(shape[:axis]), prod(shape[axis:])))


def _unflatten(c: Call) -> Ref:
    x = c.ref(0)
    shape, (axis,) = c.shape(x), axes_of(c.value("", 1), len(c.shape(x)))
    return c.d.reshape(x, (*shape[:axis], *_whole_shape(c.value("", 2), shape[axis]), *shape[axis + 1 :]))


def _squeeze(c: Call) -> Ref:
    x = c.ref(0)
    shape = c.shape(x)
    stated_axes = c.value("axes", 1, None)
    axes = range(len(shape)) if stated_axes is None else axes_of(stated_axes, len(shape))
    return c.d.reshape(x, [n for k, n in enumerate(shape) if n != 1 or k not in axes])


def _unsqueeze(c: Call) -> Ref:
    x, new_axes = c.ref(0), np.atleast_1d(c.value("axes", 1))
    rank = len(c.shape(x)) + len(new_axes)
    rest, axes = iter(c.shape(x)), axes_of(new_axes, rank)
    return c.d.reshape(x, [1 if k in axes else next(rest) for k in range(rank)])


def _permute(c: Call) -> Ref:
    x = c.ref(0)
    rank = len(c.shape(x))
    return c.d.transpose(x, axes_of(c.value("perm", 1, range(rank)[::-1]), rank))


def _swap(c: Call, first: int | None = None, second: int | None = None) -> Ref:
    x = c.ref(0)
    order = list(range(len(c.shape(x))))
    i = int(c.value("", 1)) if first is None else first
    j = int(c.value("", 2)) if second is None else second
    order[i], order[j] = order[j], order[i]
    return c.d.transpose(x, order)


def _expand(c: Call) -> Ref:
    return c.expanded(c.ref(0), [int(n) for n in np.atleast_1d(c.value("shape", 1))])


def _concat(c: Call) -> Ref:
    """ONNX: any number of inputs; ATen: a list, then the axis. Empty parts (caches before the first token) go."""
    # Key-value caches of exported decoders begin empty.
    parts, axis = (c.args[0], c.value("", 1, 0)) if isinstance(c.args[0], list) else (c.args, c.attributes["axis"])
    refs = [c.as_ref(p) for p in parts if not (isinstance(p, Known) and p.array.size == 0)]
    (axis,) = axes_of(axis, len(c.shape(refs[0])))
    return refs[0] if len(refs) == 1 else c.op("concat", *refs, axis=axis)


def _stack(c: Call) -> Ref:
    refs = [c.as_ref(p) for p in c.args[0]]
    shape = c.shape(refs[0])
    (axis,) = axes_of(c.value("", 1, 0), len(shape) + 1)
    return c.op("concat", *(c.d.reshape(r, (*shape[:axis], 1, *shape[axis:])) for r in refs), axis=axis)


def _cut(c: Call, x: Ref, axis: int, sizes: int | Sequence[int]) -> list[Ref]:
    """Parts of these sizes, or of one size, of which the last has what is left."""
    if isinstance(sizes, int):
        n = c.shape(x)[axis]
        sizes = [min(sizes, n - k) for k in range(0, n, sizes)]
    if len(set(sizes)) == 1:
        return c.d.parts(x, axis, len(sizes))
    # Parts of unlike sizes are slices; only equal ones are a `split`.
    stops = np.cumsum(sizes).tolist()
    return [_range(c, x, axis, stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]


def _range(c: Call, x: Ref, axis: int, start: int, stop: int) -> Ref:
    return x if stop - start == c.shape(x)[axis] else c.op("slice", x, axis=axis, start=start, stop=stop)


def _strided(c: Call, x: Ref, axis: int, start: int, stop: int, step: int) -> Item:
    """Elements start, start + step, ... of an axis; of none a known, empty value is left."""
    shape = c.shape(x)
    count = len(range(start, stop, step))
    if count == 0:
        return Known(np.zeros((*shape[:axis], 0, *shape[axis + 1 :])))
    if step == 1:
        return _range(c, x, axis, start, stop)
    # Strides that do not divide the axis, or go backwards, are looked up element by element.
    ids = np.arange(start, stop, step)
    if step < 0 or shape[axis] % step or count != shape[axis] // step:
        return _taken(c, x, axis, ids)
    # Every step-th element is a column of the axis written as rows of that length.
    rows = c.d.reshape(x, (*shape[:axis], count, step, *shape[axis + 1 :]))
    column = c.op("slice", rows, axis=axis + 1, start=start, stop=start + 1)
    return c.d.reshape(column, (*shape[:axis], count, *shape[axis + 1 :]))


def _taken(c: Call, x: Ref, axis: int, ids: np.ndarray) -> Ref:
    """Known elements of an axis, whose place the axes of `ids` take."""
    shape = c.shape(x)
    ids = np.where(ids < 0, ids + shape[axis], ids)
    # Neighbouring elements are a slice, which costs nothing; the IR's only general look-up is that of a table's rows.
    flat = ids.ravel()
    before, after = shape[:axis], shape[axis + 1 :]
    if (np.diff(flat) == 1).all():
        return c.d.reshape(_range(c, x, axis, int(flat[0]), int(flat[-1]) + 1), (*before, *ids.shape, *after))
    # Others are rows of a table: the axis first, the rest as one.
    rank = len(shape)
    rest = [k for k in range(rank) if k != axis]
    table = c.d.reshape(c.d.transpose(x, (axis, *rest)), (shape[axis], prod(before + after)))
    looked_up = c.op("embedding", table, c.d.literal(flat, "int32"))
    looked_up = c.d.reshape(looked_up, (*ids.shape, *before, *after))
    order = (*range(ids.ndim, ids.ndim + axis), *range(ids.ndim), *range(ids.ndim + axis, ids.ndim + rank - 1))
    return c.d.transpose(looked_up, order)


def _index(c: Call) -> Ref:
    """ATen: indices of some axes next to one another, known beforehand; they are broadcast to one another."""
    x, places = c.ref(0), list(c.args[1])
    return _indexed(c, x, [k for k, place in enumerate(places) if place is not None], places)


def _indexed(c: Call, x: Ref, axes: Sequence[int], places: Sequence[Item | None]) -> Ref:
    # Only known places: what is taken by data would have a shape that is not known either.
    known = [places[axis] for axis in axes]
    arrays = [place.array for place in known if isinstance(place, Known)]
    if len(arrays) < len(known):
        raise CannotMapError("indices that depend on data; give the value of the input that they come from")
    if any(array.dtype == bool for array in arrays):
        raise CannotMapError("a number of elements that depends on a mask")
    if list(axes) != list(range(axes[0], axes[-1] + 1)):
        raise CannotMapError("indices in axes that are not adjacent")
    shape = c.shape(x)
    # Several indexed axes are one axis of all their combinations.
    sizes = shape[axes[0] : axes[-1] + 1]
    wrapped = [np.where(array < 0, array + n, array) for array, n in zip(arrays, sizes, strict=True)]
    ids = np.ravel_multi_index(np.broadcast_arrays(*wrapped), sizes)
    merged = c.d.reshape(x, (*shape[: axes[0]], prod(sizes), *shape[axes[-1] + 1 :]))
    return _taken(c, merged, axes[0], np.asarray(ids))


def _gather_nd(c: Call) -> Ref:
    """ONNX: the last axis of the indices counts along the first axes of the data."""
    x, ids = c.ref(0), c.item(1)
    if not isinstance(ids, Known) or c.attributes.get("batch_dims", 0):
        raise CannotMapError("indices that depend on data; give the value of the input that they come from")
    columns = [Known(column) for column in np.moveaxis(ids.array, -1, 0)]
    return _indexed(c, x, range(len(columns)), columns)


def _with_part(c: Call, x: Item, part: Item, axis: int, start: int, stop: int) -> Item:
    """A value in which elements start..stop of an axis are replaced."""
    shape = c.shape(x)
    # Values are assigned once: writing into a part is joining what is left with the new part.
    pieces = []
    for first, last in ((0, start), (stop, shape[axis])):
        if last > first and isinstance(x, Ref):
            pieces.append(_range(c, x, axis, first, last))
        elif last > first:
            array = x.array  # pyright: ignore[reportAttributeAccessIssue]
            pieces.append(c.as_ref(Known(array.take(np.arange(first, last), axis))))
        else:
            pieces.append(None)
    inside = c.as_ref(
        Known(np.broadcast_to(part.array, _with(shape, axis, stop - start))) if isinstance(part, Known) else part
    )
    refs = [ref for ref in (pieces[0], inside, pieces[1]) if ref is not None]
    return refs[0] if len(refs) == 1 else c.op("concat", *refs, axis=axis)


def _with(shape: Sequence[int], axis: int, size: int) -> tuple[int, ...]:
    return (*shape[:axis], size, *shape[axis + 1 :])


def _slice_scatter(c: Call) -> Item:
    """ATen: x, part, axis, start, end, step."""
    x, part = c.item(0), c.item(1)
    shape = c.shape(x)
    (axis,) = axes_of(c.value("", 2, 0), len(shape))
    end = np.iinfo(np.int64).max
    start, stop, step = slice(c.value("", 3, 0), c.value("", 4, end), c.value("", 5, 1)).indices(shape[axis])
    if step != 1:
        raise CannotMapError(f"a slice with step {step}")
    return _with_part(c, x, part, axis, start, stop)


def _select_scatter(c: Call) -> Item:
    """ATen: x, part, axis, index."""
    x, part = c.item(0), c.item(1)
    shape = c.shape(x)
    (axis,) = axes_of(c.value("", 2), len(shape))
    index = int(c.value("", 3)) % shape[axis]
    row = _with(shape, axis, 1)
    if isinstance(part, Known):
        part = Known(np.broadcast_to(np.expand_dims(part.array, axis) if part.array.ndim else part.array, row))
    return _with_part(c, x, c.d.reshape(part, row) if isinstance(part, Ref) else part, axis, index, index + 1)


def _scatter_nd(c: Call) -> Item:
    """ONNX: data, places, parts; here places that make a block of all axes but one."""
    x, ids, part = c.item(0), c.item(1), c.item(2)
    shape = c.shape(x)
    if not isinstance(ids, Known) or c.attributes.get("reduction", b"none") not in (b"none", "none"):
        raise CannotMapError("indices that depend on data, or a reduction")
    depth = ids.array.shape[-1]
    # Number all elements; the places that are written must be exactly a block of them, cut along one axis at most.
    numbers = np.arange(prod(shape)).reshape(shape)[tuple(np.moveaxis(ids.array, -1, 0))]
    corners = [np.unravel_index(numbers.min(), shape), np.unravel_index(numbers.max(), shape)]
    ranges = [(int(low), int(high) + 1) for low, high in zip(*corners, strict=True)]
    block = np.arange(prod(shape)).reshape(shape)[tuple(slice(*r) for r in ranges)]
    partial = [axis for axis, (r, n) in enumerate(zip(ranges, shape, strict=True)) if r != (0, n)]
    if depth == 0 or len(partial) > 1 or numbers.size != block.size or (numbers.ravel() != block.ravel()).any():
        raise CannotMapError("indices that are not a range of one axis")
    axis = partial[0] if partial else 0
    return _with_part(c, x, _reshaped(c, part, block.shape), axis, *ranges[axis])


def _reshaped(c: Call, item: Item, shape: Sequence[int]) -> Item:
    """A value in another shape, whether it is known or not."""
    if isinstance(item, Ref):
        return c.d.reshape(item, shape)
    return Known(item.array.reshape(tuple(shape)))  # pyright: ignore[reportAttributeAccessIssue]


def _scatter_elements(c: Call) -> Item:
    """ONNX: data, places along an axis, parts; here places that are the same range of the axis everywhere."""
    x, ids, part = c.item(0), c.item(1), c.item(2)
    shape = c.shape(x)
    (axis,) = axes_of(c.value("axis", -1, 0), len(shape))
    if not isinstance(ids, Known):
        raise CannotMapError("indices that depend on data; give the value of the input that they come from")
    # Caches and shifted masks write the same range of an axis everywhere, which is a slice.
    size = ids.array.shape[axis]
    start = int(ids.array.min()) if ids.array.size else 0
    expected = np.arange(start, start + size).reshape([-1 if k == axis else 1 for k in range(len(shape))])
    if ids.array.shape != _with(shape, axis, size) or (ids.array != expected).any():
        raise CannotMapError("indices that are not a range of one axis")
    return _with_part(c, x, part, axis, start, start + size)


def _pad(c: Call) -> Item:
    """ATen: sizes before and after, last axis first, mode, value; ONNX: all starts, then all ends, value, axes."""
    x: Item = c.ref(0)
    rank = len(c.shape(x))
    onnx = "mode" in c.attributes or isinstance(c.args[1], Known) or "pads" in c.attributes
    sizes = [int(n) for n in np.atleast_1d(c.value("pads", 1))]
    if onnx:
        mode, value = c.value("mode", -1, "constant"), c.value("", 2, 0)
        axes = axes_of(c.value("axes", 3, list(range(rank))), rank)
        pairs = dict(zip(axes, np.reshape(sizes, (2, -1)).T.tolist(), strict=True))
    else:
        # `constant_pad_nd` has the value in the place of the mode
        mode = c.value("", 2, "constant")
        mode, value = (mode, c.value("", 3, 0)) if isinstance(mode, str) else ("constant", mode)
        pairs = {rank - 1 - k: sizes[2 * k : 2 * k + 2] for k in range(len(sizes) // 2)}
    if mode not in ("constant", b"constant"):
        raise CannotMapError(f"padding of mode {mode!r}")
    # Negative padding cuts.
    for axis, (before, after) in pairs.items():
        n = c.shape(x)[axis]
        if min(before, after) < 0:
            x = _strided(c, c.as_ref(x), axis, max(0, -before), n + min(0, after), 1)
        before, after = max(0, before), max(0, after)
        if before or after:
            x = c.op("pad", c.as_ref(x), axis=axis, before=before, after=after, value=_number(value))
    return x


def _number(value: Any) -> float:
    return float(np.asarray(0 if value is None else value))


def _roll(c: Call) -> Ref:
    """ATen: x, shifts, axes."""
    x, shifts, axes = c.ref(0), np.atleast_1d(c.value("", 1)), np.atleast_1d(c.value("", 2, []))
    if not len(axes):
        raise CannotMapError("a roll over all axes as one")
    for shift, axis in zip(shifts.tolist(), axes_of(axes, len(c.shape(x))), strict=True):
        n = c.shape(x)[axis]
        # A roll swaps the two parts of the axis.
        cut = -shift % n
        if cut:
            x = c.op("concat", _range(c, x, axis, cut, n), _range(c, x, axis, 0, cut), axis=axis)
    return x


def _known(c: Call, position: int) -> np.ndarray:
    item = c.item(position)
    if not isinstance(item, Known):
        raise CannotMapError("indices that depend on data; give the value of the input that they come from")
    return item.array


def _unbind(c: Call) -> list[Ref]:
    x = c.ref(0)
    (axis,) = axes_of(c.value("", 1, 0), len(c.shape(x)))
    shape = c.shape(x)
    return [c.d.reshape(part, (*shape[:axis], *shape[axis + 1 :])) for part in c.d.parts(x, axis, shape[axis])]


def _split(c: Call) -> list[Ref]:
    """ONNX: sizes or `num_outputs`; ATen: sizes, or the size of each part."""
    x = c.ref(0)
    axis = int(c.value("axis", 2, 0)) % len(c.shape(x))
    sizes = c.value("split", 1, None)
    if sizes is None or "num_outputs" in c.attributes:
        sizes = -(-c.shape(x)[axis] // int(c.attributes["num_outputs"]))
    return _cut(c, x, axis, sizes)


def _chunk(c: Call) -> list[Ref]:
    x = c.ref(0)
    axis = int(c.value("", 2, 0)) % len(c.shape(x))
    return _cut(c, x, axis, -(-c.shape(x)[axis] // int(c.value("", 1))))


def _slice(c: Call) -> Item:
    """ONNX: starts, ends, axes, steps; ATen: axis, start, end, step."""
    x = c.ref(0)
    rank = len(c.shape(x))
    if isinstance(c.args[1], Known) or "starts" in c.attributes:
        starts = np.atleast_1d(c.value("starts", 1)).tolist()
        stops = np.atleast_1d(c.value("ends", 2)).tolist()
        axes = axes_of(c.value("axes", 3, list(range(len(starts)))), rank)
        steps = np.atleast_1d(c.value("steps", 4, [1] * len(starts))).tolist()
    else:
        axes, starts = [c.value("", 1, 0)], [c.value("", 2, 0)]
        stops, steps = [c.value("", 3, np.iinfo(np.int64).max)], [c.value("", 4, 1)]
    # Python's slices have the semantics of both: negative and out-of-range bounds are clamped.
    for axis, start, stop, step in zip(axes_of(axes, rank), starts, stops, steps, strict=True):
        first, last, step = slice(start, stop, step).indices(c.shape(x)[axis])
        part = _strided(c, x, axis, first, last, step)
        if not isinstance(part, Ref):
            return part
        x = part
    return x


def _select(c: Call) -> Ref:
    x = c.ref(0)
    return _one(c, x, int(c.value("", 1)) % len(c.shape(x)), int(c.value("", 2)))


def _one(c: Call, x: Ref, axis: int, index: int, inside: Sequence[int] = ()) -> Ref:
    """One element of an axis, whose place axes of size 1 may take."""
    shape = c.shape(x)
    index %= shape[axis]
    return c.d.reshape(_range(c, x, axis, index, index + 1), (*shape[:axis], *inside, *shape[axis + 1 :]))


def _gather(c: Call) -> Ref:
    """Rows of a table, or known elements of any axis."""
    x, ids = c.ref(0), c.item(1)
    axis = int(c.value("axis", -1, 0)) % len(c.shape(x))
    # Picking one element, as the first token of a classifier, is a slice and not a look-up.
    if isinstance(ids, Known) and ids.array.size == 1:
        return _one(c, x, axis, int(ids.array.reshape(())), ids.array.shape)
    if axis == 0 and len(c.shape(x)) == 2:
        return _rows(c, x, ids)
    if not isinstance(ids, Known):
        raise CannotMapError("indices that depend on data, along an axis other than the first; give their value")
    return _taken(c, x, axis, ids.array)


def _rows(c: Call, table: Ref, ids: Item, padding: int = -1) -> Ref:
    """Rows of a table, of which the one of the padding is not trained (ATen)."""
    # torch counts a missing padding as -1.
    untrained = {"padding": padding} if padding >= 0 else {}
    if not isinstance(ids, Known):
        return c.op("embedding", table, c.ref(1), **untrained)
    small = collapsed(ids.array)  # positions that are the same for all samples are looked up once
    known = small if small.ndim else ids.array
    flat = known.ravel()
    if (np.diff(flat) == 1).all():
        cut = _range(c, table, 0, int(flat[0]), int(flat[-1]) + 1)
        return c.d.reshape(cut, (*known.shape, c.shape(table)[1]))
    return c.op("embedding", table, c.d.literal(known, "int32"))


SHAPES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **spelled("Reshape", "view", "reshape", "_unsafe_view", rule=_reshape),
        **spelled("Flatten", "flatten.using_ints", rule=_flatten),
        **spelled("view_as", "reshape_as", rule=lambda c: _reshaped(c, c.item(0), c.shape(c.item(1)))),
        "unflatten.int": _unflatten,
        **spelled("Squeeze", "squeeze.dim", "squeeze.dims", "squeeze", rule=_squeeze),
        **spelled("Unsqueeze", "unsqueeze", rule=_unsqueeze),
        **spelled("Transpose", "permute", rule=_permute),
        "transpose.int": _swap,
        **spelled("t", "numpy_T", rule=lambda c: _swap(c, 0, 1)),
        "mT": lambda c: _swap(c, -2, -1),
        **spelled("Expand", "expand", rule=_expand),
        **spelled("Concat", "cat", rule=_concat),
        "stack": _stack,
        **spelled("Split", "split.Tensor", "split_with_sizes", "split.sizes", rule=_split),
        "chunk": _chunk,
        **spelled("Slice", "slice.Tensor", rule=_slice),
        "select.int": _select,
        "slice_scatter": _slice_scatter,
        "select_scatter": _select_scatter,
        "ScatterND": _scatter_nd,
        "ScatterElements": _scatter_elements,
        "index_select": lambda c: _taken(c, c.ref(0), int(c.value("", 1)) % len(c.shape(c.ref(0))), _known(c, 2)),
        "index.Tensor": _index,
        "GatherND": _gather_nd,
        **spelled("Pad", "pad", "constant_pad_nd", rule=_pad),
        "unbind.int": _unbind,
        "roll": _roll,
        "Gather": _gather,
        "embedding": lambda c: _rows(c, c.ref(0), c.item(1), int(c.value("", 2, -1))),
    }
)
"""Rules by name of the op."""
