"""Asynchronous schedules as programs: the same weights as the reference interpreter trains, version
by version."""

import re

import jax
import numpy as np
import pytest

from perfmodel.errors import LayoutError
from perfmodel.ir import Function, parse_program, to_text
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute
from perfmodel.ir.interpreter import Layer, LayeredModel, run_schedule
from perfmodel.ir.models import Adam, Sgd, TransformerSize, mlp, training_step, transformer_loss
from perfmodel.schedule import get_schedule, weight_versions
from perfmodel.timeline import double_precision

RATE, LAYERS, HIDDEN, SAMPLES = 0.05, 4, 6, 16


def layered() -> LayeredModel:
    """The IR's MLP as the interpreter has models: products and activations apart."""
    layers = []
    for n in range(LAYERS):
        layers.append(
            Layer(f"dense{n}", lambda p, x, c: (x @ p["w"] + p["b"], None), lambda rng: {})
        )
        if n < LAYERS - 1:
            layers.append(
                Layer(f"relu{n}", lambda p, x, c: (jax.numpy.maximum(x, 0), None), lambda rng: {})
            )
    return LayeredModel(tuple(layers), lambda out, y: ((out - y) ** 2).mean())


def inputs() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(3)
    shapes = {"x": (SAMPLES, HIDDEN), "y": (SAMPLES, HIDDEN)}
    shapes |= {f"w{n}": (HIDDEN, HIDDEN) for n in range(LAYERS)} | {
        f"b{n}": (HIDDEN,) for n in range(LAYERS)
    }
    return {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("name", "stages", "micro_batches", "steps"),
    [
        ("pipedream", 4, 4, 2),
        ("pipedream-vertical-sync", 2, 4, 2),
        ("pipedream-2bw", 2, 2, 4),
        ("nf1b", 2, 2, 4),
        ("nf1b", 4, 2, 4),
    ],
)
def test_weights_are_the_interpreter_s(
    name: str, stages: int, micro_batches: int, steps: int
) -> None:
    step = training_step(mlp(SAMPLES, (HIDDEN,) * (LAYERS + 1), "fp64"), Sgd(rate=RATE))
    program = distribute(
        step, Degrees(pipeline=stages, micro_batches=micro_batches, steps=steps, schedule=name)
    )
    arrays, scheduler = inputs(), get_schedule(name)
    found = execute(program, arrays)
    schedule = scheduler(stages, micro_batches, 1, steps)
    params = [
        {"w": arrays[f"w{n // 2}"], "b": arrays[f"b{n // 2}"]} if n % 2 == 0 else {}
        for n in range(7)
    ]
    cut = {n: arrays[n].reshape(micro_batches * steps, -1, HIDDEN) for n in ("x", "y")}
    per_update = 1 if name.startswith("pipedream") and name != "pipedream-2bw" else micro_batches
    with double_precision():
        expected = run_schedule(
            schedule,
            layered(),
            params,
            cut["x"],
            cut["y"],
            policy=scheduler.weights,
            learning_rate=RATE,
            per_update=per_update,
        )
    assert found["loss"] == pytest.approx(expected.losses.mean(), rel=1e-10)
    for n in range(LAYERS):
        np.testing.assert_allclose(
            found[f"w{n}"], expected.params[2 * n]["w"], rtol=1e-9, atol=1e-12
        )
        np.testing.assert_allclose(
            found[f"b{n}"], expected.params[2 * n]["b"], rtol=1e-9, atol=1e-12
        )
    assert parse_program(to_text(program)) == program


def test_they_compose_with_data_and_tensor_parallelism() -> None:
    step = training_step(mlp(SAMPLES, (HIDDEN,) * (LAYERS + 1), "fp64"), Adam())
    alone = Degrees(pipeline=2, micro_batches=2, steps=2, schedule="pipedream-2bw")
    spread = Degrees(
        pipeline=2, micro_batches=2, steps=2, schedule="pipedream-2bw", data=2, tensor=2, zero=1
    )
    arrays = inputs()
    rng = np.random.default_rng(0)
    arrays |= {w.name: rng.uniform(0.1, 0.2, w.shape) for w in step.inputs_of("state")}
    expected = execute(distribute(step, alone), arrays)
    for name, value in execute(distribute(step, spread), arrays).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-9, atol=1e-12)


def test_versions_stay_alive_as_long_as_they_are_read() -> None:
    """As many as the schedule's analysis counts; but the first stage has no gradient of its input
    to compute, so that its backward passes read no weights."""
    program = distribute(
        training_step(mlp(16, (4,) * 5)),
        Degrees(pipeline=4, micro_batches=16, schedule="pipedream"),
    )
    held = weight_versions(get_schedule("pipedream")(4, 16), "stashing").stored.tolist()
    assert [alive(program.function, f"w{stage}") for stage in range(4)] == [1, *held[1:]]


def alive(function: Function, weight: str) -> int:
    """Most versions of a weight of which each is read later on."""
    made, read = {weight: 0}, {}
    for at, i in enumerate(function.instructions, 1):
        made |= {name: at for name in i.outputs if re.fullmatch(rf"{weight}\.new\d+", name)}
        read |= {name: at for name in i.inputs if name in made}
    spans = [(made[name], read[name]) for name in read]
    return max(sum(start <= now < stop for start, stop in spans) for now, _ in spans)


def test_tied_weights_and_steps_of_a_flush_are_refused() -> None:
    size = TransformerSize(layers=2, hidden=8, heads=2, vocab=16, seq_len=4, tied=True)
    step = training_step(transformer_loss(size, 4))
    with pytest.raises(LayoutError, match="untie"):
        distribute(step, Degrees(pipeline=2, micro_batches=4, schedule="pipedream"))
    with pytest.raises(LayoutError, match="use steps=1"):
        distribute(step, Degrees(pipeline=2, micro_batches=2, steps=2))
