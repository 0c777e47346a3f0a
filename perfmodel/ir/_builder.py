"""Builders that write functions and model programs instruction by instruction."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.ir._function import Function, OutputTypes, line_of, output_types
from perfmodel.ir._instruction import (
    UNTAGGED,
    Attributes,
    Instruction,
    Parameter,
    ProgramError,
    Shape,
    Tag,
    Tensor,
    attributes,
)
from perfmodel.ir._program import GlobalTensor, Program, Role, global_tensor


class Builder:
    """Collects instructions, infers their types and generates names.

        b = Builder("mlp")
        x = b.parameter("x", Tensor("fp32", (8, 4)))
        w = b.parameter("w", Tensor("fp32", (4, 2)))
        function = b.build([b.op("relu", b.op("matmul", x, w))])

    Raises:
        ProgramError: from `op`, `emit` and `parameter`, as `infer` would of the finished function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.tag: Tag = UNTAGGED
        """Tag of the following instructions."""
        self.types: dict[str, Tensor] = {}
        self.instructions: list[Instruction] = []
        self._parameters: list[Parameter] = []
        self._count: dict[str, int] = {}
        self._memo: OutputTypes = {}

    @contextmanager
    def tagged(self, **changes: Any) -> Iterator[None]:
        """Change these fields of the tag for the instructions inside the block."""
        # Blocks nest: a layer inside a phase changes its own field and puts the rest back.
        before = self.tag
        self.tag = replace(before, **changes)
        try:
            yield
        finally:
            self.tag = before

    def parameter(self, name: str, tensor: Tensor) -> str:
        """Add a formal parameter to the function."""
        if name in self.types:
            raise ProgramError(
                self.name, 1, name, "is already defined; assign every value only once"
            )
        self.types[name] = tensor
        self._parameters.append(Parameter(name, tensor))
        return name

    def op(self, op: str, /, *inputs: str, name: str = "", **values: Any) -> str:
        """Append an instruction of one output; return the output's name, by default the op's."""
        (output,) = self.emit(op, inputs, (name or op,), attributes(**values))
        return output

    def emit(
        self,
        op: str,
        inputs: Sequence[str],
        hints: Sequence[str],
        values: Attributes = (),
        tag: Tag | None = None,
    ) -> tuple[str, ...]:
        """Append an instruction; its outputs get the hinted names, numbered if already used."""
        # Typing each instruction as it comes puts an error at the line that causes it, and lets
        # gradient rules look at shapes.
        outputs = tuple([self.fresh(hint) for hint in hints])
        instruction = Instruction(
            op, tuple(inputs), outputs, values, self.tag if tag is None else tag
        )
        inferred = self._output_types(instruction)
        self.types.update(zip(outputs, inferred, strict=True))
        self.instructions.append(instruction)
        return outputs

    def _output_types(self, instruction: Instruction) -> tuple[Tensor, ...]:
        """Infer the types of an instruction's outputs."""
        op, outputs = instruction.op, instruction.outputs
        # The checks of `infer`, made at the moment of writing: a finished builder is a valid
        # function.
        missing = next((name for name in instruction.inputs if name not in self.types), None)
        if missing is not None:
            raise self._error(missing, f"is used by {op} before it is defined")
        # Models repeat layers; the same op on the same types is inferred once.
        key = (op, instruction.attributes, tuple([self.types[name] for name in instruction.inputs]))
        if key not in self._memo:
            try:
                self._memo[key] = output_types(instruction, key[2])
            except PerfModelError as error:
                raise self._error(outputs[0], str(error)) from None
        types = self._memo[key]
        if len(types) != len(outputs):
            raise self._error(
                outputs[0], f"{op} has {len(types)} outputs, but {len(outputs)} names are given"
            )
        return types

    def _error(self, value: str, message: str) -> ProgramError:
        return ProgramError(self.name, line_of(len(self.instructions), None), value, message)

    def fresh(self, hint: str) -> str:
        """An unused name: the hint, or the hint with a number."""
        if hint not in self.types and hint not in self._count:
            self._count[hint] = 1
            return hint
        # The counter of a hint makes numbering linear in the number of values; searching from 1
        # each time would be quadratic.
        while True:
            number = self._count.get(hint, 1)
            self._count[hint] = number + 1
            name = f"{hint}_{number}"
            if name not in self.types and name not in self._count:
                self._count[name] = 1
                return name

    def build(self, outputs: Sequence[str]) -> Function:
        """Build the function from the instructions so far."""
        return Function(
            self.name, tuple(self._parameters), tuple(self.instructions), tuple(outputs)
        )


class ModelBuilder(Builder):
    """Builds programs for one device."""

    def __init__(self, name: str, dtype: str) -> None:
        super().__init__(name)
        self.dtype = dtype
        self._inputs: list[GlobalTensor] = []

    @property
    def inputs(self) -> tuple[GlobalTensor, ...]:
        """The parameters and data declared so far."""
        return tuple(self._inputs)

    def data(
        self, name: str, shape: Shape, dtype: str | None = None, batch_axis: int | None = 0
    ) -> str:
        """An input whose axis `batch_axis` indexes samples (None: all samples share it)."""
        return self._input(name, "data", shape, dtype or self.dtype, batch_axis=batch_axis)

    def weight(
        self,
        name: str,
        shape: Shape,
        tensor_axis: int | None = None,
        expert_axis: int | None = None,
    ) -> str:
        """A trained parameter."""
        return self._input(
            name, "parameter", shape, self.dtype, tensor_axis=tensor_axis, expert_axis=expert_axis
        )

    def program(self, outputs: Sequence[tuple[str, Role]]) -> Program:
        """Build the program that returns the given values with their roles."""
        tensors = tuple(global_tensor(value, self.types[value], role) for value, role in outputs)
        return Program(self.build([value for value, _ in outputs]), tuple(self._inputs), tensors)

    def _input(self, name: str, role: Role, shape: Shape, dtype: str, **axes: int | None) -> str:
        # Programs begin on device 0; transforms move and slice.
        tensor = Tensor(dtype, shape)
        self.parameter(name, tensor)
        self._inputs.append(global_tensor(name, tensor, role, **axes))
        return name
