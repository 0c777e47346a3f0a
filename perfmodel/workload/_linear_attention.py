"""Linear attention, sharded by heads: a matrix per head as its state, which decays and to which
every token adds the product of its key and value.

Gated delta nets (Yang et al., arXiv 2412.06464), Kimi Delta Attention (arXiv 2510.26692), lightning
attention (MiniMax-01, arXiv 2501.08313), mLSTM (xLSTM, arXiv 2405.04517), and the recurrence of
RWKV-5 to 7.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Final, Literal, NamedTuple

from perfmodel.errors import Reason
from perfmodel.ops import Recurrence
from perfmodel.spec import Transformer
from perfmodel.spec.parts import DeltaNet, TimeMix
from perfmodel.workload._linear import column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, pointwise

Rule = Literal["sum", "delta", "low_rank"]
"""How a token changes the state besides its decay: its key times its value is added; the value
replaces what the state holds under the key; or the state is multiplied by a matrix of rank one,
whose vectors are made separately, before the product is added (RWKV-7, arXiv 2503.14456)."""


class LinearRecurrence(NamedTuple):
    """Sizes of the recurrence of one head."""

    key_dim: int
    value_dim: int
    chunk: int
    """Tokens that are computed as one block of matrix products."""
    rule: Rule
    channel_decays: bool
    """Every element of a key has a decay of its own, not one for each head."""


def recurrence_of_net(net: DeltaNet) -> LinearRecurrence:
    """The recurrence of a gated delta net or of linear attention."""
    rule = "delta" if net.delta_rule else "sum"
    return LinearRecurrence(net.key_dim, net.head_dim, net.chunk, rule, net.channel_decays)


def recurrence_of_time_mix(mix: TimeMix) -> LinearRecurrence:
    """The recurrence of time mixing whose heads have matrices as states."""
    rule = "low_rank" if mix.rate_rank else "sum"
    return LinearRecurrence(
        mix.key_channels // mix.heads, mix.inner // mix.heads, mix.chunk, rule, channel_decays=True
    )


def _projections(local: ShardSizes, net: DeltaNet) -> list[Piece]:
    """Products that make queries, keys and values, which are convolved, the output gate, and decay
    and step of every head."""
    values, convolved = net.values // local.tp, net.convolved // local.tp
    decays, steps = net.decays // local.tp, net.steps // local.tp
    if not net.gate_rank:
        width = convolved + values + decays + steps
        return [column_linear(local, width, local.hidden, kept_output=1.0)]

    # Low-rank projections start on every rank, as those of latent attention; the second products
    # are column-parallel.
    return [
        column_linear(local, convolved + steps, local.hidden, kept_output=1.0),
        linear(local.precision, local.norm_tokens, 2 * net.gate_rank, local.hidden, kept_input=0.0),
        column_linear(local, values, net.gate_rank, kept_output=1.0),
        column_linear(local, decays, net.gate_rank, kept_output=1.0),
    ]


def delta_net_mixer(model: Transformer, local: ShardSizes, net: DeltaNet) -> list[Piece]:
    """A gated delta net, or linear attention: input projections, causal convolution, the recurrence
    by chunks, gated norm, output projection.

    Raises:
        LayoutError: key heads that tensor parallelism does not divide, or context parallelism,
            through which the state would have to be passed.
    """
    tp = local.tp
    divide(
        model,
        Reason.HEADS,
        f"delta_net key_heads={net.key_heads} are",
        net.key_heads,
        "tp",
        tp,
    )
    require_whole_sequence(
        model, local, "gated delta nets" if net.delta_rule else "linear attention"
    )

    heads, values, convolved = net.heads // tp, net.values // tp, net.convolved // tp
    tensor = float(local.tokens * local.act_bytes)
    pieces = _projections(local, net)
    if not net.input_gates:
        # The convolution and its activation are one kernel.
        pieces.append(
            pointwise(
                local.precision,
                [("silu", 1)],
                local.tokens,
                convolved,
                params=convolved * net.conv_kernel,
                saved_bytes=tensor * convolved,
            )
        )
    if net.delta_rule:
        # Queries and keys of unit length.
        pieces.append(
            pointwise(
                local.precision, [("norm", 1)], local.tokens, convolved - values, saved_bytes=0.0
            )
        )
    # A rate for each head, or the bias of its input gate, and what is added to each decay before
    # its softplus.
    trained_decays = 0 if net.fixed_decays else heads + net.decays // tp
    return [
        *pieces,
        linear_recurrence(local, recurrence_of_net(net), heads, params=trained_decays),
        pointwise(
            local.precision,
            [("layer_norm", 1), ("silu_mul", 2)],
            local.tokens,
            values,
            params=values if net.norm_of_all_heads else net.head_dim,
            saved_bytes=tensor * values,
        ),
        row_linear(local, local.hidden, values),
    ]


def _products(recurrence: LinearRecurrence, tokens: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Products (m, n, k) of one head in one chunk of C tokens, at most `tokens`."""
    c = min(recurrence.chunk, tokens or recurrence.chunk)
    k, v = recurrence.key_dim, recurrence.value_dim
    # Queries with keys, scores with values; queries with the state, and what the chunk adds to it.
    added = ((c, c, k), (c, v, c), (c, v, k), (k, v, c))
    if recurrence.rule == "sum":
        return added
    # Keys with keys, the inverse of the triangular matrix that they make (as one product), that
    # with keys and with values; decayed keys with the state (arXiv 2412.06464, section 3.3).
    replaced = ((c, c, k), (c, c, c), (c, k, c), (c, v, c), (c, v, k))
    if recurrence.rule == "delta":
        return (*replaced, *added)
    # The vectors of the matrix of rank one are not the keys: they have scores with these and with
    # queries, and add to the output and to the state themselves (flash-linear-attention
    # fla/ops/generalized_delta_rule/dplr/chunk.py).
    vectors = ((c, c, k), (c, c, k), (c, v, c), (c, v, c), (k, v, c))
    return (*vectors, *replaced, *added)


def linear_recurrence(
    local: ShardSizes, recurrence: LinearRecurrence, heads: int, *, params: int
) -> Piece:
    """The recurrence of `heads` heads by chunks, the last one of a sequence padded to a whole one.

    Args:
        params: parameters of decays, and of what else belongs to the recurrence.
    """
    size = min(recurrence.chunk, local.seq_local)
    n_chunks = -(-local.seq_local // recurrence.chunk)
    products = heads * sum(m * n * k for m, n, k in _products(recurrence, size)) // size
    forward_passes, backward_passes = _TRAFFIC[recurrence.rule, recurrence.channel_decays]
    forward = Recurrence(
        op="linear_attention" if recurrence.rule == "sum" else "delta_rule",
        dtype=local.precision.wide_dtype,
        tokens=local.sequences * n_chunks * size,
        products_per_token=products,
        bytes_per_token=heads * _bytes(recurrence, size, local.act_bytes, forward_passes),
    )

    # Backward recomputes what it needs from inputs that the previous pieces save, like the
    # published kernels.
    backward = replace(
        forward,
        bytes_per_token=heads * _bytes(recurrence, size, local.act_bytes, backward_passes),
        pass_="bwd",
    )
    return Piece(forward=(forward,), backward_input=(backward,), params=params)


class _Traffic(NamedTuple):
    """How often the kernels of a pass read or write each kind of tensor, in 16 bits; those of 32
    bits count twice."""

    keys: float
    """Tensors as wide as a key, decays of its elements included."""
    values: float
    """Tensors as wide as a value."""
    triangle: float
    """Triangular matrices of a chunk."""
    states: float
    """The state of a chunk."""


_TRAFFIC: Final[Mapping[tuple[Rule, bool], tuple[_Traffic, _Traffic]]] = {
    # Forward: keys with keys, the inverse, its products with keys and values, states and outputs.
    # Backward: those products and the states again; then the gradients of values, of states, of
    # queries and keys, and of the products (flash-linear-attention 0.4,
    # fla/ops/gated_delta_rule/chunk.py).
    ("delta", False): (
        _Traffic(keys=7, values=6, triangle=6, states=2),
        _Traffic(keys=20, values=15, triangle=2, states=4),
    ),
    # Decays of every channel are read and written together with the keys and their gradients.
    ("delta", True): (
        _Traffic(keys=14, values=6, triangle=6, states=2),
        _Traffic(keys=40, values=15, triangle=2, states=4),
    ),
    # Forward: states; outputs, whose scores stay in the kernel. Backward: states and their
    # gradients in 32 bits, then the gradients of queries and keys, and of values
    # (flash-linear-attention 0.6, fla/ops/simple_gla/chunk.py).
    ("sum", False): (
        _Traffic(keys=3, values=3, triangle=0, states=2),
        _Traffic(keys=8, values=6, triangle=0, states=10),
    ),
    # Forward: two sums of decays in 32 bits, states, scores, outputs. Backward: sums and states
    # again, then the gradients of states, of scores, of values, and in two kernels of queries,
    # keys and decays (flash-linear-attention 0.6, fla/ops/rwkv6/chunk.py).
    ("sum", True): (
        _Traffic(keys=17, values=3, triangle=4, states=4),
        _Traffic(keys=43, values=8, triangle=8, states=10),
    ),
    # The same with scores of four pairs of tensors, and the inverse of one of these
    # (flash-linear-attention 0.6, fla/ops/generalized_delta_rule/dplr/chunk.py).
    ("low_rank", True): (
        _Traffic(keys=25, values=8, triangle=13, states=2),
        _Traffic(keys=60, values=22, triangle=32, states=5),
    ),
}


def _bytes(recurrence: LinearRecurrence, size: int, act_bytes: int, passes: _Traffic) -> int:
    """Bytes that the kernels of a pass read and write per token and head of values."""
    elements = (
        passes.keys * recurrence.key_dim
        + passes.values * recurrence.value_dim
        + passes.triangle * size
        + passes.states * recurrence.key_dim * recurrence.value_dim / size
    )
    return round(act_bytes * elements)


def recurrence_products(recurrence: LinearRecurrence, heads: int) -> float:
    """Multiplications per token of the products of a chunk."""
    return heads * sum(m * n * k for m, n, k in _products(recurrence)) / recurrence.chunk


def delta_net_weights(hidden: int, net: DeltaNet) -> int:
    """Elements of the projections."""
    gates = net.values + net.decays
    if net.gate_rank:
        return (
            hidden * (net.values + net.convolved + net.steps + 2 * net.gate_rank)
            + net.gate_rank * gates
        )
    return hidden * (net.values + net.convolved + net.steps + gates)


def delta_net_parameters(hidden: int, net: DeltaNet) -> int:
    """Parameters of one mixer, without the layer's norm."""
    trained_decays = 0 if net.fixed_decays else net.heads + net.decays
    return (
        delta_net_weights(hidden, net)
        + net.convolved * net.conv_kernel
        + trained_decays
        + (net.values if net.norm_of_all_heads else net.head_dim)
    )
