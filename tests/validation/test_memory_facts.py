"""Memory as the counters of published runs see it."""

from dataclasses import replace

import pytest

from perfmodel import catalog
from perfmodel.prediction import EAGER, explain, step_problem
from perfmodel.prediction._counted_memory import FRAGMENTATION, workspace_bytes
from perfmodel.spec import Job, Layout, Transformer, partition_by_cost
from perfmodel.validation._cases import counter_of

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
    ("framework", "kind", "counter"),
    [
        ("megatron-core@2025", "max over ranks of torch max_allocated", "allocated"),
        ("nanotron@2024", "torch max allocated or reserved", "reserved"),
        ("megatron-lm@2023", "peak memory as printed (rounded)", "allocated"),
        ("oneflow@2021", "nvidia-smi", "device"),
        ("generic", "torch reserved", "reserved"),
        ("generic", "", "device"),
        ("megatron-lm@2023", "nvidia-smi", "device"),
    ],
)
def test_counters_follow_words_and_then_reports(framework, kind, counter):
    assert counter_of(kind, catalog.framework(framework)) == counter


def test_counters_nest_and_the_first_rank_keeps_its_outputs():
    layout = Layout(tp=2, pp=4, dp=1, sequence_parallel=True, partition=(6, 5, 5, 0))
    cluster, job = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096)
    found = explain(step_problem(MODEL, cluster, job), layout)
    allocated, reserved, device = (found.memory_counted_bytes[k] for k in ("allocated", "reserved", "device"))
    first = found.memory_per_stage[0]
    assert found.memory == first
    moving = first.activations + first.buffers - EAGER.context_bytes
    assert allocated == pytest.approx(first.peak - EAGER.context_bytes + workspace_bytes(cluster.device))
    assert reserved - allocated == pytest.approx(moving * FRAGMENTATION / (1 - FRAGMENTATION))
    assert device - reserved == pytest.approx(EAGER.context_bytes - workspace_bytes(cluster.device))
    nanotron = replace(EAGER, keeps_outputs=True, reports_first_stage=True)
    kept = explain(step_problem(MODEL, cluster, job, None, nanotron), layout).memory_counted_bytes["reserved"]
    # four micro-batches of half a sequence
    assert kept - reserved == pytest.approx(4 * 4096 * 2048 * 2 / 2 / (1 - FRAGMENTATION))


def test_buckets_and_dummies_of_gradients():
    cluster, job, layout = catalog.cluster("dgx-h100"), Job(global_batch=8, seq_len=4096), Layout(tp=4, dp=2)

    def buffers(layout: Layout = layout, **changes: object) -> float:
        return explain(step_problem(MODEL, cluster, job, None, replace(EAGER, **changes)), layout).memory.buffers

    weights = explain(step_problem(MODEL, cluster, job), layout).memory.weights
    assert buffers() - buffers(bucket_bytes=0.0) == pytest.approx(320e6)
    assert buffers(ddp_buckets=True) - buffers() == pytest.approx(weights)
    sharded = layout.replace(zero=1)
    assert buffers(sharded, ddp_buckets=True) == buffers(sharded)
    # query-key-value, output, gate and value, down: one gradient of each shape whatever the layers
    shapes = 3 * 2048 * 2048 + 2048 * 2048 + 2 * 8192 * 2048 + 8192 * 2048
    assert buffers(cached_weight_gradients=True) - buffers() == pytest.approx(2 * shapes / 4)
