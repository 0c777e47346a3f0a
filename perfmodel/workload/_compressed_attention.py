"""Attention to compressed keys, and hyper-connections of residual streams, both of DeepSeek-V4
(transformers models/deepseek_v4/modeling_deepseek_v4.py)."""

from dataclasses import replace
from typing import Final, NamedTuple

from perfmodel.errors import Reason
from perfmodel.ops import Gemm
from perfmodel.spec import Transformer
from perfmodel.spec.parts import CompressedAttention, HyperConnections
from perfmodel.workload._attention_core import attention_core
from perfmodel.workload._linear import column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, memory, pointwise
from perfmodel.workload._pointwise import norm_params, rotary, small_norm

COMPRESSED: Final = "YFG"
"""Letters of `MIXERS` for layers with this attention."""


class _Compression(NamedTuple):
    """How one kind of layer compresses keys."""

    rate: int
    """Tokens of a compressed key; 0 if there are none."""
    series: int
    """Keys that each token takes part in: of its own window, and of the next."""
    topk: int
    """Compressed keys that a query sees at most; 0: all before it."""


def _compression(parts: CompressedAttention, letter: str) -> _Compression:
    """The compression in layers with this letter."""
    if letter == "F":
        return _Compression(parts.sparse_rate, 2, parts.index_topk)
    if letter == "G":
        return _Compression(parts.heavy_rate, 1, 0)
    return _Compression(0, 0, 0)


def compressed_attention(
    model: Transformer, local: ShardSizes, parts: CompressedAttention, letter: str
) -> list[Piece]:
    """Compressed queries, the shared key, compressed keys and their indexer, attention, and the
    output projection in two steps.

    Raises:
        LayoutError: groups of the output that tensor parallelism does not divide, or context
            parallelism, through which windows of compressed keys would have to be passed.
    """
    groups = parts.output_groups
    divide(model, Reason.HEADS, f"output_groups={groups} are", groups, "tp", local.tp)
    require_whole_sequence(model, local, "attention to compressed keys")
    heads, rows, d = local.heads, local.norm_tokens, model.head_dim
    compression = _compression(parts, letter)

    # Narrow projections run on the rank's part of the sequence, as those of latent attention. The
    # first keeps the hidden state for all.
    queries = [
        linear(local.precision, rows, parts.q_lora_rank, local.hidden),
        small_norm(model, local, rows, parts.q_lora_rank),
        column_linear(local, heads * d, parts.q_lora_rank, kept_output=1.0),
        # Every head's query is normalised, without a scale.
        pointwise(local.precision, [("norm", 1)], local.tokens, heads * d),
    ]
    key = [
        linear(local.precision, rows, d, local.hidden, kept_input=0.0),
        small_norm(model, local, rows, d),
    ]
    # The result is rotated back.
    rotated = [rotary(local, (2 * heads + 1) * min(parts.rope_dim, d))]

    # Queries see the window, and the compressed keys before it.
    core = attention_core(
        model,
        local,
        kv_heads=1,
        d_qk=d,
        d_v=d,
        seq_kv=local.keys,
        causal=model.attention.causal,
        window=model.attention.window,
    )
    cores = [core]
    compressed: list[Piece] = []
    if compression.rate:
        compressed = _compressed_keys(model, local, compression, d)
        seen = max(1, round(mean_compressed_keys(parts, letter, local.keys)))
        further = attention_core(
            model, local, kv_heads=1, d_qk=d, d_v=d, seq_kv=seen, causal=False, window=0
        )
        cores.append(further)
    if letter == "F":
        compressed += _indexer(model, local, parts)

    # Each group of heads has a product of its own; one more joins them. The first keeps the result.
    local_groups = groups // local.tp
    grouped = linear(local.precision, local.tokens, parts.output_rank, heads * d // local_groups)
    return [
        *queries,
        *key,
        *compressed,
        *rotated,
        Piece(params=heads),
        *cores,
        *[grouped] * local_groups,
        row_linear(local, local.hidden, local_groups * parts.output_rank),
    ]


def _compressed_keys(
    model: Transformer, local: ShardSizes, compression: _Compression, width: int
) -> list[Piece]:
    """Compressed keys of `width` elements: products to keys and to their weights, a softmax of
    these over the tokens of a window, the weighted sum, and its norm."""
    rows = local.norm_tokens
    elements = compression.series * width
    n_keys = max(1, rows // compression.rate)
    return [
        linear(local.precision, rows, 2 * elements, local.hidden, kept_input=0.0, kept_output=1.0),
        pointwise(
            local.precision,
            [("softmax", 1), ("mul", 2)],
            rows,
            elements,
            params=compression.rate * elements,
            saved_bytes=float(rows * elements * local.act_bytes),
        ),
        small_norm(model, local, n_keys, width),
    ]


def _indexer(model: Transformer, local: ShardSizes, parts: CompressedAttention) -> list[Piece]:
    """Compressed keys of the indexer, its queries and a weight per head, scores of all compressed
    keys, and the choice, which has no gradient (as `perfmodel.workload._indexer`)."""
    rows, width, precision = local.norm_tokens, parts.index_dim, local.precision
    keys = _compressed_keys(model, local, _compression(parts, "F"), width)
    queries = linear(
        precision,
        rows,
        parts.index_heads * width,
        parts.q_lora_rank,
        kept_input=0.0,
        kept_output=1.0,
    )
    weights = linear(
        precision, rows, parts.index_heads, local.hidden, kept_input=0.0, kept_output=1.0
    )
    n_keys = max(1, local.keys // parts.sparse_rate)
    scores = Gemm(
        op="bmm",
        dtype=precision.wide_dtype,
        batch=local.sequences,
        m=local.seq_local,
        n=n_keys,
        k=parts.index_heads * width,
    )
    chosen = memory(precision, "softmax", local.sequences * local.seq_local, n_keys, dtype="fp32")
    detached = [replace(piece, backward_input=()) for piece in (queries, weights)]
    return [
        *keys,
        *detached,
        Piece(forward=(scores, chosen), backward_input=(scores, scores)),
    ]


def mean_compressed_keys(parts: CompressedAttention, letter: str, tokens: float) -> float:
    """Mean number of compressed keys that the queries of a sequence see: one for every whole window
    before them, at most those that are selected."""
    compression = _compression(parts, letter)
    if not compression.rate:
        return 0.0
    n_keys = tokens // compression.rate
    topk = compression.topk or n_keys
    # Query t sees t / rate keys until it sees `topk`.
    growing = min(n_keys, topk)
    seen = (
        compression.rate * growing * growing / 2 + max(0, n_keys - topk) * compression.rate * topk
    )
    return seen / tokens


def compressed_products(
    model: Transformer, parts: CompressedAttention, letter: str, tokens: float
) -> tuple[float, float]:
    """Multiply-adds of a sequence's scores and contexts with compressed keys and of its indexer's
    scores: with all compressed keys, and with visible ones."""
    compression = _compression(parts, letter)
    if not compression.rate:
        return 0.0, 0.0
    width = 2 * model.heads * model.head_dim
    n_keys = tokens // compression.rate
    full = float(tokens) * n_keys * width
    visible = tokens * mean_compressed_keys(parts, letter, tokens) * width
    if letter == "F":
        scores = float(tokens) * n_keys * parts.index_heads * parts.index_dim
        return full + scores, visible + scores / 2
    return full, visible


def compressed_weights(model: Transformer, parts: CompressedAttention, letter: str) -> int:
    """Elements of all projections of one attention."""
    h, d, a, q = model.hidden, model.head_dim, model.heads, parts.q_lora_rank
    weights = h * q + q * a * d + h * d
    weights += a * d * parts.output_rank + parts.output_groups * parts.output_rank * h
    # A series of compressed keys has two products, to the keys and to their weights.
    projections = 2 * _compression(parts, letter).series
    weights += h * projections * d
    if letter == "F":
        weights += h * projections * parts.index_dim
        weights += parts.index_heads * (q * parts.index_dim + h)
    return weights


def compressed_parameters(model: Transformer, parts: CompressedAttention, letter: str) -> int:
    """Parameters of one attention: projections, norms, a sink for each head, and what is added to
    the weights of a window's tokens."""
    compression = _compression(parts, letter)
    widths = [model.head_dim] if compression.rate else []
    if letter == "F":
        widths.append(parts.index_dim)
    of_windows = 0
    for width in widths:
        of_windows += compression.rate * compression.series * width + norm_params(model, width)
    norms = norm_params(model, parts.q_lora_rank) + norm_params(model, model.head_dim)
    return compressed_weights(model, parts, letter) + norms + model.heads + of_windows


def compressed_cache_bytes(
    model: Transformer, letter: str, tokens: int, element_bytes: float
) -> float:
    """Bytes of a sequence's shared keys in one layer: those of the window, and compressed ones."""
    parts = model.hybrid.compressed_attention
    if parts is None:
        return 0.0
    compression = _compression(parts, letter)
    elements = float(min(tokens, model.attention.window) * model.head_dim)
    if compression.rate:
        width = model.head_dim + (parts.index_dim if letter == "F" else 0)
        elements += tokens // compression.rate * width
    return elements * element_bytes


# --- hyper-connections
# -------------------------------------------------------------------------------------------------


def hyper_connection(local: ShardSizes, hyper: HyperConnections) -> list[Piece]:
    """Weights around one sub-layer made of all streams, their weighted sum in front of it, and
    behind it the mixture of streams that its result is added to.

    All are made of normalised streams in 32 bits; the addition to one stream counts as the
    residual's.
    """
    rows = local.norm_tokens
    width = hyper.count * local.hidden
    streams_bytes = float(rows * width * local.act_bytes)
    return [
        pointwise(local.precision, [("norm", 1)], rows, width),
        linear(local.precision, rows, hyper.weights, width, bias=hyper.weights + hyper.scales),
        # Streams are read for the sum, and read and written for the mixture.
        pointwise(
            local.precision, [("mul", 1), ("mul", 2)], rows, width, saved_bytes=streams_bytes
        ),
    ]


def hyper_head(local: ShardSizes, hyper: HyperConnections) -> list[Piece]:
    """The weighted sum of streams that the final norm sees."""
    rows = local.norm_tokens
    width = hyper.count * local.hidden
    return [
        pointwise(local.precision, [("norm", 1)], rows, width),
        linear(local.precision, rows, hyper.count, width, bias=hyper.count + 1),
        pointwise(local.precision, [("mul", 1)], rows, width),
    ]


def hyper_weights(hidden: int, hyper: HyperConnections) -> int:
    """Elements of the product around one sub-layer."""
    return hyper.weights * hyper.count * hidden


def hyper_parameters(hidden: int, hyper: HyperConnections) -> int:
    """Parameters around one sub-layer: the product, and its bias; a scale each for weights into the
    sub-layer, out of it, and between streams."""
    return hyper_weights(hidden, hyper) + hyper.weights + hyper.scales


def hyper_head_parameters(hidden: int, hyper: HyperConnections) -> int:
    """Parameters of the sum in front of the head."""
    return hyper.count * hyper.count * hidden + hyper.count + 1
