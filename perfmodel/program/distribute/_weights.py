"""How a program's weights are sliced: Megatron-LM's axes found from the data flow, and vocabularies that divide."""

from dataclasses import replace

from perfmodel.errors import LayoutError
from perfmodel.program.ir import (
    OPS,
    REPLICATED,
    Function,
    Instruction,
    Parameter,
    Program,
    Question,
    Sharded,
    Sharding,
    attributes,
)


def megatron_axes(program: Program) -> Program:
    """The program with the `tensor_axis` of every weight as Megatron-LM slices them (Shoeybi et al. 2019, section 3).

    Weights are met in program order: of a product whose left operand is sliced along what is summed, the rows are
    sliced, of any other the columns; biases and gains as what they are applied to; tables of embeddings by rows.
    """
    types = program.types
    undecided = set(program.values_of("parameter"))
    axes: dict[str, int] = {}
    spread: dict[str, Sharding] = {p.name: REPLICATED for p in program.function.parameters}
    for i in program.function.instructions:
        for place, name in enumerate(i.inputs):
            if name in undecided:
                undecided.discard(name)
                axis = _axis(i, place, [spread[n] for n in i.inputs], [types[n].rank for n in i.inputs])
                if axis is not None and types[name].shape[axis] > 1:
                    axes[name], spread[name] = axis, Sharded(axis)
        question = Question.of(i, types, [spread[n] for n in i.inputs], 1)
        spread.update(zip(i.outputs, OPS[i.op].spread(question).outputs, strict=True))
    return replace(
        program,
        inputs=tuple(
            replace(w, tensor_axis=axes.get(w.pieces[0].value)) if w.role == "parameter" else w for w in program.inputs
        ),
    )


def _axis(i: Instruction, place: int, spread: list[Sharding], ranks: list[int]) -> int | None:
    """Axis along which an instruction's operand is sliced, None for none."""
    if i.op == "embedding":
        return 0
    if i.op == "matmul" and place == 1 and ranks[1] == 2:
        summed = ranks[0] - (2 if i.attribute("transpose_a") else 1)
        rows = 1 if i.attribute("transpose_b") else 0
        return rows if spread[0] == Sharded(summed) else 1 - rows
    if i.op in ("add", "sub", "mul", "div") and ranks[place] == 1:
        return 0 if spread[1 - place] == Sharded(ranks[1 - place] - 1) else None
    return None


def pad_vocabulary(program: Program, multiple: int) -> Program:
    """The program with tables of embeddings, and heads of as many columns, grown to a multiple (Megatron-LM's padding).

    Logits grow too; in a loss the added classes take part as tokens that never occur, as Megatron-LM's do.

    Args:
        program: not distributed.
        multiple: usually the tensor-parallel degree, or 128 times that.

    Raises:
        LayoutError: a constant has the vocabulary's size, or the program is distributed.
    """
    if program.n_devices > 1:
        raise LayoutError("vocabularies are padded before a program is distributed")
    function, types = program.function, program.types
    weights = program.values_of("parameter", "state")
    sizes = {types[i.inputs[0]].shape[0] for i in function.instructions if i.op == "embedding"}
    grown = {n: -(-n // multiple) * multiple for n in sizes if n % multiple}

    def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(grown.get(n, n) for n in shape)

    instructions = []
    for i in function.instructions:
        shape = i.attribute("shape")
        if i.op == "constant" and padded(types[i.outputs[0]].shape) != types[i.outputs[0]].shape:
            raise LayoutError(f"%{i.outputs[0]} is a constant of the vocabulary's size, which cannot be padded")
        changed = attributes(**dict(i.attributes) | {"shape": padded(shape)}) if shape else i.attributes
        instructions.append(replace(i, attributes=changed))
    parameters = tuple(
        Parameter(p.name, types[p.name].with_shape(padded(types[p.name].shape))) if p.name in weights else p
        for p in function.parameters
    )
    new = Function(function.name, parameters, tuple(instructions), function.outputs)
    inputs = tuple(replace(w, shape=padded(w.shape)) if w.role in ("parameter", "state") else w for w in program.inputs)
    outputs = tuple(replace(w, shape=padded(w.shape)) for w in program.outputs)
    return Program(new, inputs, outputs)
