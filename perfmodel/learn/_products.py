"""Matrix products and what libraries turn into them: gemm, convolution, mixture of experts."""

from typing import Any

from perfmodel.learn._machine import Machine
from perfmodel.learn._work import Columns, Physics, divides, flag, log2, tiled


def gemm(xp: Any, x: Columns, machine: Machine) -> Physics:
    """`batch * groups` products C[m, n] = A[m, k] B[k, n]; `bwd` stands for both gradients."""
    m, n, k = x["m"], x["n"], x["k"]
    products = x["batch"] * x["groups"]
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    flops = 2.0 * products * m * n * k * both
    a, b, c = m * k, k * n, m * n
    extra = x["accumulate"] * c * (8.0 - size)
    traffic = products * (both * (a + b + c) * size + extra)
    area, tiles, waves = tiled(xp, m, n, products, machine.units)
    # few tiles and a long k: kernels split k over the idle multiprocessors
    quantised = xp.minimum(area, 1.0 * xp.maximum(products * c, 1.0) * 4.0) * 2.0 * k * both
    resident = products * b * size / machine.l2
    features = [
        log2(xp, m), log2(xp, n), log2(xp, k), log2(xp, x["batch"]), log2(xp, x["groups"]),
        log2(xp, waves), log2(xp, resident), log2(xp, products * (a + b) * size / machine.l2),
        log2(xp, products * (a + b + c) * size / machine.l2), x["accumulate"], x["trans_a"], x["trans_b"],
        *tiles,
    ]  # fmt: skip
    features += [divides(xp, m, d) for d in (2, 8, 16, 32, 64, 128, 256)]
    features += [divides(xp, n, d) for d in (2, 8, 16, 64, 128, 256)]
    features += [divides(xp, k, d) for d in (2, 8, 16, 64, 128)]
    features += [xp.mod(m, 128) / 128.0, xp.mod(n, 128) / 128.0]
    axes = [log2(xp, v) for v in (m, n, k, products, resident, waves)]
    return Physics(flops, xp.maximum(flops, quantised), traffic, features, axes)


def conv(xp: Any, x: Columns, machine: Machine) -> Physics:
    """2-D convolution as the implicit product [n*h_out*w_out, c_in*k_h*k_w] x [.., c_out]."""
    h_out = xp.floor((x["h_in"] + 2 * x["pad_h"] - x["k_h"]) / x["stride_h"]) + 1.0
    w_out = xp.floor((x["w_in"] + 2 * x["pad_w"] - x["k_w"]) / x["stride_w"]) + 1.0
    h_out, w_out = xp.maximum(h_out, 1.0), xp.maximum(w_out, 1.0)
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    m, n = x["batch"] * h_out * w_out, x["c_out"] / x["groups"]
    k = x["c_in"] * x["k_h"] * x["k_w"] / x["groups"]
    flops = 2.0 * m * n * k * x["groups"] * both
    inputs = x["batch"] * x["c_in"] * x["h_in"] * x["w_in"]
    weights = x["c_out"] * k
    outputs = m * x["c_out"]
    traffic = (inputs + weights + outputs) * size * both
    area, tiles, waves = tiled(xp, m, n, x["groups"], machine.units)
    quantised = xp.minimum(area, 4.0 * m * n * x["groups"]) * 2.0 * k * both
    features = [
        log2(xp, x["batch"]), log2(xp, x["c_in"]), log2(xp, x["c_out"]), log2(xp, x["h_in"]),
        log2(xp, x["w_in"]), log2(xp, h_out), log2(xp, w_out), log2(xp, x["k_h"]), log2(xp, x["k_w"]),
        x["k_h"], x["k_w"], x["stride_h"], x["stride_w"], x["pad_h"], x["pad_w"], log2(xp, x["groups"]),
        log2(xp, m), log2(xp, n), log2(xp, k), log2(xp, waves), log2(xp, inputs / outputs),
        log2(xp, x["k_h"] * x["k_w"]), log2(xp, weights * size / machine.l2),
        log2(xp, (inputs + outputs) * size / machine.l2), x["stride_h"] / x["k_h"],
        flag(xp, (x["k_h"] == 3) & (x["k_w"] == 3) & (x["stride_h"] == 1)),
        flag(xp, (x["k_h"] == 1) & (x["k_w"] == 1)), flag(xp, x["groups"] > 1), *tiles,
    ]  # fmt: skip
    features += _winograd(xp, x, h_out, w_out, machine)
    features += [divides(xp, x["c_in"], d) for d in (2, 4, 8, 32, 64)]
    features += [divides(xp, x["c_out"], d) for d in (2, 4, 8, 32, 64)]
    features += [c / (d * xp.ceil(c / d)) for c in (x["c_in"], x["c_out"]) for d in (8, 32, 64, 128)]
    features += [divides(xp, m, d) for d in (4, 128)]
    axes = [log2(xp, v) for v in (x["batch"], x["c_in"], x["c_out"], h_out, x["k_h"], waves)]
    return Physics(flops, xp.maximum(flops, quantised), traffic, features, axes)


def _winograd(xp: Any, x: Columns, h_out: Any, w_out: Any, machine: Machine) -> list[Any]:
    """Log times in us of the transform algorithms that libraries choose among, at the nominal rates.

    F(t x t, k x k) does (t + k - 1)^2 products of [tiles, c_in] x [c_in, c_out] and moves the
    transformed tiles through memory (Lavin and Gray, CVPR 2016, section 4).
    """
    features = []
    size = x["element_bytes"]
    for tile in (2, 4):
        points = (tile + x["k_h"] - 1.0) * (tile + x["k_w"] - 1.0)
        tiles = x["batch"] * xp.ceil(h_out / tile) * xp.ceil(w_out / tile)
        area, _, waves = tiled(xp, tiles, x["c_out"], points, machine.units)
        multiply = 2.0 * area * x["c_in"] / machine.peak
        moved = points * (tiles * (x["c_in"] + x["c_out"]) + x["c_in"] * x["c_out"]) * 2.0 * size
        fill = h_out * w_out / (xp.ceil(h_out / tile) * xp.ceil(w_out / tile) * tile * tile)
        fused = 2.0 * points * xp.ceil(tiles / 32.0) * 32.0 * xp.ceil(x["c_out"] / 64.0) * 64.0 * x["c_in"]
        blocks = xp.ceil(tiles / 32.0) * xp.ceil(x["c_out"] / 64.0) / machine.units
        features += [
            log2(xp, multiply * 1e6), log2(xp, moved / machine.bandwidth * 1e6), fill, log2(xp, waves),
            log2(xp, fused / machine.peak * 1e6), log2(xp, blocks), blocks / xp.ceil(blocks),
        ]  # fmt: skip
    return features


def moe(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Expert feed-forward of one rank: three products (two without a gate) per routed token."""
    products = 3.0 - x["nongated"]
    inter = x["inter"] / x["moe_tp"]
    local = x["experts"] / x["moe_ep"]
    routed = x["tokens"] * x["topk"] / x["moe_ep"]
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    # experts hit by `routed` uniform draws; a power law leaves some cold
    active = xp.minimum(local, local * (1.0 - xp.exp(-routed / local)) + 1e-3)
    per_expert = routed / xp.maximum(active, 1.0)
    flops = 2.0 * products * routed * x["hidden"] * inter * both
    weights = products * xp.maximum(active, 1.0) * x["hidden"] * inter * size
    traffic = (weights + routed * (2.0 * x["hidden"] + 3.0 * inter) * size) * both
    tiles = xp.maximum(active, 1.0) * xp.ceil(per_expert / 64.0)
    padded = tiles * 64.0
    waves_up = tiles * xp.ceil(2.0 * inter / 128.0) / machine.units
    waves_down = tiles * xp.ceil(x["hidden"] / 128.0) / machine.units
    features = [
        log2(xp, x["tokens"]), log2(xp, x["hidden"]), log2(xp, inter), log2(xp, x["topk"]),
        log2(xp, x["experts"]), log2(xp, local), log2(xp, x["moe_tp"]), log2(xp, x["moe_ep"]),
        x["skew"], flag(xp, x["skew"] > 0), log2(xp, routed), log2(xp, active), log2(xp, per_expert),
        routed / padded, log2(xp, waves_up), log2(xp, waves_down), waves_up / xp.ceil(waves_up),
        waves_down / xp.ceil(waves_down), log2(xp, xp.ceil(waves_up)), log2(xp, xp.ceil(waves_down)),
        log2(xp, weights / machine.l2), log2(xp, local * x["hidden"] * inter * size / machine.l2),
        log2(xp, x["tokens"] * x["hidden"] * size / machine.l2),
        log2(xp, x["tokens"] * x["topk"] / x["experts"]), log2(xp, x["inter"]),
        x["skew"] * log2(xp, per_expert), x["skew"] * log2(xp, x["moe_ep"]), x["skew"] * log2(xp, local),
    ]  # fmt: skip
    features += [divides(xp, inter, d) for d in (64, 128, 256)]
    mean = x["tokens"] * x["topk"] / x["experts"]
    axes = [log2(xp, v) for v in (x["tokens"], x["hidden"], inter, local, mean, x["topk"])]
    quantised = 2.0 * products * padded * x["hidden"] * inter * both
    return Physics(flops, xp.minimum(quantised, 8.0 * flops), traffic, features, axes)
