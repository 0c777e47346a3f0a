"""Converts one equation of a jaxpr to a node of a graph, with the cost of JAX's primitives in XLA's
convention of counting.

A multiply-add of a product is two FLOPs, any other arithmetic, comparison, selection or conversion
one per output element, of a reduction one per element taken in; transcendental functions are
counted apart by XLA and not as FLOPs (`HloCostAnalysis` of the XLA project).
"""

from collections.abc import Mapping
from math import log2, prod
from typing import Any, Final

from perfmodel.ir.importers._graph import Array, Node, Value, streamed, unknown
from perfmodel.ir.importers._products import ConvShape, convolution, product, product_dtype
from perfmodel.ops import Embedding

_TRANSCENDENTAL: Final = frozenset(
    {
        *("exp", "exp2", "expm1", "log", "log1p", "tanh", "sin", "cos", "tan", "asin", "acos"),
        *("atan", "sinh", "cosh", "asinh", "acosh", "atanh", "atan2", "logistic", "rsqrt", "sqrt"),
        *("cbrt", "pow", "erf", "erfc", "erf_inv", "lgamma", "digamma", "igamma", "igammac"),
        *("polygamma", "bessel_i0e", "bessel_i1e"),
    }
)
_ARITHMETIC: Final = frozenset(
    {
        *("add", "add_any", "sub", "mul", "div", "rem", "neg", "abs", "sign", "max", "min"),
        *("floor", "ceil", "round", "square", "select_n", "clamp", "convert_element_type"),
        *("reduce_precision", "is_finite", "nextafter", "eq", "ne", "lt", "le", "gt", "ge"),
        *("eq_to", "lt_to", "le_to", "and", "or", "not", "xor", "shift_left"),
        *("shift_right_logical", "shift_right_arithmetic", "population_count", "clz", "mulhi"),
        *("conj", "real", "imag", "complex", "integer_pow"),
    }
)
_MOVING: Final = frozenset(
    {"concatenate", "pad", "rev", "copy", "copy_p", "device_put", "tile", "roll"}
)
_POINTWISE: Final = _TRANSCENDENTAL | _ARITHMETIC | _MOVING
_REDUCTIONS: Final = frozenset(
    {
        *("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"),
        *("reduce_xor", "argmax", "argmin", "reduce"),
    }
)
_VIEWS: Final = frozenset(
    {
        *("reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "slice"),
        *("dynamic_slice", "split", "stop_gradient", "bitcast_convert_type"),
        *("optimization_barrier", "sharding_constraint", "mesh_cast", "reshard", "pvary", "pcast"),
        *("random_wrap", "random_unwrap", "name", "layout_constraint", "create_token"),
        *("to_edtype", "from_edtype"),
    }
)
_CONSTANTS: Final = frozenset(
    {"iota", "axis_index", "empty", "empty2", "random_seed", "partition_id", "rng_uniform"}
)
_RANDOM: Final = frozenset(
    {"threefry2x32", "random_bits", "random_split", "random_fold_in", "rng_bit_generator"}
)
_ROW_WISE: Final = frozenset(
    {
        *("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "top_k"),
        *("reduce_window", "reduce_window_sum", "reduce_window_max", "reduce_window_min"),
        *("select_and_scatter_add", "select_and_gather_add", "dynamic_update_slice", "gather"),
        *("scatter", "scatter-add", "scatter_add", "scatter_mul", "scatter_min", "scatter_max"),
        *("approx_top_k",),
    }
)
"""Primitives that are separate kernels and stream over memory."""

_THREEFRY_OPS: Final = 113
"""Integer operations of threefry's 20 rounds of five and its key injections (Salmon et al., SC11,
section 4.2). JAX evaluates it once per 32-bit word, so that bits do not depend on how an array is
sharded."""
_ARGMAX_OPS: Final = 9
"""Operations of the comparator that keeps value and index: comparisons, their junctions and two
selections."""
_FULL_PRECISION: Final = ("HIGHEST", "HIGH", "F32_F32_F32", "float32")


def leaf(
    name: str, parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Node:
    """The node of a primitive without a body."""
    # Products and look-ups have kernel families; everything else is a view, an element-wise op, a
    # reduction or a stream.
    out = outputs[0].array if outputs else Array.of("token", ())
    if name == "dot_general":
        return _dot(parameters, inputs, outputs)
    if name == "conv_general_dilated":
        shape = _conv_shape(parameters, inputs[0].array, inputs[1].array, out)
        return Node(name, "kernel", inputs, outputs, shape.flops, convolution(shape))
    embedding = _lookup(name, parameters, inputs, out)
    if embedding is not None:
        return Node(name, "kernel", inputs, outputs, embedding.flops, embedding, embedding.bytes)
    if name in _VIEWS:
        return Node(name, "view", inputs, outputs)
    if name in _CONSTANTS:
        return Node(name, "view", (), outputs)
    if name in _POINTWISE:
        return Node(
            name, "pointwise", inputs, outputs, _pointwise_flops(name, out.n_elements, parameters)
        )
    if name in _RANDOM:
        # Generators are element-wise and fuse with what uses the numbers.
        random_words = sum(value.array.n_bytes for value in outputs) / 4
        return Node(name, "pointwise", inputs, outputs, _THREEFRY_OPS * random_words)
    if name in _REDUCTIONS:
        n_in = max((value.array.n_elements for value in inputs), default=0)
        per_element = _ARGMAX_OPS if name in ("argmax", "argmin") else 1
        return Node(name, "reduction", inputs, outputs, float(n_in - out.n_elements) * per_element)
    if name in _ROW_WISE:
        return _row_wise(name, parameters, inputs, outputs)
    shapes = [value.array.shape for value in inputs]
    # Prints and callbacks happen although nobody uses their result.
    acts = not outputs or name.endswith("callback")
    return unknown(name, inputs, outputs, _linear_algebra_flops(name, shapes), acts)


def _dot(
    parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Node:
    contract, batch = parameters["dimension_numbers"]
    lhs, rhs = inputs[0].array, inputs[1].array
    op = product(lhs, rhs, contract, batch, _product_dtype(lhs, parameters.get("precision")))
    return Node("dot_general", "kernel", inputs, outputs, op.flops, op)


def _product_dtype(lhs: Array, precision: Any) -> str:
    names = str(getattr(precision, "name", precision))
    return product_dtype(lhs, any(name in names for name in _FULL_PRECISION))


def _conv_shape(parameters: Mapping[str, Any], lhs: Array, rhs: Array, out: Array) -> ConvShape:
    """Shape of a convolution by its parameters, in the order of the kernel."""
    numbers = parameters["dimension_numbers"]
    # JAX states axes in any order; the kernel's are (features out, features in, space).
    batch_axis, in_feature, *in_space = numbers.lhs_spec
    _, kernel_feature, *kernel_space = numbers.rhs_spec
    _, out_feature, *out_space = numbers.out_spec
    return ConvShape(
        dtype=_product_dtype(lhs, parameters.get("precision")),
        batch=lhs.shape[batch_axis],
        c_in=lhs.shape[in_feature],
        c_out=out.shape[out_feature],
        kernel_c_in=rhs.shape[kernel_feature],
        space_in=_sizes_of_axes(lhs, in_space),
        kernel=_sizes_of_axes(rhs, kernel_space),
        space_out=_sizes_of_axes(out, out_space),
        stride=tuple(parameters["window_strides"]),
        pad_low=tuple(low for low, _ in parameters["padding"]),
        in_dilation=tuple(parameters["lhs_dilation"]),
        kernel_dilation=tuple(parameters["rhs_dilation"]),
        groups=parameters["feature_group_count"],
        batch_groups=parameters["batch_group_count"],
    )


def _sizes_of_axes(array: Array, axes: list[int]) -> tuple[int, ...]:
    return tuple(array.shape[i] for i in axes)


def _lookup(
    name: str, parameters: Mapping[str, Any], inputs: tuple[Value, ...], out: Array
) -> Embedding | None:
    """An embedding, if the op gathers or scatter-adds whole rows of a matrix; else None."""
    if name not in ("gather", "scatter-add", "scatter_add"):
        return None
    table = inputs[0].array
    if len(table.shape) != 2 or table.item_bytes < 1:
        return None
    vocab, hidden = table.shape
    numbers = parameters["dimension_numbers"]
    # Rows: one index per row, the whole width taken.
    if name == "gather":
        takes_rows = tuple(parameters["slice_sizes"]) == (1, hidden)
        n_elements = out.n_elements
    else:
        # An index names a row, of which all columns are written.
        indexed = tuple(numbers.scatter_dims_to_operand_dims)
        inserted = tuple(numbers.inserted_window_dims)
        takes_rows = indexed == inserted == (0,)
        n_elements = inputs[2].array.n_elements
    if not takes_rows or hidden == 1:
        return None
    tokens = n_elements // max(1, hidden)
    pass_ = "fwd" if name == "gather" else "bwd"
    return Embedding(dtype=table.dtype, tokens=tokens, hidden=hidden, vocab=vocab, pass_=pass_)


def _row_wise(
    name: str, parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]
) -> Node:
    """A kernel that streams over its operands; in-place updates touch only what they write."""
    arrays = [value.array for value in inputs]
    out = outputs[0].array
    # A scatter's last operand is what it writes; the first is the (much larger) array that it
    # writes into.
    updates = arrays[-1] if name.startswith("scatter") and arrays else out
    window = tuple(parameters.get("window_dimensions", ()))
    n_in = arrays[0].n_elements if arrays else 0
    flops = _row_wise_flops(name, n_in, updates.n_elements, out.n_elements, window)
    # An update in place reads and writes its slice; a scatter reads the old values, too.
    if name == "dynamic_update_slice":
        traffic = 2 * arrays[1].n_bytes
        streamed_array = arrays[1]
    elif name.startswith("scatter"):
        traffic = 3 * updates.n_bytes
        streamed_array = updates
    elif name == "gather":
        traffic = 2 * out.n_bytes + sum(a.n_bytes for a in arrays[1:])
        streamed_array = out
    else:
        traffic = sum(a.n_bytes for a in arrays) + sum(value.array.n_bytes for value in outputs)
        streamed_array = max(arrays, key=lambda a: a.n_elements, default=out)
    return Node(
        name, "kernel", inputs, outputs, flops, streamed(name, streamed_array, traffic), traffic
    )


def _pointwise_flops(name: str, n_elements: int, parameters: Mapping[str, Any]) -> float:
    """FLOPs of an element-wise primitive with so many output elements."""
    if name in _TRANSCENDENTAL or name in _MOVING:
        return 0.0
    if name == "integer_pow":
        return float(n_elements) * _power_products(parameters["y"])
    return float(n_elements)


def _power_products(exponent: int) -> int:
    """Products by which repeated squaring raises to a power, and a division for a negative one."""
    # Binary exponentiation squares once per bit after the first, and multiplies once per further
    # set bit.
    power = abs(exponent)
    return max(0, power.bit_length() + power.bit_count() - 2) + (exponent < 0)


def _row_wise_flops(
    name: str, n_in: int, n_updates: int, n_out: int, window: tuple[int, ...]
) -> float:
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


def _linear_algebra_flops(name: str, shapes: list[tuple[int, ...]]) -> float | None:
    """FLOPs of a factorisation or solve of matrices in the last two axes, None where they are not
    known (Golub and Van Loan, Matrix Computations, 4th ed., chapters 3 to 5)."""
    if not shapes or len(shapes[0]) < 2:
        return None
    *batch, m, n = shapes[0]
    count = prod(batch)
    short = min(m, n)
    match name:
        case "cholesky":
            return count * n**3 / 3
        case "lu":
            return count * (m * n * short - (m + n) * short**2 / 2 + short**3 / 3) * 2
        case "qr" | "geqrf":
            return count * 2.0 * short**2 * (max(m, n) - short / 3)
        case "triangular_solve":
            return float(n) * prod(shapes[1]) if len(shapes) > 1 else None
        case "fft":
            return 5.0 * prod(shapes[0]) * log2(max(2, n))
    return None
