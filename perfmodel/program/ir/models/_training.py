"""From a model's loss to a training step: gradients and weight updates."""

from dataclasses import asdict, dataclass, replace

from perfmodel.errors import PerfModelError
from perfmodel.program.ir._gradient import add_gradients, extend
from perfmodel.program.ir._program import Program, Role, Whole


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
    """The program of one step: forward, backward and the update of every parameter.

    Results are the loss, the gradient of each parameter w (named `d_w`), its new value (named like itself)
    and, under Adam, the new moments `w.m` and `w.v`, which are further inputs.

    Raises:
        PerfModelError: the model returns no loss, or is distributed already.
    """
    optimizer = optimizer or Sgd()
    losses = [whole for whole in model.outputs if whole.role == "loss"]
    if len(losses) != 1 or model.n_devices > 1:
        raise PerfModelError("a training step needs an undistributed model that returns one loss")
    loss = losses[0]
    weights = model.inputs_of("parameter")
    b = extend(model.function)
    inputs, outputs = list(model.inputs), [loss]
    gradients = add_gradients(b, loss.pieces[0].value, [piece.value for w in weights for piece in w.pieces])
    layer_of = _layers(model)
    moments = ("m", "v") if isinstance(optimizer, Adam) else ()
    op = "adam" if moments else "sgd"
    for weight in weights:
        for moment in moments:
            inputs.append(_at(weight, f"{weight.name}.{moment}", f".{moment}", "state"))
            for piece in weight.pieces:
                b.parameter(f"{piece.value}.{moment}", b.types[piece.value])
    for weight in weights:
        for value in (piece.value for piece in weight.pieces):
            own = [f"{value}.{moment}" for moment in moments]
            hints = [f"{name}.new" for name in (value, *own)]
            with b.tagged(phase="update", layer=layer_of[value]):
                b.emit(op, (value, gradients[value], *own), hints, tuple(sorted(asdict(optimizer).items())))
        held = tuple(replace(piece, value=gradients[piece.value]) for piece in weight.pieces)
        outputs.append(replace(weight, name=f"d_{weight.name}", role="gradient", pieces=held))
        outputs.append(_at(weight, weight.name, ".new", "parameter"))
        outputs += [_at(weight, f"{weight.name}.{moment}", f".{moment}.new", "state") for moment in moments]
    function = b.build([piece.value for whole in outputs for piece in whole.pieces])
    return Program(function, tuple(inputs), tuple(outputs))


def _at(weight: Whole, name: str, suffix: str, role: Role) -> Whole:
    """A tensor shaped and spread like a weight, whose values are named after the weight's."""
    pieces = tuple(replace(piece, value=f"{piece.value}{suffix}") for piece in weight.pieces)
    return replace(weight, name=name, role=role, pieces=pieces)


def _layers(model: Program) -> dict[str, int]:
    """Layer of the first instruction that uses each parameter."""
    layers: dict[str, int] = {}
    for instruction in model.function.instructions:
        for name in instruction.inputs:
            layers.setdefault(name, instruction.tag.layer)
    return layers
