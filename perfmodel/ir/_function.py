"""Functions in static single assignment form, and type inference by abstract interpretation.

The interpreter goes line by line over abstract values (DistIR, algorithm 1) and finds dtype, shape,
device and known contents in one pass. An op whose operands are all known is evaluated, so that
chains of `shape`, `take`, `concat` and `reshape` resolve (DistIR, figure 4). Calls of other
functions are inlined before.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.ir._instruction import (
    CALL,
    INTEGER_DTYPES,
    ITEM_BYTES,
    UNTAGGED,
    Attributes,
    Instruction,
    Parameter,
    ProgramError,
    RuleError,
    Tensor,
    frozen,
    shape_of_constant,
)
from perfmodel.ir.ops import OPS

_LARGEST_KNOWN = 64
"""Most elements of a value that is evaluated; such values are shapes and indices, not data."""

OutputTypes = dict[tuple[str, Attributes, tuple[Tensor, ...]], tuple[Tensor, ...]]
"""Types that an op gives, by its attributes and operands."""


@dataclass(frozen=True)
class Function:
    """Instructions in program order, in which each device runs its own.

    Consecutive instructions on disjoint sets of devices run in parallel (DistIR, section 2.1).
    """

    name: str
    parameters: tuple[Parameter, ...]
    instructions: tuple[Instruction, ...]
    outputs: tuple[str, ...]

    @cached_property
    def types(self) -> Mapping[str, Tensor]:
        """Type of every value, by abstract interpretation; equal types are one object."""
        return infer(self)

    @cached_property
    def n_devices(self) -> int:
        """Number of devices, from 0 to the highest that has a value."""
        return max((tensor.device for tensor in self.types.values()), default=0) + 1


@dataclass(frozen=True)
class Module:
    """Functions that may call earlier ones; the last is the main function."""

    functions: tuple[Function, ...]

    @property
    def main(self) -> Function:
        return self.functions[-1]


def infer(function: Function, lines: Sequence[int] | None = None) -> Mapping[str, Tensor]:
    """Type of every value of a function whose parameters are typed and whose calls are inlined.

    Args:
        function: the function. Every name must be defined once, above the instructions that use it.
        lines: line of each instruction and of the return in its source; by default those of its
            printed form.

    Raises:
        ProgramError: at the first unknown op, name used before its definition or defined twice,
            wrong device, shape or dtype.
    """
    # Algorithm 1's initial state: formal parameters map to their stated types.
    types: dict[str, Tensor] = {}
    for parameter in function.parameters:
        _add_parameter(
            function, parameter.name, parameter.type, types, lines[0] - 1 if lines else 1
        )
    # Equal types are one object, so that `id` tells them apart: hashing them takes longer than all
    # the rest.
    shared: dict[Tensor, Tensor] = {}
    types |= {name: shared.setdefault(tensor, tensor) for name, tensor in types.items()}
    # Layers and micro-batches repeat the same op on the same types, so each distinct one is
    # inferred once.
    memo: dict[tuple[str, Attributes, tuple[int, ...]], tuple[Tensor, ...]] = {}
    for index, instruction in enumerate(function.instructions):
        try:
            operand_types = [types[name] for name in instruction.inputs]
            key = (
                instruction.op,
                instruction.attributes,
                tuple([id(tensor) for tensor in operand_types]),
            )
            inferred = memo.get(key)
            if inferred is None:
                made = output_types(instruction, tuple(operand_types))
                inferred = memo[key] = tuple([shared.setdefault(tensor, tensor) for tensor in made])
            if len(inferred) != len(instruction.outputs):
                raise RuleError(
                    f"{instruction.op} has {len(inferred)} outputs, but {len(instruction.outputs)} names are given"
                )
        except (KeyError, PerfModelError) as error:
            value, message = _explain(instruction, error, types)
            raise ProgramError(function.name, line_of(index, lines), value, message) from None
        # Static single assignment: a second definition would make every later use ambiguous.
        for name, tensor in zip(instruction.outputs, inferred, strict=True):
            if name in types:
                message = "is already defined; assign every value only once"
                raise ProgramError(function.name, line_of(index, lines), name, message)
            types[name] = tensor
    # The last line is algorithm 1's return, which looks its values up in the final state.
    for name in function.outputs:
        if name not in types:
            line = line_of(len(function.instructions), lines)
            raise ProgramError(function.name, line, name, "is returned but not defined")
    return types


def output_types(instruction: Instruction, operand_types: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Types of an instruction's outputs.

    Raises:
        RuleError: an operand or attribute that the op does not take.
        UnknownNameError: an op that is not defined.
    """
    if instruction.op == CALL:
        raise RuleError(
            "calls a function, so its types depend on the module; inline the function first"
        )
    definition = OPS.get(instruction.op)
    if definition is None:
        raise UnknownNameError("op", instruction.op, OPS)

    # Only collectives run on several devices.
    attributes = dict(instruction.attributes)
    if not definition.collective:
        devices = {tensor.device for tensor in operand_types}
        if len(devices) > 1:
            places = ", ".join(
                f"%{name} on device {tensor.device}"
                for name, tensor in zip(instruction.inputs, operand_types, strict=True)
            )
            raise RuleError(
                f"{instruction.op} runs on one device, but has {places}; send the other operands to its device"
            )
    # The abstract half gives shapes. The concrete half follows only where every operand's contents
    # are known (DistIR, section 3.3): a single unknown one makes the result unknown.
    outputs = definition.infer(operand_types, attributes)
    if definition.fold is None or len(outputs) != 1 or any(t.value is None for t in operand_types):
        return outputs
    return (
        _folded(
            outputs[0], definition.fold([np.array(t.value) for t in operand_types], attributes)
        ),
    )


def line_of(index: int, lines: Sequence[int] | None) -> int:
    """Line number of an instruction (or of the return, one past the last)."""
    return lines[index] if lines is not None else index + 2


def _folded(tensor: Tensor, value: np.ndarray) -> Tensor:
    # Evaluation serves shape arithmetic. Floats and large arrays are data: carrying them would turn
    # the analysis into an execution.
    if tensor.dtype not in INTEGER_DTYPES or value.size > _LARGEST_KNOWN:
        return tensor
    return replace(tensor, value=frozen(value.tolist()))


def _add_parameter(
    function: Function, name: str, tensor: Tensor | None, types: dict[str, Tensor], line: int
) -> None:
    """Check a parameter and add its type to `types`."""

    def wrong(message: str) -> ProgramError:
        return ProgramError(function.name, line, name, message)

    if tensor is None:
        raise wrong("has no type; give the parameter one, as in %x: fp32[2, 4] @0")
    if name in types:
        raise wrong("is already defined; assign every value only once")
    if tensor.dtype not in ITEM_BYTES:
        raise wrong(str(UnknownNameError("dtype", tensor.dtype, ITEM_BYTES)))
    if tensor.device < 0 or min(tensor.shape, default=1) < 1:
        raise wrong(f"{tensor} must have positive dimensions and a device of at least 0")
    if tensor.value is not None and shape_of_constant(tensor.value) != tensor.shape:
        raise wrong(
            f"its known value has shape {shape_of_constant(tensor.value)}, but its type has {tensor.shape}"
        )
    types[name] = tensor


def _explain(instruction: Instruction, error: Any, types: Mapping[str, Tensor]) -> tuple[str, str]:
    """Return the value that an error at an instruction is about, and the error's message."""
    # A name that nobody defined shows as a `KeyError` of the look-up; it is the most common slip
    # and has its own text.
    for name in instruction.inputs:
        if name not in types:
            return name, f"is used by {instruction.op} before it is defined"
    value = instruction.outputs[0] if instruction.outputs else instruction.op
    operand_types = ", ".join(f"%{name}: {types[name]}" for name in instruction.inputs)
    message = str(error)
    if isinstance(error, RuleError):
        message = f"{error} (operands: {operand_types})"
    return value, message


def instruction_devices(function: Function) -> list[tuple[int, ...]]:
    """Devices that each instruction runs on, in the order of its operands and results."""
    types = function.types
    device = {name: tensor.device for name, tensor in types.items()}
    groups = []
    for instruction in function.instructions:
        # A dictionary removes duplicates and keeps the order, which is that of a collective's
        # group.
        devices = [device[name] for name in (*instruction.inputs, *instruction.outputs)]
        groups.append(tuple(dict.fromkeys(devices)))
    return groups


def lower(function: Function) -> tuple[tuple[Instruction, ...], ...]:
    """Project a function to its devices (DistIR, section 3.2): rank r runs device r's part.

    An instruction of several devices stands in the program of each of them.
    """
    # Every rank keeps the program's order, so ranks meet at collectives in one global order and
    # cannot deadlock.
    ranks: list[list[Instruction]] = [[] for _ in range(function.n_devices)]
    for instruction, devices in zip(
        function.instructions, instruction_devices(function), strict=True
    ):
        for device in devices:
            ranks[device].append(instruction)
    return tuple(map(tuple, ranks))


def inline(module: Module, lines: Sequence[int] | None = None) -> tuple[Function, list[int]]:
    """The main function with all calls inlined, and the source line of each instruction.

    A callee's values are named after the call's first output: `%h` of the call that gives `%y` is
    `%y.h`; what the callee returns has the call's own output names. A call's tag holds for all that
    it runs.

    Args:
        module: functions, each calling only those above it.
        lines: line of each instruction of main and of its return in the source.

    Raises:
        ProgramError: a call of a function that does not stand above, or of another number of
            arguments or results.
    """
    out: list[Instruction] = []
    source_lines: list[int] = []
    main = module.main
    for index, instruction in enumerate(main.instructions):
        line = line_of(index, lines)
        # Whatever a call expands to is blamed on the line of the call, the only one that the user
        # wrote.
        before = len(out)
        _expand(module, main.name, instruction, len(module.functions) - 1, line, out)
        source_lines += [line] * (len(out) - before)
    source_lines.append(line_of(len(main.instructions), lines))
    return replace(main, instructions=tuple(out)), source_lines


def _mismatch(call: Instruction, callee: Function) -> str:
    """Say why a call does not fit the function that it calls; empty if it does."""
    for what, stated, expected in (
        ("arguments", call.inputs, callee.parameters),
        ("results", call.outputs, callee.outputs),
    ):
        if len(stated) != len(expected):
            return f"@{callee.name} has {len(expected)} {what}, but {len(stated)} are given"

    # Results take the call's names, which is only possible if each is a value of its own.
    parameter_names = {parameter.name for parameter in callee.parameters}
    is_repeated = len(set(callee.outputs)) < len(callee.outputs)
    if is_repeated or set(callee.outputs) & parameter_names:
        return f"a function that is called must return distinct computed values, which @{callee.name} does not"
    return ""


def _expand(
    module: Module,
    caller: str,
    instruction: Instruction,
    below: int,
    line: int,
    out: list[Instruction],
) -> None:
    """Append an instruction or, for a call, the callee's, which precedes function `below`."""
    if instruction.op != CALL:
        out.append(instruction)
        return
    value = instruction.outputs[0] if instruction.outputs else CALL
    name = instruction.attribute("function")
    # Only functions above are callable, which rules out recursion without a check of its own.
    known = {f.name: k for k, f in enumerate(module.functions[:below])}
    if name not in known:
        raise ProgramError(
            caller, line, value, str(UnknownNameError("function above", str(name), known))
        )
    callee = module.functions[known[name]]
    mismatch = _mismatch(instruction, callee)
    if mismatch:
        raise ProgramError(caller, line, value, mismatch)

    # Inlining renames: parameters become the call's arguments, results take the call's own names,
    # and other values of the callee get names that no other call's have.
    parameter_names = [parameter.name for parameter in callee.parameters]
    names = dict(zip(parameter_names, instruction.inputs, strict=True))
    names |= dict(zip(callee.outputs, instruction.outputs, strict=True))
    for inner in callee.instructions:
        for local in inner.outputs:
            names.setdefault(local, f"{value}.{local}")
        try:
            inputs = tuple(names[local] for local in inner.inputs)
        except KeyError as error:
            message = f"@{name} uses %{error.args[0]} before it is defined"
            raise ProgramError(caller, line, value, message) from None
        renamed = Instruction(
            inner.op,
            inputs,
            # A tagged call (of a micro-batch, say) overrides the callee's tags, which are those of
            # any call.
            tuple(names[local] for local in inner.outputs),
            inner.attributes,
            inner.tag if instruction.tag == UNTAGGED else instruction.tag,
        )
        _expand(module, caller, renamed, known[name], line, out)
