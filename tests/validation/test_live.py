"""Live validation on a few small configurations: calibrated, predicted, run for real and
compared."""

import json

import pytest
from studies.live import LiveReport, LiveResult, LiveSettings, live_report, validate_live
from studies.live_cases import LiveCase, check_cases, live_cases

from perfmodel.ir.distribute import Degrees
from perfmodel.ir.execution import PairTimes
from perfmodel.measure.ranks import unavailable

needs_hosts = pytest.mark.skipif(
    bool(unavailable()), reason=f"hosts cannot be emulated here: {unavailable()}"
)


def test_there_are_forty_configurations_and_none_belongs_to_the_calibration():
    cases = live_cases()
    assert len(set(cases)) == len(cases) >= 40
    assert {case.ranks for case in cases} == {2, 4, 8}
    assert not set(cases) & set(check_cases())
    assert all(case.ranks == 2 for case in check_cases())
    schedules = {case.degrees.schedule for case in cases if case.degrees.pipeline > 1}
    assert schedules == {"gpipe", "1f1b", "interleaved"}
    assert {case.degrees.zero for case in cases} == {0, 1, 2, 3}


def configuration(ranks: int, measured_s: float) -> LiveResult:
    return LiveResult(
        case="a configuration",
        ranks=ranks,
        predicted_s=measured_s,
        lo_s=0.9 * measured_s,
        hi_s=1.1 * measured_s,
        measured_s=measured_s,
        noise=0.0,
        device_error=0.0,
        stage_error=0.0,
        set_aside=0,
        disturbed=False,
    )


def test_profiling_cost_is_measured_device_time_on_both_sides():
    """Two ranks for 30 s, against a step of 1 s on 2 ranks and one of 2 s on 4."""
    report = LiveReport(
        results=(configuration(2, 1.0), configuration(4, 2.0)),
        check_errors=(0.0, 0.0),
        half_width=0.1,
        calibration=PairTimes(kernels_s={}, transfers={}),
        calibration_s=30.0,
    )
    figures = report.to_dict()
    assert (figures["calibration_device_s"], figures["step_of_each_device_s"]) == (60, 10)
    assert figures["calibration_in_steps_of_each"] == pytest.approx(6)
    assert "as much as 6.0 steps of each" in live_report(report)


@pytest.mark.slow
@needs_hosts
def test_the_loop_closes_on_small_configurations():
    cases = [
        LiveCase(
            model="mlp-s", degrees=Degrees(pipeline=2, data=2, micro_batches=4), ranks_per_host=2
        ),
        LiveCase(model="mlp-s", degrees=Degrees(tensor=2, data=2), ranks_per_host=2),
    ]
    checks = [
        LiveCase(model="check-mlp", degrees=Degrees(pipeline=2, micro_batches=m)) for m in (2, 4)
    ]
    report = validate_live(
        LiveSettings(bandwidth_bytes_per_s=5e7, iterations=1, patience_s=0.0), cases, checks
    )
    figures = json.loads(json.dumps(report.to_dict()))
    assert figures["configurations"] == 2
    assert len(figures["check_errors"]) == 2
    assert figures["calibration_in_steps_of_each"] > 0
    for row in figures["results"]:
        assert 0 < row["lo_s"] < row["predicted_s"] < row["hi_s"]
        assert row["measured_s"] > 0
    text = live_report(report)
    assert cases[0].name in text
    assert "90 % interval" in text
