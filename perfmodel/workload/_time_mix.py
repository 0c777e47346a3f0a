"""RWKV-4 (Peng et al., arXiv 2305.13048): time mixing and channel mixing, sharded by channels."""

from dataclasses import replace

from perfmodel.errors import Reason
from perfmodel.ops import Recurrence
from perfmodel.spec import Transformer
from perfmodel.spec.parts import TimeMix
from perfmodel.workload._linear import column_linear, row_linear
from perfmodel.workload._local import ShardSizes, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, pointwise
from perfmodel.workload._pointwise import gate


def time_mixing(model: Transformer, local: ShardSizes, mix: TimeMix) -> list[Piece]:
    """Token shift, projections to receptances, keys and values, the scan, the gate, output
    projection (section 3.1.2).

    Raises:
        LayoutError: channels that tensor parallelism does not divide, or context parallelism,
            through which the state would have to be passed.
    """
    tp = local.tp
    divide(model, Reason.HEADS, f"time_mix inner={mix.inner} are", mix.inner, "tp", tp)
    require_whole_sequence(model, local, "time mixing")
    inner = mix.inner // tp

    # Each projection has an input of its own, a mixture of a token and the one before it; they are
    # gathered together.
    shift = _token_shift(local, mixtures=3)
    first = column_linear(local, inner, local.hidden, kept_output=1.0)
    other = column_linear(local, inner, local.hidden, kept_output=1.0, communicates=False)
    gated = pointwise(
        local.precision,
        gate(local),
        local.tokens,
        inner,
        saved_bytes=float(local.tokens * inner * local.act_bytes),
    )
    return [
        shift,
        first,
        other,
        other,
        _scan(local, inner),
        gated,
        row_linear(local, local.hidden, inner),
    ]


def channel_mixing(model: Transformer, local: ShardSizes) -> list[Piece]:
    """Token shift, a feed-forward with a squared ReLU, and a gate of the hidden size (section
    3.1.3)."""
    require_whole_sequence(model, local, "channel mixing")
    tensor = float(local.tokens * local.ffn * local.act_bytes)
    receptance = column_linear(
        local, local.hidden // local.tp, local.hidden, kept_output=1.0, communicates=False
    )
    squared = pointwise(
        local.precision, [("relu", 1), ("mul", 1)], local.tokens, local.ffn, saved_bytes=tensor
    )
    gated = pointwise(
        local.precision,
        gate(local),
        local.norm_tokens,
        local.hidden,
        saved_bytes=local.norm_bytes,
    )
    return [
        _token_shift(local, mixtures=2),
        column_linear(local, local.ffn, local.hidden),
        squared,
        receptance,
        row_linear(local, local.hidden, local.ffn),
        gated,
    ]


def _token_shift(local: ShardSizes, mixtures: int) -> Piece:
    """Mixtures of every token with the one before it, each with a trained share per channel. Both
    are kept by what gives the input, and the mixtures by the products that take them."""
    mixture = pointwise(local.precision, [("mul", 2)] * mixtures, local.norm_tokens, local.hidden)
    return replace(mixture, params=mixtures * local.hidden)


def _scan(local: ShardSizes, inner: int) -> Piece:
    """The scan over tokens, which updates a numerator and a denominator in every channel.

    It has no matrix products. Forward reads keys and values and writes the means; backward reads
    these and their gradient, and writes the gradients of keys and values (RWKV-LM cuda/wkv_cuda.cu,
    `kernel_forward` and `kernel_backward`).
    """
    forward = Recurrence(
        op="selective_scan",
        dtype=local.precision.wide_dtype,
        tokens=local.tokens,
        products_per_token=2 * inner,
        bytes_per_token=local.act_bytes * 3 * inner,
    )
    backward = replace(forward, bytes_per_token=local.act_bytes * 6 * inner, pass_="bwd")
    # A decay, and a bonus for the current token.
    return Piece(
        forward=(forward,),
        backward_input=(backward,),
        params=2 * inner,
        saved_bytes=float(local.tokens * inner * local.act_bytes),
    )


def time_mix_weights(hidden: int, mix: TimeMix) -> int:
    """Elements of the four projections."""
    return 4 * hidden * mix.inner


def time_mix_parameters(hidden: int, mix: TimeMix) -> int:
    """Parameters of one time mixing, without the layer's norm."""
    return time_mix_weights(hidden, mix) + 3 * hidden + 2 * mix.inner


def channel_mix_weights(hidden: int, inner: int) -> int:
    """Elements of the three projections."""
    return 2 * hidden * inner + hidden * hidden


def channel_mix_parameters(hidden: int, inner: int) -> int:
    """Parameters of one channel mixing, without the layer's norm."""
    return channel_mix_weights(hidden, inner) + 2 * hidden
