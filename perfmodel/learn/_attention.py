"""Fused attention: masked score pairs, query blocks and key splits."""

from typing import Any, Final

from perfmodel.learn._machine import Machine
from perfmodel.learn._work import Columns, Physics, cached_share, divides, flag, log2

_TILE: Final = 64.0
"""Query rows of the smallest tile of a fused kernel."""
_PACKED: Final = 32.0
"""Query heads that decoding kernels pack into one tile per key head; beyond it every head reads the keys itself."""
_BLOCK_OPS: Final = 2e5
"""What starting and draining one block costs, in operations of a multiprocessor's vector lanes (about 1 us)."""


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
