"""Per-rank programs: what each device runs, in its own order, and how they fit together.

An instruction of several devices stands in the program of each of them. Merging puts per-rank programs
back into one function, which is possible exactly when they cannot deadlock.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from perfmodel.program.ir._function import Function
from perfmodel.program.ir._instruction import Instruction, Parameter, ProgramError


@dataclass(frozen=True)
class RankPrograms:
    """One list of instructions per rank; rank r runs what involves device r."""

    name: str
    parameters: tuple[Parameter, ...]
    ranks: tuple[tuple[Instruction, ...], ...]
    outputs: tuple[str, ...]


def instruction_devices(function: Function) -> list[tuple[int, ...]]:
    """Devices that each instruction runs on: those of its operands and results, in order of appearance."""
    types = function.types
    device = {name: tensor.device for name, tensor in types.items()}
    return [tuple(dict.fromkeys([device[name] for name in (*i.inputs, *i.outputs)])) for i in function.instructions]


def lower(function: Function) -> RankPrograms:
    """Project a function to its devices (DistIR, section 3.2): each keeps the instructions that involve it."""
    ranks: list[list[Instruction]] = [[] for _ in range(function.n_devices)]
    for instruction, devices in zip(function.instructions, instruction_devices(function), strict=True):
        for device in devices:
            ranks[device].append(instruction)
    return RankPrograms(function.name, function.parameters, tuple(map(tuple, ranks)), function.outputs)


def merge(programs: RankPrograms, lines: Sequence[Sequence[int]] | None = None) -> Function:
    """One function that runs every rank's instructions in the rank's order.

    Args:
        programs: per-rank programs.
        lines: line of each rank's instructions in their source, for messages.

    Raises:
        ProgramError: ranks that wait for one another in a cycle, an instruction of several devices that
            one of them lacks, or whatever is wrong with the merged function.
    """
    order, stuck = _merged(programs)
    if stuck:
        raise _cyclic_wait(programs, stuck, lines)
    function = Function(programs.name, programs.parameters, tuple(order), programs.outputs)
    found = lower(function)
    padded = (*found.ranks, *[()] * (len(programs.ranks) - len(found.ranks)))
    for rank, (have, want) in enumerate(zip(programs.ranks, padded, strict=False)):
        missing = {i.outputs for i in want} ^ {i.outputs for i in have}
        if missing:
            value = min(missing)[0]
            line = next((_line(programs, r, p, lines) for r, p in _places(programs, value)), 1)
            raise ProgramError(
                programs.name, line, value, f"must stand in the program of rank {rank} exactly if it involves it"
            )
    return function


def _merged(programs: RankPrograms) -> tuple[list[Instruction], dict[int, int]]:
    """Instructions in an order that suits all ranks; otherwise where each stuck rank stands."""
    holders: dict[tuple[str, ...], set[int]] = {}
    for rank, instructions in enumerate(programs.ranks):
        for instruction in instructions:
            holders.setdefault(instruction.outputs, set()).add(rank)
    at = [0] * len(programs.ranks)
    arrived: dict[tuple[str, ...], int] = {}
    order: list[Instruction] = []
    ready = list(range(len(programs.ranks) - 1, -1, -1))
    while ready:
        rank = ready.pop()
        while at[rank] < len(programs.ranks[rank]):
            instruction = programs.ranks[rank][at[rank]]
            group = holders[instruction.outputs]
            count = arrived[instruction.outputs] = arrived.get(instruction.outputs, 0) + 1
            if count < len(group):
                break
            order.append(instruction)
            for other in group:
                at[other] += 1
            ready += sorted(group - {rank}, reverse=True)
    return order, {rank: p for rank, p in enumerate(at) if p < len(programs.ranks[rank])}


def _cyclic_wait(programs: RankPrograms, stuck: dict[int, int], lines: Sequence[Sequence[int]] | None) -> ProgramError:
    here = {rank: programs.ranks[rank][position] for rank, position in stuck.items()}
    first = min(stuck)
    waits = "; ".join(
        f"rank {rank} waits at %{here[rank].outputs[0]} (line {_line(programs, rank, position, lines)})"
        for rank, position in stuck.items()
    )
    message = f"is never reached by all its ranks, a cyclic wait: {waits}"
    line = _line(programs, first, stuck[first], lines)
    return ProgramError(programs.name, line, here[first].outputs[0], message)


def _line(programs: RankPrograms, rank: int, position: int, lines: Sequence[Sequence[int]] | None) -> int:
    if lines is not None:
        return lines[rank][position]
    return 2 + sum(len(r) + 2 for r in programs.ranks[:rank]) + position + 1


def _places(programs: RankPrograms, value: str) -> list[tuple[int, int]]:
    return [(r, p) for r, code in enumerate(programs.ranks) for p, i in enumerate(code) if value in i.outputs]
