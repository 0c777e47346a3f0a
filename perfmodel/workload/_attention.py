"""Attention as a sub-layer: projections, the core, output projection.

The core is scores, softmax and context, fused or materialised, on one device or over
context-parallel ranks.
"""

from dataclasses import replace
from typing import Literal

from perfmodel.ops import LATENT_DECODE, Attention, Gemm, KernelOp, MemoryBound
from perfmodel.spec import AdapterModule, Transformer
from perfmodel.spec.parts import Distances, LatentAttention
from perfmodel.workload._context_parallel import context_parallel
from perfmodel.workload._linear import adapters, column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, joined, memory, pointwise, recomputed
from perfmodel.workload._pointwise import (
    attention_gate,
    attention_layout,
    head_norm,
    rotary,
    small_norm,
    sub_norm,
)
from perfmodel.workload._quantisation import cast_for_attention
from perfmodel.workload._scores import (
    compiled_softmax,
    scaled_and_masked,
    softmax_in_fp32,
    without_softmax,
)

TENSOR_CORE_BYTES = 16
"""Rows of a product's operands have to be multiples of this for tensor cores to run it at their
rate (NVIDIA, Matrix Multiplication Background User's Guide, section 3). A batched product with
other rows, as with heads of 150 elements, is accumulated in fp32 on the ordinary cores, and is
priced as an fp32 product."""

SOFTMAX_BLOCK = 4
"""Megatron-LM's fused softmax accepts only 16-bit scores in batches of a multiple of this many
matrices, and leaves others to torch (`FusedScaleMaskSoftmax.is_kernel_available`)."""


def self_attention(
    model: Transformer,
    local: ShardSizes,
    *,
    causal: bool,
    window: int = 0,
    reduced: bool = True,
    own_keys: bool = True,
) -> list[Piece]:
    """Multi-head or grouped-query attention, or multi-head latent attention where the model has it.

    Args:
        reduced: False where the result of tensor-parallel ranks stays a sum over these
            (`perfmodel.spec.Transformer`, `parallel_blocks`, which latent attention does not go
            with).
        own_keys: False where keys and values are those of an earlier layer.
    """
    # A server that makes one token at a time works on the compressed cache itself.
    if model.latent_attention is not None:
        if local.job.cached_tokens and local.seq_len == 1:
            return _absorbed_attention(model, local, model.latent_attention)
        return _latent_attention(model, local, model.latent_attention, causal=causal, window=window)

    attention, job = model.attention, local.job
    d, d_v = model.head_dim, model.value_dim
    heads, kv_heads = local.heads, local.kv_heads

    # Queries, keys and values come from one product.
    # In 8-bit attention, only the narrow copies of queries, keys and values are saved.
    own_kv_heads = kv_heads if own_keys else 0
    outputs = projection_outputs(model, heads=heads, kv_heads=own_kv_heads)
    has_adapters = job.fine_tuning.adapter_rank > 0
    projection = column_linear(
        local,
        outputs["linear_qkv"],
        local.hidden,
        bias=model.block.bias or attention.qkv_bias,
        kept_output=1 / local.act_bytes if job.narrow.fp8_attention else 1.0,
        shares_input=has_adapters and local.adapts("linear_qkv", "q_proj", "k_proj", "v_proj"),
    )
    if attention.unbiased_projections:
        unbiased = unbiased_outputs(model, heads=heads, kv_heads=own_kv_heads)
        projection = replace(projection, params=projection.params - unbiased)
    pieces = [projection]
    if attention.distances is not None:
        pieces += _projected_distances(model, local, attention.distances)

    # What some models, or some software, have between the projection and the scores.
    if has_adapters:
        pieces += adapters(local, list(outputs.items()), local.hidden)
    if attention.qk_norm:
        pieces += head_norm(model, local, own_keys=own_keys)
    if not job.kernels.fuses("attention_layout"):
        pieces += attention_layout(model, local)
    if model.inputs.positions == "rope":
        pieces.append(rotary(local, (heads + own_kv_heads) * d))

    core = attention_core(
        model,
        local,
        kv_heads=heads if job.kernels.repeated_keys else kv_heads,
        d_qk=d,
        d_v=d_v,
        seq_kv=local.keys,
        causal=causal,
        window=window,
    )
    pieces.append(core)
    if attention.attention_gate or attention.head_gate:
        pieces.append(attention_gate(local, heads * d_v))
    return [*pieces, *_output(model, local, heads * d_v, reduced=reduced)]


def _projected_distances(
    model: Transformer, local: ShardSizes, distances: Distances
) -> list[Piece]:
    """Projections of the table of distances, once for all tokens of a micro-batch."""
    width = local.heads * model.head_dim
    pieces = []
    for name in distances.projections:
        bias = has_bias(model, name)
        pieces.append(
            column_linear(
                local, width, local.hidden, bias=bias, tokens=distances.rows, communicates=False
            )
        )
    return pieces


def has_bias(model: Transformer, projection: Literal["query", "key"]) -> bool:
    """Whether a projection of attention has a bias."""
    biased = model.block.bias or model.attention.qkv_bias
    return biased and projection not in model.attention.unbiased_projections


def unbiased_outputs(model: Transformer, *, heads: int, kv_heads: int) -> int:
    """Output elements of projections without bias (`Transformer.unbiased_projections`)."""
    heads_of_projection = {"query": heads, "key": kv_heads, "value": kv_heads}
    return model.head_dim * sum(
        heads_of_projection[name] for name in model.attention.unbiased_projections
    )


def projection_outputs(
    model: Transformer, *, heads: int, kv_heads: int
) -> dict[AdapterModule, int]:
    """Output elements of the projection of queries, keys and values, and of its parts, beside each
    of which an adapter may stand."""
    queries, keys, values = projected(model, heads=heads, kv_heads=kv_heads)
    outputs: dict[AdapterModule, int] = {"linear_qkv": queries + keys + values, "q_proj": queries}
    if keys:
        outputs["k_proj"] = keys
    if values:
        outputs["v_proj"] = values
    return outputs


def projected(model: Transformer, *, heads: int, kv_heads: int) -> tuple[int, int, int]:
    """Output elements of the projections to queries (with their gates), to keys and to values."""
    attention = model.attention
    per_head = model.head_dim + attention.head_gate
    if attention.attention_gate:
        per_head += model.value_dim
    values = 0 if attention.keys_as_values else kv_heads * model.value_dim
    return heads * per_head, kv_heads * model.head_dim, values


def cross_attention(model: Transformer, local: ShardSizes, memory_len: int) -> list[Piece]:
    """Decoder queries over the encoder's output of `memory_len` tokens per sequence (T5).

    All decoder layers share that output, so none of them counts it as kept.
    """
    d, heads, kv = model.head_dim, local.heads, local.kv_heads
    memory_tokens = local.shard.micro_batch * memory_len // local.shard.cp
    # Queries of the decoder, then keys and values of the encoder's output.
    queries = column_linear(local, heads * d, local.hidden, bias=model.block.bias, kept_output=1.0)
    keys_and_values = column_linear(
        local,
        2 * kv * d,
        local.hidden,
        bias=model.block.bias,
        tokens=memory_tokens,
        kept_input=False,
        kept_output=1.0,
    )
    unbiased_queries = unbiased_outputs(model, heads=heads, kv_heads=0)
    unbiased_keys_and_values = unbiased_outputs(model, heads=0, kv_heads=kv)
    return [
        replace(queries, params=queries.params - unbiased_queries),
        replace(keys_and_values, params=keys_and_values.params - unbiased_keys_and_values),
        attention_core(
            model,
            local,
            kv_heads=kv,
            d_qk=d,
            d_v=d,
            seq_kv=memory_len,
            causal=False,
            window=0,
        ),
        *_output(model, local, heads * d),
    ]


def _latent_attention(
    model: Transformer,
    local: ShardSizes,
    latent: LatentAttention,
    *,
    causal: bool,
    window: int,
) -> list[Piece]:
    """Multi-head latent attention as it is trained, keys and values expanded to all heads.

    DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """
    heads, rows = local.heads, local.norm_tokens
    rope, rank = latent.qk_rope_head_dim, latent.kv_lora_rank
    d_qk, d_v = latent.qk_nope_head_dim + rope, latent.v_head_dim

    # Down projections are replicated over tensor-parallel ranks and run on the rank's part of the
    # sequence; up projections are column-parallel and gather the compressed activations only.
    down_projections = [
        *_latent_query(model, local, latent),
        linear(local.precision, rows, rank + rope, local.hidden, kept_input=0.0),
        small_norm(model, local, rows, rank),
    ]

    # Kept for the core: keys of all heads with the shared rotary part appended, and values.
    expanded_bytes = float(local.tokens * heads * (d_qk + d_v) * local.act_bytes)
    expansion = [
        column_linear(local, heads * (latent.qk_nope_head_dim + d_v), rank),
        *_latent_rotation(model, local, latent),
        pointwise(
            local.precision, [("add", 1)], local.tokens, heads * d_qk, saved_bytes=expanded_bytes
        ),
    ]
    core = attention_core(
        model,
        local,
        kv_heads=heads,
        d_qk=d_qk,
        d_v=d_v,
        seq_kv=local.keys,
        causal=causal,
        window=window,
    )
    rest = [*_latent_gate(model, local, latent), *_output(model, local, heads * d_v)]
    return [*down_projections, *recomputed("mla_up_proj", expansion), core, *rest]


def _absorbed_attention(
    model: Transformer, local: ShardSizes, latent: LatentAttention
) -> list[Piece]:
    """Latent attention of one new token per sequence over the cache of compressed keys and values.

    Their expansion is absorbed into queries and results (DeepSeek-V2, arXiv 2405.04434, section
    2.1.2 and appendix C).
    """
    heads, rows = local.heads, local.tokens
    rope = latent.qk_rope_head_dim
    rank = latent.kv_lora_rank
    nope = latent.qk_nope_head_dim

    # An up projection of keys, or of values, applied head by head to queries, or to results.
    def absorbed(n: int, k: int) -> Piece:
        op = Gemm(op="bmm", dtype=local.precision.wide_dtype, batch=heads, m=rows, n=n, k=k)
        return Piece(forward=(op,), params=heads * n * k)

    # All heads share one key of rank + rope elements, the first of which are the value.
    core = Attention(
        op="flash_attention",
        dtype=local.precision.wide_dtype,
        batch=local.sequences,
        heads=heads,
        kv_heads=1,
        seq_q=1,
        seq_kv=local.keys,
        head_dim=rank + rope,
        head_dim_v=rank,
        phase=LATENT_DECODE,
    )
    return [
        *_latent_query(model, local, latent),
        linear(local.precision, rows, rank + rope, local.hidden),
        small_norm(model, local, rows, rank),
        *_latent_rotation(model, local, latent),
        absorbed(rank, nope),
        Piece(forward=(core,)),
        absorbed(latent.v_head_dim, rank),
        *_latent_gate(model, local, latent),
        *_output(model, local, heads * latent.v_head_dim),
    ]


def _latent_rotation(model: Transformer, local: ShardSizes, latent: LatentAttention) -> list[Piece]:
    """The rotation of every head's queries and of the one key that all heads share."""
    if model.inputs.positions != "rope":
        return []
    return [rotary(local, (local.heads + 1) * latent.qk_rope_head_dim)]


def _latent_gate(model: Transformer, local: ShardSizes, latent: LatentAttention) -> list[Piece]:
    """The projection to one gate per head, from the input that queries save, and the product of the
    gates with attention's result."""
    width = local.heads * latent.v_head_dim
    if not model.attention.head_gate:
        return []
    # Queries that are not compressed come from the same product.
    gates = []
    if latent.q_lora_rank:
        gates.append(column_linear(local, local.heads, local.hidden, kept_input=False))
    return [*gates, attention_gate(local, width)]


def _latent_query(model: Transformer, local: ShardSizes, latent: LatentAttention) -> list[Piece]:
    """Projection of queries, through a compressed form if the model has one."""
    rows = local.norm_tokens
    width = local.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if not latent.q_lora_rank:
        gates = local.heads if model.attention.head_gate else 0
        return [column_linear(local, width + gates, local.hidden, kept_output=1.0)]
    return [
        linear(local.precision, rows, latent.q_lora_rank, local.hidden),
        small_norm(model, local, rows, latent.q_lora_rank),
        *recomputed(
            "mla_up_proj",
            [column_linear(local, width, latent.q_lora_rank, kept_output=1.0)],
        ),
    ]


def _output(
    model: Transformer, local: ShardSizes, width: int, *, reduced: bool = True
) -> list[Piece]:
    """The output projection of `width` elements per token, with its adapters; sinks are a logit per
    head."""
    sinks = [Piece(params=local.heads)] if model.attention.attention_sinks else []
    projection = row_linear(
        local,
        local.hidden,
        width,
        bias=model.block.bias or model.attention.output_bias,
        communicates=reduced,
    )
    normed = [sub_norm(model, local, width)] if model.norms.sub_norms else []
    pieces = [*sinks, *normed, projection]
    if local.job.fine_tuning.adapter_rank:
        pieces += adapters(local, [("linear_proj", local.hidden)], width, row_parallel=True)
    return pieces


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

    # Between the products: scale, mask and softmax in one kernel or apart, then dropout.
    kernels = local.job.kernels
    wide = "wide_softmax" in kernels.eager_kernels and local.act_bytes == 2
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

    # Per score: the softmax's output; with dropout its mask of one byte and its output; the fp32
    # softmax; the capped score.
    bytes_per_score = 2 * local.act_bytes + 1 if model.block.dropout else local.act_bytes
    if wide:
        bytes_per_score += 4
    if model.attention.attention_softcap:
        bytes_per_score += local.act_bytes
    return Piece(
        forward=(scores, *pointwise_piece.forward, context),
        backward_input=(
            replace(context, pass_="bwd"),
            *pointwise_piece.backward_input,
            replace(scores, pass_="bwd"),
        ),
        saved_bytes=float(rows) * seq_kv * bytes_per_score,
    )


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
