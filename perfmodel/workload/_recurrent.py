"""Recurrent mixers, sharded by heads or channels.

Mamba-2 (Dao and Gu, arXiv 2405.21060; as Megatron-Core shards it), the first Mamba (Gu and Dao,
arXiv 2312.00752) and gated short convolutions.
"""

from dataclasses import replace
from typing import Final, NamedTuple

from perfmodel.errors import Reason
from perfmodel.ops import Recurrence
from perfmodel.spec import Transformer
from perfmodel.spec.parts import Mamba, SelectiveScan, ShortConv
from perfmodel.workload._linear import column_linear, linear, row_linear
from perfmodel.workload._local import ShardSizes, divide, require_whole_sequence
from perfmodel.workload._piece import Piece, pointwise


def mamba_mixer(
    model: Transformer, local: ShardSizes, mamba: Mamba, *, own_input: bool = True
) -> list[Piece]:
    """Input projection, causal convolution, state-space product by chunks, gated norm, output
    projection.

    Args:
        own_input: False where attention has the same input, and gathers and keeps it.

    Raises:
        LayoutError: groups of heads that tensor parallelism does not divide, or context
            parallelism, through which the state would have to be passed.
    """
    tp = local.tp
    divide(model, Reason.HEADS, f"mamba groups={mamba.groups} are", mamba.groups, "tp", tp)
    require_whole_sequence(model, local, "Mamba layers")

    # One product gives the gate, the inputs of the convolution (which feed the state-space product)
    # and a step size per head.
    heads = mamba.heads // tp
    inner = mamba.inner // tp
    convolved = mamba.convolved // tp
    tensor = float(local.tokens * local.act_bytes)
    return [
        column_linear(
            local,
            inner + convolved + heads,
            local.hidden,
            kept_output=1.0,
            kept_input=own_input,
            communicates=own_input,
        ),
        _convolution(
            local,
            convolved,
            convolved * (mamba.conv_kernel + 1),
            saved_bytes=tensor * convolved,
        ),
        _state_space(local, mamba, heads),
        pointwise(
            local.precision,
            [("silu_mul", 2), ("layer_norm", 1)] if mamba.gated_norm else [("silu_mul", 2)],
            local.tokens,
            inner,
            params=inner if mamba.gated_norm else 0,
            saved_bytes=tensor * inner,
        ),
        row_linear(local.for_module("mamba_output"), local.hidden, inner),
    ]


def _convolution(local: ShardSizes, width: int, params: int, saved_bytes: float) -> Piece:
    """A depthwise convolution and its activation in one pass; its input is the projection's output,
    kept there."""
    # Its output is not saved but computed again in backward (mamba_ssm 2.2,
    # MambaSplitConv1dScanCombinedFn).
    once = pointwise(
        local.precision,
        [("silu", 1)],
        local.tokens,
        width,
        params=params,
        saved_bytes=saved_bytes,
    )
    return replace(once, backward_input=(*once.forward, *once.backward_input))


def _state_space(local: ShardSizes, mamba: Mamba, heads: int) -> Piece:
    """Recurrence of the state by chunks (section 6)."""
    # The last chunk of a sequence is padded to a whole one.
    size = min(mamba.chunk, local.seq_local)
    n_chunks = -(-local.seq_local // mamba.chunk)
    tokens = local.sequences * n_chunks * size
    shard = replace(mamba, heads=heads, groups=mamba.groups // local.tp, chunk=size)

    # Inputs are kept by the pieces before; states are computed again in backward, as the published
    # kernels do.
    forward = Recurrence(
        op="state_space",
        dtype=local.precision.wide_dtype,
        tokens=tokens,
        products_per_token=state_space_products(shard),
        bytes_per_token=_state_space_bytes(shard, local.act_bytes, backward=False),
    )
    backward = replace(
        forward,
        bytes_per_token=_state_space_bytes(shard, local.act_bytes, backward=True),
        pass_="bwd",
    )
    decay_step_and_skip = 3 * heads
    return Piece(forward=(forward,), backward_input=(backward,), params=decay_step_and_skip)


class _StateSpaceTraffic(NamedTuple):
    """How often the kernels of a pass read or write each kind of tensor (mamba_ssm 2.2
    ops/triton/ssd_combined.py)."""

    inner: float
    """Tensors of the inner size."""
    states: float
    """States, one per chunk in 32 bits; a 16-bit copy counts half."""
    sides: float
    """Inputs and outputs of the state."""
    scores: float
    """Scores of a chunk in 32 bits."""


_STATE_SPACE_FORWARD: Final = _StateSpaceTraffic(inner=3, states=3, sides=4, scores=2)
"""States of chunks are computed and passed on from chunk to chunk; then come scores and outputs."""
_STATE_SPACE_BACKWARD: Final = _StateSpaceTraffic(inner=11, states=8.5, sides=14, scores=7)
"""All but the outputs is recomputed; then come the gradients of states, of inputs, of inputs and
outputs of the state, of scores and of decay."""


def _state_space_bytes(mamba: Mamba, act_bytes: int, backward: bool) -> int:
    """Bytes that the kernels of a pass read and write per token."""
    passes = _STATE_SPACE_BACKWARD if backward else _STATE_SPACE_FORWARD
    narrow_elements = passes.inner * mamba.inner + passes.sides * mamba.groups * mamba.state
    state_elements = passes.states * mamba.inner * mamba.state / mamba.chunk
    score_elements = passes.scores * mamba.groups * mamba.chunk
    return round(act_bytes * narrow_elements + 4 * (state_elements + score_elements))


def mamba_weights(hidden: int, mamba: Mamba) -> int:
    """Elements of the two projections."""
    return hidden * (2 * mamba.inner + mamba.convolved + mamba.heads)


def mamba_parameters(hidden: int, mamba: Mamba) -> int:
    """Parameters of one mixer, without the layer's norm."""
    convolution_with_bias = mamba.convolved * (mamba.conv_kernel + 1)
    decay_step_and_skip = 3 * mamba.heads
    norm = mamba.inner if mamba.gated_norm else 0
    return mamba_weights(hidden, mamba) + convolution_with_bias + decay_step_and_skip + norm


def state_space_products(mamba: Mamba) -> int:
    """Multiplications per token of the products of a chunk."""
    # Scores are of groups, which heads share; their products with the inputs are of every head.
    scores = mamba.groups * mamba.state
    return mamba.chunk * (scores + mamba.inner) + 2 * mamba.inner * mamba.state


def selective_scan_mixer(model: Transformer, local: ShardSizes, scan: SelectiveScan) -> list[Piece]:
    """The first Mamba's mixer, sharded by channels.

    Input projection, causal convolution, projections of step sizes and of the state's inputs and
    outputs, the scan, output projection.

    Raises:
        LayoutError: channels that tensor parallelism does not divide, or context parallelism,
            through which the state would have to be passed.
    """
    tp = local.tp
    divide(model, Reason.HEADS, f"selective_scan inner={scan.inner} are", scan.inner, "tp", tp)
    require_whole_sequence(model, local, "selective scans")

    # Step sizes come from a narrow projection; they and the state's inputs and outputs may be
    # normed.
    inner = scan.inner // tp
    projected = scan.step_rank + 2 * scan.state
    tensor = float(local.tokens * local.act_bytes)
    projections = [
        column_linear(local, 2 * inner, local.hidden, kept_output=1.0),
        _convolution(local, inner, inner * (scan.conv_kernel + 1), saved_bytes=tensor * inner),
        linear(local.precision, local.tokens, projected, inner),
    ]
    if scan.inner_norms:
        projections.append(
            pointwise(
                local.precision,
                [("norm", 1)],
                local.tokens,
                projected,
                params=projected,
                saved_bytes=0.0,
            )
        )
    steps = linear(local.precision, local.tokens, inner, scan.step_rank, bias=inner)
    return [
        *projections,
        steps,
        _scan(local, scan, inner),
        row_linear(local, local.hidden, inner),
    ]


def _scan(local: ShardSizes, scan: SelectiveScan, inner: int) -> Piece:
    """The scan and the gate in one kernel, which computes states again in backward (section 3.3.2).

    It has no matrix products: every channel updates `state` elements per token. Its traffic stands
    for its work: the lanes' work that goes with a byte (`perfmodel.ops` recurrence) is about that
    of 16 states, the usual number.
    """
    # Input, step size and gate in, output before and after the gate out; the state's input and
    # output in.
    forward = Recurrence(
        op="selective_scan",
        dtype=local.precision.wide_dtype,
        tokens=local.tokens,
        products_per_token=2 * inner * scan.state,
        bytes_per_token=local.act_bytes * (5 * inner + 2 * scan.state),
    )

    # These and the output's gradient in, four gradients out; the states and the output are made
    # again.
    backward = replace(
        forward,
        bytes_per_token=local.act_bytes * (12 * inner + 8 * scan.state),
        pass_="bwd",
    )
    decay_and_skip = inner * (scan.state + 1)
    return Piece(forward=(forward,), backward_input=(backward,), params=decay_and_skip)


def selective_scan_weights(hidden: int, scan: SelectiveScan) -> int:
    """Elements of the projections."""
    projected = scan.step_rank + 2 * scan.state
    return 3 * hidden * scan.inner + scan.inner * projected + scan.step_rank * scan.inner


def selective_scan_parameters(hidden: int, scan: SelectiveScan) -> int:
    """Parameters of one mixer, without the layer's norm."""
    convolution = scan.inner * (scan.conv_kernel + 1)
    step_bias = scan.inner
    decay_and_skip = scan.inner * (scan.state + 1)
    norms = scan.step_rank + 2 * scan.state if scan.inner_norms else 0
    return selective_scan_weights(hidden, scan) + convolution + step_bias + decay_and_skip + norms


def short_conv_mixer(model: Transformer, local: ShardSizes, conv: ShortConv) -> list[Piece]:
    """Input projection to two gates and a value, the gated convolution, output projection, sharded
    by channels.

    `Lfm2ShortConv` of transformers.

    Raises:
        LayoutError: channels that tensor parallelism does not divide, or context parallelism,
            through which the last tokens would have to be passed.
    """
    tp = local.tp
    divide(model, Reason.HEADS, f"short_conv channels={model.hidden} are", model.hidden, "tp", tp)
    require_whole_sequence(model, local, "short convolutions")
    inner = model.hidden // tp
    tensor = float(local.tokens * local.act_bytes)
    return [
        column_linear(local, 3 * inner, local.hidden, kept_output=1.0),
        # Both gates and the convolution are element-wise: they pass over their tensors once each.
        pointwise(
            local.precision,
            [("silu_mul", 2), ("silu", 1)],
            local.tokens,
            inner,
            params=inner * conv.kernel,
            saved_bytes=tensor * inner,
        ),
        row_linear(local, local.hidden, inner),
    ]


def short_conv_weights(hidden: int) -> int:
    """Elements of the two projections."""
    return 4 * hidden * hidden


def short_conv_parameters(hidden: int, conv: ShortConv) -> int:
    """Parameters of one mixer, without the layer's norm."""
    return short_conv_weights(hidden) + hidden * conv.kernel
