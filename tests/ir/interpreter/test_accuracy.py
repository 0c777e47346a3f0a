"""Accuracy on real data under schedules, at equal mini-batches."""

import jax
import numpy as np
import pytest

from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.ir.interpreter import (
    AccuracyCurve,
    TimeToAccuracy,
    accuracy_curve,
    as_mini_batches,
    digits_task,
    land_or_sea,
    mlp_model,
    teacher_data,
    train,
)
from perfmodel.schedule import PassTimes

pytest.importorskip("matplotlib")


def _curve(name: str, stages: int, **words: int) -> AccuracyCurve:
    times = PassTimes.uniform(stages, 1.0, 2.0)
    settings = {"micro_batches": 2, "mini_batch": 512, "epochs": 2, "seed": 0} | words
    return accuracy_curve(name, times, learning_rate=1.0, **settings)  # pyright: ignore[reportArgumentType]


def test_one_stage_trains_alike_under_schedules_without_delay() -> None:
    """On one device PipeDream with whole mini-batches is plain gradient descent, as 1F1B in two
    micro-batches is."""
    one, other = _curve("1f1b", 1), _curve("pipedream", 1)
    np.testing.assert_allclose(one.accuracy, other.accuracy, atol=2e-3)
    np.testing.assert_allclose(one.time_s, other.time_s)


def test_a_pipeline_learns_the_map_better_than_guessing() -> None:
    curve = _curve("nf1b", 2)
    guess = np.abs(land_or_sea(0).test_labels.mean()) / 2 + 0.5
    assert curve.accuracy[-1] > guess + 0.15
    assert curve.reaches(0.999)[0] == np.inf


def test_a_pipeline_of_convolutions_learns_digits() -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed (extra: bench)")
    times = PassTimes.uniform(2, 1.0, 2.0)
    curve = accuracy_curve(
        "1f1b",
        times,
        micro_batches=2,
        mini_batch=32,
        epochs=3,
        learning_rate=0.2,
        seed=0,
        task=digits_task,
    )
    assert curve.accuracy[-1] > 0.5  # of ten classes


def test_kept_weights_are_those_of_a_shorter_run() -> None:
    model = mlp_model(8, 2)
    inputs, targets = teacher_data(model, 12, examples=4, width=8, seed=0)
    for name in ("pipedream-2bw", "nf1b", "gpipe"):
        words = {"stages": 2, "per_step": 2, "learning_rate": 0.1}
        whole = train(name, model, model.initial(1), inputs, targets, keep_every=3, **words)
        assert sorted(whole.weights_after) == [3, 6]
        half = train(name, model, model.initial(1), inputs[:6], targets[:6], **words)
        for kept, last in (
            (whole.weights_after[6], whole.params),
            (whole.weights_after[3], half.params),
        ):
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), kept, last)


def test_pipedream_gets_whole_mini_batches() -> None:
    times, data = PassTimes.uniform(2, 1.0, 2.0, transfer_s=0.5), np.zeros((8, 3, 5))
    per_step, inputs, _, longer = as_mini_batches("pipedream", 4, data, data, times)
    assert (per_step, inputs.shape, float(longer.forward_s[0]), longer.transfer_s) == (
        1,
        (2, 12, 5),
        4.0,
        2.0,
    )
    for name in ("1f1b", "nf1b", "pipedream-2bw"):
        assert as_mini_batches(name, 4, data, data, times)[1] is data


def test_spread_is_of_the_seeds_that_reach_the_target() -> None:
    curves = [
        AccuracyCurve("s", np.array([2.0, 4.0]), np.array(a))
        for a in ([0.5, 0.9], [0.9, 0.8], [0.1, 0.2])
    ]
    found = TimeToAccuracy.of(curves, 0.9)
    assert (found.reached, found.epochs, found.time_s, found.last_accuracy) == (
        2,
        (1.0, 2.0),
        (2.0, 4.0),
        (0.2, 0.9),
    )
    assert TimeToAccuracy.of(curves[2:], 0.9).epochs is None


def test_bad_settings_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PerfModelError, match="is not divisible"):
        _curve("1f1b", 1, mini_batch=511)
    with pytest.raises(PerfModelError, match="larger than"):
        _curve("1f1b", 1, mini_batch=100_000)
    for argv, reason in (
        (["--accuracy", "0.9"], "needs --train"),
        (["--train", "--accuracy", "2"], "between 0 and 1"),
        (["--train", "--accuracy", "0.9", "--seeds", "0"], "--seeds must be at least 1"),
    ):
        assert main(["schedules", *argv]) == 2
        assert reason in capsys.readouterr().err
