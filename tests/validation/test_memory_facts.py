"""Memory as the counters of published runs see it."""

from dataclasses import replace
from math import exp
from typing import get_args

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.prediction import EAGER, Site, explain, step_problem
from perfmodel.prediction.memory import FRAGMENTATION, peak_memory, workspace_bytes
from perfmodel.prediction.sites.constants import MemorySpread, source_figures, spread_from
from perfmodel.spec import Job, Layout, Transformer, partition_by_cost
from perfmodel.spec.framework_facts import MemoryCounter, ReportedRanks
from perfmodel.validation import counter_of, memory_bytes

MODEL = Transformer(
    name="llama-like-1B",
    layers=16,
    hidden=2048,
    heads=32,
    kv_heads=32,
    head_dim=64,
    ffn_hidden=8192,
    vocab=131072,
    seq_len=4096,
    gated_ffn=True,
    activation="silu",
    norm="rms_norm",
    positions="rope",
    bias=False,
    dropout=False,
)


@pytest.mark.parametrize(
    ("stages", "layers"),
    [(1, None), (2, (11, 5)), (4, (6, 5, 5, 0)), (8, (3, 3, 2, 3, 2, 2, 1, 0)), (32, None)],
)
def test_stages_balanced_by_cost_count_the_head_as_four_layers(stages, layers):
    """h V = 4 (4 h^2 + 3 h f): 20 units over the stages, each closed by the block that goes beyond
    its share."""
    assert partition_by_cost(MODEL, stages) == layers


def closed_by_thresholds(layer: int, layers: int, head: int, stages: int) -> tuple[int, ...]:
    """Layers per stage as nanotron's `build_model` goes through its blocks: embedding, layers,
    norm, head, cast."""
    costs = [0, *[layer] * layers, 0, head, 0]
    held, stage, cost = [0] * stages, 0, 0
    for position, of_block in enumerate(costs):
        cost += of_block
        held[stage] += 1 <= position <= layers
        stage += cost > sum(costs) * (stage + 1) / stages
    return tuple(held)


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"gated_ffn": False},
        {"head_dim": 128, "heads": 32, "kv_heads": 8},
        {"vocab": 32000, "layers": 24},
        {"ffn_hidden": 2048, "gated_ffn": False},
    ],
)
def test_stages_are_cut_as_the_loop_of_nanotron_cuts_them(change: dict[str, int]) -> None:
    """Its layers cost 4 h^2 whatever the size of their heads, and 2 h f without a gate
    (`get_block_compute_costs`)."""
    model = replace(MODEL, **change)
    layer = (
        4 * model.hidden**2 + (3 if model.block.gated_ffn else 2) * model.hidden * model.ffn_hidden
    )
    compared = 0
    for stages in (2, 3, 4, 6, 8):
        loop = closed_by_thresholds(layer, model.layers, model.hidden * model.vocab, stages)
        if all(loop[:-1]):
            assert partition_by_cost(model, stages) == loop
            compared += 1
    assert compared >= 2


@pytest.mark.parametrize(
    ("framework", "kind", "counter"),
    [
        ("megatron-core@2025", "max over ranks of torch max_allocated", "allocated"),
        ("nanotron@2024", "torch max allocated or reserved", "reserved"),
        ("megatron-lm@2023", "peak memory as printed (rounded)", "allocated"),
        ("oneflow@2021", "nvidia-smi", "device"),
        ("generic", "torch reserved", "reserved"),
        ("generic", "", "device"),
        ("megatron-lm@2023", "nvidia-smi", "device"),
        ("megatron-bridge@2026", "rank 0 torch allocated after iteration 2", "resting"),
        (
            "megatron-bridge@2026",
            "largest torch allocated, after optimizer step of iteration 2",
            "resting",
        ),
    ],
)
def test_counters_follow_words_and_then_reports(framework, kind, counter):
    assert counter_of(kind, catalog.framework(framework)) == counter


def test_counters_nest_and_the_first_rank_keeps_its_outputs():
    layout = Layout(tp=2, pp=4, dp=1, sequence_parallel=True, partition=(6, 5, 5, 0))
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096)
    found = explain(step_problem(MODEL, cluster, job), layout)
    allocated, reserved, device = (
        found.memory_counted_bytes[k] for k in ("allocated", "reserved", "device")
    )
    first = found.memory_per_stage[0]
    assert found.memory == first
    moving = first.activations + first.buffers - EAGER.memory.context_bytes
    assert allocated == pytest.approx(
        first.peak - EAGER.memory.context_bytes + workspace_bytes(cluster.device)
    )
    assert reserved - allocated == pytest.approx(moving * FRAGMENTATION / (1 - FRAGMENTATION))
    assert device - reserved == pytest.approx(
        EAGER.memory.context_bytes - workspace_bytes(cluster.device)
    )
    nanotron = EAGER.replace(keeps_outputs=True, reported_ranks="first_rank")
    kept = explain(step_problem(MODEL, cluster, job, None, nanotron), layout).memory_counted_bytes[
        "reserved"
    ]
    # four micro-batches of half a sequence
    assert kept - reserved == pytest.approx(4 * 4096 * 2048 * 2 / 2 / (1 - FRAGMENTATION))


def test_a_prediction_says_what_its_framework_reports():
    """`memory` is the figure of the framework's own counter on the rank that it prints, whatever
    must fit."""
    layout = Layout(tp=2, pp=4, dp=1, sequence_parallel=True, partition=(3, 5, 5, 3))
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096)
    plain = explain(step_problem(MODEL, cluster, job), layout)
    assert (
        plain.memory.peak
        == plain.memory_needed_bytes
        == max(stage.peak for stage in plain.memory_per_stage)
    )
    for counter in get_args(MemoryCounter):
        for ranks in get_args(ReportedRanks):
            framework = EAGER.replace(memory_counter=counter, reported_ranks=ranks)
            found = explain(step_problem(MODEL, cluster, job, None, framework), layout)
            assert found.memory.peak == found.memory_counted_bytes[counter]
            assert (found.memory == found.memory_per_stage[0]) or ranks != "first_rank"
            assert found.memory_needed_bytes == plain.memory_needed_bytes
            assert found.fits == plain.fits
            assert found.to_dict()["memory_bytes"]["peak"] == found.memory.peak
    resting = explain(
        step_problem(MODEL, cluster, job, None, EAGER.replace(memory_counter="resting")), layout
    ).memory
    settled = max(s.weights + s.gradients + s.optimizer for s in plain.memory_per_stage)
    assert resting.peak == pytest.approx(settled + workspace_bytes(cluster.device))


def test_every_communicator_takes_its_buffers():
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096)
    framework = EAGER.replace(communicator_bytes=1e9)
    for layout, groups in (
        (Layout(), 0),
        (Layout(dp=8), 2),
        (Layout(tp=2, pp=2, dp=2, sequence_parallel=True), 5),
    ):
        less, more = (
            explain(step_problem(MODEL, cluster, job, None, one), layout)
            for one in (EAGER, framework)
        )
        assert more.memory.peak - less.memory.peak == pytest.approx(groups * 1e9)
        gap = more.memory_counted_bytes["allocated"] - less.memory_counted_bytes["allocated"]
        assert gap == pytest.approx(0, abs=1e3)


def test_frozen_weights_in_8_bits_are_held_once():
    """Transposes are not kept; and frozen products keep no input for weight gradients."""
    layout = Layout(tp=8, sequence_parallel=True)
    usual, frozen = (
        Job(global_batch=8, seq_len=4096, dtype="fp8", frozen=one) for one in (False, True)
    )
    held = {
        (name, job.fine_tuning.frozen): explain(
            step_problem(MODEL, catalog.cluster(name), job), layout
        ).memory
        for name in ("dgx-h100", "hgx-b200")
        for job in (usual, frozen)
    }
    assert (
        held["hgx-b200", True].weights
        == held["dgx-h100", True].weights
        == held["dgx-h100", False].weights / 2
    )
    assert held["dgx-h100", True].activations < held["dgx-h100", False].activations


@pytest.mark.parametrize(
    "name", ["megatron-deepspeed@2022", "megatron-lm@2021", "megatron-core@2025"]
)
def test_bf16_gradients_may_accumulate_wider_than_fp16_ones(name: str):
    """And 8-bit products have the gradients of 16-bit weights."""
    types = [
        catalog.framework(name).job_defaults(dtype)["grad_dtype"]
        for dtype in ("fp16", "bf16", "fp8", "fp32")
    ]
    assert types == ["fp16", "fp32", "fp32", "fp32"]


@given(st.floats(1e9, 1e12), st.floats(1e9, 1e12), st.floats(-0.3, 0.3), st.floats(0.01, 1.0))
def test_more_room_never_fits_less_likely(needed, capacity, bias, deviation):
    spread = MemorySpread(bias, deviation)
    likely = spread.probability(needed, capacity)
    assert 0 <= likely <= spread.probability(needed, 1.1 * capacity) <= 1
    assert spread.probability(needed, needed * exp(bias)) == pytest.approx(0.5)


def test_spread_is_of_the_other_sources():
    figures = {
        "a": (0.1, 0.0),
        "b": (-0.1, 0.0),
        "c": (0.0, 0.0),
        "NeMo 1.0": (5.0, 9.0),
        "Megatron-Core": (5.0, 9.0),
    }
    alone = spread_from(figures, "Korthikanti 2022")  # of NVIDIA too
    assert alone.bias == 0
    assert alone.deviation == pytest.approx(1.4826 * 0.1, rel=1e-3)
    assert spread_from(figures).deviation > alone.deviation
    known = source_figures()
    assert all(spread >= 0 for _, spread in known.values())
    # an outlier hardly moves what is said of the others
    assert spread_from(known).deviation < 0.3
    assert (
        spread_from(known | {"an outlier": (5.0, 0.0)}).deviation
        < 1.2 * spread_from(known).deviation
    )


def test_buckets_and_dummies_of_gradients():
    cluster, job, layout = (
        catalog.cluster("dgx-h100"),
        Job(global_batch=8, seq_len=4096),
        Layout(tp=4, dp=2),
    )

    def buffers(layout: Layout = layout, **changes: object) -> float:
        return explain(
            step_problem(MODEL, cluster, job, None, EAGER.replace(**changes)), layout
        ).memory.buffers

    weights = explain(step_problem(MODEL, cluster, job), layout).memory.weights
    assert buffers() - buffers(bucket_bytes=0.0) == pytest.approx(320e6)
    assert buffers(ddp_buckets=True) - buffers() == pytest.approx(weights)
    sharded = layout.replace(zero=1)
    assert buffers(sharded, ddp_buckets=True) == buffers(sharded)
    # query-key-value, output, gate and value, down: one gradient of each shape whatever the layers
    shapes = 3 * 2048 * 2048 + 2048 * 2048 + 2 * 8192 * 2048 + 8192 * 2048
    assert buffers(cached_weight_gradients=True) - buffers() == pytest.approx(2 * shapes / 4)


def test_a_node_shows_no_more_than_the_fullest_rank_and_no_less_than_the_first():
    """8 devices of a node hold two of four stages of 4 ranks, and all of them where a stage has
    two."""
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=64, seq_len=4096)
    for layout, on_node in (
        (Layout(pp=4, dp=4), 2),
        (Layout(pp=4, dp=2), 4),
        (Layout(pp=4, dp=16), 1),
    ):
        shown = {}
        for ranks in get_args(ReportedRanks):
            framework = EAGER.replace(memory_counter="device", reported_ranks=ranks)
            shown[ranks] = explain(step_problem(MODEL, cluster, job, None, framework), layout)
        peaks = [stage.peak for stage in shown["fullest"].memory_per_stage]
        assert shown["first_node"].memory.peak == max(peaks[:on_node])
        assert shown["first_rank"].memory.peak == peaks[0]
        assert shown["fullest"].memory.peak == max(peaks)
        assert len({one.fits_probability for one in shown.values()}) == 1


def test_the_chance_to_fit_is_that_of_what_a_device_would_show():
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096)
    spread = MemorySpread(0.0, 0.1)
    for layout in (Layout(dp=8), Layout(tp=2, pp=4, sequence_parallel=True)):
        found = explain(step_problem(MODEL, cluster, job, None, EAGER, Site(memory=spread)), layout)
        planned = EAGER.replace(planned_memory=True)
        tight = explain(
            step_problem(MODEL, cluster, job, None, planned, Site(memory=spread)), layout
        )
        capacity, shown = found.memory_capacity_bytes, found.memory_counted_bytes["device"]
        assert shown > found.memory_needed_bytes
        assert found.fits_probability == pytest.approx(spread.probability(shown, capacity))
        assert tight.memory_counted_bytes["device"] == pytest.approx(tight.memory_needed_bytes)
        assert tight.fits_probability >= found.fits_probability


def test_half_gradients_are_kept_beside_wider_ones_only():
    """DeepSpeed: fp16 gradients are the ones that are accumulated; bf16 ones are added to fp32 ones
    and stay."""
    cluster, layout = catalog.cluster("dgx-a100"), Layout(tp=8)
    forked = catalog.framework("megatron-deepspeed@2022")
    per_weight = {}
    for dtype in ("fp16", "bf16"):
        job = forked.job(MODEL, cluster.device, global_batch=8, seq_len=4096, dtype=dtype)
        memory = explain(step_problem(MODEL, cluster, job, None, forked), layout).memory
        per_weight[dtype] = 2 * memory.gradients / memory.weights
    assert per_weight == pytest.approx({"fp16": 2, "bf16": 6})


def test_a_peak_above_the_device_is_of_another_one():
    runs = pd.DataFrame(
        {
            "measured_peak_memory_gb": [70.0, 79.0, 90.0, 90.0],
            "memory_unit": ["GB", "GiB", "GB", "GB"],
            "device": ["H100-SXM5-80GB", "H100-SXM5-80GB", "H100-SXM5-80GB", "unheard of"],
        }
    )
    assert np.isfinite(memory_bytes(runs)).tolist() == [True, True, False, True]


def test_a_measured_peak_is_in_the_unit_of_its_row():
    peaks = {"measured_peak_memory_gb": [70.0, 70.0, -1.0, float("nan")]}
    units = {"memory_unit": ["GB", "GiB", "GB", "GiB"]}
    np.testing.assert_array_equal(
        memory_bytes(pd.DataFrame(peaks | units)), [70e9, 70 * 2**30, np.nan, np.nan]
    )
    np.testing.assert_array_equal(memory_bytes(pd.DataFrame(peaks)), [70e9, 70e9, np.nan, np.nan])
    status = {"status": ["ok", "oom", "suspect", "duplicate"]}
    doubted = pd.DataFrame({"measured_peak_memory_gb": [1.0] * 4} | units | status)
    np.testing.assert_array_equal(memory_bytes(doubted), [1e9, 2**30, np.nan, np.nan])
    assert np.isnan(memory_bytes(pd.DataFrame({"status": ["ok"]}))).all()


@given(
    *[st.sampled_from([1, 2, 4])] * 3,
    st.integers(0, 3),
    st.sampled_from(["none", "selective", "full"]),
    st.sampled_from(["generic", "nanotron@2024", "megatron-deepspeed@2022"]),
)
def test_memory_grows_with_the_model_and_falls_with_its_shards(
    tp, pp, dp, zero, recompute, framework
):
    """More layers, wider ones, fewer tensor or sharding ranks: never less, on the fullest rank."""
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=32, seq_len=2048)
    layout = Layout(tp=tp, pp=pp, dp=dp, zero=zero, recompute=recompute, sequence_parallel=tp > 1)

    def peak(model: Transformer = MODEL, **changes: int) -> float:
        problem = step_problem(model, cluster, job, None, catalog.framework(framework))
        laid = replace(layout, **changes)
        return peak_memory(problem, [replace(laid, sequence_parallel=laid.tp > 1)])[0].item()

    usual = peak()
    assert peak(replace(MODEL, layers=32)) > usual
    assert peak(replace(MODEL, hidden=4096, ffn_hidden=16384, head_dim=128)) > usual
    assert peak(tp=2 * tp) < usual
    # without sharded states replicas hold alike, but for what a communicator takes
    assert peak(dp=2 * dp) <= usual * (1 + 1e-9) if zero and dp > 1 else True
