"""Prepares a pipeline: shards values over micro-batches, assigns instructions to passes.

A schedule orders passes (forward and backward of a stage, the latter possibly in two halves);
`_pipeline` writes them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

import numpy as np

from perfmodel.errors import LayoutError
from perfmodel.ir import OPS, Attributes, Function, Instruction, Program, Tag, attributes
from perfmodel.ir.op_definition import REPLICATED, Partial, Sharded, Sharding, ShardingQuery
from perfmodel.schedule import Phase, Schedule, even_split


def batch_shardings(program: Program, parts: int) -> tuple[dict[str, Sharding], Function]:
    """Return each value's sharding over micro-batches, and the function of one micro-batch.

    The rules are those of parallel devices, with time in the place of space: a value sharded along
    an axis is cut, a partial one is summed over micro-batches, a replicated one is the same for
    all. Where a replicated one (a mask, a class token repeated for every sample) meets one that is
    cut, each micro-batch takes its own slice of it.

    Raises:
        LayoutError: the batch does not divide, or an op of the forward or backward pass mixes
            samples.
    """
    function, types = program.function, program.types
    # Data are cut into micro-batches; the ops' sharding rules determine all other values.
    sharding = _input_shardings(program, parts)
    changed: list[Instruction] = []
    for instruction in function.instructions:
        # Updates run once, on sums over all micro-batches.
        if parts == 1 or instruction.tag.phase == "update":
            sharding.update(dict.fromkeys(instruction.outputs, REPLICATED))
            changed.append(instruction)
            continue
        operand_shardings = [sharding[name] for name in instruction.inputs]
        decision = OPS[instruction.op].spread(
            ShardingQuery.of(instruction, types, operand_shardings, parts)
        )
        inputs: list[str] = []
        for name, wanted in zip(instruction.inputs, decision.inputs, strict=True):
            if sharding[name] == wanted:
                inputs.append(name)
                continue
            # Between devices a collective would convert. Between micro-batches, which run one after
            # another, nothing can; only what all of them have can be cut.
            if sharding[name] != REPLICATED or not isinstance(wanted, Sharded):
                raise LayoutError(
                    f"%{instruction.outputs[0]}: {instruction.op} mixes samples of the batch in %{name}, so the "
                    "batch cannot be divided into micro-batches"
                )
            # Equal cuts are written once per pass and layer; their name is their identity.
            cut = _cut(name, wanted.axis, types[name].shape[wanted.axis] // parts, instruction.tag)
            (cut_name,) = cut.outputs
            if cut_name not in sharding:
                changed.append(cut)
                sharding[cut_name] = wanted
            inputs.append(cut_name)
        sharding.update(zip(instruction.outputs, decision.outputs, strict=True))
        values = attributes(**dict(instruction.attributes) | dict(decision.attributes))
        changed.append(
            Instruction(instruction.op, tuple(inputs), instruction.outputs, values, instruction.tag)
        )
    _check_returned(program, sharding)
    return sharding, Function(function.name, function.parameters, tuple(changed), function.outputs)


def _input_shardings(program: Program, parts: int) -> dict[str, Sharding]:
    """Sharding of parameters: data along their batch axes, others equal for all micro-batches."""
    sharding: dict[str, Sharding] = {p.name: REPLICATED for p in program.function.parameters}
    if parts == 1:
        return sharding
    for tensor in program.inputs_of("data"):
        if tensor.batch_axis is None:
            continue
        batch = tensor.shape[tensor.batch_axis]
        if batch % parts:
            raise LayoutError(
                f"{tensor.name}: a batch of {batch} is not divisible into {parts} micro-batches"
            )
        for piece in tensor.pieces:
            sharding[piece.value] = Sharded(tensor.batch_axis)
    return sharding


def _check_returned(program: Program, sharding: Mapping[str, Sharding]) -> None:
    """Refuse returned values that cannot be summed over micro-batches."""
    for tensor in program.outputs:
        for piece in tensor.pieces:
            spread = sharding[piece.value]
            if isinstance(spread, Partial) and spread != Partial("sum"):
                raise LayoutError(
                    f"%{piece.value}: this is a maximum over the batch, and micro-batches can only accumulate "
                    "sums; use one micro-batch"
                )


def _cut(name: str, axis: int, size: int, tag: Tag) -> Instruction:
    """A replicated value's slice for the first micro-batch; `for_micro_batch` moves it.

    Passes run on devices of their own, so each pass and layer has its own slice.
    """
    cut = f"{name}.{tag.phase}{tag.layer}.cut{axis}"
    first_part = attributes(axis=axis, start=0, stop=size)
    return Instruction("slice", (name,), (cut,), first_part, replace(tag, stream="compute"))


def for_micro_batch(
    instruction: Instruction, sharding: Mapping[str, Sharding], micro_batch: int
) -> Attributes:
    """Attributes of an instruction in one micro-batch; slices of shared values differ."""
    values = dict(instruction.attributes)
    if instruction.op != "slice" or sharding[instruction.inputs[0]] != REPLICATED:
        return instruction.attributes
    if not isinstance(sharding[instruction.outputs[0]], Sharded):
        return instruction.attributes
    size = values["stop"] - values["start"]
    return attributes(axis=values["axis"], start=micro_batch * size, stop=(micro_batch + 1) * size)


def summed_at_once(
    function: Function, sharding: Mapping[str, Sharding]
) -> tuple[dict[str, str], Function]:
    """Map from partial values to the sums over micro-batches that are used or returned.

    What slices of a sequence add up one after another is part of the same sum, so that the function
    that goes with it adds nothing up by itself.
    """
    # Partial sums inside a pass stay inside it; only those that leave the passes are accumulated
    # over micro-batches.
    needed = set(function.outputs)
    for instruction in function.instructions:
        if instruction.tag.phase == "update":
            needed.update(instruction.inputs)
    total = {
        name: name
        for name, spread in sharding.items()
        if spread == Partial("sum") and name in needed
    }

    # Slices of a sequence already accumulate within the function. Their additions are dropped and
    # their addends feed the one sum over all slices and micro-batches, in the schedule's order.
    instructions: list[Instruction] = []
    for instruction in reversed(function.instructions):
        if instruction.op == "accumulate" and instruction.outputs[0] in total:
            total |= dict.fromkeys(instruction.inputs, total[instruction.outputs[0]])
        else:
            instructions.append(instruction)
    return total, replace(function, instructions=tuple(reversed(instructions)))


PassKind = tuple[Phase, int, int]
"""A phase, the stage that runs it, and the slice of the sequence (0 if it is not sliced)."""


@dataclass(frozen=True)
class Passes:
    """Instructions by pass, each in program order."""

    by_pass: dict[PassKind, tuple[Instruction, ...]]
    update: tuple[Instruction, ...]
    maker: dict[str, PassKind]
    """Pass (backward ones split into input and weight gradient) that makes each value."""
    users: dict[str, tuple[PassKind, ...]]
    """Passes, split likewise, that use each value."""

    def body(self, phase: Phase, stage: int, part: int = 0) -> tuple[Instruction, ...]:
        """Instructions of a pass; a whole backward is both of its halves, in program order."""
        return self.by_pass.get((phase, stage, part), ())


def default_stages(layers: int, n_stages: int) -> tuple[int, ...]:
    """Stage of each layer, by `even_split`; first and last layer carry embedding and head, so no
    stage is empty.

    Raises:
        LayoutError: fewer layers than stages.
    """
    if layers < n_stages:
        raise LayoutError(
            f"{layers} layers are too few for {n_stages} pipeline stages; use fewer stages"
        )
    return tuple(np.repeat(np.arange(n_stages), even_split(layers, n_stages)).tolist())


def n_layers(function: Function) -> int:
    """Layers that the instructions are tagged with.

    Raises:
        LayoutError: an instruction without phase or layer.
    """
    for instruction in function.instructions:
        if not instruction.tag.phase or instruction.tag.layer < 0:
            raise LayoutError(
                f"%{instruction.outputs[0]}: tag every instruction with its phase and layer"
            )
    return max((i.tag.layer for i in function.instructions), default=0) + 1


def passes_of(function: Function, stage_of_layer: Sequence[int]) -> Passes:
    """Sort the instructions of a tagged function into passes."""
    bodies: dict[PassKind, list[Instruction]] = {}
    for instruction in function.instructions:
        tag = instruction.tag
        if tag.phase == "update":
            continue
        phase = Phase.FORWARD if tag.phase == "forward" else Phase.BACKWARD
        # A sequence that is not cut has no numbers of slices.
        part = max(tag.micro_batch, 0)
        bodies.setdefault((phase, stage_of_layer[tag.layer], part), []).append(instruction)
    by_pass = {kind: tuple(body) for kind, body in bodies.items()}

    # Schedules may run the two halves of a backward pass at different times.
    for (phase, stage, part), body in list(by_pass.items()):
        if phase == Phase.BACKWARD:
            input_half, weight_half = _halves(function, body)
            by_pass[Phase.BACKWARD_INPUT, stage, part] = input_half
            by_pass[Phase.BACKWARD_WEIGHT, stage, part] = weight_half

    # A whole backward is both of its halves, so makers and users are noted by half, which serves
    # schedules of either kind.
    maker: dict[str, PassKind] = {}
    users: dict[str, dict[PassKind, None]] = {}
    for kind, body in by_pass.items():
        if kind[0] == Phase.BACKWARD:
            continue
        for instruction in body:
            maker.update(dict.fromkeys(instruction.outputs, kind))
            for name in instruction.inputs:
                users.setdefault(name, {})[kind] = None
    update = tuple(i for i in function.instructions if i.tag.phase == "update")
    return Passes(by_pass, update, maker, {name: tuple(kinds) for name, kinds in users.items()})


def _halves(
    function: Function, body: tuple[Instruction, ...]
) -> tuple[tuple[Instruction, ...], tuple[Instruction, ...]]:
    """Split a stage's backward into input gradients, which others wait for, and weight
    gradients."""
    # Zero-bubble schedules delay weight gradients: only input gradients are on the path to the
    # stage before.
    own_values = set(chain.from_iterable(instruction.outputs for instruction in body))
    inside = {id(instruction) for instruction in body}

    # Backward passes of other stages wait for their operands, and for everything that these depend
    # on.
    live: set[str] = set()
    for instruction in function.instructions:
        if instruction.tag.phase == "backward" and id(instruction) not in inside:
            live.update(own_values.intersection(instruction.inputs))

    # Walking back from what other stages read collects the chain of input gradients; the rest is
    # weight gradients.
    input_half: list[Instruction] = []
    weight_half: list[Instruction] = []
    for instruction in reversed(body):
        if live.intersection(instruction.outputs):
            live.update(instruction.inputs)
            input_half.append(instruction)
        else:
            weight_half.append(instruction)
    return tuple(reversed(input_half)), tuple(reversed(weight_half))


def pass_parts(phase: Phase) -> tuple[Phase, ...]:
    """The halves of a schedule's phase."""
    return (Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT) if phase == Phase.BACKWARD else (phase,)


def places(schedule: Schedule) -> dict[tuple[Phase, int, int], int]:
    """The device of each (phase, stage, micro-batch); a whole backward pass is both halves."""
    index, micro_batches = schedule.covers
    phases = schedule.phase[index].tolist()
    stages = schedule.instruction_stage[index].tolist()
    devices = schedule.device[index].tolist()
    device_of = {}
    for phase, stage, micro_batch, device in zip(
        phases, stages, micro_batches.tolist(), devices, strict=True
    ):
        for part in pass_parts(Phase(phase)):
            device_of[part, stage, micro_batch] = device
    return device_of
