"""A step far outside its interval is said to be one of another job, with what would explain it."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from simulated_runs import job
from written_logs import WrittenRun, write_log

from perfmodel.ingest.logs import parse_log
from perfmodel.planning.health import RunHealth, check_run
from perfmodel.planning.what_if import Scenario, step_s
from perfmodel.prediction import explain, step_problem_of
from perfmodel.spec import Layout, Problem

STEPS = 20
FORMS = {"megatron": "megatron 8b", "deepspeed": "deepspeed 8b", "composer": "composer 30b"}
FACTORS = (1e-4, 0.05, 0.45, 0.8, 1.0, 1.3, 2.0, 6.0, 30.0, 1e4)


def checked(form: str, name: str, seconds: float, devices: int = 0) -> RunHealth:
    """Check the log of a run of equal steps, which states no argument but the batch."""
    problem, layout = job(name)
    text = write_log(
        form,
        WrittenRun(
            step_s=[seconds] * STEPS,
            devices=devices or layout.devices,
            global_batch=problem.job.global_batch,
            seq_len=problem.job.seq_len,
            flops_per_token=step_problem_of(problem).flops
            / problem.job.global_batch
            / problem.job.seq_len,
        ),
    )
    return check_run(problem, layout, parse_log(text))


@pytest.mark.parametrize("form", FORMS)
def test_verdicts_follow_the_length_of_the_step(form: str) -> None:
    """From far below the interval to far above it: each verdict covers one range of steps."""
    problem, layout = job(FORMS[form])
    expected = explain(step_problem_of(problem), layout)
    matches = []
    for factor in FACTORS:
        health = checked(form, FORMS[form], factor * expected.step_time_s)
        matches.append(health.match)
        assert str(health)
        assert health.to_html()

        # Only a step of this job can be healthy, and only such a step is explained by faults.
        guessed = [cause for cause in health.causes if cause.probability < 1]
        if health.match == "same job":
            assert not health.other_settings
        else:
            assert not health.healthy
            assert not guessed
            assert f"next: {health.next_measurement}" in str(health)
            assert "this job" in health.verdict
    order = ("impossible", "too fast", "same job", "too slow")
    assert matches == sorted(matches, key=order.index)
    assert {"impossible", "same job", "too slow"} <= set(matches)
    assert matches[FACTORS.index(1.0)] == "same job"


def more_devices(problem: Problem, layout: Layout) -> tuple[Problem, Layout]:
    return problem, replace(layout, dp=2 * layout.dp)


def shorter_sequences(problem: Problem, layout: Layout) -> tuple[Problem, Layout]:
    job = replace(problem.job, seq_len=problem.job.seq_len // 4)
    return replace(problem, job=job), layout


def full_batch_of_longer_sequences(problem: Problem, layout: Layout) -> tuple[Problem, Layout]:
    job = replace(problem.job, seq_len=problem.job.seq_len * 8)
    return replace(problem, job=job), layout


@pytest.mark.parametrize(
    ("change", "name", "setting", "value"),
    [
        (more_devices, "megatron 8b", "devices", "128"),
        (shorter_sequences, "deepspeed 8b", "sequence length", "2,048"),
        (full_batch_of_longer_sequences, "megatron 8b", "sequence length", "65,536"),
    ],
)
def test_what_differs_from_the_script_is_named(
    change: Callable[[Problem, Layout], tuple[Problem, Layout]],
    name: str,
    setting: str,
    value: str,
) -> None:
    """A log of another job than the script's: the setting that differs is among those named, and
    its predicted step is the measured one."""
    problem, layout = change(*job(name))
    seconds = step_s(step_problem_of(problem), layout, Scenario())
    form = next(form for form, of_form in FORMS.items() if of_form == name)
    health = checked(form, name, seconds)
    assert health.match != "same job"
    named = {other.setting: other for other in health.other_settings}
    assert named[setting].run == value
    assert named[setting].step_time_s == pytest.approx(seconds, rel=1e-6)
    assert f"{setting}: {value} instead of" in str(health)


def test_a_line_of_the_log_may_be_a_micro_batch() -> None:
    problem, layout = job("deepspeed 8b")
    micro_batches = problem.job.num_microbatches(layout)
    seconds = step_s(step_problem_of(problem), layout, Scenario()) / micro_batches
    health = checked("deepspeed", "deepspeed 8b", seconds)
    named = {other.setting: other for other in health.other_settings}
    assert named["a line of the log"].run == f"one of its {micro_batches} micro-batches"


def test_a_setting_that_the_log_states_explains_nothing() -> None:
    """The prediction has the batch that the log states: no other batch can be the reason."""
    problem, layout = job("megatron 8b")
    expected_s = step_s(step_problem_of(problem), layout, Scenario())
    health = checked("megatron", "megatron 8b", 0.5 * expected_s)
    assert health.other_settings
    assert "global batch" not in {other.setting for other in health.other_settings}
