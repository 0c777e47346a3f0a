"""Ops of ONNX and ATen that choose the largest or smallest entries along an axis."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.ir.importers._emitter import CannotMapError, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, Rule, axes_of


def _axis_last(c: Call, x: Ref, axis: int) -> tuple[Ref, list[int]]:
    """The value with an axis moved to the end, and the order that moves it back."""
    rank = len(c.shape(x))
    order = [k for k in range(rank) if k != axis] + [axis]
    back = sorted(range(rank), key=order.__getitem__)
    return c.d.transpose(x, order), back


def _best(c: Call, axis: int, keep: bool, largest: bool) -> Ref:
    """Place of the largest entry along an axis, or of the smallest."""
    x = c.ref(0)
    rank = len(c.shape(x))
    (axis,) = axes_of(axis, rank)
    rows, _ = _axis_last(c, x if largest else c.scaled(x, -1.0), axis)
    places = c.op("argmax", rows)
    if not keep:
        return places
    shape = c.shape(x)
    return c.d.reshape(places, (*shape[:axis], 1, *shape[axis + 1 :]))


def _onnx_best(c: Call, largest: bool) -> Ref:
    if c.attributes.get("select_last_index", 0):
        raise CannotMapError("selecting the last of equal entries; leave select_last_index out")
    return _best(c, int(c.attributes.get("axis", 0)), bool(c.attributes.get("keepdims", 1)), largest)


def _aten_best(c: Call, largest: bool) -> Ref:
    """x, axis (None: of all entries), whether to keep it."""
    axis, keep = c.value("", 1, None), bool(c.value("", 2, False))
    if axis is not None:
        return _best(c, int(axis), keep, largest)
    if keep:
        raise CannotMapError("an index over all axes with keepdim; give dim")
    x = c.ref(0)
    flat = c.d.reshape(x, (-1,)) if len(c.shape(x)) != 1 else x
    return c.op("argmax", flat if largest else c.scaled(flat, -1.0))


def _top_k(c: Call) -> list[Ref]:
    """The k largest entries along an axis (ATen: x, k, axis, largest, sorted), and their places."""
    x, k = c.ref(0), c.value("k", 1)
    k = int(k[0]) if isinstance(k, list) else int(k)
    (axis,) = axes_of(c.value("axis", 2, -1), len(c.shape(x)))
    largest = bool(c.value("largest", 3, 1))
    rows, back = _axis_last(c, x if largest else c.scaled(x, -1.0), axis)
    values, places = c.d.ops("top_k", (rows,), 2, k=k)
    values = values if largest else c.scaled(values, -1.0)
    return [c.d.transpose(values, back), c.d.transpose(places, back)]


CHOICES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        "ArgMax": lambda c: _onnx_best(c, largest=True),
        "ArgMin": lambda c: _onnx_best(c, largest=False),
        "argmax": lambda c: _aten_best(c, largest=True),
        "argmin": lambda c: _aten_best(c, largest=False),
        "TopK": _top_k,
        "topk": _top_k,
    }
)
"""Rules by name of the op."""
