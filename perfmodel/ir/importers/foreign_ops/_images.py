"""Ops of ONNX and ATen on images: convolutions, pooling, and norms over channels.

Norms are written as sums and element-wise ops, which the IR differentiates and shards: a batch norm that trains sums
over all samples, so that replicas all-reduce its sums (synchronised batch norm) and micro-batches are refused.
"""

from collections.abc import Mapping
from math import prod
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from perfmodel.ir.importers._emitter import CannotMapError, Item, Known, Ref
from perfmodel.ir.importers.foreign_ops._call import Call, Rule, axes_of, primitive, spelled


def _pair(values: Any) -> tuple[int, int]:
    """Height and width, of which one number may stand for both."""
    pair = [int(n) for n in np.atleast_1d(values)]
    if len(pair) > 2:
        raise CannotMapError("images of more than two dimensions")
    return pair[0], pair[-1]


def _padding(c: Call, position: int) -> tuple[int, int]:
    """ONNX: starts, then ends; ATen: both at once."""
    if c.attributes.get("auto_pad", b"NOTSET") not in (b"NOTSET", b"VALID", "NOTSET", "VALID"):
        raise CannotMapError("padding that depends on the size; export with fixed pads")
    # The IR pads alike on both sides.
    if "pads" in c.attributes:
        starts, ends = np.reshape(c.attributes["pads"], (2, -1)).tolist()
        if starts != ends:
            raise CannotMapError("asymmetric padding of an image")
        return _pair(starts)
    pads = c.value("pads", position, 0)
    if isinstance(pads, str):
        raise CannotMapError(f"padding {pads!r}; give it in numbers")
    return _pair(pads)


def _undilated(c: Call, position: int) -> None:
    if any(n != 1 for n in np.atleast_1d(c.value("dilations", position, 1))):
        raise CannotMapError("dilated windows")


def _convolution(c: Call, groups: int = 6) -> Item:
    """ONNX's Conv and ATen's conv2d; `convolution` has its groups further on, behind what only transposed ones have."""
    x, w = c.ref(0), c.ref(1)
    if len(c.shape(x)) == 3:
        return _convolution_of_lines(c, groups)
    if len(c.shape(x)) != 4:
        raise CannotMapError("an image of more than two dimensions")
    if groups > 6 and c.value("", 6, False):
        raise CannotMapError("a transposed convolution")
    _undilated(c, 5)
    y = c.op(
        "conv2d",
        x,
        w,
        stride=_pair(c.value("strides", 3, 1)),
        padding=_padding(c, 4),
        groups=int(c.value("group", groups, 1)),
    )
    return c.op("add", y, _by_channel(c, c.ref(2), 4)) if c.has(2) else y


def _convolution_of_lines(c: Call, groups: int) -> Item:
    """A convolution over one dimension: of images of height 1."""
    if groups > 6 and c.value("", 6, False):
        raise CannotMapError("a transposed convolution")
    _undilated(c, 5)
    x, w = c.ref(0), c.ref(1)
    n, channels, length = c.shape(x)
    kernel = c.shape(w)
    y = c.op(
        "conv2d",
        c.d.reshape(x, (n, channels, 1, length)),
        c.d.reshape(w, (*kernel[:2], 1, kernel[2])),
        stride=(1, _pair(c.value("strides", 3, 1))[1]),
        padding=(0, _padding(c, 4)[1]),
        groups=int(c.value("group", groups, 1)),
    )
    y = c.op("add", y, _by_channel(c, c.ref(2), 4)) if c.has(2) else y
    return c.d.reshape(y, (n, kernel[0], c.shape(y)[3]))


def _pool(c: Call, kind: str) -> Ref:
    """ONNX has all in attributes; ATen: kernel, stride, padding, then what is particular to each."""
    x, kernel = c.ref(0), _pair(c.value("kernel_shape", 1))
    # Where no stride is given, ONNX's is 1, ATen's the window.
    is_onnx = "kernel_shape" in c.attributes
    # `[]` is how ATen writes "not given".
    usual = (1, 1) if is_onnx else kernel
    stated = c.value("strides", 2, None)
    stride = usual if stated in (None, []) else _pair(stated)
    padding = _padding(c, 3)
    if kind == "max":
        _undilated(c, 4)
    shape = c.shape(x)[2:]
    steps = list(zip(shape, kernel, stride, padding, strict=True))
    # `ceil_mode` only matters where windows do not end with the image.
    ragged = any((n + 2 * pad - k) % step for n, k, step, pad in steps)
    if ragged and c.value("ceil_mode", 5 if kind == "max" else 4, False):
        raise CannotMapError("windows that extend beyond the image (ceil_mode)")
    counts = c.attributes.get("count_include_pad", 0) if is_onnx else c.value("", 5, True)
    if kind == "mean" and ((any(padding) and not counts) or c.value("", 6, None) is not None):
        raise CannotMapError("a mean over windows of different sizes, or with another divisor")
    return c.op("pool2d", x, kind=kind, kernel=kernel, stride=stride, padding=padding)


def _global_mean(c: Call) -> Ref:
    x = c.ref(0)
    total = c.op("sum", x, axes=tuple(range(2, len(c.shape(x)))), keep=True)
    return c.scaled(total, 1 / prod(c.shape(x)[2:]))


def _adaptive_mean(c: Call) -> Ref:
    """Pool to one element by a mean over all, to more by windows where the image divides."""
    x, out = c.ref(0), _pair(c.value("", 1))
    shape = c.shape(x)[2:]
    if out == (1, 1):
        return _global_mean(c)
    if shape == out:
        return x
    if any(n % m for n, m in zip(shape, out, strict=True)):
        raise CannotMapError(f"windows of different sizes from {shape} to {out}")
    kernel = (shape[0] // out[0], shape[1] // out[1])
    return c.op("pool2d", x, kind="mean", kernel=kernel, stride=kernel, padding=(0, 0))


def _adaptive_mean_of_lines(c: Call) -> Ref:
    """Pool to one element by a mean over all."""
    x, out = c.ref(0), int(np.asarray(c.value("", 1)).reshape(()))
    if out != 1:
        raise CannotMapError(f"windows of different sizes to {out}")
    rank = len(c.shape(x))
    return c.scaled(c.op("sum", x, axes=(rank - 1,), keep=True), 1 / c.shape(x)[-1])


def _by_channel(c: Call, item: Item, rank: int) -> Any:
    """One value per channel, as it is broadcast over an image."""
    shape = (-1, *(1,) * (rank - 2))
    if isinstance(item, Known):
        return Known(np.asarray(item.array, float).reshape(shape))
    if not isinstance(item, Ref):
        raise CannotMapError("depends on an unmapped op")
    return c.d.reshape(item, (c.shape(item)[0], *shape[1:]))


def _normalised(c: Call, x: Ref, axes: tuple[int, ...], epsilon: float) -> Ref:
    """Zero mean and unit variance over some axes."""
    # Written out, so that sharding rules see sums: replicas then all-reduce them, as synchronised batch norm does.
    share = 1 / prod(c.shape(x)[a] for a in axes)
    centred = c.op("sub", x, c.scaled(c.op("sum", x, axes=axes, keep=True), share))
    variance = c.scaled(c.op("sum", c.op("mul", centred, centred), axes=axes, keep=True), share)
    shifted = c.as_ref(primitive(c, "add", variance, Known.of(epsilon)))
    return c.op("div", centred, c.op("sqrt", shifted))


def _scaled_by_channel(c: Call, x: Ref, gain: int, shift: int) -> Item:
    y: Item = x
    for position, name in ((gain, "mul"), (shift, "add")):
        if c.has(position):
            y = primitive(c, name, y, _by_channel(c, c.item(position), len(c.shape(x))))
    return y


def _batch_norm(c: Call, training: int = 5, epsilon: int = 7) -> Item:
    """ONNX and ATen: x, gain, shift, mean, variance; over all samples in training, else by running statistics."""
    x = c.ref(0)
    rank, least = len(c.shape(x)), float(c.value("epsilon", epsilon, 1e-5))
    if c.value("training_mode", training, False):
        return _scaled_by_channel(c, _normalised(c, x, (0, *range(2, rank)), least), 1, 2)
    mean, variance = _by_channel(c, c.item(3), rank), _by_channel(c, c.item(4), rank)
    # Running statistics with values fold into one factor per channel; on the meta device they are data.
    if isinstance(variance, Known):
        y = primitive(c, "mul", primitive(c, "sub", x, mean), Known((variance.array + least) ** -0.5))
    else:
        root = primitive(c, "sqrt", primitive(c, "add", variance, Known.of(least)))
        y = primitive(c, "div", primitive(c, "sub", x, mean), root)
    return _scaled_by_channel(c, c.as_ref(y), 1, 2)


def _first_of_three(rule: Rule) -> Rule:
    """Return the rule of a norm that also returns statistics, which a program has no use for."""
    return lambda c: [rule(c), None, None]


def _group_norm(c: Call) -> Item:
    """ATen: x, groups, gain, shift, epsilon; ONNX: x, gain, shift."""
    onnx = "num_groups" in c.attributes
    x, groups = c.ref(0), int(c.value("num_groups", 1))
    shape = c.shape(x)
    # Groups are contiguous channels, so each is one row of a reshape.
    grouped = c.d.reshape(x, (shape[0], groups, -(-prod(shape[1:]) // groups)))
    y = c.d.reshape(_normalised(c, grouped, axes_of(-1, 3), float(c.value("epsilon", -1 if onnx else 4, 1e-5))), shape)
    return _scaled_by_channel(c, y, *((1, 2) if onnx else (2, 3)))


def _instance_norm(c: Call, epsilon: int = -1) -> Item:
    """Over each image and channel; ATen's use of running statistics is left to batch norms."""
    x = c.ref(0)
    if epsilon >= 0 and not c.value("", 5, True):
        raise CannotMapError("an instance norm by running statistics")
    axes = tuple(range(2, len(c.shape(x))))
    return _scaled_by_channel(c, _normalised(c, x, axes, float(c.value("epsilon", epsilon, 1e-5))), 1, 2)


IMAGES: Final[Mapping[str, Rule]] = MappingProxyType(
    {
        **spelled("Conv", "conv2d", "conv1d", rule=_convolution),
        "convolution": lambda c: _convolution(c, 8),
        **spelled("MaxPool", "max_pool2d", rule=lambda c: _pool(c, "max")),
        "max_pool2d_with_indices": lambda c: [_pool(c, "max"), None],
        **spelled("AveragePool", "avg_pool2d", rule=lambda c: _pool(c, "mean")),
        "GlobalAveragePool": _global_mean,
        **spelled("adaptive_avg_pool2d", "_adaptive_avg_pool2d", rule=_adaptive_mean),
        "adaptive_avg_pool1d": _adaptive_mean_of_lines,
        "BatchNormalization": lambda c: _batch_norm(c, -1, -1),
        "batch_norm": _batch_norm,
        **spelled("native_batch_norm", "_native_batch_norm_legit", rule=_first_of_three(_batch_norm)),
        "_native_batch_norm_legit_no_training": _first_of_three(lambda c: _batch_norm(c, -1, 6)),
        # what a program that assigns every value once has for it: new running statistics too
        "_native_batch_norm_legit_functional": lambda c: [_batch_norm(c), None, None, None, None],
        **spelled("GroupNormalization", "group_norm", rule=_group_norm),
        "InstanceNormalization": _instance_norm,
        "instance_norm": lambda c: _instance_norm(c, 7),
    }
)
"""Rules by name of the op."""
