"""Kernel rows of one family as columns, made from ops or from a measurement table."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from jaxtyping import Float64

from perfmodel.ingest.tables import number, relabel, text
from perfmodel.spec import NONGATED_MOE, KernelOp
from perfmodel.units import DTYPE_BYTES

SHAPE_COLUMNS: Final[dict[str, dict[str, float | None]]] = {
    "gemm": {"m": None, "n": None, "k": None, "batch": 1, "groups": 1, "accumulate": 0},
    "attention": {"batch": None, "heads": None, "kv_heads": None, "seq_q": None, "seq_kv": None,
                  "head_dim": None, "head_dim_v": 0, "causal": 1, "window": 0,
                  "mixed_n_decode": 0, "mixed_kv_decode": 0},
    "memory": {"rows": None, "hidden": None, "n_inputs": 1},
    "embedding": {"tokens": None, "hidden": None, "vocab": None},
    "optimizer": {"n_params": None, "tensors": 1, "bytes_per_param": 30},
    "conv": {"batch": None, "c_in": None, "h_in": None, "w_in": None, "c_out": None, "k_h": None,
             "k_w": None, "stride_h": 1, "stride_w": 1, "pad_h": 0, "pad_w": 0, "groups": 1},
    "moe": {"tokens": None, "hidden": None, "inter": None, "topk": None, "experts": None,
            "moe_tp": 1, "moe_ep": 1, "skew": 0},
}  # fmt: skip
"""Numbers that describe a kernel, by family; the value stands in where a row states none."""

ATTENTION_MASKS: Final = ("causal", "full")
"""Fused attention over whole sequences, each with its mask."""
FAMILIES: Final = tuple(SHAPE_COLUMNS)

_CONSTANT: Final[dict[str, float]] = {"mixed_n_decode": 0.0, "mixed_kv_decode": 0.0}
_GEMM_LAYOUT: Final = {"dgrad": "NN", "wgrad": "NT"}
_GEMM_OPS: Final = {"bmm": "bmm", "grouped_linear": "grouped_linear"}


@dataclass(frozen=True)
class Rows:
    """`n` kernels of one family."""

    family: str
    shape: dict[str, Float64[np.ndarray, "n"]]
    """The family's shape columns (and flags read off the row: transposes, element size)."""
    kind: np.ndarray
    """`dtype/op/pass` label of every row (object dtype): what a regressor treats as a category."""

    def __len__(self) -> int:
        return len(self.kind)

    @property
    def dtypes(self) -> np.ndarray:
        """Dtype class of every row (object dtype)."""
        return relabel(self.kind, lambda kind: kind.partition("/")[0])

    def take(self, index: np.ndarray) -> "Rows":
        """The rows at `index`."""
        return Rows(self.family, {k: v[index] for k, v in self.shape.items()}, self.kind[index])


def rows_from_ops(ops: Sequence[KernelOp]) -> Rows:
    """Columns of ops that all belong to one family."""
    family = ops[0].family
    shape = {}
    for name in SHAPE_COLUMNS[family]:
        if name == "skew":
            values = [skew_of(op.distribution) for op in ops]  # type: ignore[union-attr]
        elif name in _CONSTANT:
            values = [_CONSTANT[name]] * len(ops)
        else:
            values = [getattr(op, name) for op in ops]
        shape[name] = np.asarray(values, np.float64)
    op_names = np.array([op.op for op in ops], object)
    dtypes = np.array([op.dtype for op in ops], object)
    passes = np.array([op.pass_ for op in ops], object)
    return _finish(family, shape, op_names, dtypes, passes, layout=None)


def rows_from_table(table: pd.DataFrame, family: str) -> tuple[Rows, np.ndarray]:
    """Columns of a clean table's rows of one family, and which of them are complete.

    Args:
        table: as `perfmodel.ingest.clean_kernels` gives it.

    Returns:
        The rows (incomplete ones hold placeholders of one) and a bool mask [n] of complete ones.
    """
    shape = {}
    complete = np.ones(len(table), bool)
    aliases = {"tensors": "param_tensors"}
    for name, default in SHAPE_COLUMNS[family].items():
        column = aliases.get(name, name)
        if name == "skew":
            shape[name] = relabel(text(table, "distribution"), skew_of).astype(np.float64)
            continue
        values = number(table, column)
        missing = ~np.isfinite(values)
        if default is None:
            complete &= ~missing & (values > 0)
            values[missing | (values <= 0)] = 1.0
        else:
            values[missing] = default
        shape[name] = values
    layout = text(table, "layout") if family == "gemm" else None
    passes = text(table, "pass", "fwd")
    return _finish(family, shape, text(table, "op"), text(table, "dtype"), passes, layout), complete


def skew_of(distribution: str) -> float:
    """Exponent of the power law by which tokens choose experts; 0 where balanced."""
    _, _, exponent = str(distribution).rpartition("_")
    try:
        return float(exponent)
    except ValueError:
        return 0.0


def dtype_class(dtype: str) -> str:
    """Class of element types that run alike: fp16 and bf16 are `half`, all 8-bit floats `fp8`."""
    if dtype in ("fp16", "bf16"):
        return "half"
    return "fp8" if dtype.startswith("fp8") else dtype


def _element_bytes(dtype_class: str) -> float:
    return float(DTYPE_BYTES.get("bf16" if dtype_class == "half" else dtype_class, 4))


def _finish(
    family: str,
    shape: dict[str, np.ndarray],
    op_names: np.ndarray,
    dtypes: np.ndarray,
    passes: np.ndarray,
    layout: np.ndarray | None,
) -> Rows:
    """Add what all families need: the kind label and the flags that follow from names."""
    if family == "attention":
        shape["head_dim_v"] = np.where(shape["head_dim_v"] > 0, shape["head_dim_v"], shape["head_dim"])
        mixed = shape["mixed_n_decode"] > 0
        decode = (shape["seq_q"] == 1) & (shape["seq_kv"] > 1)
        mode = np.where(shape["causal"] > 0, "causal", "full")
        op_names = np.where(decode, "decode", np.where(mixed, "mixed", mode)).astype(object)
    elif family == "gemm":
        shape |= product_layout(op_names, passes, layout)
        op_names = relabel(op_names, lambda op: _GEMM_OPS.get(op, "linear"))
    elif family == "memory":
        op_names = _memory_ops(op_names, shape["n_inputs"])
    elif family == "embedding":
        op_names = relabel(op_names, lambda op: "embedding+dropout" if "dropout" in op else "embedding")
    elif family == "optimizer":
        op_names = relabel(op_names, lambda op: "sgd" if "sgd" in op else "adam")
    elif family == "conv":
        op_names = np.full(len(op_names), "conv2d", object)
    elif family == "moe":
        op_names = np.where(op_names == NONGATED_MOE, NONGATED_MOE, "moe").astype(object)
    classes = relabel(dtypes, dtype_class)
    shape["element_bytes"] = relabel(classes, _element_bytes).astype(np.float64)
    kind = classes + "/" + op_names + "/" + passes
    return Rows(family, shape, kind.astype(object))


def product_layout(
    op_names: np.ndarray, passes: np.ndarray, layout: np.ndarray | None = None
) -> dict[str, Float64[np.ndarray, "n"]]:
    """Whether the operands of products are transposed: as `layout` says (`TN`, ...), else as their pass has it."""
    base = np.array([_GEMM_LAYOUT.get(p, "") for p in passes], object)
    given = base if layout is None else np.where(layout != "", layout, base)
    default = np.where(op_names == "bmm", "NN", "TN")
    given = np.where(given == "", default, given).astype(str)
    return {
        "trans_a": (np.char.find(given, "T") == 0).astype(np.float64),
        "trans_b": (np.char.rfind(given, "T") == 1).astype(np.float64),
    }


def as_measured(rows: Rows, kinds: np.ndarray, work: np.ndarray) -> Rows:
    """Rows as those of the kinds by which they are answered, doing the work of others.

    Operands of a product lie as the measured op and pass have them (where only forward was timed, `NN` was not),
    forward products add to nothing, and scores are masked as in the measured op.
    """
    shape = rows.shape
    ops, passes = (relabel(kinds, lambda kind, at=at: kind.split("/")[at]) for at in (1, 2))
    if rows.family == "gemm":
        as_asked = relabel(rows.kind, _without_dtype) == relabel(kinds, _without_dtype)
        measured = product_layout(ops, passes)
        shape = shape | {name: np.where(as_asked, shape[name], flag) for name, flag in measured.items()}
        adds = relabel(work, lambda kind: kind.rpartition("/")[2] != "fwd").astype(bool)
        shape["accumulate"] = np.where(adds | as_asked, shape["accumulate"], 0.0)
    if rows.family == "attention":
        moved = (relabel(work, _without_dtype) != relabel(rows.kind, _without_dtype)) & np.isin(ops, ATTENTION_MASKS)
        shape = shape | {"causal": np.where(moved, (ops == "causal").astype(np.float64), shape["causal"])}
    return Rows(rows.family, shape, work)


def _without_dtype(kind: str) -> str:
    return kind.partition("/")[2]


_MEMORY_ALIASES: Final = {
    "rms_norm": "rms_or_layer_norm", "norm": "norm", "swiglu": "silu_mul", "geglu": "silu_mul",
    "bias_swiglu": "silu_mul", "residual_add": "add", "cross_entropy": "cross_entropy_unfused",
    "max_pool3x3s2": "max_pool", "rope_fused": "rope", "scale_causal_softmax": "scaled_causal_softmax_fused",
}  # fmt: skip
_MEMORY_OPS: Final = frozenset({
    "add", "add_scalar", "avg_pool", "batch_norm", "bias_dropout_add", "bias_gelu", "cross_entropy_unfused", "div",
    "div_scalar", "dropout", "gelu", "layer_norm", "masked_fill", "max_pool", "mul", "mul_scalar", "norm",
    "norm_unfused", "pow", "pow_scalar", "qk_norm", "quantize_fp8_static", "relu", "rms_norm_unfused",
    "rms_or_layer_norm", "rope", "rope_unfused", "scale_mask_softmax", "scaled_causal_softmax_fused", "silu",
    "silu_mul", "silu_mul_or_gelu", "softmax", "sub", "tanh", "where",
})  # fmt: skip


def _memory_ops(op_names: np.ndarray, n_inputs: np.ndarray) -> np.ndarray:
    """Known kernels keep their name; any other is an element-wise kernel of as many inputs."""

    def rule(op: str) -> str:
        op = _MEMORY_ALIASES.get(op, op)
        return op if op in _MEMORY_OPS else ""

    named = relabel(op_names, rule)
    generic = np.where(n_inputs >= 2, "add", "relu").astype(object)
    return np.where(named == "", generic, named).astype(object)
