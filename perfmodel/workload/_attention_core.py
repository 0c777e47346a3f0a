"""The core of attention between its projections: scores, softmax and context of the busiest rank.

The core is fused or in kernels of its own, on one device or over context-parallel ranks.
"""

from dataclasses import replace

from perfmodel.ops import Attention, Gemm, KernelOp, MemoryBound, Op
from perfmodel.spec import Job, Model, Transformer
from perfmodel.spec.parts import STREAM_LAYERS
from perfmodel.workload._context_parallel import ContextPart, context_parallel
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, joined, memory, moving, pointwise, recomputed
from perfmodel.workload._quantisation import cast_for_attention

TENSOR_CORE_BYTES = 16
"""Rows of a product's operands have to be multiples of this for tensor cores to run it at their
rate (NVIDIA, Matrix Multiplication Background User's Guide, section 3). A batched product with
other rows, as with heads of 150 elements, is accumulated in fp32 on the ordinary cores, and is
priced as an fp32 product."""


SOFTMAX_BLOCK = 4
"""Megatron-LM's fused softmax accepts only 16-bit scores in batches of a multiple of this many
matrices, and leaves others to torch (`FusedScaleMaskSoftmax.is_kernel_available`)."""


def attention_core(
    model: Transformer,
    local: ShardSizes,
    *,
    kv_heads: int,
    d_qk: int,
    d_v: int,
    seq_kv: int,
    causal: bool,
    window: int,
) -> Piece:
    """Attention of the shard's heads over keys and values of `seq_kv` tokens (before context
    parallelism)."""
    chunk = window if model.attention.chunked_window and window < seq_kv else 0
    if local.job.kernels.flash_attention:
        attention = Attention(
            op="flash_attention",
            dtype="fp8" if local.job.narrow.fp8_attention else local.precision.wide_dtype,
            batch=local.sequences,
            heads=local.heads,
            kv_heads=kv_heads,
            seq_q=local.seq_local,
            seq_kv=seq_kv,
            head_dim=d_qk,
            head_dim_v=0 if d_v == d_qk else d_v,
            causal=causal,
            window=window if window < seq_kv else 0,
        )
        core = _fused(local, attention, chunk)
        # Fused attention keeps its result for its own gradient. In 8 bits this is an additional
        # copy (Transformer Engine 2, pytorch/attention/dot_product_attention/backends.py
        # `FusedAttnFunc`); otherwise it is the tensor that the output projection keeps too, or
        # would keep if its weight were not frozen.
        kept_bytes = float(local.tokens) * local.heads * d_v
        if not local.job.narrow.fp8_attention:
            kept_bytes = kept_bytes * local.act_bytes * local.precision.frozen
        core = replace(core, saved_bytes=core.saved_bytes + kept_bytes)
    else:
        core = _materialised(model, local, d_qk, d_v, seq_kv)

    # A server fills its cache with the prompt's keys and values.
    prompt = local.job.mode == "inference" and local.seq_local > 1
    if prompt and local.job.kernels.flash_attention and not model.latent_attention:
        core = replace(core, forward=(_cached(local, kv_heads, d_qk + d_v), *core.forward))
    return recomputed("core_attn", [core])[0]


def _cached(local: ShardSizes, kv_heads: int, dims: int) -> KernelOp:
    """Copy of a prompt's keys and values into the cache; for single tokens the attention kernel
    itself writes them."""
    return memory(local.precision, "fill_cache", local.tokens, kv_heads * dims)


def _materialised(model: Transformer, local: ShardSizes, d_qk: int, d_v: int, seq_kv: int) -> Piece:
    """Two batched products around a softmax; the whole score matrix is computed, masked or not.

    Keeps softmax output, dropout mask and dropout output: 5 a s^2 b bytes in 16 bit
    (Korthikanti section 4.1). Both gradients of a product count as its `bwd`.
    """
    batch = local.sequences * local.heads
    rows = batch * local.seq_local
    softmax = _softmax_between(model, local, batch, seq_kv)

    # Heads whose rows do not start where tensor cores read are multiplied without them.
    def product(n: int, k: int, head: int) -> Gemm:
        aligned = head * local.act_bytes % TENSOR_CORE_BYTES == 0
        return Gemm(
            op="bmm",
            dtype=local.precision.wide_dtype if aligned else "fp32",
            batch=batch,
            m=local.seq_local,
            n=n,
            k=k,
        )

    scores = product(seq_kv, d_qk, d_qk)
    context = product(d_v, seq_kv, d_v)
    return Piece(
        forward=(scores, *softmax.forward, context),
        backward_input=(
            replace(context, pass_="bwd"),
            *softmax.backward_input,
            replace(scores, pass_="bwd"),
        ),
        saved_bytes=float(rows) * seq_kv * _bytes_per_score(model, local),
    )


def _has_wide_softmax(local: ShardSizes) -> bool:
    """Whether the softmax of 16-bit scores runs in fp32, by kernels of its own."""
    return "wide_softmax" in local.job.kernels.eager_kernels and local.act_bytes == 2


def _bytes_per_score(model: Transformer, local: ShardSizes) -> int:
    """Bytes that attention saves for each score: the softmax's output; with dropout its mask of
    one byte and its output; the fp32 softmax; the capped score."""
    bytes_per_score = 2 * local.act_bytes + 1 if model.block.dropout else local.act_bytes
    if _has_wide_softmax(local):
        bytes_per_score += 4
    if model.attention.attention_softcap:
        bytes_per_score += local.act_bytes
    return bytes_per_score


def _softmax_between(model: Transformer, local: ShardSizes, batch: int, seq_kv: int) -> Piece:
    """Kernels between the two products of attention: scale, mask and softmax in one kernel or
    apart, then dropout.

    Args:
        batch: heads of all sequences.
    """
    rows = batch * local.seq_local
    kernels = local.job.kernels
    wide = _has_wide_softmax(local)
    compiled = kernels.row_kernels != "library" and kernels.fuses("softmax") and not wide
    fused = (
        kernels.fuses("softmax")
        and batch % SOFTMAX_BLOCK == 0
        and local.act_bytes == 2
        and not wide
    )
    names = ["scale_mask_softmax"] if fused else ["softmax"]
    if model.block.dropout:
        names.append("dropout")
    pointwise_piece = pointwise(
        local.precision, [(name, 1) for name in names], rows, seq_kv, saved_bytes=0.0
    )
    if compiled:
        pointwise_piece = compiled_softmax(model, local, rows, seq_kv)
    elif wide:
        pointwise_piece = joined(
            softmax_in_fp32(model, local, rows, seq_kv), without_softmax(pointwise_piece)
        )
    elif not fused:
        pointwise_piece = joined(scaled_and_masked(model, local, rows, seq_kv), pointwise_piece)
    if model.attention.attention_softcap:
        pointwise_piece = joined(
            pointwise(local.precision, [("tanh", 1)], rows, seq_kv), pointwise_piece
        )
    return pointwise_piece


def compiled_softmax(model: Transformer, local: ShardSizes, rows: int, keys: int) -> Piece:
    """Scale, mask, softmax and dropout of scores in the kernels of a compiler
    (`KernelChoices.row_kernels`).

    One kernel reads the scores and writes their softmax, and with dropout also its mask of one byte
    and its result; backward reads the softmax, its gradient and the mask, and writes the gradient
    of scores. A compiler that ends its kernels at reductions reads the scores for their maximum and
    for the sum of their exponentials before, and in backward everything once more for the sum of
    products. The kernels stream their tensors as element-wise ones do: the tables'
    `scale_mask_softmax` was written for 16 bits, and takes several times as long in 32.
    """
    element = local.act_bytes
    by_reduction = local.job.kernels.row_kernels == "by_reduction"
    forward_bytes, backward_bytes = 2 * element, 3 * element
    if by_reduction:
        forward_bytes += 2 * element
        backward_bytes += 2 * element
    if model.block.dropout:
        forward_bytes += element + 1
        backward_bytes += 1 + by_reduction
    return Piece(
        forward=(moving(local.precision, rows, keys, forward_bytes),),
        backward_input=(moving(local.precision, rows, keys, backward_bytes),),
    )


def softmax_in_fp32(model: Transformer, local: ShardSizes, rows: int, keys: int) -> Piece:
    """Mask and softmax of 16-bit scores in fp32, between a cast each way.

    The product before has the scale (Fast-LLM layers/attention/attention.py `_attn_backup`).
    """
    # A cast between 16 and 32 bits moves the 6 bytes of a 16-bit sum.
    precision = local.precision
    cast = memory(precision, "add", rows, keys, 2)
    wide = replace(precision, act_dtype="fp32", act_bytes=4)
    names = ["masked_fill", "softmax"] if model.attention.causal else ["add", "softmax"]
    in_fp32 = pointwise(wide, [(name, 1) for name in names], rows, keys)
    return replace(
        in_fp32,
        forward=(cast, *in_fp32.forward, cast),
        backward_input=(cast, *in_fp32.backward_input, cast),
    )


def without_softmax(between: Piece) -> Piece:
    """Operations on scores after their softmax, such as dropout."""
    return replace(between, forward=between.forward[1:], backward_input=between.backward_input[:-1])


def scaled_and_masked(model: Transformer, local: ShardSizes, rows: int, keys: int) -> Piece:
    """Operations of unfused attention on scores before their softmax: a scale and a mask.

    Decoders fill what lies ahead, and their backward fills the gradient at the same places
    (Megatron-LM `attention_mask_func`; Hugging Face GPT-2, `torch.where`). Encoders of text add a
    mask of one row per sequence, whose gradient nobody needs, so that the scores' own passes
    through unchanged (google-research/bert modeling.py `attention_layer`, and its ports). T5 adds
    its relative positions instead, unscaled, and sums their gradient over the batch (Hugging Face
    T5, `position_bias`). Patches are never masked: images have no padding.
    """
    precision = local.precision
    scale = pointwise(precision, [("mul_scalar", 1)], rows, keys)
    if model.inputs.patches:
        return scale
    if model.attention.causal and model.inputs.positions != "relative":
        return joined(scale, pointwise(precision, [("masked_fill", 1)], rows, keys))
    added = Piece(forward=(memory(precision, "add", rows, keys),))
    if model.inputs.positions == "relative":
        return replace(added, backward_input=(memory(precision, "add", rows, keys),))
    return joined(scale, added)


def _fused(local: ShardSizes, attention: Attention, chunk: int) -> Piece:
    """Flash attention, which keeps one fp32 statistic per query and head.

    Args:
        attention: attention of the rank's queries to the keys of the whole sequence.
        chunk: tokens that see each other alone; 0 where a sequence is not divided into chunks.
    """
    # Chunks of a sequence are sequences of their own where a rank holds whole ones.
    if chunk and local.seq_local == attention.seq_kv:
        whole_chunks = -(-attention.seq_kv // chunk)
        part = replace(local, seq_local=chunk, sequences=local.sequences * whole_chunks)
        of_chunks = replace(attention, batch=part.sequences, seq_q=chunk, seq_kv=chunk, window=0)
        return replace(_fused(part, of_chunks, 0), saved_bytes=4.0 * local.tokens * local.heads)

    # Else (context-parallel ranks, cached tokens) a window of half their size stands for them, over
    # which tokens see as much on the mean.
    attention = replace(attention, window=chunk // 2 or attention.window)
    part = ContextPart(steps=(attention,))
    if local.shard.cp > 1:
        part = context_parallel(local, attention)

    # 8-bit attention takes and gives narrow tensors: casts before and after it, both ways.
    operand_casts: tuple[MemoryBound, ...] = ()
    result_casts: tuple[MemoryBound, ...] = ()
    if local.job.narrow.fp8_attention:
        tokens = local.sequences * local.seq_local
        values = attention.head_dim_v or attention.head_dim
        queries = local.heads * attention.head_dim
        keys_and_values = attention.kv_heads * (attention.head_dim + values)
        operand_casts = (cast_for_attention(local, tokens, queries + keys_and_values),)
        result_casts = (cast_for_attention(local, tokens, local.heads * values),)
    return Piece(
        forward=(*operand_casts, *part.steps, *part.merges, *result_casts),
        backward_input=(
            *result_casts,
            *(replace(step, pass_="bwd") for step in reversed(part.steps)),
            *part.gradient_merges,
            *operand_casts,
        ),
        forward_comm=part.forward_comm,
        backward_comm=part.backward_comm,
        saved_bytes=4.0 * local.tokens * local.heads,
    )


def undivided(model: Model, job: Job, op: Op) -> Attention | None:
    """The undivided attention that `op` is a part of.

    Parts are those of a context-parallel rank, a step of its ring or a slice of a sequence. None
    for other operations, and for models whose own attention covers less than a sequence.
    """
    if (
        not isinstance(model, Transformer)
        or model.decoder_layers
        or model.attention.chunked_window
        or job.mode != "train"
    ):
        return None

    # With documents of varied lengths, no attention covers a whole sequence.
    if job.varied_lengths:
        return None
    if not isinstance(op, Attention):
        return None

    # Streams of text and image attend over both; cross-attention sees all the text.
    queries = keys = job.seq_len
    text = model.inputs.text_condition
    if text and not set("".join(model.stack)).isdisjoint(STREAM_LAYERS):
        queries = keys = job.seq_len + text.tokens
    elif text and op.seq_kv == text.tokens:
        keys = text.tokens
    if op.seq_q + op.seq_kv == queries + keys:
        return None
    return replace(op, seq_q=queries, seq_kv=keys, causal=model.attention.causal)
