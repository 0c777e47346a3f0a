"""Several residual streams (alternating updates), and a low-rank residual beside attention, both of
Gemma 3n."""

from dataclasses import replace

from perfmodel.spec import Transformer
from perfmodel.spec.parts import Streams
from perfmodel.workload._linear import linear
from perfmodel.workload._local import ShardSizes
from perfmodel.workload._piece import Piece, pointwise
from perfmodel.workload._pointwise import norm_params, small_norm


def updates(model: Transformer, local: ShardSizes, streams: Streams) -> list[Piece]:
    """Prediction of all streams before a layer, their correction behind it, and the low-rank
    residual (transformers models/gemma3n/modeling_gemma3n.py `Gemma3nTextAltUp`,
    `Gemma3nTextLaurelBlock`)."""
    hidden, rows, n = local.hidden, local.norm_tokens, streams.count
    all_streams = n * hidden
    kept_bytes = float(rows * all_streams * local.act_bytes)

    # Coefficients are made of the normed hidden state twice, before the layer and behind it, by the
    # same weights.
    router = [small_norm(model, local, rows, hidden), linear(local.precision, rows, n, hidden)]
    again = [replace(piece, params=0) for piece in router]
    predicted = pointwise(
        local.precision,
        [("mul_scalar", 1), ("add", 2)],
        rows,
        all_streams,
        params=n**3,
        saved_bytes=kept_bytes,
    )
    # What the layer changed is added to every stream by its own coefficient; the first is scaled
    # besides.
    corrected = pointwise(
        local.precision,
        [("mul", 2), ("add", 2)],
        rows,
        all_streams,
        params=n * n + hidden,
        saved_bytes=kept_bytes,
    )
    low_rank = [
        linear(local.precision, rows, streams.low_rank, hidden),
        linear(local.precision, rows, hidden, streams.low_rank),
        small_norm(model, local, rows, hidden),
        pointwise(local.precision, [("add", 2)], rows, hidden),
    ]
    return [*router, predicted, *low_rank, *again, corrected]


def stream_projections(local: ShardSizes, streams: Streams) -> list[Piece]:
    """Projections of the hidden state to the further streams, or of these to what the head sees."""
    return [linear(local.precision, local.norm_tokens, local.hidden, local.hidden)] * (
        streams.count - 1
    )


def update_weights(hidden: int, streams: Streams) -> int:
    """Elements of weights that a token passes in the updates of a layer."""
    return 2 * hidden * (streams.low_rank + streams.count)


def update_parameters(model: Transformer, streams: Streams) -> int:
    """Parameters of the updates of a layer, with their norms."""
    n = streams.count
    coefficients = n**3 + n * n + model.hidden * (n + 1)
    return 2 * model.hidden * streams.low_rank + coefficients + 2 * norm_params(model, model.hidden)


def projection_weights(hidden: int, streams: Streams) -> int:
    """Elements of the projections at one end of the layers."""
    return (streams.count - 1) * hidden * hidden
