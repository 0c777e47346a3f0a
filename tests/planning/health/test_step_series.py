"""Step times of logs, taken apart: warm-up, stalls by their kind, drift."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from written_logs import WrittenRun, write_log

from perfmodel.ingest.launch import save_every
from perfmodel.ingest.logs import parse_log
from perfmodel.planning.health import StepSeries, step_series

N = 200


def steady(seed: int = 1, scatter: float = 0.01) -> np.ndarray:
    return 3.0 * np.random.default_rng(seed).normal(1.0, scatter, N)


def series(
    step_s: Sequence[float] | np.ndarray,
    form: str = "megatron",
    saves: Mapping[int, float] | None = None,
    pauses: Mapping[int, float] | None = None,
    save_interval: int | None = None,
) -> StepSeries:
    pause_after_s = dict(saves or {}) | dict(pauses or {})
    run = WrittenRun(
        step_s=list(step_s), checkpoints=list(saves or ()), pause_after_s=pause_after_s
    )
    tokens = run.global_batch * run.seq_len
    return step_series(
        parse_log(write_log(form, run)), tokens, run.devices, run.global_batch, save_interval
    )


def test_steady_steps_have_no_stalls_and_no_drift() -> None:
    for seed in range(5):
        found = series(steady(seed))
        assert not found.stalls
        assert found.drift is None
        assert found.usual_s == pytest.approx(3.0, rel=5e-3)
        assert found.mean_s == pytest.approx(found.usual_s, rel=5e-3)
        assert found.scatter == pytest.approx(0.01, rel=0.3)


@pytest.mark.parametrize("warm", [1, 3, 8])
def test_the_warm_up_is_not_counted(warm: int) -> None:
    step_s = steady()
    step_s[:warm] *= np.linspace(6, 2, warm)
    found = series(step_s)
    assert found.warm_up_steps == warm
    assert found.warm_up_s == pytest.approx(step_s[:warm].sum() - 3.0 * warm, rel=0.02)
    assert not found.stalls


@pytest.mark.parametrize("form", ["megatron", "torchtitan", "nanotron", "deepspeed"])
def test_pauses_for_checkpoints_are_seen_on_the_clock(form: str) -> None:
    saves = dict.fromkeys(range(50, N, 50), 40.0)
    (stalls,) = series(steady(), form, saves=saves).stalls
    assert (stalls.kind, stalls.count, stalls.every) == ("checkpoint", 3, 50)
    assert stalls.seconds_each == pytest.approx(40.0, abs=1.5)
    assert stalls.seconds_per_step == pytest.approx(120 / (N - 1), rel=0.05)


@pytest.mark.parametrize(
    "form", ["megatron", "nemo", "torchtitan", "nanotron", "maxtext", "composer"]
)
def test_long_steps_at_regular_distances_are_periodic(form: str) -> None:
    step_s = steady()
    step_s[19::20] += 5.0
    (stalls,) = series(step_s, form).stalls
    assert (stalls.kind, stalls.every) == ("periodic", 20)
    assert stalls.seconds_each == pytest.approx(5.0, rel=0.05)


def test_long_steps_at_random_are_irregular() -> None:
    step_s = steady()
    step_s[[20, 31, 77, 80, 141, 190]] += 4.0
    (stalls,) = series(step_s).stalls
    assert (stalls.kind, stalls.count, stalls.every) == ("irregular", 6, None)


@pytest.mark.parametrize("every", [20, 25, 30])
def test_long_steps_at_regular_distances_are_periodic_in_lines_of_several_steps(every: int) -> None:
    step_s = 3.0 * np.random.default_rng(every).normal(1.0, 0.01, 600)
    step_s[every - 1 :: every] += 5.0
    (stalls,) = series(step_s, "hf-trainer").stalls
    assert stalls.kind == "periodic"
    assert stalls.every == pytest.approx(every, abs=2)


def test_checkpoints_and_the_loader_are_told_apart() -> None:
    step_s = steady()
    step_s[14::15] += 2.0
    found = series(step_s, saves=dict.fromkeys(range(40, N, 40), 60.0))
    by_kind = {stalls.kind: stalls for stalls in found.stalls}
    assert set(by_kind) == {"checkpoint", "periodic"}
    assert by_kind["checkpoint"].every == 40
    assert by_kind["periodic"].every == 15


def test_a_script_explains_checkpoints_that_the_log_does_not_report() -> None:
    step_s = steady()
    step_s[50::50] += 20.0
    assert series(step_s, "maxtext", save_interval=50).stalls[0].kind == "checkpoint"
    assert series(step_s, "maxtext").stalls[0].kind == "periodic"


def test_a_trend_and_a_jump_are_told_apart() -> None:
    slope = series(steady() * np.linspace(1.0, 1.2, N)).drift
    assert slope is not None
    assert slope.kind == "trend"
    assert slope.change == pytest.approx(0.2, abs=0.02)
    jump = series(steady() * np.where(np.arange(N) < 120, 1.0, 1.15)).drift
    assert jump is not None
    assert jump.kind == "jump"
    assert jump.change == pytest.approx(0.15, abs=0.01)
    assert abs(jump.at_step - 121) <= 1


def test_the_step_before_a_drift() -> None:
    assert series(steady() * np.linspace(1.0, 1.2, N)).before_drift_s == pytest.approx(
        3.0, rel=0.02
    )
    assert series(
        steady() * np.where(np.arange(N) < 120, 1.0, 1.15)
    ).before_drift_s == pytest.approx(3.0, rel=0.02)


def test_lines_of_several_steps_count_as_often() -> None:
    lines = write_log("megatron", WrittenRun(step_s=steady().tolist())).splitlines()
    every_tenth = [line for line in lines if "iteration" in line][9::10]
    found = step_series(parse_log("\n".join(every_tenth)), 1.0, 64, 512)
    assert found.covered.sum() == 190


@pytest.mark.parametrize("first", [1, 5, 10])
def test_warm_up_and_counted_steps_are_those_of_the_run(first: int) -> None:
    """Frameworks log the first step, or the first few, and then every tenth."""
    lines = write_log("megatron", WrittenRun(step_s=[45.0, *steady().tolist()])).splitlines()
    of_steps = [line for line in lines if "elapsed time" in line]
    logged = [of_steps[first - 1], *of_steps[first + 9 :: 10]]
    found = step_series(parse_log("\n".join(logged)), 1.0, 64, 512)
    last = first + 10 * (len(logged) - 1)
    assert found.warm_up_steps + found.covered.sum() == last


def test_steps_of_a_batch_that_is_ramped_up_are_left_out() -> None:
    small = write_log("megatron", WrittenRun(step_s=[1.0] * 50, global_batch=128))
    large = write_log("megatron", WrittenRun(step_s=[3.0] * 50, global_batch=512))
    assert step_series(parse_log(small + large), 1.0, 64, 512).usual_s == pytest.approx(3.0)


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("torchrun pretrain_gpt.py --save-interval 500 --tp 8", 500),
        ("torchrun pretrain_gpt.py --save-interval=250", 250),
        ("checkpoints:\n  checkpoint_interval: 1000\n", 1000),
        ("checkpoint_period: 100\n", 100),
        ('{"save_steps": 200}', 200),
        (
            "[training]\nsteps = 10\n[checkpoint]\nenable = true\ninterval = 400\n[comm]\ninterval = 3\n",
            400,
        ),
        ("[comm]\ninterval = 3\n", None),
        ("python train.py", None),
    ],
)
def test_how_often_a_script_saves(text: str, steps: int | None) -> None:
    assert save_every(text) == steps
