"""One instruction of a compiled module as one node of a graph."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from perfmodel.errors import PerfModelError
from perfmodel.importers import _hlo_ops as ops
from perfmodel.importers._dtypes import Array
from perfmodel.importers._graph import Node, Value, streamed
from perfmodel.importers._hlo_text import Computation, HloModule, Instruction, Type
from perfmodel.importers._products import convolution, product
from perfmodel.importers._rows import Unmapped
from perfmodel.ops import Embedding

_HALF: Final = ("bf16", "fp16")


def widened(module: HloModule) -> bool:
    """Whether the compiler widened 16-bit arithmetic to 32 bits, as XLA does for CPUs: half types occur, but
    no product takes them."""
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


def called(i: Instruction, attribute: str, computations: Mapping[str, Computation]) -> Computation:
    """The computation that an attribute names (raises `PerfModelError` if the module lacks it)."""
    name = i.attributes.get(attribute, "").lstrip("%")
    if name not in computations:
        raise PerfModelError(f"HLO %{i.name}: computation {name!r} is not in the module")
    return computations[name]


@dataclass(frozen=True, slots=True)
class Rules:
    """What instructions are, in a module of these computations."""

    computations: Mapping[str, Computation]
    widened: bool
    """Whether 32-bit values that were converted from 16 bits count as 16 bits."""

    def node(self, i: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
        """The node of an instruction that neither calls nor communicates."""
        opcode = i.opcode
        array = outputs[0].array if outputs else Array.of("token", ())
        if opcode == "dot":
            return self._product(i, inputs, outputs)
        if opcode == "convolution":
            lhs, rhs = inputs[0].array, inputs[1].array
            shape = ops.conv_shape(i, lhs, rhs, array, _product_dtype(lhs, i))
            return Node(opcode, "kernel", inputs, (self._as_narrow(inputs, outputs[0]),), shape.flops,
                        convolution(shape))  # fmt: skip
        if opcode == "convert" and self.widened and _is_widening(inputs[0].array, array):
            # the accelerator reads the narrow value
            return Node(opcode, "view", inputs, (Value(inputs[0].array),))
        if self.widened and opcode in ops.VIEWS | ops.IN_PLACE and opcode != "bitcast-convert" and inputs:
            outputs = (_like(inputs[0].array, outputs[0]),)
        if opcode in ops.VIEWS:
            return Node(opcode, "view", inputs, outputs)
        if opcode in ops.CONSTANTS:
            return Node(opcode, "view", (), outputs)
        if opcode in ops.TRANSCENDENTAL or opcode in ops.ARITHMETIC or opcode in ops.MOVING:
            return Node(opcode, "pointwise", inputs, outputs, ops.element_flops(opcode, array.n_elements))
        if opcode == "reduce" or (opcode == "reduce-window" and ops.disjoint_windows(i)):
            # reductions in stages, as CPUs are given, are one kernel
            role = "reduction" if opcode == "reduce" else "pointwise"
            n_in, n_out = inputs[0].array.n_elements, array.n_elements
            return Node(opcode, role, inputs, outputs, max(0, n_in - n_out) * self._reducer_flops(i))
        if opcode in ops.ROW_WISE:
            return self._row_wise(i, inputs, outputs)
        if opcode == "rng-bit-generator" or opcode == "rng":
            return Node(opcode, "pointwise", inputs, outputs)
        return self._foreign(i, inputs, outputs)

    def _product(self, i: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
        lhs, rhs = inputs[0].array, inputs[1].array
        op = product(lhs, rhs, *ops.product_axes(i), dtype=_product_dtype(lhs, i))  # pyright: ignore[reportArgumentType]
        return Node("dot", "kernel", inputs, (self._as_narrow(inputs, outputs[0]),), op.flops, op)

    def _as_narrow(self, inputs: tuple[Value, ...], out: Value) -> Value:
        """The result in the type of the operands, where only the compiler made them wider."""
        first = inputs[0].array
        if not self.widened or any(v.array.dtype != first.dtype or v.array.dtype not in _HALF for v in inputs[:2]):
            return out
        return _like(first, out)

    def _reducer_flops(self, i: Instruction) -> float:
        """Arithmetic operations of a reducer, per pair that it joins."""
        reducer = called(i, "to_apply", self.computations)
        return float(sum(step.opcode in ops.ARITHMETIC for step in reducer.instructions))

    def _row_wise(self, i: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
        """A kernel that streams over memory; in-place updates touch what they write only."""
        opcode, out = i.opcode, outputs[0].array
        first = inputs[0].array
        updates = inputs[-1].array if opcode == "scatter" else first
        per_pair = self._reducer_flops(i) if opcode in ("scatter", "reduce-window") else 1.0
        flops = ops.row_wise_flops(opcode, first, updates, out, ops.window_size(i), per_pair)
        if (found := _lookup(i, first, updates, out)) is not None:
            return Node(opcode, "kernel", inputs, outputs, flops, found, found.bytes)
        match opcode:
            case "dynamic-update-slice":
                traffic, like = 2 * inputs[1].array.n_bytes, inputs[1].array
            case "scatter":
                traffic, like = 3 * updates.n_bytes, updates
            case "gather":
                traffic, like = 2 * out.n_bytes, out
            case _:
                traffic, like = sum(v.array.n_bytes for v in {*inputs, *outputs}), first
        return Node(opcode, "kernel", inputs, outputs, flops, streamed(opcode, like, traffic), traffic)

    def _foreign(self, i: Instruction, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
        """Calls into libraries: products are recognised, anything else is unmapped."""
        name = i.attributes.get("custom_call_target", i.opcode).strip('"')
        if name in ops.FREE_CUSTOM_CALLS:
            return Node(name, "view", inputs[:1], outputs)
        if inputs and outputs and (op := ops.library_product(i, inputs[0].array, outputs[0].array)):
            return Node(name, "kernel", inputs, outputs, op.flops, op)
        flops = float(sum(value.array.n_elements for value in outputs))
        reason = "no kernel family stands for it; FLOPs at least one per output element"
        acts = i.opcode in ("send", "recv") or i.attributes.get("custom_call_has_side_effect") == "true"
        return Node(name, "effect" if acts else "unmapped", inputs, outputs, work=Unmapped(name, reason, flops))


def _product_dtype(lhs: Array, i: Instruction) -> str:
    """fp32 products run on TF32 units unless more precision is asked for: XLA's default on accelerators."""
    full = "high" in i.attributes.get("operand_precision", "") or "F32_F32_F32" in i.attributes.get("algorithm", "")
    return "tf32" if lhs.dtype == "fp32" and lhs.item_bytes == 4 and not full else lhs.dtype


def _is_widening(narrow: Array, wide: Array) -> bool:
    return narrow.dtype in _HALF and wide.dtype in ("fp32", *_HALF)


def _like(narrow: Array, out: Value) -> Value:
    """A result that only moves elements of a 16-bit tensor, in that tensor's type."""
    if narrow.dtype not in _HALF or out.array.dtype != "fp32":
        return out
    return Value(Array(narrow.dtype, out.array.shape, narrow.item_bytes))


def _lookup(i: Instruction, table: Array, updates: Array, out: Array) -> Embedding | None:
    """A gather of whole rows of a matrix, or a scatter-add of such rows, as an embedding; else None."""
    if len(table.shape) != 2 or table.shape[1] < 2 or i.opcode not in ("gather", "scatter"):
        return None
    vocab, hidden = table.shape
    if i.opcode == "gather":
        if i.axes("slice_sizes") != (1, hidden):
            return None
        return Embedding(dtype=table.dtype, tokens=out.n_elements // hidden, hidden=hidden, vocab=vocab)
    if i.axes("scatter_dims_to_operand_dims") != (0,) or updates.shape[-1:] != (hidden,):
        return None
    tokens = updates.n_elements // hidden
    return Embedding(dtype=table.dtype, tokens=tokens, hidden=hidden, vocab=vocab, pass_="bwd")
