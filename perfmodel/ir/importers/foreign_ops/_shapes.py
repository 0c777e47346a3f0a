"""Ops of ONNX and ATen that reshape, order, join, cut and look up."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref, collapsed
from perfmodel.ir.importers.foreign_ops._call import Call, Rule, axes_of, spelled

_MOST_COPIES: Final = 64
"""Copies, at most, of a tensor that is repeated along an axis by joining it to itself."""


def _reshape(c: Call) -> Ref:
    x, wanted = c.ref(0), [int(n) for n in np.atleast_1d(c.value("shape", 1))]
    have = c.shape(x)
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
    x = c.ref(0)
    wanted = [int(n) for n in np.atleast_1d(c.value("shape", 1))]
    have = (1,) * (len(wanted) - len(c.shape(x))) + c.shape(x)
    x = c.d.reshape(x, have)
    for axis, (n, size) in enumerate(zip(wanted, have, strict=True)):
        if size == 1 and n > 1:
            if n > _MOST_COPIES:
                raise CannotMapError(f"a broadcast to {n} copies would have to be stored")
            x = c.op("concat", *[x] * n, axis=axis)
    return x


def _concat(c: Call) -> Ref:
    """ONNX: any number of inputs; ATen: a list, then the axis. Empty parts (caches before the first token) go."""
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
    stops = np.cumsum(sizes).tolist()
    return [_range(c, x, axis, stop - n, stop) for n, stop in zip(sizes, stops, strict=True)]


def _range(c: Call, x: Ref, axis: int, start: int, stop: int) -> Ref:
    return x if stop - start == c.shape(x)[axis] else c.op("slice", x, axis=axis, start=start, stop=stop)


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


def _slice(c: Call) -> Ref:
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
    for axis, start, stop, step in zip(axes_of(axes, rank), starts, stops, steps, strict=True):
        if step != 1:
            raise CannotMapError(f"a slice with step {step}")
        first, last, _ = slice(start, stop).indices(c.shape(x)[axis])
        x = _range(c, x, axis, first, last)
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
    """Rows of a table, or one element of an axis."""
    x, ids = c.ref(0), c.item(1)
    axis = int(c.attributes.get("axis", 0)) % len(c.shape(x))
    if isinstance(ids, Known) and ids.array.size == 1:
        return _one(c, x, axis, int(ids.array.reshape(())), ids.array.shape)
    if axis or len(c.shape(x)) != 2:
        raise CannotMapError("neither rows of a matrix nor one element of an axis")
    return _rows(c, x, ids)


def _rows(c: Call, table: Ref, ids: Item) -> Ref:
    if not isinstance(ids, Known):
        return c.op("embedding", table, c.ref(1))
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
        "Gather": _gather,
        "embedding": lambda c: _rows(c, c.ref(0), c.item(1)),
    }
)
"""Rules by name of the op."""
