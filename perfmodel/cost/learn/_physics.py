"""What a kernel has to do on a machine, by op family: features, base-time terms and table axes."""

from collections.abc import Callable
from typing import Any, Final

from perfmodel.cost.learn._stack import Machine
from perfmodel.cost.learn._work import (
    Columns,
    Physics,
    cached_share,
    divides,
    embedding,
    flag,
    log2,
    memory,
    optimizer,
    tiled,
    vector_rate,
)
from perfmodel.spec import attention_work, conv_work, gemm_work, moe_work


def gemm(xp: Any, x: Columns, machine: Machine) -> Physics:
    """`batch * groups` products C[m, n] = A[m, k] B[k, n]; `bwd` stands for both gradients."""
    m, n, k, size, both = x["m"], x["n"], x["k"], x["element_bytes"], 1.0 + x["bwd"]
    flops, traffic, products, a, b, c = gemm_work(xp, x)
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
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    flops, traffic, h_out, w_out, m, n, k, inputs, weights, outputs = conv_work(xp, x)
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
    flops, traffic, products, inter, local, routed, active, weights = moe_work(xp, x)
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    per_expert = routed / xp.maximum(active, 1.0)
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


_TILE: Final = 64.0
"""Query rows of the smallest tile of a fused kernel."""
_PACKED: Final = 32.0
"""Query heads that decoding kernels pack into one tile per key head; beyond it every head reads the keys itself."""
_BLOCK_OPS: Final = 2e5
"""What starting and draining one block costs, in operations of a multiprocessor's vector lanes (about 1 us)."""


def attention(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Fused attention; `mixed` rows add decoding sequences to one prefill chunk."""
    q, kv, causal = x["seq_q"], x["seq_kv"], x["causal"]
    heads, batch = x["heads"], x["batch"]
    window, side_n, side_kv, size = x["window"], x["mixed_n_decode"], x["mixed_kv_decode"], x["element_bytes"]
    flops, traffic, reach, moved_kv = attention_work(xp, x)
    blocks = batch * heads * xp.ceil(q / 128.0)
    waves = blocks / machine.units
    split = batch * x["kv_heads"] * xp.ceil(kv / 256.0) / machine.units
    fill = xp.minimum(waves / xp.ceil(waves), 1.0)
    features = [
        log2(xp, q), log2(xp, kv), log2(xp, batch), log2(xp, heads), log2(xp, x["kv_heads"]),
        log2(xp, heads / x["kv_heads"]), log2(xp, x["head_dim"]), log2(xp, x["head_dim_v"]), causal,
        log2(xp, xp.where(window > 0, window, kv) / kv), flag(xp, window > 0), log2(xp, reach),
        log2(xp, kv / q), log2(xp, waves), waves / xp.ceil(waves), log2(xp, xp.ceil(waves)),
        log2(xp, split), split / xp.ceil(split), log2(xp, xp.ceil(split)),
        log2(xp, batch * x["kv_heads"] / machine.units), log2(xp, batch * heads / machine.units),
        batch * heads / machine.units / xp.ceil(batch * heads / machine.units),
        batch * x["kv_heads"] / machine.units / xp.ceil(batch * x["kv_heads"] / machine.units),
        q / (xp.ceil(q / 128.0) * 128.0), q / (xp.ceil(q / 64.0) * 64.0), kv / (xp.ceil(kv / 128.0) * 128.0),
        log2(xp, moved_kv * size / machine.l2), log2(xp, 1.0 + side_n), log2(xp, 1.0 + side_kv),
        log2(xp, 1.0 + side_n * side_kv), side_n * side_kv / (side_n * side_kv + batch * kv),
        divides(xp, x["head_dim"], 64), divides(xp, x["head_dim"], 128),
    ]  # fmt: skip
    values = (q, kv, heads, batch, heads / x["kv_heads"], x["head_dim"], waves)
    axes = [log2(xp, v) for v in values]
    # a part-filled last wave of query blocks costs a whole one, a part-filled tile a whole one
    padding = xp.ceil(q / _TILE) * _TILE / q
    decoding = q <= 1
    quantised = xp.where(decoding, flops, flops * padding / xp.maximum(fill, 0.1))
    unpacked = heads / x["kv_heads"] > _PACKED
    # one query row per sequence fills no tensor tile: it runs at the pace of the vector lanes
    vector = xp.where(decoding, 0.5 * flops * xp.where(unpacked, 8.0, 1.0), 0.0)
    decode_blocks = batch * xp.where(unpacked, heads, x["kv_heads"])
    vector = vector + _BLOCK_OPS * (xp.where(decoding, decode_blocks, blocks) + side_n * x["kv_heads"])
    return Physics(flops, quantised, traffic, features, axes, vector, cached_share(traffic, machine))


AXES: Final[dict[str, tuple[tuple[str, float, float, int], ...]]] = {
    "gemm": (("m", 0, 17, 4), ("n", 3, 18, 4), ("k", 3, 18, 4), ("products", 0, 14, 1),
             ("weights_in_l2", -10, 6, 8), ("waves", -8, 12, 3)),
    "attention": (("seq_q", 0, 17, 2), ("seq_kv", 0, 18, 2), ("heads", 0, 8, 4), ("batch", 0, 12, 1),
                  ("heads_per_kv", 0, 7, 1), ("head_dim", 5, 10, 4), ("waves", -8, 14, 2)),
    "memory": (("rows", 0, 23, 2), ("hidden", 0, 20, 2), ("in_l2", -14, 12, 4)),
    "embedding": (("tokens", 0, 18, 2), ("hidden", 6, 15, 2), ("vocab", 8, 19, 2)),
    "optimizer": (("n_params", 10, 36, 1), ("tensors", 0, 12, 1)),
    "conv": (("batch", 0, 11, 2), ("c_in", 0, 13, 2), ("c_out", 0, 13, 2), ("size", 0, 11, 3),
             ("kernel", 0, 5, 4), ("waves", -8, 12, 2)),
    "moe": (("tokens", 0, 16, 2), ("hidden", 9, 15, 4), ("inter", 3, 16, 2), ("experts", -3, 11, 2),
            ("rows_per_expert", -10, 16, 2), ("topk", 0, 6, 2)),
}  # fmt: skip
"""Axes of the per-stack tables: name, lowest and highest log2 value, nodes per doubling."""

PHYSICS: Final[dict[str, Callable[[Any, Columns, Machine], Physics]]] = {
    "gemm": gemm, "attention": attention, "memory": memory, "embedding": embedding,
    "optimizer": optimizer, "conv": conv, "moe": moe,
}  # fmt: skip


def common_features(xp: Any, physics: Physics, machine: Machine) -> list[Any]:
    """Inputs that every family has: work, its time at the nominal rates, and their balance."""
    compute_s = physics.flops / machine.peak + physics.vector_ops / vector_rate(xp, machine)
    memory_s = physics.bytes / machine.bandwidth
    return [
        log2(xp, physics.flops), log2(xp, physics.bytes), log2(xp, compute_s * 1e6),
        log2(xp, memory_s * 1e6), log2(xp, compute_s / memory_s),
        log2(xp, physics.quantised_flops / physics.flops), log2(xp, physics.bytes / machine.l2),
    ]  # fmt: skip
