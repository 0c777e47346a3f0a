"""What a kernel of each family has to do: FLOPs and compulsory memory traffic. Their only statement.

Every function takes the shape as a mapping of names to values and an array namespace `xp`, so that the same formula
serves one op (plain numbers, `NUMBERS`) and columns of many (NumPy, or jax.numpy where gradients are wanted).
Besides the shape they read `element_bytes` and the flags `bwd` (both gradients) and `nongated`, 0 or 1. Where the
quantities that FLOPs and traffic are made of say more of a kernel, they are returned beside them.
"""

from collections.abc import Mapping
from math import exp, floor
from typing import Any, Final, NamedTuple

Shape = Mapping[str, Any]
"""Shape columns by name: numbers, or arrays [n]."""


class Numbers:
    """The part of an array namespace that the formulas need, for plain numbers."""

    exp, floor = staticmethod(exp), staticmethod(floor)
    minimum, maximum = staticmethod(min), staticmethod(max)

    @staticmethod
    def where(condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b


NUMBERS: Final = Numbers()


class Work(NamedTuple):
    """Operations and traffic."""

    flops: Any
    bytes: Any
    """Compulsory memory traffic: every input read once, every output written once."""


class GemmWork(NamedTuple):
    """Work of `products` matrix products, and the elements of one product's operands and result."""

    flops: Any
    bytes: Any
    products: Any
    a: Any
    b: Any
    c: Any


def gemm_work(xp: Any, x: Shape) -> GemmWork:
    """2mnk per product; both inputs read, the output written (and read and written in fp32 if accumulated).

    `bwd` stands for both gradient products of the forward m, n, k, of which the weight gradient accumulates.
    """
    m, n, k, size = x["m"], x["n"], x["k"], x["element_bytes"]
    products, both = x["batch"] * x["groups"], 1.0 + x["bwd"]
    a, b, c = m * k, k * n, m * n
    extra = x["accumulate"] * xp.where(x["bwd"] > 0, b, c) * (8.0 - size)
    return GemmWork(2.0 * products * m * n * k * both, products * (both * (a + b + c) * size + extra),
                    products, a, b, c)  # fmt: skip


class ConvWork(NamedTuple):
    """Work of a 2-D convolution and its implicit product [m, k] x [k, n] (per group)."""

    flops: Any
    bytes: Any
    h_out: Any
    w_out: Any
    m: Any
    n: Any
    k: Any
    inputs: Any
    """Elements of the image, the kernel and the result."""
    weights: Any
    outputs: Any


def conv_work(xp: Any, x: Shape) -> ConvWork:
    """Direct-convolution FLOPs (twice that for `bwd`, both gradients); image, kernel and result moved once each."""
    h_out = xp.floor((x["h_in"] + 2 * x["pad_h"] - x["k_h"]) / x["stride_h"]) + 1.0
    w_out = xp.floor((x["w_in"] + 2 * x["pad_w"] - x["k_w"]) / x["stride_w"]) + 1.0
    h_out, w_out = xp.maximum(h_out, 1.0), xp.maximum(w_out, 1.0)
    both = 1.0 + x["bwd"]
    m, n = x["batch"] * h_out * w_out, x["c_out"] / x["groups"]
    k = x["c_in"] * x["k_h"] * x["k_w"] / x["groups"]
    flops = 2.0 * m * n * k * x["groups"] * both
    inputs = x["batch"] * x["c_in"] * x["h_in"] * x["w_in"]
    weights, outputs = x["c_out"] * k, m * x["c_out"]
    traffic = (inputs + weights + outputs) * x["element_bytes"] * both
    return ConvWork(flops, traffic, h_out, w_out, m, n, k, inputs, weights, outputs)


class AttentionWork(NamedTuple):
    """Work of fused attention."""

    flops: Any
    bytes: Any
    reach: Any
    """Keys that the queries of one sequence see together."""
    moved_kv: Any
    """Elements of keys and values that are read."""


def attention_work(xp: Any, x: Shape) -> AttentionWork:
    """Two products over the visible part of the score matrix; Q, the visible K and V read, the output written.

    Backward has five products for the forward's two (flash attention 2, arXiv 2307.08691 section 3.1), and traffic
    in the same proportion. `mixed` rows of tables add decoding sequences to one prefill chunk.
    """
    q, kv, window, batch = x["seq_q"], x["seq_kv"], x["window"], x["batch"]
    dims = x["head_dim"] + x["head_dim_v"]
    # query i (from the end) sees kv - (q - 1 - i) keys
    seen = xp.where(kv >= q, q * kv - q * (q - 1.0) / 2.0, kv * (kv + 1.0) / 2.0)
    pairs = xp.where(x["causal"] > 0, seen, q * kv)
    slides = (window > 0) & (window < kv)
    pairs = xp.where(slides, xp.minimum(pairs, q * window), pairs)
    reach = xp.where(slides, xp.minimum(kv, window + q - 1.0), kv)
    side_n, side_kv = x["mixed_n_decode"], x["mixed_kv_decode"]
    more = 1.0 + 1.5 * x["bwd"]
    flops = 2.0 * x["heads"] * dims * (batch * pairs + side_n * side_kv) * more
    moved_q = x["heads"] * (batch * q + side_n) * dims
    moved_kv = x["kv_heads"] * (batch * reach + side_n * side_kv) * dims
    return AttentionWork(flops, (moved_q + moved_kv) * x["element_bytes"] * more, reach, moved_kv)


def memory_work(xp: Any, x: Shape) -> Work:
    """One operation per element; (inputs + 1 output) x elements moved, `bwd` reads one more (the saved value)."""
    elements = x["rows"] * x["hidden"]
    return Work(elements, elements * (x["n_inputs"] + 1.0 + x["bwd"]) * x["element_bytes"])


def embedding_work(xp: Any, x: Shape) -> Work:
    """One operation per element, as element-wise kernels; rows gathered and written, `bwd` reads, adds and writes."""
    elements = x["tokens"] * x["hidden"]
    return Work(elements, elements * x["element_bytes"] * (2.0 + x["bwd"]))


def optimizer_work(xp: Any, x: Shape) -> Work:
    """12 FLOPs per parameter (Adam)."""
    return Work(12.0 * x["n_params"], x["n_params"] * x["bytes_per_param"])


class MoEWork(NamedTuple):
    """Work of one rank's experts."""

    flops: Any
    bytes: Any
    products: Any
    """Matrix products per token: three, or two without a gate."""
    inter: Any
    """Inner size of this rank's shard of an expert."""
    local: Any
    """Experts of this rank."""
    routed: Any
    """Token copies that reach them."""
    active: Any
    """Experts that get any."""
    weights_bytes: Any


def moe_work(xp: Any, x: Shape) -> MoEWork:
    """Products of hidden x inter per routed token; weights of the experts hit, and activations, moved once.

    Of E experts, r uniform draws hit E (1 - exp(-r / E)) (Poisson); a power law leaves more of them cold.
    """
    products = 3.0 - x["nongated"]
    inter = x["inter"] / x["moe_tp"]
    local = x["experts"] / x["moe_ep"]
    routed = x["tokens"] * x["topk"] / x["moe_ep"]
    size, both = x["element_bytes"], 1.0 + x["bwd"]
    active = xp.minimum(local, local * (1.0 - xp.exp(-routed / local)) + 1e-3)
    flops = 2.0 * products * routed * x["hidden"] * inter * both
    weights = products * xp.maximum(active, 1.0) * x["hidden"] * inter * size
    traffic = (weights + routed * (2.0 * x["hidden"] + 3.0 * inter) * size) * both
    return MoEWork(flops, traffic, products, inter, local, routed, active, weights)
