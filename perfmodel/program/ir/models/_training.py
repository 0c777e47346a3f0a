"""From a model's loss to a training step: gradients and weight updates."""

from dataclasses import asdict, dataclass, replace

from perfmodel.errors import PerfModelError
from perfmodel.program.ir._gradient import add_gradients, extend
from perfmodel.program.ir._program import Piece, Program, Role, Whole


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
    gradients = add_gradients(b, loss.pieces[0].value, [w.pieces[0].value for w in weights])
    layer_of = _layers(model)
    moments: dict[str, list[str]] = {}
    for weight in weights:
        moments[weight.name] = []
        for moment in ("m", "v") if isinstance(optimizer, Adam) else ():
            name = f"{weight.name}.{moment}"
            b.parameter(name, b.types[weight.pieces[0].value])
            inputs.append(_at(weight, name, name, "state"))
            moments[weight.name].append(name)
    for weight in weights:
        value = weight.pieces[0].value
        gradient, own = gradients[value], moments[weight.name]
        op, hints = (
            ("adam", (f"{value}.new", f"{value}.m.new", f"{value}.v.new")) if own else ("sgd", (f"{value}.new",))
        )
        with b.tagged(phase="update", layer=layer_of[value]):
            new, *new_moments = b.emit(op, (value, gradient, *own), hints, tuple(sorted(asdict(optimizer).items())))
        outputs.append(_at(weight, f"d_{weight.name}", gradient, "gradient"))
        outputs.append(_at(weight, weight.name, new, "parameter"))
        outputs += [_at(weight, name, v, "state") for name, v in zip(own, new_moments, strict=True)]
    function = b.build([whole.pieces[0].value for whole in outputs])
    return Program(function, tuple(inputs), tuple(outputs))


def _at(weight: Whole, name: str, value: str, role: Role) -> Whole:
    """A tensor shaped and spread like a weight."""
    return replace(weight, name=name, role=role, pieces=(Piece(value, (0,) * len(weight.shape)),))


def _layers(model: Program) -> dict[str, int]:
    """Layer of the first instruction that uses each parameter."""
    layers: dict[str, int] = {}
    for instruction in model.function.instructions:
        for name in instruction.inputs:
            layers.setdefault(name, instruction.tag.layer)
    return layers
