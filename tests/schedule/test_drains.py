"""Schedules that a step runs through several times, with a pipeline that drains each time."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel.errors import LayoutError
from perfmodel.schedule import get_schedule, require_valid, schedule_facts, schedule_names
from perfmodel.schedule.memory import in_flight
from perfmodel.spec import Layout

SYNCHRONOUS = [
    name for name in schedule_names() if not get_schedule(name).asynchronous and name != "forward"
]


@given(
    name=st.sampled_from(["1f1b", "gpipe", "zb-h1"]),
    devices=st.integers(2, 5),
    micro_batches=st.integers(1, 8),
    drains=st.integers(2, 4),
)
def test_a_drained_pipeline_takes_as_long_as_its_runs_together(
    name: str, devices: int, micro_batches: int, drains: int
) -> None:
    """The first stage ends each run, and begins the next one."""
    once = schedule_facts(name, devices, micro_batches)
    several = schedule_facts(f"{name}*{drains}", devices, micro_batches * drains)
    if name == "zb-h1":  # weight gradients at the end of a run fill part of the next one's bubble
        assert several.makespan_s <= drains * once.makespan_s
    else:
        assert several.makespan_s == drains * once.makespan_s
        bubble = (devices - 1) / (micro_batches + devices - 1)
        assert several.makespan_bubble_fraction == pytest.approx(bubble)
    in_one_go = schedule_facts(name, devices, micro_batches * drains)
    assert several.makespan_s >= in_one_go.makespan_s


@pytest.mark.parametrize("name", SYNCHRONOUS)
@pytest.mark.parametrize("drains", [2, 3])
def test_each_run_is_the_schedule_itself(name: str, drains: int) -> None:
    scheduler = get_schedule(f"{name}*{drains}")
    once, several = get_schedule(name)(4, 8), scheduler(4, 8 * drains)
    require_valid(several)
    assert scheduler.label == f"{get_schedule(name).label}*{drains}"
    assert several.n_instructions == drains * once.n_instructions
    assert not several.updates[:-1].any()
    # No run holds more activations than it does alone.
    np.testing.assert_array_equal(np.max(in_flight(several), -1), np.max(in_flight(once), -1))


@pytest.mark.parametrize(
    ("stated", "runs_as"),
    [
        ("1F1B * 4", "1f1b*4"),
        ("DAPPLE*2", "1f1b*2"),
        ("chimera:2*3", "chimera:2*3"),
        ("1f1b*1", "1f1b"),
    ],
)
def test_the_name_is_read_like_any_other(stated: str, runs_as: str) -> None:
    layout = Layout.parse(f"pp=4,schedule={stated}")
    assert layout.effective_schedule == runs_as
    assert Layout.parse(layout.label).effective_schedule == runs_as
    assert Layout.parse("pp=4,vpp=2,schedule=1f1b*3").effective_schedule == "interleaved*3"
    # One stage has no pipeline to drain.
    assert Layout.parse(f"dp=4,schedule={stated}").effective_schedule == "1f1b"


def test_what_cannot_drain_is_refused() -> None:
    with pytest.raises(LayoutError, match="pipedream never drains its pipeline"):
        get_schedule("pipedream*2")
    with pytest.raises(LayoutError, match="runs 3 times in a step, which does not divide its 32"):
        pm.predict("llama3-8b", "dgx-h100", "pp=4,dp=2,schedule=1f1b*3", global_batch=64)
    with pytest.raises(pm.PerfModelError, match="1f1b\\*0"):
        get_schedule("1f1b*0")


def test_a_drained_pipeline_costs_bubbles_and_no_memory() -> None:
    at_once, drained = (
        pm.predict("llama3-8b", "dgx-h100", f"pp=4,dp=2,schedule={name},zero=1", global_batch=64)
        for name in ("1f1b", "1f1b*8")
    )
    # 3 of 7 slots are idle where four micro-batches pass four stages, 3 of 35 where 32 do. The
    # update and unequal stages, which all have, make the difference smaller.
    assert 1.4 < drained.step_time_s / at_once.step_time_s < 8 * 7 / 35
    assert drained.memory.peak == at_once.memory.peak
