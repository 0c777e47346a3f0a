"""Gated delta-rule layers of hybrid models (Yang et al., arXiv 2412.06464), sharded by heads."""

from perfmodel.errors import Reason
from perfmodel.ops import Recurrence
from perfmodel.spec import DeltaNet, Transformer
from perfmodel.workload._linear import column_linear, row_linear
from perfmodel.workload._local import Local, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, pointwise


def delta_net_mixer(model: Transformer, local: Local, net: DeltaNet) -> list[Piece]:
    """Input projections (queries, keys, values, output gate; decay and step), causal convolution, delta rule by chunks,
    gated norm, output projection.

    Raises:
        LayoutError: key heads that tensor parallelism does not divide, or context parallelism, through which the state
            would have to be passed.
    """
    tp = local.tp
    divide(model, Reason.HEADS, f"delta_net key_heads={net.key_heads} are", net.key_heads, "tp", tp)
    require_whole_sequence(model, local, "gated delta nets")
    heads, values = net.heads // tp, net.heads * net.head_dim // tp
    convolved = values + 2 * net.key_heads * net.key_dim // tp
    tensor = float(local.tokens * local.act_bytes)
    return [
        column_linear(local, convolved + values + 2 * heads, local.hidden, kept_output=True),
        pointwise(
            local.precision, [("silu", 1)], local.tokens, convolved, params=convolved * net.conv_kernel,
            saved_bytes=tensor * convolved,
        ),
        # queries and keys of unit length
        pointwise(local.precision, [("norm", 1)], local.tokens, convolved - values, saved_bytes=0.0),
        _delta_rule(local, net, heads),
        pointwise(
            local.precision, [("layer_norm", 1), ("silu_mul", 2)], local.tokens, values, params=net.head_dim,
            saved_bytes=tensor * values,
        ),
        row_linear(local, local.hidden, values),
    ]  # fmt: skip


def _products(net: DeltaNet, tokens: int = 0) -> tuple[tuple[int, int, int], ...]:
    """Products (m, n, k) of one head in one chunk of C tokens, at most `tokens` (section 3.3): keys with keys, the
    inverse of the triangular matrix that they make (as one product), that with keys and with values; queries with keys,
    scores with new values; queries and decayed keys with the state, and what the chunk adds to it."""
    c, k, v = min(net.chunk, tokens or net.chunk), net.key_dim, net.head_dim
    return (c, c, k), (c, c, c), (c, k, c), (c, v, c), (c, c, k), (c, v, c), (c, v, k), (c, v, k), (k, v, c)


def _delta_rule(local: Local, net: DeltaNet, heads: int) -> Piece:
    """The rule by chunks. What it needs is made again in backward from inputs that the pieces before keep, as the
    published kernels do."""
    size = min(net.chunk, local.seq_local)
    tokens = local.shard.micro_batch * -(-local.seq_local // net.chunk) * size
    products = heads * sum(m * n * k for m, n, k in _products(net, size)) // size
    forward, backward = (
        Recurrence(
            op="delta_rule", dtype=local.precision.act_dtype, tokens=tokens, products_per_token=products,
            bytes_per_token=heads * _delta_rule_bytes(net, size, local.act_bytes, backward),
            pass_="bwd" if backward else "fwd",
        )
        for backward in (False, True)
    )  # fmt: skip
    return Piece(
        forward=(forward,),
        backward_input=(backward,),
        params=2 * heads,  # decay and step of every head
    )


def _delta_rule_bytes(net: DeltaNet, size: int, act_bytes: int, backward: bool) -> int:
    """What the kernels of a pass read and write per token and head of values (flash-linear-attention 0.4
    fla/ops/gated_delta_rule/chunk.py): tensors as wide as a key, and as a value; the triangular matrix of a chunk; its
    state.

    Forward: keys with keys, the inverse, what it makes of keys and values, states, outputs. Backward makes these two
    again, then the gradients of values, of states, of queries and keys, and of what the inverse made.
    """
    keys, values, triangle, states = (20, 15, 2, 4) if backward else (7, 6, 6, 2)
    moved = keys * net.key_dim + values * net.head_dim + triangle * size + states * net.key_dim * net.head_dim / size
    return round(act_bytes * moved)


def delta_net_weights(hidden: int, net: DeltaNet) -> int:
    """Elements of the projections."""
    values, keys = net.heads * net.head_dim, net.key_heads * net.key_dim
    return hidden * (3 * values + 2 * keys + 2 * net.heads)


def delta_net_parameters(hidden: int, net: DeltaNet) -> int:
    """Parameters of one mixer, without the layer's norm."""
    convolved = net.heads * net.head_dim + 2 * net.key_heads * net.key_dim
    return delta_net_weights(hidden, net) + convolved * net.conv_kernel + 2 * net.heads + net.head_dim


def delta_rule_products(net: DeltaNet) -> float:
    """Multiplications per token of the products of a chunk."""
    return net.heads * sum(m * n * k for m, n, k in _products(net)) / net.chunk
