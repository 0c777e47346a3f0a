"""What JAX's primitives cost, one by one, under XLA's convention of counting.

A multiply-add of a product is two FLOPs, any other arithmetic, comparison, selection or conversion one per
output element, of a reduction one per element taken in; transcendental functions are counted apart by XLA and
not as FLOPs (`HloCostAnalysis` of the XLA project).
"""

from collections.abc import Mapping
from math import log2, prod
from typing import Any, Final

TRANSCENDENTAL: Final = frozenset({
    "exp", "exp2", "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "asin", "acos", "atan", "sinh", "cosh",
    "asinh", "acosh", "atanh", "atan2", "logistic", "rsqrt", "sqrt", "cbrt", "pow", "erf", "erfc", "erf_inv",
    "lgamma", "digamma", "igamma", "igammac", "polygamma", "bessel_i0e", "bessel_i1e",
})  # fmt: skip
_ARITHMETIC: Final = frozenset({
    "add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min", "floor", "ceil", "round",
    "square", "select_n", "clamp", "convert_element_type", "reduce_precision", "is_finite", "nextafter",
    "eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "and", "or", "not", "xor", "shift_left",
    "shift_right_logical", "shift_right_arithmetic", "population_count", "clz", "mulhi", "conj", "real", "imag",
    "complex", "integer_pow",
})  # fmt: skip
_MOVING: Final = frozenset({"concatenate", "pad", "rev", "copy", "copy_p", "device_put", "tile", "roll"})
POINTWISE: Final = TRANSCENDENTAL | _ARITHMETIC | _MOVING
REDUCTIONS: Final = frozenset({
    "reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or", "reduce_xor", "argmax",
    "argmin", "reduce",
})  # fmt: skip
VIEWS: Final = frozenset({
    "reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice", "dynamic_slice", "split",
    "stop_gradient", "bitcast_convert_type", "optimization_barrier", "sharding_constraint", "mesh_cast", "reshard",
    "pvary", "pcast", "random_wrap", "random_unwrap", "name", "layout_constraint", "create_token", "to_edtype",
    "from_edtype",
})  # fmt: skip
CONSTANTS: Final = frozenset({"iota", "axis_index", "empty", "empty2", "random_seed", "partition_id", "rng_uniform"})
RANDOM: Final = frozenset({"threefry2x32", "random_bits", "random_split", "random_fold_in", "rng_bit_generator"})
ROW_WISE: Final = frozenset({
    "cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k", "reduce_window", "reduce_window_sum",
    "reduce_window_max", "reduce_window_min", "select_and_scatter_add", "select_and_gather_add",
    "dynamic_update_slice", "gather", "scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min",
    "scatter_max", "approx_top_k",
})  # fmt: skip
"""Kernels of their own that stream over memory."""

_THREEFRY_OPS: Final = 113
"""Integer operations of threefry's 20 rounds of five and its key injections (Salmon et al., SC11, section 4.2). JAX
evaluates it once per 32-bit word, so that bits do not depend on how an array is sharded."""
_ARGMAX_OPS: Final = 9
"""Operations of the comparator that keeps value and index: comparisons, their junctions and two selections."""


def pointwise_flops(name: str, n_elements: int, parameters: Mapping[str, Any]) -> float:
    """FLOPs of an element-wise primitive with so many output elements."""
    if name in TRANSCENDENTAL or name in _MOVING:
        return 0.0
    if name == "integer_pow":
        return float(n_elements) * _power_products(parameters["y"])
    return float(n_elements)


def _power_products(exponent: int) -> int:
    """Products by which repeated squaring raises to a power, and a division for a negative one."""
    power = abs(exponent)
    return max(0, power.bit_length() + power.bit_count() - 2) + (exponent < 0)


def reduction_flops(name: str, n_in: int, n_out: int) -> float:
    """FLOPs of a reduction of `n_in` elements to `n_out`."""
    return float(n_in - n_out) * (_ARGMAX_OPS if name in ("argmax", "argmin") else 1)


def random_flops(n_bytes: float) -> float:
    """Integer operations of so many random bytes."""
    return _THREEFRY_OPS * n_bytes / 4


def row_wise_flops(name: str, n_in: int, n_updates: int, n_out: int, window: tuple[int, ...]) -> float:
    """FLOPs of a row-wise kernel.

    Args:
        n_in: elements of the first operand.
        n_updates: elements of a scatter's updates.
        n_out: elements of the result.
        window: sizes of a reduction's window.
    """
    if name in ("sort", "top_k", "approx_top_k"):
        return n_in * log2(max(2, n_in))
    if name.startswith("cum"):
        return float(n_out)
    if name.startswith("reduce_window"):
        return float(n_out) * (prod(window) - 1)
    if name.startswith("select_and"):
        return float(n_in) * max(1, prod(window) - 1)
    return float(n_updates) if name.startswith("scatter") and name != "scatter" else 0.0


def linear_algebra_flops(name: str, shapes: list[tuple[int, ...]]) -> float | None:
    """FLOPs of a factorisation or solve of matrices in the last two axes, None where they are not known
    (Golub and Van Loan, Matrix Computations, 4th ed., chapters 3 to 5)."""
    if not shapes or len(shapes[0]) < 2:
        return None
    *batch, m, n = shapes[0]
    count = prod(batch)
    match name:
        case "cholesky":
            return count * n**3 / 3
        case "lu":
            return count * (m * n * min(m, n) - (m + n) * min(m, n) ** 2 / 2 + min(m, n) ** 3 / 3) * 2
        case "qr" | "geqrf":
            return count * 2.0 * min(m, n) ** 2 * (max(m, n) - min(m, n) / 3)
        case "triangular_solve":
            return float(n) * prod(shapes[1]) if len(shapes) > 1 else None
        case "fft":
            return 5.0 * prod(shapes[0]) * log2(max(2, n))
    return None
