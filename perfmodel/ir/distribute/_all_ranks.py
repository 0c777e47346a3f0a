"""Turns one rank's program, whose collectives stand for all ranks', into one of all ranks."""

from collections.abc import Mapping
from dataclasses import replace

from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.ir import Function, GlobalTensor, Instruction, Parameter, Piece, Program, attributes


def all_ranks(program: Program, ranks: int, sharded: Mapping[str, int]) -> Program:
    """Copy a one-device program to `ranks` devices, which all run it.

    Args:
        program: program of one device; its collectives have `replicas` of so many ranks, one device
            apart.
        ranks: number of ranks.
        sharded: axis of the whole tensor along which ranks hold their parts in turn, by the name of
            an input or output; the others are alike on all ranks.

    Raises:
        UnknownNameError: a sharded tensor that is none of the program's.
        LayoutError: a collective of another number of ranks, or a tensor without the axis.
    """
    tensors = (*program.inputs, *program.outputs)
    for name in sharded:
        if name not in {tensor.name for tensor in tensors}:
            raise UnknownNameError(
                "tensor of the program", name, [tensor.name for tensor in tensors]
            )
    function, types = program.function, program.types

    # Ranks in turn define a parameter each, and run an instruction each; collectives are one for
    # all.
    parameters = []
    for parameter in function.parameters:
        for rank in range(ranks):
            parameters.append(
                Parameter(_name_on_rank(parameter.name, rank), types[parameter.name].on(rank))
            )
    instructions = []
    for instruction in function.instructions:
        if instruction.attribute("replicas") is None:
            instructions += [_on_rank(instruction, rank) for rank in range(ranks)]
        else:
            instructions.append(_collective_of_ranks(instruction, ranks))
    outputs = []
    for name in function.outputs:
        outputs += [_name_on_rank(name, rank) for rank in range(ranks)]
    return Program(
        Function(function.name, tuple(parameters), tuple(instructions), tuple(outputs)),
        tuple(_joined_tensor(tensor, ranks, sharded.get(tensor.name)) for tensor in program.inputs),
        tuple(
            _joined_tensor(tensor, ranks, sharded.get(tensor.name)) for tensor in program.outputs
        ),
    )


def _name_on_rank(name: str, rank: int) -> str:
    """Name of a value on one rank, as `tensor_parallel` names it."""
    return f"{name}.t{rank}"


def _on_rank(instruction: Instruction, rank: int) -> Instruction:
    """The instruction as one rank runs it."""
    values = dict(instruction.attributes)
    # An instruction without operands needs an explicit device.
    if "device" in values:
        values["device"] = rank
    return replace(
        instruction,
        inputs=tuple(_name_on_rank(name, rank) for name in instruction.inputs),
        outputs=tuple(_name_on_rank(name, rank) for name in instruction.outputs),
        attributes=attributes(**values),
    )


def _collective_of_ranks(instruction: Instruction, ranks: int) -> Instruction:
    """One collective of all ranks in place of the one that stands for them."""
    values = dict(instruction.attributes)
    if values.pop("replicas") != (ranks, 1):
        raise LayoutError(
            f"{instruction.op} %{instruction.outputs[0]}: is not one of all {ranks} ranks"
        )
    return replace(
        instruction,
        inputs=tuple(_name_on_rank(instruction.inputs[0], rank) for rank in range(ranks)),
        outputs=tuple(_name_on_rank(instruction.outputs[0], rank) for rank in range(ranks)),
        attributes=attributes(**values),
    )


def _joined_tensor(tensor: GlobalTensor, ranks: int, axis: int | None) -> GlobalTensor:
    """A tensor and its pieces on all ranks."""
    shape = list(tensor.shape)
    if axis is not None:
        if not 0 <= axis < len(shape):
            raise LayoutError(
                f"{tensor.name} of shape {tensor.shape} has no axis {axis} along which ranks hold parts"
            )
        shape[axis] *= ranks
    pieces = []
    for piece in tensor.pieces:
        for rank in range(ranks):
            start = list(piece.start)
            if axis is not None:
                start[axis] += rank * tensor.shape[axis]
            pieces.append(Piece(_name_on_rank(piece.value, rank), tuple(start)))
    return replace(tensor, shape=tuple(shape), pieces=tuple(pieces))
