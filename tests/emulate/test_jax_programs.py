"""Ranks of distributed programs run alone, their collectives answered by the model."""

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.emulate import Prices, emulate_program
from perfmodel.errors import PerfModelError
from perfmodel.ir.distribute import Degrees, distribute, on_one_stream
from perfmodel.ir.execution import random_inputs
from perfmodel.ir.models import mlp, training_step

CLUSTER = catalog.cluster("localhost")


@pytest.mark.parametrize(
    "degrees",
    [Degrees(data=4, zero=3), Degrees(tensor=4), Degrees(pipeline=2, data=2, micro_batches=2)],
    ids=["zero3", "tensor", "pipeline"],
)
def test_every_rank_runs_alone_and_waits_for_what_the_model_says(degrees: Degrees) -> None:
    program = on_one_stream(distribute(training_step(mlp(8, (8, 8, 8, 8, 8))), degrees))
    told = []

    def seconds(op) -> float:
        told.append(op)
        return 2e-3

    for rank in (0, program.n_devices - 1):
        told.clear()
        run = emulate_program(
            program, random_inputs(program), Prices(CLUSTER, seconds), rank, repeats=2
        )
        waits_s = run.spans_s[:, np.array(run.collective)]
        assert len(told) == waits_s.shape[1] > 0
        assert (waits_s >= 2e-3 - 1e-4).all()
        assert run.step_s >= run.communication_s > 0


def test_ranks_that_there_are_not() -> None:
    program = on_one_stream(distribute(training_step(mlp(8, (8, 8, 8))), Degrees(data=2)))
    prices = Prices(CLUSTER, lambda op: 0.0)
    with pytest.raises(PerfModelError, match="rank 2 does not exist"):
        emulate_program(program, random_inputs(program), prices, rank=2)
    with pytest.raises(PerfModelError, match="at least 1"):
        emulate_program(program, random_inputs(program), prices, repeats=0)
