"""ONNX models as op tables. The package `onnx` is an extra and imported on use."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from math import prod
from pathlib import Path
from typing import Any, Final

from perfmodel.errors import PerfModelError
from perfmodel.ir.importers._graph import Array, Node, Region, Value, rows_of, streamed, unknown
from perfmodel.ir.importers._products import ConvShape, convolution, product
from perfmodel.ir.importers._table import OpTable
from perfmodel.ops import Attention, Embedding

_VIEWS: Final = frozenset(
    {
        *("Reshape", "Transpose", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Expand"),
        *("Slice", "Split", "Dropout", "DepthToSpace", "SpaceToDepth", "OptionalGetElement"),
    }
)
"""Operators whose users read their input in place (dropout does nothing in inference)."""
_CONSTANTS: Final = frozenset({"Constant", "ConstantOfShape", "Shape", "Size", "Range", "EyeLike"})
_POINTWISE: Final[dict[str, int]] = {
    **dict.fromkeys(
        (
            *("Add", "Sub", "Mul", "Div", "Mod", "Max", "Min", "Neg", "Abs", "Sign", "Floor"),
            *("Ceil", "Round", "Where", "Cast", "CastLike", "Equal", "Greater", "GreaterOrEqual"),
            *("Less", "LessOrEqual", "And", "Or", "Xor", "Not", "IsNaN", "IsInf", "BitShift"),
            *("Relu", "Sum", "Mean"),
        ),
        1,
    ),
    **dict.fromkeys(
        (
            *("Exp", "Log", "Sqrt", "Pow", "Tanh", "Sin", "Cos", "Erf", "Sigmoid", "Reciprocal"),
            *("Softplus", "Concat", "Pad", "Tile", "Trilu"),
        ),
        0,
    ),
    "Clip": 2,
    "LeakyRelu": 3,
    "PRelu": 3,
    "Elu": 3,
    "HardSigmoid": 4,
    "HardSwish": 5,
    "Mish": 1,
    "Swish": 1,
    "Gelu": 3,
    "BatchNormalization": 4,
    "QuantizeLinear": 3,
    "DequantizeLinear": 2,
}
"""FLOPs per output element; batch normalisation at inference is a scale and a shift of known
statistics."""
_REDUCTIONS: Final = frozenset(
    {
        *("ReduceSum", "ReduceMean", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1"),
        *("ReduceL2", "ReduceSumSquare", "ReduceLogSumExp", "ArgMax", "ArgMin"),
    }
)
_ROW_WISE: Final[dict[str, tuple[str, float]]] = {
    "Softmax": ("softmax", 4),
    "LogSoftmax": ("softmax", 4),
    "LayerNormalization": ("layer_norm", 7),
    "RMSNormalization": ("rms_norm", 4),
    "SkipLayerNormalization": ("layer_norm", 8),
    "GroupNormalization": ("layer_norm", 7),
    "InstanceNormalization": ("layer_norm", 7),
    "RotaryEmbedding": ("rope", 3),
    "CumSum": ("cumsum", 1),
    "TopK": ("top_k", 0),
    "Resize": ("copy", 4),
    "GatherElements": ("copy", 0),
    "GatherND": ("copy", 0),
    "ScatterND": ("copy", 0),
    "ScatterElements": ("copy", 0),
    "GlobalAveragePool": ("avg_pool", 0),
    "GlobalMaxPool": ("max_pool", 0),
    "MaxPool": ("max_pool", 0),
    "AveragePool": ("avg_pool", 0),
}
"""Operators that are separate kernels: the name that they are timed under, and FLOPs per output
element (pooling: per window)."""


def read_onnx(
    model: Any, *, dims: Mapping[str, int] | None = None, name: str | None = None
) -> OpTable:
    """Kernels of an ONNX model, forward only, as its operators state them.

    Args:
        model: path of a file, or an `onnx.ModelProto`.
        dims: sizes of the dimensions that the model names instead of fixing them, e.g.
            `{"batch": 8}`.
        name: name of the table (default: the graph's).

    Raises:
        PerfModelError: the extra is not installed, a file that cannot be read, or a dimension
            (named, with its tensor) whose size is not known.
    """
    # Shapes are inferred anew on a copy, because the caller's model may be used again with other
    # sizes.
    onnx, model = load_onnx(model)
    static = onnx.ModelProto()
    static.CopyFrom(model)
    graph = static.graph
    _fix_dimensions(graph, dims or {})
    try:
        graph = onnx.shape_inference.infer_shapes(static, data_prop=True).graph
    except onnx.shape_inference.InferenceError as error:
        raise PerfModelError(
            f"ONNX model {graph.name}: shapes cannot be inferred ({error})"
        ) from None
    rows = rows_of(_Reader(onnx, graph).region())
    return OpTable(name=name or graph.name or "onnx", **rows._asdict())


def load_onnx(model: Any) -> tuple[Any, Any]:
    """The package `onnx`, and the model of a path (without external weights) or the model itself.

    Raises:
        PerfModelError: the extra is not installed, or the file cannot be read.
    """
    try:
        onnx = import_module("onnx")
        import_module("onnx.shape_inference")
    except ImportError:
        raise PerfModelError(
            "reading ONNX needs the package onnx; install perfmodel[onnx]"
        ) from None
    if isinstance(model, (str, Path)):
        try:
            model = onnx.load(str(model), load_external_data=False)
        except Exception as error:
            raise PerfModelError(f"{model}: not a readable ONNX model ({error})") from None
    return onnx, model


def element_type(onnx: Any, number: int) -> str:
    """NumPy's name of an element type, by ONNX's number."""
    name = str(onnx.TensorProto.DataType.Name(number)).lower()
    return {"float": "float32", "double": "float64"}.get(name, name)


def _fix_dimensions(graph: Any, dims: Mapping[str, int]) -> None:
    """Give named dimensions of the inputs their sizes, and drop what was inferred for others."""
    weights = {tensor.name for tensor in graph.initializer}
    for tensor in graph.input:
        for dim in tensor.type.tensor_type.shape.dim:
            if dim.dim_param in dims and dim.dim_param:
                dim.dim_value = dims[dim.dim_param]
            elif not dim.HasField("dim_value") and tensor.name not in weights:
                raise PerfModelError(
                    f"input {tensor.name}: dimension {dim.dim_param or '?'!r} is not fixed; give its size, "
                    f"dims={{{dim.dim_param or 'name'!r}: ...}}"
                )
    # Shapes inferred for other sizes would contradict the given ones.
    del graph.value_info[:]
    for tensor in graph.output:
        tensor.type.tensor_type.ClearField("shape")


@dataclass
class _Reader:
    """Nodes of one graph, in its own (topological) order."""

    onnx: Any
    graph: Any
    values: dict[str, Value] = field(default_factory=dict)
    known: set[str] = field(default_factory=set)
    """Values that do not depend on inputs: weights, constants, shapes, and results of only
    these."""

    def region(self) -> Region:
        """Return the graph's nodes and outputs, with weights as known values."""
        for tensor in (*self.graph.input, *self.graph.value_info, *self.graph.output):
            self.values[tensor.name] = Value(self._declared(tensor))
        # A weight that is an input as well may be given anew with every call.
        graph_inputs = {tensor.name for tensor in self.graph.input}
        for tensor in self.graph.initializer:
            self.values[tensor.name] = Value(
                Array.of(element_type(self.onnx, tensor.data_type), tuple(tensor.dims))
            )
            if tensor.name not in graph_inputs:
                self.known.add(tensor.name)
        nodes = [self._node(node) for node in self.graph.node]
        outputs = [self.values[tensor.name] for tensor in self.graph.output]
        return Region(tuple(nodes), tuple(outputs))

    def _declared(self, tensor: Any) -> Array:
        """Type and shape that the graph declares for a tensor, all of whose sizes must be known."""
        kind = tensor.type.tensor_type
        unknown = [d.dim_param or "?" for d in kind.shape.dim if not d.HasField("dim_value")]
        if not kind.HasField("shape"):
            unknown = ["all"]
        if unknown:
            raise PerfModelError(
                f"tensor {tensor.name}: dimension {unknown[0]!r} depends on data or is not given; add it to dims"
            )
        return Array.of(
            element_type(self.onnx, kind.elem_type), tuple(d.dim_value for d in kind.shape.dim)
        )

    def _value(self, name: str, node: Any) -> Value:
        """Return a value whose shape must be known."""
        if name not in self.values:
            raise PerfModelError(
                f"ONNX node {node.name or node.op_type}: the shape of {name!r} is not known (operator "
                f"{node.op_type} has no shape inference, or the shape depends on data)"
            )
        return self.values[name]

    def _node(self, node: Any) -> Node:
        """Translate one node of the graph."""
        op = node.op_type
        a = {item.name: self.onnx.helper.get_attribute_value(item) for item in node.attribute}
        named = [name for name in node.input if name]
        inputs = tuple(self._value(name, node) for name in named)
        outputs = tuple(self._value(name, node) for name in node.output if name)
        # Values that depend only on weights, constants and shapes are computed once, when the model
        # is loaded (ONNX Runtime's constant_folding.cc), and cost a step nothing. Quantised weights
        # stay as they are stored.
        is_folded = bool(named) and self.known.issuperset(named) and op != "DequantizeLinear"
        if op in _CONSTANTS or is_folded:
            self.known.update(node.output)
            return Node(op, "view", (), outputs)
        arrays = [value.array for value in inputs]
        out = outputs[0].array
        match op:
            case "MatMul" | "Gemm" | "MatMulInteger":
                gemm = _product(arrays[0], arrays[1], bool(a.get("transA")), bool(a.get("transB")))
                return Node(op, "kernel", inputs, outputs, gemm.flops, gemm)
            case "Conv":
                shape = _conv_shape(arrays[0], arrays[1], out, a)
                return Node(op, "kernel", inputs, outputs, shape.flops, convolution(shape))
            case "Attention" | "MultiHeadAttention":
                attention = _attention(arrays, a)
                return Node(op, "kernel", inputs, outputs, attention.flops, attention)
            case "Gather":
                return _gather(inputs, outputs, a)
        if op in _VIEWS:
            return Node(op, "view", inputs[:1], outputs)
        if op in _POINTWISE:
            # These take any number of operands, joined pair by pair.
            terms = max(1, len(inputs) - 1) if op in ("Sum", "Mean", "Max", "Min") else 1
            return Node(
                op, "pointwise", inputs, outputs, float(out.n_elements * _POINTWISE[op] * terms)
            )
        if op in _REDUCTIONS:
            return Node(
                op, "reduction", inputs, outputs, float(arrays[0].n_elements - out.n_elements)
            )
        if op in _ROW_WISE:
            return _row_wise(op, inputs, outputs, a)
        return unknown(op, inputs, outputs)


def _product(lhs: Array, rhs: Array, transpose_a: bool, transpose_b: bool) -> Any:
    """A matrix product; batch axes that only the left operand has count as rows."""
    # Like NumPy's `matmul`: the last axis of the left operand meets the last but one of the right.
    contracted_lhs = len(lhs.shape) - 1 - transpose_a
    contracted_rhs = max(0, len(rhs.shape) - 2 + transpose_b)
    batch = range(len(rhs.shape) - 2) if len(rhs.shape) == len(lhs.shape) > 2 else range(0)
    shared = tuple(i for i in batch if rhs.shape[i] == lhs.shape[i])
    return product(lhs, rhs, ((contracted_lhs,), (contracted_rhs,)), (shared, shared))


def _conv_shape(lhs: Array, rhs: Array, out: Array, a: Mapping[str, Any]) -> ConvShape:
    """Shape of a convolution, whose operands have the axes batch, features, space, and whose
    kernels have features out, features in, space."""
    n_space = len(lhs.shape) - 2
    ones = (1,) * n_space
    stride = tuple(a.get("strides", ones))
    dilation = tuple(a.get("dilations", ones))
    low = tuple(a.get("pads", (0,) * 2 * n_space))[:n_space]
    # "Same" padding follows from the sizes; half of it (rounded down) lies before the image.
    if a.get("auto_pad", b"NOTSET") in (b"SAME_UPPER", b"SAME_LOWER"):
        padding = []
        for size, kernel, results, step, spread in zip(
            lhs.shape[2:], rhs.shape[2:], out.shape[2:], stride, dilation, strict=True
        ):
            covered = (results - 1) * step + (kernel - 1) * spread + 1
            padding.append(max(0, covered - size) // 2)
        low = tuple(padding)
    return ConvShape(
        dtype=lhs.dtype,
        batch=lhs.shape[0],
        c_in=lhs.shape[1],
        c_out=rhs.shape[0],
        kernel_c_in=rhs.shape[1],
        space_in=lhs.shape[2:],
        kernel=rhs.shape[2:],
        space_out=out.shape[2:],
        stride=stride,
        pad_low=low,
        in_dilation=ones,
        kernel_dilation=dilation,
        groups=int(a.get("group", 1)),
    )


def _attention(arrays: list[Array], a: Mapping[str, Any]) -> Attention:
    """The fused operator, on (batch, heads, sequence, size) or with heads merged."""
    q, k, v = arrays[:3]
    # ONNX allows heads as an axis or merged into the width, with their numbers in attributes.
    if len(q.shape) == 4:
        (batch, heads, seq_q, size), (_, kv_heads, seq_kv, _), size_v = (
            q.shape,
            k.shape,
            v.shape[-1],
        )
    else:
        heads = int(a.get("q_num_heads", a.get("num_heads", 1)))
        kv_heads = int(a.get("kv_num_heads", heads))
        (batch, seq_q, width), seq_kv = q.shape, k.shape[1]
        size = width // heads
        size_v = v.shape[-1] // kv_heads
    return Attention(
        op="flash_attention",
        dtype=q.dtype,
        batch=batch,
        heads=heads,
        kv_heads=kv_heads,
        seq_q=seq_q,
        seq_kv=seq_kv,
        head_dim=size,
        head_dim_v=0 if size_v == size else size_v,
        causal=bool(a.get("is_causal", 0)),
    )


def _gather(inputs: tuple[Value, ...], outputs: tuple[Value, ...], a: Mapping[str, Any]) -> Node:
    """A gather: rows of a matrix are an embedding, everything else is a copy."""
    table, out = inputs[0].array, outputs[0].array
    if len(table.shape) == 2 and int(a.get("axis", 0)) == 0:
        vocab, hidden = table.shape
        op = Embedding(
            dtype=table.dtype, tokens=out.n_elements // hidden, hidden=hidden, vocab=vocab
        )
        return Node("Gather", "kernel", inputs, outputs, 0.0, op, op.bytes)
    # One element of an axis is a view.
    if len(inputs) > 1 and inputs[1].array.n_elements == 1:
        return Node("Gather", "view", inputs[:1], outputs)
    return Node(
        "Gather",
        "kernel",
        inputs,
        outputs,
        0.0,
        streamed("copy", out, 2 * out.n_bytes),
        2 * out.n_bytes,
    )


def _row_wise(
    op: str, inputs: tuple[Value, ...], outputs: tuple[Value, ...], a: Mapping[str, Any]
) -> Node:
    """A norm, softmax or pooling, which reads its operand once."""
    source, out = inputs[0].array, outputs[0].array
    timed_as, per_element = _ROW_WISE[op]
    flops = per_element * out.n_elements
    # A window of n elements is joined by n - 1 operations; a global pooling's window is the image.
    if op.endswith("Pool"):
        window = source.n_elements // out.n_elements
        if "kernel_shape" in a:
            window = prod(a["kernel_shape"])
        flops = float(out.n_elements * (window - 1))
    traffic = source.n_bytes + out.n_bytes
    kernel = streamed(timed_as, source, traffic)
    return Node(op, "kernel", inputs, outputs, flops, kernel, traffic)
