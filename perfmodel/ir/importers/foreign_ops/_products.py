"""Products of ONNX and ATen, reductions, norms of rows, attention and losses."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref, collapsed
from perfmodel.ir.importers.foreign_ops._call import LOWEST, Call, Rule, axes_of, primitive, spelled
from perfmodel.ir.models import surprise

_HIDDEN: Final = -1e9
"""Bound below which an additive mask takes all weight from a score."""


def _matmul(c: Call) -> Ref:
    return _product(c, c.ref(0), c.ref(1))


def _product(c: Call, a: Ref, b: Ref, **transposed: bool) -> Ref:
    """A product; leading axes of the smaller operand are repeated or merged, as the IR's `matmul` wants them."""
    # NumPy's rules for vectors and broadcast batches, in terms of an op that takes equal batches or one matrix.
    shape_a, shape_b = c.shape(a), c.shape(b)
    if len(shape_a) == 1:
        return c.d.reshape(_product(c, c.d.reshape(a, (1, *shape_a)), b), (*shape_b[:-2], shape_b[-1]))
    if len(shape_b) == 1:
        return c.d.reshape(_product(c, a, c.d.reshape(b, (*shape_b, 1))), shape_a[:-1])
    if len(shape_b) > 2 and shape_a[:-2] != shape_b[:-2]:
        batch = np.broadcast_shapes(shape_a[:-2], shape_b[:-2])
        a, b = (c.expanded(x, (*batch, *c.shape(x)[-2:])) for x in (a, b))
    elif len(shape_b) > len(shape_a):
        a = c.expanded(a, (*shape_b[:-2], *shape_a[-2:]))
    return c.op("matmul", a, b, **transposed)


def _linear(c: Call) -> Item:
    y = _product(c, c.ref(0), c.ref(1), transpose_b=True)
    return c.op("add", y, c.ref(2)) if c.has(2) else y


def _baddbmm(c: Call) -> Item:
    """ATen: beta x + alpha a b."""
    y = c.scaled(_product(c, c.ref(1), c.ref(2)), c.value("", 4, 1))
    beta = c.value("", 3, 1)
    return primitive(c, "add", y, primitive(c, "mul", c.item(0), Known.of(float(beta)))) if beta else y


def _gemm(c: Call) -> Item:
    transposed = {
        n: True for n, flag in (("transpose_a", "transA"), ("transpose_b", "transB")) if c.attributes.get(flag)
    }
    y = c.scaled(_product(c, c.ref(0), c.ref(1), **transposed), c.attributes.get("alpha", 1.0))
    return c.op("add", y, c.scaled(c.ref(2), c.attributes.get("beta", 1.0))) if c.has(2) else y


def _addmm(c: Call) -> Item:
    y = c.scaled(_product(c, c.ref(1), c.ref(2)), c.value("", 4, 1))
    return c.op("add", y, c.scaled(c.ref(0), c.value("", 3, 1)))


def _sum(c: Call, mean: bool = False, keep: int = 1) -> Ref:
    """ONNX keeps summed axes unless told otherwise, ATen does not."""
    x = c.ref(0)
    rank = len(c.shape(x))
    stated_axes = c.value("axes", 1, None)
    axes = tuple(range(rank)) if stated_axes is None or stated_axes == [] else axes_of(stated_axes, rank)
    total = c.op("sum", x, axes=axes, keep=bool(c.value("keepdims", 2, keep)))
    return c.scaled(total, 1.0 / prod(c.shape(x)[a] for a in axes)) if mean else total


def _softmax(c: Call) -> Ref:
    return _over_last(c, c.ref(0), int(c.value("axis", 1, -1)), lambda x: c.op("softmax", x))


def _log_softmax(c: Call) -> Ref:
    return _over_last(c, c.ref(0), int(c.value("axis", 1, -1)), lambda x: c.op("log", c.op("softmax", x)))


def _over_last(c: Call, x: Ref, axis: int, function: Callable[[Ref], Ref]) -> Ref:
    # The IR's softmax works along the last axis; others are brought there and back.
    rank = len(c.shape(x))
    if axis % rank == rank - 1:
        return function(x)
    order = [k for k in range(rank) if k != axis % rank] + [axis % rank]
    return c.d.transpose(function(c.d.transpose(x, order)), np.argsort(order).tolist())


def _layer_norm(c: Call, gain: int = 1, shift: int = 2, epsilon: tuple[str, int] = ("epsilon", -1)) -> Ref:
    x = c.ref(0)
    # The IR's norm has gain and shift; those that are left out are ones and zeros.
    size = c.shape(x)[-1:]
    if "axis" in c.attributes and c.attributes["axis"] not in (-1, len(c.shape(x)) - 1):
        raise CannotMapError("a norm over several axes")
    if c.has(gain) and c.shape(c.item(gain)) != size:
        raise CannotMapError("a norm over several axes")
    scale = c.ref(gain) if c.has(gain) else c.d.literal(np.full(size, 1.0), c.dtype)
    offset = c.ref(shift) if c.has(shift) else c.d.literal(np.full(size, 0.0), c.dtype)
    return c.op("layer_norm", x, scale, offset, epsilon=float(c.value(*epsilon, 1e-5)))


def _rms_norm(c: Call, gain: int = 1, epsilon: tuple[str, int] = ("epsilon", -1), default: float = 1e-5) -> Item:
    x = c.ref(0)
    # x / sqrt(mean(x^2) + epsilon), written out: the IR has no fused RMS norm.
    square = c.op("sum", c.op("mul", x, x), axes=(len(c.shape(x)) - 1,), keep=True)
    shifted = primitive(c, "add", c.scaled(square, 1 / c.shape(x)[-1]), Known.of(c.value(*epsilon, default)))
    y = c.op("div", x, c.op("sqrt", c.as_ref(shifted)))
    return c.op("mul", y, c.ref(gain)) if c.has(gain) else y


def _attention(c: Call) -> Ref:
    """ATen's scaled_dot_product_attention of [batch, heads, sequence, size]: the IR's fused kernel where it can be."""
    q, k, v = c.ref(0), c.ref(1), c.ref(2)
    causal, size = bool(c.value("", 5, False)), c.shape(q)[-1]
    scale = c.value("", 6, None) or size**-0.5
    # Grouped-query attention: each key head serves several query heads.
    groups = c.shape(q)[1] // c.shape(k)[1] if len(c.shape(q)) == 4 else 1
    if groups > 1:
        k, v = _repeat_heads(c, k, groups), _repeat_heads(c, v, groups)
    mask, causal = _settled_mask(c.item(3) if c.has(3) else None, causal)
    # The fused kernel has the usual scale and at most a causal mask. It takes joint heads of query, key and value,
    # hence the concat. Everything else is written out as products and a softmax.
    plain = mask is None and scale == size**-0.5
    if plain and len(c.shape(q)) == 4 and c.shape(q) == c.shape(k) == c.shape(v):
        batch, heads, seq, _ = c.shape(q)
        joint = c.op("concat", *(c.d.transpose(x, (0, 2, 1, 3)) for x in (q, k, v)), axis=3)
        context = c.op("attention", c.d.reshape(joint, (batch, seq, 3 * heads * size)), heads=heads, causal=causal)
        return c.d.transpose(c.d.reshape(context, (batch, seq, heads, size)), (0, 2, 1, 3))
    scores = c.scaled(c.op("matmul", q, k, transpose_b=True), scale)
    if causal:
        mask = Known(np.tril(np.ones(c.shape(scores)[-2:], bool)))
    if isinstance(mask, Known) and mask.array.dtype == bool:
        mask = Known(np.where(mask.array, 0.0, LOWEST[c.dtype]))
    if mask is not None:
        scores = c.op("add", scores, c.broadcast_ref(mask))
    return _product(c, c.op("softmax", scores), v)


def _settled_mask(mask: Item | None, causal: bool) -> tuple[Item | None, bool]:
    """Drop a mask that is known to hide nothing, or nothing but later positions (then attention is causal)."""
    if not isinstance(mask, Known):
        return mask, causal
    # Masks come as booleans or as large negative numbers to be added.
    seen = mask.array if mask.array.dtype == bool else mask.array >= 0
    if mask.array.dtype != bool and not (seen | (mask.array < _HIDDEN)).all():
        return mask, causal  # a bias that is no mask, as relative positions are
    small = collapsed(seen)
    if small.ndim == 0 and bool(small):
        return None, causal
    rows, columns = seen.shape[-2:]
    earlier = np.tril(np.ones((rows, columns), bool))
    if rows == columns and (seen == earlier).all():
        return None, True
    return Known(seen & earlier if causal else seen), False


def _repeat_heads(c: Call, x: Ref, groups: int) -> Ref:
    batch, heads, *rest = c.shape(x)
    # Copies of a head must stand next to one another, in the order of the query heads.
    single = c.d.reshape(x, (batch, heads, 1, *rest))
    return c.d.reshape(c.op("concat", *[single] * groups, axis=2), (batch, heads * groups, *rest))


def _cross_entropy(c: Call) -> Ref:
    """Mean over the labels that count; ATen's and ONNX's classes of more than two axes stand in axis 1.

    Labels that are data are in range. Those that the graph itself puts in the place of a missing one (the next token
    of the last position) are known, and so is how many count.
    """
    logits, labels = c.ref(0), c.ref(1)
    rank = len(c.shape(logits))
    if c.has(2) or c.value("reduction", 3, 1) not in (1, b"mean", "mean"):
        raise CannotMapError("class weights, or a reduction other than the mean")
    if c.value("", 5, 0.0):
        raise CannotMapError("smoothed labels; set label_smoothing=0")
    # The IR looks labels up along the last axis.
    logits = c.d.transpose(logits, (0, *range(2, rank), 1)) if rank > 2 else logits
    ignored = c.d.known_elements(labels) == c.value("ignore_index", 4, -100)
    counts = ~np.ma.filled(ignored, False)
    with c.d.builder.tagged(phase="forward", layer=logits.layer):
        each = replace(logits, name=surprise(c.d.builder, logits.name, labels.name))
    if not counts.all():
        # What repeats itself for every sample is written once, so that samples can be dealt out.
        period = _period(counts.ravel())
        each = c.d.reshape(each, (counts.size // period, period))
        each = c.op("mul", each, c.d.literal(counts.ravel()[:period].astype(float), c.d.dtype(each)))
    total = c.op("sum", each, axes=tuple(range(len(c.shape(each)))))
    return c.op("scale", total, factor=1.0 / max(int(counts.sum()), 1), name="loss")


def _period(values: np.ndarray) -> int:
    """Elements after which a vector repeats itself."""
    n = len(values)
    lengths = [k for k in range(1, n + 1) if n % k == 0]
    return next(k for k in lengths if (values.reshape(-1, k) == values[:k]).all())


def _mse(c: Call) -> Ref:
    error = c.op("sub", c.ref(0), c.ref(1))
    total = c.op("sum", c.op("mul", error, error), axes=tuple(range(len(c.shape(error)))))
    if c.value("reduction", 2, 1) != 1:
        raise CannotMapError("a reduction other than the mean")
    return c.scaled(total, 1 / prod(c.shape(error)))


PRODUCTS: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **spelled("MatMul", "matmul", "mm", "bmm", rule=_matmul),
        "linear": _linear,
        "Gemm": _gemm,
        "addmm": _addmm,
        "baddbmm": _baddbmm,
        "ReduceSum": _sum,
        "ReduceMean": lambda c: _sum(c, mean=True),
        **spelled("sum", "sum.dim_IntList", rule=lambda c: _sum(c, keep=0)),
        **spelled("mean", "mean.dim", rule=lambda c: _sum(c, mean=True, keep=0)),
        **spelled("Softmax", "softmax.int", "_softmax", rule=_softmax),
        **spelled("LogSoftmax", "log_softmax.int", "_log_softmax", rule=_log_softmax),
        "LayerNormalization": _layer_norm,
        "layer_norm": lambda c: _layer_norm(c, 2, 3, ("", 4)),
        "RMSNormalization": _rms_norm,
        "rms_norm": lambda c: _rms_norm(c, 2, ("", 3), float(np.finfo(np.float32).eps)),  # torch's default
        "scaled_dot_product_attention": _attention,
        **spelled("SoftmaxCrossEntropyLoss", "cross_entropy_loss", rule=_cross_entropy),
        "mse_loss": _mse,
    }
)
"""Rules by name of the op."""
