"""Cuts sequences into slices that run in turn (Seq1F1B, Sun et al. 2024; TeraPipe, 2021)."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import Final

from perfmodel.errors import LayoutError
from perfmodel.ir import (
    OPS,
    Function,
    GlobalTensor,
    Instruction,
    Parameter,
    Piece,
    Program,
    Tag,
    attributes,
)
from perfmodel.ir.op_definition import REPLICATED, Partial, Sharded, Sharding, ShardingQuery

_SEQUENCE: Final = Sharded(1)
"""Sequence axis of the operands of attention: [batch, sequence, width]."""


def sequence_slices(program: Program, count: int) -> Program:
    """Divide each pass into `count` slices of the sequence; backwards run in reverse order.

    Slices follow the rules of parallel devices, one after another in time. Causal attention is the
    exception: the queries of a slice see the keys and values of this slice and of earlier ones, and
    the gradients of keys and values are accumulated over the backward passes of later slices. Each
    slice takes its part of shared values such as positions. The `micro_batch` of an instruction's
    tag holds the number of the slice, which `pipeline` reads.

    Args:
        program: program of one device, tagged by phase; data are [batch, sequence, ...].
        count: slices, of equal length.

    Raises:
        LayoutError: the program is distributed or cut already, the sequence does not divide, or an
            op that is not causal attention mixes positions.
    """
    if program.n_devices > 1 or any(i.tag.micro_batch >= 0 for i in program.function.instructions):
        raise LayoutError(
            "slice sequences before other transforms, in a program on one device without micro-batches"
        )
    return _Slicing(program, count).run() if count > 1 else program


class _Slicing:
    """State of one walk over a program's instructions."""

    def __init__(self, program: Program, count: int) -> None:
        self._program = program
        self._types = program.types
        self._count = count
        self._spread: dict[str, Sharding] = {}
        self._names: dict[str, Sequence[str]] = {}
        """By value: its names on the slices, either one name per slice or the same one for all."""
        self._cuts: dict[tuple[str, str, int], Sequence[str]] = {}
        self._forward: list[list[Instruction]] = [[] for _ in range(count)]
        self._backward: list[list[Instruction]] = [[] for _ in range(count)]
        self._update: list[Instruction] = []
        self._wanted: set[str] = set()
        """Values that are needed as a whole, after the last slice."""

        # Updates, losses and returned gradients need sums over all slices; other values may stay
        # cut.
        for instruction in program.function.instructions:
            if instruction.tag.phase == "update":
                self._wanted.update(instruction.inputs)
        for tensor in program.outputs:
            if tensor.role != "output":
                self._wanted.update(piece.value for piece in tensor.pieces)

    def run(self) -> Program:
        """The sliced program."""
        function, program = self._program.function, self._program
        parameters: list[Parameter] = []
        for parameter in function.parameters:
            parameters += self._parameter(parameter.name)
        for instruction in function.instructions:
            # Attention is the only op that looks at other positions; the rules of parallel devices
            # cover everything else.
            if instruction.tag.phase == "update":
                inputs = tuple(
                    [self._complete_value(name, instruction.tag) for name in instruction.inputs]
                )
                self._update.append(replace(instruction, inputs=inputs))
                self._define(
                    instruction.outputs, [REPLICATED] * len(instruction.outputs), written=False
                )
            elif instruction.op in ("attention", "attention_grad"):
                self._attention(instruction)
            else:
                self._instruction(instruction)

        # Gradients go the other way: the last slice comes first in a backward pass.
        written = chain(*self._forward, *reversed(self._backward), self._update)
        outputs = tuple(self._pieces(tensor) for tensor in program.outputs)
        returned: dict[str, None] = {}
        for tensor in outputs:
            returned |= dict.fromkeys(piece.value for piece in tensor.pieces)
        new = Function(function.name, tuple(parameters), tuple(written), tuple(returned))
        return Program(new, tuple(map(self._pieces, program.inputs)), outputs)

    def _parameter(self, name: str) -> list[Parameter]:
        """Parameters of the sliced program: data by slice, all others whole."""
        tensor = self._types[name]
        data: set[str] = set()
        for whole_input in self._program.inputs_of("data"):
            if whole_input.batch_axis == 0:
                data.update(piece.value for piece in whole_input.pieces)
        if name not in data:
            self._define((name,), (REPLICATED,), written=False)
            return [Parameter(name, tensor)]
        if tensor.rank < 2 or tensor.shape[1] % self._count:
            raise LayoutError(
                f"{name}: {tensor} is not divisible into {self._count} slices along its sequence (axis 1)"
            )
        self._define((name,), (_SEQUENCE,))
        part = tensor.with_size(1, tensor.shape[1] // self._count)
        return [Parameter(new, part) for new in self._names[name]]

    def _define(
        self, names: Sequence[str], spreads: Sequence[Sharding], written: bool = True
    ) -> None:
        """Record how values are spread over slices, and their names in each slice."""
        for name, spread in zip(names, spreads, strict=True):
            self._spread[name] = spread
            if written:
                self._names[name] = [f"{name}.s{j}" for j in range(self._count)]
            else:
                self._names[name] = [name] * self._count

    def _instruction(self, instruction: Instruction) -> None:
        """Write an instruction once for every slice."""
        spreads = [self._spread[name] for name in instruction.inputs]
        decision = OPS[instruction.op].spread(
            ShardingQuery.of(instruction, self._types, spreads, self._count)
        )
        operands = [
            self._part(name, want, instruction)
            for name, want in zip(instruction.inputs, decision.inputs, strict=True)
        ]
        self._define(instruction.outputs, decision.outputs)
        values = attributes(**dict(instruction.attributes) | dict(decision.attributes))
        for j in self._slices(instruction.tag):
            inputs = tuple(names[j] for names in operands)
            outputs = tuple(self._names[name][j] for name in instruction.outputs)
            self._write(j, Instruction(instruction.op, inputs, outputs, values, instruction.tag))
            for name, part in zip(instruction.outputs, outputs, strict=True):
                if name in self._wanted and self._spread[name] == Partial("sum"):
                    self._accumulate(name, part, j, instruction.tag)

    def _part(self, name: str, want: Sharding, user: Instruction) -> Sequence[str]:
        """Values that hold each slice's part of an operand."""
        have = self._spread[name]
        if have == want:
            return self._names[name]
        # A value that is the same for all slices can be cut, but cut values cannot be joined while
        # later slices are missing.
        if have != REPLICATED or not isinstance(want, Sharded):
            raise LayoutError(
                f"%{user.outputs[0]}: {user.op} mixes positions of the sequence in %{name}; only the fused causal "
                "attention of a program can be sliced"
            )
        # One cut per pass and layer: passes may run on different devices, and a cut that is shared
        # would have to be sent.
        key = (name, user.tag.phase, user.tag.layer)
        if key not in self._cuts:
            size = self._types[name].shape[want.axis] // self._count
            self._cuts[key] = [f"{name}.{len(self._cuts)}.s{j}" for j in range(self._count)]
            for j, part in enumerate(self._cuts[key]):
                cut = attributes(axis=want.axis, start=j * size, stop=(j + 1) * size)
                self._write(
                    j, Instruction("slice", (self._names[name][j],), (part,), cut, user.tag)
                )
        return self._cuts[key]

    def _attention(self, instruction: Instruction) -> None:
        """Slice j over the keys and values of slices 0 to j; its backward pass gives gradients of
        all of these."""
        n_whole_inputs = 2 if instruction.op == "attention_grad" else 1
        is_sliced = all(self._spread[name] == _SEQUENCE for name in instruction.inputs)
        if (
            not is_sliced
            or not instruction.attribute("causal")
            or len(instruction.inputs) != n_whole_inputs
        ):
            raise LayoutError(
                f"%{instruction.outputs[0]}: only causal attention of whole sequences can be sliced"
            )
        self._define(instruction.outputs, [_SEQUENCE])
        if instruction.op == "attention_grad":
            self._attention_gradient(instruction)
            return
        parts, results = self._names[instruction.inputs[0]], self._names[instruction.outputs[0]]
        for j in self._slices(instruction.tag):
            self._write(
                j, replace(instruction, inputs=tuple(parts[: j + 1]), outputs=(results[j],))
            )

    def _attention_gradient(self, instruction: Instruction) -> None:
        """A slice's gradient: the sum of those from its own attention and from all later slices."""
        parts, result_gradients = (self._names[name] for name in instruction.inputs)
        gradients = self._names[instruction.outputs[0]]
        # The backward of slice j gives gradients of the keys and values of slices 0 to j. Last
        # slice first, so when it is slice k's turn, all that later slices owe it is in
        # `from_later[k]`.
        from_later: list[str] = [""] * self._count
        for j in self._slices(instruction.tag):
            shares = [f"{gradients[k]}of{j}" for k in range(j + 1)]
            if not from_later[j]:
                shares[j] = gradients[j]
            inputs = (*parts[: j + 1], result_gradients[j])
            self._write(j, replace(instruction, inputs=inputs, outputs=tuple(shares)))
            for k, share in enumerate(shares):
                if not from_later[k]:
                    from_later[k] = share
                    continue
                total = gradients[k] if k == j else f"{gradients[k]}from{j}"
                self._write(
                    j,
                    Instruction(
                        "accumulate", (from_later[k], share), (total,), (), instruction.tag
                    ),
                )
                from_later[k] = total

    def _accumulate(self, name: str, part: str, j: int, tag: Tag) -> None:
        """Add a slice's share of a complete sum; the last total has the name of the sum."""
        # The running total has the sum's own name only at the end, where updates and outputs look
        # for it.
        order = list(self._slices(tag))
        first, last = order[0], order[-1]
        if j == first:
            return
        before = order[order.index(j) - 1]
        sofar = self._names[name][before] if before == first else f"{name}.until{before}"
        total = name if j == last else f"{name}.until{j}"
        self._write(j, Instruction("accumulate", (sofar, part), (total,), (), tag))

    def _complete_value(self, name: str, tag: Tag) -> str:
        """Return a value for updates: sums are complete after the last slice, parts are joined."""
        spread = self._spread[name]
        if isinstance(spread, Sharded):
            joined = Instruction(
                "concat", tuple(self._names[name]), (name,), attributes(axis=spread.axis), tag
            )
            self._update.append(joined)
            self._define((name,), (REPLICATED,), written=False)
        return name if isinstance(spread, Partial) else self._names[name][0]

    def _slices(self, tag: Tag) -> Sequence[int]:
        """Slices in the order in which a phase takes them."""
        return range(self._count) if tag.phase == "forward" else range(self._count - 1, -1, -1)

    def _write(self, j: int, instruction: Instruction) -> None:
        body = self._forward if instruction.tag.phase == "forward" else self._backward
        body[j].append(replace(instruction, tag=replace(instruction.tag, micro_batch=j)))

    def _pieces(self, tensor: GlobalTensor) -> GlobalTensor:
        pieces: list[Piece] = []
        for piece in tensor.pieces:
            pieces += self._placed(piece)
        return replace(tensor, pieces=tuple(pieces))

    def _placed(self, piece: Piece) -> list[Piece]:
        """Pieces of an input or output of the program: one in every slice, or one value."""
        spread, names = self._spread[piece.value], self._names[piece.value]
        if not isinstance(spread, Sharded):
            return [replace(piece, value=piece.value if spread == Partial("sum") else names[0])]
        axis = spread.axis
        size = self._types[piece.value].shape[axis] // self._count
        pieces = []
        for j, name in enumerate(names):
            start = list(piece.start)
            start[axis] += j * size
            pieces.append(Piece(name, tuple(start)))
        return pieces
