"""What each device runs, in its own order."""

from perfmodel.program.ir._function import Function
from perfmodel.program.ir._instruction import Instruction


def instruction_devices(function: Function) -> list[tuple[int, ...]]:
    """Devices that each instruction runs on: those of its operands and results, in order of appearance."""
    types = function.types
    device = {name: tensor.device for name, tensor in types.items()}
    return [tuple(dict.fromkeys([device[name] for name in (*i.inputs, *i.outputs)])) for i in function.instructions]


def lower(function: Function) -> tuple[tuple[Instruction, ...], ...]:
    """Project a function to its devices (DistIR, section 3.2): rank r runs what involves device r.

    An instruction of several devices stands in the program of each of them.
    """
    ranks: list[list[Instruction]] = [[] for _ in range(function.n_devices)]
    for instruction, devices in zip(function.instructions, instruction_devices(function), strict=True):
        for device in devices:
            ranks[device].append(instruction)
    return tuple(map(tuple, ranks))
