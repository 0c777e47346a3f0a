"""Token embeddings of every layer by itself (Gemma 3n and Gemma 4)."""

from dataclasses import replace

from perfmodel.spec import Transformer
from perfmodel.spec.parts import LayerEmbedding
from perfmodel.workload._linear import linear
from perfmodel.workload._local import ShardSizes, padded_vocab
from perfmodel.workload._lookup import token_lookup
from perfmodel.workload._piece import Piece, memory, pointwise
from perfmodel.workload._pointwise import activation, norm_params, small_norm


def lookup_of_layers(
    model: Transformer, local: ShardSizes, embedding: LayerEmbedding
) -> list[Piece]:
    """Rows of the table for all layers at once, to which a projection of the token's embedding is
    added (transformers models/gemma4/modeling_gemma4.py `project_per_layer_inputs`)."""
    layers = layers_with_rows(model)
    width = layers * embedding.width
    table = replace(local, hidden=width, vocab=padded_vocab(embedding.vocab, local.tp) // local.tp)
    rows = local.norm_tokens
    summed = memory(local.precision, "add", rows, width, 2)
    return [
        token_lookup(table, params=table.vocab * width),
        linear(local.precision, rows, width, local.hidden),
        # One norm of the width of a row serves all layers.
        replace(
            small_norm(model, local, rows * layers, embedding.width),
            params=norm_params(model, embedding.width),
        ),
        Piece(
            forward=(summed,),
            backward_input=(summed,),
            saved_bytes=float(rows) * width * local.act_bytes,
        ),
    ]


def gated_embedding(
    model: Transformer, local: ShardSizes, embedding: LayerEmbedding
) -> list[Piece]:
    """The layer's rows times an activated projection of the hidden state, projected back to its
    size."""
    rows, width = local.norm_tokens, embedding.width
    gate = linear(local.precision, rows, width, local.hidden)
    product = pointwise(
        local.precision,
        [("mul", 2)],
        rows,
        width,
        saved_bytes=float(rows) * width * local.act_bytes,
    )
    ungated = replace(model, gated_ffn=False, bias=False)
    return [
        gate,
        activation(ungated, local, rows, width),
        product,
        linear(local.precision, rows, local.hidden, width),
        small_norm(model, local, rows, local.hidden),
    ]


def layers_with_rows(model: Transformer) -> int:
    """Number of layers that have an embedding of the token of their own."""
    return "".join(model.stack).count("P")


def gate_weights(hidden: int, embedding: LayerEmbedding) -> int:
    """Elements of the two projections in a layer."""
    return 2 * hidden * embedding.width


def lookup_parameters(model: Transformer, embedding: LayerEmbedding) -> tuple[int, int]:
    """Elements of the table and the projection beside it, and parameters of the norm."""
    width = layers_with_rows(model) * embedding.width
    return (embedding.vocab + model.hidden) * width, norm_params(model, embedding.width)
