"""The parallel dimensions that spread tensors: data (with ZeRO), tensor and expert parallelism; and
the preparation of weights for tensor parallelism: Megatron-LM's axes, derived from the data flow,
and padded vocabularies."""

from dataclasses import replace

from perfmodel.errors import LayoutError
from perfmodel.ir import OPS, Function, GlobalTensor, Instruction, Parameter, Program, attributes
from perfmodel.ir.distribute._spread import Plan, shard_axis, spread
from perfmodel.ir.op_definition import REPLICATED, Sharded, Sharding, ShardingQuery


def tensor_parallel(
    program: Program,
    parts: int,
    *,
    sequence_parallel: bool = False,
    stride: int = 1,
    representative: bool = False,
) -> Program:
    """Slice weights along their `tensor_axis` (Megatron-LM: columns, then rows).

    Args:
        program: program to distribute.
        parts: tensor-parallel ranks of every device.
        sequence_parallel: shard activations along the sequence between the sliced products, so that
            all-reduces become reduce-scatters and all-gathers (Korthikanti et al. 2022, section
            4.2.2).
        stride: devices from one part to the next.
        representative: write down the first part only (`Plan.representative`).

    Raises:
        LayoutError: a weight's axis, or under sequence parallelism the sequence, does not divide.
    """
    # Only weights get explicit slices. The shapes of activations and the places of all-reduces
    # follow from the sharding rules of the ops.
    inputs: dict[str, Sharding] = {}
    for tensor in program.inputs_of("parameter", "state"):
        if tensor.tensor_axis is not None:
            inputs |= {piece.value: Sharded(tensor.tensor_axis) for piece in tensor.pieces}
    axis = 1 if sequence_parallel else None
    plan = Plan(
        parts=parts,
        suffix="t",
        inputs=inputs,
        stride=stride,
        sequence_axis=axis,
        representative=representative,
    )
    return spread(program, plan)


def expert_parallel(
    program: Program, parts: int, *, stride: int = 1, representative: bool = False
) -> Program:
    """Data parallelism whose ranks hold different experts: tokens travel by all-to-all (GShard;
    Fedus et al. 2021).

    Raises:
        LayoutError: the batch or the number of experts does not divide.
    """
    inputs: dict[str, Sharding] = _batch(program, parts)
    # Weights of experts are sharded by expert; all others are replicated, as in data parallelism.
    for tensor in program.inputs_of("parameter", "state"):
        if tensor.expert_axis is not None:
            inputs |= {piece.value: Sharded(tensor.expert_axis) for piece in tensor.pieces}
    plan = Plan(
        parts=parts,
        suffix="e",
        inputs=inputs,
        stride=stride,
        stream="data_comm",
        representative=representative,
    )
    return spread(program, plan)


def data_parallel(
    program: Program, parts: int, *, zero: int = 0, stride: int = 1, representative: bool = False
) -> Program:
    """Data parallelism: each replica computes a share of the batch, and gradients are summed.

    Args:
        program: program to distribute.
        parts: replicas of every device.
        zero: stage of ZeRO (Rajbhandari et al. 2019): 1 shards the optimizer's state, 2 also
            gradients (reduced for every micro-batch), 3 also weights, which each pass of a
            micro-batch gathers. A tensor is sharded along its first axis that divides, else
            replicated.
        stride: devices from one replica to the next.
        representative: write down the first replica only (`Plan.representative`).

    Raises:
        LayoutError: the batch does not divide, or there is no such stage.
    """
    if zero not in (0, 1, 2, 3):
        raise LayoutError(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    inputs: dict[str, Sharding] = _batch(program, parts)
    outputs: dict[str, Sharding] = {}
    # Weights whose optimizer has states (`w.m` is a state of `w`): without a state, stage 1 has
    # nothing to shard.
    stateful = {tensor.name.rpartition(".")[0] for tensor in program.inputs_of("state")}

    def sharded(tensor: GlobalTensor) -> dict[str, Sharding]:
        shardings: dict[str, Sharding] = {}
        for piece in tensor.pieces:
            axis = shard_axis(program.types[piece.value], parts)
            shardings[piece.value] = REPLICATED if axis is None else Sharded(axis)
        return shardings

    # Stage 1 shards states, stage 2 gradients too, stage 3 weights too.
    if zero >= 1:
        for tensor in program.inputs_of("state"):
            inputs |= sharded(tensor)
    if zero >= 3:
        for tensor in program.inputs_of("parameter"):
            inputs |= sharded(tensor)
    for tensor in program.outputs:
        is_sharded = False
        if tensor.role == "gradient":
            is_sharded = zero >= 2 or (zero == 1 and tensor.name.removeprefix("d_") in stateful)
        elif tensor.role == "parameter":
            is_sharded = zero >= 3
        if is_sharded:
            outputs |= sharded(tensor)
        elif tensor.role == "parameter":
            # Stages 1 and 2 update a shard and gather the new weight, which the next step's forward
            # needs whole.
            outputs |= dict.fromkeys([piece.value for piece in tensor.pieces], REPLICATED)
    return spread(
        program,
        Plan(
            parts=parts,
            suffix="d",
            inputs=inputs,
            outputs=outputs,
            stride=stride,
            stream="data_comm",
            gathered=program.values_of("parameter") if zero >= 3 else frozenset(),
            scatter_gradients=zero >= 2,
            representative=representative,
        ),
    )


def _batch(program: Program, parts: int) -> dict[str, Sharding]:
    """Shardings of data along their batch axis."""
    shardings: dict[str, Sharding] = {}
    for tensor in program.inputs_of("data"):
        if tensor.batch_axis is not None:
            shardings |= {piece.value: Sharded(tensor.batch_axis) for piece in tensor.pieces}
    if parts > 1 and not shardings:
        raise LayoutError("no input has a batch axis to divide among replicas; mark one as data")
    return shardings


def megatron_axes(program: Program) -> Program:
    """The program with the `tensor_axis` of every weight as Megatron-LM slices them (Shoeybi et al.
    2019, section 3).

    Weights are handled in program order. If the left operand of a product is sliced along the
    summed axis, the weight is sliced by rows, otherwise by columns. Biases and gains are sliced
    like the value that they are applied to, and embedding tables by rows if tokens are data.
    """
    types = program.types
    # One walk in program order with the sharding so far. A weight that is already decided keeps its
    # axis: a tied head finds the table sliced by vocabulary.
    undecided = set(program.values_of("parameter"))
    axes: dict[str, int] = {}
    spread: dict[str, Sharding] = {p.name: REPLICATED for p in program.function.parameters}
    constants: set[str] = set()
    for i in program.function.instructions:
        if i.op == "constant":
            constants.update(i.outputs)
        # Tables of relative positions, whose rows are known beforehand, are small and no
        # vocabularies.
        known_rows = i.op == "embedding" and i.inputs[1] in constants
        for place, name in enumerate(i.inputs):
            if name not in undecided:
                continue
            undecided.discard(name)
            axis = None
            if not known_rows:
                spreads = [spread[n] for n in i.inputs]
                ranks = [types[n].rank for n in i.inputs]
                axis = _axis(i, place, spreads, ranks)
            if axis is not None and types[name].shape[axis] > 1:
                axes[name], spread[name] = axis, Sharded(axis)
        # The sharding rules are asked for a single part, because the degree is not known yet: a
        # size of 1 divides every axis.
        query = ShardingQuery.of(i, types, [spread[n] for n in i.inputs], 1)
        spread.update(zip(i.outputs, OPS[i.op].spread(query).outputs, strict=True))
    inputs = []
    for tensor in program.inputs:
        if tensor.role == "parameter":
            tensor = replace(tensor, tensor_axis=axes.get(tensor.pieces[0].value))
        inputs.append(tensor)
    return replace(program, inputs=tuple(inputs))


def _axis(
    instruction: Instruction, place: int, spread: list[Sharding], ranks: list[int]
) -> int | None:
    """Axis along which an instruction's operand is sliced, None for none."""
    if instruction.op == "embedding":
        return 0
    # Columns first, rows next: after a column-sliced product the activation is sliced along what
    # the next product sums over, so that one gets row slices and an all-reduce.
    if instruction.op == "matmul" and place == 1 and ranks[1] == 2:
        summed = ranks[0] - (2 if instruction.attribute("transpose_a") else 1)
        rows = 1 if instruction.attribute("transpose_b") else 0
        return rows if spread[0] == Sharded(summed) else 1 - rows
    # A bias is sliced if what it is added to is sliced along the features.
    if instruction.op in ("add", "sub", "mul", "div") and ranks[place] == 1:
        return 0 if spread[1 - place] == Sharded(ranks[1 - place] - 1) else None
    return None


def pad_vocabulary(program: Program, multiple: int) -> Program:
    """Pad the vocabulary of embedding tables and heads to a multiple of a number, as Megatron-LM
    does.

    Logits grow too; in a loss the added classes take part as tokens that never occur, as
    Megatron-LM's do.

    Args:
        program: undistributed program.
        multiple: usually the tensor-parallel degree, or 128 times that.

    Raises:
        LayoutError: a constant has the vocabulary's size, or the program is distributed.
    """
    if program.n_devices > 1:
        raise LayoutError("pad the vocabulary before distributing the program")
    function, types = program.function, program.types
    weights = program.values_of("parameter", "state")
    # Programs do not say which axis is a vocabulary; any axis of a table's size is taken for one,
    # in shapes of weights and in stated shapes of ops.
    sizes = {types[i.inputs[0]].shape[0] for i in function.instructions if i.op == "embedding"}
    grown = {n: -(-n // multiple) * multiple for n in sizes if n % multiple}

    def padded(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(grown.get(n, n) for n in shape)

    instructions = []
    for i in function.instructions:
        shape = i.attribute("shape")
        # Its contents for the added entries would have to be invented.
        output_shape = types[i.outputs[0]].shape
        if i.op == "constant" and padded(output_shape) != output_shape:
            raise LayoutError(
                f"the constant %{i.outputs[0]} has the size of the vocabulary and cannot be padded; leave "
                "--pad-vocab out"
            )
        changed = (
            attributes(**dict(i.attributes) | {"shape": padded(shape)}) if shape else i.attributes
        )
        instructions.append(replace(i, attributes=changed))
    parameters = []
    for parameter in function.parameters:
        if parameter.name in weights:
            tensor = types[parameter.name]
            parameter = Parameter(parameter.name, tensor.with_shape(padded(tensor.shape)))
        parameters.append(parameter)
    new = Function(function.name, tuple(parameters), tuple(instructions), function.outputs)
    inputs = []
    for tensor in program.inputs:
        is_weight = tensor.role in ("parameter", "state")
        stored = replace(tensor, shape=padded(tensor.shape)) if is_weight else tensor
        inputs.append(stored)
    outputs = [replace(tensor, shape=padded(tensor.shape)) for tensor in program.outputs]
    return Program(new, tuple(inputs), tuple(outputs))
