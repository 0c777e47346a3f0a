"""Predictions: accounts that must add up, agreement of the batch path, refusals."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError, NoDataError, UnknownNameError
from perfmodel.prediction import evaluate, explain, predict, step_problem
from perfmodel.prediction.memory import gathered_params, peak_memory
from perfmodel.spec import Job, Layout
from perfmodel.workload import step_flops

JOB = Job(global_batch=64, seq_len=2048)


@pytest.fixture(scope="module")
def problem():
    return step_problem(catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100"), JOB)


layouts = st.builds(
    Layout,
    tp=st.sampled_from([1, 2, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([1, 2, 8]),
    micro_batch=st.sampled_from([1, 2]),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    zero=st.sampled_from([0, 1, 2, 3]),
    recompute=st.sampled_from(["none", "selective", "full"]),
    sequence_parallel=st.booleans(),
    overlap_grad_reduce=st.booleans(),
)


@settings(max_examples=25, deadline=None)
@given(layouts)
def test_accounts_add_up(problem, layout):
    p = explain(problem, layout)
    assert 0 < p.step_time_lo_s < p.step_time_s < p.step_time_hi_s
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_time_s)
    assert sum(e.time_s for e in p.critical_path) == pytest.approx(p.step_time_s, rel=1e-6)
    assert len({e.event for e in p.critical_path}) == len(p.critical_path), "an event has one row"
    assert sum(p.provenance.values()) == pytest.approx(1)
    assert 0 <= p.bubble_fraction < 1
    assert 0 < p.mfu < 1
    assert len(p.memory_per_stage) == layout.pp
    assert p.memory.peak == pytest.approx(
        p.memory.weights
        + p.memory.gradients
        + p.memory.optimizer
        + p.memory.activations
        + p.memory.buffers
    )
    assert min(p.breakdown_s.values()) >= 0


@pytest.mark.parametrize(
    ("job", "weight_gradients"),
    [
        ({}, 1.0),
        # adapters alone have gradients of their weights
        ({"frozen": True, "adapter_rank": 16}, 0.02),
        ({"frozen": True}, 0.0),
        ({"mean_tokens": 500.0}, 1.0),
        ({"mode": "inference"}, None),
    ],
)
@pytest.mark.parametrize("devices", [8, 16])
def test_model_flops_utilisation_counts_what_a_model_computes(
    job, weight_gradients, devices
) -> None:
    """Forward once, gradients of inputs as much, gradients of trained weights as much; by the peak
    of all devices."""
    model, work = catalog.model("llama2-7b"), replace(JOB, **job)
    cluster = catalog.cluster("dgx-h100")
    p = explain(step_problem(model, cluster, work), Layout(tp=8, dp=devices // 8))
    flops = step_flops(model, work)
    expected = flops.forward
    if weight_gradients is not None:
        of_weights = flops.forward - flops.attention_forward
        expected = 2 * flops.forward + flops.attention_forward + weight_gradients * of_weights
    computed = p.mfu * p.step_time_s * devices * cluster.device.flops_per_s("bf16")
    assert computed == pytest.approx(expected, rel=0.02)
    assert p.tflops_per_device == pytest.approx(computed / p.step_time_s / devices / 1e12)


@settings(max_examples=5, deadline=None)
@given(st.lists(layouts, min_size=1, max_size=12))
def test_batch_equals_one_by_one(problem, several):
    batch = evaluate(problem, several).step_time_s
    one = [explain(problem, layout).step_time_s for layout in several]
    np.testing.assert_allclose(batch, one, rtol=1e-4)
    peak, _ = peak_memory(problem, several)
    np.testing.assert_allclose(peak, [explain(problem, layout).memory.peak for layout in several])


def test_timeline_agrees_with_the_step_time(problem):
    p = explain(problem, Layout(tp=2, pp=4, dp=2, zero=1), timeline=True)
    assert p.timeline is not None
    assert float(np.max(p.timeline.end_s)) == pytest.approx(p.step_time_s, rel=1e-9)
    assert p.time_account.busy_fraction == pytest.approx(1 - p.timeline.idle_fraction(), abs=1e-9)
    assert p.bubble_fraction < p.timeline.idle_fraction()  # which also waits for communication


def test_memory_over_time_peaks_where_the_account_says(problem):
    for layout in (
        Layout(pp=4, dp=1),
        Layout(pp=4, dp=1, schedule="gpipe"),
        Layout(pp=4, vpp=2, dp=1),
    ):
        p = explain(problem, layout, timeline=True)
        peaks = p.memory_over_time().peak_bytes
        np.testing.assert_allclose(peaks, [stage.peak for stage in p.memory_per_stage], rtol=0.02)


def test_more_of_a_resource_never_hurts(problem):
    base = explain(problem, Layout(tp=1, pp=1, dp=8))
    assert (
        explain(problem, Layout(tp=1, pp=1, dp=8, recompute="full")).step_time_s > base.step_time_s
    )
    assert (
        explain(problem, Layout(tp=1, pp=1, dp=8, overlap_grad_reduce=False)).step_time_s
        >= base.step_time_s
    )
    sharded = explain(problem, Layout(tp=1, pp=1, dp=8, zero=3)).memory
    assert sharded.weights < base.memory.weights / 7
    assert (
        explain(problem, Layout(tp=1, pp=1, dp=8, recompute="full")).memory.activations
        < base.memory.activations / 5
    )


def test_zero_3_holds_what_is_outside_of_layers_and_two_layers(problem):
    params, layers = np.array([7.0, 3.0, 2.0]), np.array([False, True, True])
    held = np.array([[1.0, 4.0, 1.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(
        gathered_params(params, layers, held, np.array([1])), [7 + 2 * 3, 3, 7]
    )
    few, many = (
        explain(
            step_problem(replace(problem.model, layers=n), problem.cluster, JOB),
            Layout(dp=8, zero=3),
        )
        for n in (12, 24)
    )
    assert many.memory.buffers == pytest.approx(few.memory.buffers)


def test_gpipe_holds_all_micro_batches_and_1f1b_the_stages(problem):
    one = explain(problem, Layout(pp=4, dp=1, schedule="1f1b")).memory_per_stage
    all_ = explain(problem, Layout(pp=4, dp=1, schedule="gpipe")).memory_per_stage
    assert all_[1].activations == pytest.approx(one[1].activations * 64 / 3)


CONTRACT_KEYS = """
    step_time_s step_time_lo_s step_time_hi_s tokens_per_s_per_device tflops_per_device mfu
    bubble_fraction memory_bytes breakdown_s critical_path provenance fits reasons
"""
MEMORY_KEYS = "peak weights gradients optimizer activations buffers per_stage"


def test_json_has_the_contract_keys(problem):
    keys = problem and explain(problem, Layout(tp=2, pp=2, dp=2)).to_dict()
    assert set(keys) >= set(CONTRACT_KEYS.split())
    assert set(keys["memory_bytes"]) >= set(MEMORY_KEYS.split())
    assert set(keys["critical_path"][0]) == {"event", "count", "time_s"}


@pytest.mark.parametrize(
    ("model", "cluster", "layout", "more", "error", "message"),
    [
        ("gpt3-175", "dgx-a100", "tp=8,dp=8", {}, UnknownNameError, "did you mean .*gpt3-175b"),
        ("gpt3-1.3b", "dgx-a10", "tp=8,dp=8", {}, UnknownNameError, "did you mean .*dgx-a100"),
        (
            "gpt3-1.3b",
            "dgx-a100",
            "tp=8,pp=2,dp=8",
            {"devices": 64},
            LayoutError,
            "128 devices, not 64; use dp=4",
        ),
        ("gpt3-1.3b", "dgx-a100", "dp=3", {}, LayoutError, "not divisible by dp"),
        (
            "gpt3-1.3b",
            "dgx-a100",
            "tp=5,dp=8",
            {},
            LayoutError,
            "16 attention heads|32 attention heads|24 attention",
        ),
        ("gpt3-1.3b", "dgx-a100", "pp=64", {}, LayoutError, "24 layers"),
        ("gpt3-1.3b", "dgx-a100", "dp=8,ep=2", {}, LayoutError, "no experts"),
        ("gpt3-1.3b", "dgx-a100", "dp=8,schedule=zigzag", {}, UnknownNameError, "zigzag"),
        (
            "gpt3-1.3b",
            "dgx-a100",
            "dp=8,cp=3",
            {"seq_len": 2048},
            LayoutError,
            "not divisible by 3",
        ),
        ("gpt3-1.3b", "dgx-a100", "pp=2,vpp=2,schedule=zb-h1", {}, LayoutError, "leave vpp out"),
    ],
)
def test_impossible_requests_name_the_remedy(model, cluster, layout, more, error, message):
    with pytest.raises(error, match=message):
        predict(model, cluster, layout, global_batch=64, **more)


def test_inference_is_the_forward_part_alone():
    job = Job(global_batch=8, seq_len=2048, mode="inference")
    p = predict("llama3-8b", "dgx-h100", "tp=8,micro_batch=8", global_batch=8, job=job)
    trained = predict("llama3-8b", "dgx-h100", "tp=8,micro_batch=8", global_batch=8, seq_len=2048)
    # no loss is computed, all else is the same
    assert (
        0.9 * trained.breakdown_s["forward"]
        < p.breakdown_s["forward"]
        < trained.breakdown_s["forward"]
    )
    assert "backward" not in p.breakdown_s
    assert p.memory.optimizer == p.memory.gradients == p.memory.activations == 0
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_time_s)


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("mixtral-8x7b", "tp=2,pp=4,dp=8,ep=8,sequence_parallel=true"),
        ("deepseek-v2-lite", "pp=3,dp=8,ep=8"),
        ("t5-3b", "tp=2,dp=8"),
        ("bert-large", "dp=8,micro_batch=4"),
        ("mlp-1b", "tp=2,dp=8"),
        ("resnet-50", "dp=8,micro_batch=32"),
        ("vgg-16", "pp=2,dp=8"),
    ],
)
def test_every_kind_of_model_is_predicted(model, layout):
    p = predict(model, "dgx-a100", layout, global_batch=256)
    assert 0 < p.step_time_s < 1e4
    assert 0 < p.mfu < 1
    assert sum(p.breakdown_s.values()) == pytest.approx(p.step_time_s)


def test_strict_refuses_a_device_without_data():
    with pytest.raises(NoDataError, match="extrapolated"):
        predict("gpt3-1.3b", "piz-daint", "dp=8", global_batch=64, strict=True)


def test_oversized_layout_says_what_to_change():
    p = predict("gpt3-175b", "dgx-a100", "8M1P1D", global_batch=8)
    assert not p.fits
    assert "out of memory" in p.reasons[0]
    assert "use" in p.reasons[0]


@pytest.mark.parametrize(
    ("notation", "category"),
    [
        ("dp=16,zero=3,replicate=8,micro_batch=1,recompute=full", "optimizer"),
        ("dp=16,micro_batch=1", "optimizer"),
        ("dp=16,zero=3,micro_batch=16", "activations"),
        ("tp=8,dp=2,zero=3,micro_batch=64,sequence_parallel=true", "activations"),
    ],
)
def test_a_remedy_for_memory_is_not_in_place_yet(notation: str, category: str) -> None:
    model, cluster = catalog.model("llama2-70b"), catalog.cluster("dgx-h100")

    p = predict(model, cluster, notation, global_batch=1024)
    (reason,) = p.reasons
    assert f"the largest part, {category}, takes" in reason
    remedy = reason.partition("(use ")[2]
    assert remedy
    for setting in notation.split(","):
        assert setting not in remedy
    assert ("zero=1" in remedy) == ("zero" not in notation and category == "optimizer")
    assert ("smaller replicate" in remedy) == ("replicate" in notation)
    assert ("smaller micro_batch" in remedy) == (category == "activations")
