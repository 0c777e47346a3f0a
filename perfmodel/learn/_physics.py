"""What a kernel has to do on a machine: FLOPs, traffic, waves - features and base-time terms.

Every function takes the array namespace `xp` (numpy for the hot path, jax.numpy where gradients
with respect to shapes or device figures are wanted), so each formula has one home.
"""

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from perfmodel.learn._machine import Machine

Columns = dict[str, Any]
"""Shape columns by name, arrays [n]."""


class Physics(NamedTuple):
    """Per-row quantities of a family, arrays [n]."""

    flops: Any
    quantised_flops: Any
    """FLOPs that the device is busy for, once tiles are padded and waves are whole."""
    bytes: Any
    """Compulsory memory traffic."""
    features: list[Any]
    """Further inputs of the regressor, in a fixed order."""
    axes: list[Any]
    """Log2 positions for the per-stack tables, in the order of `AXES`."""


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

_TILES: Final = ((64, 64, 0.70), (128, 64, 0.85), (128, 128, 1.0), (128, 256, 1.1), (256, 128, 1.1))
"""Output tile of a matrix-product kernel and its relative peak rate."""


def _log2(xp: Any, value: Any) -> Any:
    return xp.log2(xp.maximum(value, 1e-12))


def _flag(xp: Any, value: Any) -> Any:
    return xp.asarray(value, xp.float64 if xp.__name__ == "numpy" else xp.float32)


def _divides(xp: Any, value: Any, by: int) -> Any:
    return _flag(xp, xp.mod(value, by) == 0)


def _tiled(xp: Any, m: Any, n: Any, products: Any, units: Any) -> tuple[Any, list[Any], Any]:
    """Wave-quantised area of an output under the best tile, features of every tile, waves at 128x128.

    A wave is one tile per multiprocessor; the last, partly filled wave costs a whole one
    (tile and wave quantisation; NeuSight, ASPLOS 2025, section 4.1).
    """
    best, features, waves_128 = None, [], None
    for rows, columns, rate in _TILES:
        tiles = products * xp.ceil(m / rows) * xp.ceil(n / columns)
        waves = tiles / units
        whole = xp.ceil(waves)
        area = whole * units * (rows * columns / rate)
        best = area if best is None else xp.minimum(best, area)
        fill = m * n * products / (tiles * (rows * columns))
        features += [waves / whole, fill, _log2(xp, whole)]
        if (rows, columns) == (128, 128):
            waves_128 = waves
    return best, features, waves_128


def gemm(xp: Any, x: Columns, machine: Machine) -> Physics:
    """`batch * groups` products C[m, n] = A[m, k] B[k, n]; `bwd` stands for both gradients."""
    m, n, k = x["m"], x["n"], x["k"]
    products = x["batch"] * x["groups"]
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    flops = 2.0 * products * m * n * k * both
    a, b, c = m * k, k * n, m * n
    extra = x["accumulate"] * c * (8.0 - size)
    traffic = products * (both * (a + b + c) * size + extra)
    area, tiles, waves = _tiled(xp, m, n, products, machine.units)
    # few tiles and a long k: kernels split k over the idle multiprocessors
    quantised = xp.minimum(area, 1.0 * xp.maximum(products * c, 1.0) * 4.0) * 2.0 * k * both
    resident = products * b * size / machine.l2
    features = [
        _log2(xp, m), _log2(xp, n), _log2(xp, k), _log2(xp, x["batch"]), _log2(xp, x["groups"]),
        _log2(xp, waves), _log2(xp, resident), _log2(xp, products * (a + b) * size / machine.l2),
        _log2(xp, products * (a + b + c) * size / machine.l2), x["accumulate"], x["trans_a"], x["trans_b"],
        *tiles,
    ]  # fmt: skip
    features += [_divides(xp, m, d) for d in (2, 8, 16, 32, 64, 128, 256)]
    features += [_divides(xp, n, d) for d in (2, 8, 16, 64, 128, 256)]
    features += [_divides(xp, k, d) for d in (2, 8, 16, 64, 128)]
    features += [xp.mod(m, 128) / 128.0, xp.mod(n, 128) / 128.0]
    axes = [_log2(xp, v) for v in (m, n, k, products, resident, waves)]
    return Physics(flops, xp.maximum(flops, quantised), traffic, features, axes)


def attention(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Fused attention; `mixed` rows add decoding sequences to one prefill chunk.

    Backward has five products for the forward's two (arXiv 2307.08691 section 3.1).
    """
    q, kv, causal = x["seq_q"], x["seq_kv"], x["causal"]
    heads, batch = x["heads"], x["batch"]
    dims = x["head_dim"] + x["head_dim_v"]
    seen = xp.where(kv >= q, q * kv - q * (q - 1.0) / 2.0, kv * (kv + 1.0) / 2.0)
    pairs = xp.where(causal > 0, seen, q * kv)
    window = x["window"]
    pairs = xp.where((window > 0) & (window < kv), xp.minimum(pairs, q * window), pairs)
    reach = xp.where((window > 0) & (window < kv), xp.minimum(kv, window + q - 1.0), kv)
    side_n, side_kv = x["mixed_n_decode"], x["mixed_kv_decode"]
    more = 1.0 + 1.5 * x["bwd"]
    size = x["element_bytes"]
    flops = 2.0 * heads * dims * (batch * pairs + side_n * side_kv) * more
    moved_q = heads * (batch * q + side_n) * dims
    moved_kv = x["kv_heads"] * (batch * reach + side_n * side_kv) * dims
    traffic = (moved_q + moved_kv) * size * more
    blocks = batch * heads * xp.ceil(q / 128.0)
    waves = blocks / machine.units
    split = batch * x["kv_heads"] * xp.ceil(kv / 256.0) / machine.units
    fill = xp.minimum(waves / xp.ceil(waves), 1.0)
    features = [
        _log2(xp, q), _log2(xp, kv), _log2(xp, batch), _log2(xp, heads), _log2(xp, x["kv_heads"]),
        _log2(xp, heads / x["kv_heads"]), _log2(xp, x["head_dim"]), _log2(xp, x["head_dim_v"]), causal,
        _log2(xp, xp.where(window > 0, window, kv) / kv), _flag(xp, window > 0), _log2(xp, reach),
        _log2(xp, kv / q), _log2(xp, waves), waves / xp.ceil(waves), _log2(xp, xp.ceil(waves)),
        _log2(xp, split), split / xp.ceil(split), _log2(xp, xp.ceil(split)),
        _log2(xp, batch * x["kv_heads"] / machine.units), _log2(xp, batch * heads / machine.units),
        batch * heads / machine.units / xp.ceil(batch * heads / machine.units),
        batch * x["kv_heads"] / machine.units / xp.ceil(batch * x["kv_heads"] / machine.units),
        q / (xp.ceil(q / 128.0) * 128.0), q / (xp.ceil(q / 64.0) * 64.0), kv / (xp.ceil(kv / 128.0) * 128.0),
        _log2(xp, moved_kv * size / machine.l2), _log2(xp, 1.0 + side_n), _log2(xp, 1.0 + side_kv),
        _log2(xp, 1.0 + side_n * side_kv), side_n * side_kv / (side_n * side_kv + batch * kv),
        _divides(xp, x["head_dim"], 64), _divides(xp, x["head_dim"], 128),
    ]  # fmt: skip
    values = (q, kv, heads, batch, heads / x["kv_heads"], x["head_dim"], waves)
    axes = [_log2(xp, v) for v in values]
    # a part-filled last wave of query blocks costs a whole one; decoding splits keys instead
    quantised = xp.where(q > 1, flops / xp.maximum(fill, 0.25), flops)
    return Physics(flops, quantised, traffic, features, axes)


def memory(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Element-wise and row-wise kernels: (inputs + 1 output) x elements; `bwd` reads one more."""
    rows, hidden = x["rows"], x["hidden"]
    elements = rows * hidden
    traffic = elements * (x["n_inputs"] + 1.0 + x["bwd"]) * x["element_bytes"]
    blocks = elements / (machine.units * 4096.0)
    per_unit = rows / machine.units
    resident = traffic / machine.l2
    features = [
        _log2(xp, rows), _log2(xp, hidden), _log2(xp, elements), x["n_inputs"], _log2(xp, resident),
        _log2(xp, blocks), blocks / xp.ceil(blocks), _log2(xp, per_unit), per_unit / xp.ceil(per_unit),
        _log2(xp, hidden * x["element_bytes"]), _log2(xp, machine.units), _log2(xp, machine.l2),
    ]  # fmt: skip
    features += [_divides(xp, hidden, d) for d in (2, 4, 8, 128, 1024)]
    features += [_divides(xp, elements, d) for d in (4, 512)]
    # fused softmax kernels (Megatron) want batch x heads = rows / hidden to be a multiple of four
    features += [_divides(xp, rows, 4), _flag(xp, xp.mod(rows, 4 * hidden) == 0), _flag(xp, hidden > 2048)]
    return Physics(elements, elements, traffic, features, [_log2(xp, v) for v in (rows, hidden, resident)])


def embedding(xp: Any, x: Columns, machine: Machine) -> Physics:
    """Rows gathered and written; `bwd` reads, adds and writes them."""
    tokens, hidden, vocab = x["tokens"], x["hidden"], x["vocab"]
    moved = tokens * hidden * x["element_bytes"]
    table = vocab * hidden * x["element_bytes"]
    features = [
        _log2(xp, tokens), _log2(xp, hidden), _log2(xp, vocab), _log2(xp, moved / machine.l2),
        _log2(xp, table / machine.l2), _log2(xp, tokens / vocab), _log2(xp, table / moved),
        _divides(xp, hidden, 128), _divides(xp, hidden, 1024),
    ]  # fmt: skip
    axes = [_log2(xp, v) for v in (tokens, hidden, vocab)]
    return Physics(tokens * hidden, tokens * hidden, moved * (2.0 + x["bwd"]), features, axes)


def optimizer(xp: Any, x: Columns, machine: Machine) -> Physics:
    """One update of all local parameters, 12 FLOPs each for Adam."""
    count, tensors = x["n_params"], x["tensors"]
    traffic = count * x["bytes_per_param"]
    features = [_log2(xp, count), _log2(xp, tensors), _log2(xp, count / tensors), _log2(xp, traffic / machine.l2)]
    return Physics(12.0 * count, 12.0 * count, traffic, features, [_log2(xp, count), _log2(xp, tensors)])


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
    area, tiles, waves = _tiled(xp, m, n, x["groups"], machine.units)
    quantised = xp.minimum(area, 4.0 * m * n * x["groups"]) * 2.0 * k * both
    features = [
        _log2(xp, x["batch"]), _log2(xp, x["c_in"]), _log2(xp, x["c_out"]), _log2(xp, x["h_in"]),
        _log2(xp, x["w_in"]), _log2(xp, h_out), _log2(xp, w_out), _log2(xp, x["k_h"]), _log2(xp, x["k_w"]),
        x["k_h"], x["k_w"], x["stride_h"], x["stride_w"], x["pad_h"], x["pad_w"], _log2(xp, x["groups"]),
        _log2(xp, m), _log2(xp, n), _log2(xp, k), _log2(xp, waves), _log2(xp, inputs / outputs),
        _log2(xp, x["k_h"] * x["k_w"]), _log2(xp, weights * size / machine.l2),
        _log2(xp, (inputs + outputs) * size / machine.l2), x["stride_h"] / x["k_h"],
        _flag(xp, (x["k_h"] == 3) & (x["k_w"] == 3) & (x["stride_h"] == 1)),
        _flag(xp, (x["k_h"] == 1) & (x["k_w"] == 1)), _flag(xp, x["groups"] > 1), *tiles,
    ]  # fmt: skip
    features += _winograd(xp, x, h_out, w_out, machine)
    features += [_divides(xp, x["c_in"], d) for d in (2, 4, 8, 32, 64)]
    features += [_divides(xp, x["c_out"], d) for d in (2, 4, 8, 32, 64)]
    features += [c / (d * xp.ceil(c / d)) for c in (x["c_in"], x["c_out"]) for d in (8, 32, 64, 128)]
    features += [_divides(xp, m, d) for d in (4, 128)]
    axes = [_log2(xp, v) for v in (x["batch"], x["c_in"], x["c_out"], h_out, x["k_h"], waves)]
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
        area, _, waves = _tiled(xp, tiles, x["c_out"], points, machine.units)
        multiply = 2.0 * area * x["c_in"] / machine.peak
        moved = points * (tiles * (x["c_in"] + x["c_out"]) + x["c_in"] * x["c_out"]) * 2.0 * size
        fill = h_out * w_out / (xp.ceil(h_out / tile) * xp.ceil(w_out / tile) * tile * tile)
        fused = 2.0 * points * xp.ceil(tiles / 32.0) * 32.0 * xp.ceil(x["c_out"] / 64.0) * 64.0 * x["c_in"]
        blocks = xp.ceil(tiles / 32.0) * xp.ceil(x["c_out"] / 64.0) / machine.units
        features += [
            _log2(xp, multiply * 1e6), _log2(xp, moved / machine.bandwidth * 1e6), fill, _log2(xp, waves),
            _log2(xp, fused / machine.peak * 1e6), _log2(xp, blocks), blocks / xp.ceil(blocks),
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
        _log2(xp, x["tokens"]), _log2(xp, x["hidden"]), _log2(xp, inter), _log2(xp, x["topk"]),
        _log2(xp, x["experts"]), _log2(xp, local), _log2(xp, x["moe_tp"]), _log2(xp, x["moe_ep"]),
        x["skew"], _flag(xp, x["skew"] > 0), _log2(xp, routed), _log2(xp, active), _log2(xp, per_expert),
        routed / padded, _log2(xp, waves_up), _log2(xp, waves_down), waves_up / xp.ceil(waves_up),
        waves_down / xp.ceil(waves_down), _log2(xp, xp.ceil(waves_up)), _log2(xp, xp.ceil(waves_down)),
        _log2(xp, weights / machine.l2), _log2(xp, local * x["hidden"] * inter * size / machine.l2),
        _log2(xp, x["tokens"] * x["hidden"] * size / machine.l2),
        _log2(xp, x["tokens"] * x["topk"] / x["experts"]), _log2(xp, x["inter"]),
        x["skew"] * _log2(xp, per_expert), x["skew"] * _log2(xp, x["moe_ep"]), x["skew"] * _log2(xp, local),
    ]  # fmt: skip
    features += [_divides(xp, inter, d) for d in (64, 128, 256)]
    mean = x["tokens"] * x["topk"] / x["experts"]
    axes = [_log2(xp, v) for v in (x["tokens"], x["hidden"], inter, local, mean, x["topk"])]
    quantised = 2.0 * products * padded * x["hidden"] * inter * both
    return Physics(flops, xp.minimum(quantised, 8.0 * flops), traffic, features, axes)


PHYSICS: Final[dict[str, Callable[[Any, Columns, Machine], Physics]]] = {
    "gemm": gemm, "attention": attention, "memory": memory, "embedding": embedding,
    "optimizer": optimizer, "conv": conv, "moe": moe,
}  # fmt: skip


def common_features(xp: Any, physics: Physics, machine: Machine) -> list[Any]:
    """Inputs that every family has: work, its time at the nominal rates, and their balance."""
    compute_s = physics.flops / machine.peak
    memory_s = physics.bytes / machine.bandwidth
    return [
        _log2(xp, physics.flops), _log2(xp, physics.bytes), _log2(xp, compute_s * 1e6),
        _log2(xp, memory_s * 1e6), _log2(xp, compute_s / memory_s),
        _log2(xp, physics.quantised_flops / physics.flops), _log2(xp, physics.bytes / machine.l2),
    ]  # fmt: skip
