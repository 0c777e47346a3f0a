"""Copies of single layers' activations to the host: what they wait for and spare, in closed form
and laws."""

from dataclasses import replace

import numpy as np
import pytest
from thinned import one_in

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import LayoutError, Reason
from perfmodel.prediction import explain, layout_batches, layout_of, step_problem_of, step_times_s
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.composition import pass_s
from perfmodel.prediction.differentiable import step_time_function_of
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.prediction.layer_copies import window_ends
from perfmodel.prediction.memory import peak_memory
from perfmodel.program import Kind
from perfmodel.spec import Layout
from perfmodel.timeline import double_precision

LAYERS = 24
"""Of gpt2-345m."""
PLAIN = "dp=8,micro_batch=4"


def problem(rate=None, **words):
    own = pm.problem("gpt2-345m", "dgx-a100", global_batch=64, seq_len=1024, **words)
    if rate is not None:
        device = replace(own.cluster.device, host_bandwidth_bytes_per_s=rate)
        own = replace(own, cluster=replace(own.cluster, device=device))
    return own


def step_s(text, rate=None, **words):
    own = problem(rate, **words)
    return float(step_times_s(step_problem_of(own), [layout_of(own, text)[0]])[0])


def of_layer(own, text):
    """Bytes that a layer keeps, and seconds of its forward and its backward."""
    step, layout = step_problem_of(own), layout_of(own, text)[0]
    (batch,) = layout_batches(step, [layout])
    at = int(np.flatnonzero(batch.composed[0].events.layers)[0])
    of_kind = pass_s(step, batch)
    return batch.bytes.kept_bytes[0, at], *(
        of_kind[kind][0, at] for kind in (Kind.FORWARD, Kind.BACKWARD)
    )


@pytest.mark.parametrize(("layers", "offloaded"), [(80, 40), (80, 30), (80, 79), (7, 3), (5, 1)])
def test_windows_are_those_of_transformer_engine(layers, offloaded):
    """`layer_window_map`, step by step as its loop fills it."""
    expected, constant = {}, 0
    for i in range(offloaded):
        expected[i] = (layers // offloaded) * (i + 1) - 1
        if i < layers % offloaded:
            expected[i] += i + 1
            constant = i + 1
        else:
            expected[i] += constant
    assert window_ends(layers, offloaded).tolist() == list(expected.values())


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("offloaded", [1, 5, 12, LAYERS - 1])
def test_a_slow_link_adds_copies_less_the_layers_beside_them(offloaded, zero):
    text, rate = f"{PLAIN},zero={zero},overlap_param_gather=false,overlap_grad_reduce=false", 1e9
    n_bytes, forward_s, backward_s = of_layer(problem(rate), text)
    assert n_bytes / rate > 30 * backward_s  # every copy is waited for
    micro_batches = 64 // (8 * 4)
    beside = LAYERS - 1  # all but the first layer run beside some copy, both ways
    waits_s = 2 * offloaded * n_bytes / rate - beside * (forward_s + backward_s)
    longer = step_s(f"{text},offload_layers={offloaded}", rate) - step_s(text, rate)
    assert longer == pytest.approx(micro_batches * waits_s, rel=1e-9)


def test_a_fast_link_adds_nothing_and_a_faster_one_never_more():
    plain = step_s(f"{PLAIN},zero=3")
    assert step_s(f"{PLAIN},zero=3,offload_layers=12", 1e18) == pytest.approx(plain, rel=1e-12)
    spans = [
        step_s(f"{PLAIN},zero=3,offload_layers=12", rate) for rate in np.geomspace(1e9, 1e13, 9)
    ]
    assert (np.diff(spans) <= 1e-12).all()
    assert spans[0] > 2 * spans[-1]


def test_device_memory_is_spared_all_offloaded_layers_but_one():
    own = problem()
    step = step_problem_of(own)
    n_bytes, *_ = of_layer(own, PLAIN)
    counts = [0, 1, 2, 12, LAYERS - 1]
    layouts = [layout_of(own, f"{PLAIN},offload_layers={n}")[0] for n in counts]
    activations = [explain(step, layout).memory.activations for layout in layouts]
    spared = activations[0] - np.array(activations)
    assert spared == pytest.approx([max(n - 1, 0) * n_bytes for n in counts])
    peaks, _ = peak_memory(step, layouts)
    assert (np.diff(peaks) <= 0).all()
    # while the head runs, no layer is on its way
    assert 0 <= peaks[0] - peaks[1] <= n_bytes * (1 + 1e-12)


def test_waits_are_a_line_of_the_breakdown_and_of_the_critical_path():
    prediction = pm.predict(
        "gpt2-345m", "dgx-a100", f"{PLAIN},zero=3,offload_layers=20", global_batch=64, seq_len=1024
    )
    plain = pm.predict("gpt2-345m", "dgx-a100", f"{PLAIN},zero=3", global_batch=64, seq_len=1024)
    parts = prediction.breakdown_s
    assert sum(parts.values()) == pytest.approx(prediction.step_time_s, rel=1e-9)
    assert "host_copies_exposed" not in plain.breakdown_s
    assert parts["host_copies_exposed"] == pytest.approx(
        prediction.step_time_s - plain.step_time_s, rel=1e-6
    )
    assert parts["host_copies_exposed"] > 0
    names = [event.event for event in prediction.critical_path]
    assert "copies to and from the host" in names


def test_inference_keeps_nothing_to_copy():
    plain, offloaded = (
        pm.predict(
            "gpt2-345m", "dgx-a100", f"dp=8{more}", global_batch=64, seq_len=1024, mode="inference"
        )
        for more in ("", ",offload_layers=5")
    )
    assert offloaded.step_time_s == plain.step_time_s
    assert offloaded.memory_needed_bytes == plain.memory_needed_bytes
    assert "host_copies_exposed" not in offloaded.breakdown_s


def test_bound_and_batch_evaluation_hold_it_too():
    own = problem(1e10)
    step = step_problem_of(own)
    layouts = [
        layout_of(own, f"{PLAIN},zero={zero},offload_layers={n}")[0]
        for zero in (0, 3)
        for n in (0, 3, 20)
    ]
    exact = step_times_s(step, layouts)
    assert pm.prediction.evaluate(step, layouts).step_time_s == pytest.approx(exact, rel=1e-5)
    assert (lower_bounds_s(step, layouts) <= exact * (1 + 1e-6)).all()


@pytest.mark.parametrize("micro_batch", one_in(2, [8, 4]))
def test_the_differentiable_step_is_that_of_the_prediction(micro_batch):
    own = problem(2e10)
    step = step_problem_of(own)
    at = {
        n: layout_of(own, f"dp=8,zero=3,offload_layers=20,micro_batch={n}")[0]
        for n in (4, micro_batch)
    }
    function = step_time_function_of(step, at[4])
    there = function.nominal._replace(micro_batch=float(micro_batch))
    with double_precision():
        found_s, found_bytes = float(function(there)), np.asarray(function.memory_bytes(there))
    expected = explain(step, at[micro_batch])
    assert expected.breakdown_s["host_copies_exposed"] > 0
    assert found_s == pytest.approx(expected.step_time_s, rel=1e-9)
    assert found_bytes.max() == pytest.approx(expected.memory_needed_bytes, rel=1e-12)
    assert (function.bounds.high.recompute == 0).all()
    assert (function.bounds.low.layers == function.nominal.layers).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pp=2,dp=4,offload_layers=4", "pp=1"),
        ("dp=8,offload_layers=4,recompute=full", "recompute=none"),
        ("dp=8,offload_layers=4,recompute_full_layers=2", "recompute=none"),
        ("dp=8,offload_layers=4,offload=true", "offload=true"),
        ("dp=8,offload_layers=-1", "at least 0"),
        ("dp=8,offload_layers=24", "below the 24 layers"),
    ],
)
def test_what_cannot_run_is_refused(text, words):
    with pytest.raises(LayoutError, match=words):
        pm.predict("gpt2-345m", "dgx-a100", text, global_batch=64)


def test_a_device_without_a_link_is_told():
    pod = catalog.cluster("tpu-v5p-pod")
    unlinked = replace(pod, device=replace(pod.device, host_bandwidth_bytes_per_s=None))
    with pytest.raises(LayoutError) as error:
        pm.predict("gpt3-1.3b", unlinked, "dp=4,offload_layers=4", global_batch=8)
    assert error.value.rejection.reason == Reason.HOST_LINK


def test_a_compiler_offloads_what_recompute_leaves_and_eager_code_refuses_both():
    """XLA places every named tensor by itself; Megatron-Core refuses offloading beside
    recompute."""
    both = "dp=4,zero=3,recompute=selective,offload_layers=16"
    asked = {"global_batch": 8, "seq_len": 4096}
    eager = catalog.framework("megatron-core@2025")
    assert "offload_layers" in eager.refused(Layout(dp=4, recompute="selective", offload_layers=16))
    assert "offload_layers" not in eager.refused(Layout(dp=4, offload_layers=16))
    kept = pm.predict(
        "gpt3-1.3b", "tpu-v5p-pod", "dp=4,zero=3,recompute=selective", framework="maxtext", **asked
    )
    moved = pm.predict("gpt3-1.3b", "tpu-v5p-pod", both, framework="maxtext", **asked)
    assert moved.memory_per_stage[0].activations < kept.memory_per_stage[0].activations
    assert moved.step_time_s >= kept.step_time_s


def test_blocks_of_several_kinds_wait_layer_by_layer():
    """Only the dense first layers of a mixture of experts are offloaded, so only their bytes
    move."""
    own = pm.problem("deepseek-v3", "dgx-h100", global_batch=64, seq_len=4096)
    step = step_problem_of(own)
    layouts = [
        layout_of(own, f"tp=8,dp=8,ep=64,etp=1,sequence_parallel=true,offload_layers={n}")[0]
        for n in (0, 3)
    ]
    (batch,) = layout_batches(step, layouts[:1])
    events: ShardBlocks = batch.composed[0].events
    first = int(np.flatnonzero(events.layers)[0])
    assert events.repeats[first] == 3
    kept = [explain(step, layout).memory.activations for layout in layouts]
    assert kept[0] - kept[1] == pytest.approx(2 * batch.bytes.kept_bytes[0, first])
