"""Collective instructions, which take and return one value per device.

Operands and results stand in the order of the devices of the group, which is also the order in
which slices are joined and dealt out. With attribute `replicas=[n, stride]` an instruction stands
for one of n devices, `stride` apart, that all do the same: of a program of which only one of them
is written down, to be simulated.
"""

from collections.abc import Callable

from perfmodel.ir._instruction import Instruction, RuleError, Tensor
from perfmodel.ir.op_definition import (
    Emitter,
    GradientRule,
    InferRule,
    Names,
    OpDefinition,
    ShardingDecision,
    ShardingQuery,
    Tensors,
    Values,
    WorkRule,
    axis_of,
    kernel_dtype,
    required,
    sums_pass,
    table,
)
from perfmodel.ir.op_definition import operands as expect
from perfmodel.ops import Collective, CollectiveKind, Op

Rule = Callable[[Tensor, int, Values], Tensor]
"""Computes a result from an operand, the size of the group and the attributes."""


def _group(inputs: Tensors, attributes: Values) -> int:
    """Return the group's size; `RuleError` unless operands are alike, on different devices."""
    # A representative program writes one device of a group down, so the size is stated, not
    # counted.
    if "replicas" in attributes:
        expect(1, inputs)
        return int(attributes["replicas"][0])
    if len(inputs) < 2:
        raise RuleError(f"a collective needs operands on at least 2 devices, got {len(inputs)}")
    devices = [tensor.device for tensor in inputs]
    if len(set(devices)) < len(devices):
        raise RuleError(f"operands must be on different devices, got devices {devices}")
    # Libraries of collectives take equal buffers from every rank.
    kinds = {(tensor.dtype, tensor.shape) for tensor in inputs}
    if len(kinds) > 1:
        kinds_text = " and ".join(sorted(f"{dtype}{list(shape)}" for dtype, shape in kinds))
        raise RuleError(f"operands must share dtype and shape, got {kinds_text}")
    return len(inputs)


# Gathering multiplies an axis by the size of the group, scattering divides it, an all-to-all does
# one of each.
def _scaled(tensor: Tensor, axis: int, factor: int, parts: int) -> Tensor:
    if tensor.shape[axis] * factor % parts:
        raise RuleError(
            f"{tensor.shape[axis]} elements of axis {axis} are not divisible by {parts} devices"
        )
    return tensor.with_size(axis, tensor.shape[axis] * factor // parts)


def _reduction(attributes: Values) -> None:
    # Partial sums and partial maxima are all that sharding rules leave behind.
    if attributes.get("op", "sum") not in ("sum", "max"):
        raise RuleError(f"op must be sum or max, got {attributes['op']!r}")


def _on_all(rule: Rule) -> InferRule:
    """Return the type rule of a collective that leaves a result on every device of the group."""

    def infer(inputs: Tensors, attributes: Values) -> Tensors:
        n = _group(inputs, attributes)
        result = rule(inputs[0], n, attributes)
        return tuple(result.on(tensor.device) for tensor in inputs)

    return infer


def _onto_one(rule: Rule) -> InferRule:
    """Return the type rule of a collective that leaves one result, on a device of the group."""

    def infer(inputs: Tensors, attributes: Values) -> Tensors:
        n = _group(inputs, attributes)
        receiver = required(attributes, "to", int)
        if receiver not in {tensor.device for tensor in inputs}:
            raise RuleError(f"to={receiver} is not a device of the group")
        return (rule(inputs[0], n, attributes).on(receiver),)

    return infer


def _from_one(rule: Rule) -> InferRule:
    """Return the type rule of a collective that sends one operand to the devices `to`."""

    def infer(inputs: Tensors, attributes: Values) -> Tensors:
        expect(1, inputs)
        receivers = required(attributes, "to", tuple)
        are_devices = all(isinstance(d, int) and d >= 0 for d in receivers)
        are_different = len(set(receivers)) == len(receivers)
        if not receivers or not are_devices or not are_different:
            raise RuleError(f"to={receivers} must name different devices")
        result = rule(inputs[0], len(receivers), attributes)
        return tuple(result.on(device) for device in receivers)

    return infer


def _send(inputs: Tensors, attributes: Values) -> Tensors:
    """Type rule of a send: the value on the receiving device."""
    expect(1, inputs)
    receiver = required(attributes, "to", int)
    if receiver < 0 or receiver == inputs[0].device:
        raise RuleError(
            f"to={receiver} must differ from device {inputs[0].device}, which has the value"
        )
    return (inputs[0].on(receiver),)


def _reduce(tensor: Tensor, n: int, attributes: Values) -> Tensor:
    _reduction(attributes)
    return tensor.with_shape(tensor.shape)


def _gathered(tensor: Tensor, n: int, attributes: Values) -> Tensor:
    return _scaled(tensor, axis_of(attributes, "axis", tensor.rank), n, 1)


def _scattered(tensor: Tensor, n: int, attributes: Values) -> Tensor:
    return _scaled(tensor, axis_of(attributes, "axis", tensor.rank), 1, n)


def _reduce_scatter(tensor: Tensor, n: int, attributes: Values) -> Tensor:
    _reduction(attributes)
    return _scattered(tensor, n, attributes)


def _all_to_all(tensor: Tensor, n: int, attributes: Values) -> Tensor:
    split = _scaled(tensor, axis_of(attributes, "split_axis", tensor.rank), 1, n)
    return _scaled(split, axis_of(attributes, "concat_axis", tensor.rank), n, 1)


def _shard_collective(query: ShardingQuery) -> ShardingDecision:
    """Sharding rule: equal slices of all operands stay sharded, but along the op's own axis."""
    # A slice along the axis that the collective itself cuts or joins would reorder elements.
    own_axes = {query.attributes.get(name) for name in ("axis", "split_axis", "concat_axis")}
    return query.all_along_one_axis(lambda axis: axis not in own_axes)


def _sums_pass(query: ShardingQuery) -> ShardingDecision | None:
    return sums_pass(query) if query.attributes.get("op", "sum") == "sum" else None


def _moves(kind: CollectiveKind, gathered: bool = False) -> WorkRule:
    """Work of one collective, its bytes counted as `spec.Collective` does."""

    def work(inputs: Tensors, outputs: Tensors, attributes: Values) -> tuple[Op, ...]:
        # Nodes are filled in when the program meets a cluster (`execution._structure.placed`);
        # until then one node holds all.
        devices = {tensor.device for tensor in (*inputs, *outputs)}
        n, _ = attributes.get("replicas") or (len(devices), 0)
        moved = (outputs if gathered else inputs)[0]
        collective = Collective(
            collective=kind,
            bytes=float(moved.n_bytes),
            num_ranks=n,
            ranks_per_node=n,
            dtype=kernel_dtype(moved),
        )
        return (collective,)

    return work


# Gradients are those of one rank's program (`RankValues`). What differs between ranks has the
# gradient of each rank's own value; the gradient of what they hold alike is alike on all of them.


def _for_sums(rule: GradientRule) -> GradientRule:
    """Return the gradient rule of a summing collective, in the program of one rank."""

    def gradient(
        emitter: Emitter, instruction: Instruction, *output_gradients: str | None
    ) -> Names:
        if instruction.attribute("replicas") is None:
            return (None,) * len(instruction.inputs)
        if instruction.attribute("op") == "max":
            raise RuleError("the gradient of a maximum over ranks is not known; detach the value")
        return rule(emitter, instruction, *output_gradients)

    return gradient


def _all_reduce_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    # Every rank's summand has the gradient of the sum, which all ranks know.
    return (dy,)


def _all_gather_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of an all-gather: a reduce-scatter."""
    return (
        emitter.op(
            "reduce_scatter",
            dy,
            axis=instruction.attribute("axis"),
            replicas=instruction.attribute("replicas"),
        ),
    )


def _reduce_scatter_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of a reduce-scatter: an all-gather."""
    return (
        emitter.op(
            "all_gather",
            dy,
            axis=instruction.attribute("axis"),
            replicas=instruction.attribute("replicas"),
        ),
    )


def _all_to_all_gradient(emitter: Emitter, instruction: Instruction, dy: str) -> Names:
    """Gradient rule of an all-to-all: the exchange in the opposite direction."""
    # Parts go back to where they came from.
    split = instruction.attribute("concat_axis")
    concat = instruction.attribute("split_axis")
    return (
        emitter.op(
            "all_to_all",
            dy,
            split_axis=split,
            concat_axis=concat,
            replicas=instruction.attribute("replicas"),
        ),
    )


def _definition(
    name: str, infer: InferRule, work: WorkRule, gradient: GradientRule | None = None
) -> OpDefinition:
    """Define a collective, with the sharding rules that all collectives share."""
    return OpDefinition(
        name=name,
        infer=infer,
        work=work,
        gradient=_for_sums(gradient) if gradient is not None else None,
        shard=_shard_collective,
        partial=_sums_pass,
        collective=True,
    )


COLLECTIVES = table(
    _definition("send", _send, _moves("send_recv")),
    _definition("broadcast", _from_one(lambda tensor, n, attributes: tensor), _moves("broadcast")),
    _definition("all_reduce", _on_all(_reduce), _moves("all_reduce"), _all_reduce_gradient),
    _definition(
        "all_gather", _on_all(_gathered), _moves("all_gather", gathered=True), _all_gather_gradient
    ),
    _definition(
        "reduce_scatter",
        _on_all(_reduce_scatter),
        _moves("reduce_scatter"),
        _reduce_scatter_gradient,
    ),
    _definition("all_to_all", _on_all(_all_to_all), _moves("all_to_all"), _all_to_all_gradient),
    # To or from one device: its link carries as much as each link in an all-gather. A reduction is
    # a broadcast in the other direction.
    _definition("gather", _onto_one(_gathered), _moves("all_gather", gathered=True)),
    _definition("scatter", _from_one(_scattered), _moves("all_gather")),
    _definition("reduce", _onto_one(_reduce), _moves("broadcast")),
)
