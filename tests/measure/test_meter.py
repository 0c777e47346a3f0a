import os
from collections.abc import Callable
from pathlib import Path

import pytest

from perfmodel.measure import usable_cores
from perfmodel.measure.timing import (
    MachineMeter,
    NoMeter,
    OwnCoreMeter,
    Reading,
    busy_s,
    host_meter,
    pinned_to_one_core,
    wait_until_quiet,
)

STAT = """cpu  300 0 100 900 50 0 0 10 60 0
cpu0 100 10 50 400 50 1 2 5 60 10
cpu1 200 0 50 500 0 0 0 5 0 0
intr 1
"""


def test_busy_time_leaves_idle_waiting_interrupts_and_guests_out(tmp_path: Path):
    (tmp_path / "stat").write_text(STAT)
    tick_s = 1 / os.sysconf("SC_CLK_TCK")
    assert busy_s((0,), tmp_path / "stat") == pytest.approx((100 + 10 + 50 + 5) * tick_s)
    assert busy_s((0, 1), tmp_path / "stat") == pytest.approx((165 + 255) * tick_s)


def test_own_core_meter_counts_what_the_thread_did_not_get():
    meter = OwnCoreMeter(
        wall_clock=iter([10.0, 12.0]).__next__, own_clock=iter([5.0, 6.5]).__next__
    )
    assert meter.interference(meter.read(), meter.read()) == pytest.approx(0.25)


def test_machine_meter_takes_own_time_off_the_busy_time_of_all_cores(tmp_path: Path):
    stat = tmp_path / "stat"
    stat.write_text(STAT)
    meter = MachineMeter((0, 1), wall_clock=iter([0.0, 10.0]).__next__, stat=stat)
    before = meter.read(own_s=1.0)
    hz = os.sysconf("SC_CLK_TCK")
    # core 1 works for 8 s more, 5 s of them for the measured processes
    stat.write_text(STAT.replace("cpu1 200", f"cpu1 {200 + 8 * hz}"))
    assert meter.interference(before, meter.read(own_s=6.0)) == pytest.approx(3.0 / 20.0)


def test_waits_for_a_quiet_machine_as_long_as_patience_lasts():
    assert wait_until_quiet(0.1, 60.0, _shares(0.9, 0.5, 0.05)) == 1.0
    assert wait_until_quiet(0.1, 1.0, _shares(*[0.9] * 9)) == 1.0
    assert wait_until_quiet(0.1, 0.0, _shares()) == 0.0
    assert wait_until_quiet(1.1, 1.0) == 0.0


def _shares(*shares: float) -> Callable[[float], float]:
    left = iter(shares)
    return lambda duration_s: next(left)


def test_shares_stay_between_zero_and_one():
    meter = OwnCoreMeter()
    assert meter.interference(Reading(0, 0, 0), Reading(1.0, 1.2, 1.0)) == 0.0
    assert meter.interference(Reading(0, 0, 0), Reading(1.0, 0.0, 3.0)) == 1.0
    assert meter.interference(Reading(1, 0, 0), Reading(1, 0, 0)) == 0.0
    assert NoMeter().interference(NoMeter().read(), NoMeter().read()) == 0.0


def test_pinning_leaves_one_core_and_is_undone():
    before = usable_cores()
    with pinned_to_one_core():
        assert usable_cores() == before[-1:]
        assert isinstance(host_meter(), OwnCoreMeter)
    assert usable_cores() == before
