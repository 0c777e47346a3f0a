"""Reverse-mode differentiation of programs, and training steps.

Differentiation is a transform from programs to programs: the gradient of every op is a few ops of
the same set, so distribution, simulation and execution need to know nothing about it.
"""

from collections.abc import Container, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Self

from perfmodel.errors import PerfModelError
from perfmodel.ir._builder import Builder
from perfmodel.ir._function import Function
from perfmodel.ir._instruction import Instruction, ProgramError
from perfmodel.ir._program import GlobalTensor, Program, Role
from perfmodel.ir.op_definition import GradientRule
from perfmodel.ir.ops import OPS


def extend(function: Function) -> Builder:
    """A builder that continues a function."""
    builder = Builder(function.name)
    for parameter in function.parameters:
        builder.parameter(parameter.name, function.types[parameter.name])
    for instruction in function.instructions:
        builder.emit(
            instruction.op,
            instruction.inputs,
            instruction.outputs,
            instruction.attributes,
            instruction.tag,
        )
    return builder


@dataclass(frozen=True)
class RankValues:
    """Values of a program for one of several ranks, and which of them differ between ranks."""

    ranks: int
    varying: frozenset[str]
    """Values that differ from rank to rank; all ranks hold the same copy of the others."""

    @classmethod
    def of(cls, program: Program, ranks: int, sharded: Container[str]) -> Self:
        """Find the values that differ between ranks, starting from the inputs in `sharded`."""
        varying: set[str] = set()
        for tensor in program.inputs:
            if tensor.name in sharded:
                varying.update(piece.value for piece in tensor.pieces)
        for instruction in program.function.instructions:
            # All ranks hold the same gathered value, but its gradient is the scattered sum over
            # ranks, so it follows the rules of values that differ.
            if instruction.op == "all_reduce":
                continue
            if OPS[instruction.op].collective or varying.intersection(instruction.inputs):
                varying.update(instruction.outputs)
        return cls(ranks, frozenset(varying))


class _Gradients:
    """Gradients by value, summed as consumers contribute, in reverse program order.

    Of what all ranks hold alike the gradient is alike, too: where it comes from work that differs
    from rank to rank, it is the sum over ranks. That all-reduce is the backward pass of the
    function that Megatron-LM calls f (Shoeybi et al. 2019, figure 3).
    """

    def __init__(self, builder: Builder, ranks: RankValues | None) -> None:
        self._builder = builder
        self._ranks = ranks
        self._sums: dict[str, str] = {}
        self._sums_of_rank: dict[str, str] = {}
        """Gradients that must still be summed over ranks."""

    def __contains__(self, name: object) -> bool:
        return name in self._sums or name in self._sums_of_rank

    def seed(self, loss: str) -> None:
        """Start with the derivative of the loss with respect to itself, which is 1."""
        loss_type = self._builder.types[loss]
        self._sums[loss] = self._builder.op(
            "constant", name=f"d_{loss}", dtype=loss_type.dtype, value=1.0, device=loss_type.device
        )

    def pull_back(
        self, instruction: Instruction, rule: GradientRule, needed: Container[str]
    ) -> None:
        """Emit the gradients of an instruction's operands from those of its results."""
        output_gradients = tuple(self.complete(name) for name in instruction.outputs)
        input_gradients = rule(self._builder, instruction, *output_gradients)
        for name, gradient in zip(instruction.inputs, input_gradients, strict=True):
            if gradient is not None and name in needed:
                self._contribute(instruction, name, gradient)

    def _contribute(self, instruction: Instruction, name: str, gradient: str) -> None:
        """Add an instruction's contribution to the gradient of one of its operands."""
        # Reverse order fixes the order of the sum, and so its rounding.
        sums = self._sums_of_rank if self._differs(instruction, name) else self._sums
        sofar = sums.get(name)
        sums[name] = gradient if sofar is None else self._builder.op("add", sofar, gradient)

    def _differs(self, instruction: Instruction, name: str) -> bool:
        """Whether an instruction's gradient differs between ranks although the operand does not."""
        if self._ranks is None or name in self._ranks.varying:
            return False
        return OPS[instruction.op].collective or not self._ranks.varying.isdisjoint(
            instruction.outputs
        )

    def complete(self, name: str) -> str | None:
        """Return a value's gradient once all consumers have contributed; None if none did."""
        if self._ranks is not None and name in self._sums_of_rank:
            replicas = (self._ranks.ranks, 1)
            summed = self._builder.op(
                "all_reduce", self._sums_of_rank.pop(name), op="sum", replicas=replicas
            )
            sofar = self._sums.get(name)
            self._sums[name] = summed if sofar is None else self._builder.op("add", sofar, summed)
        return self._sums.get(name)


def add_gradients(
    builder: Builder, loss: str, wrt: Sequence[str], ranks: RankValues | None = None
) -> dict[str, str]:
    """Append the backward pass of a builder's instructions.

    Instructions of the backward pass have phase `backward` and the layer of those they
    differentiate. What one value's consumers contribute is summed in reverse program order.

    Args:
        builder: holds the forward pass.
        loss: a scalar.
        wrt: values whose gradients are wanted.
        ranks: contents of the ranks, if the program is that of one of them; all must have the same
            loss.

    Returns:
        Name of each wanted gradient.

    Raises:
        ProgramError: the loss is not a scalar, or does not depend on a wanted value; collectives of
            ranks that are not described.
    """
    types = builder.types
    forward = tuple(builder.instructions)
    last = next((i for i in reversed(forward) if loss in i.outputs), None)
    if last is None or types[loss].shape != ():
        raise ProgramError(
            builder.name, len(forward) + 2, loss, "only a computed scalar can be differentiated"
        )

    collective = next((i for i in forward if i.attribute("replicas") is not None), None)
    if collective is not None and ranks is None:
        reason = (
            f"{collective.op} of several ranks: say which values differ between them (`RankValues`)"
        )
        raise ProgramError(builder.name, len(forward) + 2, collective.outputs[0], reason)

    # Only what depends on a wanted value has a gradient that matters.
    needed = set(wrt)
    for instruction in forward:
        if needed.intersection(instruction.inputs):
            needed.update(instruction.outputs)
    gradients = _Gradients(builder, ranks)
    gradient_of: dict[str, str] = {}
    # Reverse mode: start from d loss / d loss = 1 and pull it back through the instructions, last
    # first.
    with builder.tagged(phase="backward", layer=last.tag.layer):
        gradients.seed(loss)
        for instruction in reversed(forward):
            rule = OPS[instruction.op].gradient
            # Nothing flows through constants, through branches that reach no wanted value, or from
            # results that the loss ignores.
            is_reached = any(name in gradients for name in instruction.outputs)
            if rule is None or not needed.intersection(instruction.inputs) or not is_reached:
                continue
            # Gradients inherit the layer of what they differentiate, so that a pipeline puts both
            # on the same stage.
            with builder.tagged(layer=instruction.tag.layer):
                gradients.pull_back(instruction, rule, needed)
        for name in wrt:
            gradient = gradients.complete(name)
            if gradient is None:
                raise ProgramError(
                    builder.name, len(forward) + 2, name, f"%{loss} does not depend on this value"
                )
            gradient_of[name] = gradient
    # Rules emit gradients of all operands, also of those that nobody wants (data, labels).
    _drop_dead(builder, len(forward), list(gradient_of.values()))
    names = _name_gradients(
        builder, len(forward), {gradient_of[name]: name for name in reversed(wrt)}
    )
    return {name: names[gradient_of[name]] for name in wrt}


def _drop_dead(builder: Builder, first: int, results: Sequence[str]) -> None:
    """Remove the instructions from number `first` on that no wanted value depends on."""
    # Backwards, because a value is live only if something after it that is live uses it.
    live = set(results)
    live_instructions = []
    for instruction in reversed(builder.instructions[first:]):
        if live.intersection(instruction.outputs):
            live.update(instruction.inputs)
            live_instructions.append(instruction)
        else:
            for name in instruction.outputs:
                del builder.types[name]
    builder.instructions[first:] = reversed(live_instructions)


def gradient(function: Function, loss: str, wrt: Sequence[str]) -> Function:
    """The function that returns the loss and its gradients with respect to some of its values."""
    builder = extend(function)
    gradients = add_gradients(builder, loss, wrt)
    return builder.build([loss, *gradients.values()])


def _name_gradients(builder: Builder, first: int, value_of: dict[str, str]) -> dict[str, str]:
    """Name the gradient of %w `d_w`, from instruction `first` on; return the new names."""
    # Rules name gradients after ops; users look for `d_w`. Renaming happens last, when it is known
    # which value is final.
    names = {old: builder.fresh(f"d_{value}") for old, value in value_of.items()}
    for old, new in names.items():
        builder.types[new] = builder.types.pop(old)
    for k, i in enumerate(builder.instructions[first:], first):
        inputs = tuple(names.get(name, name) for name in i.inputs)
        outputs = tuple(names.get(name, name) for name in i.outputs)
        builder.instructions[k] = replace(i, inputs=inputs, outputs=outputs)
    return names


@dataclass(frozen=True, kw_only=True)
class Sgd:
    """Plain gradient descent."""

    rate: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Adam:
    """Adam with bias correction for a given step (Kingma and Ba 2015, algorithm 1)."""

    rate: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    step: int = 1


Optimizer = Sgd | Adam


def training_step(
    model: Program, optimizer: Optimizer | None = None, ranks: RankValues | None = None
) -> Program:
    """Build the program of a training step: forward, backward and parameter updates.

    Results are the loss, the gradient of each parameter w (named `d_w`), its new value (named like
    itself) and, under Adam, the new moments `w.m` and `w.v`, which are further inputs.

    Args:
        model: a program that returns a loss.
        optimizer: default: gradient descent.
        ranks: contents of the ranks, if the model is written for one of them.

    Raises:
        PerfModelError: the model returns no loss, or is distributed already.
    """
    optimizer = optimizer or Sgd()
    losses = [tensor for tensor in model.outputs if tensor.role == "loss"]
    if len(losses) != 1 or model.n_devices > 1:
        raise PerfModelError("a training step needs an undistributed model that returns one loss")
    # A weight may be held by several values (pieces), each of which has a gradient and an update.
    loss = losses[0]
    weights = model.inputs_of("parameter")
    b = extend(model.function)
    if ranks is not None and loss.pieces[0].value in ranks.varying:
        loss = _mean_over_ranks(b, loss, ranks.ranks)
    inputs = list(model.inputs)
    outputs = [loss]
    weight_values: list[str] = []
    for weight in weights:
        weight_values += [piece.value for piece in weight.pieces]
    gradients = add_gradients(b, loss.pieces[0].value, weight_values, ranks)
    layer_of = _layers(model)
    # Adam's moments are further inputs, shaped and sliced like their weight, so that ZeRO can shard
    # them.
    moments = ("m", "v") if isinstance(optimizer, Adam) else ()
    op = "adam" if moments else "sgd"
    for weight in weights:
        for moment in moments:
            inputs.append(_with_suffix(weight, f"{weight.name}.{moment}", f".{moment}", "state"))
            for piece in weight.pieces:
                b.parameter(f"{piece.value}.{moment}", b.types[piece.value])

    # The update of every weight, after which the step returns its gradient, its new value and its
    # new moments.
    for weight in weights:
        for value in (piece.value for piece in weight.pieces):
            moment_values = [f"{value}.{moment}" for moment in moments]
            hints = [f"{name}.new" for name in (value, *moment_values)]
            # The update is tagged with the weight's layer: a pipeline runs it on the stage that has
            # the weight.
            with b.tagged(phase="update", layer=layer_of[value]):
                operands = (value, gradients[value], *moment_values)
                b.emit(op, operands, hints, tuple(sorted(asdict(optimizer).items())))
        gradient_pieces = tuple(
            replace(piece, value=gradients[piece.value]) for piece in weight.pieces
        )
        outputs.append(
            replace(weight, name=f"d_{weight.name}", role="gradient", pieces=gradient_pieces)
        )
        outputs.append(_with_suffix(weight, weight.name, ".new", "parameter"))
        outputs += [
            _with_suffix(weight, f"{weight.name}.{moment}", f".{moment}.new", "state")
            for moment in moments
        ]
    returned: list[str] = []
    for tensor in outputs:
        returned += [piece.value for piece in tensor.pieces]
    function = b.build(returned)
    return Program(function, tuple(inputs), tuple(outputs))


def _mean_over_ranks(builder: Builder, loss: GlobalTensor, ranks: int) -> GlobalTensor:
    """The mean of the losses of ranks that each have a part of the samples or tokens."""
    (piece,) = loss.pieces
    total = builder.op("all_reduce", piece.value, op="sum", replicas=(ranks, 1))
    mean = builder.op("scale", total, name=f"mean_{piece.value}", factor=1 / ranks)
    return replace(loss, pieces=(replace(piece, value=mean),))


def _with_suffix(weight: GlobalTensor, name: str, suffix: str, role: Role) -> GlobalTensor:
    """A tensor shaped and spread like a weight, whose values are named after the weight's."""
    pieces = tuple(replace(piece, value=f"{piece.value}{suffix}") for piece in weight.pieces)
    return replace(weight, name=name, role=role, pieces=pieces)


def _layers(model: Program) -> dict[str, int]:
    """Layer of the first instruction that uses each parameter."""
    # A tied weight belongs to the layer that meets it first.
    layers: dict[str, int] = {}
    for instruction in model.function.instructions:
        for name in instruction.inputs:
            layers.setdefault(name, instruction.tag.layer)
    return layers
