"""Scores, softmax and context: fused or materialised, over one device or a context-parallel ring."""

from dataclasses import replace

from perfmodel.ops import Attention, Gemm
from perfmodel.workload._block import Comm
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, pointwise

TENSOR_CORE_BYTES = 16
"""Rows of a product's operands have to be multiples of this for tensor cores to run it at their rate (NVIDIA, Matrix
Multiplication Background User's Guide, section 3). A batched product with other rows, as with heads of 150 elements,
is accumulated in fp32 on the ordinary cores, and is priced as an fp32 product."""

SOFTMAX_BLOCK = 4
"""Megatron-LM's fused softmax takes batches of a multiple of this many score matrices, and leaves others to torch
(`FusedScaleMaskSoftmax.is_kernel_available`)."""


def attention_core(
    local: Local, *, kv_heads: int, d_qk: int, d_v: int, seq_kv: int, causal: bool, window: int, dropout: bool
) -> Piece:
    """Attention of the shard's heads over keys and values of `seq_kv` tokens (before context parallelism)."""
    if local.job.flash_attention:
        return _fused(local, kv_heads, d_qk, d_v, seq_kv, causal=causal, window=window)
    return _materialised(local, d_qk, d_v, seq_kv, dropout=dropout)


def _materialised(local: Local, d_qk: int, d_v: int, seq_kv: int, *, dropout: bool) -> Piece:
    """Two batched products around a softmax; the whole score matrix is computed, masked or not.

    Keeps softmax output, dropout mask and dropout output: 5 a s^2 b bytes in 16 bit
    (Korthikanti section 4.1). Both gradients of a product count as its `bwd`.
    """
    batch = local.shard.micro_batch * local.heads
    rows = batch * local.seq_local

    def product(n: int, k: int, head: int) -> Gemm:
        aligned = head * local.act_bytes % TENSOR_CORE_BYTES == 0
        return Gemm(
            op="bmm", dtype=local.precision.act_dtype if aligned else "fp32", batch=batch, m=local.seq_local, n=n, k=k
        )

    scores, context = product(seq_kv, d_qk, d_qk), product(d_v, seq_kv, d_v)
    fused = local.job.fuses("softmax") and batch % SOFTMAX_BLOCK == 0
    names = ["scale_mask_softmax"] if fused else ["mul_scalar", "masked_fill", "softmax"]
    if dropout:
        names.append("dropout")
    between = pointwise(local.precision, [(name, 1) for name in names], rows, seq_kv, saved_bytes=0.0)
    return Piece(
        attention_core=True,
        forward=(scores, *between.forward, context),
        backward_input=(replace(context, pass_="bwd"), *between.backward_input, replace(scores, pass_="bwd")),
        saved_bytes=float(rows) * seq_kv * (2 * local.act_bytes + 1 if dropout else local.act_bytes),
    )


def _fused(local: Local, kv_heads: int, d_qk: int, d_v: int, seq_kv: int, *, causal: bool, window: int) -> Piece:
    """Flash attention, which keeps one fp32 statistic per query and head.

    Context parallelism passes keys and values around a ring. The causal ring is balanced by giving
    rank i the chunks i and 2 cp - 1 - i of 2 cp: one step sees the causal triangle of the rank's own
    tokens, every other step half a square, so that each rank computes exactly 1/cp of the visible
    pairs. Keys and values make cp - 1 hops; in backward they do so again, followed by their gradients.
    """
    cp, q = local.shard.cp, local.seq_local

    def kernel(seq: int, mask: bool) -> Attention:
        return Attention(
            op="flash_attention", dtype=local.precision.act_dtype, batch=local.shard.micro_batch, heads=local.heads,
            kv_heads=kv_heads, seq_q=q, seq_kv=seq, head_dim=d_qk, head_dim_v=0 if d_v == d_qk else d_v,
            causal=mask, window=window if window < seq else 0,
        )  # fmt: skip

    others = (kernel(q // 2 if causal else seq_kv // cp, False),) * (cp - 1)
    steps = (kernel(q if causal else seq_kv // cp, causal), *others)
    forward_comm: tuple[Comm, ...] = ()
    backward_comm: tuple[Comm, ...] = ()
    if cp > 1:
        kv_bytes = float(local.shard.micro_batch * (seq_kv // cp) * kv_heads * (d_qk + d_v) * local.act_bytes)
        hop = Comm(collective="send_recv", bytes=kv_bytes, group="cp", count=cp - 1, overlappable=True)
        forward_comm, backward_comm = (hop,), (replace(hop, count=2 * (cp - 1)),)
    return Piece(
        attention_core=True,
        forward=steps,
        backward_input=tuple(replace(step, pass_="bwd") for step in reversed(steps)),
        forward_comm=forward_comm,
        backward_comm=backward_comm,
        saved_bytes=4.0 * local.tokens * local.heads,
    )
