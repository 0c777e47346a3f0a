"""ONNX graphs as programs of the IR. The package `onnx` is an extra and imported on use."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ir import Program
from perfmodel.ir.importers._emitter import Known, Missing, Ref
from perfmodel.ir.importers._foreign import Graph
from perfmodel.ir.importers._onnx import element_type, load_onnx
from perfmodel.ir.importers.foreign_ops import FOREIGN_OPS

_WEIGHT_ELEMENTS = 1024
"""Least size at which a constant of floats is a weight; some exporters write weights as
constants."""
_TAKE_WEIGHTS = frozenset(
    {
        *("MatMul", "Gemm", "Conv", "ConvTranspose", "Gather"),
        *("LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization"),
    }
)
"""Operators whose operands other than activations are weights."""
_FOLDED = frozenset(
    {op.partition(".")[0] for op in FOREIGN_OPS} | {"val", "cos", "sin", "arange", "full"}
)
"""Prefixes of names of folded values: the ATen op that made them, or `val`."""


def onnx_program(
    model: Any,
    *,
    dims: Mapping[str, int] | None = None,
    values: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> Program:
    """An ONNX model as an IR program: initializers of floats are its parameters, inputs its data.

    Shapes, masks and positions that do not depend on weights or data are computed while reading,
    also from the values of inputs that are given beforehand. Weights need no data (they may lie in
    files that are not there).

    Args:
        model: path of a file, or an `onnx.ModelProto`.
        dims: sizes of the dimensions that the model names instead of fixing them, as
            `{"batch": 8}`.
        values: values of inputs that shapes or masks depend on; a number fills the input's shape.
        name: name of the program (default: the graph's).

    Raises:
        PerfModelError: the extra is not installed, a file that cannot be read, a dimension whose
            size is not known, an unknown input, or operators that no op of the IR stands for, all
            named.
    """
    onnx, model = load_onnx(model)
    graph = model.graph
    reader = Graph(name or model.graph.name or "onnx")
    operands = _operands(graph)
    _read_initializers(onnx, reader, graph, operands)
    _read_inputs(onnx, reader, graph, dims or {}, dict(values or {}))
    versions = {item.domain: item.version for item in model.opset_import}
    for node in graph.node:
        _node(onnx, reader, node, versions, operands)
    return reader.program([reader.values[tensor.name] for tensor in graph.output])


def _read_initializers(onnx: Any, reader: Graph, graph: Any, operands: frozenset[str]) -> None:
    """Declare stored tensors as weights, or record them as known values."""
    # Running statistics of batch norms are not trained, though they are stored as weights are.
    statistics: set[str] = set()
    for node in graph.node:
        if node.op_type == "BatchNormalization":
            statistics.update(node.input[3:])
    for tensor in graph.initializer:
        kind = element_type(onnx, tensor.data_type)
        shape = tuple(tensor.dims)
        # Integers and single numbers are shapes, indices and scales.
        is_float = kind.startswith(("float", "bfloat")) and np.prod(shape) > 1
        if is_float and tensor.name not in statistics and _trained(tensor.name, operands):
            reader.weight(tensor.name, kind, shape)
        else:
            reader.values[tensor.name] = Known.of(onnx.numpy_helper.to_array(tensor))


def _read_inputs(
    onnx: Any, reader: Graph, graph: Any, dims: Mapping[str, int], values: dict[str, Any]
) -> None:
    """Declare inputs as data, or record their values if given.

    Raises:
        PerfModelError: a dimension whose size is not known, or a value of an unknown input.
    """
    for tensor in graph.input:
        # Stored tensors are listed among the inputs too.
        if tensor.name in reader.values:
            continue
        tensor_type = tensor.type.tensor_type
        has_value = tensor.name in values
        shape = [_size(tensor.name, dim, dims, has_value) for dim in tensor_type.shape.dim]
        reader.input(tensor.name, element_type(onnx, tensor_type.elem_type), shape, values)

    # Used values are removed; the rest belongs to no input.
    if values:
        raise PerfModelError(
            f"{reader.name}: no input is named {', '.join(values)}; inputs: "
            f"{', '.join(tensor.name for tensor in graph.input)}"
        )


def _operands(graph: Any) -> frozenset[str]:
    """Names of the operands of products, norms and look-ups other than activations."""
    names: set[str] = set()
    stored = {tensor.name for tensor in graph.initializer}
    for node in graph.node:
        if node.op_type in _TAKE_WEIGHTS:
            names.update(node.input)
        # Each token takes the weights of its own experts; parts of masks are taken by stored
        # numbers.
        if node.op_type == "GatherND" and node.input[1] not in stored:
            names.add(node.input[0])
    return frozenset(names)


def _trained(name: str, operands: frozenset[str]) -> bool:
    """Whether a tensor of floats is a weight.

    Exporters fold what does not depend on inputs (masks, rotary angles, positions that were looked
    up) and name it after the op that made it; a weight keeps the name of its module unless it was
    transposed on the way to a product.
    """
    base = re.sub(r"_\d+$", "", name)
    is_generated = name.startswith(("onnx::", "/")) or base in _FOLDED
    return not is_generated or name in operands


def _node(
    onnx: Any, reader: Graph, node: Any, versions: Mapping[str, int], operands: frozenset[str]
) -> None:
    """Read one node, and record the items of its outputs."""
    args = [reader.values[name] if name else None for name in node.input]
    items = _output_items(onnx, reader, node, args, versions)
    # All outputs of an unmapped node are missing.
    if isinstance(items[0], Missing):
        items = [Missing()] * len(node.output)
    for name, item in zip(node.output, items, strict=False):
        if not name:
            continue
        reader.values[name] = item
        # Some exporters write weights as constants in the graph.
        if node.op_type != "Constant" or not isinstance(item, Known):
            continue
        array = item.array
        if array.dtype.kind == "f" and array.size > _WEIGHT_ELEMENTS and _trained(name, operands):
            reader.weight(name, array.dtype.name, array.shape)


def _output_items(
    onnx: Any, reader: Graph, node: Any, args: list[Any], versions: Mapping[str, int]
) -> list[Any]:
    """Results of a node; what only depends on shapes is computed here."""
    attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
    # The step from data to shapes (DistIR, figure 4): data are unknown, their sizes are not.
    x = args[0] if args else None
    if node.op_type in ("Shape", "Size") and isinstance(x, Ref):
        shape = reader.emitter.shape(x)
        part = shape[attributes.get("start", 0) : attributes.get("end", len(shape))]
        sizes = part if node.op_type == "Shape" else np.prod(part)
        return [Known.of(np.array(sizes, np.int64))]

    # Older operator sets split into as many equal parts as there are outputs.
    if node.op_type == "Split" and "split" not in attributes and len(args) < 2:
        attributes["num_outputs"] = len(node.output)
    if node.op_type == "Cast":
        attributes["to_dtype"] = element_type(onnx, attributes["to"])
    node_name = node.name or node.output[0]
    return reader.node(
        node.op_type, node_name, args, attributes, lambda: _computed(onnx, node, args, versions)
    )


def _computed(onnx: Any, node: Any, args: list[Any], versions: Mapping[str, int]) -> list[Any]:
    """Compute a node whose operands are all known, by ONNX's own reference evaluator."""
    from onnx.reference import ReferenceEvaluator  # pyright: ignore[reportMissingImports]

    # A model of a single node, so that the operator-set version of the file decides what the node
    # means.
    helper = onnx.helper
    arrays = {name: arg.array for name, arg in zip(node.input, args, strict=True) if name}
    inputs = []
    for name, array in arrays.items():
        dtype = helper.np_dtype_to_tensor_dtype(array.dtype)
        inputs.append(helper.make_tensor_value_info(name, dtype, array.shape))
    outputs = [onnx.ValueInfoProto(name=name) for name in node.output]
    imports = [helper.make_opsetid(domain, version) for domain, version in versions.items()]
    graph = helper.make_graph([node], "node", inputs, outputs)
    model = helper.make_model(graph, opset_imports=imports)
    return [Known.of(array) for array in ReferenceEvaluator(model).run(None, arrays)]


def _size(tensor: str, dim: Any, dims: Mapping[str, int], known: bool) -> int | None:
    """Size of an input's dimension; None if the dimension is free and the input known."""
    if dim.HasField("dim_value"):
        return dim.dim_value
    if dim.dim_param not in dims and not known:
        label = dim.dim_param or "?"
        raise PerfModelError(
            f"input {tensor}: dimension {label!r} is not fixed; give its size (dims, or --dim {label}=N)"
        )
    return dims.get(dim.dim_param)
