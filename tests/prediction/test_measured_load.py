"""Clocks under load that a user's own tables show take the place of those that are computed."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost.learn import MeasuredLoad, fit_calibration
from perfmodel.cost.learn.training import measured_held_shares
from perfmodel.ops import Gemm, Op
from perfmodel.planning.what_if import Scenario, model_in_scenario, parse_setting
from perfmodel.prediction import StepProblem, evaluate, priced_events, step_problem
from perfmodel.prediction.composition import overlap_loss
from perfmodel.prediction.overlap import collective_sm_share
from perfmodel.prediction.sites import EAGER
from perfmodel.spec import Job, Layout

JOB = Job(global_batch=16, seq_len=1024)
MODEL = catalog.model("gpt3-6.7b")
LAYOUT = Layout(tp=8, micro_batch=4)
"""Products that are long enough for no rank to wait for its host."""
PRODUCT = Gemm(op="linear", m=8192, n=8192, k=8192)
FP32_PRODUCT = replace(PRODUCT, dtype="fp32")


def problem_on(cluster: str, *loads: MeasuredLoad) -> StepProblem:
    """A step whose devices were measured under load."""
    problem = step_problem(MODEL, catalog.cluster(cluster), JOB)
    return replace(problem, site=replace(problem.site, loads=loads))


def time_s(problem: StepProblem, op: Op) -> float:
    return float(priced_events(problem, [op]).time_s[0])


@settings(max_examples=20, deadline=None)
@given(
    slowdown=st.floats(0.8, 2.0),
    more=st.floats(1.0, 1.5),
    cluster=st.sampled_from(["dgx-h100", "a10x4"]),
)
def test_a_measured_load_slows_its_kernels_and_no_others(
    slowdown: float, more: float, cluster: str
) -> None:
    device = catalog.cluster(cluster).device
    load = MeasuredLoad(device.name, "gemm", "bf16", slowdown)
    free = problem_on(cluster)
    free = replace(free, site=replace(free.site, power_limited=False, sustained=()))
    measured, more_measured = (
        problem_on(cluster, load),
        problem_on(cluster, load._replace(slowdown=slowdown * more)),
    )

    # Between the time alone and that of nothing but such kernels, and never less for a larger
    # slowdown.
    alone_s = time_s(free, PRODUCT)
    assert (
        alone_s * (1 - 1e-9)
        <= time_s(measured, PRODUCT)
        <= alone_s * max(slowdown, 1.0) * (1 + 1e-9)
    )
    assert time_s(more_measured, PRODUCT) >= time_s(measured, PRODUCT) * (1 - 1e-9)

    # Kernels of other types, and other devices, keep the computed clock.
    assert time_s(measured, FP32_PRODUCT) == time_s(problem_on(cluster), FP32_PRODUCT)
    of_another_device = problem_on(cluster, load._replace(device="another"))
    assert time_s(of_another_device, PRODUCT) == time_s(problem_on(cluster), PRODUCT)


def test_devices_without_a_power_law_take_the_measured_slowdown_as_it_is() -> None:
    load = MeasuredLoad(catalog.cluster("localhost").device.name, "gemm", "fp32", 1.25)
    alone_s = time_s(problem_on("localhost"), FP32_PRODUCT)
    assert time_s(problem_on("localhost", load), FP32_PRODUCT) == pytest.approx(1.25 * alone_s)


def test_a_step_takes_longer_with_a_measured_load() -> None:
    load = MeasuredLoad(catalog.cluster("dgx-h100").device.name, "gemm", "bf16", 3.0)
    usual, slower = (evaluate(problem_on("dgx-h100", *loads), [LAYOUT]) for loads in ((), (load,)))
    assert slower.step_time_s[0] > usual.step_time_s[0]


def test_what_was_measured_under_one_power_limit_does_not_hold_under_another() -> None:
    problem = problem_on(
        "dgx-h100", MeasuredLoad(catalog.cluster("dgx-h100").device.name, "gemm", "bf16", 3.0)
    )
    loads_left = {}
    for name in ("power_limit", "memory_bandwidth"):
        scenario = Scenario((parse_setting(f"{name}=2x"),))
        loads_left[name] = len(model_in_scenario(problem, scenario).site.loads)
    assert loads_left == {"power_limit": 0, "memory_bandwidth": 1}


@settings(max_examples=10, deadline=None)
@given(
    share=st.floats(0.0, 0.6),
    more=st.floats(1.0, 1.5),
    cluster=st.sampled_from(["dgx-h100", "localhost"]),
)
def test_kernels_beside_collectives_slow_down_by_the_measured_share(
    share: float, more: float, cluster: str
) -> None:
    hidden = Layout(dp=4, micro_batch=2)
    problems = []
    for measured_share in (share, share * more):
        machine = catalog.cluster(cluster)
        device = replace(machine.device, collective_sm_share=measured_share)
        problems.append(step_problem(MODEL, replace(machine, device=device), JOB))
    assert [overlap_loss(problem) for problem in problems] == pytest.approx([share, share * more])
    shorter, longer = (evaluate(problem, [hidden]).step_time_s[0] for problem in problems)
    assert longer >= shorter * (1 - 1e-6)


def test_a_measured_share_counts_where_a_framework_overlaps_and_nowhere_else() -> None:
    device = replace(catalog.device("H100-SXM5-80GB"), collective_sm_share=0.3)
    assert collective_sm_share(device, EAGER) == 0.3
    assert collective_sm_share(device, EAGER.replace(contends=False)) == 0
    # Libraries that state their multiprocessors are others than those that were measured.
    assert collective_sm_share(device, EAGER, 20, library_states_channels=True) == pytest.approx(
        20 / device.compute_units
    )


@settings(max_examples=20)
@given(ratios=st.lists(st.floats(0.8, 3.0), min_size=1, max_size=5))
def test_held_shares_are_fitted_to_kernels_alone_and_beside(ratios: list[float]) -> None:
    alone = products("a10x4", len(ratios))
    beside = alone.assign(
        variant="beside_all_reduce_1024_bytes_2_ranks", time_us=alone["time_us"] * ratios
    )
    (fitted,) = measured_held_shares([pd.concat([alone, beside], ignore_index=True)], "gemm")
    shares = [1 - 1 / max(ratio, 1.0) for ratio in ratios]
    assert fitted == (catalog.cluster("a10x4").device.name, pytest.approx(float(np.median(shares))))
    assert measured_held_shares([alone], "gemm") == []
    disturbed = beside.assign(variant="suspect_interference_" + beside["variant"])
    assert measured_held_shares([pd.concat([alone, disturbed], ignore_index=True)], "gemm") == []


def products(cluster: str, number: int = 6) -> pd.DataFrame:
    """A table of matrix products on the device of a cluster."""
    m = 2 ** np.arange(7, 7 + number)
    return pd.DataFrame(
        {
            "source": "perfmodel",
            "device": catalog.cluster(cluster).device.name,
            "op_family": "gemm",
            "op": "linear",
            "dtype": "bf16",
            "m": m,
            "n": 1024,
            "k": 1024,
            "batch": 1,
            "pass": "forward",
            "variant": "",
            "time_us": 5 + 0.02 * m,
        }
    )


def test_a_calibration_of_loaded_kernels_slows_the_steps_that_it_predicts(tmp_path: Path) -> None:
    device, usual = catalog.cluster("a10x4").device.name, products("a10x4")
    loaded = usual.assign(variant="loaded", time_us=1.4 * usual["time_us"])
    beside = usual.assign(
        variant="beside_all_reduce_1024_bytes_2_ranks", time_us=1.25 * usual["time_us"]
    )
    for name, table in (
        ("usual", usual),
        ("loaded", pd.concat([usual, loaded, beside], ignore_index=True)),
    ):
        fit_calibration([table], tmp_path / name, family="gemm")

    cluster = catalog.cluster("a10x4")
    problems = {
        name: step_problem(MODEL, cluster, JOB, tmp_path / name) for name in ("usual", "loaded")
    }
    assert problems["usual"].site.loads == ()
    assert problems["usual"].cluster.device.collective_sm_share is None
    assert problems["loaded"].cluster.device.collective_sm_share == pytest.approx(0.2)
    assert problems["loaded"].site.loads == (
        MeasuredLoad(device, "gemm", "bf16", pytest.approx(1.4)),
    )
    free = replace(
        problems["loaded"], site=replace(problems["loaded"].site, power_limited=False, sustained=())
    )
    assert time_s(free, PRODUCT) < time_s(problems["loaded"], PRODUCT)
