"""Diffusion transformers that read text: as a stream beside the image's (MMDiT), or by
cross-attention.

A layer of two streams has norms, modulations, projections and a feed-forward for each, and one
attention over the tokens of both (Stable Diffusion 3, arXiv 2403.03206, section 4, figure 2). A
layer of one stream has attention beside a feed-forward for all tokens, whose last products are one
(FLUX.1, black-forest-labs/flux src/flux/modules/layers.py `SingleStreamBlock`).
"""

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.errors import LayoutError
from perfmodel.spec import Transformer
from perfmodel.spec.parts import STREAM_LAYERS, TextCondition
from perfmodel.workload._attention import (
    attention_output,
    cross_attention,
    queries_keys_and_values,
)
from perfmodel.workload._attention_core import attention_core
from perfmodel.workload._block import BlockOps
from perfmodel.workload._layer_block import layer_block
from perfmodel.workload._linear import adapters, column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes, local_sizes
from perfmodel.workload._piece import Piece, pointwise, recomputed
from perfmodel.workload._pointwise import (
    activation,
    feed_forward,
    inner_outputs,
    norm,
    residual,
    rotary,
    small_norm,
    sub_layer_input,
    sub_layer_output,
    unconditioned_norm_params,
)
from perfmodel.workload._weights import attention_weights, ffn_weights, key_value_weights

# --- sizes and input


def text_sizes(model: Transformer, local: ShardSizes, text: TextCondition) -> ShardSizes:
    """Sizes of the stream of text on the rank that has `local` of the image.

    Raises:
        LayoutError: if the layout divides the text's tokens into uneven parts, or lengths vary.
    """
    if local.job.varied_lengths:
        raise LayoutError(
            f"{model.name}: varied lengths are not supported for models of text and image; leave mean_tokens out"
        )
    # Context-parallel ranks divide both streams, but each makes keys and values of all the text for
    # its own cross-attention (Wan 2.1 wan/distributed/xdit_context_parallel.py
    # `usp_dit_forward`, which divides the video alone).
    shard = local.shard
    if "X" in "".join(model.stack):
        shard = replace(shard, cp=1)
    return replace(
        local_sizes(model, local.job, shard, text.tokens, of="number of text tokens"),
        precision=local.precision,
    )


def _joint_sizes(model: Transformer, image: ShardSizes, text: TextCondition) -> ShardSizes:
    """Sizes of both streams as one."""
    joint = local_sizes(model, image.job, image.shard, image.seq_len + text.tokens)
    return replace(joint, precision=image.precision)


def text_pieces(model: Transformer, local: ShardSizes, text: TextCondition) -> list[Piece]:
    """Projection of the text's tokens to the hidden size, at the rank's part of them."""
    # Encoders are not trained in the step, so what they give needs no gradient.
    h, rows = local.hidden, local.norm_tokens
    pieces = []
    if text.input_norm:
        scaled = small_norm(model, local, rows, text.width)
        pieces.append(replace(scaled, params=text.width))
    first = linear(local.precision, rows, h, text.width, bias=h)
    pieces.append(first if text.input_norm else replace(first, backward_input=()))
    for _ in range(text.projections - 1):
        gelu = pointwise(local.precision, [("gelu", 1)], rows, h, saved_bytes=local.norm_bytes)
        pieces += [gelu, linear(local.precision, rows, h, h, bias=h)]

    # All cross-attentions need the same result for the gradients of their weights.
    if "X" in "".join(model.stack):
        pieces.append(Piece(saved_bytes=local.norm_bytes))
    return pieces


# --- layers


def cross_attention_to_text(
    model: Transformer, local: ShardSizes, text: TextCondition
) -> list[Piece]:
    """Cross-attention to the text, which no condition modulates, with its residual addition."""
    pieces = []
    whole_text = replace(local, shard=replace(local.shard, cp=1))
    attention = cross_attention(model, whole_text, text.tokens)
    if text.cross_norm:
        before = replace(norm(model, local), params=unconditioned_norm_params(model, local.hidden))
        pieces = recomputed("layernorm", [before], [attention[0].input_bytes])
    return [*pieces, *attention, residual(model, local)]


def stream_block(
    model: Transformer, image: ShardSizes, text: TextCondition, letter: str, name: str
) -> BlockOps:
    """A layer of the streams of text and image, by its letter of `MIXERS`."""
    stream = text_sizes(model, image, text)
    joint = _joint_sizes(model, image, text)
    if letter == "N":
        pieces = _one_stream(model, joint)
        widest = joint.tokens * (joint.ffn + joint.heads * model.value_dim)
    else:
        pieces = _two_streams(model, image, stream, joint, last=letter == "O")
        widest = max(joint.tokens * joint.hidden, image.tokens * image.ffn)
    return layer_block(name, joint, pieces, widest=widest)


def _two_streams(
    model: Transformer, image: ShardSizes, text: ShardSizes, joint: ShardSizes, *, last: bool
) -> list[Piece]:
    """A layer of two streams.

    Args:
        last: only the image leaves the layer. Of the text it makes queries, keys and values.
    """
    pieces: list[Piece] = []
    for stream in (text, image):
        ends = last and stream is text
        projections = queries_keys_and_values(model, stream.for_module("attention"))
        pieces += sub_layer_input(
            model, stream, projections[0].input_bytes, vectors=2 if ends else 3
        )
        pieces += projections

    # Queries, keys and values of both streams are copied into tensors of both.
    heads, kv_heads = joint.heads, joint.kv_heads
    d, d_v = model.head_dim, model.value_dim
    pieces.append(_copied(joint, heads * d + kv_heads * (d + d_v)))
    pieces += _joint_attention(model, joint)

    for stream in (image,) if last else (text, image):
        pieces += attention_output(model, stream.for_module("attention"), heads * d_v)
        pieces += sub_layer_output(model, stream)
        inner = feed_forward(model, stream)
        pieces += sub_layer_input(model, stream, inner[0].input_bytes)
        pieces += inner
        pieces += sub_layer_output(model, stream)
    return pieces


def _one_stream(model: Transformer, local: ShardSizes) -> list[Piece]:
    """A layer of one stream: attention beside a feed-forward, whose results pass one product."""
    job, bias = local.job, model.block.bias
    projections = queries_keys_and_values(model, local.for_module("attention"))
    first = column_linear(
        local,
        local.ffn * model.inner_projections,
        local.hidden,
        bias=bias,
        kept_input=False,
        communicates=False,
    )
    results = local.heads * model.value_dim
    last = row_linear(local, local.hidden, results + local.ffn, bias=bias)
    first_adapters: list[Piece] = []
    last_adapters: list[Piece] = []
    if job.fine_tuning.adapter_rank:
        outputs = inner_outputs(model, local.ffn)
        first_adapters = adapters(local, list(outputs.items()), local.hidden)
        last_adapters = adapters(
            local, [("linear_fc2", local.hidden)], results + local.ffn, row_parallel=True
        )

    # Attention's result is copied beside the activations, and kept by fused attention as well.
    copied = _copied(local, results + local.ffn)
    if job.kernels.flash_attention:
        copied = replace(copied, saved_bytes=float(local.tokens * results * local.act_bytes))
    return [
        *sub_layer_input(model, local, projections[0].input_bytes),
        *projections,
        first,
        *first_adapters,
        *_joint_attention(model, local),
        *recomputed("mlp_act", [activation(model, local, local.tokens, local.ffn)]),
        copied,
        *last_adapters,
        last,
        *sub_layer_output(model, local),
    ]


def _joint_attention(model: Transformer, joint: ShardSizes) -> list[Piece]:
    """Rotation and the core of attention over the tokens of both streams."""
    pieces = []
    if model.inputs.positions == "rope":
        pieces.append(rotary(joint, (joint.heads + joint.kv_heads) * model.head_dim))
    core = attention_core(
        model,
        joint.for_module("attention"),
        kv_heads=joint.heads if joint.job.kernels.repeated_keys else joint.kv_heads,
        d_qk=model.head_dim,
        d_v=model.value_dim,
        seq_kv=joint.seq_len,
        causal=False,
        window=0,
    )
    return [*pieces, core]


def _copied(local: ShardSizes, width: int) -> Piece:
    """A copy of `width` elements of every token; of their gradients, another."""
    return pointwise(local.precision, [("mul_scalar", 1)], local.tokens, width)


# --- weights and parameters


def text_input_weights(hidden: int, text: TextCondition) -> int:
    """Elements of the weights that a token of text passes before the layers."""
    return text.width * hidden + (text.projections - 1) * hidden * hidden


def image_weights(model: Transformer, letters: Mapping[str, int]) -> int:
    """Elements of the weights that a token of the image passes in layers that read text."""
    layers = sum(letters[letter] for letter in STREAM_LAYERS)
    in_stream = attention_weights(model) + ffn_weights(model, model.ffn_hidden)
    crossing = attention_weights(model) - key_value_weights(model)
    return layers * in_stream + letters["X"] * crossing


def text_weights(model: Transformer, letters: Mapping[str, int]) -> int:
    """Elements of the weights that a token of text passes in the layers."""
    attention = attention_weights(model)
    output = model.heads * model.value_dim * model.hidden
    in_stream = attention + ffn_weights(model, model.ffn_hidden)
    return (
        (letters["D"] + letters["N"]) * in_stream
        + letters["O"] * (attention - output)
        + letters["X"] * key_value_weights(model)
    )


def modulation_vectors(letters: Mapping[str, int]) -> int:
    """Number of conditioning vectors of all layers: scale, shift and gate of each sub-layer."""
    # Two sub-layers of each stream; of text that ends, scale and shift before attention alone.
    vectors_of = {"D": 12, "O": 8, "X": 0}
    return sum(count * vectors_of.get(letter, 3) for letter, count in letters.items())
