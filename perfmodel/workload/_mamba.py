"""Mamba-2 layers of hybrid models (Dao and Gu, arXiv 2405.21060), sharded by heads as Megatron-Core does."""

from dataclasses import replace

from perfmodel.errors import Reason
from perfmodel.ops import Gemm
from perfmodel.spec import Mamba, Transformer
from perfmodel.workload._linear import column_linear, row_linear
from perfmodel.workload._local import Local, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, pointwise


def mamba_mixer(model: Transformer, local: Local, mamba: Mamba) -> list[Piece]:
    """Input projection, causal convolution, state-space product by chunks, gated norm, output projection.

    Raises:
        LayoutError: groups of heads that tensor parallelism does not divide, or context parallelism, through which
            the state would have to be passed.
    """
    tp = local.tp
    divide(model, Reason.HEADS, f"mamba groups={mamba.groups} are", mamba.groups, "tp", tp)
    require_whole_sequence(model, local, "Mamba layers")
    heads, inner = mamba.heads // tp, mamba.heads * mamba.head_dim // tp
    convolved = inner + 2 * mamba.groups * mamba.state // tp
    tensor = float(local.tokens * local.act_bytes)
    return [
        column_linear(local, inner + convolved + heads, local.hidden, kept_output=True),
        # a depthwise convolution and its activation in one pass; its input is the projection's output, kept there
        pointwise(
            local.precision, [("silu", 1)], local.tokens, convolved, params=convolved * (mamba.conv_kernel + 1),
            saved_bytes=tensor * convolved,
        ),
        _state_space(local, mamba, heads),
        pointwise(
            local.precision, [("silu_mul", 2), ("layer_norm", 1)], local.tokens, inner, params=inner,
            saved_bytes=tensor * inner,
        ),
        row_linear(local, local.hidden, inner),
    ]  # fmt: skip


def _state_space(local: Local, mamba: Mamba, heads: int) -> Piece:
    """The four matrix products of every chunk: outputs within it (scores, then context), the state that it leaves,
    and what the state before it adds (section 6). Both gradients of a product count as its `bwd`.

    Inputs are kept by the pieces before; states are computed again in backward, as the published kernels do.
    """
    chunks = local.shard.micro_batch * -(-local.seq_local // mamba.chunk)
    groups = mamba.groups // local.tp
    size, state, head = min(mamba.chunk, local.seq_local), mamba.state, mamba.head_dim
    products = tuple(
        Gemm(op="bmm", dtype=local.precision.act_dtype, batch=chunks * batch, m=m, n=n, k=k)
        for batch, m, n, k in (
            (groups, size, size, state), (heads, size, head, size), (heads, state, head, size),
            (heads, size, head, state),
        )
    )  # fmt: skip
    return Piece(
        forward=products,
        backward_input=tuple(replace(product, pass_="bwd") for product in reversed(products)),
        params=3 * heads,  # decay, step and skip of every head
    )


def mamba_weights(hidden: int, mamba: Mamba) -> int:
    """Elements of the two projections."""
    inner = mamba.heads * mamba.head_dim
    return hidden * (3 * inner + 2 * mamba.groups * mamba.state + mamba.heads)


def mamba_parameters(hidden: int, mamba: Mamba) -> int:
    """Parameters of one mixer, without the layer's norm."""
    inner = mamba.heads * mamba.head_dim
    convolved = inner + 2 * mamba.groups * mamba.state
    return mamba_weights(hidden, mamba) + convolved * (mamba.conv_kernel + 1) + 3 * mamba.heads + inner


def state_space_products(mamba: Mamba) -> int:
    """Multiplications per token of the products of a chunk."""
    shared, own = mamba.groups * mamba.state, mamba.heads * mamba.head_dim
    return mamba.chunk * (shared + own) + 2 * own * mamba.state
