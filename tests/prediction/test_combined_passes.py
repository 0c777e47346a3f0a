"""Exchanges of experts hide behind another micro-batch's pass, and only where one runs beside
(`ep_overlap`)."""

import numpy as np
import pytest
from thinned import one_in

import perfmodel as pm
from perfmodel.prediction import layout_batches, step_problem_of, step_times_s
from perfmodel.prediction.composition import pass_s, phase_s
from perfmodel.prediction.differentiable import step_time_function_of
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.prediction.phases import Variant
from perfmodel.program import COMBINED, PAIRED, Kind, ProgramSpec, build, variants_of
from perfmodel.schedule import Phase
from perfmodel.spec import Layout
from perfmodel.timeline import double_precision

# reductions and gathers slow the passes beside them, which is not what is told apart here
ALONE = {"overlap_grad_reduce": False, "overlap_param_gather": False}


def problem(micro_batches):
    return pm.problem("mixtral-8x7b", "dgx-h100", global_batch=8 * micro_batches, seq_len=4096)


def step_s(layout, micro_batches):
    return float(step_times_s(step_problem_of(problem(micro_batches)), [layout])[0])


def times_of_passes(layout):
    """Seconds of a forward and a backward of the whole model, by what runs beside them."""
    (layout_batch,) = layout_batches(step_problem_of(problem(4)), [layout])
    counts = layout_batch.program.counts.sum(axis=(0, 1))
    alone = pass_s(step_problem_of(problem(4)), layout_batch)
    phases = phase_s(step_problem_of(problem(4)), layout_batch, Variant(beside=COMBINED))[0]
    combined_s = counts @ phases[:, 0], counts @ (phases[:, 1] + phases[:, 2])
    return (counts @ alone[Kind.FORWARD][0], counts @ alone[Kind.BACKWARD][0]), combined_s


@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_without_pipeline_the_first_forward_and_the_last_backward_hide_nothing(micro_batches):
    plain = Layout(dp=8, ep=8, **ALONE)
    (forward_s, backward_s), (shorter_forward_s, shorter_backward_s) = times_of_passes(
        plain.replace(ep_overlap=True)
    )
    assert shorter_forward_s < forward_s
    assert shorter_backward_s < backward_s
    saved_s = step_s(plain, micro_batches) - step_s(plain.replace(ep_overlap=True), micro_batches)
    each_s = forward_s + backward_s - shorter_forward_s - shorter_backward_s
    assert saved_s == pytest.approx((micro_batches - 1) * each_s, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_passes_that_fill_and_drain_a_pipeline_run_alone(schedule):
    chunks = 2 if schedule == "interleaved" else 1
    spec = ProgramSpec(
        schedule=schedule, stages=4, micro_batches=8, chunks=chunks, combines_passes=True
    )
    made = spec.build_schedule()
    variants = variants_of(made, combines=True)
    beside = variants.table[variants.of_pass, 2] == COMBINED
    for rank in range(4):
        own = slice(*made.offsets[rank : rank + 2])
        forward = made.phase[own] == Phase.FORWARD
        first, last = int((~forward).argmax()), len(forward) - 1 - int(forward[::-1].argmax())
        expected = [first <= i <= last for i in range(len(forward))]
        assert beside[own].tolist() == expected
        # 8 - (3 - rank) - 1 forwards follow the first backward, and as many backwards
        if schedule == "1f1b":
            assert expected.count(True) == 2 * (8 - (3 - rank) - 1)
        if schedule == "gpipe":
            assert not any(expected)
    paired = build(spec).variants[:, 2]
    assert set(paired.tolist()) == ({0} if schedule == "gpipe" else {0, COMBINED})


def test_schedules_that_pair_passes_combine_no_others():
    spec = ProgramSpec(schedule="dualpipe", stages=4, micro_batches=16, combines_passes=True)
    assert set(build(spec).variants[:, 2].tolist()) == {0, PAIRED}


@pytest.mark.parametrize(
    "more",
    one_in(
        2,
        [
            {"pp": 2, "dp": 8, "ep": 8},
            {"pp": 2, "dp": 8, "ep": 8, "vpp": 2},
            {"pp": 2, "dp": 8, "ep": 8, "schedule": "gpipe"},
            {"dp": 8, "ep": 8, "zero": 3},
        ],
    ),
)
def test_bounds_accounts_and_the_differentiable_step_agree(more):
    own = pm.problem("mixtral-8x7b", "dgx-h100", global_batch=64, seq_len=4096)
    step = step_problem_of(own)
    plain = Layout(**more)
    layouts = [plain, plain.replace(ep_overlap=True)]
    exact = step_times_s(step, layouts)
    assert exact[1] == exact[0] if plain.schedule == "gpipe" else exact[1] < exact[0]
    assert (lower_bounds_s(step, layouts) <= exact * (1 + 1e-6)).all()
    parts = pm.prediction.explain(step, layouts[1]).breakdown_s
    assert sum(parts.values()) == pytest.approx(exact[1], rel=1e-9)
    function = step_time_function_of(step, layouts[1])
    with double_precision():
        assert float(function(function.nominal)) == pytest.approx(exact[1], rel=1e-12)


def test_inference_has_no_pass_to_hide_behind():
    own = pm.problem("mixtral-8x7b", "dgx-h100", global_batch=64, seq_len=4096, mode="inference")
    spans = step_times_s(
        step_problem_of(own), [Layout(dp=8, ep=8, ep_overlap=on) for on in (False, True)]
    )
    np.testing.assert_allclose(*spans, rtol=1e-12)
