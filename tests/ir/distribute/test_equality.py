"""Distributed programs compute what the sequential program computes: loss, every gradient, every
new weight."""

import numpy as np
import pytest
from distribute_cases import distributed, expected, grid, inputs, largest_error, program
from thinned import one_in

from perfmodel.ir import undistributed
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.models import TransformerSize, mlp, training_step, transformer_inference

TOLERANCE = 1e-12


def show(degrees: Degrees) -> str:
    d = degrees
    return f"D{d.data}T{d.tensor}P{d.pipeline}K{d.micro_batches}Z{d.zero}{'C' * d.checkpoint}"


def test_the_sequential_results_are_all_there() -> None:
    names = set(expected("mlp"))
    weights = {f"{kind}{layer}" for kind in "wb" for layer in range(4)}
    assert names == {"loss"} | weights | {f"d_{w}" for w in weights}


GRID = [("mlp", d) for d in grid(29)] + [("transformer", d) for d in grid(97)]
GRID += [("one_norm", d) for d in grid(193)] + [("two_norms", d) for d in grid(211)]


@pytest.mark.parametrize(
    ("model", "degrees"), one_in(3, GRID), ids=[f"{model}-{show(d)}" for model, d in GRID]
)
def test_grid(model: str, degrees: Degrees) -> None:
    spread = distributed(model, degrees)
    assert spread.n_devices == degrees.n_devices
    assert largest_error(execute(spread, inputs(model)), model) < TOLERANCE


EVERYTHING = Degrees(
    tensor=4,
    sequence_parallel=True,
    data=2,
    zero=2,
    pipeline=2,
    micro_batches=2,
    checkpoint=True,
)
"""Tensor, data and pipeline parallelism at once, with sharded states and recomputation."""


@pytest.mark.parametrize(
    "degrees",
    one_in(
        2,
        [
            Degrees(tensor=2, sequence_parallel=True),
            EVERYTHING,
            Degrees(pipeline=2, micro_batches=4, schedule="gpipe", send_stream="send"),
            Degrees(pipeline=2, micro_batches=4, chunks=2, schedule="interleaved", data=2, zero=3),
            Degrees(pipeline=4, micro_batches=4, schedule="chimera", tensor=2),
            Degrees(pipeline=4, micro_batches=4, schedule="zb-h1", data=2),
            Degrees(pipeline=4, micro_batches=2, schedule="seq1f1b:4", tensor=2, checkpoint=True),
            Degrees(pipeline=2, micro_batches=4, schedule="seq1f1b", data=2, zero=2),
        ],
    ),
    ids=str,
)
def test_further_combinations(degrees: Degrees) -> None:
    assert (
        largest_error(
            execute(distributed("transformer", degrees), inputs("transformer")), "transformer"
        )
        < TOLERANCE
    )


@pytest.mark.parametrize("model", ["one_norm", "two_norms"])
@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(tensor=2, sequence_parallel=True),
        EVERYTHING,
        Degrees(pipeline=2, micro_batches=4, schedule="seq1f1b", tensor=2, zero=3, data=2),
    ],
    ids=str,
)
def test_sub_layers_side_by_side(model: str, degrees: Degrees) -> None:
    assert largest_error(execute(distributed(model, degrees), inputs(model)), model) < TOLERANCE


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(expert=4, data=2, zero=1),
        Degrees(expert=2, pipeline=2, micro_batches=2, checkpoint=True),
        Degrees(expert=2, tensor=2, data=2, zero=3),
    ],
    ids=["ep4-dp2-zero1", "ep2-pp2-ckpt", "ep2-tp2-zero3"],
)
def test_expert_parallel(degrees: Degrees) -> None:
    assert (
        largest_error(execute(distributed("experts", degrees), inputs("experts")), "experts")
        < TOLERANCE
    )


@pytest.mark.parametrize(
    "degrees",
    [
        Degrees(data=2, tensor=2, pipeline=2, micro_batches=2),
        Degrees(tensor=4, sequence_parallel=True),
    ],
    ids=["D2T2P2K2", "T4-sp"],
)
def test_gpt2_inference(degrees: Degrees) -> None:
    model = transformer_inference(
        TransformerSize(layers=2, hidden=16, heads=4, vocab=12, seq_len=4), 8, "fp64"
    )
    x = random_inputs(model)
    want, found = execute(model, x)["logits"], execute(distribute(model, degrees), x)["logits"]
    np.testing.assert_allclose(found, want, rtol=TOLERANCE, atol=TOLERANCE * np.abs(want).max())


def test_a_second_step_starts_from_the_first_one_s_results() -> None:
    """Outputs are spread like the inputs that they replace, so that steps follow one another."""
    distributed_step = distributed(
        "transformer", Degrees(data=2, tensor=2, pipeline=2, micro_batches=2, zero=3)
    )
    sequential_step = program("transformer")
    found, want = inputs("transformer"), inputs("transformer")
    for _ in range(2):
        found = found | {k: v for k, v in execute(distributed_step, found).items() if k in found}
        want = want | {k: v for k, v in execute(sequential_step, want).items() if k in want}
    for name, value in want.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-9, atol=1e-12)


def test_half_precision_programs_run_too() -> None:
    step = training_step(mlp(4, (2, 4, 2), "bf16"))
    x = random_inputs(step)
    want, found = execute(step, x), execute(distribute(step, Degrees(data=2)), x)
    assert abs(float(found["loss"]) - float(want["loss"])) < 0.05


def test_a_distributed_function_is_a_program_by_itself() -> None:
    split = distributed("mlp", Degrees(data=2))
    found = execute(undistributed(split.function), split.split(inputs("mlp")))
    for name, value in split.join(found).items():
        np.testing.assert_allclose(value, expected("mlp")[name], rtol=1e-10, atol=1e-14)
