"""Small training programs and the degrees to distribute them by."""

import os
from functools import cache
from itertools import product

import numpy as np

from perfmodel.ir import Program
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import execute, random_inputs
from perfmodel.ir.models import Adam, TransformerSize, mlp, training_step, transformer_loss

BATCH = 16
FULL_GRID = bool(os.environ.get("PERFMODEL_FULL_GRID"))
"""Whether every combination of degrees is tested (`make grid`), or a sample."""


@cache
def program(name: str) -> Program:
    """One-device training step in double precision; `one_norm` and `two_norms`: the transformer's
    layers with attention and feed-forward side by side."""
    if name == "mlp":
        return training_step(mlp(BATCH, (4, 8, 8, 8, 4), "fp64"))
    if name == "experts":
        size = TransformerSize(layers=2, hidden=8, heads=2, vocab=8, seq_len=4, experts=4)
        return training_step(transformer_loss(size, BATCH, "fp64"))
    blocks = "none" if name == "transformer" else name
    size = TransformerSize(
        layers=4, hidden=16, heads=4, vocab=16, seq_len=4, parallel_blocks=blocks
    )  # pyright: ignore[reportArgumentType]
    return training_step(transformer_loss(size, BATCH, "fp64"), Adam())


@cache
def inputs(name: str) -> dict[str, np.ndarray]:
    return random_inputs(program(name), seed=1)


@cache
def expected(name: str) -> dict[str, np.ndarray]:
    return execute(program(name), inputs(name))


def largest_error(found: dict[str, np.ndarray], name: str) -> float:
    """Largest difference of any result from the sequential program's, relative to that result's
    largest element."""
    want = expected(name)
    assert set(found) == set(want)
    return max(float(np.abs(found[k] - v).max() / np.abs(v).max()) for k, v in want.items())


def distributed(name: str, degrees: Degrees) -> Program:
    return distribute(program(name), degrees)


def grid(one_in: int) -> list[Degrees]:
    """Every combination of degrees or, by default, one in so many of them."""
    every = [
        Degrees(data=d, tensor=t, pipeline=p, micro_batches=k, zero=z, checkpoint=c)
        for d, t, p, k, z, c in product(
            (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4), range(4), (False, True)
        )
        if d > 1 or z == 0
    ]
    # a stride that is prime to the sizes of all axes walks through all of their values
    return every if FULL_GRID else every[::one_in]
