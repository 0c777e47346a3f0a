"""Reverse-mode differentiation of programs, and training steps.

Differentiation is a transform from programs to programs: the gradient of every op is a few ops of the same set, so
distribution, simulation and execution need to know nothing about it.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from perfmodel.errors import PerfModelError
from perfmodel.ir._builder import Builder
from perfmodel.ir._function import Function
from perfmodel.ir._instruction import ProgramError
from perfmodel.ir._program import GlobalTensor, Program, Role
from perfmodel.ir.ops import OPS


def extend(function: Function) -> Builder:
    """A builder that continues a function."""
    builder = Builder(function.name)
    for parameter in function.parameters:
        builder.parameter(parameter.name, function.types[parameter.name])
    for instruction in function.instructions:
        builder.emit(instruction.op, instruction.inputs, instruction.outputs, instruction.attributes, instruction.tag)
    return builder


def add_gradients(builder: Builder, loss: str, wrt: Sequence[str]) -> dict[str, str]:
    """Append the backward pass of a builder's instructions.

    Instructions of the backward pass have phase `backward` and the layer of those they differentiate. What
    one value's consumers contribute is summed in reverse program order.

    Args:
        builder: holds the forward pass.
        loss: a scalar.
        wrt: values whose gradients are wanted.

    Returns:
        Name of each wanted gradient.

    Raises:
        ProgramError: the loss is no scalar, or does not depend on a wanted value.
    """
    types = builder.types
    forward = tuple(builder.instructions)
    last = next((i for i in reversed(forward) if loss in i.outputs), None)
    if last is None or types[loss].shape != ():
        raise ProgramError(builder.name, len(forward) + 2, loss, "only a computed scalar can be differentiated")

    # Only what depends on a wanted value has a gradient that matters.
    needed = set(wrt)
    for instruction in forward:
        if needed.intersection(instruction.inputs):
            needed.update(instruction.outputs)
    gradients: dict[str, str] = {}
    # Reverse mode: start from d loss / d loss = 1 and pull it back through the instructions, last first.
    with builder.tagged(phase="backward", layer=last.tag.layer):
        seed = builder.op("constant", name=f"d_{loss}", dtype=types[loss].dtype, value=1.0, device=types[loss].device)
        gradients[loss] = seed
        for instruction in reversed(forward):
            rule = OPS[instruction.op].gradient
            output_gradients = tuple(gradients.get(name) for name in instruction.outputs)
            # Nothing flows through constants, through branches that reach no wanted value, or from results that the
            # loss ignores.
            is_ignored = all(gradient is None for gradient in output_gradients)
            if rule is None or is_ignored or not needed.intersection(instruction.inputs):
                continue
            # Gradients inherit the layer of what they differentiate, so that a pipeline puts both on the same stage.
            with builder.tagged(layer=instruction.tag.layer):
                input_gradients = rule(builder, instruction, *output_gradients)
                for name, gradient in zip(instruction.inputs, input_gradients, strict=True):
                    if gradient is None or name not in needed:
                        continue
                    # Several consumers contribute to one gradient; reverse order fixes the order of the sum, and so
                    # its rounding.
                    sofar = gradients.get(name)
                    gradients[name] = gradient if sofar is None else builder.op("add", sofar, gradient)
        for name in wrt:
            if name not in gradients:
                raise ProgramError(builder.name, len(forward) + 2, name, f"%{loss} does not depend on this value")
    # Rules emit gradients of all operands, also of those that nobody wants (data, labels).
    _drop_dead(builder, len(forward), [gradients[name] for name in wrt])
    names = _named(builder, len(forward), {gradients[name]: name for name in reversed(wrt)})
    return {name: names[gradients[name]] for name in wrt}


def _drop_dead(builder: Builder, first: int, wanted: Sequence[str]) -> None:
    """Remove instructions from number `first` on that nothing wanted depends on."""
    # Backwards, because a value is live only if something after it that is live uses it.
    live = set(wanted)
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


def _named(builder: Builder, first: int, value_of: dict[str, str]) -> dict[str, str]:
    """Name the gradient of %w `d_w`, in instructions from number `first` on; returns the new name of each."""
    # Rules name gradients after ops; users look for `d_w`. Renaming happens last, when it is known which value is
    # final.
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


def training_step(model: Program, optimizer: Optimizer | None = None) -> Program:
    """Build the program of a training step: forward, backward and parameter updates.

    Results are the loss, the gradient of each parameter w (named `d_w`), its new value (named like itself)
    and, under Adam, the new moments `w.m` and `w.v`, which are further inputs.

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
    inputs, outputs = list(model.inputs), [loss]
    weight_values: list[str] = []
    for weight in weights:
        weight_values += [piece.value for piece in weight.pieces]
    gradients = add_gradients(b, loss.pieces[0].value, weight_values)
    layer_of = _layers(model)
    # Adam's moments are further inputs, shaped and sliced like their weight, so that ZeRO can shard them.
    moments = ("m", "v") if isinstance(optimizer, Adam) else ()
    op = "adam" if moments else "sgd"
    for weight in weights:
        for moment in moments:
            inputs.append(_at(weight, f"{weight.name}.{moment}", f".{moment}", "state"))
            for piece in weight.pieces:
                b.parameter(f"{piece.value}.{moment}", b.types[piece.value])

    # The update of every weight, after which the step returns its gradient, its new value and its new moments.
    for weight in weights:
        for value in (piece.value for piece in weight.pieces):
            moment_values = [f"{value}.{moment}" for moment in moments]
            hints = [f"{name}.new" for name in (value, *moment_values)]
            # The update is tagged with the weight's layer: a pipeline runs it on the stage that has the weight.
            with b.tagged(phase="update", layer=layer_of[value]):
                operands = (value, gradients[value], *moment_values)
                b.emit(op, operands, hints, tuple(sorted(asdict(optimizer).items())))
        gradient_pieces = tuple(replace(piece, value=gradients[piece.value]) for piece in weight.pieces)
        outputs.append(replace(weight, name=f"d_{weight.name}", role="gradient", pieces=gradient_pieces))
        outputs.append(_at(weight, weight.name, ".new", "parameter"))
        outputs += [_at(weight, f"{weight.name}.{moment}", f".{moment}.new", "state") for moment in moments]
    returned: list[str] = []
    for tensor in outputs:
        returned += [piece.value for piece in tensor.pieces]
    function = b.build(returned)
    return Program(function, tuple(inputs), tuple(outputs))


def _at(weight: GlobalTensor, name: str, suffix: str, role: Role) -> GlobalTensor:
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
