"""The text form, which `parse` reads back.

func @step(%x: fp32[8, 4] @0, %w: fp32[4, 4] @0) {
  %h: fp32[8, 4] @0 = matmul(%x, %w) | forward layer=0
  %h_1: fp32[8, 4] @1 = send(%h) {to=1} | stream=send
  return %h_1
}
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from perfmodel.program.ir._function import Function, Module
from perfmodel.program.ir._instruction import CALL, UNTAGGED, Attributes, Instruction, Parameter, Tag, Tensor
from perfmodel.program.ir._program import Program, Whole

INDENT = "  "


def to_text(program: Program | Function | Module) -> str:
    """A program as text; values carry their types where these are known without inlining calls.

    Below a `Program`'s function stand its whole tensors:

        input "wte" parameter fp32[8, 4] {tensor_axis=0} = %wte.t0 [0, 0], %wte.t1 [4, 0]
        output "loss" loss fp32[] = %loss []
    """
    if isinstance(program, Program):
        sides = [("input", w) for w in program.inputs] + [("output", w) for w in program.outputs]
        return "\n".join([_function(program.function), *(_whole(side, whole) for side, whole in sides), ""])
    if isinstance(program, Module):
        return "\n".join(_function(f) for f in program.functions)
    return _function(program)


def instruction_text(instruction: Instruction, types: Mapping[str, Tensor]) -> str:
    """One instruction on one line; outputs carry the types that are known."""
    outputs = ", ".join(_value(name, types.get(name), known_value=False) for name in instruction.outputs)
    inputs = ", ".join(f"%{name}" for name in instruction.inputs)
    op, attributes = instruction.op, instruction.attributes
    if op == CALL:
        op, attributes = f"@{instruction.attribute('function')}", ()
    return f"{outputs} = {op}({inputs}){_attributes(attributes)}{_tag(instruction.tag)}"


def _function(function: Function) -> str:
    typed = all(p.type is not None for p in function.parameters) and not any(
        i.op == CALL for i in function.instructions
    )
    types = function.types if typed else {}
    lines = [f"func @{function.name}({_parameters(function.parameters)}) {{"]
    lines += [INDENT + instruction_text(i, types) for i in function.instructions]
    lines += [f"{INDENT}return {_names(function.outputs)}".rstrip(), "}", ""]
    return "\n".join(lines)


def _whole(side: str, whole: Whole) -> str:
    axes = [(n, getattr(whole, n)) for n in ("batch_axis", "tensor_axis", "expert_axis")]
    pieces = ", ".join(f"%{piece.value} {_literal(piece.start)}" for piece in whole.pieces)
    said = _attributes(tuple((name, axis) for name, axis in axes if axis is not None))
    return f'{side} "{whole.name}" {whole.role} {whole.dtype}{_literal(whole.shape)}{said} = {pieces}'


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
    return f" {{{', '.join(f'{name}={_literal(value)}' for name, value in attributes)}}}" if attributes else ""


def _literal(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_literal, value))}]"
    return json.dumps(value) if isinstance(value, (str, bool)) else repr(value)


def _tag(tag: Tag) -> str:
    if tag == UNTAGGED:
        return ""
    words = [tag.phase] if tag.phase else []
    words += [f"{n}={getattr(tag, n)}" for n in ("layer", "micro_batch") if getattr(tag, n) >= 0]
    words += [f"stream={tag.stream}"] * (tag.stream != UNTAGGED.stream)
    return f" | {' '.join(words)}"
