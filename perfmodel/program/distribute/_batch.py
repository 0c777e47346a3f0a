"""What happens to each value when the batch is cut into micro-batches."""

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.errors import LayoutError
from perfmodel.program.ir import (
    OPS,
    REPLICATED,
    Function,
    Instruction,
    Partial,
    Program,
    Question,
    Sharded,
    Sharding,
    attributes,
)


def batch_shardings(program: Program, parts: int) -> tuple[dict[str, Sharding], Function]:
    """How micro-batches share each value, and the function with the attributes that one of them needs.

    The rules are those of parallel devices, with time in the place of space: a value sharded along an axis
    is cut, a partial one is summed over micro-batches, a replicated one is the same for all.

    Raises:
        LayoutError: the batch does not divide, or an op of the forward or backward pass mixes samples.
    """
    function, types = program.function, program.types
    sharding: dict[str, Sharding] = {p.name: REPLICATED for p in function.parameters}
    for whole in program.inputs_of("data"):
        if whole.batch_axis is not None and parts > 1:
            batch = whole.shape[whole.batch_axis]
            if batch % parts:
                raise LayoutError(f"{whole.name}: a batch of {batch} does not divide into {parts} micro-batches")
            sharding |= {piece.value: Sharded(whole.batch_axis) for piece in whole.pieces}
    changed: list[Instruction] = []
    for instruction in function.instructions:
        if parts == 1 or instruction.tag.phase == "update":
            sharding.update(dict.fromkeys(instruction.outputs, REPLICATED))
            changed.append(instruction)
            continue
        question = Question.of(instruction, types, [sharding[name] for name in instruction.inputs], parts)
        answer = OPS[instruction.op].spread(question)
        for name, want in zip(instruction.inputs, answer.inputs, strict=True):
            if sharding[name] != want:
                raise LayoutError(f"%{instruction.outputs[0]}: {instruction.op} mixes samples of the batch in %{name}")
        sharding.update(zip(instruction.outputs, answer.outputs, strict=True))
        values = attributes(**dict(instruction.attributes) | dict(answer.attributes))
        changed.append(Instruction(instruction.op, instruction.inputs, instruction.outputs, values, instruction.tag))
    for whole in program.outputs:
        for piece in whole.pieces:
            if isinstance(sharding[piece.value], Partial) and sharding[piece.value] != Partial("sum"):
                raise LayoutError(f"%{piece.value}: a maximum over the batch is not accumulated")
    return sharding, Function(function.name, function.parameters, tuple(changed), function.outputs)


def summed_at_once(function: Function, sharding: Mapping[str, Sharding]) -> tuple[dict[str, str], Function]:
    """The sum over micro-batches that each value is a part of, of sums that updates use or the function returns.

    What slices of a sequence add up one after another is part of the same sum, so that the function that goes with it
    adds nothing up by itself.
    """
    used = {name for i in function.instructions if i.tag.phase == "update" for name in i.inputs}
    needed = used | set(function.outputs)
    total = {name: name for name, spread in sharding.items() if spread == Partial("sum") and name in needed}
    kept: list[Instruction] = []
    for i in reversed(function.instructions):
        if i.op == "accumulate" and i.outputs[0] in total:
            total |= dict.fromkeys(i.inputs, total[i.outputs[0]])
        else:
            kept.append(i)
    return total, replace(function, instructions=tuple(reversed(kept)))
