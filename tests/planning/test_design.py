"""Inverse questions: the answers are what forward predictions say."""

from dataclasses import replace

import pytest

from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.planning.design import devices_for, memory_to_fit, overtake, rank_upgrades
from perfmodel.planning.layouts import ask, default_space, restrict, search
from perfmodel.planning.what_if import Scenario, in_scenario, step_s
from perfmodel.prediction import explain, step_problem
from perfmodel.spec import Job, Layout, Problem
from perfmodel.units import MIN_FIT

MODEL, CLUSTER, JOB = (
    catalog.model("gpt3-1.3b"),
    catalog.cluster("dgx-a100"),
    Job(global_batch=64, seq_len=2048),
)
PROBLEM = Problem(model=MODEL, cluster=CLUSTER, job=JOB, devices=16)


def with_memory(n_bytes):
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, memory_bytes=n_bytes))
    return step_problem(MODEL, cluster, JOB)


@pytest.mark.parametrize("text", ["8M4P1D", "tp=1,pp=1,dp=16,zero=3,recompute=full"])
def test_memory_is_just_enough(text):
    layout = Layout.parse(text)
    need = memory_to_fit(step_problem(MODEL, CLUSTER, JOB), layout)
    assert explain(with_memory(need.memory_bytes * (1 + 1e-9)), layout).fits
    assert not explain(with_memory(need.memory_bytes * (1 - 1e-6)), layout).fits
    assert catalog.device(need.devices[0]).memory_bytes >= need.likely_bytes >= need.memory_bytes
    # Fragmentation may ask for more than the probability does.
    likely = explain(with_memory(need.likely_bytes), layout).fits_probability
    assert likely >= MIN_FIT - 1e-9
    assert (
        need.fits_probability == explain(step_problem(MODEL, CLUSTER, JOB), layout).fits_probability
    )
    assert sum(need.parts_bytes.values()) == pytest.approx(need.peak_bytes)


def test_fewest_devices():
    space = restrict(
        default_space(PROBLEM, fewer_devices=True),
        "micro_batch=1,zero=1,vpp=1",
    )
    question = ask(MODEL, CLUSTER, devices=16, global_batch=64, job=JOB, space=space)
    limit_s = 1.5
    found = devices_for(question, limit_s)
    assert found.step_time_s < limit_s
    assert found.devices is not None
    assert found.devices == Layout.parse(found.layout).devices > 1
    fewer = ask(MODEL, CLUSTER, devices=found.devices - 1, global_batch=64, job=JOB, space=space)
    assert devices_for(fewer, limit_s).devices is None
    assert devices_for(question, 1e-3).devices is None


def test_layouts_are_equal_at_the_multiple():
    problem = step_problem(MODEL, CLUSTER, JOB)
    first, second = Layout.parse("dp=64"), Layout.parse("tp=4,pp=4,dp=4")
    found = overtake(problem, first, second)
    assert found.multiple is not None
    there = Scenario.parse([f"inter_node_bandwidth={found.multiple}x"])
    ends = [step_s(problem, layout, there) for layout in (first, second)]
    assert ends[0] == pytest.approx(ends[1], rel=5e-3)
    now = step_s(problem, first, Scenario()) < step_s(problem, second, Scenario())
    assert now == (found.first_s < found.second_s)
    same = overtake(problem, first, first.replace(recompute="full"))
    assert same.multiple is None
    with pytest.raises(UnknownNameError):
        overtake(problem, first, second, "bandwidth")


def test_upgrades_are_what_a_search_on_the_better_machine_finds():
    space = restrict(default_space(PROBLEM), "micro_batch=1,zero=1,vpp=1")
    question = ask(MODEL, CLUSTER, devices=16, global_batch=64, job=JOB, space=space)
    prices = {"compute_rate": 100.0, "inter_node_bandwidth": 1.0}
    found = rank_upgrades(question, share=0.5, prices=prices)
    by_name = {upgrade.parameter: upgrade for upgrade in found.upgrades}
    assert len(by_name) == 7
    for name in ("compute_rate", "inter_node_bandwidth"):
        upgrade = by_name[name]
        better = search(
            MODEL,
            CLUSTER,
            devices=16,
            global_batch=64,
            job=JOB,
            space=space,
            top=1,
            settings=[f"{name}=1.5x"],
        )
        assert 1 - better.layouts[0].step_time_s / found.step_time_s == pytest.approx(
            upgrade.gain, abs=1e-4
        )
        assert upgrade.gain_per_price == pytest.approx(upgrade.gain / prices[name])
    now = Layout.parse(found.layout)
    now_s = step_s(question.step_problem, now, Scenario())
    for upgrade in found.upgrades:
        is_latency = upgrade.parameter.endswith("latency")
        assert upgrade.change == ("-50%" if is_latency else "+50%")
        better = Scenario.parse([f"{upgrade.parameter}={0.5 if is_latency else 1.5}x"])
        kept_gain = 1 - step_s(question.step_problem, now, better) / now_s
        assert upgrade.kept_gain == pytest.approx(kept_gain, abs=1e-9)
        assert upgrade.gain >= upgrade.kept_gain - 1e-6
        assert upgrade.changes_layout == (upgrade.layout != found.layout)
    slopes = in_scenario(question.step_problem, now, Scenario()).sensitivity
    assert {name: by_name[name].elasticity for name in slopes} == pytest.approx(slopes)
    assert by_name["memory_bytes"].elasticity == by_name["memory_bytes"].kept_gain == 0.0
    ranked = [u.gain_per_price for u in found.upgrades if u.price]
    assert ranked == sorted(ranked, reverse=True)
    assert len(found.to_frame()) == 7
    with pytest.raises(PerfModelError, match="between 0 and 1"):
        rank_upgrades(question, share=2)
    with pytest.raises(UnknownNameError):
        rank_upgrades(question, prices={"network": 1.0})


def test_command(capsys):
    job = ["--model", "gpt3-1.3b", "--cluster", "dgx-a100", "--global-batch", "64"]
    assert main(["design", "memory", *job, "--layout", "8M4P1D"]) == 0
    assert "fits with" in capsys.readouterr().out
    assert (
        main(
            [
                "design",
                "devices",
                *job,
                "--devices",
                "8",
                "--below",
                "3",
                "--fix",
                "micro_batch=1,zero=1",
            ]
        )
        == 0
    )
    assert "devices:" in capsys.readouterr().out
    assert (
        main(["design", "overtake", *job, "--layout", "dp=64", "--against", "tp=4,pp=4,dp=4"]) == 0
    )
    assert "both take" in capsys.readouterr().out
    assert main(["design", "devices", *job, "--below", "3"]) == 2
    assert (
        main(["design", "upgrade", *job, "--devices", "8", "--upgrade-price", "memory_bytes"]) == 2
    )
    assert "NAME=MONEY" in capsys.readouterr().err
