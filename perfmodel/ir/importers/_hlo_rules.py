"""Converts one instruction of a compiled module to a node of a graph: the meaning of HLO's opcodes,
and their costs (`HloCostAnalysis` of the XLA project)."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, prod
from typing import Final

from perfmodel.errors import PerfModelError
from perfmodel.ingest.profiles import HLO_COLLECTIVES
from perfmodel.ir.importers._graph import Array, Node, Value, streamed, unknown
from perfmodel.ir.importers._hlo_text import Computation, HloModule, Instruction, Type
from perfmodel.ir.importers._products import ConvShape, convolution, product, product_dtype
from perfmodel.ops import CollectiveKind, Embedding, Gemm

_TRANSCENDENTAL: Final = frozenset(
    {
        *("exponential", "exponential-minus-one", "log", "log-plus-one", "logistic", "power"),
        *("sqrt", "cbrt", "rsqrt", "tanh", "sine", "cosine", "tan", "atan2", "erf", "acos"),
        *("acosh", "asin", "asinh", "atanh", "cosh", "sinh"),
    }
)
_ARITHMETIC: Final = frozenset(
    {
        *("add", "subtract", "multiply", "divide", "remainder", "negate", "abs", "sign"),
        *("maximum", "minimum", "floor", "ceil", "round-nearest-afz", "round-nearest-even"),
        *("select", "clamp", "convert", "reduce-precision", "is-finite", "compare", "and", "or"),
        *("not", "xor", "shift-left", "shift-right-logical", "shift-right-arithmetic", "popcnt"),
        *("count-leading-zeros", "complex", "real", "imag", "map", "mulhi"),
    }
)
_MOVING: Final = frozenset({"concatenate", "pad", "reverse"})
_VIEWS: Final = frozenset(
    {
        *("reshape", "bitcast", "broadcast", "transpose", "slice", "dynamic-slice", "copy"),
        *("bitcast-convert", "copy-start", "copy-done", "add-dependency", "domain"),
        *("get-dimension-size", "after-all"),
    }
)
_CONSTANTS: Final = frozenset(
    {
        "constant",
        "iota",
        "partition-id",
        "replica-id",
        "rng-get-and-update-state",
        "create-token",
    }
)
COLLECTIVES: Final[dict[str, CollectiveKind]] = {
    **HLO_COLLECTIVES,
    "ragged-all-to-all": "all_to_all",
    "collective-broadcast": "broadcast",
}
_ROW_WISE: Final = frozenset(
    {
        "sort",
        "topk",
        "scatter",
        "gather",
        "dynamic-update-slice",
        "select-and-scatter",
        "reduce-window",
    }
)
_IN_PLACE: Final = frozenset({"dynamic-update-slice", "gather", "reverse"})
"""Ops whose elements come from their first operand, or replace some of them."""
_FREE_CUSTOM_CALLS: Final = frozenset(
    {
        *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape", "annotate_device_placement"),
        *("LayoutConstraint", "MoveToHost", "MoveToDevice", "xla.sdy.FuncResultSharding"),
        *("AllocateBuffer",),
    }
)
_HALF: Final = ("bf16", "fp16")


def widened(module: HloModule) -> bool:
    """Whether the compiler widened 16-bit arithmetic to 32 bits, as XLA does for CPUs."""
    # A program that multiplies in 16 bits does so somewhere, unless the compiler has replaced all
    # of it. XLA's CPU backend has no bf16 arithmetic: it converts to fp32, computes, converts back.
    # An accelerator would not.
    halves = products = False
    for computation in module.computations.values():
        types = {i.name: i.type for i in computation.instructions}
        for i in computation.instructions:
            halves = halves or _is_half(i.type)
            if i.opcode in ("dot", "convolution"):
                products = products or _is_half(types.get(i.operands[0]))
    return halves and not products


def _is_half(kind: Type | None) -> bool:
    return isinstance(kind, Array) and kind.dtype in _HALF


def called(
    instruction: Instruction, attribute: str, computations: Mapping[str, Computation]
) -> Computation:
    """The computation that an attribute names (raises `PerfModelError` if the module lacks it)."""
    name = instruction.attributes.get(attribute, "").lstrip("%")
    if name not in computations:
        raise PerfModelError(f"HLO %{instruction.name}: computation {name!r} is not in the module")
    return computations[name]


@dataclass(frozen=True, slots=True)
class Rules:
    """Rules that turn instructions into nodes, in a module of these computations."""

    computations: Mapping[str, Computation]
    widened: bool
    """Whether 32-bit values that were converted from 16 bits count as 16 bits."""

    def node(
        self, instruction: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> Node:
        """The node of an instruction that neither calls nor communicates."""
        # Order matters: products first, then the CPU compiler's own conversions, then classes of
        # opcodes.
        opcode = instruction.opcode
        array = outputs[0].array if outputs else Array.of("token", ())
        if opcode == "dot":
            return self._product(instruction, inputs, outputs)
        if opcode == "convolution":
            return self._convolution(instruction, inputs, outputs)
        if opcode == "convert" and self.widened and _is_widening(inputs[0].array, array):
            # The conversion is the CPU compiler's own: an accelerator reads the narrow value.
            return Node(opcode, "view", inputs, (Value(inputs[0].array),))
        if self.widened and opcode in _VIEWS | _IN_PLACE and opcode != "bitcast-convert" and inputs:
            outputs = (_in_type_of(inputs[0].array, outputs[0]),)
        if opcode in _VIEWS:
            return Node(opcode, "view", inputs, outputs)
        if opcode in _CONSTANTS:
            return Node(opcode, "view", (), outputs)
        # XLA counts transcendental functions apart from FLOPs, and moving elements is no
        # arithmetic.
        if opcode in _TRANSCENDENTAL or opcode in _ARITHMETIC or opcode in _MOVING:
            flops = float(array.n_elements) if opcode in _ARITHMETIC else 0.0
            return Node(opcode, "pointwise", inputs, outputs, flops)
        if opcode == "reduce" or (opcode == "reduce-window" and _disjoint_windows(instruction)):
            # A reduction that is compiled in several stages for CPUs is one kernel on an
            # accelerator.
            role = "reduction" if opcode == "reduce" else "pointwise"
            n_joined = max(0, inputs[0].array.n_elements - array.n_elements)
            return Node(opcode, role, inputs, outputs, n_joined * self._reducer_flops(instruction))
        if opcode in _ROW_WISE:
            return self._row_wise(instruction, inputs, outputs)
        if opcode in ("rng-bit-generator", "rng"):
            return Node(opcode, "pointwise", inputs, outputs)
        return self._foreign(instruction, inputs, outputs)

    def _product(
        self, instruction: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> Node:
        """A `dot` as a matrix product."""
        lhs, rhs = inputs[0].array, inputs[1].array
        contracted = (
            instruction.axes("lhs_contracting_dims"),
            instruction.axes("rhs_contracting_dims"),
        )
        batch = (instruction.axes("lhs_batch_dims"), instruction.axes("rhs_batch_dims"))
        op = product(lhs, rhs, contracted, batch, _product_dtype(lhs, instruction))
        result = self._as_narrow(inputs, outputs[0])
        return Node("dot", "kernel", inputs, (result,), op.flops, op)

    def _convolution(
        self, instruction: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> Node:
        lhs, rhs = inputs[0].array, inputs[1].array
        shape = _conv_shape(
            instruction, lhs, rhs, outputs[0].array, _product_dtype(lhs, instruction)
        )
        result = self._as_narrow(inputs, outputs[0])
        return Node("convolution", "kernel", inputs, (result,), shape.flops, convolution(shape))

    def _as_narrow(self, inputs: tuple[Value, ...], out: Value) -> Value:
        """The result in the type of the operands, if only the compiler widened them."""
        # With two narrow operands the 32-bit result is the compiler's own; anything else is in the
        # program.
        dtypes = {value.array.dtype for value in inputs[:2]}
        are_narrow = len(dtypes) == 1 and dtypes.issubset(_HALF)
        if not self.widened or not are_narrow:
            return out
        return _in_type_of(inputs[0].array, out)

    def _reducer_flops(self, instruction: Instruction) -> float:
        """Arithmetic operations of a reducer, per pair that it joins."""
        # A reducer is a small computation; its arithmetic runs once per element that is taken in.
        reducer = called(instruction, "to_apply", self.computations)
        return float(sum(step.opcode in _ARITHMETIC for step in reducer.instructions))

    def _row_wise(
        self, instruction: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> Node:
        """A kernel that streams over memory; in-place updates touch only what they write."""
        opcode, out = instruction.opcode, outputs[0].array
        first = inputs[0].array
        updates = inputs[-1].array if opcode == "scatter" else first
        per_pair = (
            self._reducer_flops(instruction) if opcode in ("scatter", "reduce-window") else 1.0
        )
        window = prod(_window(instruction).get("size", (1,)))
        flops = _row_wise_flops(opcode, first, updates, out, window, per_pair)
        embedding = _lookup(instruction, first, updates, out)
        if embedding is not None:
            return Node(opcode, "kernel", inputs, outputs, flops, embedding, embedding.bytes)
        # An update in place reads and writes its slice; a scatter reads the old values, too.
        match opcode:
            case "dynamic-update-slice":
                traffic = 2 * inputs[1].array.n_bytes
                streamed_array = inputs[1].array
            case "scatter":
                traffic = 3 * updates.n_bytes
                streamed_array = updates
            case "gather":
                traffic = 2 * out.n_bytes
                streamed_array = out
            case _:
                traffic = sum(v.array.n_bytes for v in {*inputs, *outputs})
                streamed_array = first
        return Node(
            opcode,
            "kernel",
            inputs,
            outputs,
            flops,
            streamed(opcode, streamed_array, traffic),
            traffic,
        )

    def _foreign(
        self, instruction: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]
    ) -> Node:
        """Calls into libraries: products are recognised, anything else is unmapped."""
        # Sharding marks and placements are annotations; vendor calls to GEMM libraries state what
        # they multiply.
        name = instruction.attributes.get("custom_call_target", instruction.opcode).strip('"')
        if name in _FREE_CUSTOM_CALLS:
            return Node(name, "view", inputs[:1], outputs)
        op = (
            _library_product(instruction, inputs[0].array, outputs[0].array)
            if inputs and outputs
            else None
        )
        if op is not None:
            return Node(name, "kernel", inputs, outputs, op.flops, op)
        acts = (
            instruction.opcode in ("send", "recv")
            or instruction.attributes.get("custom_call_has_side_effect") == "true"
        )
        return unknown(name, inputs, outputs, acts=acts)


def _product_dtype(lhs: Array, instruction: Instruction) -> str:
    # `jax.default_matmul_precision` shows here.
    full = "high" in instruction.attributes.get(
        "operand_precision", ""
    ) or "F32_F32_F32" in instruction.attributes.get("algorithm", "")
    return product_dtype(lhs, full)


def _is_widening(narrow: Array, wide: Array) -> bool:
    return narrow.dtype in _HALF and wide.dtype in ("fp32", *_HALF)


def _in_type_of(narrow: Array, out: Value) -> Value:
    """The type of a result that only moves elements of a 16-bit tensor: that tensor's type."""
    if narrow.dtype not in _HALF or out.array.dtype != "fp32":
        return out
    return Value(Array(narrow.dtype, out.array.shape, narrow.item_bytes))


def _lookup(instruction: Instruction, table: Array, updates: Array, out: Array) -> Embedding | None:
    """An embedding, if the op gathers or scatter-adds whole rows of a matrix; else None."""
    # Embeddings have a kernel family of their own; a gather of single elements is not a look-up of
    # rows.
    if (
        len(table.shape) != 2
        or table.shape[1] < 2
        or instruction.opcode not in ("gather", "scatter")
    ):
        return None
    vocab, hidden = table.shape
    if instruction.opcode == "gather":
        if instruction.axes("slice_sizes") != (1, hidden):
            return None
        return Embedding(
            dtype=table.dtype, tokens=out.n_elements // hidden, hidden=hidden, vocab=vocab
        )
    if instruction.axes("scatter_dims_to_operand_dims") != (0,) or updates.shape[-1:] != (hidden,):
        return None
    tokens = updates.n_elements // hidden
    return Embedding(dtype=table.dtype, tokens=tokens, hidden=hidden, vocab=vocab, pass_="bwd")


def _library_product(instruction: Instruction, lhs: Array, out: Array) -> Gemm | None:
    """The product that a custom call to a vendor library computes; None if it is no such call."""
    target = instruction.attributes.get("custom_call_target", "").strip('"')
    if not re.search(r"gemm|matmul", target):
        return None
    try:
        config = json.loads(instruction.attributes.get("backend_config", "{}"))
    except json.JSONDecodeError:
        return None
    # The dimension numbers are those of `dot`; where they are missing the last axis is summed over.
    numbers = config.get("gemm_backend_config", config).get("dot_dimension_numbers", {})
    contracted = [int(i) for i in numbers.get("lhs_contracting_dimensions", (len(lhs.shape) - 1,))]
    outer_axes = range(max(0, len(lhs.shape) - 2))
    batched = [int(i) for i in numbers.get("lhs_batch_dimensions", outer_axes)]
    k = prod(lhs.shape[i] for i in contracted)
    batch = prod(lhs.shape[i] for i in batched)
    m = lhs.n_elements // max(1, k * batch)
    n = out.n_elements // max(1, m * batch)
    return Gemm(op="bmm" if batch > 1 else "linear", dtype=lhs.dtype, m=m, n=n, k=k, batch=batch)


def _conv_shape(
    instruction: Instruction, lhs: Array, rhs: Array, out: Array, dtype: str
) -> ConvShape:
    """Shape of a `convolution` from its window and dimension labels (`b01f_01io->b01f`)."""
    # Letters say what an axis is (b batch, f feature, i and o of the kernel), digits number the
    # axes of space.
    input_labels, kernel_labels, result_labels = re.split(
        r"_|->", instruction.attributes["dim_labels"]
    )
    n_space = len(input_labels) - 2
    window = _window(instruction)

    def space(array: Array, labels: str) -> tuple[int, ...]:
        return tuple(array.shape[labels.index(str(i))] for i in range(n_space))

    def sizes(name: str) -> tuple[int, ...]:
        return window.get(name, (1,) * n_space)

    return ConvShape(
        dtype=dtype,
        batch=lhs.shape[input_labels.index("b")],
        c_in=lhs.shape[input_labels.index("f")],
        c_out=out.shape[result_labels.index("f")],
        kernel_c_in=rhs.shape[kernel_labels.index("i")],
        space_in=space(lhs, input_labels),
        kernel=space(rhs, kernel_labels),
        space_out=space(out, result_labels),
        stride=sizes("stride"),
        pad_low=window.get("pad", (0,) * n_space),
        in_dilation=sizes("lhs_dilate"),
        kernel_dilation=sizes("rhs_dilate"),
        groups=int(instruction.attributes.get("feature_group_count", 1)),
        batch_groups=int(instruction.attributes.get("batch_group_count", 1)),
    )


def _window(instruction: Instruction) -> dict[str, tuple[int, ...]]:
    """`{size=3x3 stride=2x2 pad=1_1x1_1}` as numbers by name; of paddings the lower ones."""
    items = re.findall(r"(\w+)=([\dx_\-]+)", instruction.attributes.get("window", ""))
    numbers = {}
    for name, value in items:
        numbers[name] = tuple(int(part.split("_")[0]) for part in value.split("x"))
    return numbers


def _disjoint_windows(instruction: Instruction) -> bool:
    """Whether a `reduce-window` takes each element once, as a partial reduction or pooling."""
    window = _window(instruction)
    return window.get("stride", ()) == window.get("size")


def _row_wise_flops(
    opcode: str, first: Array, updates: Array, out: Array, window: int, per_pair: float
) -> float:
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
