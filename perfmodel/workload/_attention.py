"""Attention as a sub-layer: projections, the core, output projection.

The core is scores, softmax and context, fused or materialised, on one device or over
context-parallel ranks.
"""

from dataclasses import replace
from typing import Literal, NamedTuple

from perfmodel.ops import LATENT_DECODE, Attention, Gemm
from perfmodel.spec import AdapterModule, Transformer
from perfmodel.spec.parts import Distances, LatentAttention
from perfmodel.workload._attention_core import attention_core
from perfmodel.workload._linear import adapters, column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, pointwise, recomputed
from perfmodel.workload._pointwise import (
    attention_gate,
    attention_layout,
    head_norm,
    query_or_key_norm,
    rotary,
    small_norm,
    sub_norm,
)


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
    own_kv_heads = kv_heads if own_keys else 0

    # What some models, or some software, have between the projection and the scores.
    pieces = queries_keys_and_values(model, local, own_keys=own_keys)
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
    return [*pieces, *attention_output(model, local, heads * d_v, reduced=reduced)]


def queries_keys_and_values(
    model: Transformer, local: ShardSizes, *, own_keys: bool = True
) -> list[Piece]:
    """The projections of attention with their adapters, and the norms of queries and keys.

    Args:
        own_keys: False where keys and values are those of an earlier layer.
    """
    attention, job = model.attention, local.job
    heads = local.heads

    # Queries, keys and values come from one product.
    # In 8-bit attention, only the narrow copies of queries, keys and values are saved.
    own_kv_heads = local.kv_heads if own_keys else 0
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

    if has_adapters:
        pieces += adapters(local, list(outputs.items()), local.hidden)
    if attention.qk_norm:
        pieces += head_norm(model, local, own_keys=own_keys)
    return pieces


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


class ProjectedElements(NamedTuple):
    """Elements of a token that attention's projections make."""

    queries: int
    """Queries with their gates."""
    keys: int
    values: int


def projected(model: Transformer, *, heads: int, kv_heads: int) -> ProjectedElements:
    """Output elements of the projections of a token to queries, keys and values."""
    attention = model.attention
    per_head = model.head_dim + attention.head_gate
    if attention.attention_gate:
        per_head += model.value_dim
    values = 0 if attention.keys_as_values else kv_heads * model.value_dim
    return ProjectedElements(heads * per_head, kv_heads * model.head_dim, values)


def cross_attention(
    model: Transformer, local: ShardSizes, memory_len: int, memory_width: int | None = None
) -> list[Piece]:
    """Queries over another stack's output of `memory_len` tokens per sequence (T5's encoder, a
    diffusion model's text).

    All layers share that output, so none of them counts it as kept.

    Args:
        memory_width: elements of a token of that output; None: the hidden size.
    """
    d, heads, kv = model.head_dim, local.heads, local.kv_heads
    memory_tokens = local.shard.micro_batch * memory_len // local.shard.cp
    # Queries of the decoder, then keys and values of the encoder's output.
    queries = column_linear(local, heads * d, local.hidden, bias=model.block.bias, kept_output=1.0)
    keys_and_values = column_linear(
        local,
        2 * kv * d,
        memory_width or local.hidden,
        bias=model.block.bias,
        tokens=memory_tokens,
        kept_input=False,
        kept_output=1.0,
    )
    unbiased_queries = unbiased_outputs(model, heads=heads, kv_heads=0)
    unbiased_keys_and_values = unbiased_outputs(model, heads=0, kv_heads=kv)
    norms = []
    if model.attention.qk_norm:
        norms = [
            query_or_key_norm(model, local, local.tokens, heads),
            query_or_key_norm(model, local, memory_tokens, kv),
        ]
    return [
        replace(queries, params=queries.params - unbiased_queries),
        replace(keys_and_values, params=keys_and_values.params - unbiased_keys_and_values),
        *norms,
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
        *attention_output(model, local, heads * d),
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
    d_qk = latent.qk_nope_head_dim + rope
    d_v = latent.v_head_dim

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
    rest = [*_latent_gate(model, local, latent), *attention_output(model, local, heads * d_v)]
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
        *attention_output(model, local, heads * latent.v_head_dim),
    ]


def _latent_rotation(model: Transformer, local: ShardSizes, latent: LatentAttention) -> list[Piece]:
    """The rotation of every head's queries and of the one key that all heads share."""
    if model.inputs.positions != "rope":
        return []
    return [rotary(local, (local.heads + 1) * latent.qk_rope_head_dim)]


def _latent_gate(model: Transformer, local: ShardSizes, latent: LatentAttention) -> list[Piece]:
    """The projection to one gate per head, or per element of its result, from the input that
    queries save, and the product of the gates with attention's result."""
    width = local.heads * latent.v_head_dim
    made = _latent_gates(model, local, latent)
    if not made:
        return []
    # Queries that are not compressed come from the same product.
    gates = []
    if latent.q_lora_rank:
        gates.append(column_linear(local, made, local.hidden, kept_input=False))
    return [*gates, attention_gate(local, width)]


def _latent_gates(model: Transformer, local: ShardSizes, latent: LatentAttention) -> int:
    """Number of gates of a token on latent attention's result."""
    if model.attention.attention_gate:
        return local.heads * latent.v_head_dim
    return local.heads if model.attention.head_gate else 0


def _latent_query(model: Transformer, local: ShardSizes, latent: LatentAttention) -> list[Piece]:
    """Projection of queries, through a compressed form if the model has one."""
    rows = local.norm_tokens
    width = local.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if not latent.q_lora_rank:
        gates = _latent_gates(model, local, latent)
        return [column_linear(local, width + gates, local.hidden, kept_output=1.0)]
    return [
        linear(local.precision, rows, latent.q_lora_rank, local.hidden),
        small_norm(model, local, rows, latent.q_lora_rank),
        *recomputed(
            "mla_up_proj",
            [column_linear(local, width, latent.q_lora_rank, kept_output=1.0)],
        ),
    ]


def attention_output(
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
