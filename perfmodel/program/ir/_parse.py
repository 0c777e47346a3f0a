"""Reading the text form."""

from collections.abc import Mapping

from perfmodel.program.ir._function import Function, Module, infer, inline
from perfmodel.program.ir._instruction import ProgramError, Tensor
from perfmodel.program.ir._parser import Annotations, Parser
from perfmodel.program.ir._program import Program, undistributed


def parse(text: str) -> Module:
    """The module that a text describes; its last function is checked with all calls inlined.

    Raises:
        PerfModelError: text that does not follow the grammar; the message names the line.
        ProgramError: whatever is wrong with the program, or a type annotation that is not so.
    """
    return _checked(Parser(text))


def _checked(parser: Parser) -> Module:
    functions, lines = parser.module()
    module = Module(tuple(functions))
    if any(p.type is None for p in module.main.parameters) and len(functions) > 1:
        parser.fail(f"the last function, @{module.main.name}, is where the program starts; give its parameters types")
    flat, where = inline(module, lines)
    if all(p.type is not None for p in flat.parameters):
        _check(flat.name, parser.annotations[-1], infer(flat, where).types)
    return module


def parse_function(text: str) -> Function:
    """The program's last function with all calls inlined, ready for analyses and transforms."""
    return inline(parse(text))[0]


def parse_program(text: str) -> Program:
    """A function with the whole tensors that stand below it; without them, all inputs are data (`undistributed`).

    Raises:
        PerfModelError, ProgramError: as `parse`; a whole tensor of which a piece is no part.
    """
    parser = Parser(text)
    function = inline(_checked(parser))[0]
    inputs, outputs = parser.wholes(function.types)
    if not inputs and not outputs:
        return undistributed(function)
    held = {piece.value for whole in inputs for piece in whole.pieces}
    for parameter in function.parameters:
        if parameter.name not in held:
            parser.fail(f"no input holds the parameter %{parameter.name}")
    for whole in outputs:
        for piece in whole.pieces:
            if piece.value not in function.outputs:
                parser.fail(f"output {whole.name}: %{piece.value} is not returned")
    return Program(function, tuple(inputs), tuple(outputs))


def _check(function: str, said: Annotations, types: Mapping[str, Tensor]) -> None:
    for line, name, tensor in said.types:
        found = types[name]
        if (tensor.dtype, tensor.shape, tensor.device) != (found.dtype, found.shape, found.device):
            raise ProgramError(function, line, name, f"is {found}, not {tensor} as annotated")
    for line, name, device in said.devices:
        if types[name].device != device:
            raise ProgramError(function, line, name, f"is on device {types[name].device}, not {device} as annotated")
