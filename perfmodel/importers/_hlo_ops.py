"""What HLO's opcodes are, and what they cost (`HloCostAnalysis` of the XLA project)."""

import json
import re
from math import log2, prod
from typing import Final

from perfmodel.importers._dtypes import Array
from perfmodel.importers._hlo_text import Instruction
from perfmodel.importers._products import ConvShape
from perfmodel.ops import CollectiveKind, Gemm

TRANSCENDENTAL: Final = frozenset({
    "exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power", "sqrt", "cbrt", "rsqrt",
    "tanh", "sine", "cosine", "tan", "atan2", "erf", "acos", "acosh", "asin", "asinh", "atanh", "cosh", "sinh",
})  # fmt: skip
ARITHMETIC: Final = frozenset({
    "add", "subtract", "multiply", "divide", "remainder", "negate", "abs", "sign", "maximum", "minimum", "floor",
    "ceil", "round-nearest-afz", "round-nearest-even", "select", "clamp", "convert", "reduce-precision",
    "is-finite", "compare", "and", "or", "not", "xor", "shift-left", "shift-right-logical",
    "shift-right-arithmetic", "popcnt", "count-leading-zeros", "complex", "real", "imag", "map", "mulhi",
})  # fmt: skip
MOVING: Final = frozenset({"concatenate", "pad", "reverse"})
VIEWS: Final = frozenset({
    "reshape", "bitcast", "broadcast", "transpose", "slice", "dynamic-slice", "copy", "bitcast-convert", "copy-start",
    "copy-done", "add-dependency", "domain", "get-dimension-size", "after-all",
})  # fmt: skip
CONSTANTS: Final = frozenset({
    "constant", "iota", "partition-id", "replica-id", "rng-get-and-update-state", "create-token",
})  # fmt: skip
COLLECTIVES: Final[dict[str, CollectiveKind]] = {
    "all-reduce": "all_reduce", "all-gather": "all_gather", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "ragged-all-to-all": "all_to_all", "collective-permute": "send_recv",
    "collective-broadcast": "broadcast",
}  # fmt: skip
ROW_WISE: Final = frozenset({
    "sort", "topk", "scatter", "gather", "dynamic-update-slice", "select-and-scatter", "reduce-window",
})  # fmt: skip
IN_PLACE: Final = frozenset({"dynamic-update-slice", "gather", "reverse"})
"""Ops whose elements come from their first operand (or replace some of its)."""
FREE_CUSTOM_CALLS: Final = frozenset({
    "Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement", "LayoutConstraint",
    "MoveToHost", "MoveToDevice", "xla.sdy.FuncResultSharding", "AllocateBuffer",
})  # fmt: skip


def product_axes(instruction: Instruction) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...]]:
    """Contracted and batch axes of a `dot`: ((left, right), (left, right))."""
    axes = instruction.axes
    return (
        (axes("lhs_contracting_dims"), axes("rhs_contracting_dims")),
        (axes("lhs_batch_dims"), axes("rhs_batch_dims")),
    )


def library_product(instruction: Instruction, lhs: Array, out: Array) -> Gemm | None:
    """The product that a custom call to a vendor library computes; None if it is no such call."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if not re.search(r"gemm|matmul", target):
        return None
    try:
        config = json.loads(instruction.attributes.get("backend_config", "{}"))
    except json.JSONDecodeError:
        return None
    numbers = config.get("gemm_backend_config", config).get("dot_dimension_numbers", {})
    contracted = [int(i) for i in numbers.get("lhs_contracting_dimensions", (len(lhs.shape) - 1,))]
    batched = [int(i) for i in numbers.get("lhs_batch_dimensions", range(max(0, len(lhs.shape) - 2)))]
    k, batch = (prod(lhs.shape[i] for i in axes) for axes in (contracted, batched))
    m = lhs.n_elements // max(1, k * batch)
    n = out.n_elements // max(1, m * batch)
    return Gemm(op="bmm" if batch > 1 else "linear", dtype=lhs.dtype, m=m, n=n, k=k, batch=batch)


def conv_shape(instruction: Instruction, lhs: Array, rhs: Array, out: Array, dtype: str) -> ConvShape:
    """Shape of a `convolution` from its window and dimension labels (`b01f_01io->b01f`)."""
    left, kernel, result = re.split(r"_|->", instruction.attributes["dim_labels"])
    n_space = len(left) - 2
    window = _window(instruction)

    def space(array: Array, labels: str) -> tuple[int, ...]:
        return tuple(array.shape[labels.index(str(i))] for i in range(n_space))

    def sizes(name: str) -> tuple[int, ...]:
        return window.get(name, (1,) * n_space)

    return ConvShape(
        dtype=dtype, batch=lhs.shape[left.index("b")], c_in=lhs.shape[left.index("f")],
        c_out=out.shape[result.index("f")], kernel_c_in=rhs.shape[kernel.index("i")], space_in=space(lhs, left),
        kernel=space(rhs, kernel), space_out=space(out, result), stride=sizes("stride"),
        pad_low=window.get("pad", (0,) * n_space), in_dilation=sizes("lhs_dilate"),
        kernel_dilation=sizes("rhs_dilate"), groups=int(instruction.attributes.get("feature_group_count", 1)),
        batch_groups=int(instruction.attributes.get("batch_group_count", 1)),
    )  # fmt: skip


def _window(instruction: Instruction) -> dict[str, tuple[int, ...]]:
    """`{size=3x3 stride=2x2 pad=1_1x1_1}` as numbers by name; of paddings the lower ones."""
    items = re.findall(r"(\w+)=([\dx_\-]+)", instruction.attributes.get("window", ""))
    return {name: tuple(int(part.split("_")[0]) for part in value.split("x")) for name, value in items}


def disjoint_windows(instruction: Instruction) -> bool:
    """Whether a `reduce-window` takes every element once: the first stage of a reduction, or a pooling."""
    window = _window(instruction)
    return window.get("stride", ()) == window.get("size")


def window_size(instruction: Instruction) -> int:
    """Elements of a window."""
    return prod(_window(instruction).get("size", (1,)))


def element_flops(opcode: str, n_elements: int) -> float:
    """FLOPs of an element-wise opcode with so many output elements."""
    return float(n_elements) if opcode in ARITHMETIC else 0.0


def row_wise_flops(opcode: str, first: Array, updates: Array, out: Array, window: int, per_pair: float) -> float:
    """FLOPs of a row-wise opcode whose reducer, if any, costs `per_pair`."""
    match opcode:
        case "sort" | "topk":
            return first.n_elements * log2(max(2, first.n_elements))
        case "scatter":
            return updates.n_elements * per_pair
        case "reduce-window":
            return out.n_elements * (window - 1) * per_pair
        case "select-and-scatter":
            return first.n_elements * max(1, window - 1) * per_pair
    return 0.0
