"""Common parts of importing ONNX and `torch.export` graphs as programs.

A reader goes through a graph's nodes in order and hands each to `Graph.node` as a `Call`. What does
not depend on weights or data is computed (mixed concrete and abstract interpretation, DistIR,
section 3.3); for the rest the rule of `FOREIGN_OPS` writes instructions of the IR. At last joint
projections are taken apart: queries, keys and values of one product become three, as Megatron-LM
slices them.
"""

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.ir import Instruction, Parameter, Piece, Program, attributes
from perfmodel.ir.distribute import megatron_axes
from perfmodel.ir.importers._emitter import CannotMapError, Emitter, IndexCheck, Known, Missing, Ref
from perfmodel.ir.importers._graph import Array
from perfmodel.ir.importers.foreign_ops import FOREIGN_OPS
from perfmodel.ir.models import ModelBuilder

# `layers.3.attn`, `/encoder/block.3/`, `h_3.weight`; not `embedding_1` at the end of a name.
_LAYER = re.compile(r"(?:^|[./])(\d+)(?=[._/]|$)|_(\d+)(?=[._/])")
"""Pattern of a layer's number: between separators, but not at the end after an underscore, which
only distinguishes names (`embedding_1`)."""
_MOST_LAYERS = 1 << 16
"""Most layers of one stack; the numbers of the next stack (`layer2.0` after `layer1.3`, a decoder
after its encoder) continue there."""


class Graph:
    """A foreign graph while it is converted to a program."""

    def __init__(self, name: str) -> None:
        self.name = re.sub(r"\W", "_", name) or "graph"
        self.builder = ModelBuilder(self.name, "fp32")
        # Rules write their own losses and norms, so no JAX maximum with an unknown gradient turns
        # up here.
        self.emitter = Emitter(self.builder, differentiable=False)
        self.values: dict[str, Any] = {}
        """Item of each value of the foreign graph, or a list of items."""
        self.missing: dict[str, tuple[str, str, int]] = {}
        """Ops that could not be mapped: the reason, the first node, and the number of nodes."""
        self._batch = 0
        self._stacks: list[str] = []
        self._products = 0

    def weight(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Declare a trained parameter; the first number in its name is its layer."""
        # Weights of several types exist side by side; the builder's type is set for each.
        layer = self._layer(name)
        self.builder.dtype = Array.of(dtype, ()).dtype
        label = self.builder.weight(label_of(name), tuple(shape))
        self.values[name] = Ref(label, layer)

    def _layer(self, name: str) -> int:
        """Number of the layer that a parameter's name states; -1 if it states none."""
        match = _LAYER.search(name)
        if match is None:
            return -1
        # Encoder and decoder both count from 0: stacks are numbered in order of appearance, each in
        # a range of its own.
        stack = name[: match.start()]
        if stack not in self._stacks:
            self._stacks.append(stack)
        return self._stacks.index(stack) * _MOST_LAYERS + int(match.group(1) or match.group(2))

    def data(self, name: str, dtype: str, shape: Sequence[int]) -> None:
        """Declare an input; the first axis indexes samples if it has the batch size."""
        # Integers of every width become token numbers. NumPy has no bfloat16.
        is_integer = dtype != "bfloat16" and np.dtype(dtype).kind in "iub"
        kind = "int32" if is_integer else Array.of(dtype, ()).dtype
        self._batch = self._batch or (shape[0] if shape else 0)
        axis = 0 if shape and shape[0] == self._batch else None
        label = self.builder.data(label_of(name), tuple(shape), kind, batch_axis=axis)
        self.values[name] = Ref(label)

    def input(
        self, name: str, dtype: str, shape: Sequence[int | None], values: dict[str, Any]
    ) -> None:
        """Read an input: a known value if `values` has one (which it takes out), else data.

        An input without elements (a cache before the first token) holds nothing that could be data:
        it is known too.
        """
        if name in values:
            self.values[name] = given_value(name, values.pop(name), dtype, shape)
        elif 0 in shape:
            self.values[name] = Known.of(np.zeros([n or 0 for n in shape], dtype))
        else:
            self.data(name, dtype, [n or 0 for n in shape])

    def node(
        self,
        op: str,
        node_name: str,
        args: Sequence[Any],
        attributes: Mapping[str, Any],
        compute: Callable[[], list[Any]],
    ) -> list[Any]:
        """Items of a node's outputs.

        Args:
            op: name in `FOREIGN_OPS`.
            node_name: the node's own name, for messages.
            args: items, lists of items, and plain values.
            attributes: further plain values by name.
            compute: evaluates the node where no argument depends on weights or data.
        """
        # Three cases: an operand that could not be mapped (so nor can this), all operands known
        # (compute now), or data (a rule).
        flat = []
        for arg in args:
            if isinstance(arg, list):
                flat += arg
            else:
                flat += [arg]
        if any(isinstance(item, Missing) for item in flat):
            return [Missing()]
        if not any(isinstance(item, (Ref, IndexCheck)) for item in flat):
            return compute()
        # An op without a rule is noted, not raised, so that all that are missing are named at once.
        before = len(self.builder.instructions)
        try:
            if op not in FOREIGN_OPS:
                raise CannotMapError("the IR has no such op")
            outputs = FOREIGN_OPS[op].write(self.emitter, args, attributes)
        except (CannotMapError, PerfModelError) as reason:
            known = self.missing.get(op, (str(reason), node_name, 0))
            self.missing[op] = (*known[:2], known[2] + 1)
            return [Missing()]
        items = outputs if isinstance(outputs, list) else [outputs]
        return self._layers_from_products(items, before)

    def _layers_from_products(self, items: list[Any], before: int) -> list[Any]:
        """Number the layers in order if names do not: each product with a weight begins one."""
        # Names with numbers say what the layers are; without any, each product with a weight starts
        # a new one.
        if self._stacks:
            return items
        weights = {weight.name for weight in self.builder.inputs}
        new_instructions = self.builder.instructions[before:]
        self._products += sum(i.op == "matmul" and i.inputs[1] in weights for i in new_instructions)
        layer = self._products - 1
        if layer < 0:
            return items
        self.builder.instructions[before:] = [
            replace(i, tag=replace(i.tag, layer=layer)) for i in new_instructions
        ]
        return [Ref(item.name, layer) if isinstance(item, Ref) else item for item in items]

    def program(self, outputs: Sequence[Any]) -> Program:
        """Build the program that returns the loss if one item is a scalar, else all items.

        Raises:
            PerfModelError: ops that could not be mapped, all named with the remedy.
        """
        if self.missing:
            listed = "; ".join(
                f"{op} ({n}x, first at {node_name}): {why}"
                for op, (why, node_name, n) in self.missing.items()
            )
            raise PerfModelError(
                f"{self.name}: the IR cannot express {listed}; give the values that shapes or masks depend on "
                "(--input-value), rewrite the model without these ops, or get its costs with import-model"
            )
        # Results that are known beforehand are not outputs of a program.
        refs = [item for item in outputs if isinstance(item, Ref)]
        if not refs:
            raise PerfModelError(
                f"{self.name}: no output depends on weights or data; give fewer input values"
            )
        # Models of Hugging Face return the loss beside what it was computed from, which training
        # has no use for.
        scalars = {ref.name for ref in refs if self.emitter.shape(ref) == ()}
        has_loss = len(scalars) == 1
        names = list(dict.fromkeys(ref.name for ref in refs if ref.name in scalars or not has_loss))
        self.emitter.settle_layers()
        program = self.builder.program(
            [(name, "loss" if len(scalars) == 1 else "output") for name in names]
        )
        return megatron_axes(separate_projections(_without_dead(program)))


def given_value(name: str, text: Any, dtype: str, shape: Sequence[int | None]) -> Known:
    """The given value of an input; a number fills the input's shape.

    Raises:
        PerfModelError: a value that does not fit the shape.
    """
    # One number stands for a tensor full of it: `attention_mask=1`.
    array = np.asarray(text, np.dtype(dtype))
    if array.ndim == 0 and None not in shape:
        array = np.full(tuple(n for n in shape if n is not None), array)
    fits = array.ndim == len(shape)
    if fits:
        fits = all(stated in (None, size) for stated, size in zip(shape, array.shape, strict=True))
    if not fits:
        raise PerfModelError(
            f"input {name}: the given value has shape {array.shape}, but the graph has {tuple(shape)}"
        )
    return Known(array)


def _without_dead(program: Program) -> Program:
    """The program without instructions and weights that no output depends on."""
    function = program.function
    # Readers emit whatever the graph has; statistics, caches and unused heads go here, with their
    # weights.
    live = set(function.outputs)
    instructions = []
    for instruction in reversed(function.instructions):
        if live.intersection(instruction.outputs):
            live.update(instruction.inputs)
            instructions.append(instruction)
    parameters = tuple(p for p in function.parameters if p.name in live)
    inputs = tuple(w for w in program.inputs if w.pieces[0].value in live)
    return Program(
        replace(function, parameters=parameters, instructions=tuple(instructions[::-1])),
        inputs,
        program.outputs,
    )


def label_of(name: str) -> str:
    """Convert a name to the text form."""
    return re.sub(r"[^\w.]", "_", name)


def separate_projections(program: Program) -> Program:
    """Split a product's weights instead of its result, if the result is only used in parts.

    Slicing the columns of a joint weight would deal out queries to some ranks and keys to others;
    of separate ones each rank takes its heads of each. The weight stays one tensor of several
    pieces.
    """
    function = program.function
    # A product may be cut only if nothing but the split reads what lies between, hence the count of
    # uses.
    maker: dict[str, Instruction] = {}
    uses = Counter(function.outputs)
    for instruction in function.instructions:
        maker.update(dict.fromkeys(instruction.outputs, instruction))
        uses.update(instruction.inputs)
    weights = program.values_of("parameter")

    # Find every product that is only split, and write its steps once for each part.
    gone: set[str] = set()
    cuts: dict[str, tuple[int, tuple[str, ...]]] = {}
    written: dict[str, list[Instruction]] = {}
    for instruction in function.instructions:
        chain = _chain(instruction, maker, uses, weights, program)
        if chain is None:
            continue
        suffixes = [f".{j}" for j in range(len(instruction.outputs))]
        for value, axis in chain.cut.items():
            cuts[value] = axis, tuple(f"{value}{suffix}" for suffix in suffixes)
        for step in chain.steps:
            gone.update(step.outputs)
        part_instructions: list[Instruction] = []
        for suffix, output in zip(suffixes, instruction.outputs, strict=True):
            part_instructions += chain.part(suffix, output)
        written[instruction.outputs[0]] = part_instructions

    # They take the place of the split; the steps of the joint product are gone.
    instructions: list[Instruction] = []
    for instruction in function.instructions:
        unchanged = [] if instruction.outputs[0] in gone else [instruction]
        instructions += written.get(instruction.outputs[0], unchanged)

    parameters, pieces = _cut_parameters(program, cuts)
    inputs = tuple(
        replace(w, pieces=pieces.get(w.pieces[0].value, w.pieces)) for w in program.inputs
    )
    return Program(
        replace(function, parameters=parameters, instructions=tuple(instructions)),
        inputs,
        program.outputs,
    )


def _cut_parameters(
    program: Program, cuts: Mapping[str, tuple[int, tuple[str, ...]]]
) -> tuple[tuple[Parameter, ...], dict[str, tuple[Piece, ...]]]:
    """Parameters of the program, where each weight that is cut becomes one per part; and these
    parts, which remain pieces of one tensor.

    Args:
        cuts: the axis along which a weight is cut, and the names of its parts.
    """
    types = program.types
    parameters: list[Parameter] = []
    pieces: dict[str, tuple[Piece, ...]] = {}
    for parameter in program.function.parameters:
        if parameter.name not in cuts:
            parameters.append(parameter)
            continue
        axis, names = cuts[parameter.name]
        tensor = types[parameter.name]
        size = tensor.shape[axis] // len(names)
        parameter_parts = []
        for j, name in enumerate(names):
            start = [0] * tensor.rank
            start[axis] = j * size
            parameter_parts.append(Piece(name, tuple(start)))
            parameters.append(Parameter(name, tensor.with_size(axis, size)))
        pieces[parameter.name] = tuple(parameter_parts)
    return tuple(parameters), pieces


@dataclass(frozen=True)
class _Chain:
    """A product, the ops between it and a split, and the axis along which each parameter is cut."""

    steps: tuple[Instruction, ...]
    cut: dict[str, int]
    parts: int

    def part(self, suffix: str, output: str) -> list[Instruction]:
        """The steps for one part, ending in the split's output."""
        # Values inside the chain and the cut weights get a suffix per part; all other operands are
        # shared.
        renamed = set(self.cut)
        for step in self.steps:
            renamed.update(step.outputs)
        steps = []
        for step in self.steps:
            values = dict(step.attributes)
            if step.op == "reshape":
                *leading, last = values["shape"]
                values["shape"] = (*leading, last // self.parts)
            last_step = step is self.steps[-1]
            steps.append(
                replace(
                    step,
                    inputs=tuple(f"{n}{suffix}" if n in renamed else n for n in step.inputs),
                    outputs=(output,) if last_step else tuple(f"{n}{suffix}" for n in step.outputs),
                    attributes=attributes(**values),
                )
            )
        return steps


def _chain(
    split: Instruction,
    maker: dict[str, Instruction],
    uses: Counter[str],
    weights: frozenset[str],
    program: Program,
) -> _Chain | None:
    """Return the chain from a product with a weight to a split of its last axis, if its results are
    not used elsewhere."""
    types = program.types
    if split.op != "split" or split.attribute("axis") != types[split.inputs[0]].rank - 1:
        return None
    # Each step must act on columns independently: a bias is cut along with the weight, a reshape
    # may only regroup rows.
    value = split.inputs[0]
    steps = list[Instruction]()
    cut: dict[str, int] = {}
    width = types[value].shape[-1]
    # From the split backwards, through biases and reshapes that leave the last axis alone, to the
    # product.
    while uses[value] == 1 and value in maker:
        step = maker[value]
        steps.append(step)
        if step.op == "matmul":
            w = step.inputs[1]
            if w not in weights or uses[w] > 1 or types[w].rank != 2:
                return None
            cut[w] = 0 if step.attribute("transpose_b") else 1
            return _Chain(tuple(steps[::-1]), cut, len(split.outputs))
        if step.op == "add":
            biases = [
                n
                for n in step.inputs
                if n in weights and types[n].shape == (width,) and uses[n] == 1
            ]
            if not biases:
                return None
            bias = biases[0]
            cut[bias] = 0
            value = next(n for n in step.inputs if n != bias)
        elif (
            step.op == "reshape"
            and types[step.inputs[0]].shape[-1] == width
            and step.attribute("shape")
        ):
            value = step.inputs[0]
        else:
            return None
    return None
