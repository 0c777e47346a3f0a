"""Replacing calls by the called function's instructions."""

from collections.abc import Sequence
from dataclasses import replace

from perfmodel.errors import UnknownNameError
from perfmodel.program.ir._function import Function, Module, line_of
from perfmodel.program.ir._instruction import CALL, UNTAGGED, Instruction, ProgramError


def inline(module: Module, lines: Sequence[int] | None = None) -> tuple[Function, list[int]]:
    """The module's main function without calls, and the line of the main function each instruction comes from.

    A callee's values are named after the call's first output: `%h` of the call that gives `%y` is `%y.h`;
    what the callee returns has the call's own output names. A call's tag holds for all that it runs.

    Args:
        module: functions, each calling only those above it.
        lines: line of each instruction of main and of its return in the source.

    Raises:
        ProgramError: a call of a function that does not stand above, or of another number of arguments or
            results.
    """
    out: list[Instruction] = []
    where: list[int] = []
    main = module.main
    for index, instruction in enumerate(main.instructions):
        line = line_of(index, lines)
        before = len(out)
        _expand(module, main.name, instruction, len(module.functions) - 1, line, out)
        where += [line] * (len(out) - before)
    where.append(line_of(len(main.instructions), lines))
    return replace(main, instructions=tuple(out)), where


def _expand(
    module: Module, caller: str, instruction: Instruction, below: int, line: int, out: list[Instruction]
) -> None:
    """Append an instruction or, of a call, the callee's, which must stand before function number `below`."""
    if instruction.op != CALL:
        out.append(instruction)
        return
    value = instruction.outputs[0] if instruction.outputs else CALL
    name = instruction.attribute("function")
    known = {f.name: k for k, f in enumerate(module.functions[:below])}
    if name not in known:
        raise ProgramError(caller, line, value, str(UnknownNameError("function above", str(name), known)))
    callee = module.functions[known[name]]
    for what, given, wanted in (
        ("arguments", instruction.inputs, callee.parameters),
        ("results", instruction.outputs, callee.outputs),
    ):
        if len(given) != len(wanted):
            raise ProgramError(caller, line, value, f"@{name} has {len(wanted)} {what}, {len(given)} named")
    names = {p.name: argument for p, argument in zip(callee.parameters, instruction.inputs, strict=True)}
    if len(set(callee.outputs)) < len(callee.outputs) or set(callee.outputs) & set(names):
        raise ProgramError(caller, line, value, f"@{name} must return distinct values that it computes, to be called")
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
            tuple(names[local] for local in inner.outputs),
            inner.attributes,
            inner.tag if instruction.tag == UNTAGGED else instruction.tag,
        )
        _expand(module, caller, renamed, known[name], line, out)
