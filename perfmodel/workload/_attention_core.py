"""Scores, softmax and context: fused or materialised, over one device or context-parallel ranks."""

from dataclasses import replace

from perfmodel.ops import Attention, Gemm, KernelOp
from perfmodel.spec import Transformer
from perfmodel.workload._context_parallel import context_parallel
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, memory, pointwise, recomputed
from perfmodel.workload._quantisation import cast_for_attention

TENSOR_CORE_BYTES = 16
"""Rows of a product's operands have to be multiples of this for tensor cores to run it at their rate (NVIDIA, Matrix
Multiplication Background User's Guide, section 3). A batched product with other rows, as with heads of 150 elements,
is accumulated in fp32 on the ordinary cores, and is priced as an fp32 product."""

SOFTMAX_BLOCK = 4
"""Megatron-LM's fused softmax takes batches of a multiple of this many score matrices, of 16 bits, and leaves others to
torch (`FusedScaleMaskSoftmax.is_kernel_available`)."""


def attention_core(
    model: Transformer, local: Local, *, kv_heads: int, d_qk: int, d_v: int, seq_kv: int, causal: bool, window: int
) -> Piece:
    """Attention of the shard's heads over keys and values of `seq_kv` tokens (before context parallelism)."""
    chunk = window if model.chunked_window and window < seq_kv else 0
    core = (
        _fused(local, kv_heads, d_qk, d_v, seq_kv, causal=causal, window=window, chunk=chunk)
        if local.job.flash_attention
        else _materialised(model, local, d_qk, d_v, seq_kv)
    )
    core = replace(core, saved_bytes=core.saved_bytes + _kept_result_bytes(local, d_v))
    prompt = local.job.mode == "inference" and local.seq_local > 1
    if prompt and local.job.flash_attention and not model.latent_attention:
        core = replace(core, forward=(_cached(local, kv_heads, d_qk + d_v), *core.forward))
    return recomputed("core_attn", [core])[0]


def _kept_result_bytes(local: Local, d_v: int) -> float:
    """Fused attention's gradient needs its result: in 8 bits a copy of its own (Transformer Engine 2,
    pytorch/attention/dot_product_attention/backends.py `FusedAttnFunc`); otherwise the tensor that the output
    projection keeps, or keeps no more where its weight is frozen."""
    elements = float(local.tokens) * local.heads * d_v
    if not local.job.flash_attention:
        return 0.0
    return elements if local.job.fp8_attention else elements * local.act_bytes * local.precision.frozen


def _cached(local: Local, kv_heads: int, dims: int) -> KernelOp:
    """Keys and values of a prompt copied into the cache; those of single tokens come with the kernel that reads it."""
    return memory(local.precision, "fill_cache", local.shard.micro_batch * local.seq_local, kv_heads * dims)


def _materialised(model: Transformer, local: Local, d_qk: int, d_v: int, seq_kv: int) -> Piece:
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
    fused = local.job.fuses("softmax") and batch % SOFTMAX_BLOCK == 0 and local.act_bytes == 2
    names = ["scale_mask_softmax"] if fused else ["mul_scalar", "masked_fill", "softmax"]
    if model.attention_softcap:
        names.insert(0, "tanh")
    if model.dropout:
        names.append("dropout")
    between = pointwise(local.precision, [(name, 1) for name in names], rows, seq_kv, saved_bytes=0.0)
    return Piece(
        forward=(scores, *between.forward, context),
        backward_input=(replace(context, pass_="bwd"), *between.backward_input, replace(scores, pass_="bwd")),
        saved_bytes=float(rows)
        * seq_kv
        * (
            (2 * local.act_bytes + 1 if model.dropout else local.act_bytes)
            + (local.act_bytes if model.attention_softcap else 0)
        ),
    )


def _fused(
    local: Local, kv_heads: int, d_qk: int, d_v: int, seq_kv: int, *, causal: bool, window: int, chunk: int
) -> Piece:
    """Flash attention, which keeps one fp32 statistic per query and head.

    Chunks of a sequence are sequences of their own where a rank holds whole ones; else (context-parallel ranks,
    cached tokens) a window of half their size stands for them, over which tokens see as much on the mean.
    """
    if chunk and local.seq_local == seq_kv:
        whole_chunks = -(-seq_kv // chunk)
        part = replace(
            local, seq_local=chunk, shard=replace(local.shard, micro_batch=local.shard.micro_batch * whole_chunks)
        )
        return replace(
            _fused(part, kv_heads, d_qk, d_v, chunk, causal=causal, window=0, chunk=0),
            saved_bytes=4.0 * local.tokens * local.heads,
        )
    window = chunk // 2 or window
    whole = Attention(
        op="flash_attention", dtype="fp8" if local.job.fp8_attention else local.precision.act_dtype,
        batch=local.shard.micro_batch, heads=local.heads,
        kv_heads=kv_heads, seq_q=local.seq_local, seq_kv=seq_kv, head_dim=d_qk,
        head_dim_v=0 if d_v == d_qk else d_v, causal=causal, window=window if window < seq_kv else 0,
    )  # fmt: skip
    part = context_parallel(local, whole)
    tokens = local.shard.micro_batch * local.seq_local
    operands = cast_for_attention(local, tokens, local.heads * d_qk + kv_heads * (d_qk + d_v))
    results = cast_for_attention(local, tokens, local.heads * d_v)
    return Piece(
        forward=(*operands, *part.steps, *part.merges, *results),
        backward_input=(
            *results,
            *(replace(step, pass_="bwd") for step in reversed(part.steps)),
            *part.gradient_merges,
            *operands,
        ),
        forward_comm=part.forward_comm,
        backward_comm=part.backward_comm,
        saved_bytes=4.0 * local.tokens * local.heads,
    )
