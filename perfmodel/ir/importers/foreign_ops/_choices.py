"""Ops of ONNX and ATen that choose the largest or smallest entries along an axis."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from perfmodel.ir.importers._emitter import CannotMapError, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, ForeignOp, foreign_ops, with_axis


def _axis_last(call: Call, x: Ref, axis: int) -> tuple[Ref, list[int]]:
    """The value with an axis moved to the end, and the order that moves it back."""
    rank = call.rank(x)
    order = [k for k in range(rank) if k != axis] + [axis]
    back = sorted(range(rank), key=order.__getitem__)
    return call.transpose(x, order), back


def _largest_first(call: Call, largest: bool) -> Ref:
    """Negate the operand to find smallest entries, because the IR finds only the largest."""
    x = call.ref("x")
    return x if largest else call.scaled(x, -1.0)


def _best(call: Call, axis: int, keep: bool, largest: bool) -> Ref:
    """Place of the largest entry along an axis, or of the smallest."""
    x = _largest_first(call, largest)
    rows, _ = _axis_last(call, x, axis)
    places = call.op("argmax", rows)
    if not keep:
        return places
    return call.reshape(places, with_axis(call.shape(x), axis, 1))


def _onnx_best(call: Call, largest: bool) -> Ref:
    """Translate ONNX's ArgMax or ArgMin along an axis."""
    if call.value("select_last_index", 0):
        raise CannotMapError("selecting the last of equal entries; leave select_last_index out")
    axis = call.axis(call.rank(call.ref("x")), default=0)
    keep = bool(call.value("keepdims", 1))
    return _best(call, axis, keep, largest)


def _aten_best(call: Call, largest: bool) -> Ref:
    """Translate ATen's argmax or argmin, along an axis or over all entries."""
    rank = call.rank(call.ref("x"))
    keep = bool(call.value("keepdims", False))
    if call.value("axis", None) is not None:
        return _best(call, call.axis(rank), keep, largest)

    # Without an axis the place counts through all entries.
    if keep:
        raise CannotMapError("an index over all axes with keepdim; give dim")
    x = _largest_first(call, largest)
    flat = call.reshape(x, (-1,)) if rank != 1 else x
    return call.op("argmax", flat)


def _top_k(call: Call) -> list[Ref]:
    """The k largest entries along an axis, and their places."""
    (k,) = call.integers("k")
    largest = bool(call.value("largest", 1))
    x = _largest_first(call, largest)
    rows, back = _axis_last(call, x, call.axis(call.rank(x), default=-1))
    values, places = call.emitter.ops("top_k", (rows,), 2, k=k)
    if not largest:
        values = call.scaled(values, -1.0)
    return [call.transpose(values, back), call.transpose(places, back)]


def _sort(call: Call) -> Ref:
    raise CannotMapError(
        "the IR cannot sort; where experts sort their tokens, load the Hugging Face model with "
        "experts_implementation='batched_mm'"
    )


CHOICES: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops("ArgMax(x)", rule=lambda call: _onnx_best(call, largest=True)),
        **foreign_ops("ArgMin(x)", rule=lambda call: _onnx_best(call, largest=False)),
        **foreign_ops(
            "argmax(x, axis, keepdims)", rule=lambda call: _aten_best(call, largest=True)
        ),
        **foreign_ops(
            "argmin(x, axis, keepdims)", rule=lambda call: _aten_best(call, largest=False)
        ),
        **foreign_ops("sort(x)", "argsort(x)", rule=_sort),
        **foreign_ops("TopK(x, k)", "topk(x, k, axis, largest)", rule=_top_k),
    }
)
"""Ops by name."""
