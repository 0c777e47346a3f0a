"""Goodput: the closed form against a simulation of a run, the best interval against Young and Daly,
published runs."""

import json
from math import sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.cli import main
from perfmodel.errors import PerfModelError
from perfmodel.planning.goodput import Reliability, best_interval_s, goodput, goodput_fraction
from perfmodel.prediction.memory import checkpoint_bytes

times = st.floats(1.0, 1e4)


def simulated(interval_s, stall_s, hidden_s, restart_s, mtbf_s, failures=4000):
    """Share of useful time of a run that is lived through second by second, from failure to
    failure."""
    rng, clock_s, kept_s = np.random.default_rng(1), 0.0, 0.0
    for _ in range(failures):
        fails_s = clock_s + rng.exponential(mtbf_s)
        now_s, saved_s, trained_s, writing = clock_s + restart_s, kept_s, kept_s, []
        while now_s < fails_s:
            now_s, trained_s = now_s + interval_s + stall_s, trained_s + interval_s
            writing.append((now_s + hidden_s, trained_s))
        saved_s = max([saved_s, *(work_s for written_s, work_s in writing if written_s <= fails_s)])
        clock_s, kept_s = fails_s, saved_s
    return kept_s / clock_s


@pytest.mark.parametrize(
    ("interval_s", "stall_s", "hidden_s", "restart_s", "mtbf_s"),
    [
        (600, 30, 0, 300, 10000),
        (600, 30, 0, 0, 1000),
        (600, 5, 400, 300, 3000),
        (100, 1, 90, 10, 500),
        (3000, 300, 0, 900, 2000),
    ],
)
def test_the_closed_form_is_what_a_simulated_run_comes_to(
    interval_s, stall_s, hidden_s, restart_s, mtbf_s
):
    case = (interval_s, stall_s, hidden_s, restart_s, mtbf_s)
    assert goodput_fraction(*case) == pytest.approx(simulated(*case), rel=0.04)


@given(stall_s=times, mtbf_s=st.floats(10.0, 1e6), restart_s=times, factor=st.floats(0.2, 5.0))
def test_no_interval_is_better_than_the_best(stall_s, mtbf_s, restart_s, factor):
    best_s = best_interval_s(stall_s, mtbf_s)
    best = goodput_fraction(best_s, stall_s, 0, restart_s, mtbf_s)
    assert goodput_fraction(best_s * factor, stall_s, 0, restart_s, mtbf_s) <= best * (1 + 1e-9)


@pytest.mark.parametrize("ratio", [1e-5, 1e-4, 1e-3, 1e-2])
def test_young_and_daly_are_orders_of_the_best_interval(ratio):
    mtbf_s, x = 1e4, sqrt(ratio / 2)
    young_s = sqrt(2 * ratio) * mtbf_s
    daly_s = young_s * (1 + x / 3 + x**2 / 9) - ratio * mtbf_s
    best_s = best_interval_s(ratio * mtbf_s, mtbf_s)
    assert best_s == pytest.approx(young_s, rel=2 * x)
    assert best_s == pytest.approx(daly_s, rel=x**3)


def test_few_failures_cost_what_first_orders_say():
    stall_s, mtbf_s, restart_s = 10.0, 1e6, 100.0
    best_s = best_interval_s(stall_s, mtbf_s)
    loss = 1 - goodput_fraction(best_s, stall_s, 0, restart_s, mtbf_s)
    assert loss == pytest.approx(sqrt(2 * stall_s / mtbf_s) + restart_s / mtbf_s, rel=0.01)


@given(st.floats(1e2, 1e7), st.floats(1.01, 10.0))
def test_more_failures_never_help(mtbf_s, factor):
    more, fewer = (goodput_fraction(500, 10, 50, 300, m) for m in (mtbf_s, mtbf_s * factor))
    assert 0 <= more <= fewer < 500 / 510


def test_llama_3_trains_most_of_the_time():
    """arXiv 2407.21783, section 3.3.4: effective training time above 90 %, 419 unexpected
    interruptions in 54 days."""
    problem = pm.problem("llama3-405b", "dgx-h100", global_batch=2048)
    found = goodput(problem, pm.Layout(tp=8, dp=2048), 10.0)
    assert found.mtbf_s == pytest.approx(54 * 86400 / 419)
    # bf16, fp32 master and two moments
    assert found.checkpoint_bytes == pytest.approx(405e9 * 14, rel=0.01)
    assert found.write_s == pytest.approx(found.checkpoint_bytes / 2e12)
    # Ten minutes until it goes on (MegaScale, arXiv 2402.15627, section 6.3), then the checkpoint
    # is read.
    assert found.restart_s == pytest.approx(600 + found.write_s)
    assert round(found.fraction, 2) == 0.93  # as the documentation says
    assert found.fraction + found.checkpointing + found.failing == pytest.approx(1)


def test_checkpoints_beside_training_cost_less_and_are_not_closer_than_their_writing():
    problem, layout = pm.problem("llama3-70b", "h100", global_batch=1024), pm.Layout(tp=8, dp=128)
    slow = {"storage_bytes_per_s": 1e9}
    waiting, beside = (
        goodput(problem, layout, 10.0, Reliability(**slow, asynchronous=a)) for a in (False, True)
    )
    assert (
        waiting.stall_s
        == waiting.write_s
        == pytest.approx(checkpoint_bytes(problem.model, problem.job) / 1e9)
    )
    assert beside.stall_s == pytest.approx(
        checkpoint_bytes(problem.model, problem.job) / 1024 / 63e9
    )
    assert beside.fraction > waiting.fraction
    assert beside.interval_s + beside.stall_s >= beside.write_s
    assert (
        goodput(problem, layout, 10.0, Reliability(**slow, interval_s=1e4)).fraction
        < waiting.fraction
    )


@pytest.mark.parametrize(
    "wrong", [{"device_mtbf_s": 0}, {"restart_s": -1}, {"storage_bytes_per_s": float("nan")}]
)
def test_impossible_reliability_is_refused(wrong):
    with pytest.raises(PerfModelError, match=next(iter(wrong))):
        Reliability(**wrong)


def test_a_run_that_never_gets_on_says_why():
    problem = pm.problem("llama3-405b", "h100", global_batch=2048)
    with pytest.raises(
        PerfModelError, match="the run makes no progress; give a longer time between failures"
    ):
        goodput(problem, pm.Layout(tp=8, dp=2048), 10.0, Reliability(device_mtbf_s=1e4))


BY_STAGE = pm.problem("gpt3-6.7b", "dgx-a100", global_batch=64)
TERA: dict[str, Any] = {"storage_bytes_per_s": 1e12, "device_mtbf_s": 1e7, "restart_s": 100.0}


@pytest.mark.parametrize(
    "text", ["pp=4", "tp=2,pp=4,dp=2,zero=1", "pp=4,vpp=2", "pp=4,schedule=chimera"]
)
def test_stages_write_the_whole_checkpoint_between_them(text):
    layout = pm.Layout.parse(text)
    found = goodput(BY_STAGE, layout, 1.0, Reliability(**TERA, by_stage=True))
    whole = checkpoint_bytes(BY_STAGE.model, BY_STAGE.job)
    assert (
        sum(stage.bytes for stage in found.stages) == pytest.approx(whole) == found.checkpoint_bytes
    )
    assert len(found.stages) == layout.pp
    # every stage has a quarter of the storage's rate: the largest writes longest, and all wait for
    # it
    largest = max(stage.bytes for stage in found.stages)
    assert found.write_s == found.stall_s == found.reload_s == pytest.approx(largest * 4 / 1e12)
    together = goodput(BY_STAGE, layout, 1.0, Reliability(**TERA))
    assert together.write_s == pytest.approx(whole / 1e12)
    assert together.write_s <= found.write_s * (1 + 1e-12)


def test_a_stage_holds_its_layers_share():
    layout = pm.Layout(pp=4, partition=(4, 8, 12, 8))
    stages = goodput(BY_STAGE, layout, 1.0, Reliability(**TERA, by_stage=True)).stages
    assert stages[2].bytes / stages[1].bytes == pytest.approx(12 / 8)  # neither embedding nor head
    sharded = goodput(
        BY_STAGE, layout.replace(tp=4, dp=4, zero=3), 1.0, Reliability(**TERA, by_stage=True)
    )
    assert [s.bytes for s in sharded.stages] == pytest.approx([s.bytes for s in stages], rel=1e-3)


def test_one_stage_is_read_alone_where_the_others_hold_their_copy():
    """All go back to the same version: those that did not fail from host memory, if they copied it
    there."""
    layout = pm.Layout(pp=4, partition=(2, 6, 16, 8))
    waiting, beside = (
        goodput(BY_STAGE, layout, 1.0, Reliability(**TERA, by_stage=True, asynchronous=a))
        for a in (False, True)
    )
    assert waiting.reload_s == max(stage.write_s for stage in waiting.stages)
    assert beside.reload_s == pytest.approx(sum(stage.write_s for stage in beside.stages) / 4)
    whole = checkpoint_bytes(BY_STAGE.model, BY_STAGE.job)
    # a stage in four, at a quarter of the rate
    assert beside.reload_s == pytest.approx(whole / 1e12)
    assert beside.restart_s == pytest.approx(100 + beside.reload_s)
    host = BY_STAGE.cluster.device.host_bandwidth_bytes_per_s
    assert host
    slow = {**TERA, "storage_bytes_per_s": 1e9}
    copied = goodput(BY_STAGE, layout, 1.0, Reliability(**slow, by_stage=True, asynchronous=True))
    assert copied.stall_s == pytest.approx(max(stage.bytes for stage in copied.stages) / host)


@pytest.mark.parametrize(
    ("schedule", "under_way"),
    [("1f1b", 1), ("pipedream", 4), ("pipedream-2bw", 2), ("nf1b:1", 1), ("nf1b:8", 3)],
)
def test_pipelines_without_a_flush_fill_again(schedule, under_way):
    """(v - 1) steps after a failure; at checkpoints too where all stages stop for one, but not
    where each writes its own."""
    layout, step_s = pm.Layout(pp=4, micro_batch=16, schedule=schedule), 7.0
    alone, together = (
        goodput(BY_STAGE, layout, step_s, Reliability(**TERA, by_stage=b)) for b in (True, False)
    )
    refill_s = (under_way - 1) * step_s
    assert alone.under_way == together.under_way == under_way
    assert alone.restart_s == pytest.approx(100 + alone.reload_s + refill_s)
    assert alone.stall_s == max(stage.write_s for stage in alone.stages)
    whole_s = checkpoint_bytes(BY_STAGE.model, BY_STAGE.job) / 1e12
    assert together.stall_s == pytest.approx(whole_s + refill_s)
    assert (alone.fraction > together.fraction) == (under_way > 1)


def test_lost_steps_are_half_an_interval_where_failures_are_rare():
    layout = pm.Layout(pp=4)
    given = Reliability(
        device_mtbf_s=1e9, storage_bytes_per_s=1e15, restart_s=50, interval_s=600, by_stage=True
    )
    found = goodput(BY_STAGE, layout, 2.0, given)
    assert found.lost_steps == pytest.approx(600 / 2 / 2.0, rel=1e-3)


def test_stage_checkpoints_from_the_command_line(capsys):
    said = [
        "predict",
        "--model",
        "vgg-16",
        "--cluster",
        "timeprest",
        "--global-batch",
        "128",
        "--dtype",
        "fp32",
    ]
    said += [
        "--layout",
        "pp=2,schedule=nf1b,micro_batch=32",
        "--tokens",
        "1e6",
        "--stage-checkpoints",
    ]
    assert main([*said, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["goodput"]
    assert sum(stage["bytes"] for stage in found["stages"]) == pytest.approx(
        found["checkpoint_bytes"]
    )
    assert main(said) == 0
    assert "by stage (" in capsys.readouterr().out
