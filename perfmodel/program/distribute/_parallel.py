"""The parallel dimensions that spread tensors: data (with ZeRO), tensor and expert parallelism."""

from perfmodel.errors import LayoutError
from perfmodel.program.distribute._spread import Plan, shard_axis, spread
from perfmodel.program.ir import REPLICATED, Program, Sharded, Sharding, Whole


def tensor_parallel(
    program: Program, parts: int, *, sequence_parallel: bool = False, stride: int = 1, representative: bool = False
) -> Program:
    """Slice weights along their `tensor_axis` (Megatron-LM: columns, then rows; Shoeybi et al. 2019).

    Args:
        program: any program.
        parts: tensor-parallel ranks of every device.
        sequence_parallel: shard activations along the sequence between the sliced products, so that all-reduces
            become reduce-scatters and all-gathers (Korthikanti et al. 2022, section 4.2.2).
        stride: devices from one part to the next.
        representative: write down the first part only (`Plan.representative`).

    Raises:
        LayoutError: a weight's axis, or under sequence parallelism the sequence, does not divide.
    """
    inputs: dict[str, Sharding] = {}
    for whole in program.inputs_of("parameter", "state"):
        if whole.tensor_axis is not None:
            inputs |= {piece.value: Sharded(whole.tensor_axis) for piece in whole.pieces}
    axis = 1 if sequence_parallel else None
    plan = Plan(
        parts=parts, suffix="t", inputs=inputs, stride=stride, sequence_axis=axis, representative=representative
    )
    return spread(program, plan)


def expert_parallel(program: Program, parts: int, *, stride: int = 1, representative: bool = False) -> Program:
    """Data parallelism whose ranks hold different experts: tokens travel by all-to-all (GShard; Fedus et al. 2021).

    Raises:
        LayoutError: the batch or the number of experts does not divide.
    """
    inputs: dict[str, Sharding] = _batch(program, parts)
    for whole in program.inputs_of("parameter", "state"):
        if whole.expert_axis is not None:
            inputs |= {piece.value: Sharded(whole.expert_axis) for piece in whole.pieces}
    plan = Plan(
        parts=parts, suffix="e", inputs=inputs, stride=stride, stream="data_comm", representative=representative
    )
    return spread(program, plan)


def data_parallel(
    program: Program, parts: int, *, zero: int = 0, stride: int = 1, representative: bool = False
) -> Program:
    """Each replica takes a share of the batch; gradients are summed.

    Args:
        program: any program.
        parts: replicas of every device.
        zero: stage of ZeRO (Rajbhandari et al. 2019): 1 shards the optimizer's state, 2 also gradients (reduced
            for every micro-batch), 3 also weights, which each pass of a micro-batch gathers. A tensor is
            sharded along its first axis that divides, else replicated.
        stride: devices from one replica to the next.
        representative: write down the first replica only (`Plan.representative`).

    Raises:
        LayoutError: the batch does not divide, or there is no such stage.
    """
    if zero not in (0, 1, 2, 3):
        raise LayoutError(f"zero must be 0, 1, 2 or 3, got {zero!r}")
    inputs: dict[str, Sharding] = _batch(program, parts)
    outputs: dict[str, Sharding] = {}
    stateful = {whole.name.rpartition(".")[0] for whole in program.inputs_of("state")}

    def sharded(whole: Whole) -> dict[str, Sharding]:
        axes = {piece.value: shard_axis(program.types[piece.value], parts) for piece in whole.pieces}
        return {value: REPLICATED if axis is None else Sharded(axis) for value, axis in axes.items()}

    for whole in program.inputs_of("state") if zero >= 1 else ():
        inputs |= sharded(whole)
    for whole in program.inputs_of("parameter") if zero >= 3 else ():
        inputs |= sharded(whole)
    for whole in program.outputs:
        weight = whole.name.removeprefix("d_")
        if whole.role == "parameter":
            outputs |= sharded(whole) if zero >= 3 else dict.fromkeys([p.value for p in whole.pieces], REPLICATED)
        elif whole.role == "gradient" and (zero >= 2 or (zero == 1 and weight in stateful)):
            outputs |= sharded(whole)
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
    """Data sharded along their batch axis."""
    shardings: dict[str, Sharding] = {}
    for whole in program.inputs_of("data"):
        if whole.batch_axis is not None:
            shardings |= {piece.value: Sharded(whole.batch_axis) for piece in whole.pieces}
    if parts > 1 and not shardings:
        raise LayoutError("no input has a batch axis, along which replicas could share it")
    return shardings
