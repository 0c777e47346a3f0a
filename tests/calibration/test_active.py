from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.calibration import (
    LayoutSteps,
    Selection,
    calibrate_model,
    model_plan,
    select,
    selection_text,
)
from perfmodel.errors import CalibrationError, PerfModelError
from perfmodel.measure import Plan, read_plan
from perfmodel.measure.timing import StoppingRule
from perfmodel.ops import Op
from perfmodel.prediction import priced_events
from perfmodel.spec import Job, Layout, Mlp

CLUSTER = catalog.cluster("dgx-a100")
LAYOUTS = [Layout(tp=4, dp=2), Layout(tp=2, pp=2, dp=2, recompute="selective")]
PLAN = model_plan("gpt2-345m", CLUSTER, Job(global_batch=32, seq_len=1024), LAYOUTS)
POOL = [*PLAN.plan.kernels, *PLAN.plan.collectives]
STEPS = LayoutSteps(PLAN.step_problem, tuple(LAYOUTS), frozenset(PLAN.unmeasured))


def base(ops: Sequence[Op]) -> np.ndarray:
    return priced_events(PLAN.step_problem, ops).time_s


def truth(ops: Sequence[Op]) -> dict[Op, float]:
    """Everything a third slower than predicted, each event off by a little of its own."""
    own = [(len(str(op)) * 37 % 11) / 11 - 0.5 for op in ops]
    return dict(zip(ops, base(ops) * np.exp(0.29 + 0.1 * np.array(own)), strict=True))


def run(target: float, measure=truth, **options) -> Selection:
    return select(
        STEPS, POOL, measure, base=base, device=CLUSTER.device, target_half_width=target, **options
    )


def test_stops_at_the_target_with_the_truth_inside_the_interval():
    found = run(0.08)
    last = found.rounds[-1]
    assert found.reason == "target reached"
    assert last.half_width.max() <= 0.08 < found.rounds[-2].half_width.max()
    assert last.measurements == len(found.measured) < 0.7 * len(POOL)
    everything = run(1e-6)
    assert everything.reason == "all measured"
    true_s = everything.rounds[-1].step_time_s
    assert (np.abs(last.step_time_s / true_s - 1) < last.half_width).all()
    # what is not measured stays in doubt
    assert everything.rounds[-1].half_width.min() > 0
    assert "target reached" in selection_text(found)
    assert found.to_dict()["measurements"] == last.measurements


def test_a_budget_is_kept_to_the_point_and_earlier_measurements_are_not_repeated():
    first = run(0.001, budget=13, batch=5)
    assert first.reason == "budget used"
    assert [r.measurements for r in first.rounds] == [0, 5, 10, 13]
    asked: list[Op] = []

    def noting(ops: Sequence[Op]) -> Mapping[Op, float]:
        asked.extend(ops)
        return truth(ops)

    again = run(0.001, noting, budget=20, measured=first.measured)
    assert len(asked) == 7
    assert not set(asked) & set(first.measured)
    assert again.rounds[0].measurements == 13


def test_what_cannot_be_measured_is_left_out_and_named():
    found = run(0.001, lambda ops: truth([op for op in ops if op.family != "gemm"]))
    assert found.failed
    assert {op.family for op in found.failed} == {"gemm"}
    assert found.reason == "all measured"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": 0.0}, "between 0 and 1"),
        ({"target": 1.5}, "between 0 and 1"),
        ({"target": 0.1, "budget": 0}, "at least 1"),
        ({"target": 0.1, "batch": 0}, "at least 1"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict, message: str):
    with pytest.raises(PerfModelError, match=message):
        run(**options)


def test_nothing_to_measure_is_said():
    with pytest.raises(PerfModelError, match="no event of these layouts"):
        select(STEPS, [], truth, base=base, device=CLUSTER.device, target_half_width=0.1)


def test_real_measurements_are_kept_and_found_again(tmp_path: Path):
    # every sample counts: how busy the machine is does not matter here
    rule = StoppingRule(half_width=0.5, max_s=0.02, min_repeats=6, interference_limit=0.999)
    job = Job(global_batch=8, seq_len=1, dtype="fp32")
    plan = model_plan(
        Mlp(name="stack", layers=2, hidden=32),
        CLUSTER,
        job,
        [Layout(micro_batch=4)],
        device="box",
        rule=rule,
    )
    first = calibrate_model(plan, tmp_path, target_half_width=0.001, budget=3)
    assert len(first.measured) == 3
    chosen = read_plan(tmp_path / "plan.toml")
    assert set(chosen.kernels) == set(first.measured)

    def never(plan: Plan, folder: Path) -> None:
        raise AssertionError(f"measured again: {plan.kernels}")

    again = calibrate_model(plan, tmp_path, target_half_width=0.001, budget=3, run=never)
    assert again.measured == first.measured
    assert again.reason == "budget used"


def test_a_refusal_of_the_collector_is_passed_on(tmp_path: Path):
    def refuse(plan: Plan, folder: Path) -> None:
        raise CalibrationError("rank 1 died")

    with pytest.raises(CalibrationError, match="rank 1 died"):
        calibrate_model(PLAN, tmp_path, run=refuse)
