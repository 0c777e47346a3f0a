"""Fused attention."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ops._op import (
    Axis,
    Family,
    KernelKind,
    KernelOp,
    KindColumns,
    Measurement,
    Pass,
    Shape,
    ShapeColumn,
)
from perfmodel.ops.physics import Machine, Physics, cached_share, divides, flag, log2
from perfmodel.ops.programs import (
    Program,
    Tensors,
    jax_array,
    jax_pass,
    torch_module,
    torch_pass,
)

LATENT_DECODE: Final = "latent_decode"
"""Name of attention whose values are a part of its keys (multi-head latent attention with a
cache)."""


class AttentionWork(NamedTuple):
    """Work of fused attention."""

    flops: Any
    bytes: Any
    reach: Any
    """Number of distinct keys that the queries of one sequence attend to."""
    moved_kv: Any
    """Elements of keys and values that are read."""


def _work(xp: Any, x: Shape) -> AttentionWork:
    """Two products over the visible part of the score matrix; Q, the visible K and V read, the
    output written.

    Backward has five products for the forward's two (flash attention 2, arXiv 2307.08691 section
    3.1), and traffic in the same proportion. `mixed` rows of tables add decoding sequences to one
    prefill chunk.
    """
    q, kv, window, batch = x["seq_q"], x["seq_kv"], x["window"], x["batch"]
    dims = x["head_dim"] + x["head_dim_v"]

    # Pairs of a query and a key that it sees. The causal mask is aligned at the end: query i sees
    # kv - (q - 1 - i) keys, where there are as many; a window cuts what is further back.
    seen = xp.where(kv >= q, q * kv - q * (q - 1.0) / 2.0, kv * (kv + 1.0) / 2.0)
    pairs = xp.where(x["causal"] > 0, seen, q * kv)
    slides = (window > 0) & (window < kv)
    pairs = xp.where(slides, xp.minimum(pairs, q * window), pairs)
    reach = xp.where(slides, xp.minimum(kv, window + q - 1.0), kv)

    # decoding sequences beside a prefill have one query each, which sees all of its keys
    side_n, side_kv = x["mixed_n_decode"], x["mixed_kv_decode"]
    more = 1.0 + 1.5 * x["bwd"]
    flops = 2.0 * x["heads"] * dims * (batch * pairs + side_n * side_kv) * more

    # queries and the output (dims of both) by all heads, keys and values by the heads of keys alone
    moved_q = x["heads"] * (batch * q + side_n) * dims
    moved_kv = x["kv_heads"] * (batch * reach + side_n * side_kv) * dims
    return AttentionWork(flops, (moved_q + moved_kv) * x["element_bytes"] * more, reach, moved_kv)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attention(KernelOp):
    """Fused (flash) attention over `batch` sequences; `bwd` recomputes the scores."""

    op: str = "attention"
    dtype: str = "bf16"
    batch: int
    heads: int
    kv_heads: int
    seq_q: int
    seq_kv: int
    head_dim: int
    head_dim_v: int = 0
    """Value head size; 0 means equal to `head_dim`."""
    causal: bool = True
    window: int = 0
    """Sliding window in tokens; 0 means none."""
    phase: str = "training"
    pass_: Pass = "fwd"

    family = "attention"
    mixed_n_decode = 0
    """Number of decoding sequences in the same kernel, and their keys; only rows of tables state
    it."""
    mixed_kv_decode = 0
    uses_matrix_units = True
    samples_field = "batch"
    work = staticmethod(_work)

    @property
    def label(self) -> str:
        heads, seq = f"h{self.heads}/{self.kv_heads}", f"q{self.seq_q} kv{self.seq_kv}"
        return f"attention b{self.batch} {heads} {seq} d{self.head_dim} {self.pass_}"

    def shape(self) -> dict[str, Any]:
        more = {
            "head_dim_v": self.head_dim_v or self.head_dim,
            "mixed_n_decode": 0,
            "mixed_kv_decode": 0,
        }
        return KernelOp.shape(self) | more


_TILE: Final = 64.0
"""Query rows of the smallest tile of a fused kernel."""
_PACKED: Final = 32.0
"""Query heads that decoding kernels pack into one tile per key head; beyond it every head reads the
keys itself."""
_BLOCK_OPS: Final = 2e5
"""Cost of starting and draining one block, in operations of a multiprocessor's vector lanes (about
1 us)."""


def _features(
    xp: Any, x: Shape, machine: Machine, waves: Any, split: Any, reach: Any, moved_kv: Any
) -> list[Any]:
    """Features of every row of fused attention for the regressor.

    Args:
        waves: number of waves in which the multiprocessors work through the blocks of queries.
        split: waves of blocks of keys, as decoding kernels have them.
        reach: keys that a query sees.
        moved_kv: elements of keys and values that are read.
    """
    q, kv, window = x["seq_q"], x["seq_kv"], x["window"]
    heads, batch = x["heads"], x["batch"]
    side_n, side_kv = x["mixed_n_decode"], x["mixed_kv_decode"]
    return [
        # sizes, and how much of the scores the mask leaves
        log2(xp, q),
        log2(xp, kv),
        log2(xp, batch),
        log2(xp, heads),
        log2(xp, x["kv_heads"]),
        log2(xp, heads / x["kv_heads"]),
        log2(xp, x["head_dim"]),
        log2(xp, x["head_dim_v"]),
        x["causal"],
        log2(xp, xp.where(window > 0, window, kv) / kv),
        flag(xp, window > 0),
        log2(xp, reach),
        log2(xp, kv / q),
        # waves of query blocks, and of blocks of keys, over the multiprocessors; the filled share
        # of the last
        log2(xp, waves),
        waves / xp.ceil(waves),
        log2(xp, xp.ceil(waves)),
        log2(xp, split),
        split / xp.ceil(split),
        log2(xp, xp.ceil(split)),
        # waves of heads alone, as decoding kernels have them
        log2(xp, batch * x["kv_heads"] / machine.units),
        log2(xp, batch * heads / machine.units),
        batch * heads / machine.units / xp.ceil(batch * heads / machine.units),
        batch * x["kv_heads"] / machine.units / xp.ceil(batch * x["kv_heads"] / machine.units),
        # filled share of the tiles
        q / (xp.ceil(q / 128.0) * 128.0),
        q / (xp.ceil(q / 64.0) * 64.0),
        kv / (xp.ceil(kv / 128.0) * 128.0),
        log2(xp, moved_kv * x["element_bytes"] / machine.l2),
        # decoding sequences beside a prefill
        log2(xp, 1.0 + side_n),
        log2(xp, 1.0 + side_kv),
        log2(xp, 1.0 + side_n * side_kv),
        side_n * side_kv / (side_n * side_kv + batch * kv),
        divides(xp, x["head_dim"], 64),
        divides(xp, x["head_dim"], 128),
    ]


def _physics(xp: Any, x: Shape, machine: Machine) -> Physics:
    """Fused attention; `mixed` rows add decoding sequences to one prefill chunk."""
    q, kv = x["seq_q"], x["seq_kv"]
    heads, batch = x["heads"], x["batch"]
    side_n = x["mixed_n_decode"]
    flops, traffic, reach, moved_kv = _work(xp, x)

    # Training kernels have a block for each tile of queries of a head; decoding kernels, whose
    # queries are few, split the keys over the multiprocessors instead.
    blocks = batch * heads * xp.ceil(q / 128.0)
    waves = blocks / machine.units
    split = batch * x["kv_heads"] * xp.ceil(kv / 256.0) / machine.units
    fill = xp.minimum(waves / xp.ceil(waves), 1.0)
    features = _features(xp, x, machine, waves, split, reach, moved_kv)
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
    vector = vector + _BLOCK_OPS * (
        xp.where(decoding, decode_blocks, blocks) + side_n * x["kv_heads"]
    )
    return Physics(
        flops, quantised, traffic, features, axes, vector, cached_share(traffic, machine)
    )


ATTENTION_MASKS: Final = ("causal", "full")
"""Fused attention over whole sequences, each with its mask."""


def _complete(
    shape: dict[str, np.ndarray], ops: np.ndarray, passes: np.ndarray, layout: np.ndarray
) -> None:
    shape["head_dim_v"] = np.where(shape["head_dim_v"] > 0, shape["head_dim_v"], shape["head_dim"])


def _op_by_shape(shape: Mapping[str, np.ndarray]) -> np.ndarray:
    """Name of the op by its shape: decoding, decoding together with a prefill, or whole sequences
    under a mask."""
    decode = (shape["seq_q"] == 1) & (shape["seq_kv"] > 1)
    mask = np.where(shape["causal"] > 0, *ATTENTION_MASKS)
    return np.where(decode, "decode", np.where(shape["mixed_n_decode"] > 0, "mixed", mask))


def _kind_flags(kind: KernelKind) -> dict[str, float]:
    """Flags of kinds: decoding sees all keys; causal and full attention keep the mask of their
    rows, because each may replace the other."""
    return {"causal": 1.0} if kind.op in ("decode", "mixed") else {}


def _as_measured(
    shape: dict[str, np.ndarray],
    requested: KindColumns,
    measured: KindColumns,
    work: KindColumns,
) -> dict[str, np.ndarray]:
    """Give rows of other work the mask of the measured op."""
    moved = ~work.same_op_and_pass(requested) & np.isin(measured.op, ATTENTION_MASKS)
    return shape | {
        "causal": np.where(moved, (measured.op == "causal").astype(np.float64), shape["causal"])
    }


def _check(op: Attention) -> None:
    """Raise `PerfModelError` for an attention that no program measures."""
    if op.window:
        raise PerfModelError(
            f"attention with a sliding window ({op.window}) cannot be measured; use window = 0"
        )
    if op.heads % op.kv_heads:
        raise PerfModelError(f"heads = {op.heads} must be a multiple of kv_heads = {op.kv_heads}")


def _jax_program(op: Attention, rng: np.random.Generator) -> Program:
    """Textbook attention with scores in memory: softmax(q k^T / sqrt(d)) v, grouped key/value
    heads."""
    import jax
    import jax.numpy as jnp

    group = op.heads // op.kv_heads
    dv = op.head_dim_v or op.head_dim
    q = jax_array(rng, op.dtype, op.batch, op.kv_heads, group, op.seq_q, op.head_dim)
    k = jax_array(rng, op.dtype, op.batch, op.kv_heads, op.seq_kv, op.head_dim)
    v = jax_array(rng, op.dtype, op.batch, op.kv_heads, op.seq_kv, dv)
    # the last query sees every key
    visible = np.tril(np.ones((op.seq_q, op.seq_kv), bool), op.seq_kv - op.seq_q)

    # scores in fp32, as fused kernels keep them
    def attend(q: Any, k: Any, v: Any) -> Any:
        scores = (
            jnp.einsum("bhgqd,bhkd->bhgqk", q, k, preferred_element_type=jnp.float32)
            * op.head_dim**-0.5
        )
        if op.causal:
            scores = jnp.where(visible, scores, jnp.finfo(jnp.float32).min)
        return jnp.einsum("bhgqk,bhkd->bhgqd", jax.nn.softmax(scores).astype(v.dtype), v)

    return jax_pass(op, attend, (q, k, v), {"bwd": (0, 1, 2)})


def _torch_program(op: Attention, make: Tensors) -> Program:
    """`scaled_dot_product_attention`, which picks the fused kernel; the last query sees every
    key."""
    from torch.nn.attention.bias import causal_lower_right  # pyright: ignore[reportMissingImports]

    q = make(op.batch, op.heads, op.seq_q, op.head_dim)
    k = make(op.batch, op.kv_heads, op.seq_kv, op.head_dim)
    v = make(op.batch, op.kv_heads, op.seq_kv, op.head_dim_v or op.head_dim)

    # torch's own causal flag aligns the mask at the first key, so it serves square scores alone; a
    # single query, as in decoding, sees every key without a mask.
    square = op.seq_q == op.seq_kv
    masked = op.causal and not square and op.seq_q > 1
    attend = partial(
        torch_module().nn.functional.scaled_dot_product_attention,
        attn_mask=causal_lower_right(op.seq_q, op.seq_kv) if masked else None,
        is_causal=op.causal and square,
        # only where it is needed: older releases of torch do not know it
        **({"enable_gqa": True} if op.heads != op.kv_heads else {}),
    )
    return torch_pass(op, attend, (q, k, v), {"bwd": (0, 1, 2)})


ATTENTION: Final = Family(
    op=Attention,
    columns={
        **dict.fromkeys(
            ("batch", "heads", "kv_heads", "seq_q", "seq_kv", "head_dim"), ShapeColumn()
        ),
        "head_dim_v": ShapeColumn(0, low=0),
        "causal": ShapeColumn(1, low=0),
        "window": ShapeColumn(0, low=0),
        "mixed_n_decode": ShapeColumn(0, low=0),
        "mixed_kv_decode": ShapeColumn(0, low=0),
    },
    axes=(
        Axis("seq_q", 0, 17, 2),
        Axis("seq_kv", 0, 18, 2),
        Axis("heads", 0, 8, 4),
        Axis("batch", 0, 12, 1),
        Axis("heads_per_kv", 0, 7, 1),
        Axis("head_dim", 5, 10, 4),
        Axis("waves", -8, 14, 2),
    ),
    physics=_physics,
    known_op=lambda op: "",
    op_by_shape=_op_by_shape,
    complete=_complete,
    kind_flags=_kind_flags,
    as_measured=_as_measured,
    measurement=Measurement(
        passes=("fwd", "bwd"),
        jax_program=_jax_program,
        torch_program=_torch_program,
        check=_check,
    ),
)
