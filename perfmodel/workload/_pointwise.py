"""Norms, activations, residual additions and rotary embeddings.

Kernel names are those of the measurement tables' `op` column, so that calibrated models know them.
A fused RMS norm moves what a fused layer norm moves and is named, and timed, like one.
"""

from typing import Final

from perfmodel.spec import Transformer
from perfmodel.workload._local import Local
from perfmodel.workload._piece import Piece, memory, pointwise


def norm(model: Transformer, local: Local) -> Piece:
    """Layer or RMS norm over the hidden size; keeps its input."""
    return small_norm(model, local, local.norm_tokens, local.hidden)


def norm_params(model: Transformer, size: int) -> int:
    """A scale per element, and a shift for layer norms with biases."""
    return size * (2 if model.norm == "layer_norm" and model.bias else 1)


def residual(model: Transformer, local: Local) -> Piece:
    """Bias, dropout and residual addition after a row-parallel product; keeps the dropout mask.

    Backward also sums the gradients of the two branches.
    """
    rows, hidden = local.norm_tokens, local.hidden
    eager = [*([("add", 1)] if model.bias else []), ("dropout", 1), ("add", 2)]
    if not model.dropout:
        ops = [("add", 2)] if local.job.fuses("residual") or not model.bias else [("add", 1), ("add", 2)]
        backward = ()
    else:
        ops = [("bias_dropout_add", 2)] if local.job.fuses("residual") else eager
        backward = (
            memory(local.precision, "bias_dropout_add", rows, hidden, 2, backward=True)
            if local.job.fuses("residual")
            else memory(local.precision, "dropout", rows, hidden, backward=True),
        )
    return Piece(
        forward=tuple(memory(local.precision, op, rows, hidden, n) for op, n in ops),
        backward_input=(memory(local.precision, "add", rows, hidden, 2), *backward),
        saved_bytes=float(rows * hidden) if model.dropout else 0.0,
    )


_GELU_FORMULA: Final = (
    ("pow_scalar", 1), ("mul_scalar", 1), ("add", 2), ("mul_scalar", 1), ("tanh", 1), ("add_scalar", 1),
    ("mul_scalar", 1), ("mul", 2),
)  # fmt: skip
_GELU_FORMULA_KEEPS: Final = 4
"""0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) as transformers wrote it before 4.0 (`activations.gelu_new`);
kept are x, the tanh and both factors of the last product."""


def activation(model: Transformer, local: Local, rows: int, width: int) -> Piece:
    """The feed-forward's nonlinearity over `rows` x `width`; keeps its inputs (ReLU: nothing more).

    A gated unit has two inputs, gate and value; fused, it moves the same bytes whatever its
    function and is named after the measured one.
    """
    name, fused = model.activation, local.job.fuses("activation")
    inputs = 1
    if model.gated_ffn:
        ops = [("silu_mul", 2)] if fused else [(name, 1), ("mul", 2)]
        inputs = 2 if fused else 3  # eager kernels also keep the activated gate
    elif name == "relu":
        ops, inputs = [("relu", 1)], 0
    elif name == "gelu" and "gelu_formula" in local.job.eager_kernels:
        ops, inputs = list(_GELU_FORMULA), _GELU_FORMULA_KEEPS
    elif name == "gelu" and model.bias and fused:
        ops = [("bias_gelu", 1)]
    else:
        ops = [*([("add", 1)] if model.bias else []), (name, 1)]
    tensor = float(rows) * width * local.act_bytes
    return pointwise(local.precision, ops, rows, width, saved_bytes=inputs * tensor)


def rotary(model: Transformer, local: Local, width: int) -> list[Piece]:
    """Rotation of `width` query and key elements per token; its gradient is a rotation back."""
    if model.positions != "rope":
        return []
    name = "rope" if local.job.fuses("rope") else "rope_unfused"
    return [pointwise(local.precision, [(name, 1)], local.tokens, width, saved_bytes=0.0)]


def attention_layout(model: Transformer, local: Local) -> list[Piece]:
    """Copies of queries, keys and values into the order of the attention kernel: all at once, then keys and values
    twice more, once to join them and once to interleave them (nanotron); their gradients go the same ways back."""
    if local.job.fuses("attention_layout"):
        return []
    d, kv = model.head_dim, 2 * local.kv_heads
    widths = ((local.heads + kv) * d, kv * d, kv * d)
    return [pointwise(local.precision, [("mul_scalar", 1)], local.tokens, width) for width in widths]


def small_norm(model: Transformer, local: Local, rows: int, size: int) -> Piece:
    """Norm over a compressed activation of `size` elements; keeps its input."""
    fused = local.job.fuses("norm") or model.norm == "layer_norm"
    return pointwise(
        local.precision,
        [("layer_norm" if fused else "rms_norm_unfused", 1)],
        rows,
        size,
        params=norm_params(model, size),
        saved_bytes=float(rows * size * local.act_bytes),
    )


def head_norm(model: Transformer, local: Local) -> list[Piece]:
    """Norm of each head's query, and of each key (Qwen3), by the kernel of every other norm; keeps its input."""
    if not model.qk_norm:
        return []
    return [small_norm(model, local, local.tokens * heads, model.head_dim) for heads in (local.heads, local.kv_heads)]
