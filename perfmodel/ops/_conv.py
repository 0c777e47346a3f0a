"""Convolutions."""

from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.ops._op import (
    Axis,
    Family,
    GradientProducts,
    KernelOp,
    Measurement,
    Pass,
    Shape,
    ShapeColumn,
)
from perfmodel.ops.physics import Machine, Physics, divides, flag, log2, tiled
from perfmodel.ops.programs import (
    Program,
    Tensors,
    jax_array,
    jax_pass,
    torch_module,
    torch_pass,
)


class ConvWork(NamedTuple):
    """Work of a 2-D convolution and its implicit product [m, k] x [k, n] (per group)."""

    flops: Any
    bytes: Any
    h_out: Any
    """Rows of the result."""
    w_out: Any
    """Columns of the result."""
    m: Any
    n: Any
    k: Any
    inputs: Any
    """Elements of the image."""
    weights: Any
    """Elements of the kernel."""
    outputs: Any
    """Elements of the result."""


def _work(xp: Any, x: Shape) -> ConvWork:
    """Direct-convolution FLOPs (twice that for `bwd`, both gradients); image, kernel and result
    moved once each."""
    h_out = xp.floor((x["h_in"] + 2 * x["pad_h"] - x["k_h"]) / x["stride_h"]) + 1.0
    w_out = xp.floor((x["w_in"] + 2 * x["pad_w"] - x["k_w"]) / x["stride_w"]) + 1.0
    h_out = xp.maximum(h_out, 1.0)
    w_out = xp.maximum(w_out, 1.0)

    # The implicit product: pixels of the results x channels of the results x what each sees of the
    # image.
    # `bwd` stands for both gradients, each a product as large as the forward's.
    repeats = 1.0 + x["bwd"]
    m = x["batch"] * h_out * w_out
    n = x["c_out"] / x["groups"]
    k = x["c_in"] * x["k_h"] * x["k_w"] / x["groups"]
    flops = 2.0 * m * n * k * x["groups"] * repeats
    inputs = x["batch"] * x["c_in"] * x["h_in"] * x["w_in"]
    weights = x["c_out"] * k
    outputs = m * x["c_out"]
    traffic = (inputs + weights + outputs) * x["element_bytes"] * repeats
    return ConvWork(flops, traffic, h_out, w_out, m, n, k, inputs, weights, outputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class Convolution(KernelOp):
    """2-D convolution, NCHW."""

    op: str = "conv2d"
    dtype: str = "fp32"
    batch: int
    c_in: int
    h_in: int
    w_in: int
    c_out: int
    k_h: int
    k_w: int
    stride_h: int = 1
    stride_w: int = 1
    pad_h: int = 0
    pad_w: int = 0
    groups: int = 1
    pass_: Pass = "fwd"

    family = "conv"
    uses_matrix_units = True
    samples_field = "batch"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        image = f"{self.batch}x{self.c_in}x{self.h_in}x{self.w_in}"
        return f"conv {image} to {self.c_out} k{self.k_h}s{self.stride_h} {self.pass_}"

    @property
    def h_out(self) -> int:
        return (self.h_in + 2 * self.pad_h - self.k_h) // self.stride_h + 1

    @property
    def w_out(self) -> int:
        return (self.w_in + 2 * self.pad_w - self.k_w) // self.stride_w + 1


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """2-D convolution as the implicit product [n*h_out*w_out, c_in*k_h*k_w] x [.., c_out]."""
    size = x["element_bytes"]
    # `bwd` stands for both gradients, each a product as large as the forward's.
    repeats = 1.0 + x["bwd"]
    work = _work(xp, x)
    m, n, k = work.m, work.n, work.k
    area, tiles, waves = tiled(xp, m, n, x["groups"], machine.units)
    # As for products, kernels with few tiles and a long k are split over idle multiprocessors.
    quantised = xp.minimum(area, 4.0 * m * n * x["groups"]) * 2.0 * k * repeats
    features = [
        # sizes of image, kernel and result
        log2(xp, x["batch"]),
        log2(xp, x["c_in"]),
        log2(xp, x["c_out"]),
        log2(xp, x["h_in"]),
        log2(xp, x["w_in"]),
        log2(xp, work.h_out),
        log2(xp, work.w_out),
        log2(xp, x["k_h"]),
        log2(xp, x["k_w"]),
        x["k_h"],
        x["k_w"],
        x["stride_h"],
        x["stride_w"],
        x["pad_h"],
        x["pad_w"],
        # the implicit product
        log2(xp, x["groups"]),
        log2(xp, m),
        log2(xp, n),
        log2(xp, k),
        log2(xp, waves),
        log2(xp, work.inputs / work.outputs),
        log2(xp, x["k_h"] * x["k_w"]),
        # Share of the operands that fits into the cache.
        log2(xp, work.weights * size / machine.l2),
        log2(xp, (work.inputs + work.outputs) * size / machine.l2),
        x["stride_h"] / x["k_h"],
        # kernels that libraries treat apart: 3 x 3 by Winograd's transform, 1 x 1 as a plain
        # product
        flag(xp, (x["k_h"] == 3) & (x["k_w"] == 3) & (x["stride_h"] == 1)),
        flag(xp, (x["k_h"] == 1) & (x["k_w"] == 1)),
        flag(xp, x["groups"] > 1),
        *tiles,
    ]
    features += _winograd(xp, x, work.h_out, work.w_out, machine)
    features += [divides(xp, x["c_in"], d) for d in (2, 4, 8, 32, 64)]
    features += [divides(xp, x["c_out"], d) for d in (2, 4, 8, 32, 64)]

    # Share of a padded tile of channels that is used.
    for channels in (x["c_in"], x["c_out"]):
        features += [channels / (d * xp.ceil(channels / d)) for d in (8, 32, 64, 128)]
    features += [divides(xp, m, d) for d in (4, 128)]
    axes = [log2(xp, v) for v in (x["batch"], x["c_in"], x["c_out"], work.h_out, x["k_h"], waves)]
    # large tiles have a relative rate above 1, but no product does less than its FLOPs
    return Physics(work.flops, xp.maximum(work.flops, quantised), work.bytes, features, axes)


def _winograd(xp: Any, x: Shape, h_out: Any, w_out: Any, machine: Machine) -> list[Any]:
    """Log times in us of the transform algorithms that libraries choose among, at the nominal
    rates.

    F(t x t, k x k) does (t + k - 1)^2 products of [tiles, c_in] x [c_in, c_out] and moves the
    transformed tiles through memory (Lavin and Gray, CVPR 2016, section 4).
    """
    # Libraries choose the algorithm by heuristics that no table states, so the regressor sees the
    # time of each, and what of it padding wastes: as products through memory, and fused in blocks
    # of 32 tiles by 64 channels.
    features = []
    size = x["element_bytes"]
    for tile in (2, 4):
        points = (tile + x["k_h"] - 1.0) * (tile + x["k_w"] - 1.0)
        tiles = x["batch"] * xp.ceil(h_out / tile) * xp.ceil(w_out / tile)
        area, _, waves = tiled(xp, tiles, x["c_out"], points, machine.units)
        multiply = 2.0 * area * x["c_in"] / machine.peak
        moved = points * (tiles * (x["c_in"] + x["c_out"]) + x["c_in"] * x["c_out"]) * 2.0 * size
        fill = h_out * w_out / (xp.ceil(h_out / tile) * xp.ceil(w_out / tile) * tile * tile)
        tile_blocks = xp.ceil(tiles / 32.0)
        channel_blocks = xp.ceil(x["c_out"] / 64.0)
        fused = 2.0 * points * (32.0 * tile_blocks) * (64.0 * channel_blocks) * x["c_in"]
        blocks = tile_blocks * channel_blocks / machine.units
        features += [
            log2(xp, multiply * 1e6),
            log2(xp, moved / machine.bandwidth * 1e6),
            fill,
            log2(xp, waves),
            log2(xp, fused / machine.peak * 1e6),
            log2(xp, blocks),
            blocks / xp.ceil(blocks),
        ]
    return features


def _jax_program(op: Convolution, rng: np.random.Generator) -> Program:
    """A convolution in JAX, or its gradients."""
    import jax

    image = jax_array(rng, op.dtype, op.batch, op.c_in, op.h_in, op.w_in)
    kernel = jax_array(rng, op.dtype, op.c_out, op.c_in // op.groups, op.k_h, op.k_w)

    def convolve(image: Any, kernel: Any) -> Any:
        return jax.lax.conv_general_dilated(
            image,
            kernel,
            window_strides=(op.stride_h, op.stride_w),
            padding=((op.pad_h, op.pad_h), (op.pad_w, op.pad_w)),
            feature_group_count=op.groups,
            dimension_numbers=("NCHW", "OIHW", "NCHW"),
        )

    return jax_pass(op, convolve, (image, kernel), {"bwd": (0, 1), "dgrad": (0,), "wgrad": (1,)})


def _torch_program(op: Convolution, make: Tensors) -> Program:
    """A convolution in torch, or its gradients."""
    convolve = partial(
        torch_module().nn.functional.conv2d,
        stride=(op.stride_h, op.stride_w),
        padding=(op.pad_h, op.pad_w),
        groups=op.groups,
    )
    inputs = (
        make(op.batch, op.c_in, op.h_in, op.w_in),
        make(op.c_out, op.c_in // op.groups, op.k_h, op.k_w),
    )
    return torch_pass(op, convolve, inputs, {"bwd": (0, 1), "dgrad": (0,), "wgrad": (1,)})


CONVOLUTION: Final = Family(
    op=Convolution,
    columns={
        **dict.fromkeys(("batch", "c_in", "h_in", "w_in", "c_out", "k_h", "k_w"), ShapeColumn()),
        "stride_h": ShapeColumn(1),
        "stride_w": ShapeColumn(1),
        "pad_h": ShapeColumn(0, low=0),
        "pad_w": ShapeColumn(0, low=0),
        "groups": ShapeColumn(1),
    },
    axes=(
        Axis("batch", 0, 11, 2),
        Axis("c_in", 0, 13, 2),
        Axis("c_out", 0, 13, 2),
        Axis("size", 0, 11, 3),
        Axis("kernel", 0, 5, 4),
        Axis("waves", -8, 12, 2),
    ),
    physics=_physics,
    known_op=lambda op: "conv2d",
    # gradients carry the shape of the forward convolution
    gradients=GradientProducts(split=lambda shape, kinds: ({}, {}), join=lambda shape, kinds: {}),
    measurement=Measurement(
        passes=("fwd", "bwd", "dgrad", "wgrad"),
        jax_program=_jax_program,
        torch_program=_torch_program,
    ),
)
