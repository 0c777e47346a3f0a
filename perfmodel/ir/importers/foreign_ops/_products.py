"""Products of ONNX and ATen, reductions, norms of rows, attention and losses."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from types import MappingProxyType
from typing import Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref, collapsed
from perfmodel.ir.importers.foreign_ops._call import (
    LOWEST,
    Call,
    ForeignOp,
    axes_of,
    foreign_ops,
    primitive,
)
from perfmodel.ir.models import surprise

_HIDDEN: Final = -1e9
"""Additive masks below this value remove a score completely."""
_EPSILON: Final = 1e-5
"""Default constant that norms add to the variance (torch.nn.functional, ONNX's operators)."""
_TORCH_RMS_EPSILON: Final = float(np.finfo(np.float32).eps)
"""Default constant of torch's `rms_norm`: the spacing of floats around 1."""


def _matmul(call: Call) -> Ref:
    return _product(call, call.ref("a"), call.ref("b"))


def _product(call: Call, a: Ref, b: Ref, **transposed: bool) -> Ref:
    """A product; the smaller operand's leading axes are repeated or merged for `matmul`."""
    # NumPy's rules for vectors and broadcast batches, in terms of an op that takes equal batches or
    # one matrix.
    shape_a = call.shape(a)
    shape_b = call.shape(b)
    if len(shape_a) == 1:
        row = call.reshape(a, (1, *shape_a))
        return call.reshape(_product(call, row, b), (*shape_b[:-2], shape_b[-1]))
    if len(shape_b) == 1:
        column = call.reshape(b, (*shape_b, 1))
        return call.reshape(_product(call, a, column), shape_a[:-1])

    # One matrix serves a whole batch of the first operand, so only other differences are written
    # out.
    if len(shape_b) > 2 and shape_a[:-2] != shape_b[:-2]:
        batch = np.broadcast_shapes(shape_a[:-2], shape_b[:-2])
        a = call.expanded(a, (*batch, *shape_a[-2:]))
        b = call.expanded(b, (*batch, *shape_b[-2:]))
    elif len(shape_b) > len(shape_a):
        a = call.expanded(a, (*shape_b[:-2], *shape_a[-2:]))
    return call.op("matmul", a, b, **transposed)


def _linear(call: Call) -> Item:
    y = _product(call, call.ref("x"), call.ref("weight"), transpose_b=True)
    return call.op("add", y, call.ref("bias")) if call.has("bias") else y


def _baddbmm(call: Call) -> Item:
    """beta x + alpha a b."""
    y = call.scaled(_product(call, call.ref("a"), call.ref("b")), call.value("alpha", 1))
    beta = call.value("beta", 1)
    # With beta 0 ATen does not look at x, which may be uninitialised memory.
    if not beta:
        return y
    scaled_x = primitive(call, "mul", call.item("x"), Known.of(float(beta)))
    return primitive(call, "add", y, scaled_x)


def _gemm(call: Call) -> Item:
    """beta x + alpha a b, where a and b may be transposed and x may be missing."""
    transposed = {}
    if call.value("transA", 0):
        transposed["transpose_a"] = True
    if call.value("transB", 0):
        transposed["transpose_b"] = True
    product = _product(call, call.ref("a"), call.ref("b"), **transposed)
    y = call.scaled(product, call.value("alpha", 1.0))
    if not call.has("x"):
        return y
    return call.op("add", y, call.scaled(call.ref("x"), call.value("beta", 1.0)))


def _sum(call: Call, keep: bool = True) -> Ref:
    """Sum over the call's axes, which ONNX keeps by default; ATen always states it."""
    keep = bool(call.value("keepdims", keep))
    return call.op("sum", call.ref("x"), axes=_summed_axes(call), keep=keep)


def _mean(call: Call, keep: bool = True) -> Ref:
    shape = call.shape(call.ref("x"))
    n_summed = prod(shape[axis] for axis in _summed_axes(call))
    return call.scaled(_sum(call, keep), 1.0 / n_summed)


def _summed_axes(call: Call) -> tuple[int, ...]:
    rank = call.rank(call.ref("x"))
    stated_axes = call.value("axes", None)
    if stated_axes is None or stated_axes == []:
        return tuple(range(rank))
    return axes_of(stated_axes, rank)


def _softmax(call: Call) -> Ref:
    return _over_axis(call, lambda x: call.op("softmax", x))


def _log_softmax(call: Call) -> Ref:
    return _over_axis(call, lambda x: call.op("log", call.op("softmax", x)))


def _over_axis(call: Call, function: Callable[[Ref], Ref]) -> Ref:
    """A function along the call's axis."""
    # The IR's softmax works along the last axis; others are brought there and back.
    x = call.ref("x")
    rank = call.rank(x)
    axis = call.axis(rank, default=-1)
    if axis == rank - 1:
        return function(x)
    order = [k for k in range(rank) if k != axis] + [axis]
    back = np.argsort(order).tolist()
    return call.transpose(function(call.transpose(x, order)), back)


def _layer_norm(call: Call) -> Ref:
    """Translate a layer norm over the last axis."""
    x = call.ref("x")
    size = call.shape(x)[-1:]
    _check_one_axis(call, x)
    if call.has("gain") and call.shape(call.item("gain")) != size:
        raise CannotMapError("a norm over several axes")
    # The IR's norm has gain and shift; those that are left out are ones and zeros.
    ones = np.full(size, 1.0)
    zeros = np.full(size, 0.0)
    gain = call.ref("gain") if call.has("gain") else call.emitter.literal(ones, call.dtype)
    shift = call.ref("shift") if call.has("shift") else call.emitter.literal(zeros, call.dtype)
    return call.op("layer_norm", x, gain, shift, epsilon=float(call.value("epsilon", _EPSILON)))


def _check_one_axis(call: Call, x: Ref) -> None:
    """Refuse a norm over more than the last axis, by first axis (ONNX) or shape (ATen)."""
    rank = call.rank(x)
    first_axis = call.axis(rank, default=-1)
    if call.has("normalised_shape"):
        first_axis = rank - len(call.operands["normalised_shape"])
    if first_axis != rank - 1:
        raise CannotMapError("a norm over several axes")


def _rms_norm(call: Call) -> Item:
    return _by_root_mean_square(call, _EPSILON)


def _torch_rms_norm(call: Call) -> Item:
    return _by_root_mean_square(call, _TORCH_RMS_EPSILON)


def _by_root_mean_square(call: Call, default_epsilon: float) -> Item:
    """x / sqrt(mean(x^2) + epsilon), written out: the IR has no fused RMS norm."""
    x = call.ref("x")
    _check_one_axis(call, x)
    shape = call.shape(x)
    epsilon = Known.of(call.value("epsilon", default_epsilon))
    square_sum = call.op("sum", call.op("mul", x, x), axes=(len(shape) - 1,), keep=True)
    mean_square = call.scaled(square_sum, 1 / shape[-1])
    root = call.op("sqrt", call.as_ref(primitive(call, "add", mean_square, epsilon)))
    y = call.op("div", x, root)
    return call.op("mul", y, call.ref("gain")) if call.has("gain") else y


def _attention(call: Call) -> Ref:
    """ATen's attention on [batch, heads, sequence, size], by the IR's fused kernel if possible."""
    query = call.ref("query")
    key = call.ref("key")
    value = call.ref("value")
    head_size = call.shape(query)[-1]
    usual_scale = head_size**-0.5
    scale = call.value("scale", None) or usual_scale

    # Grouped-query attention: each key head serves several query heads.
    has_heads = call.rank(query) == 4
    group_size = call.shape(query)[1] // call.shape(key)[1] if has_heads else 1
    if group_size > 1:
        key = _repeat_heads(call, key, group_size)
        value = _repeat_heads(call, value, group_size)

    # The fused kernel has the usual scale and at most a causal mask. Everything else is written out
    # as products and a softmax.
    stated_mask = call.item("mask") if call.has("mask") else None
    mask, causal = _settled_mask(stated_mask, bool(call.value("causal", False)))
    same_shapes = call.shape(query) == call.shape(key) == call.shape(value)
    if mask is None and scale == usual_scale and has_heads and same_shapes:
        return _fused_attention(call, query, key, value, causal)
    scores = call.scaled(call.op("matmul", query, key, transpose_b=True), scale)
    if causal:
        mask = Known(np.tril(np.ones(call.shape(scores)[-2:], bool)))
    if isinstance(mask, Known) and mask.array.dtype == bool:
        mask = Known(np.where(mask.array, 0.0, LOWEST[call.dtype]))
    if mask is not None:
        scores = call.op("add", scores, call.broadcast_ref(mask))
    return _product(call, call.op("softmax", scores), value)


def _fused_attention(call: Call, query: Ref, key: Ref, value: Ref, causal: bool) -> Ref:
    """The IR's attention, on joined heads: [batch, sequence, 3 heads size]."""
    batch, heads, seq, head_size = call.shape(query)
    heads_last = [call.transpose(x, (0, 2, 1, 3)) for x in (query, key, value)]
    joint = call.op("concat", *heads_last, axis=3)
    joint = call.reshape(joint, (batch, seq, 3 * heads * head_size))
    context = call.op("attention", joint, heads=heads, causal=causal)
    return call.transpose(call.reshape(context, (batch, seq, heads, head_size)), (0, 2, 1, 3))


def _settled_mask(mask: Item | None, causal: bool) -> tuple[Item | None, bool]:
    """Drop a mask that hides nothing, or just later positions (attention is then causal)."""
    if not isinstance(mask, Known):
        return mask, causal

    # Masks come as booleans or as large negative numbers to be added. What is neither is a bias, as
    # relative positions are.
    if mask.array.dtype == bool:
        visible = mask.array
    else:
        visible = mask.array >= 0
        if not (visible | (mask.array < _HIDDEN)).all():
            return mask, causal

    small = collapsed(visible)
    if small.ndim == 0 and bool(small):
        return None, causal
    rows, columns = visible.shape[-2:]
    earlier = np.tril(np.ones((rows, columns), bool))
    if rows == columns and (visible == earlier).all():
        return None, True
    return Known(visible & earlier if causal else visible), False


def _repeat_heads(call: Call, x: Ref, group_size: int) -> Ref:
    """Key or value heads, each as often as query heads share it."""
    batch, heads, *trailing = call.shape(x)
    # Copies of a head must stand next to one another, in the order of the query heads.
    single = call.reshape(x, (batch, heads, 1, *trailing))
    copies = call.op("concat", *[single] * group_size, axis=2)
    return call.reshape(copies, (batch, heads * group_size, *trailing))


def _cross_entropy(call: Call) -> Ref:
    """Mean over the labels that count; with over two axes, the classes are in axis 1.

    Labels that are data are in range. Those that the graph itself puts in the place of a missing
    one (the next token of the last position) are known, and so is how many count.
    """
    # ATen numbers its reductions: 1 is the mean.
    if call.has("class_weights") or call.value("reduction", 1) not in (1, b"mean", "mean"):
        raise CannotMapError("class weights, or a reduction other than the mean")
    if call.value("label_smoothing", 0.0):
        raise CannotMapError("smoothed labels; set label_smoothing=0")

    # The IR looks labels up along the last axis.
    emitter = call.emitter
    logits = call.ref("logits")
    labels = call.ref("labels")
    rank = call.rank(logits)
    if rank > 2:
        logits = call.transpose(logits, (0, *range(2, rank), 1))
    is_ignored = emitter.known_elements(labels) == call.value("ignore_index", -100)
    counts = ~np.ma.filled(is_ignored, False)
    with emitter.builder.tagged(phase="forward", layer=logits.layer):
        losses = replace(logits, name=surprise(emitter.builder, logits.name, labels.name))
    if not counts.all():
        # A part that is the same for every sample is written once, so that samples can be
        # distributed.
        period = _period(counts.ravel())
        losses = call.reshape(losses, (counts.size // period, period))
        weights = counts.ravel()[:period].astype(float)
        losses = call.op("mul", losses, emitter.literal(weights, emitter.dtype(losses)))
    total = call.op("sum", losses, axes=tuple(range(call.rank(losses))))
    return call.op("scale", total, factor=1.0 / max(int(counts.sum()), 1), name="loss")


def _period(values: np.ndarray) -> int:
    """Elements after which a vector repeats itself."""
    n = len(values)
    divisors = [length for length in range(1, n + 1) if n % length == 0]
    return next(
        length for length in divisors if (values.reshape(-1, length) == values[:length]).all()
    )


def _mse(call: Call) -> Ref:
    """Mean of squared differences."""
    if call.value("reduction", 1) != 1:
        raise CannotMapError("a reduction other than the mean")
    error = call.op("sub", call.ref("x"), call.ref("target"))
    shape = call.shape(error)
    total = call.op("sum", call.op("mul", error, error), axes=tuple(range(len(shape))))
    return call.scaled(total, 1 / prod(shape))


PRODUCTS: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops("MatMul(a, b)", "matmul(a, b)", "mm(a, b)", "bmm(a, b)", rule=_matmul),
        **foreign_ops("linear(x, weight, bias)", rule=_linear),
        **foreign_ops("Gemm(a, b, x)", "addmm(x, a, b, beta, alpha)", rule=_gemm),
        **foreign_ops("baddbmm(x, a, b, beta, alpha)", rule=_baddbmm),
        **foreign_ops("ReduceSum(x, axes)", "sum.dim_IntList(x, axes, keepdims)", rule=_sum),
        **foreign_ops("ReduceMean(x, axes)", "mean.dim(x, axes, keepdims)", rule=_mean),
        **foreign_ops("sum(x)", rule=lambda call: _sum(call, keep=False)),
        **foreign_ops("mean(x)", rule=lambda call: _mean(call, keep=False)),
        **foreign_ops("Softmax(x)", "softmax.int(x, axis)", "_softmax(x, axis)", rule=_softmax),
        **foreign_ops(
            "LogSoftmax(x)", "log_softmax.int(x, axis)", "_log_softmax(x, axis)", rule=_log_softmax
        ),
        **foreign_ops(
            "LayerNormalization(x, gain, shift)",
            "layer_norm(x, normalised_shape, gain, shift, epsilon)",
            rule=_layer_norm,
        ),
        **foreign_ops("RMSNormalization(x, gain)", rule=_rms_norm),
        **foreign_ops("rms_norm(x, normalised_shape, gain, epsilon)", rule=_torch_rms_norm),
        **foreign_ops(
            "scaled_dot_product_attention(query, key, value, mask, dropout, causal, scale)",
            rule=_attention,
        ),
        **foreign_ops(
            "SoftmaxCrossEntropyLoss(logits, labels, class_weights)",
            "cross_entropy_loss(logits, labels, class_weights, reduction, ignore_index, label_smoothing)",
            rule=_cross_entropy,
        ),
        **foreign_ops("mse_loss(x, target, reduction)", rule=_mse),
    }
)
"""Ops by name."""
