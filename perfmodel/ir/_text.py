"""Writes and reads the text form of programs (grammar: `_parser`).

func @step(%x: fp32[8, 4] @0, %w: fp32[4, 4] @0) {
  %h: fp32[8, 4] @0 = matmul(%x, %w) | forward layer=0
  %h_1: fp32[8, 4] @1 = send(%h) {to=1} | stream=send
  return %h_1
}
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from perfmodel.ir._function import Function, Module, infer, inline
from perfmodel.ir._instruction import (
    CALL,
    UNTAGGED,
    Attributes,
    Instruction,
    Parameter,
    ProgramError,
    Tag,
    Tensor,
)
from perfmodel.ir._parser import Annotations, Parser
from perfmodel.ir._program import GlobalTensor, Program, undistributed

INDENT = "  "


def to_text(program: Program | Function | Module) -> str:
    """A program as text; values carry their types where these are known without inlining calls.

    Below a `Program`'s function stand its whole tensors:

        input "wte" parameter fp32[8, 4] {tensor_axis=0} = %wte.t0 [0, 0], %wte.t1 [4, 0]
        output "loss" loss fp32[] = %loss []
    """
    if isinstance(program, Program):
        sides = [("input", w) for w in program.inputs] + [("output", w) for w in program.outputs]
        return "\n".join(
            [
                _function(program.function),
                *(_global_tensor(side, tensor) for side, tensor in sides),
                "",
            ]
        )
    if isinstance(program, Module):
        return "\n".join(_function(f) for f in program.functions)
    return _function(program)


def instruction_text(instruction: Instruction, types: Mapping[str, Tensor]) -> str:
    """One instruction on one line; outputs carry the types that are known."""
    outputs = ", ".join(
        _value(name, types.get(name), known_value=False) for name in instruction.outputs
    )
    inputs = ", ".join(f"%{name}" for name in instruction.inputs)
    op, attributes = instruction.op, instruction.attributes
    if op == CALL:
        op = f"@{instruction.attribute('function')}"
        attributes = ()
    return f"{outputs} = {op}({inputs}){_attributes(attributes)}{_tag(instruction.tag)}"


def _function(function: Function) -> str:
    """Return the lines of a function: head, instructions, return."""
    # Types of a callee depend on its callers, so a function with calls or untyped parameters is
    # printed without.
    has_calls = any(i.op == CALL for i in function.instructions)
    has_types = all(p.type is not None for p in function.parameters)
    types = function.types if has_types and not has_calls else {}
    lines = [f"func @{function.name}({_parameters(function.parameters)}) {{"]
    lines += [INDENT + instruction_text(i, types) for i in function.instructions]
    lines += [f"{INDENT}return {_names(function.outputs)}".rstrip(), "}", ""]
    return "\n".join(lines)


def _global_tensor(side: str, tensor: GlobalTensor) -> str:
    """Return the line of a whole tensor and its pieces."""
    axes = [
        (axis_name, getattr(tensor, axis_name))
        for axis_name in ("batch_axis", "tensor_axis", "expert_axis")
    ]
    pieces = ", ".join(f"%{piece.value} {_literal(piece.start)}" for piece in tensor.pieces)
    stated_axes = _attributes(tuple((name, axis) for name, axis in axes if axis is not None))
    return f'{side} "{tensor.name}" {tensor.role} {tensor.dtype}{_literal(tensor.shape)}{stated_axes} = {pieces}'


def _parameters(parameters: Iterable[Parameter]) -> str:
    return ", ".join(_value(p.name, p.type, known_value=True) for p in parameters)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"%{name}" for name in names)


def _value(name: str, tensor: Tensor | None, known_value: bool) -> str:
    if tensor is None:
        return f"%{name}"
    known = f" = {_literal(tensor.value)}" if known_value and tensor.value is not None else ""
    return f"%{name}: {tensor}{known}"


def _attributes(attributes: Attributes) -> str:
    if not attributes:
        return ""
    stated = [f"{name}={_literal(value)}" for name, value in attributes]
    return f" {{{', '.join(stated)}}}"


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    # JSON gives quoted strings and lower-case booleans; `repr` gives the shortest float that reads
    # back the same.
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


def _tag(tag: Tag) -> str:
    """Return the end of an instruction's line: its pass, layer, micro-batch and stream."""
    if tag == UNTAGGED:
        return ""
    # Only what differs from the default is written, as with attributes.
    parts = [tag.phase] if tag.phase else []
    parts += [f"{n}={getattr(tag, n)}" for n in ("layer", "micro_batch") if getattr(tag, n) >= 0]
    if tag.stream != UNTAGGED.stream:
        parts.append(f"stream={tag.stream}")
    return f" | {' '.join(parts)}"


def parse(text: str) -> Module:
    """The module that a text describes; its last function is checked with all calls inlined.

    Raises:
        PerfModelError: text that does not follow the grammar; the message names the line.
        ProgramError: an invalid program, or a wrong type annotation.
    """
    return _checked(Parser(text))


def _checked(parser: Parser) -> Module:
    """Check a parsed text, and return its functions as a module."""
    functions, lines = parser.module()
    module = Module(tuple(functions))
    # A lone untyped function may be a library to be called; the last of several is where the
    # program starts.
    if any(p.type is None for p in module.main.parameters) and len(functions) > 1:
        parser.fail(
            f"the last function, @{module.main.name}, is the main function; give its parameters types"
        )
    # Inference runs on the inlined function, so callees are checked with the types of each call.
    flat, source_lines = inline(module, lines)
    if all(p.type is not None for p in flat.parameters):
        _check(flat.name, parser.annotations[-1], infer(flat, source_lines))
    return module


def parse_function(text: str) -> Function:
    """The program's last function with all calls inlined, ready for analyses and transforms."""
    return inline(parse(text))[0]


def parse_program(text: str) -> Program:
    """Parse a function and the whole tensors below it; without these, all inputs are data.

    Raises:
        PerfModelError, ProgramError: as `parse`; a piece that lies outside its whole tensor.
    """
    parser = Parser(text)
    function = inline(_checked(parser))[0]
    inputs, outputs = parser.global_tensors(function.types)
    if not inputs and not outputs:
        return undistributed(function)
    # Every parameter needs a source, or `split` could not feed it.
    pieces_read: set[str] = set()
    for tensor in inputs:
        pieces_read.update(piece.value for piece in tensor.pieces)
    for parameter in function.parameters:
        if parameter.name not in pieces_read:
            parser.fail(f"the parameter %{parameter.name} belongs to no input")
    for tensor in outputs:
        for piece in tensor.pieces:
            if piece.value not in function.outputs:
                parser.fail(f"output {tensor.name}: %{piece.value} is not returned")
    return Program(function, tuple(inputs), tuple(outputs))


def _check(function: str, annotations: Annotations, types: Mapping[str, Tensor]) -> None:
    """Raise `ProgramError` where a type or device that the text states is not the inferred one."""
    for line, name, tensor in annotations.types:
        # Known contents are not compared: an annotation cannot state them.
        inferred = types[name]
        stated_type = (tensor.dtype, tensor.shape, tensor.device)
        if stated_type != (inferred.dtype, inferred.shape, inferred.device):
            raise ProgramError(function, line, name, f"is {inferred}, not {tensor} as annotated")
    for line, name, device in annotations.devices:
        if types[name].device != device:
            raise ProgramError(
                function,
                line,
                name,
                f"is on device {types[name].device}, not {device} as annotated",
            )
