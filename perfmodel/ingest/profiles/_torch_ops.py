"""PyTorch operators with their input shapes as ops of the measurement tables."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

from perfmodel.ingest._rows import Row

AUTOGRAD: Final = "autograd::engine::evaluate_function"
"""Prefix of the names of autograd's own calls."""

DTYPES: Final = {
    "float": "fp32",
    "c10::Half": "fp16",
    "c10::BFloat16": "bf16",
    "double": "fp64",
    "signed char": "int8",
    "c10::Float8_e4m3fn": "fp8",
    "c10::Float8_e5m2": "fp8",
    "Float": "fp32",
    "Half": "fp16",
    "BFloat16": "bf16",
    "Double": "fp64",
    "Char": "int8",
    "Byte": "int8",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
}
"""Element types by their names in the profiler."""


@dataclass(frozen=True)
class TorchOp:
    """One call of an operator."""

    name: str
    shapes: tuple[Any, ...]
    """Shape of each argument: a tuple of sizes, a tuple of shapes for a list of tensors, or empty
    for other arguments."""
    dtypes: tuple[str, ...]
    concrete: tuple[str, ...] = ()
    """Values of arguments that are not tensors, as text; empty where the profiler did not record
    them."""
    strides: tuple[Any, ...] = ()
    parents: tuple[str, ...] = ()
    """Names of the calls around it, innermost first."""


def op_row(op: TorchOp) -> Row | None:
    """An operator's columns of a measurement row (family, op, element type, shape, pass); None if
    the tables have no such operator, or its arguments have unexpected shapes."""
    # A profile is a stranger's file: shapes that no tensor has make no row.
    rule = _RULES.get(op.name.removeprefix("aten::"))
    if rule is None or not all(map(_is_shape_or_shapes, op.shapes)):
        return None
    try:
        row = rule(op)
    except (IndexError, ValueError, TypeError):  # not the arguments that this operator has
        return None
    # An empty tensor launches nothing worth a row.
    sizes = [row[name] for name in row if name not in _MAY_BE_ZERO]
    if any(isinstance(size, int) and size < 1 for size in sizes):
        return None
    # The first tensor decides; indices and scalars have types of their own.
    dtype = next((DTYPES[d] for d in op.dtypes if d in DTYPES), "")
    return {"dtype": dtype, "pass": "bwd" if "backward" in op.name else "fwd"} | row


def _is_shape_or_shapes(value: Any) -> bool:
    """Whether a recorded argument is a tensor's shape, or a list of shapes."""
    if _is_shape(value):
        return True
    return isinstance(value, tuple) and all(map(_is_shape, value))


def _is_shape(value: Any) -> bool:
    if not isinstance(value, tuple):
        return False
    return all(type(size) is int and 0 <= size < 2**31 for size in value)


def has_row(name: str) -> bool:
    """Whether the tables have rows for an operator."""
    return name.removeprefix("aten::") in _RULES


_MAY_BE_ZERO: Final = {"causal", "window", "n_inputs", "pad_h", "pad_w", "head_dim_v"}


def _is_gradient(op: TorchOp) -> bool:
    """Whether autograd itself called the operator; calls of recomputation are below a layer's own
    operator."""
    # Recomputation also runs inside of autograd's calls: there a product of the forward has its own
    # linear or matmul in between, and that of a gradient has not.
    called_by = [
        p for p in op.parents if p in ("aten::linear", "aten::matmul") or p.startswith(AUTOGRAD)
    ]
    return bool(called_by) and called_by[0].startswith(AUTOGRAD)


def _gemm(op: TorchOp, a: int, b: int) -> Row:
    """C[m, n] = A[m, k] B[k, n]; under autograd one of the two gradients."""
    (m, k), (k2, n) = op.shapes[a], op.shapes[b]
    if k != k2:
        raise ValueError("inner sizes differ")
    row: Row = {"op_family": "gemm", "op": "linear", "m": m, "n": n, "k": k, "batch": 1}
    if _is_gradient(op):
        # the weight gradient multiplies by the transposed incoming gradient (autograd's formulas
        # for mm); strides of an expanded one do not tell
        rows_apart, columns_apart = op.strides[a] if op.strides else (0, 0)
        row["pass"] = ""
        if rows_apart == 1 < columns_apart:
            row["pass"] = "wgrad"
        elif columns_apart == 1:
            row["pass"] = "dgrad"
    return row


def _bmm(op: TorchOp, a: int, b: int) -> Row:
    (batch, m, k), (batch2, k2, n) = op.shapes[a], op.shapes[b]
    if (batch, k) != (batch2, k2):
        raise ValueError("batch or inner sizes differ")
    row: Row = {"op_family": "gemm", "op": "bmm", "m": m, "n": n, "k": k, "batch": batch}
    return row | ({"pass": "bwd_one_gemm"} if _is_gradient(op) else {})


def _pointwise(name: str, n_inputs: int = 1) -> Callable[[TorchOp], Row]:
    def rule(op: TorchOp) -> Row:
        shape = op.shapes[0]
        # A broadcast reads less than two whole tensors, so that its bytes are not those of the row.
        if not shape or (n_inputs > 1 and op.shapes[1] not in (shape, ())):
            raise ValueError("scalars and broadcasts do not have the shape rows x hidden")
        inputs = n_inputs if n_inputs == 1 or op.shapes[1] else 1
        return {
            "op_family": "memory",
            "op": name,
            "rows": prod(shape[:-1]),
            "hidden": shape[-1],
            "n_inputs": inputs,
        }

    return rule


def _attention(order: str, head: int = 0, causal_at: int | None = None) -> Callable[[TorchOp], Row]:
    """Fused attention whose query, key and value lie at arguments `head` and after, with axes as in
    `order`."""

    def rule(op: TorchOp) -> Row:
        # Kernels differ in the order of batch, sequence, heads and elements of a head.
        q, k, v = (dict(zip(order, shape, strict=True)) for shape in op.shapes[head : head + 3])
        row: Row = {
            "op_family": "attention",
            "op": "flash_attention",
            "phase": "training",
            "batch": q["b"],
            "heads": q["h"],
            "kv_heads": k["h"],
            "seq_q": q["s"],
            "seq_kv": k["s"],
            "head_dim": q["d"],
            "window": 0,
        }
        if v["d"] != q["d"]:
            row["head_dim_v"] = v["d"]
        if (
            causal_at is not None
            and len(op.concrete) > causal_at
            and op.concrete[causal_at] in ("True", "False")
        ):
            row["causal"] = int(op.concrete[causal_at] == "True")
        return row

    return rule


def _embedding(op: TorchOp) -> Row:
    """Rows of a table: `embedding(weight, indices)` or the `index_select(weight, 0, indices)` that
    it calls."""
    selected = op.name.endswith("index_select")
    # index_select alone serves routers, samplers and masks, whose access is not that of an
    # embedding.
    if selected and "aten::embedding" not in op.parents:
        raise ValueError("a selection of something else")
    (vocab, hidden), tokens = op.shapes[0], op.shapes[2 if selected else 1]
    return {
        "op_family": "embedding",
        "op": "embedding",
        "tokens": prod(tokens),
        "hidden": hidden,
        "vocab": vocab,
    }


def _embedding_backward(op: TorchOp) -> Row:
    """`embedding_dense_backward(gradient, indices, num_weights, ...)`."""
    hidden = op.shapes[0][-1]
    vocab = int(op.concrete[2])
    tokens = prod(op.shapes[1])
    return {
        "op_family": "embedding",
        "op": "embedding",
        "tokens": tokens,
        "hidden": hidden,
        "vocab": vocab,
    }


def _convolution(
    padding_at: int, stride_at: int, dilation_at: int, groups_at: int
) -> Callable[[TorchOp], Row]:
    """The rule that makes a convolution's row; arguments are the places of its own arguments in the
    call."""

    def rule(op: TorchOp) -> Row:
        (batch, c_in, h, w), (c_out, _, k_h, k_w) = op.shapes[0], op.shapes[1]
        pad = _pair(op.concrete[padding_at])
        stride = _pair(op.concrete[stride_at])
        dilation = _pair(op.concrete[dilation_at])
        # The tables have no column for it, and a dilated kernel reads other rows of its input.
        if dilation != (1, 1):
            raise ValueError("dilated")
        return {
            "op_family": "conv",
            "op": "conv2d",
            "batch": batch,
            "c_in": c_in,
            "h_in": h,
            "w_in": w,
            "c_out": c_out,
            "k_h": k_h,
            "k_w": k_w,
            "stride_h": stride[0],
            "stride_w": stride[1],
            "pad_h": pad[0],
            "pad_w": pad[1],
            "groups": int(op.concrete[groups_at]),
        }

    return rule


def _adam(op: TorchOp) -> Row:
    """`_fused_adam_(parameters, gradients, ...)`: lists of tensors."""
    parameters = op.shapes[0]
    if not parameters or not all(isinstance(shape, tuple) for shape in parameters):
        raise ValueError("not a list of tensors")
    count = sum(prod(shape) for shape in parameters)
    return {"op_family": "optimizer", "op": "adam", "n_params": count, "pass": "optimizer_update"}


def _pair(text: str) -> Sequence[int]:
    first, *further = (int(word) for word in text.strip("[]").split(","))
    return first, (further or [first])[0]


_BSHD: Final = "bshd"
_BHSD: Final = "bhsd"
_RULES: Final[dict[str, Callable[[TorchOp], Row]]] = {
    "mm": lambda op: _gemm(op, 0, 1),
    "addmm": lambda op: _gemm(op, 1, 2),
    "_addmm_activation": lambda op: _gemm(op, 1, 2),
    "_scaled_mm": lambda op: _gemm(op, 0, 1),
    "bmm": lambda op: _bmm(op, 0, 1),
    "baddbmm": lambda op: _bmm(op, 1, 2),
    "_flash_attention_forward": _attention(_BSHD, 0, 8),
    "_flash_attention_backward": _attention(_BSHD, 1, 11),
    "_scaled_dot_product_flash_attention": _attention(_BHSD, 0, 4),
    "_scaled_dot_product_flash_attention_backward": _attention(_BHSD, 1, 11),
    "_scaled_dot_product_flash_attention_for_cpu": _attention(_BHSD, 0, 4),
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention(_BHSD, 1, 7),
    "_scaled_dot_product_cudnn_attention": _attention(_BHSD, 0, 6),
    "_scaled_dot_product_efficient_attention": _attention(_BHSD, 0, 6),
    "_efficient_attention_forward": _attention(_BSHD),
    "native_layer_norm": _pointwise("layer_norm"),
    "native_layer_norm_backward": _pointwise("layer_norm"),
    "_fused_rms_norm": _pointwise("rms_norm"),
    "_softmax": _pointwise("softmax"),
    "_softmax_backward_data": _pointwise("softmax"),
    "gelu": _pointwise("gelu"),
    "gelu_backward": _pointwise("gelu"),
    "silu": _pointwise("silu"),
    "silu_backward": _pointwise("silu"),
    "relu": _pointwise("relu"),
    "clamp_min": _pointwise("relu"),
    "threshold_backward": _pointwise("relu"),
    "tanh": _pointwise("tanh"),
    "native_dropout": _pointwise("dropout"),
    "native_dropout_backward": _pointwise("dropout"),
    "add": _pointwise("add", 2),
    "add_": _pointwise("add", 2),
    "mul": _pointwise("mul", 2),
    "mul_": _pointwise("mul", 2),
    "sub": _pointwise("sub", 2),
    "div": _pointwise("div", 2),
    "embedding": _embedding,
    "index_select": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "cudnn_convolution": _convolution(2, 3, 4, 5),
    "miopen_convolution": _convolution(3, 4, 5, 6),
    "mkldnn_convolution": _convolution(3, 4, 5, 6),
    "_fused_adam_": _adam,
    "_fused_adamw_": _adam,
}
