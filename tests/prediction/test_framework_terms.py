"""Named terms of frameworks: clocks under load, kernel generations, contention, what is kept and
left eager."""

import subprocess
import sys
from dataclasses import replace
from math import exp, log, sqrt

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import CollectiveModel, KernelModel, event_times
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ops import Attention, Collective, Gemm, KernelOp, MemoryBound, Pass
from perfmodel.prediction import (
    EAGER,
    Site,
    block_times,
    explain,
    priced_events,
    step_problem,
    step_times_s,
)
from perfmodel.prediction.blocks import GRAPH_OPERATORS
from perfmodel.prediction.overlap import time_phases
from perfmodel.prediction.placement import Placement
from perfmodel.prediction.sites import (
    FORWARD_SHARE,
    STOCK_PRODUCTS,
    attention_slowdown,
    framework_slowdown,
)
from perfmodel.prediction.sites.constants import share_a_team, source_medians, sustained, team_key
from perfmodel.spec import AttentionKernel, CudaGraphs, Device, Job, Layout, Transformer
from perfmodel.spec.parts import Experts
from perfmodel.workload import Kernels, Shard, blocks, is_cast

A100, H100, B200 = (
    catalog.device(name) for name in ("A100-SXM4-80GB", "H100-SXM5-80GB", "B200-SXM-180GB")
)
MODEL = catalog.model("gpt3-6.7b")
LAYOUT = Layout(tp=8, dp=1, sequence_parallel=True)


def step_s(job: Job, layout: Layout = LAYOUT, site: Site | None = None, **changes: object) -> float:
    problem = step_problem(
        MODEL, catalog.cluster("dgx-a100"), job, None, EAGER.replace(**changes), site
    )
    return float(step_times_s(problem, [layout])[0])


def test_what_slows_an_op_in_training() -> None:
    framework, site = replace(EAGER, attention="flash-1"), Site(sustained=(("Ampere", 0.1),))
    attention = Attention(
        op="flash_attention", batch=1, heads=8, kv_heads=8, seq_q=512, seq_kv=512, head_dim=64
    )
    for device in (A100, H100):
        assert (
            framework_slowdown(framework, attention, device)
            == attention_slowdown("flash-1", device, attention)
            > 1
        )
        assert framework_slowdown(framework, Gemm(m=8, n=8, k=8), device) == 1.0
    assert site.clock(attention, A100) == pytest.approx(exp(0.1))
    assert site.clock(attention, H100) == 1.0
    assert site.clock(Gemm(m=8, n=8, k=8), A100) == site.clock(
        Gemm(m=8, n=8, k=8, dtype="int8"), A100
    )
    assert site.clock(Gemm(m=8, n=8, k=8, dtype="fp32"), A100) == 1.0
    assert site.clock(MemoryBound(op="gelu", rows=8, hidden=8, n_inputs=1), A100) == 1.0


def test_a_lower_power_limit_slows_products_and_nothing_else() -> None:
    job, cluster = Job(global_batch=8, seq_len=2048), catalog.cluster("dgx-a100")

    def took_s(power_w: float | None) -> float:
        limited = replace(cluster, device=replace(cluster.device, power_w=power_w))
        problem = step_problem(MODEL, limited, job, None, EAGER, Site(sustained=()))
        return float(step_times_s(problem, [LAYOUT])[0])

    times_s = [took_s(w) for w in (None, 800.0, 400.0, 300.0, 200.0)]
    assert times_s[0] == times_s[1] <= times_s[2] < times_s[3] < times_s[4]
    assert times_s[4] < times_s[3] * sqrt((300 - 66) / (200 - 66))


def test_sustained_is_the_median_of_other_teams_with_the_tables_own_zero() -> None:
    values = source_medians()["Volta"]
    for left_out in ("", *values):
        by_team: dict[str, list[float]] = {}
        for name, value in values.items():
            if not share_a_team(name, left_out):
                by_team.setdefault(team_key(name), []).append(value)
        kept = [np.median(of_team) for of_team in by_team.values()]
        assert dict(sustained(left_out))["Volta"] == pytest.approx(
            max(0.0, float(np.median([0.0, *kept])))
        )


def test_sustained_slows_a_step_by_the_share_of_products() -> None:
    job = Job(global_batch=8, seq_len=2048)
    base, slower = (step_s(job, site=Site(sustained=of)) for of in ((), (("Ampere", 0.1),)))
    assert 1 < slower / base < exp(0.1)
    assert step_s(job, site=Site(sustained=(("Hopper", 0.1),))) == base


HEADS = Attention(batch=1, heads=16, kv_heads=16, seq_q=16_384, seq_kv=16_384, head_dim=128)


def test_older_attention_kernels_are_slower_and_hopper_widens_the_gap() -> None:
    def over(kernel: AttentionKernel, device: Device) -> float:
        return attention_slowdown(kernel, device, HEADS)

    assert over("fastest", H100) == over("flash-2", A100) == 1.0
    assert over("flash-1-triton", H100) / over("flash-1-triton", A100) == pytest.approx(
        over("flash-2", H100)
    )
    assert over("flash-1", A100) > over("flash-1-triton", A100) > 1.0
    for device in (A100, H100):
        assert over("flash-2-then-cudnn", device) == over("flash-2", device)
    assert over("flash-2-then-cudnn", B200) == 1.0 < over("flash-2", H100) < over("flash-2", B200)
    for device in (A100, H100, B200, catalog.device("Gaudi2")):
        assert over("torch-flash-2", device) == over("flash-2", device)
        assert over("torch-fastest", device) == over("fastest", device)
    assert over("flash-2", catalog.device("RTX-PRO-6000-Server")) == 1.0


@pytest.mark.parametrize("name", ["MI250", "MI300X", "MI355X"])
def test_the_first_generation_of_attention_is_slower_on_amd_too(name: str) -> None:
    device = catalog.device(name)
    fastest = attention_slowdown("fastest", device, HEADS)
    assert attention_slowdown("flash-2", device, HEADS) == fastest
    for kernel in ("flash-1", "flash-1-triton"):
        slower = attention_slowdown(kernel, device, HEADS) / fastest
        assert slower == pytest.approx(attention_slowdown(kernel, A100, HEADS))
        assert slower > 1.0
    assert attention_slowdown("flash-1", catalog.device("Gaudi2"), HEADS) == 1.0


@pytest.mark.parametrize("name", ["MI210", "MI250", "MI300X", "MI325X", "MI350X", "MI355X"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_torch_attends_more_slowly_than_libraries_of_amd(
    name: str, head_dim: int, pass_: Pass
) -> None:
    device, op = catalog.device(name), replace(HEADS, head_dim=head_dim, pass_=pass_)
    library, torch = (
        attention_slowdown(kernel, device, op) for kernel in ("fastest", "flash-2-then-cudnn")
    )
    assert 1 < library < torch
    # it is the same kernel in each of torch's versions
    for kernel in ("torch-flash-2", "torch-fastest"):
        assert attention_slowdown(kernel, device, op) == torch
    # the gap is widest in the backward
    backward = replace(op, pass_="bwd")
    assert torch / library <= attention_slowdown(
        "flash-2-then-cudnn", device, backward
    ) / attention_slowdown("fastest", device, backward)


@pytest.mark.parametrize(
    ("kernel", "head_dim", "measured_tflops"),
    [
        ("fastest", 64, (242, 298, 330, 355)),
        ("fastest", 128, (314, 409, 446, 494)),
        ("flash-2-then-cudnn", 64, (211, 228, 255, 270)),
        ("flash-2-then-cudnn", 128, (214, 257, 290, 307)),
    ],
)
def test_attention_on_mi300x_takes_what_was_measured(
    kernel: AttentionKernel, head_dim: int, measured_tflops: tuple[float, ...]
) -> None:
    """Forward, causal, 16 sequences of 16 heads in bf16 (midiareshadi/attn-dsl-bench,
    results/raw/sweep_v1.csv)."""
    device = catalog.device("MI300X")
    for seq_len, tflops in zip((2048, 4096, 8192, 16_384), measured_tflops, strict=True):
        op = Attention(
            batch=16, heads=16, kv_heads=16, seq_q=seq_len, seq_kv=seq_len, head_dim=head_dim
        )
        alone_s = float(KernelModel.load().times(device, [op]).time_s[0])
        reached = op.amounts()[0] / (alone_s * attention_slowdown(kernel, device, op)) / 1e12
        assert reached == pytest.approx(tflops, rel=0.2)


@pytest.mark.parametrize(
    "name", ["MI100", "MI210", "MI250", "MI300X", "MI355X", "H100-SXM5-80GB", "Gaudi2", "TPU-v5p"]
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_products_that_nobody_tuned_are_slower_where_the_tables_hold_tuned_ones(
    name: str, dtype: str
) -> None:
    device, product = catalog.device(name), Gemm(m=4096, n=4096, k=4096, dtype=dtype)
    stock, tuned = EAGER.replace(tuned_products=False), EAGER.replace(tuned_products=True)
    assert framework_slowdown(tuned, product, device) == 1.0
    # MI100 and NVIDIA's devices were timed as frameworks run them.
    is_tuned_table = name in ("MI210", "MI250", "MI300X", "MI355X")
    assert framework_slowdown(stock, product, device) == (STOCK_PRODUCTS if is_tuned_table else 1.0)
    for op in (HEADS, MemoryBound(op="gelu", rows=8, hidden=8, n_inputs=1)):
        assert framework_slowdown(stock, op, device) == framework_slowdown(tuned, op, device)


@pytest.mark.parametrize("name", ["MI250", "MI300X", "A100-SXM4-80GB"])
def test_stock_products_lengthen_a_step_by_no_more_than_each_product(name: str) -> None:
    cluster = replace(catalog.cluster("dgx-a100"), device=catalog.device(name))
    job = Job(global_batch=8, seq_len=2048)
    took_s = []
    for is_tuned in (True, False):
        problem = step_problem(MODEL, cluster, job, None, EAGER.replace(tuned_products=is_tuned))
        took_s.append(float(step_times_s(problem, [LAYOUT])[0]))
    if cluster.device.vendor == "AMD":
        assert took_s[0] < took_s[1] < STOCK_PRODUCTS * took_s[0]
    else:
        assert took_s[0] == took_s[1]


@pytest.mark.parametrize("name", ["A100-SXM4-80GB", "H100-SXM5-80GB", "MI300X"])
@pytest.mark.parametrize("dtype", ["bf16", "fp8"])
def test_layers_of_transformer_engine_fuse_what_plain_ones_do_not(name: str, dtype: str) -> None:
    device = catalog.device(name)
    if dtype == "fp8" and device.peak.fp8 is None:
        return
    cluster = replace(catalog.cluster("dgx-a100"), device=device)
    took_s = []
    # Under one name, so that both run at the same site.
    for framework in (
        replace(catalog.framework("pytorch-te@2024"), name="pytorch"),
        catalog.framework("pytorch@2024"),
    ):
        recipe = {"fp8_recipe": "delayed"} if dtype == "fp8" else {}
        job = framework.job(MODEL, device, global_batch=8, seq_len=2048, dtype=dtype, **recipe)
        took_s.append(
            float(
                step_times_s(step_problem(MODEL, cluster, job, None, framework), [Layout(dp=8)])[0]
            )
        )
    assert took_s[0] < took_s[1]


@pytest.mark.parametrize(
    ("pass_", "head", "causal", "tflops"),
    [
        ("fwd", 128, True, (298, 319, 333, 335)),
        ("fwd", 128, False, (362, 368, 370, 370)),
        ("fwd", 64, True, (262, 284, 295, 299)),
        ("bwd", 128, False, (291, 310, 318, 322)),
        ("bwd", 64, False, (264, 279, 287, 291)),
    ],
)
def test_flash_attention_2_on_h100(
    pass_: Pass, head: int, causal: bool, tflops: tuple[int, ...]
) -> None:
    """FlashAttention-3 (arXiv 2407.08608), figures 5 and 6: 16k tokens of 2,048 elements in
    sequences of 2k to 16k."""
    ops = [
        replace(
            HEADS,
            batch=16_384 // seq,
            heads=2048 // head,
            kv_heads=2048 // head,
            seq_q=seq,
            seq_kv=seq,
            head_dim=head,
            causal=causal,
            pass_=pass_,
        )
        for seq in (2048, 4096, 8192, 16_384)
    ]
    alone_s = KernelModel.load().times(H100, ops).time_s
    for op, time_s, published in zip(ops, alone_s, tflops, strict=True):
        flops = (
            4
            * 16_384
            * op.seq_q
            * 2048
            * (0.5 if causal else 1.0)
            * (2.5 if pass_ == "bwd" else 1.0)
        )
        rate = flops / (time_s * attention_slowdown("flash-2", H100, op))
        assert rate / 1e12 == pytest.approx(published, rel=0.17)


def test_contention_multiplies_collectives_between_nodes_only() -> None:
    calm = catalog.cluster("dgx-h100")
    inner, outer = calm.levels[0], replace(calm.levels[-1], contention=0.5)
    busy = replace(calm, levels=(*calm.levels[:-1], outer))
    ops = [
        Collective(
            collective="all_reduce",
            bytes=1e8,
            num_ranks=128,
            ranks_per_node=8,
            level=len(calm.levels) - 1,
        ),
        Collective(
            collective="all_reduce",
            bytes=1e8,
            num_ranks=inner.size,
            ranks_per_node=inner.size,
            level=0,
        ),
    ]
    models = KernelModel.load(), CollectiveModel.load()
    before, after = (event_times(ops, cluster, *models) for cluster in (calm, busy))
    np.testing.assert_allclose(after.time_s / before.time_s, [4.0, 1.0], rtol=1e-12)
    np.testing.assert_allclose(after.hi_s / after.time_s, before.hi_s / before.time_s)
    with pytest.raises(PerfModelError, match="contention must be"):
        replace(outer, contention=-1.0)


def test_rings_between_nodes_wait_for_each_further_rank() -> None:
    calm = catalog.cluster("dgx-h100")
    outer = replace(calm.levels[-1], rank_latency_s=30e-6)
    slow = replace(calm, levels=(*calm.levels[:-1], outer))
    level, models = len(calm.levels) - 1, (KernelModel.load(), CollectiveModel.load())
    ops = [
        Collective(
            collective="all_gather", bytes=1e8, num_ranks=128, ranks_per_node=8, level=level
        ),
        Collective(collective="all_reduce", bytes=1e8, num_ranks=16, ranks_per_node=1, level=level),
        Collective(collective="all_reduce", bytes=1e8, num_ranks=8, ranks_per_node=8, level=0),
        Collective(collective="send_recv", bytes=1e8, num_ranks=2, ranks_per_node=1, level=level),
    ]
    before, after = (event_times(ops, cluster, *models) for cluster in (calm, slow))
    np.testing.assert_allclose(
        after.time_s - before.time_s, [127 * 30e-6, 15 * 30e-6, 0.0, 0.0], atol=1e-12
    )
    np.testing.assert_allclose(after.hi_s - before.hi_s, after.time_s - before.time_s, atol=1e-12)
    with pytest.raises(PerfModelError, match="rank_latency_s must"):
        replace(outer, rank_latency_s=-1.0)


def test_hosts_go_on_while_collectives_wait_for_the_slowest_rank() -> None:
    """A step that waits for its hosts takes no longer where its devices differ, until that outlasts
    the hosts."""
    job, layout = Job(global_batch=8, seq_len=2048), Layout(tp=4, dp=2)

    def took_s(skew: float, **host: float) -> float:
        return step_s(job, layout, Site(skew=skew), **host)

    assert took_s(0.02, host_op_s=5e-3) == pytest.approx(took_s(0.0, host_op_s=5e-3), rel=1e-9)
    assert took_s(0.5) > took_s(0.02) > took_s(0.0)


def test_kept_gathered_inputs_cost_memory_and_save_time() -> None:
    job = Job(global_batch=8, seq_len=2048)
    cluster, kept = catalog.cluster("dgx-a100"), replace(job, keep_gathered=True)
    usual, whole = (explain(step_problem(MODEL, cluster, one), LAYOUT) for one in (job, kept))
    # the query-key-value and the first feed-forward product of each layer, and the head's: (1 -
    # 1/tp) 2 s b h each
    products = 2 * MODEL.layers + 1
    more = (whole.memory.peak - usual.memory.peak) / (2 * 2048 * MODEL.hidden * (1 - 1 / 8))
    assert more == pytest.approx(products)
    assert whole.step_time_s <= usual.step_time_s


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_gradients_that_wait_for_weight_gradients_hide_behind_nothing(
    sequence_parallel: bool,
) -> None:
    job, cluster = Job(global_batch=8, seq_len=2048), catalog.cluster("dgx-a100")
    layout = Layout(tp=8, dp=1, sequence_parallel=sequence_parallel)
    usual, waiting = (
        block_times(
            step_problem(MODEL, cluster, job, None, EAGER.replace(tp_gradients_wait=waits)), layout
        )
        for waits in (False, True)
    )
    of_tensor = np.array([group == "tp" for group in waiting.groups])
    assert (usual.overlappable & of_tensor).any()
    assert not (waiting.overlappable & of_tensor).any()
    assert (waiting.exposed[:, :, of_tensor] == 1).all()
    assert (waiting.exposed >= usual.exposed).all()
    # nothing else is different: the collectives take the time by which the step is longer, but for
    # what they slowed
    assert step_s(job, layout, tp_gradients_wait=True) > step_s(job, layout)
    alone = Layout(tp=1, dp=8)
    assert step_s(job, alone, tp_gradients_wait=True) == step_s(job, alone)


def test_eager_kernels_slow_a_step_each_and_half_gradients_cost_two_bytes() -> None:
    job = Job(global_batch=8, seq_len=2048)
    base = step_s(job)
    for kind in ("activation", "cross_entropy"):
        assert step_s(replace(job, eager_kernels=(kind,))) > base
    cluster = catalog.cluster("dgx-a100")
    usual, more = (
        explain(step_problem(MODEL, cluster, one), LAYOUT).memory_per_stage[0].gradients
        for one in (job, replace(job, half_gradients=True))
    )
    assert more / usual == pytest.approx(6 / 4)


def test_gradients_of_unmeasured_devices_follow_the_nearest_forward() -> None:
    """A TPU v5e has no relative with gradients: its own generation was timed forward only."""
    kernels = KernelModel.load()
    for name in ("TPU-v5e", "H200-SXM", "GB200"):
        ops = [
            Gemm(m=8192, n=8192, k=8192, pass_=direction) for direction in ("fwd", "dgrad", "wgrad")
        ]
        forward, dgrad, wgrad = kernels.times(catalog.device(name), ops).time_s
        assert abs(log(dgrad / forward)) < 0.25
        assert abs(log(wgrad / forward)) < 0.25


def test_frozen_weights_have_no_gradients_and_no_optimizer() -> None:
    job, cluster, layout = (
        Job(global_batch=16, seq_len=2048),
        catalog.cluster("dgx-a100"),
        Layout(tp=4, dp=2),
    )
    usual, frozen = (
        explain(step_problem(MODEL, cluster, one), layout)
        for one in (job, replace(job, frozen=True))
    )
    assert frozen.memory.gradients == frozen.memory.optimizer == 0
    assert frozen.memory.weights == usual.memory.weights
    assert (
        frozen.breakdown_s["optimizer"]
        == frozen.breakdown_s["data_parallel_communication_exposed"]
        == 0
    )
    assert frozen.breakdown_s["forward"] == pytest.approx(usual.breakdown_s["forward"])
    # of forward and both gradients, one third is gone; collectives inside the passes stay
    assert 0.55 < frozen.step_time_s / usual.step_time_s < 0.8


def test_graphs_take_the_host_a_few_operators_per_layer_or_none_at_all() -> None:
    slow, none = {"host_op_s": 1e-3}, {"host_op_s": 0.0}
    job, layout = Job(global_batch=1, seq_len=128), Layout()
    eager_s, replayed_s, whole_s = (
        step_s(replace(job, cuda_graphs=graphs), layout, **slow)
        for graphs in ("none", "layers", "step")
    )
    assert whole_s == pytest.approx(step_s(job, layout, **none), rel=1e-6)
    passes_s = 2 * MODEL.layers * GRAPH_OPERATORS * 1e-3
    assert passes_s < replayed_s < eager_s / 2
    compiled = {"execution": "compiled", **slow}
    assert step_s(replace(job, cuda_graphs="layers"), layout, **compiled) == step_s(
        job, layout, **compiled
    )


def test_a_host_that_waits_for_every_kernel_adds_all_its_time() -> None:
    job, layout, host = Job(global_batch=2, seq_len=1024), Layout(tp=2), {"host_op_s": 1e-4}

    def busy_and_late(blocking: bool, **changes: float) -> tuple[float, float]:
        its = replace(job, blocking_launches=blocking)
        problem = step_problem(
            MODEL, catalog.cluster("dgx-a100"), its, None, EAGER.replace(**changes)
        )
        found = block_times(problem, layout)
        return float(found.busy_s.sum()), float(found.gap_s.sum())

    busy_s, hidden_s = busy_and_late(False, **host)
    same_s, late_s = busy_and_late(True, **host)
    assert same_s == pytest.approx(busy_s)
    assert 0 < hidden_s < late_s
    assert busy_and_late(True, host_op_s=2e-4)[1] == pytest.approx(2 * late_s)
    # however short the kernels, a step takes no longer than both together
    assert late_s <= busy_and_late(False, host_op_s=1.0)[1] * 1e-4 + busy_s
    for graphs in ("layers", "step"):
        graphed = replace(job, cuda_graphs=graphs)
        assert step_s(replace(graphed, blocking_launches=True), layout, **host) == step_s(
            graphed, layout, **host
        )


def test_collectives_in_ring_steps_hide_behind_products_and_nothing_else() -> None:
    """A gather that takes longer than its product shows by the difference; attention hides none of
    it."""
    job, cluster = Job(global_batch=8, seq_len=8192), catalog.cluster("dgx-a100")
    fixed = step_problem(MODEL, cluster, job)
    layout = Layout(tp=8, sequence_parallel=True, tp_overlap=True)
    table = block_times(fixed, layout)
    others = np.array([group == "tp" for group in table.groups]) & ~table.overlappable
    assert (table.exposed[~table.layers][:, :, others] == 1).all()  # no ring in embedding and head
    happen = (table.counts[:, :, others] > 0) & table.layers[:, None, None]
    shares = table.exposed[:, :, others][happen]
    assert shares.min() >= 1 / 8  # the first step of a ring has nothing to hide behind
    assert shares.min() < 1
    node, *rest = cluster.levels
    slow = replace(
        cluster,
        levels=(replace(node, bandwidth_bytes_per_s=node.bandwidth_bytes_per_s / 1e3), *rest),
    )
    slow_table = block_times(step_problem(MODEL, slow, job), layout)
    assert slow_table.exposed[:, :, others][happen].min() > 0.9


@pytest.mark.parametrize("etp", [1, 4])
def test_ring_steps_hide_nothing_that_experts_exchange_and_have_no_products_of_theirs(
    etp: int,
) -> None:
    model = replace(MODEL, experts=Experts(count=8, topk=2, ffn_hidden=4 * MODEL.hidden))
    problem = step_problem(model, catalog.cluster("dgx-h100"), Job(global_batch=32, seq_len=4096))
    layout = Layout(tp=4, dp=8, ep=8, etp=etp, sequence_parallel=True)
    alone, rings = (block_times(problem, layout.replace(tp_overlap=on)) for on in (False, True))
    of_experts = np.array([group in ("ep", "etp") for group in rings.groups])
    assert (rings.counts * of_experts).any()
    assert (rings.exposed[:, :, of_experts] == 1).all()
    grouped = np.array([isinstance(op, Gemm) and op.grouped for op in rings.ops])
    # products of attention alone have ring steps: experts' that take ever longer hide no more of
    # them
    longer = time_phases(rings.events, rings.time_s * np.where(grouped, 10.0, 1.0), 0.0, 0.0)
    np.testing.assert_allclose(longer.exposed, rings.exposed)
    assert rings.exposed.min() < 1
    assert (rings.phase_s <= alone.phase_s * (1 + 1e-9)).all()


def test_adapters_pass_over_activations_and_need_no_gradient_buffers() -> None:
    job, cluster, layout = (
        Job(global_batch=16, seq_len=2048, frozen=True),
        catalog.cluster("dgx-a100"),
        Layout(dp=8),
    )
    bare, adapted = (
        explain(step_problem(MODEL, cluster, one), layout)
        for one in (job, replace(job, adapter_rank=16))
    )
    assert 1.02 < adapted.step_time_s / bare.step_time_s < 1.3
    assert adapted.memory.activations > bare.memory.activations
    with pytest.raises(LayoutError, match="frozen"):
        replace(job, frozen=False, adapter_rank=16)


@pytest.mark.parametrize(("recipe", "kernels"), [("delayed", 2), ("rowwise", 6), ("aqt", 6)])
def test_recipes_that_keep_nothing_narrow_quantise_for_every_product(
    recipe: str, kernels: int
) -> None:
    dtype = "int8" if recipe == "aqt" else "fp8"
    job = Job(global_batch=8, seq_len=2048, dtype=dtype, fp8_recipe=recipe)
    (layer, _) = blocks(MODEL, job, Shard())[1]
    passes = (*layer.forward, *layer.backward_input, *layer.backward_weight)
    found = sum(
        count
        for op, count in passes
        if isinstance(op, MemoryBound) and op.op == "quantize_fp8_static"
    )
    products = sum(count for op, count in layer.forward if isinstance(op, Gemm))
    assert found == kernels * products
    plain = replace(job, fp8_recipe="" if recipe == "aqt" else "delayed")
    assert layer.activation_bytes.none >= blocks(MODEL, plain, Shard())[1][0].activation_bytes.none


def test_random_numbers_that_gradients_are_rounded_by_are_written_and_read() -> None:
    """AQT: 13 bytes per element of a gradient and 5 of any other operand, in either product of the
    backward pass."""
    job = Job(global_batch=8, seq_len=2048, dtype="int8", fp8_recipe="aqt")
    (layer, _) = blocks(MODEL, job, Shard())[1]
    weights = sum(op.n * op.k * count for op, count in layer.forward if isinstance(op, Gemm))
    inputs = sum(op.m * op.k * count for op, count in layer.forward if isinstance(op, Gemm))
    outputs = sum(op.m * op.n * count for op, count in layer.forward if isinstance(op, Gemm))

    def cast_bytes(kernels: Kernels) -> float:
        casts = (
            (op, count) for op, count in kernels if isinstance(op, MemoryBound) and is_cast(op)
        )
        return sum(3.0 * op.rows * op.hidden * count for op, count in casts)

    assert cast_bytes(layer.forward) == pytest.approx(5 * (inputs + weights), rel=0.01)
    assert cast_bytes(layer.backward_input) == pytest.approx(13 * outputs + 5 * weights, rel=0.01)
    assert cast_bytes(layer.backward_weight) == pytest.approx(13 * outputs + 5 * inputs, rel=0.01)


def test_gradients_added_up_apart_cost_a_kernel_per_weight_and_micro_batch() -> None:
    job = Job(global_batch=8, seq_len=2048)
    apart = replace(job, half_gradients=True)
    (usual, _), (more, _) = (blocks(MODEL, one, Shard(tp=8))[1] for one in (job, apart))
    added = more.backward_weight[len(usual.backward_weight) :]
    ((op, count),) = added
    # 10 bytes a parameter: a 16-bit gradient read, an fp32 one read and written
    assert count == 6
    assert count * op.bytes == pytest.approx(10 * usual.params, rel=0.01)
    # and the products no longer accumulate themselves
    assert not any(op.accumulate for op, _ in more.backward_weight if isinstance(op, Gemm))


def test_zero_1_that_reduces_everything_on_every_rank_takes_longer() -> None:
    job = Job(global_batch=64, seq_len=2048)
    cluster, layout = (
        catalog.cluster("dgx-a100"),
        Layout(tp=1, dp=64, zero=1, overlap_grad_reduce=False),
    )
    scattered, whole = (
        explain(step_problem(MODEL, cluster, one), layout).breakdown_s[
            "data_parallel_communication_exposed"
        ]
        for one in (job, replace(job, all_reduce_gradients=True))
    )
    # an all-reduce is a scatter and a gather; the gather of 16-bit weights comes on top of either
    assert 1.2 < whole / scattered < 2.0


def test_layouts_of_attention_are_copied_to_and_back() -> None:
    job = Job(global_batch=8, seq_len=2048)
    copied = replace(job, eager_kernels=("attention_layout",))
    (usual, _), (more, _) = (blocks(MODEL, one, Shard(tp=8))[1] for one in (job, copied))

    def copies(kernels: Kernels) -> list[KernelOp]:
        return [op for op, count in kernels for _ in range(count) if op.op == "mul_scalar"]

    assert not copies(usual.forward)
    width = MODEL.hidden // 8
    assert [op.hidden for op in copies(more.forward) if isinstance(op, MemoryBound)] == [
        3 * width,
        2 * width,
        2 * width,
    ]
    assert len(copies(more.backward_input)) == 3


def test_operators_without_kernels_raise_the_floor_of_short_layers() -> None:
    job, cluster = Job(global_batch=8, seq_len=64), catalog.cluster("dgx-a100")
    usual, more = (
        explain(
            step_problem(MODEL, cluster, job, None, EAGER.replace(**changes)), LAYOUT
        ).step_time_s
        for changes in ({}, {"forward_bookkeeping": 11, "backward_bookkeeping": 13})
    )
    micro_batches = job.num_microbatches(LAYOUT)
    # a part of the bookkeeping hides behind kernels that are longer than their launches
    assert more - usual == pytest.approx(
        24 * EAGER.host.host_op_s * MODEL.layers * micro_batches, rel=0.15
    )


def test_a_group_within_a_node_crosses_no_network() -> None:
    cluster = catalog.cluster("dgx-a100")
    ends = Placement.of("embedding", Layout(tp=1, pp=8, dp=1)).collective(
        "all_reduce", 1e6, "bf16", cluster
    )
    assert (ends.num_ranks, ends.num_nodes, ends.level) == (2, 1, 0)
    apart = Placement.of("embedding", Layout(tp=1, pp=16, dp=1)).collective(
        "all_reduce", 1e6, "bf16", cluster
    )
    assert (apart.num_nodes, apart.level) == (2, 1)


@pytest.mark.parametrize("name", catalog.frameworks())
def test_gradients_of_fp32_tensors_are_fp32(name: str) -> None:
    """TF32 is a way to multiply them, whatever narrower jobs reduce."""
    for framework in catalog.framework_versions(name):
        assert (
            framework.job_defaults("tf32")["grad_dtype"]
            == framework.job_defaults("fp32")["grad_dtype"]
            == "fp32"
        )


def _attention_core(
    heads: int, head_dim: int, micro_batch: int = 1, dtype: str = "bf16"
) -> list[object]:
    net = replace(MODEL, heads=heads, kv_heads=heads, head_dim=head_dim, hidden=heads * head_dim)
    job = Job(global_batch=8, seq_len=2048, flash_attention=False, dtype=dtype)
    layer = next(
        b for b, _ in blocks(net, job, Shard(micro_batch=micro_batch)) if b.recompute_selective
    )
    return [op for op, _ in layer.recompute_selective]


@pytest.mark.parametrize(
    ("head_dim", "dtype"), [(144, "bf16"), (108, "fp32"), (150, "fp32"), (104, "bf16")]
)
def test_batched_products_with_unaligned_rows_leave_the_tensor_cores(
    head_dim: int, dtype: str
) -> None:
    products = [op for op in _attention_core(16, head_dim) if isinstance(op, Gemm)]
    assert len(products) == 2
    assert {op.dtype for op in products} == {dtype}


def test_softmax_is_fused_over_multiples_of_four_matrices_of_16_bits() -> None:
    def names(heads: int, micro_batch: int, dtype: str = "bf16") -> list[str]:
        return [
            op.op
            for op in _attention_core(heads, 128, micro_batch, dtype)
            if isinstance(op, MemoryBound)
        ]

    assert "scale_mask_softmax" in names(2, 2)
    for dtype in ("fp32", "tf32"):
        assert names(2, 2, dtype) == names(2, 1)
    assert "scale_mask_softmax" not in names(2, 1)
    assert "softmax" in names(2, 1)


def test_recompute_that_stops_early_leaves_out_the_last_product() -> None:
    job = Job(global_batch=8, seq_len=2048)
    whole, early = (
        blocks(MODEL, replace(job, stops_recompute=stops), Shard()) for stops in (False, True)
    )
    for (a, _), (b, _) in zip(whole, early, strict=True):
        assert a.forward == b.forward
        assert a.backward_input == b.backward_input
        if a.recompute_full:
            left_out = [op for op, _ in a.recompute_full[len(b.recompute_full) :]]
            assert b.recompute_full == a.recompute_full[: len(b.recompute_full)]
            assert [type(op) for op in left_out].count(Gemm) == 1


def test_attention_of_tpu_training_is_bounded_by_its_backward() -> None:
    job = Job(global_batch=8, seq_len=2048)
    forward = Attention(
        op="flash_attention", batch=4, heads=32, kv_heads=32, seq_q=2048, seq_kv=2048, head_dim=128
    )
    for device, bounded in (("TPU-v5e", True), ("A100-SXM4-80GB", False)):
        cluster = catalog.cluster_for(device, 8, "", "")
        problem = step_problem(MODEL, cluster, job, None, EAGER, Site(sustained=()))
        forward_s, backward_s = priced_events(
            problem, [forward, replace(forward, pass_="bwd")]
        ).time_s
        alone_s = event_times([forward], cluster, problem.kernels, problem.collectives).time_s[0]
        assert forward_s == pytest.approx(
            min(alone_s, FORWARD_SHARE * backward_s) if bounded else alone_s
        )


@pytest.mark.parametrize("device", ["GB200-NVL72", "B300-SXM"])
@pytest.mark.parametrize("pass_", ["fwd", "dgrad", "wgrad"])
def test_experts_in_one_kernel_take_no_longer_than_their_products_one_by_one(
    device: str, pass_: Pass
) -> None:
    model, cluster = catalog.model("qwen3-30b-a3b"), catalog.cluster_for(device, 8, "", "")
    m, n, k, groups = 2048, 1536, 2048, 16
    # A grouped gradient product carries its forward's shape, a single one its own.
    own = {"fwd": (m, n, k), "dgrad": (m, k, n), "wgrad": (n, k, m)}[pass_]
    job = Job(global_batch=8, seq_len=4096, dtype="fp8", fp8_recipe="mxfp8")

    def times_s(model: Transformer, job: Job) -> tuple[float, float]:
        problem = step_problem(
            model, cluster, job, None, EAGER, Site(sustained=(), power_limited=False)
        )
        grouped = Gemm(
            op="grouped_linear", dtype=job.dtype, groups=groups, m=m, n=n, k=k, pass_=pass_
        )
        alone = Gemm(dtype=job.dtype, m=own[0], n=own[1], k=own[2], pass_=pass_)
        grouped_s, alone_s = priced_events(problem, [grouped, alone]).time_s
        return float(grouped_s), groups * float(alone_s)

    fused = replace(job, fused_experts=True)
    apart_s, each_s = times_s(model, job)
    assert times_s(model, fused) == pytest.approx((min(apart_s, each_s), each_s))
    # Other recipes, and experts with biases, are not fused.
    current = {"fp8_recipe": "current"}
    assert times_s(model, replace(fused, **current)) == times_s(model, replace(job, **current))
    with_bias = replace(model, bias=True)
    assert times_s(with_bias, fused) == times_s(with_bias, job)


def test_omni_path_delivers_a_share_and_contends() -> None:
    cluster = catalog.cluster_for("V100-SXM2-32GB", 4, "NVLink2", "Omni-Path, 4 links per node")
    ops = [
        Collective(collective="all_reduce", bytes=4e9, num_ranks=n, ranks_per_node=4, level=1)
        for n in (16, 64)
    ]
    times = event_times(ops, cluster, KernelModel.load(), CollectiveModel.load()).time_s
    bus = [2 * (n - 1) / n * 4 / t for n, t in zip((16, 64), times, strict=True)]
    assert bus[0] == pytest.approx(10.6, rel=0.1)
    assert bus[1] == pytest.approx(6.8, rel=0.1)


def test_constants_of_published_runs_are_not_read_on_import() -> None:
    code = "import perfmodel.prediction.sites.constants as s; print(s.source_medians.cache_info().misses)"
    out = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    assert out.stdout.strip() == "0"


def test_grouped_products_are_launched_expert_by_expert() -> None:
    experts, cluster = catalog.model("qwen3-30b-a3b"), catalog.cluster("dgx-h100")
    job = Job(global_batch=8, seq_len=256)  # so short that the host holds the step up
    layout = Layout.parse("dp=8,ep=8,zero=1")

    def of(graphs: CudaGraphs = "none", **changes: object) -> float:
        graphed = replace(job, cuda_graphs=graphs)
        return explain(
            step_problem(experts, cluster, graphed, None, EAGER.replace(**changes)), layout
        ).step_time_s

    assert experts.experts is not None
    # of both, forward and both gradients
    products, local = (
        2 * 3 * experts.layers,
        experts.experts.count // 8,
    )
    assert of(grouped_launch_s=1e-4) - of() == pytest.approx(products * (local - 1) * 1e-4, rel=0.2)
    assert of(grouped_launch_s=1e-4, host_op_s=0.0) == of(host_op_s=0.0)
    # graphs of layers leave them to the host, one of the whole step does not
    assert of("step") < of("layers") < of()
    assert of("layers", grouped_launch_s=1e-4) > of("layers") + products * (local - 2) * 1e-4 / 2
    assert of("step", grouped_launch_s=1e-4) == of("step")


def test_scales_of_blocks_need_matrix_units_that_take_them() -> None:
    bridge = catalog.framework("megatron-bridge@2026")
    recipes = {
        name: bridge.job(MODEL, catalog.device(name), global_batch=8, dtype="fp8").narrow.fp8_recipe
        for name in ("H100-SXM5-80GB", "B200-SXM-180GB")
    }
    assert recipes == {"H100-SXM5-80GB": "current", "B200-SXM-180GB": "mxfp8"}
