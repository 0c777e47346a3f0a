"""The core of attention between its projections: scores, softmax and context of the busiest rank.

The core is fused or in kernels of its own, on one device or over context-parallel ranks.
"""

from dataclasses import dataclass, replace

from perfmodel.ops import Attention, Gemm, KernelOp, MemoryBound, Op
from perfmodel.spec import Job, Model, Transformer
from perfmodel.spec.parts import STREAM_LAYERS
from perfmodel.units import dtype_bytes
from perfmodel.workload._block import Comm
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
        core = _fused(local, kv_heads, d_qk, d_v, seq_kv, causal=causal, window=window, chunk=chunk)
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


def _fused(
    local: ShardSizes,
    kv_heads: int,
    d_qk: int,
    d_v: int,
    seq_kv: int,
    *,
    causal: bool,
    window: int,
    chunk: int,
) -> Piece:
    """Flash attention, which keeps one fp32 statistic per query and head.

    Chunks of a sequence are sequences of their own where a rank holds whole ones; else
    (context-parallel ranks, cached tokens) a window of half their size stands for them, over which
    tokens see as much on the mean.
    """
    if chunk and local.seq_local == seq_kv:
        whole_chunks = -(-seq_kv // chunk)
        part = replace(local, seq_local=chunk, sequences=local.sequences * whole_chunks)
        return replace(
            _fused(part, kv_heads, d_qk, d_v, chunk, causal=causal, window=0, chunk=0),
            saved_bytes=4.0 * local.tokens * local.heads,
        )
    window = chunk // 2 or window
    full_attention = Attention(
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
    part = context_parallel(local, full_attention)

    # 8-bit attention takes and gives narrow tensors: casts before and after it, both ways.
    operand_casts: tuple[MemoryBound, ...] = ()
    result_casts: tuple[MemoryBound, ...] = ()
    if local.job.narrow.fp8_attention:
        tokens = local.sequences * local.seq_local
        operand_casts = (
            cast_for_attention(local, tokens, local.heads * d_qk + kv_heads * (d_qk + d_v)),
        )
        result_casts = (cast_for_attention(local, tokens, local.heads * d_v),)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class ContextPart:
    """One rank's part of an attention."""

    steps: tuple[Attention, ...]
    """Forward kernels; each has one backward kernel."""
    forward_comm: tuple[Comm, ...] = ()
    """Exchanges of keys and values, or of heads, in the forward pass."""
    backward_comm: tuple[Comm, ...] = ()
    """Exchanges of the backward pass, gradients among them."""
    merges: tuple[MemoryBound, ...] = ()
    """Kernels that add a step's results to those of earlier steps."""
    gradient_merges: tuple[MemoryBound, ...] = ()
    """Kernels that add a step's gradients to those of earlier steps."""


def context_parallel(local: ShardSizes, attention: Attention) -> ContextPart:
    """The part of an attention with this rank's queries over all keys and values.

    Ranks wait for each other in every exchange, so the one with most visible keys counts. A causal
    sequence is balanced by giving rank i the chunks i and 2 cp - 1 - i of 2 cp, so that each
    computes 1/cp of the visible pairs (zigzag ring attention; Transformer Engine,
    `AttnFuncWithCPAndKVP2P`). Split into contiguous parts, the last rank sees all keys: 2 - 1/cp
    times the mean.

    Args:
        attention: attention of the rank's queries to the keys of the whole sequence.
    """
    if local.shard.cp == 1:
        return ContextPart(steps=(attention,))
    match local.shard.cp_kind:
        case "ulysses":
            return _ulysses(local, attention)
        case "all_gather":
            return _gathered(local, attention)
        case kind:
            return _ring(local, attention, gathered=kind == "gathered_ring")


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


def _ring(local: ShardSizes, attention: Attention, *, gathered: bool) -> ContextPart:
    """Attention in cp steps, each with the keys and values of one rank, which pass around a ring or
    are gathered.

    Liu et al., arXiv 2310.01889.
    """
    cp = local.shard.cp
    q = attention.seq_q
    other_ranks = local.shard.cp - 1
    keys_per_rank = attention.seq_kv // cp

    # A window at least as long as the keys of a step hides none of them.
    def step(keys: int, causal: bool) -> Attention:
        window = attention.window if attention.window < keys else 0
        return replace(attention, seq_kv=keys, causal=causal, window=window)

    # The first step has the rank's own keys, under the causal mask. Each other step has the keys of
    # one other rank. In a balanced causal ring that is half a square (all queries with the earlier
    # half of the keys, or the later half of the queries with all keys); otherwise it is all keys of
    # earlier tokens, which are spread over the ranks too.
    half = keys_per_rank - q // 2 if attention.causal and local.shard.cp_balanced else keys_per_rank

    # Keys and values make cp - 1 hops, each beside a step. In backward they do so again, and their
    # gradients make cp, back to where they belong: the last with no step beside it. Where keys and
    # values are gathered, only the first step could run meanwhile, which is not counted on.
    kv = _keys_and_values(local, attention, 1 / cp)
    kv = replace(kv, collective="send_recv", count=other_ranks, beside_attention=True)
    gradients = replace(kv, count=other_ranks, beside_attention=True)
    last = replace(kv, count=1, beside_attention=False)
    all_kv = replace(_keys_and_values(local, attention, 1.0), collective="all_gather")

    # Each step's result is added to those before, with its statistics, and so are gradients of
    # queries, and of keys and values as they pass: in the type of the steps' results by one kernel
    # (`flash_attn_fwd_out_correction_init` and `AttnFuncWithCPAndKVP2P.backward` of Transformer
    # Engine), in fp32 by several (`_SDPAMerger` of torch.distributed's context parallelism).
    rows = local.sequences * q
    values = attention.heads * (attention.head_dim_v or attention.head_dim)
    dtype = None if local.job.kernels.fuses("attention_merge") else "fp32"
    summed = memory(
        local.precision, "add", rows, attention.heads * attention.head_dim, 2, dtype=dtype
    )
    passed = memory(
        local.precision,
        "add",
        local.sequences * keys_per_rank,
        _width(attention),
        2,
        dtype=dtype,
    )
    first_step = step(keys_per_rank, attention.causal)
    step_of_other_rank = step(half, causal=False)
    return ContextPart(
        steps=(first_step, *(step_of_other_rank,) * other_ranks),
        forward_comm=(all_kv,) if gathered else (kv,),
        backward_comm=(all_kv if gathered else kv, gradients, last),
        merges=_merge(local, rows, values) * other_ranks,
        gradient_merges=(summed, passed) * other_ranks,
    )


def _merge(local: ShardSizes, rows: int, width: int) -> tuple[MemoryBound, ...]:
    """Kernels that add a step's results of [rows, width] to those before, rescaled by their
    statistics."""
    # One kernel that rescales and adds.
    if local.job.kernels.fuses("attention_merge"):
        return (memory(local.precision, "add", rows, width, 2),)

    # Or a conversion to fp32, a difference, a product and another difference.
    names = (("mul_scalar", 1), ("add", 2), ("mul", 2), ("add", 2))
    return tuple(
        memory(local.precision, name, rows, width, inputs, dtype="fp32") for name, inputs in names
    )


def _gathered(local: ShardSizes, attention: Attention) -> ContextPart:
    """Attention after all keys and values have been gathered, again in backward.

    Transformer Engine `AttnFuncWithCPAndKVAllGather`. Nothing runs beside the collectives.
    """
    cp, keys = local.shard.cp, attention.seq_kv
    gather = replace(_keys_and_values(local, attention, 1.0), collective="all_gather")

    # The two chunks of a balanced rank run one by one: of the first rank the first chunk of the
    # sequence, which sees fewest keys, and the last, which sees all.
    steps = (attention,)
    if attention.causal and local.shard.cp_balanced:
        chunk = attention.seq_q // 2
        early_keys = keys - (2 * cp - 1) * chunk
        early = replace(
            attention,
            seq_q=chunk,
            seq_kv=early_keys,
            window=attention.window if attention.window < early_keys else 0,
        )
        steps = (early, replace(attention, seq_q=chunk))

    # Gradients of keys and values are reduced to where they belong.
    return ContextPart(
        steps=steps,
        forward_comm=(gather,),
        backward_comm=(gather, replace(gather, collective="reduce_scatter")),
    )


def _ulysses(local: ShardSizes, attention: Attention) -> ContextPart:
    """Attention of 1 / cp of the heads over the whole sequence; queries, keys and values are
    exchanged before, results after.

    DeepSpeed Ulysses, arXiv 2309.14509.
    """
    # Keys and values of fewer heads than ranks are copied for as many ranks as share them.
    cp = local.shard.cp
    kv_heads = max(attention.kv_heads, cp)
    values = attention.head_dim_v or attention.head_dim
    columns = attention.heads * attention.head_dim + kv_heads * (attention.head_dim + values)

    column_bytes = local.sequences * attention.seq_q * local.act_bytes
    exchange = Comm(collective="all_to_all", bytes=float(column_bytes * columns), group="cp")
    back = replace(exchange, bytes=float(column_bytes * attention.heads * values))
    kernel = replace(
        attention,
        seq_q=attention.seq_q * cp,
        heads=attention.heads // cp,
        kv_heads=max(1, attention.kv_heads // cp),
    )
    return ContextPart(
        steps=(kernel,), forward_comm=(exchange, back), backward_comm=(back, exchange)
    )


def _keys_and_values(local: ShardSizes, attention: Attention, share: float) -> Comm:
    """An exchange of `share` of the sequence's keys and values."""
    tokens = local.sequences * attention.seq_kv * share
    n_bytes = tokens * _width(attention) * dtype_bytes(attention.dtype)
    return Comm(collective="send_recv", bytes=float(n_bytes), group="cp")


def _width(attention: Attention) -> int:
    """Elements of a token's keys and values."""
    return attention.kv_heads * (attention.head_dim + (attention.head_dim_v or attention.head_dim))
