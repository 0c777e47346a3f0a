"""The same programs with the collectives of torch.distributed; skipped where torch is not
installed."""

from collections.abc import Iterator

import numpy as np
import pytest
from test_real_runs import COLLECTIVES, MLP, TRANSFORMER

from perfmodel.errors import PerfModelError
from perfmodel.ir import parse_function, undistributed
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute, program_ranks, random_inputs, run
from perfmodel.measure.ranks import RankGroup

WITHOUT_TORCH = "torch is not installed (extra: torch)"


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    pytest.importorskip("torch", reason=WITHOUT_TORCH)
    with program_ranks(2, "torch") as ranks:
        yield ranks


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "degrees"),
    [
        (MLP, Degrees(data=2, zero=3)),
        (TRANSFORMER, Degrees(tensor=2, sequence_parallel=True)),
        (MLP, Degrees(pipeline=2, micro_batches=4, schedule="zb-h1")),
    ],
    ids=["D2-zero3", "T2-sequence", "P2-zb-h1"],
)
def test_numbers_are_the_reference_executors(model, degrees: Degrees, two_ranks: RankGroup) -> None:
    program = distribute(model, degrees)
    x = random_inputs(program)
    result = run(program, x, repeats=1, ranks=two_ranks)
    for name, value in execute(program, x).items():
        np.testing.assert_allclose(result.outputs[name], value, rtol=1e-12, atol=1e-13)


def test_every_collective(two_ranks: RankGroup) -> None:
    program = undistributed(parse_function(COLLECTIVES))
    x = random_inputs(program)
    result = run(program, x, repeats=1, ranks=two_ranks)
    for name, value in execute(program, x).items():
        np.testing.assert_allclose(result.outputs[name], value, rtol=1e-14)


def test_half_precision_travels_too(two_ranks: RankGroup) -> None:
    text = "func @half(%a: bf16[4] @0, %b: bf16[4] @1) {\n  %r, %s = all_reduce(%a, %b)\n  return %r, %s\n}"
    program = undistributed(parse_function(text))
    x = random_inputs(program)
    result = run(program, x, repeats=1, ranks=two_ranks)
    for name, value in execute(program, x).items():
        np.testing.assert_array_equal(
            np.asarray(result.outputs[name], float), np.asarray(value, float)
        )


@pytest.mark.slow
def test_groups_inside_a_larger_world() -> None:
    pytest.importorskip("torch", reason=WITHOUT_TORCH)
    program = distribute(MLP, Degrees(pipeline=2, data=2, micro_batches=2))
    x = random_inputs(program)
    result = run(program, x, repeats=1, backend="torch")
    for name, value in execute(program, x).items():
        np.testing.assert_allclose(result.outputs[name], value, rtol=1e-12, atol=1e-13)


def test_without_torch_the_extra_is_named(monkeypatch) -> None:
    monkeypatch.setattr("perfmodel.ir.execution._run.find_spec", lambda name: None)
    with pytest.raises(PerfModelError, match=r"perfmodel\[torch\]"):
        program_ranks(2, "torch")
