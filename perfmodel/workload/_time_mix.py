"""RWKV: time mixing and channel mixing, sharded by channels or heads.

RWKV-4 (Peng et al., arXiv 2305.13048), RWKV-5 and 6 (arXiv 2404.05892) and RWKV-7 (arXiv
2503.14456).
"""

from dataclasses import replace

from perfmodel.errors import Reason
from perfmodel.ops import Recurrence
from perfmodel.spec import Transformer
from perfmodel.spec.parts import TimeMix
from perfmodel.workload._linear import column_linear, linear, row_linear
from perfmodel.workload._linear_attention import linear_recurrence, recurrence_of_time_mix
from perfmodel.workload._local import ShardSizes, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, pointwise
from perfmodel.workload._pointwise import gate


def _projections(local: ShardSizes, mix: TimeMix, *, adds_values: bool) -> list[Piece]:
    """Products that make receptances, keys and values, and those of gate, decays and rates."""
    inner, keys = mix.inner // local.tp, mix.key_channels // local.tp

    # Each projection has an input of its own, a mixture of a token and the one before it; they are
    # gathered together.
    receptances = column_linear(local, keys, local.hidden, kept_output=1.0)
    other_keys = column_linear(local, keys, local.hidden, kept_output=1.0, communicates=False)
    other = column_linear(local, inner, local.hidden, kept_output=1.0, communicates=False)
    pieces = [receptances, other_keys, other]

    # Further projections, full or through a few elements.
    if mix.gate:
        pieces.append(other)
    for rank, width in (
        (mix.gate_rank, inner),
        (mix.decay_rank, keys),
        (mix.rate_rank, keys),
        (mix.value_rank if adds_values else 0, inner),
    ):
        if rank:
            pieces += _low_rank(local, rank, width)
    return pieces


def time_mixing(
    model: Transformer, local: ShardSizes, mix: TimeMix, *, adds_values: bool = False
) -> list[Piece]:
    """Token shift, projections to receptances, keys and values, the recurrence, the gate, output
    projection.

    Args:
        adds_values: values of the first layer are added, as a narrow projection says (RWKV-7).

    Raises:
        LayoutError: channels or heads that tensor parallelism does not divide, or context
            parallelism, through which the state would have to be passed.
    """
    tp = local.tp
    unit, number = ("heads", mix.heads) if mix.heads else ("inner", mix.inner)
    divide(model, Reason.HEADS, f"time_mix {unit}={number} are", number, "tp", tp)
    require_whole_sequence(model, local, "time mixing")
    inner, keys = mix.inner // tp, mix.key_channels // tp

    pieces = [
        _token_shift(local, mixtures=mix.mixtures),
        *_shares_of_mixtures(local, mix),
        *_projections(local, mix, adds_values=adds_values),
    ]
    tensor = float(local.tokens * local.act_bytes)
    if mix.rate_rank:
        # Keys of unit length are what the state forgets; rates scale the keys that it is given.
        pieces.append(pointwise(local.precision, [("norm", 1), ("mul", 2)], local.tokens, keys))
    if adds_values:
        pieces.append(
            pointwise(
                local.precision, [("mul", 3)], local.tokens, inner, saved_bytes=tensor * inner
            )
        )
    if mix.heads:
        recurrence = recurrence_of_time_mix(mix)
        trained = _trained_numbers(mix, adds_values=adds_values) // tp
        pieces.append(linear_recurrence(local, recurrence, mix.heads // tp, params=trained))
        # The norm of every head has a scale and a shift for each of its channels.
        pieces.append(
            pointwise(
                local.precision,
                [("layer_norm", 1)],
                local.tokens,
                inner,
                params=2 * inner,
                saved_bytes=tensor * inner,
            )
        )
    else:
        pieces.append(_scan(local, inner))
    if not mix.heads or mix.gate or mix.gate_rank:
        # RWKV-4's receptances are the gate.
        pieces.append(
            pointwise(local.precision, gate(local), local.tokens, inner, saved_bytes=tensor * inner)
        )
    return [*pieces, row_linear(local, local.hidden, inner)]


def _low_rank(local: ShardSizes, rank: int, width: int) -> list[Piece]:
    """Two products through `rank` elements. The first is computed on every rank, as those of latent
    attention, the second is column-parallel."""
    return [
        linear(local.precision, local.norm_tokens, rank, local.hidden),
        column_linear(local, width, rank, kept_output=1.0),
    ]


def _shares_of_mixtures(local: ShardSizes, mix: TimeMix) -> list[Piece]:
    """Products that make the shares of mixtures of the token (RWKV-6, arXiv 2404.05892, section
    4.2): one to the narrow elements of all, and one back for each."""
    if not mix.mix_rank:
        return []
    number = mix.mixtures - 1
    narrow = linear(local.precision, local.norm_tokens, number * mix.mix_rank, local.hidden)
    back = linear(local.precision, local.norm_tokens, local.hidden, mix.mix_rank, kept_output=1.0)
    return [narrow, *[back] * number]


def channel_mixing(model: Transformer, local: ShardSizes) -> list[Piece]:
    """Token shift, a feed-forward with a squared ReLU, and a gate of the hidden size (section
    3.1.3), which RWKV-7 leaves out."""
    require_whole_sequence(model, local, "channel mixing")
    mix = model.hybrid.time_mix
    tensor = float(local.tokens * local.ffn * local.act_bytes)
    squared = pointwise(
        local.precision, [("relu", 1), ("mul", 1)], local.tokens, local.ffn, saved_bytes=tensor
    )
    if mix and not mix.channel_receptance:
        return [
            _token_shift(local, mixtures=1),
            column_linear(local, local.ffn, local.hidden),
            squared,
            row_linear(local, local.hidden, local.ffn),
        ]
    receptance = column_linear(
        local, local.hidden // local.tp, local.hidden, kept_output=1.0, communicates=False
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


def time_mix_weights(hidden: int, mix: TimeMix, *, adds_values: bool) -> int:
    """Elements of all projections."""
    inner, keys = mix.inner, mix.key_channels
    # Receptances and keys; values, output, and a full gate.
    weights = hidden * (2 * keys + (3 if mix.gate else 2) * inner)
    weights += mix.gate_rank * (hidden + inner)
    weights += (mix.decay_rank + mix.rate_rank) * (hidden + keys)
    if adds_values:
        weights += mix.value_rank * (hidden + inner)
    if mix.mix_rank:
        weights += (mix.mixtures - 1) * mix.mix_rank * 2 * hidden
    return weights


def _trained_numbers(mix: TimeMix, *, adds_values: bool) -> int:
    """Trained numbers of the recurrence: a decay and a bonus for the current token in each channel.
    RWKV-7 adds a rate and two scales of keys, and a share of the first layer's values."""
    numbers = 2 * mix.key_channels
    if mix.rate_rank:
        numbers += 3 * mix.key_channels
    return numbers + (mix.inner if adds_values else 0)


def time_mix_parameters(hidden: int, mix: TimeMix, *, adds_values: bool) -> int:
    """Parameters of one time mixing, without the layer's norm."""
    norm_of_heads = 2 * mix.inner if mix.heads else 0
    return (
        time_mix_weights(hidden, mix, adds_values=adds_values)
        + mix.mixtures * hidden
        + _trained_numbers(mix, adds_values=adds_values)
        + norm_of_heads
    )


def channel_mix_weights(hidden: int, inner: int, *, receptance: bool) -> int:
    """Elements of the projections."""
    return 2 * hidden * inner + (hidden * hidden if receptance else 0)


def channel_mix_parameters(hidden: int, inner: int, *, receptance: bool) -> int:
    """Parameters of one channel mixing, without the layer's norm."""
    mixtures = 2 if receptance else 1
    return channel_mix_weights(hidden, inner, receptance=receptance) + mixtures * hidden
