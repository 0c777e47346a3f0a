"""Ops of ONNX and ATen on images: convolutions, pooling, and norms over channels.

Norms are written as sums and element-wise ops, which the IR differentiates and shards: a batch norm
that trains sums over all samples, so that replicas all-reduce its sums (synchronised batch norm)
and micro-batches are refused.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, ForeignOp, Rule, foreign_ops, primitive

_EPSILON: Final = 1e-5
"""Default constant that norms add to the variance (torch.nn.functional, ONNX's operators)."""


def _pair(values: Any) -> tuple[int, int]:
    """Height and width; a single number means both."""
    pair = [int(n) for n in np.atleast_1d(values)]
    if len(pair) > 2:
        raise CannotMapError("images of more than two dimensions")
    return pair[0], pair[-1]


def _padding(call: Call) -> tuple[int, int]:
    """Padding of height and width. ONNX states starts, then ends, ATen both at once."""
    if call.value("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", "NOTSET", "VALID"):
        raise CannotMapError("padding that depends on the size; export with fixed pads")
    # The IR pads alike on both sides.
    if "pads" in call.attributes:
        starts, ends = np.reshape(call.attributes["pads"], (2, -1)).tolist()
        if starts != ends:
            raise CannotMapError("asymmetric padding of an image")
        return _pair(starts)
    padding = call.value("padding", 0)
    if isinstance(padding, str):
        raise CannotMapError(f"padding {padding!r}; give it in numbers")
    return _pair(padding)


def _check_undilated(call: Call) -> None:
    if any(n != 1 for n in np.atleast_1d(call.value("dilations", 1))):
        raise CannotMapError("dilated windows")


def _convolution(call: Call) -> Item:
    """A convolution over two dimensions, or over one dimension as images of height 1."""
    x = call.ref("x")
    weight = call.ref("weight")
    shape = call.shape(x)
    kernel = call.shape(weight)
    if len(shape) not in (3, 4):
        raise CannotMapError("an image of more than two dimensions")
    if call.value("transposed", False):
        raise CannotMapError("a transposed convolution")
    _check_undilated(call)
    stride = _pair(call.value("strides", 1))
    padding = _padding(call)

    # The IR convolves images alone. A line gets an axis of size 1, which the kernel neither slides
    # along nor pads.
    is_line = len(shape) == 3
    if is_line:
        x = call.reshape(x, (*shape[:2], 1, shape[2]))
        weight = call.reshape(weight, (*kernel[:2], 1, kernel[2]))
        stride, padding = (1, stride[1]), (0, padding[1])
    y = call.op(
        "conv2d", x, weight, stride=stride, padding=padding, groups=int(call.value("group", 1))
    )
    if call.has("bias"):
        y = call.op("add", y, _by_channel(call, call.ref("bias"), 4))
    if is_line:
        y = call.reshape(y, (shape[0], kernel[0], call.shape(y)[3]))
    return y


def _max_pool(call: Call) -> Ref:
    _check_undilated(call)
    return _pooled(call, "max")


def _mean_pool(call: Call) -> Ref:
    # By default, ONNX leaves the padding out of its means; ATen always says whether it does.
    counts_padding = call.value("count_include_pad", False)
    divisor = call.value("divisor", None)
    if (any(_padding(call)) and not counts_padding) or divisor is not None:
        raise CannotMapError("a mean over windows of different sizes, or with another divisor")
    return _pooled(call, "mean")


def _pooled(call: Call, kind: str) -> Ref:
    """Translate a pooling whose window slides over the two last axes."""
    x = call.ref("x")
    kernel = _pair(call.value("kernel_shape"))
    padding = _padding(call)

    # Where no stride is given, ONNX's is 1, ATen's the window. `[]` is how ATen writes "not given".
    stated_stride = call.value("strides", None)
    if stated_stride not in (None, []):
        stride = _pair(stated_stride)
    elif "kernel_shape" in call.attributes:
        stride = (1, 1)
    else:
        stride = kernel

    # `ceil_mode` only matters where windows do not end with the image.
    sizes = zip(call.shape(x)[2:], kernel, stride, padding, strict=True)
    is_ragged = any((size + 2 * pad - window) % step for size, window, step, pad in sizes)
    if is_ragged and call.value("ceil_mode", False):
        raise CannotMapError("windows that extend beyond the image (ceil_mode)")
    return call.op("pool2d", x, kind=kind, kernel=kernel, stride=stride, padding=padding)


def _max_pool_with_places(call: Call) -> list[Ref | None]:
    """The maxima; their positions are only needed by ATen's own gradient."""
    return [_max_pool(call), None]


def _mean_over(call: Call, x: Ref, axes: tuple[int, ...]) -> Ref:
    """Mean over axes, which are kept with size 1."""
    shape = call.shape(x)
    total = call.op("sum", x, axes=axes, keep=True)
    return call.scaled(total, 1 / prod(shape[axis] for axis in axes))


def _global_mean(call: Call) -> Ref:
    x = call.ref("x")
    return _mean_over(call, x, tuple(range(2, call.rank(x))))


def _adaptive_mean(call: Call) -> Ref:
    """Pool to one element by a mean over all, to more by windows where the image divides."""
    x = call.ref("x")
    out = _pair(call.value("size"))
    height, width = call.shape(x)[2:]
    if out == (1, 1):
        return _global_mean(call)
    if out == (height, width):
        return x
    # Where the image does not divide, ATen's windows overlap and differ in size
    # (`start = floor(i * in / out)`).
    if height % out[0] or width % out[1]:
        raise CannotMapError(f"windows of different sizes from {(height, width)} to {out}")
    kernel = (height // out[0], width // out[1])
    return call.op("pool2d", x, kind="mean", kernel=kernel, stride=kernel, padding=(0, 0))


def _adaptive_mean_of_lines(call: Call) -> Ref:
    """Pool to one element by a mean over all."""
    x = call.ref("x")
    (out,) = call.integers("size")
    if out != 1:
        raise CannotMapError(f"windows of different sizes to {out}")
    return _mean_over(call, x, (call.rank(x) - 1,))


def _by_channel(call: Call, item: Item, rank: int) -> Any:
    """Reshape one value per channel so that it is broadcast over an image."""
    ones = (1,) * (rank - 2)
    if isinstance(item, Known):
        return Known(np.asarray(item.array, float).reshape((-1, *ones)))
    if not isinstance(item, Ref):
        raise CannotMapError("depends on an unmapped op")
    return call.reshape(item, (call.shape(item)[0], *ones))


def _normalised(call: Call, x: Ref, axes: tuple[int, ...]) -> Ref:
    """Normalise to zero mean and unit variance over some axes."""
    # Written out, so that sharding rules see sums: replicas then all-reduce them, as synchronised
    # batch norm does.
    centred = call.op("sub", x, _mean_over(call, x, axes))
    variance = _mean_over(call, call.op("mul", centred, centred), axes)
    shifted = call.as_ref(primitive(call, "add", variance, Known.of(_epsilon(call))))
    return call.op("div", centred, call.op("sqrt", shifted))


def _epsilon(call: Call) -> float:
    return float(call.value("epsilon", _EPSILON))


def _scaled_by_channel(call: Call, x: Ref) -> Item:
    """The value times the call's gain plus its shift, each of which may be missing."""
    rank = call.rank(x)
    y: Item = x
    if call.has("gain"):
        y = primitive(call, "mul", y, _by_channel(call, call.item("gain"), rank))
    if call.has("shift"):
        y = primitive(call, "add", y, _by_channel(call, call.item("shift"), rank))
    return y


def _batch_norm(call: Call) -> Item:
    """A norm over all samples in training, else by running statistics."""
    x = call.ref("x")
    rank = call.rank(x)
    if call.value("training_mode", False):
        return _scaled_by_channel(call, _normalised(call, x, (0, *range(2, rank))))

    mean = _by_channel(call, call.item("mean"), rank)
    variance = _by_channel(call, call.item("variance"), rank)
    # Running statistics with values fold into one factor per channel; on the meta device they are
    # data.
    if isinstance(variance, Known):
        factor = Known((variance.array + _epsilon(call)) ** -0.5)
        y = primitive(call, "mul", primitive(call, "sub", x, mean), factor)
    else:
        root = primitive(call, "sqrt", primitive(call, "add", variance, Known.of(_epsilon(call))))
        y = primitive(call, "div", primitive(call, "sub", x, mean), root)
    return _scaled_by_channel(call, call.as_ref(y))


def _with_statistics(rule: Rule, n_statistics: int) -> Rule:
    """Return the rule of a norm that also returns statistics, which a program does not use."""
    return lambda call: [rule(call), *[None] * n_statistics]


def _group_norm(call: Call) -> Item:
    """A norm over groups of channels of each image."""
    x = call.ref("x")
    shape = call.shape(x)
    # Groups are contiguous channels, so each is one row of a reshape.
    groups = int(call.value("num_groups"))
    rows = call.reshape(x, (shape[0], groups, -(-prod(shape[1:]) // groups)))
    return _scaled_by_channel(call, call.reshape(_normalised(call, rows, (2,)), shape))


def _instance_norm(call: Call) -> Item:
    """A norm over each image and channel; running statistics are supported only in batch norms."""
    x = call.ref("x")
    if not call.value("by_input_statistics", True):
        raise CannotMapError("an instance norm by running statistics")
    return _scaled_by_channel(call, _normalised(call, x, tuple(range(2, call.rank(x)))))


_TRAINING_NORM: Final = "x, gain, shift, mean, variance, training_mode, momentum, epsilon"
_POOL: Final = "x, kernel_shape, strides, padding"

IMAGES: Final[Mapping[str, ForeignOp]] = MappingProxyType(
    {
        **foreign_ops(
            "Conv(x, weight, bias)",
            "conv2d(x, weight, bias, strides, padding, dilations, group)",
            "conv1d(x, weight, bias, strides, padding, dilations, group)",
            "convolution(x, weight, bias, strides, padding, dilations, transposed, output_padding, group)",
            rule=_convolution,
        ),
        **foreign_ops("MaxPool(x)", f"max_pool2d({_POOL}, dilations, ceil_mode)", rule=_max_pool),
        **foreign_ops(
            f"max_pool2d_with_indices({_POOL}, dilations, ceil_mode)", rule=_max_pool_with_places
        ),
        **foreign_ops(
            "AveragePool(x)",
            f"avg_pool2d({_POOL}, ceil_mode, count_include_pad, divisor)",
            rule=_mean_pool,
        ),
        **foreign_ops("GlobalAveragePool(x)", rule=_global_mean),
        **foreign_ops(
            "adaptive_avg_pool2d(x, size)", "_adaptive_avg_pool2d(x, size)", rule=_adaptive_mean
        ),
        **foreign_ops("adaptive_avg_pool1d(x, size)", rule=_adaptive_mean_of_lines),
        **foreign_ops(
            "BatchNormalization(x, gain, shift, mean, variance)",
            f"batch_norm({_TRAINING_NORM})",
            rule=_batch_norm,
        ),
        **foreign_ops(
            f"native_batch_norm({_TRAINING_NORM})",
            f"_native_batch_norm_legit({_TRAINING_NORM})",
            "_native_batch_norm_legit_no_training(x, gain, shift, mean, variance, momentum, epsilon)",
            rule=_with_statistics(_batch_norm, 2),
        ),
        # What a program that assigns every value once has for it: new running statistics too.
        **foreign_ops(
            f"_native_batch_norm_legit_functional({_TRAINING_NORM})",
            rule=_with_statistics(_batch_norm, 4),
        ),
        **foreign_ops(
            "GroupNormalization(x, gain, shift)",
            "group_norm(x, num_groups, gain, shift, epsilon)",
            rule=_group_norm,
        ),
        **foreign_ops(
            "InstanceNormalization(x, gain, shift)",
            "instance_norm(x, gain, shift, mean, variance, by_input_statistics, momentum, epsilon)",
            rule=_instance_norm,
        ),
    }
)
"""Ops by name."""
