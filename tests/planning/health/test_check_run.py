"""Runs that are simulated with a fault and written as logs of eight frameworks: the check names the
fault."""

from pathlib import Path

import pytest
from simulated_runs import (
    LAUNCH_FILES,
    STEPS,
    SimulatedRun,
    checked,
    coloured,
    job,
    of_two_ranks,
    resumed,
)
from written_logs import WrittenRun, write_log

import perfmodel as pm
from perfmodel.cli import samples
from perfmodel.errors import PerfModelError
from perfmodel.ingest.logs import parse_log
from perfmodel.planning.health import check_run
from perfmodel.prediction import step_problem_of
from perfmodel.spec import Layout, Problem

SICK = {
    "slow link, with timers": SimulatedRun(
        form="megatron",
        job="megatron 8b",
        settings=("inter_node_bandwidth=0.08x",),
        timers=True,
        cause="slow_inter_node_link",
    ),
    "slow link": SimulatedRun(
        form="torchtitan",
        job="torchtitan",
        settings=("inter_node_bandwidth=0.06x",),
        cause="slow_inter_node_link",
    ),
    "one slow rank, with timers": SimulatedRun(
        form="megatron",
        job="megatron 70b",
        settings=("slow_rank=2", "slow_factor=1.3x"),
        timers=True,
        cause="slow_rank",
    ),
    "one slow rank": SimulatedRun(
        form="composer",
        job="composer",
        settings=("slow_rank=0", "slow_factor=1.35x"),
        cause="slow_rank",
    ),
    "one slow rank under DeepSpeed": SimulatedRun(
        form="deepspeed",
        job="deepspeed 8b",
        settings=("slow_rank=0", "slow_factor=1.4x"),
        cause="slow_rank",
    ),
    "one slow rank under MaxText": SimulatedRun(
        form="maxtext",
        job="maxtext",
        settings=("slow_rank=0", "slow_factor=1.5x"),
        cause="slow_rank",
    ),
    "slow hosts under NeMo": SimulatedRun(
        form="nemo", job="nemo", settings=("host_op_s=2.5x",), cause="host_bound"
    ),
    "slow hosts under nanotron": SimulatedRun(
        form="nanotron", job="nanotron", settings=("host_op_s=3x",), cause="host_bound"
    ),
    "overlap flags do not reach the run": SimulatedRun(
        form="megatron-bridge",
        job="megatron 8b",
        options={"overlap_grad_reduce": False, "overlap_param_gather": False},
        logs_options=True,
        cause="overlap_off",
    ),
    "overlap flags, not in the log": SimulatedRun(
        form="torchtitan",
        job="torchtitan",
        options={"overlap_grad_reduce": False, "overlap_param_gather": False},
        cause="overlap_off",
    ),
    "loader runs dry": SimulatedRun(
        form="hf-trainer",
        job="hf 8b",
        stall_s=dict.fromkeys(range(25, STEPS, 25), 30.0),
        cause="periodic_stalls",
    ),
    "loader behind every step": SimulatedRun(
        form="megatron", job="megatron 8b", timers=True, loader_s=1.0, cause="data_loading"
    ),
    "checkpoints": SimulatedRun(
        form="megatron",
        job="megatron 70b",
        saves=dict.fromkeys(range(40, STEPS, 40), 90.0),
        cause="checkpoints",
    ),
    "evaluations under Composer": SimulatedRun(
        form="composer",
        job="composer",
        evaluations=dict.fromkeys(range(30, STEPS, 30), 60.0),
        cause="evaluations",
    ),
    "evaluations under torchtitan, coloured": SimulatedRun(
        form="torchtitan",
        job="torchtitan",
        evaluations=dict.fromkeys(range(30, STEPS, 30), 60.0),
        spoil=coloured,
        cause="evaluations",
    ),
    "slower and slower under levanter": SimulatedRun(
        form="levanter", job="levanter 8b", slower_later=1.3, cause="slows_down"
    ),
    "slower at once under MaxText, of two ranks": SimulatedRun(
        form="maxtext",
        job="maxtext",
        slower_later=1.4,
        slower_from=70,
        spoil=of_two_ranks,
        cause="slows_down",
    ),
    "whole layers recomputed, in the log": SimulatedRun(
        form="megatron",
        job="megatron 8b",
        options={"recompute": "full"},
        logs_options=True,
        cause="full_recompute",
    ),
    "slow links inside nodes, with timers": SimulatedRun(
        form="megatron",
        job="megatron 70b",
        settings=("intra_node_bandwidth=0.12x",),
        timers=True,
        cause="slow_intra_node_link",
    ),
    "all devices at low clocks": SimulatedRun(
        form="megatron",
        job="megatron 70b",
        settings=("compute_rate=0.6x", "power_limit=0.6x"),
        cause="low_clocks",
    ),
    "gradients overflow under DeepSpeed": SimulatedRun(
        form="deepspeed",
        job="deepspeed 8b",
        skipped=range(10, STEPS, 8),
        spoil=coloured,
        cause="skipped_steps",
    ),
    "slow storage now and then, resumed on another node": SimulatedRun(
        form="nemo",
        job="nemo",
        stall_s=dict.fromkeys((21, 33, 38, 70, 91, 120, 127), 40.0),
        spoil=resumed,
        cause="irregular_stalls",
    ),
    "one slow rank under nanotron, of two ranks": SimulatedRun(
        form="nanotron",
        job="nanotron",
        settings=("slow_rank=0", "slow_factor=1.4x"),
        spoil=of_two_ranks,
        cause="slow_rank",
    ),
    "slow link under levanter": SimulatedRun(
        form="levanter",
        job="levanter 8b",
        settings=("inter_node_bandwidth=0.1x",),
        cause="slow_inter_node_link",
    ),
}


def first_cause(name: str) -> str:
    return checked(SICK[name]).causes[0].name


@pytest.mark.slow
def test_the_true_cause_is_named_first_in_eight_of_ten() -> None:
    wrong = {name: cause for name in SICK if (cause := first_cause(name)) != SICK[name].cause}
    assert len(wrong) <= 0.2 * len(SICK), wrong


def test_eight_frameworks_are_among_the_sick_runs() -> None:
    assert len({run.form for run in SICK.values()}) >= 8


@pytest.mark.parametrize(
    "name", [n for n, run in SICK.items() if run.logs_options or run.timers or run.saves]
)
def test_what_the_log_shows_itself_is_always_found(name: str) -> None:
    assert first_cause(name) == SICK[name].cause


@pytest.mark.parametrize(
    ("form", "name"),
    [
        ("megatron", "megatron 8b"),
        ("megatron-bridge", "megatron 70b"),
        ("nemo", "nemo"),
        ("torchtitan", "torchtitan"),
        ("nanotron", "nanotron"),
        ("deepspeed", "deepspeed 8b"),
        ("hf-trainer", "hf 8b"),
        ("maxtext", "maxtext"),
        ("composer", "composer"),
        ("levanter", "levanter 8b"),
    ],
)
def test_a_healthy_run_is_called_healthy(form: str, name: str) -> None:
    health = checked(SimulatedRun(form=form, job=name))
    assert health.healthy, health
    assert not health.contradictions
    assert not health.remarks
    assert health.no_fault_probability > 0.3
    assert abs(health.excess_share) < 0.2
    assert health.suspected is None
    # Causes are guessed where a fault is likelier than none.
    assert ("likeliest causes" in str(health)) == (
        bool(health.causes) and health.no_fault_probability <= 0.5
    )


def test_a_likely_fault_behind_a_usual_step_is_in_doubt() -> None:
    """The step is one that many sites have, but the timers of this one show where it spends it."""
    slow_link = SimulatedRun(
        form="megatron", job="llama 70b", settings=("inter_node_bandwidth=0.3x",), timers=True
    )
    health = checked(slow_link)
    assert health.slower_than < 0.9
    assert health.suspected == health.causes[0]
    assert health.verdict.startswith("in doubt: network between nodes below its rate (probability ")


def test_a_run_with_a_certain_fault_is_not_healthy() -> None:
    health = checked(SICK["one slow rank, with timers"])
    assert not health.healthy
    assert health.fault is not None
    assert health.fault.name == "slow_rank"
    assert "one slow device" in health.verdict


def test_what_is_named_is_worth_naming_and_no_more_than_the_excess() -> None:
    for name in ("slow link", "one slow rank", "slow hosts under nanotron"):
        health = checked(SICK[name])
        excess_s = health.series.usual_s - health.prediction.step_time_s
        assert len(health.causes) <= 3
        assert health.healthy or health.causes[0].title in health.verdict
        for cause in health.causes:
            assert 0.01 * health.typical_site_s < cause.explains_s <= excess_s * (1 + 1e-9)
            assert 0 < cause.probability <= 1
            assert cause.remedy
        assert (
            sum(cause.probability for cause in health.causes) + health.no_fault_probability
            <= 1 + 1e-9
        )
        assert health.next_measurement


def test_text_and_json_tell_the_same() -> None:
    health = checked(SICK["checkpoints"])
    text, values = str(health), health.to_dict()
    assert values["verdict"] in text
    assert values["causes"][0]["title"] in text
    assert values["stalls"][0]["every"] == 40
    assert "every 40 steps" in text
    assert "next" not in text  # the log reports checkpoints by name
    assert len(text.splitlines()) <= 40
    assert values["predicted"]["step_time_lo_s"] < values["predicted"]["step_time_s"]
    assert values["good_site_s"] < values["typical_site_s"]


# ---- contradictions ----


def log_of(problem: Problem, layout: Layout, **changes: object) -> str:
    settings = {
        "world_size": layout.devices,
        "global_batch_size": problem.job.global_batch,
    } | changes
    run = WrittenRun(
        step_s=[9.0] + [3.0] * 8,
        devices=layout.devices,
        global_batch=int(str(settings["global_batch_size"])),
        seq_len=problem.job.seq_len,
        flops_per_token=step_problem_of(problem).flops
        / problem.job.global_batch
        / problem.job.seq_len,
        settings=settings,
    )
    return write_log("megatron", run)


@pytest.mark.parametrize(
    ("argument", "value", "sentence"),
    [
        ("tensor_model_parallel_size", 4, "tp is 4 in the log and 2 in the script"),
        ("world_size", 32, "devices is 32 in the log and 64 in the script"),
        ("global_batch_size", 256, "global_batch is 256 in the log and 128 in the script"),
        ("micro_batch_size", 2, "micro_batch is 2 in the log and 1 in the script"),
        ("seq_length", 4096, "seq_len is 4096 in the log and 8192 in the script"),
    ],
)
def test_another_job_in_the_log_is_said_and_predicted(
    argument: str, value: int, sentence: str
) -> None:
    problem, layout = job("megatron 8b")
    health = check_run(problem, layout, parse_log(log_of(problem, layout, **{argument: value})))
    assert sentence in health.contradictions
    plain = check_run(problem, layout, parse_log(log_of(problem, layout)))
    assert not plain.contradictions
    assert health.prediction.step_time_s != plain.prediction.step_time_s


def test_options_of_the_log_are_compared_only_where_they_matter() -> None:
    problem, layout = job("megatron 70b")
    text = log_of(
        problem,
        layout,
        overlap_param_gather=layout.overlap.overlap_param_gather,
        context_parallel_size=1,
    )
    assert not check_run(problem, layout, parse_log(text)).contradictions


def test_a_log_of_another_model_is_noticed() -> None:
    problem, layout = job("megatron 8b")
    larger, _ = job("megatron 70b")
    text = log_of(problem, layout)
    assert not check_run(problem, layout, parse_log(text)).remarks
    flops = step_problem_of(larger).flops / larger.job.global_batch / larger.job.seq_len
    run = WrittenRun(
        step_s=[3.0] * 9,
        devices=64,
        global_batch=128,
        seq_len=problem.job.seq_len,
        flops_per_token=flops,
    )
    health = check_run(problem, layout, parse_log(write_log("megatron", run)))
    assert any("FLOPs per token" in remark for remark in health.remarks)


def test_a_log_that_cannot_be_of_the_script_is_refused() -> None:
    problem, layout = job("megatron 8b")
    with pytest.raises(PerfModelError, match="check that the log belongs to this script"):
        check_run(problem, layout, parse_log(log_of(problem, layout, world_size=63)))


def test_a_log_too_short_is_refused() -> None:
    problem, layout = job("megatron 8b")
    text = write_log("megatron", WrittenRun(step_s=[3.0, 3.0, 3.0], global_batch=128))
    with pytest.raises(PerfModelError, match="Give a longer log"):
        check_run(problem, layout, parse_log(text))


# ---- runs for a fit ----


def test_scripts_with_their_logs_are_runs(tmp_path: Path) -> None:
    script = LAUNCH_FILES / "torchtitan_8b.toml"
    problem, layout = job("torchtitan")
    for name, seconds in (("one", 1.3), ("two", 1.4)):
        run = WrittenRun(step_s=[5.0] + [seconds] * 9, global_batch=64, seq_len=problem.job.seq_len)
        (tmp_path / f"{name}.log").write_text(write_log("torchtitan", run))
    pairs = [(script, tmp_path / "one.log"), (script, tmp_path / "two.log")]
    runs = pm.runs_of_logs(pairs, "dgx-h100", devices=64)
    assert [run.name for run in runs] == ["one.log", "two.log"]
    assert [run.measured_s for run in runs] == pytest.approx([1.3, 1.4], rel=1e-3)
    assert all(run.layout == layout and run.job == problem.job for run in runs)


def test_a_run_has_the_options_that_its_log_states(tmp_path: Path) -> None:
    script = tmp_path / "train.sh"
    script.write_text(samples()["train.sh"])
    launch = pm.read_launch(script)
    assert launch.layout is not None
    problem = launch.problem("dgx-h100")
    (tmp_path / "train.log").write_text(log_of(problem, launch.layout, overlap_grad_reduce=True))
    (run,) = pm.runs_of_logs([(script, tmp_path / "train.log")], "dgx-h100")
    assert not launch.layout.overlap.overlap_grad_reduce
    assert run.layout.overlap.overlap_grad_reduce


def test_a_check_is_a_page_with_its_steps_and_causes(tmp_path: Path) -> None:
    health = checked(SICK["checkpoints"])
    health.write(tmp_path / "check.html")
    page = (tmp_path / "check.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert "<svg" in page
    assert health.verdict in page
    for cause in health.causes:
        assert cause.title in page
    assert "http" not in page.replace("http-equiv", "")
