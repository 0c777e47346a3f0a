"""Asynchronous schedules against a plain statement of what their weight versions mean."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from perfmodel.errors import PerfModelError
from perfmodel.ir.interpreter import (
    LayeredModel,
    mlp_model,
    run_schedule,
    teacher_data,
    train,
    training_curve,
)
from perfmodel.schedule import PassTimes, get_schedule, weight_versions
from perfmodel.timeline import double_precision

RATE = 0.05
Versions = Callable[[int, int], int]
"""(stage, micro-batch) -> version."""


@pytest.fixture(autouse=True)
def float64():
    with double_precision():
        yield


def plain_training(
    model: LayeredModel,
    stages: int,
    x: np.ndarray,
    y: np.ndarray,
    per_update: int,
    forward: Versions,
    backward: Versions,
) -> tuple[list[float], list[Any]]:
    """Gradient descent one update at a time: activations made with the forward versions, gradients
    taken layer by layer at them with the backward versions, the step added to the newest
    weights."""
    versions = [model.initial(1)]
    losses = []
    stage_of = [s for s, layers in enumerate(model.stages(stages)) for _ in layers]
    for update in range(len(x) // per_update):
        total = None
        for i in range(update * per_update, (update + 1) * per_update):
            inputs, value = [], x[i]
            for layer, stage in zip(model.layers, stage_of, strict=True):
                inputs.append(value)
                value = layer.apply(versions[forward(stage, i)][len(inputs) - 1], value, ())[0]
            loss, g = jax.value_and_grad(model.loss)(value, y[i])
            losses.append(float(loss))
            gradient = [None] * len(model.layers)
            for n in reversed(range(len(model.layers))):
                weights = versions[backward(stage_of[n], i)][n]
                pull = jax.vjp(
                    lambda p, v, n=n: model.layers[n].apply(p, v, ())[0], weights, inputs[n]
                )[1]
                gradient[n], g = pull(g)
            total = gradient if total is None else jax.tree.map(np.add, total, gradient)
        versions.append(jax.tree.map(lambda w, t: w - RATE / per_update * t, versions[-1], total))
    return losses, versions[-1]


def _data(n: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(n)
    return rng.normal(size=(n, 3, 4)), rng.normal(size=(n, 3, 4))


def assert_same(run, losses, params) -> None:
    np.testing.assert_allclose(run.losses, losses, rtol=1e-11)
    for ours, theirs in zip(jax.tree.leaves(run.params), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_pipedream_stashes_the_version_of_the_forward(p: int) -> None:
    """Stage s (from 0) has seen mini-batches up to i - (p - s) when i comes: p - s - 1 are
    between."""
    x, y = _data(9)
    model = mlp_model(4, p)
    run = train(
        "pipedream", model, model.initial(1), x, y, stages=p, per_step=1, learning_rate=RATE
    )

    def version(stage: int, i: int) -> int:
        return max(0, i - (p - 1 - stage))

    assert_same(run, *plain_training(model, p, x, y, 1, version, version))
    assert run.versions_held.tolist() == list(range(p, 0, -1))


@pytest.mark.parametrize("p", [2, 4])
def test_vertical_sync_uses_one_version_on_all_stages(p: int) -> None:
    x, y = _data(9)
    model = mlp_model(4, p)
    run = train(
        "pipedream-vertical-sync",
        model,
        model.initial(1),
        x,
        y,
        stages=p,
        per_step=1,
        learning_rate=RATE,
    )

    def version(stage: int, i: int) -> int:
        return max(0, i - (p - 1))

    assert_same(run, *plain_training(model, p, x, y, 1, version, version))


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 3), (4, 4)])
def test_2bw_is_one_update_late(p: int, m: int) -> None:
    """W(t + 1) = W(t) - rate * gradient at W(t - 1)."""
    x, y = _data(5 * m)
    model = mlp_model(4, p)
    run = train(
        "pipedream-2bw", model, model.initial(1), x, y, stages=p, per_step=m, learning_rate=RATE
    )

    def version(stage: int, i: int) -> int:
        return max(0, i // m - 1)

    assert_same(run, *plain_training(model, p, x, y, m, version, version))
    assert run.versions_held.tolist() == [2] * p


@pytest.mark.parametrize(("p", "n"), [(2, 2), (4, 2), (4, 4), (3, 3)])
def test_nf1b_takes_the_latest_complete_version(p: int, n: int) -> None:
    """An event loop over the slots of the paper's figure 7 says which updates are complete when."""
    x, y = _data(8 * n)
    model = mlp_model(4, p)
    policy = get_schedule("nf1b:1")
    run = run_schedule(
        policy(p, n, 1, 8),
        model,
        model.initial(1),
        x,
        y,
        policy="latest",
        learning_rate=RATE,
        per_update=n,
    )
    entered, begun = _figure_7(p, n, 8)
    losses, params = plain_training(
        model, p, x, y, n, lambda stage, i: entered[i], lambda stage, i: begun[i // n]
    )
    assert_same(run, losses, params)


def _figure_7(workers: int, n: int, mini_batches: int) -> tuple[list[int], list[int]]:
    """Updates complete when each micro-batch enters, and when each backward begins, worker by
    worker in unit slots."""
    done: dict[tuple[str, int, int], int] = {}
    entered, begun, slot = [], [], 0
    forwards, backwards = [0] * workers, [0] * workers
    while backwards[0] < mini_batches:
        now = dict(done)
        for w in range(workers):
            k, i = backwards[w], forwards[w]
            if w == workers - 1:
                ready = all(("F", w, j) in now for j in range(k * n, (k + 1) * n))
            else:
                ready = ("B", w + 1, k) in now
            if k < mini_batches and ready:
                if w == workers - 1:
                    begun.append(sum(("B", 0, j) in now for j in range(mini_batches)))
                done["B", w, k], backwards[w] = slot, k + 1
            elif i < mini_batches * n and (w == 0 or ("F", w - 1, i) in now):
                if w == 0:
                    entered.append(sum(("B", 0, j) in now for j in range(mini_batches)))
                done["F", w, i], forwards[w] = slot, i + 1
        slot += 1
    return entered, begun


def test_curves_show_hardware_and_statistical_efficiency_together() -> None:
    p, n, steps = 4, 4, 12
    model = mlp_model(4, p)
    rng = np.random.default_rng(0)
    teacher = model.initial(7)
    x = rng.normal(size=(n * steps, 8, 4))
    y = np.stack([np.asarray(model.output(teacher, one)) for one in x])
    passes = PassTimes(np.ones(p), np.ones(p), np.ones(p))
    curves = {
        name: training_curve(
            name, model, model.initial(1), x, y, passes, per_step=n, learning_rate=0.3
        )
        for name in ("1f1b", "zb-h1", "pipedream", "pipedream-2bw", "nf1b", "nf1b:8")
    }
    for name, curve in curves.items():
        assert (np.diff(curve.time_s) > 0).all()
        assert curve.loss[-1] < curve.loss[0]
        assert len(curve.to_frame()) == len(curve.loss)
        # which is bounded to what the paper's figure has
        late = get_schedule(name).asynchronous and name != "nf1b"
        assert (curve.version_difference > 1).any() == late
    # the same losses, sooner; and fewer seconds per update without flushes
    np.testing.assert_allclose(curves["zb-h1"].loss, curves["1f1b"].loss, rtol=1e-9)
    assert curves["zb-h1"].time_s[-1] < curves["1f1b"].time_s[-1]
    assert curves["pipedream-2bw"].time_s[-1] < curves["zb-h1"].time_s[-1]
    assert curves["1f1b"].time_s[0] == (n + p - 1) * 3


def test_held_versions_are_those_that_the_analysis_counts() -> None:
    for name, per_step in (("pipedream", 1), ("pipedream-2bw", 4), ("nf1b", 3)):
        scheduler = get_schedule(name)
        schedule = scheduler(3, per_step, 1, 6)
        x, y = _data(schedule.micro_batches)
        model = mlp_model(4, 3)
        run = run_schedule(
            schedule, model, model.initial(0), x, y, policy=scheduler.weights, learning_rate=RATE
        )
        np.testing.assert_array_equal(
            run.versions_held, weight_versions(schedule, scheduler.weights).stored
        )


def test_training_needs_one_whole_step() -> None:
    model = mlp_model(4, 2)
    x, y = np.zeros((3, 2, 4)), np.zeros((3, 2, 4))
    for name in ("1f1b", "pipedream"):
        for per_step in (0, 4):
            with pytest.raises(PerfModelError, match=r"\(one step\), got 3"):
                train(
                    name,
                    model,
                    model.initial(1),
                    x,
                    y,
                    stages=2,
                    per_step=per_step,
                    learning_rate=0.1,
                )
    with pytest.raises(PerfModelError, match="at least one micro-batch, got -3"):
        teacher_data(model, -3, examples=2, width=4, seed=0)
