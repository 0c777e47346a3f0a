"""The dense feed-forward half of a layer."""

from perfmodel.spec import Transformer
from perfmodel.workload._linear import column_linear, row_linear
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, recomputed
from perfmodel.workload._pointwise import activation


def feed_forward(model: Transformer, local: Local) -> list[Piece]:
    """Column-parallel product (gate and value in one), activation, row-parallel product."""
    width = local.ffn * (2 if model.gated_ffn else 1)
    pieces = [
        column_linear(local, width, local.hidden, bias=model.bias),
        activation(model, local, local.tokens, local.ffn),
        row_linear(local, local.hidden, local.ffn, bias=model.bias),
    ]
    return recomputed("mlp", pieces)
