"""What is said of made-up runs: verdicts, causes and the report, without any prediction."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.ingest.logs import LogEvent, LoggedStep, PhaseTimer, TrainingLog
from perfmodel.planning.health import Cause, Drift, RunHealth, Stalls, StepSeries, step_series
from perfmodel.planning.health._causes import DATA_LOADING, Fault, Severity
from perfmodel.planning.health._contradictions import what_ran
from perfmodel.planning.health._evidence import Likely, Observed
from perfmodel.planning.health._health import (
    _guessed_causes,
    _observed,
    _passes_ratio,
    _remarks,
    _undecided,
    _worth_naming,
)
from perfmodel.planning.health._measurements import most_telling
from perfmodel.planning.health._series import (
    _period,
    _trend,
)
from perfmodel.planning.health._shown import shown_causes
from perfmodel.spec import Job, Layout, Problem

GIB = 2**30
PREDICTION: Any = SimpleNamespace(
    model="a model",
    devices=64,
    cluster="a cluster",
    global_batch=128,
    seq_len=4096,
    step_time_s=10.0,
    step_time_lo_s=8.0,
    step_time_hi_s=12.5,
    tokens_per_s_per_device=800.0,
    sample_unit="tokens",
    memory_capacity_bytes=80 * GIB,
    memory_counted_bytes={"reserved": 40 * GIB},
    breakdown_s={"forward": 2.0, "backward": 4.0, "recompute": 2.0, "gaps": 1.0, "bubble": 1.0},
)
SERIES = StepSeries(
    steps=tuple(range(1, 101)),
    seconds=np.full(100, 11.0),
    covered=np.ones(100),
    warm_up_steps=1,
    warm_up_s=65.0,
    usual_s=11.0,
    scatter=0.012,
    mean_s=12.0,
    stalls=(),
    drift=None,
    small_batch=None,
    restarts=0,
    skipped_steps=0,
)
SLOW_LINK = Cause(
    name="slow_inter_node_link",
    title="network below its rate",
    explains_s=0.9,
    probability=0.62,
    evidence="fits best: at 50% of its bandwidth",
    remedy="check the adapters",
)
SLOW_HOST = replace(
    SLOW_LINK, name="host_bound", title="hosts too slow", probability=0.21, evidence=""
)
CHECKPOINTS = replace(
    SLOW_LINK, name="checkpoints", title="checkpoints stop it", probability=1.0, evidence="5 times"
)
USUAL = RunHealth(
    log="train.log",
    format="megatron",
    prediction=PREDICTION,
    series=SERIES,
    excess_share=0.1,
    slower_than=0.75,
    healthy=True,
    fault=None,
    no_fault_probability=0.7,
    causes=(),
    next_measurement="run nccl-tests",
    undecided="",
    typical_site_s=10.0,
    good_site_s=8.4,
    contradictions=(),
    remarks=(),
    peak_bytes=None,
    peak_counter="reserved",
    expected_peak_bytes=None,
    timers={},
)
HEAD = (
    "",
    "a model on 64 devices of a cluster, global batch 128, sequence 4096",
    "step time: measured 11 s, predicted 10 s, +10.0%",
    "nine in ten comparable sites take 8 s to 12.5 s; the fastest tenth takes at most 8.4 s",
)
THROUGHPUT = "667 tokens/s per device (predicted 800)"
STEADY = "steps vary by 1.2% around their trend; 100 steps counted"
WARM_UP = "not counted: 1 step of warm-up, 65 s longer than usual"


def report(**changes: Any) -> list[str]:
    """Lines of the report on a changed run."""
    return str(replace(USUAL, **changes)).splitlines()


def test_a_usual_run_is_reported_without_guesses() -> None:
    for causes in ((), (SLOW_HOST,)):
        assert report(causes=causes) == [
            "healthy: slower than at 75% of comparable sites",
            *HEAD,
            f"throughput: {THROUGHPUT}",
            STEADY,
            WARM_UP,
        ]


def test_guesses_are_numbered_with_what_would_decide() -> None:
    unhealthy = report(
        healthy=False,
        slower_than=0.997,
        causes=(SLOW_LINK, SLOW_HOST),
        no_fault_probability=0.004,
        undecided="the log cannot decide",
        remarks=("a remark",),
        contradictions=("tp is 4 in the log and 2 in the script",),
    )
    assert unhealthy[:3] == [
        "not healthy: slower than at more than 99 % of comparable sites; "
        "likeliest cause: network below its rate",
        "contradiction: tp is 4 in the log and 2 in the script",
        "a remark",
    ]
    assert unhealthy[9:] == [
        WARM_UP,
        "",
        "likeliest causes, and the seconds per step that each would explain",
        "1. network below its rate: 900 ms (probability 62%)",
        "   fits best: at 50% of its bandwidth",
        "   remedy: check the adapters",
        "2. hosts too slow: 900 ms (probability 21%)",
        "   remedy: check the adapters",
        "probability that there is no fault and the site is just slower than most: below 1%",
        "the log cannot decide",
        "",
        "next, to distinguish them: run nccl-tests",
    ]


def test_a_likely_fault_of_a_usual_run_is_in_doubt() -> None:
    doubtful = report(causes=(SLOW_LINK,), no_fault_probability=0.38, slower_than=0.3)
    assert doubtful[0] == (
        "in doubt: network below its rate (probability 62%); "
        "the usual step is faster than at 70% of comparable sites"
    )
    assert "likeliest causes, and the seconds per step that each would explain" in doubtful
    assert (
        "probability that there is no fault and the site is just slower than most: 38%" in doubtful
    )
    assert "next: run nccl-tests" in doubtful
    # Where no cause is likelier than not, there may be none.
    unsure = report(causes=(SLOW_HOST,), no_fault_probability=0.5)
    assert unsure[9] == (
        "there may be no fault. If there is one, the likeliest causes, and the seconds per step "
        "that each would explain"
    )


def test_what_a_log_shows_needs_no_measurement() -> None:
    shown = report(causes=(CHECKPOINTS,), series=replace(SERIES, warm_up_steps=0))
    assert shown[7:] == [
        "",
        "shown by the log, with the seconds per step that each costs",
        "1. checkpoints stop it: 900 ms (shown by the log)",
        "   5 times",
        "   remedy: check the adapters",
    ]
    beside_a_guess = report(causes=(CHECKPOINTS, SLOW_HOST), no_fault_probability=0.2)
    assert beside_a_guess[15:] == [
        "probability that there is no fault and the site is just slower than most: 20%",
        "",
        "next, to distinguish them: run nccl-tests",
    ]
    certain = report(causes=(CHECKPOINTS,), fault=CHECKPOINTS, healthy=False)
    assert certain[0] == (
        "not healthy: checkpoints stop it; the usual step is slower than at 75% of comparable sites"
    )


def test_stalls_timers_drift_and_memory_are_reported() -> None:
    stalls = Stalls(kind="checkpoint", count=4, seconds_each=30.0, seconds_per_step=1.2, every=2000)
    series = replace(
        SERIES,
        stalls=(stalls, replace(stalls, kind="irregular", every=None)),
        drift=Drift(kind="jump", change=0.25, at_step=1050),
        skipped_steps=3,
        warm_up_s=-1.0,
        warm_up_steps=2,
    )
    lines = report(
        series=series,
        peak_bytes=40 * GIB,
        expected_peak_bytes=30 * GIB,
        timers={
            "gradient_sync": PhaseTimer(least_s=0.5, most_s=0.5),
            "compute": PhaseTimer(least_s=7.0, most_s=8.0),
            "data": PhaseTimer(least_s=0.0, most_s=0.0),
        },
    )
    assert lines[5:] == [
        f"with all stalls: 12 s per step, {THROUGHPUT}",
        "peak memory (reserved): measured 40.0 GiB, predicted 30.0 GiB",
        STEADY,
        "timers, from the fastest to the slowest rank: gradient sync 500 ms, compute 7 s to 8 s",
        "stalls (checkpoint): 4, every 2,000 steps, 30 s each, 10.0% of the run",
        "stalls (irregular): 4, 30 s each, 10.0% of the run",
        "drift: steps change by +25.0% over the run at step 1,050",
        "skipped updates: 3",
        "not counted: 2 steps of warm-up",
    ]
    trend = report(series=replace(series, drift=Drift(kind="trend", change=-0.1, at_step=1)))
    assert "drift: steps change by -10.0% over the run" in trend
    one_rank = report(timers={"compute": PhaseTimer(least_s=7.0, most_s=7.0)})
    assert "timers: compute 7 s" in one_rank


@pytest.mark.parametrize(
    ("slower_than", "words"),
    [
        (0.001, "faster than at more than 99 % of comparable sites"),
        (0.2, "faster than at 80% of comparable sites"),
        (0.5, "slower than at 50% of comparable sites"),
        (0.994, "slower than at 99% of comparable sites"),
        (0.995, "slower than at more than 99 % of comparable sites"),
    ],
)
def test_the_verdict_says_where_among_sites(slower_than: float, words: str) -> None:
    assert replace(USUAL, slower_than=slower_than).verdict == f"healthy: {words}"


# --- causes --------------------------------------------------------------------------------------


def test_a_log_shows_drift_skipped_steps_and_slow_loaders_from_their_least_share_on() -> None:
    def names(series: StepSeries, data_s: float = 0.0) -> dict[str, float]:
        timers = {"data": PhaseTimer(least_s=0.0, most_s=data_s)}
        causes = shown_causes(series, "megatron", timers, PREDICTION, ())
        return {cause.name: cause.explains_s for cause in causes}

    assert names(SERIES) == {}
    # 2 % of 101 steps are 2.02.
    assert names(replace(SERIES, skipped_steps=2)) == {}
    assert names(replace(SERIES, skipped_steps=3)) == {
        "skipped_steps": pytest.approx(11.0 * 3 / 101)
    }
    # 3 % of the predicted step.
    assert names(SERIES, data_s=0.3) == {}
    assert names(SERIES, data_s=0.31) == {DATA_LOADING: 0.31}
    slower = replace(SERIES, drift=Drift(kind="trend", change=0.2, at_step=1))
    # Half of the change in the mean, from a step that was 10 s at first.
    assert names(slower) == {"slows_down": pytest.approx(1.0)}
    assert names(replace(slower, drift=Drift(kind="trend", change=-0.2, at_step=1))) == {}
    jump = replace(
        SERIES,
        seconds=np.array([10.0] * 60 + [12.0] * 40),
        drift=Drift(kind="jump", change=0.2, at_step=61),
    )
    assert names(jump) == {"slows_down": pytest.approx(10.0 * 0.2 * 0.4)}


@pytest.mark.parametrize(
    ("kind", "count", "every", "evidence"),
    [
        ("checkpoint", 1, None, "once, 30 s each"),
        ("evaluation", 3, 1500, "3 times, every 1,500 steps, 30 s each"),
        ("periodic", 2, 10, "2 times, every 10 steps, 30 s each"),
        ("irregular", 2, None, "2 times, 30 s each"),
    ],
)
def test_a_stall_is_certain(kind: Any, count: int, every: int | None, evidence: str) -> None:
    stalls = Stalls(
        kind=kind, count=count, seconds_each=30.0, seconds_per_step=0.3 * count, every=every
    )
    (cause,) = shown_causes(replace(SERIES, stalls=(stalls,)), "nemo", {}, PREDICTION, ())
    assert (cause.probability, cause.explains_s) == (1.0, 0.3 * count)
    assert cause.evidence == evidence


def likely(name: str, probability: float, explains_s: float) -> Likely:
    severity = Severity(description="at half", weight=1.0, step_s=11.0)
    fault = Fault(name=name, title=name, prior=1.0, severities=(severity,), remedy="mend it")
    return Likely(fault=fault, probability=probability, severity=severity, explains_s=explains_s)


def test_hidden_faults_share_what_the_log_does_not_show() -> None:
    hidden = [likely("slow_rank", 0.6, 0.9), likely("host_bound", 0.01, 0.9)]
    observed: Any = SimpleNamespace(most_explained_s=1.0, jump=None)
    loader = replace(CHECKPOINTS, name=DATA_LOADING, explains_s=0.3)
    # Checkpoints lie beside the usual step, a loader within it. Who is hardly likely is not named.
    for shown, explains_s in (([], 0.9), ([CHECKPOINTS], 0.9), ([loader], 0.7)):
        (cause,) = _guessed_causes(hidden, shown, observed, SERIES)
        assert (cause.name, cause.probability) == ("slow_rank", 0.6)
        assert cause.explains_s == pytest.approx(explains_s)
        assert cause.evidence == "fits best: at half"
    much = replace(loader, explains_s=3.0)
    assert _guessed_causes(hidden, [much], observed, SERIES)[0].explains_s == 0.0
    assert not _guessed_causes(hidden, [replace(loader, name="slow_rank")], observed, SERIES)

    # Behind a jump is what lengthens the steps after it.
    observed.jump = 1.2
    jump = replace(
        SERIES,
        seconds=np.array([10.0] * 50 + [12.0] * 50),
        drift=Drift(kind="jump", change=0.2, at_step=1051),
    )
    (cause,) = _guessed_causes(hidden, [], observed, replace(jump, steps=tuple(range(1001, 1101))))
    assert cause.explains_s == pytest.approx(10.0 * 0.2 * 0.5)
    assert cause.evidence == "if it begins at step 1,051; fits best: at half"


def test_likely_causes_come_first_and_three_are_named() -> None:
    shown = [replace(CHECKPOINTS, explains_s=0.2), replace(CHECKPOINTS, name="evaluations")]
    guessed = [SLOW_HOST, SLOW_LINK, replace(SLOW_LINK, name="slow_rank", explains_s=0.1)]
    named = _worth_naming(shown, guessed, 0.1)
    assert [cause.name for cause in named] == ["evaluations", "slow_inter_node_link", "checkpoints"]
    # Guesses compete for the seconds of the one that would explain most.
    longer = replace(SLOW_HOST, explains_s=9.0)
    assert _worth_naming(shown, [longer, SLOW_LINK], 0.1)[0] == SLOW_LINK
    assert _worth_naming(shown, guessed, 0.9) == []


@pytest.mark.parametrize(
    ("probabilities", "is_undecided"),
    [((), False), ((0.3,), False), ((0.3, 0.2), True), ((0.5, 0.2, 0.2), False)],
)
def test_a_log_is_undecided_between_several_unlikely_causes(
    probabilities: tuple[float, ...], is_undecided: bool
) -> None:
    causes = [replace(SLOW_LINK, probability=probability) for probability in probabilities]
    log = TrainingLog(path="train.log", format="megatron", steps=())
    assert bool(_undecided(causes, log, SERIES)) == is_undecided


@pytest.mark.parametrize(
    ("drift", "jump"),
    [
        (None, None),
        (Drift(kind="jump", change=0.3, at_step=9), 1.3),
        (Drift(kind="jump", change=-0.3, at_step=9), None),
        (Drift(kind="trend", change=0.3, at_step=9), None),
    ],
)
def test_a_jump_is_observed_where_steps_become_slower_at_once(
    drift: Drift | None, jump: float | None
) -> None:
    assert observed_in("megatron", zero=1, drift=drift).jump == jump


@pytest.mark.parametrize(
    ("form", "zero", "times_sync"),
    [("megatron", 3, True), ("deepspeed", 2, True), ("deepspeed", 3, False)],
)
def test_deepspeed_gathers_within_its_passes_and_logs_one_rank(
    form: str, zero: int, times_sync: bool
) -> None:
    observed = observed_in(form, zero)
    assert observed.times_sync == times_sync
    assert observed.one_rank == (form == "deepspeed")


def observed_in(form: str, zero: int, **changes: Any) -> Observed:
    """What a made-up log shows beside its prediction."""
    job: Any = SimpleNamespace(intended=Layout(dp=8, zero=zero), problem=_problem())
    log = TrainingLog(path="train.log", format=form, steps=())
    series = replace(SERIES, **changes)
    return _observed(log, series, PREDICTION, 0.1, job, {}, None)


def test_the_measurement_that_tells_most_is_named() -> None:
    """Two causes as likely as each other: one bit, at the least effort."""
    assert most_telling({"slow_inter_node_link": 1.0, "host_bound": 1.0}).name == (
        "nccl_between_nodes"
    )
    assert most_telling({"data_loading": 1.0, "host_bound": 1.0}).name == "synthetic_data"
    assert most_telling({"slow_rank": 1.0}).name == "time_every_device"


@pytest.mark.parametrize(
    ("timers", "ratio"),
    [
        ({}, None),
        ({"compute": (10.8, 12.0)}, 1.2),
        ({"compute": (0.0, 12.0)}, None),
        # A quarter of the kernels' seconds are forward: 9 s of passes / 4.
        ({"forward": (2.7, 3.0)}, 1.2),
        ({"backward": (5.0, 5.0)}, None),
    ],
)
def test_passes_are_compared_with_the_fastest_rank(
    timers: dict[str, tuple[float, float]], ratio: float | None
) -> None:
    measured = {name: PhaseTimer(least_s=a, most_s=b) for name, (a, b) in timers.items()}
    assert _passes_ratio(measured, PREDICTION) == (ratio if ratio is None else pytest.approx(ratio))
    nothing: Any = SimpleNamespace(breakdown_s={"bubble": 1.0})
    assert _passes_ratio({"forward": PhaseTimer(least_s=1.0, most_s=1.0)}, nothing) is None


def test_remarks_name_full_memory_restarts_and_untimed_events() -> None:
    problem: Any = SimpleNamespace(
        problem=SimpleNamespace(job=Job(global_batch=128, seq_len=4096)),
    )
    log = TrainingLog(path="train.log", format="megatron", steps=())

    def remarks(log: TrainingLog = log, **changes: Any) -> tuple[str, ...]:
        return _remarks(problem, log, replace(SERIES, **changes), PREDICTION, 1e18)

    assert remarks() == ()
    assert remarks(restarts=2) == ("the run was restarted 2 times",)
    assert "reports 5 checkpoints" in remarks(untimed_events=5)[0]
    retried = LogEvent(kind="allocator_retry", after_step=3)
    assert "flushed its cache" in remarks(replace(log, events=(retried,)))[0]
    # 95 % of 80 GiB are 76.
    assert remarks(replace(log, reserved_bytes=75.9 * GIB)) == ()
    assert "76.1 of 80.0 GiB" in remarks(replace(log, reserved_bytes=76.1 * GIB))[0]


# --- series --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at_steps", "lines_cover", "every"),
    [
        ((20, 40, 60, 80), 1, 20),
        ((20, 40, 60, 81), 1, 20),
        ((20, 40), 1, None),
        # The middle half of the distances lies within 15 % of the median, here 3.3 steps.
        ((20, 40, 64, 88, 108), 1, None),
        ((20, 40, 63, 86, 106), 1, 20),
        # Steps in a row are one long stall.
        ((20, 21, 22, 23), 1, None),
        ((20, 22, 24, 26), 1, 2),
        # Lines of 10 steps hide where in a line a stall is, but no more than a third of a distance.
        ((100, 143, 200, 243, 300), 10, 50),
        ((100, 120, 160, 180, 220), 10, None),
        ((100, 205, 340, 445, 580), 10, None),
    ],
)
def test_stalls_are_regular_where_their_distances_are_alike(
    at_steps: tuple[int, ...], lines_cover: int, every: int | None
) -> None:
    assert _period(np.array(at_steps), np.full(len(at_steps), float(lines_cover))) == every


def test_a_trend_is_certain_by_the_signs_of_all_pairs() -> None:
    """Mann and Kendall's test, pair by pair."""
    certain = 0
    rng = np.random.default_rng(0)
    for _ in range(60):
        # Steps that are nearly in order, of which the test is sure in some cases alone.
        seconds = np.argsort(np.arange(12) + rng.normal(0, 3, 12)) + 1.0
        score = 0
        for later in range(12):
            score += sum(1 if seconds[later] > seconds[i] else -1 for i in range(later))
        trend = _trend(np.arange(12), seconds)
        assert (trend is not None) == (abs(score) >= 3 * (12 * 11 * 29 / 18) ** 0.5)
        certain += trend is not None
    assert 10 < certain < 50


@pytest.mark.parametrize(("step_s", "pause_s"), [(1.0, 3.0), (10.0, 5.0)])
def test_a_pause_is_longer_than_clocks_are_coarse_and_than_half_a_step(
    step_s: float, pause_s: float
) -> None:
    for seconds, is_pause in ((pause_s - 0.5, False), (pause_s + 0.5, True)):
        steps = []
        for i in range(30):
            clock_s = i * step_s + (seconds if i >= 20 else 0.0)
            steps.append(LoggedStep(step=i + 1, seconds=step_s, clock_s=clock_s))
        log = TrainingLog(path="train.log", format="megatron", steps=tuple(steps))
        series = step_series(log, 1e6, 8, 128)
        assert bool(series.stalls) == is_pause
        assert series.mean_s == pytest.approx(step_s + (seconds / 29 if is_pause else 0.0))


def test_the_stalls_that_cost_most_come_first() -> None:
    steps = []
    for i in range(60):
        steps.append(LoggedStep(step=i + 1, seconds=9.0 if i in (20, 47) else 1.0))
    events = (LogEvent(kind="checkpoint", after_step=30, seconds=90.0),)
    log = TrainingLog(path="train.log", format="hf-trainer", steps=tuple(steps), events=events)
    assert [stalls.kind for stalls in step_series(log, 1e6, 8, 128).stalls] == [
        "checkpoint",
        "irregular",
    ]
    fewer = replace(log, events=(replace(events[0], seconds=5.0),))
    assert [stalls.kind for stalls in step_series(fewer, 1e6, 8, 128).stalls] == [
        "irregular",
        "checkpoint",
    ]


# --- log and script ------------------------------------------------------------------------------

MATTERS = {
    "sequence_parallel": ("tp=2", "dp=2"),
    "tp_overlap": ("tp=2", "dp=2"),
    "overlap_grad_reduce": ("dp=2", "tp=2"),
    "overlap_param_gather": ("dp=2,zero=1", "dp=2", "tp=2,zero=1"),
    "recompute": ("dp=2", "dp=2,recompute_full_layers=2"),
}
"""Options with a layout in which each has an effect, and some in which it has none."""


@pytest.mark.parametrize("option", MATTERS)
def test_options_of_the_log_count_where_they_have_an_effect(option: str) -> None:
    for place, text in enumerate(MATTERS[option]):
        matters = place == 0
        layout = Layout.parse(text)
        other: Any = "full" if option == "recompute" else not layout.value(option)
        log = TrainingLog(path="train.log", format="megatron", steps=(), settings={option: other})
        ran = what_ran(_problem(), layout, log)
        assert ran.options == ({option: other} if matters else {})
        assert [each.setting for each in ran.contradictions] == ([option] if matters else [])
        assert ran.intended == layout


@pytest.mark.parametrize(
    ("settings", "degrees"),
    [
        ({"tp": 4}, {"tp": 4, "dp": 2}),
        ({"pp": 2}, {"pp": 2, "dp": 2}),
        ({"cp": 2}, {"cp": 2, "dp": 2}),
        ({"devices": 32}, {"dp": 16}),
        ({"devices": 32, "dp": 8, "tp": 4}, {"tp": 4}),
        ({"micro_batch": 2}, {"micro_batch": 2}),
        ({"dp": 8}, {}),
    ],
)
def test_replicas_follow_from_the_devices_of_the_log(
    settings: dict[str, Any], degrees: dict[str, int]
) -> None:
    script = Layout(tp=2, dp=4) if "devices" not in settings else Layout(tp=2, dp=8)
    script = Layout(tp=2, dp=8) if settings == {"dp": 8} else script
    log = TrainingLog(path="train.log", format="megatron", steps=(), settings=settings)
    assert what_ran(_problem(), script, log).intended == replace(script, **degrees)


def test_a_batch_that_grows_is_predicted_at_its_last() -> None:
    steps = tuple(LoggedStep(step=i, global_batch=batch) for i, batch in enumerate((16, 32, 64)))
    log = TrainingLog(path="train.log", format="megatron", steps=steps, settings={"seq_len": 512})
    ran = what_ran(_problem(), Layout(dp=8), log)
    assert (ran.problem.job.global_batch, ran.problem.job.seq_len) == (64, 512)
    assert {each.setting for each in ran.contradictions} == {"global_batch", "seq_len"}
    assert not any(each.is_option for each in ran.contradictions)


def _problem() -> Problem:
    job = Job(global_batch=128, seq_len=4096)
    return Problem(model=catalog.model("llama3-8b"), cluster=catalog.cluster("dgx-h100"), job=job)
