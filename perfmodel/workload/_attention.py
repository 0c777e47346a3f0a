"""Attention as a sub-layer: projections, core, output projection."""

from perfmodel.ops import LATENT_DECODE, Attention, Gemm
from perfmodel.spec import LatentAttention, Transformer
from perfmodel.workload._attention_core import attention_core
from perfmodel.workload._linear import adapter, column_linear, linear, row_linear
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, pointwise, recomputed
from perfmodel.workload._pointwise import attention_gate, attention_layout, head_norm, rotary, small_norm


def self_attention(
    model: Transformer, local: Local, *, causal: bool, window: int = 0, reduced: bool = True
) -> list[Piece]:
    """Multi-head or grouped-query attention, or multi-head latent attention where the model has it.

    Args:
        reduced: False where the result of tensor-parallel ranks stays a sum over these (`perfmodel.spec.Transformer`,
            `parallel_blocks`, which latent attention does not go with).
    """
    if model.latent_attention is not None:
        if local.job.cached_tokens and local.seq_len == 1:
            return _absorbed_attention(model, local, model.latent_attention)
        return _latent_attention(model, local, model.latent_attention, causal=causal, window=window)
    d, heads, kv = model.head_dim, local.heads, local.kv_heads
    width = (heads * (2 if model.attention_gate else 1) + 2 * kv) * d
    return [
        column_linear(local, width, local.hidden, bias=model.bias or model.qkv_bias,
                      kept_output=_kept_share(local), shares_input=local.job.adapter_rank > 0),
        *adapter(local, width, local.hidden),
        *head_norm(model, local),
        *attention_layout(model, local),
        *rotary(model, local, (heads + kv) * d),
        attention_core(model, local, kv_heads=heads if local.job.repeated_keys else kv, d_qk=d, d_v=d,
                       seq_kv=local.keys, causal=causal, window=window),
        *attention_gate(model, local, heads * d),
        *_output(model, local, heads * d, reduced=reduced),
    ]  # fmt: skip


def _kept_share(local: Local) -> float:
    """Of queries, keys and values: in 8-bit attention their narrow copies are kept alone."""
    return 1 / local.act_bytes if local.job.fp8_attention else 1.0


def cross_attention(model: Transformer, local: Local, memory_len: int) -> list[Piece]:
    """Decoder queries over the encoder's output of `memory_len` tokens per sequence (T5).

    All decoder layers share that output, so none of them counts it as kept.
    """
    d, heads, kv = model.head_dim, local.heads, local.kv_heads
    memory_tokens = local.shard.micro_batch * memory_len // local.shard.cp
    return [
        column_linear(local, heads * d, local.hidden, bias=model.bias, kept_output=1.0),
        column_linear(local, 2 * kv * d, local.hidden, bias=model.bias, tokens=memory_tokens,
                      kept_input=False, kept_output=1.0),
        attention_core(model, local, kv_heads=kv, d_qk=d, d_v=d, seq_kv=memory_len, causal=False, window=0),
        *_output(model, local, heads * d),
    ]  # fmt: skip


def _latent_attention(
    model: Transformer, local: Local, latent: LatentAttention, *, causal: bool, window: int
) -> list[Piece]:
    """Multi-head latent attention as it is trained, keys and values expanded to all heads
    (DeepSeek-V2, arXiv 2405.04434, section 2.1).

    Down projections are replicated over tensor-parallel ranks and run on the rank's part of the
    sequence; up projections are column-parallel and gather the compressed activations only.
    """
    heads, rows = local.heads, local.norm_tokens
    rope, rank = latent.qk_rope_head_dim, latent.kv_lora_rank
    d_qk, d_v = latent.qk_nope_head_dim + rope, latent.v_head_dim
    query = _latent_query(model, local, latent)
    # keys of all heads with the shared rotary part appended, and values
    expanded = float(local.tokens * heads * (d_qk + d_v) * local.act_bytes)
    return [
        *query,
        linear(local.precision, rows, rank + rope, local.hidden, kept_input=0.0),
        small_norm(model, local, rows, rank),
        *recomputed("mla_up_proj", [
            column_linear(local, heads * (latent.qk_nope_head_dim + d_v), rank),
            *rotary(model, local, (heads + 1) * rope),
            pointwise(local.precision, [("add", 1)], local.tokens, heads * d_qk, saved_bytes=expanded),
        ]),
        attention_core(model, local, kv_heads=heads, d_qk=d_qk, d_v=d_v, seq_kv=local.keys, causal=causal,
                       window=window),
        *_output(model, local, heads * d_v),
    ]  # fmt: skip


def _absorbed_attention(model: Transformer, local: Local, latent: LatentAttention) -> list[Piece]:
    """Latent attention of one new token per sequence over the cache of compressed keys and values, whose expansion is
    absorbed into queries and results: all heads share one key of rank + rope elements, the first of which are the value
    (DeepSeek-V2, arXiv 2405.04434, section 2.1.2 and appendix C)."""
    heads, rows = local.heads, local.tokens
    rope, rank, nope = latent.qk_rope_head_dim, latent.kv_lora_rank, latent.qk_nope_head_dim

    def absorbed(n: int, k: int) -> Piece:
        op = Gemm(op="bmm", dtype=local.precision.act_dtype, batch=heads, m=rows, n=n, k=k)
        return Piece(forward=(op,), params=heads * n * k)

    core = Attention(
        op="flash_attention", dtype=local.precision.act_dtype, batch=local.shard.micro_batch, heads=heads, kv_heads=1,
        seq_q=1, seq_kv=local.keys, head_dim=rank + rope, head_dim_v=rank, phase=LATENT_DECODE,
    )  # fmt: skip
    return [
        *_latent_query(model, local, latent),
        linear(local.precision, rows, rank + rope, local.hidden),
        small_norm(model, local, rows, rank),
        *rotary(model, local, (heads + 1) * rope),
        absorbed(rank, nope),
        Piece(forward=(core,)),
        absorbed(latent.v_head_dim, rank),
        *_output(model, local, heads * latent.v_head_dim),
    ]


def _latent_query(model: Transformer, local: Local, latent: LatentAttention) -> list[Piece]:
    rows, width = local.norm_tokens, local.heads * (latent.qk_nope_head_dim + latent.qk_rope_head_dim)
    if not latent.q_lora_rank:
        return [column_linear(local, width, local.hidden, kept_output=1.0)]
    return [
        linear(local.precision, rows, latent.q_lora_rank, local.hidden),
        small_norm(model, local, rows, latent.q_lora_rank),
        *recomputed("mla_up_proj", [column_linear(local, width, latent.q_lora_rank, kept_output=1.0)]),
    ]


def _output(model: Transformer, local: Local, width: int, *, reduced: bool = True) -> list[Piece]:
    beside = adapter(local, local.hidden, width, row_parallel=True)
    sinks = [Piece(params=local.heads)] if model.attention_sinks else []
    return [*sinks, row_linear(local, local.hidden, width, bias=model.bias, communicates=reduced), *beside]


def attention_weights(model: Transformer) -> int:
    """Elements of the projections of one attention."""
    h, a, d = model.hidden, model.heads, model.head_dim
    if latent := model.latent_attention:
        d_qk = latent.qk_nope_head_dim + latent.qk_rope_head_dim
        q_rank, rank = latent.q_lora_rank, latent.kv_lora_rank
        query = q_rank * (h + a * d_qk) if q_rank else h * a * d_qk
        key_value = h * (rank + latent.qk_rope_head_dim)
        key_value += rank * a * (latent.qk_nope_head_dim + latent.v_head_dim)
        return query + key_value + a * latent.v_head_dim * h
    return h * d * ((3 if model.attention_gate else 2) * a + 2 * model.kv_heads)
