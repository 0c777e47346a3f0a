"""Mamba-2 layers of hybrid models (Dao and Gu, arXiv 2405.21060), sharded by heads as Megatron-Core does."""

from dataclasses import replace

from perfmodel.errors import Reason
from perfmodel.ops import Recurrence
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
        _convolution(local, convolved, convolved * (mamba.conv_kernel + 1), saved_bytes=tensor * convolved),
        _state_space(local, mamba, heads),
        pointwise(
            local.precision, [("silu_mul", 2), ("layer_norm", 1)], local.tokens, inner, params=inner,
            saved_bytes=tensor * inner,
        ),
        row_linear(local, local.hidden, inner),
    ]  # fmt: skip


def _convolution(local: Local, width: int, params: int, saved_bytes: float) -> Piece:
    """A depthwise convolution and its activation in one pass; its input is the projection's output, kept there. What it
    gives is not kept but made again in backward (mamba_ssm 2.2, MambaSplitConv1dScanCombinedFn)."""
    once = pointwise(local.precision, [("silu", 1)], local.tokens, width, params=params, saved_bytes=saved_bytes)
    return replace(once, backward_input=(*once.forward, *once.backward_input))


def _state_space(local: Local, mamba: Mamba, heads: int) -> Piece:
    """Recurrence of the state by chunks (section 6). Inputs are kept by the pieces before; states are computed again in
    backward, as the published kernels do."""
    size = min(mamba.chunk, local.seq_local)
    tokens = local.shard.micro_batch * -(-local.seq_local // mamba.chunk) * size
    own = replace(mamba, heads=heads, groups=mamba.groups // local.tp, chunk=size)
    forward, backward = (
        Recurrence(
            op="state_space", dtype=local.precision.act_dtype, tokens=tokens,
            products_per_token=state_space_products(own),
            bytes_per_token=_state_space_bytes(own, local.act_bytes, backward), pass_="bwd" if backward else "fwd",
        )
        for backward in (False, True)
    )  # fmt: skip
    return Piece(
        forward=(forward,),
        backward_input=(backward,),
        params=3 * heads,  # decay, step and skip of every head
    )


def _state_space_bytes(mamba: Mamba, act_bytes: int, backward: bool) -> int:
    """What the kernels of a pass read and write per token (mamba_ssm 2.2 ops/triton/ssd_combined.py): tensors of the
    inner size; states, one per chunk in 32 bits, of which 16-bit copies count half; inputs and outputs of the state;
    scores in 32 bits.

    Forward: states of chunks, what is passed on, scores, outputs. Backward makes these again but for the outputs, then
    the gradients of states, of inputs, of what enters and leaves the state, of scores and of decay.
    """
    inner = mamba.heads * mamba.head_dim
    tensors, states, sides, scores = (11, 8.5, 14, 7) if backward else (3, 3, 4, 2)
    return round(
        act_bytes * (tensors * inner + sides * mamba.groups * mamba.state)
        + 4 * (states * inner * mamba.state / mamba.chunk + scores * mamba.groups * mamba.chunk)
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
