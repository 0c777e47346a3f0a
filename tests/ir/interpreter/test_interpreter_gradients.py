"""Schedules are right because what they compute is: gradients against the sequential model, in
float64."""

import jax
import numpy as np
import pytest
from thinned import one_in

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ir.interpreter import (
    LayeredModel,
    causal_model,
    conv_model,
    mlp_model,
    run_schedule,
    sequential_gradients,
)
from perfmodel.schedule import PassTimes as Times
from perfmodel.schedule import Schedule, get_schedule, optimised, parse_schedule, schedule_names
from perfmodel.timeline import double_precision

FLUSHING = [
    n
    for n in schedule_names()
    if not get_schedule(n).asynchronous and n not in ("forward", "seq1f1b")
]
LOOPED = ("gpipe", "breadth-first", "interleaved")


@pytest.fixture(autouse=True)
def float64():
    with double_precision():
        yield


def assert_equals_sequential(
    schedule: Schedule, model: LayeredModel, x: np.ndarray, y: np.ndarray
) -> None:
    """Data by whole sequences; cut into slices along the tokens for the schedule."""
    params = model.initial(1)
    loss, gradient = sequential_gradients(model, params, x, y)
    run = run_schedule(
        schedule, model, params, _sliced(x, schedule.slices), _sliced(y, schedule.slices)
    )
    assert run.losses.mean() == pytest.approx(loss, rel=1e-12)
    for ours, reference in zip(
        jax.tree.leaves(run.gradients), jax.tree.leaves(gradient), strict=True
    ):
        np.testing.assert_allclose(ours, reference, rtol=1e-11, atol=1e-13)


def _sliced(data: np.ndarray, slices: int) -> np.ndarray:
    if slices == 1:
        return data
    m, batch, tokens, width = data.shape
    return (
        data.reshape(m, batch, slices, tokens // slices, width)
        .swapaxes(1, 2)
        .reshape(m * slices, batch, -1, width)
    )


def _data(m: int, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(m)
    return rng.normal(size=(m, *shape)), rng.normal(size=(m, *shape))


@pytest.mark.parametrize("name", FLUSHING)
@pytest.mark.parametrize(("p", "m"), one_in(2, [(2, 2), (2, 4), (4, 4), (4, 8), (4, 16)]))
def test_gradients_equal_the_sequential_models(name: str, p: int, m: int) -> None:
    scheduler = get_schedule(name)
    for chunks in (1, 2, 3) if name in LOOPED else (scheduler.chunks or 1,):
        schedule = scheduler(p, m, chunks)
        assert_equals_sequential(schedule, mlp_model(4, schedule.n_stages), *_data(m, 3, 4))


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "zb-h1", "chimera"])
def test_gradients_of_convolutions_equal_the_sequential_models(name: str) -> None:
    rng = np.random.default_rng(0)
    x, labels = rng.normal(size=(4, 3, 4, 4, 1)), rng.integers(0, 5, (4, 3))
    assert_equals_sequential(
        get_schedule(name)(4, 4), conv_model((1, 2, 3), 4, 5), x, np.eye(5)[labels]
    )


@pytest.mark.parametrize(
    ("p", "pipelines", "m"),
    [(4, 4, 4), (4, 4, 8), (4, 4, 11), (8, 2, 3), (8, 2, 11), (8, 4, 5), (8, 8, 8), (8, 8, 11)],
)
def test_chimera_with_2k_pipelines(p: int, pipelines: int, m: int) -> None:
    with pytest.raises(LayoutError, match="pipelines need at least"):
        get_schedule("chimera:4")(p, 3)
    schedule = get_schedule(f"chimera:{pipelines}")(p, m)
    assert_equals_sequential(schedule, mlp_model(4, p), *_data(m, 2, 4))


@pytest.mark.parametrize("slices", [1, 2, 4])
@pytest.mark.parametrize(("p", "m"), one_in(3, [(1, 2), (2, 3), (3, 4)]))
def test_sequence_slices(slices: int, p: int, m: int) -> None:
    schedule = get_schedule(f"seq1f1b:{slices}")(p, m)
    assert_equals_sequential(schedule, causal_model(4, p), *_data(m, 2, 8, 4))


def test_optimised_and_custom_orders() -> None:
    rng = np.random.default_rng(3)
    made = optimised(Times(*rng.uniform(0.5, 2, (3, 3))), 5, 4)
    assert_equals_sequential(made, mlp_model(4, 3), *_data(5, 2, 4))
    custom = parse_schedule(
        "stages 0 | 1\nF0-1 BI1 F2 BW1 B0 B2\nF0 F1 BI1 BI0 F2 BW0 BI2 BW1 BW2\n"
    )
    assert_equals_sequential(custom, mlp_model(4, 2), *_data(3, 2, 4))


def test_wrong_order_gives_wrong_results_or_none() -> None:
    """The interpreter can fail: a schedule that leaves out work is refused, wrong data are
    named."""
    model = mlp_model(4, 2)
    schedule = get_schedule("1f1b")(2, 4)
    x, y = _data(3, 2, 4)
    with pytest.raises(PerfModelError, match="takes 4 micro-batches, got 3"):
        run_schedule(schedule, model, model.initial(0), x, y)
    with pytest.raises(PerfModelError, match="missing"):
        run_schedule(
            parse_schedule("stages 0 | 1\nF0 F1 B0\nF0 B0 F1 B1\n"),
            model,
            model.initial(0),
            *_data(2, 2, 4),
        )
    with pytest.raises(PerfModelError, match="deeper model"):
        run_schedule(get_schedule("1f1b")(8, 4), model, model.initial(0), *_data(4, 2, 4))
