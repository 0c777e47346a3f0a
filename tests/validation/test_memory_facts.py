"""Memory as the counters of published runs see it."""

from dataclasses import replace

import pytest

from perfmodel import catalog
from perfmodel.prediction import EAGER, explain, step_model
from perfmodel.spec import Job, Layout, Transformer
from perfmodel.validation._case_rows import Case
from perfmodel.validation._memory_facts import partition_by_cost
from perfmodel.validation._memory_seen import FRAGMENTATION, counter_of, seen_bytes, workspace_bytes

MODEL = Transformer(
    name="llama-like-1B", layers=16, hidden=2048, heads=32, kv_heads=32, head_dim=64, ffn_hidden=8192, vocab=131072,
    seq_len=4096, gated_ffn=True, activation="silu", norm="rms_norm", positions="rope", bias=False, dropout=False,
)  # fmt: skip


@pytest.mark.parametrize(
    ("stages", "layers"),
    [(1, None), (2, (11, 5)), (4, (6, 5, 5, 0)), (8, (3, 3, 2, 3, 2, 2, 1, 0)), (32, None)],
)
def test_stages_balanced_by_cost_count_the_head_as_four_layers(stages, layers):
    """h V = 4 (4 h^2 + 3 h f): 20 units over the stages, each closed by the block that goes beyond its share."""
    assert partition_by_cost(MODEL, stages) == layers


@pytest.mark.parametrize(
    ("source", "kind", "counter"),
    [
        ("SimuMax B200 release v1.2 (real runs)", "max over ranks of torch max_allocated", "allocated"),
        ("ultrascale-playbook sweep (nanotron)", "torch max allocated or reserved", "reserved"),
        ("Zero Bubble Pipeline Parallelism paper", "peak memory as printed (rounded)", "allocated"),
        ("OneFlow DLPerf GPT report", "nvidia-smi", "device"),
        ("somebody", "torch reserved", "reserved"),
        ("somebody", "", "device"),
    ],
)
def test_counters_follow_reports_and_words(source, kind, counter):
    assert counter_of(source, kind) == counter


def test_counters_nest_and_the_first_rank_keeps_its_outputs():
    layout = Layout(tp=2, pp=4, dp=1, sequence_parallel=True, partition=(6, 5, 5, 0))
    case = Case("one", MODEL, catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096), layout)
    found = explain(step_model(case.model, case.cluster, case.job), layout)
    allocated, reserved = (seen_bytes(found, case, EAGER, "x", f"torch {k}") for k in ("allocated", "reserved"))
    device = seen_bytes(found, case, EAGER, "x", "nvidia-smi")
    first = found.memory_per_stage[0]
    assert found.memory == first
    moving = first.activations + first.buffers - EAGER.context_bytes
    assert allocated == pytest.approx(first.peak - EAGER.context_bytes + workspace_bytes(case.cluster.device))
    assert reserved - allocated == pytest.approx(moving * FRAGMENTATION / (1 - FRAGMENTATION))
    assert device - reserved == pytest.approx(EAGER.context_bytes - workspace_bytes(case.cluster.device))
    nanotron = seen_bytes(found, case, EAGER, "ultrascale-playbook", "")
    # four micro-batches of half a sequence
    assert nanotron - reserved == pytest.approx(4 * 4096 * 2048 * 2 / 2 / (1 - FRAGMENTATION))


def test_buckets_and_dummies_of_gradients():
    cluster, job, layout = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096), Layout(tp=4, dp=2)

    def buffers(layout: Layout = layout, **changes: object) -> float:
        return explain(step_model(MODEL, cluster, job, None, replace(EAGER, **changes)), layout).memory.buffers

    weights = explain(step_model(MODEL, cluster, job), layout).memory.weights
    assert buffers() - buffers(bucket_bytes=0.0) == pytest.approx(320e6)
    assert buffers(ddp_buckets=True) - buffers() == pytest.approx(weights)
    sharded = layout.replace(zero=1)
    assert buffers(sharded, ddp_buckets=True) == buffers(sharded)
    # query-key-value, output, gate and value, down: one gradient of each shape whatever the layers
    shapes = 3 * 2048 * 2048 + 2048 * 2048 + 2 * 8192 * 2048 + 8192 * 2048
    assert buffers(cached_weight_gradients=True) - buffers() == pytest.approx(2 * shapes / 4)
