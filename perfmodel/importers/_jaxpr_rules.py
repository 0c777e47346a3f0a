"""One equation of a jaxpr as one node of a graph."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.importers import _primitives as primitives
from perfmodel.importers._dtypes import Array
from perfmodel.importers._graph import Node, Value, streamed
from perfmodel.importers._products import ConvShape, convolution, product
from perfmodel.importers._rows import Unmapped
from perfmodel.ops import Embedding

_FULL_PRECISION: Final = ("HIGHEST", "HIGH", "F32_F32_F32", "float32")


def leaf(name: str, parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
    """The node of a primitive without a body."""
    out = outputs[0].array if outputs else Array.of("token", ())
    n_out = sum(value.array.n_elements for value in outputs)
    if name == "dot_general":
        return _dot(parameters, inputs, outputs)
    if name == "conv_general_dilated":
        shape = _conv_shape(parameters, inputs[0].array, inputs[1].array, out)
        return Node(name, "kernel", inputs, outputs, shape.flops, convolution(shape))
    if name in ("gather", "scatter-add", "scatter_add") and (found := _lookup(name, parameters, inputs, out)):
        return Node(name, "kernel", inputs, outputs, found.flops, found, found.bytes)
    if name in primitives.VIEWS:
        return Node(name, "view", inputs, outputs)
    if name in primitives.CONSTANTS:
        return Node(name, "view", (), outputs)
    if name in primitives.POINTWISE:
        return Node(name, "pointwise", inputs, outputs, primitives.pointwise_flops(name, out.n_elements, parameters))
    if name in primitives.RANDOM:
        flops = primitives.random_flops(sum(value.array.n_bytes for value in outputs))
        return Node(name, "pointwise", inputs, outputs, flops)
    if name in primitives.REDUCTIONS:
        n_in = max((value.array.n_elements for value in inputs), default=0)
        return Node(name, "reduction", inputs, outputs, primitives.reduction_flops(name, n_in, out.n_elements))
    if name in primitives.ROW_WISE:
        return _row_wise(name, parameters, inputs, outputs)
    shapes = [value.array.shape for value in inputs]
    known = primitives.linear_algebra_flops(name, shapes)
    reason = "no kernel family stands for it" + ("" if known else "; FLOPs at least one per output element")
    role = "effect" if not outputs or name.endswith("callback") else "unmapped"
    return Node(name, role, inputs, outputs, work=Unmapped(name, reason, float(known or n_out)))


def _dot(parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
    contract, batch = parameters["dimension_numbers"]
    lhs, rhs = inputs[0].array, inputs[1].array
    op = product(lhs, rhs, contract, batch, _product_dtype(lhs, parameters.get("precision")))
    return Node("dot_general", "kernel", inputs, outputs, op.flops, op)


def _product_dtype(lhs: Array, precision: Any) -> str:
    """Products of fp32 run on TF32 units unless more precision is asked for: XLA's default on accelerators."""
    names = str(getattr(precision, "name", precision))
    full = any(name in names for name in _FULL_PRECISION)
    return "tf32" if lhs.dtype == "fp32" and lhs.item_bytes == 4 and not full else lhs.dtype


def _conv_shape(parameters: Mapping[str, Any], lhs: Array, rhs: Array, out: Array) -> ConvShape:
    numbers = parameters["dimension_numbers"]
    (lb, lf, *ls), (_, ri, *rs), (_, of, *os) = numbers.lhs_spec, numbers.rhs_spec, numbers.out_spec
    return ConvShape(
        dtype=_product_dtype(lhs, parameters.get("precision")), batch=lhs.shape[lb], c_in=lhs.shape[lf],
        c_out=out.shape[of], kernel_c_in=rhs.shape[ri], space_in=_at(lhs, ls), kernel=_at(rhs, rs),
        space_out=_at(out, os), stride=tuple(parameters["window_strides"]),
        pad_low=tuple(low for low, _ in parameters["padding"]), in_dilation=tuple(parameters["lhs_dilation"]),
        kernel_dilation=tuple(parameters["rhs_dilation"]), groups=parameters["feature_group_count"],
        batch_groups=parameters["batch_group_count"],
    )  # fmt: skip


def _at(array: Array, axes: list[int]) -> tuple[int, ...]:
    return tuple(array.shape[i] for i in axes)


def _lookup(name: str, parameters: Mapping[str, Any], inputs: tuple[Value, ...], out: Array) -> Embedding | None:
    """A gather of whole rows of a matrix, or a scatter-add of such rows, as an embedding; else None."""
    table = inputs[0].array
    if len(table.shape) != 2 or table.item_bytes < 1:
        return None
    vocab, hidden = table.shape
    numbers = parameters["dimension_numbers"]
    if name == "gather":
        rows = tuple(parameters["slice_sizes"]) == (1, hidden)
        tokens = out.n_elements // max(1, hidden)
    else:
        rows = tuple(numbers.scatter_dims_to_operand_dims) == (0,) and tuple(numbers.inserted_window_dims) == (0,)
        tokens = inputs[2].array.n_elements // max(1, hidden)
    if not rows or hidden == 1:
        return None
    return Embedding(dtype=table.dtype, tokens=tokens, hidden=hidden, vocab=vocab,
                     pass_="fwd" if name == "gather" else "bwd")  # fmt: skip


def _row_wise(name: str, parameters: Mapping[str, Any], inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
    """A kernel that streams over its operands; in-place updates touch what they write only."""
    arrays = [value.array for value in inputs]
    out = outputs[0].array
    updates = arrays[-1] if name.startswith("scatter") and arrays else out
    window = tuple(parameters.get("window_dimensions", ()))
    n_in = arrays[0].n_elements if arrays else 0
    flops = primitives.row_wise_flops(name, n_in, updates.n_elements, out.n_elements, window)
    if name == "dynamic_update_slice":
        traffic, like = 2 * arrays[1].n_bytes, arrays[1]
    elif name.startswith("scatter"):
        traffic, like = 3 * updates.n_bytes, updates
    elif name == "gather":
        traffic, like = 2 * out.n_bytes + sum(a.n_bytes for a in arrays[1:]), out
    else:
        traffic = sum(a.n_bytes for a in arrays) + sum(value.array.n_bytes for value in outputs)
        like = max(arrays, key=lambda a: a.n_elements, default=out)
    return Node(name, "kernel", inputs, outputs, flops, streamed(name, like, traffic), traffic)
