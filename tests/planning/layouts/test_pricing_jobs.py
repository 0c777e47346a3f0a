"""Memory and bounds of grids hold for every flag of a job, every kind of model, schedule and
framework."""

import itertools
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.prediction import (
    COMPILED,
    EAGER,
    StepProblem,
    check_layout,
    evaluate,
    explain,
    layout_batches,
    step_problem,
)
from perfmodel.prediction.composition import bundle_events
from perfmodel.prediction.grids import LayoutGrid, lower_bounds_s, price_grids
from perfmodel.prediction.memory import peak_memory
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.session import Session
from perfmodel.spec import (
    OPTIMIZERS,
    Framework,
    Job,
    Layout,
    Mlp,
    RowKernels,
    Transformer,
    key_fields,
)
from perfmodel.spec.parts import Experts, WindowHeads

NAMES = [name for name in schedule_names() if name != "forward"] + ["chimera:4", "seq1f1b:4"]
DENSE = Transformer(
    name="dense",
    layers=12,
    hidden=1024,
    heads=16,
    kv_heads=16,
    head_dim=64,
    ffn_hidden=4096,
    vocab=32000,
    seq_len=1024,
)
MODELS = [
    DENSE,
    replace(DENSE, name="windowed", window=256, full_attention_every=2, tied_embeddings=False),
    replace(
        DENSE,
        name="experts",
        experts=Experts(count=8, topk=2, ffn_hidden=1024, first_dense_layers=2),
    ),
    replace(catalog.model("gpt-oss-20b"), layers=10),
    replace(DENSE, name="encoder and decoder", layers=8, decoder_layers=6),
    replace(catalog.model("qwen3-next-80b-a3b"), layers=10),
    replace(
        DENSE,
        name="further tokens",
        mtp_layers=1,
        norm_at="both",
        qk_norm=True,
        qk_norm_of_all_heads=True,
    ),
    replace(DENSE, name="side by side", parallel_blocks="one_norm"),
    replace(DENSE, name="side by side on two norms", parallel_blocks="two_norms", window=256),
    replace(
        DENSE,
        name="other heads in the window",
        window=256,
        full_attention_every=2,
        window_heads=WindowHeads(heads=8, kv_heads=4, head_dim=128),
        value_dim=32,
        head_gate=True,
    ),
    replace(
        DENSE,
        name="experts beside attention",
        parallel_blocks="one_norm",
        experts=Experts(count=8, topk=2, ffn_hidden=1024, first_dense_layers=2),
    ),
    replace(catalog.model("dit-b-2"), seq_len=1024),
    Mlp(name="mlp", layers=14, hidden=4096),
    catalog.model("resnet-50"),
    catalog.model("vgg-16"),
]
FRAMEWORKS = [
    EAGER,
    COMPILED,
    Framework(
        dp_overlap_loss=0.3,
        straggling=0.02,
        step_overhead_s=1e-3,
        tp_overlap_loss=0.3,
        host_op_s=0.0,
    ),
    Framework(blocking_sends=True, host_op_s=0.0),
    Framework(routing_forward_bookkeeping=50, routing_backward_bookkeeping=20),
]
MOST_MICRO_BATCHES = 24
JOBS = (
    {
        "global_batch": st.sampled_from([1, 16, 48]),
        "seq_len": st.just(1024),
        "dtype": st.sampled_from(["bf16", "fp16", "fp32"]),
        "mode": st.sampled_from(["train", "train", "inference"]),
        "grad_dtype": st.sampled_from(["fp32", "bf16"]),
        "eager_kernels": st.sampled_from([(), ("norm", "attention_layout")]),
        "row_kernels": st.sampled_from(get_args(RowKernels)),
        "optimizer": st.sampled_from(sorted(OPTIMIZERS)),
        "recompute_modules": st.sampled_from(
            [("core_attn",), ("layernorm", "mlp", "moe_act"), ("moe",)]
        ),
        "wide_modules": st.sampled_from([(), ("attention", "further_tokens")]),
        "wide_last_layers": st.sampled_from([0, 3]),
        "fp8_recipe": st.sampled_from(["", "delayed", "mxfp8"]),
        "expert_dispatcher": st.sampled_from(get_args(key_fields(Job)["expert_dispatcher"].hint)),
        "expert_imbalance": st.sampled_from([1.0, 1.3]),
        "expert_capacity_factor": st.sampled_from([None, None, 1.5]),
        "secondary_shards": st.sampled_from([0, 0, 2]),
        "bucket_bytes": st.sampled_from([None, 2e9]),
        "cached_tokens": st.just(0),  # of inference
        "adapter_rank": st.sampled_from([0, 0, 16]),
        "adapter_modules": st.sampled_from(
            [("linear_qkv", "linear_proj"), ("linear_qkv", "linear_fc1")]
        ),
        "base_weights": st.sampled_from(["", "", "nf4"]),
        "mean_tokens": st.sampled_from([None, None, 700.0]),
        "rms_tokens": st.sampled_from([None, None, 720.0]),
        "head": st.sampled_from(get_args(key_fields(Job)["head"].hint)),
        "input_samples_per_s": st.sampled_from([None, None, 40.0]),
        "generation_s": st.sampled_from([0.0, 0.0, 3.0]),
        "cuda_graphs": st.sampled_from(get_args(key_fields(Job)["cuda_graphs"].hint)),
    }
    | {
        key: st.booleans()
        for key, entry in key_fields(Job).items()
        if isinstance(entry.default, bool)
    }
    | {
        "fp8_attention": st.just(False),  # of products in 8 bits
    }
)


@st.composite
def layouts(draw) -> Layout:
    name, pp = draw(st.sampled_from(NAMES)), draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    tp, dp, cp = (
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 2, 4])),
        draw(st.sampled_from([1, 1, 2])),
    )
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    etp = draw(st.sampled_from([None, None, 1]))
    ranks = dp * cp * (tp if etp else 1)
    looped = name in ("interleaved", "breadth-first", "gpipe") and pp > 1
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        cp=cp,
        ep=draw(st.sampled_from([1, 2])) if ranks > 1 else 1,
        etp=etp,
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        schedule=name,
        vpp=draw(st.sampled_from([1, 2, 3])) if looped else 1,
        zero=draw(st.integers(0, 3)) if ranks > 1 else 0,
        recompute=recompute,
        recompute_full_layers=draw(st.sampled_from([None, (1,), (2,)]))
        if recompute != "full"
        else None,
        sequence_parallel=draw(st.booleans()) and tp > 1,
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        tp_overlap=draw(st.booleans()),
        offload=draw(st.booleans()),
        cp_kind=draw(st.sampled_from(["ring", "all_gather", "gathered_ring", "ulysses"])),
        cp_balanced=draw(st.booleans()),
        ep_overlap=draw(st.booleans()),
        order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "pp-tp-cp-ep-dp", "ep-dp-cp-tp-pp"])),
    )


def possible(problem: StepProblem, layout: Layout) -> bool:
    try:
        check_layout(problem.model, problem.cluster, problem.job, layout)
        too_many = problem.job.num_microbatches(layout) > MOST_MICRO_BATCHES
        if too_many or problem.job.seq_len % get_schedule(layout.schedule).slices:
            return False
        layout_batches(problem, [layout])
        return not layout.offload or problem.cluster.device.host_bandwidth_bytes_per_s is not None
    except PerfModelError:
        return False


def test_every_field_of_a_job_is_drawn():
    assert set(JOBS) == set(key_fields(Job)) - {"assumed"}  # words, which cost nothing


@settings(max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.lists(layouts(), min_size=4, max_size=8),
    st.sampled_from(MODELS),
    st.fixed_dictionaries(JOBS),
    st.sampled_from(["dgx-a100", "dgx-h100", "piz-daint"]),
    st.sampled_from(FRAMEWORKS),
)
def test_no_layout_beats_its_bound_and_memory_is_the_same(drawn, model, flags, cluster, framework):
    adapters = flags["adapter_rank"] * isinstance(model, Transformer)
    frozen = flags["frozen"] or adapters > 0
    small_base = flags["base_weights"] if frozen and flags["dtype"] != "fp32" else ""
    job = Job(**flags | {"adapter_rank": adapters, "frozen": frozen, "base_weights": small_base})
    if not isinstance(model, Transformer):
        job = replace(
            job, seq_len=1, mean_tokens=None, rms_tokens=None, head="vocabulary", base_weights=""
        )
        drawn = [
            layout.replace(cp=1, ep=1, etp=None, zero=layout.zero * (layout.dp > 1))
            for layout in drawn
        ]
    elif model.experts is None:
        drawn = [layout.replace(ep=1, etp=None) for layout in drawn]
    problem = step_problem(model, catalog.cluster(cluster), job, None, framework)
    drawn = [layout for layout in drawn if possible(problem, layout)]
    assume(drawn)
    costs = [cost for layout in drawn for cost in price_grids(problem, [LayoutGrid.of(layout)])]
    bound_s, exact_s = (
        np.array([cost.bound_s.item() for cost in costs]),
        evaluate(problem, drawn).step_time_s,
    )
    too_high = [
        str(layout)
        for layout, b, e in zip(drawn, bound_s, exact_s, strict=True)
        if b > e * (1 + 2e-5)
    ]
    assert not too_high
    assert (bound_s > 0).all()
    np.testing.assert_allclose(
        [cost.peak_bytes.item() for cost in costs], peak_memory(problem, drawn)[0], rtol=1e-9
    )


@pytest.mark.parametrize("schedule", NAMES)
def test_a_single_stage_is_bounded_alike_under_every_schedule(schedule):
    """Also where the schedule, which then does not run, would ask for more of the job: equal
    lengths, other batches."""
    job = Job(global_batch=6, seq_len=1025, mean_tokens=600, rms_tokens=700)
    problem = step_problem(DENSE, catalog.cluster("dgx-a100"), job, None, COMPILED)
    plain, same = Layout(dp=2), Layout(dp=2, schedule=schedule)
    [of_plain], [of_same] = (
        list(price_grids(problem, [LayoutGrid.of(layout)])) for layout in (plain, same)
    )
    assert of_same.bound_s.item() == of_plain.bound_s.item()
    assert of_same.peak_bytes.item() == of_plain.peak_bytes.item()
    assert evaluate(problem, [same]).step_time_s == evaluate(problem, [plain]).step_time_s


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h2"])
def test_flags_that_change_what_is_reduced_change_the_bound(zero, schedule):
    """On a slow network a bound that leaves a flag out stays where it is, or rises above the
    step."""
    # Reductions that ZeRO 3 puts off overlap with nothing.
    layout = Layout(pp=2, dp=8, zero=zero, schedule=schedule, overlap_grad_reduce=zero < 3)
    cluster, job = catalog.cluster("piz-daint"), Job(global_batch=16, seq_len=1024)
    step_s, bound_s = {}, {}
    for name in ("all_reduce_gradients", "whole_gradients_in_pipelines", "frozen"):
        for value in (False, True):
            problem = step_problem(DENSE, cluster, replace(job, **{name: value}), None, COMPILED)
            step_s[name, value] = explain(problem, layout).step_time_s
            bound_s[name, value] = lower_bounds_s(problem, [layout])[0]
            assert bound_s[name, value] <= step_s[name, value] * (1 + 2e-5)
        rose = step_s[name, True] / step_s[name, False]
        if rose == 1:
            assert bound_s[name, True] == bound_s[name, False]
    assert (step_s["all_reduce_gradients", True] > step_s["all_reduce_gradients", False]) == (
        zero == 1
    )
    once, each = (
        step_s["whole_gradients_in_pipelines", True],
        step_s["whole_gradients_in_pipelines", False],
    )
    assert once <= each * (1 + 1e-12) if zero >= 2 else once == pytest.approx(each, rel=1e-12)


@pytest.mark.parametrize(("pp", "expert_parallel"), [(1, 2), (2, 4)])
def test_grids_that_exchange_experts_apart_or_beside_passes_keep_apart(pp, expert_parallel):
    """What grids share is found by all that it follows from: asked together, each is priced as it
    is alone."""
    problem = step_problem(
        catalog.model("mixtral-8x7b"),
        catalog.cluster("dgx-h100"),
        Job(global_batch=32, seq_len=4096),
    )
    layouts = [
        Layout(pp=pp, dp=8 // pp, ep=ep, ep_overlap=overlaps)
        for ep, overlaps in itertools.product((1, expert_parallel), (False, True))
    ]
    alone_s = []
    for layout in layouts:
        with Session():
            alone_s += lower_bounds_s(problem, [layout]).tolist()
    # without experts on other ranks there is nothing to overlap
    assert alone_s[0] == alone_s[1]
    assert alone_s[3] < alone_s[2]
    for order in (slice(None), slice(None, None, -1)):
        with Session():
            assert lower_bounds_s(problem, layouts[order]).tolist() == alone_s[order]


@pytest.mark.parametrize("overlaps", [True, False])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("frozen", [False, True])
def test_the_bound_of_one_stage_holds_what_follows_the_last_pass(zero, frozen, overlaps):
    """On one stage nothing is hidden by other ranks: updates and gathers that follow them are in
    step and bound alike, and frozen weights have neither."""
    cluster = catalog.cluster("piz-daint")
    problem = step_problem(
        DENSE, cluster, Job(global_batch=8, seq_len=1024, frozen=frozen), None, COMPILED
    )
    layout = Layout(dp=8, zero=zero, overlap_grad_reduce=overlaps, overlap_param_gather=overlaps)
    step_s, bound_s = explain(problem, layout).step_time_s, lower_bounds_s(problem, [layout])[0]
    assert bound_s <= step_s * (1 + 2e-5)
    if not overlaps and (frozen or zero < 2):
        assert bound_s == pytest.approx(step_s, rel=1e-6)
    if frozen and zero < 3:
        alone = lower_bounds_s(problem, [layout.replace(zero=0)])[0]
        assert bound_s == pytest.approx(alone, rel=1e-12)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_frozen_weights_have_no_gradients_to_reduce(zero):
    """What a faster reduction of gradients would change: nothing."""
    problem = step_problem(
        DENSE, catalog.cluster("piz-daint"), Job(global_batch=16, seq_len=1024, frozen=True)
    )
    (batch,) = layout_batches(problem, [Layout(dp=8, zero=zero)])
    assert {
        op.collective for op in bundle_events(problem, batch, 0).ops if hasattr(op, "collective")
    } <= {"all_gather"}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_single_micro_batch_can_be_offloaded(schedule):
    problem = step_problem(DENSE, catalog.cluster("dgx-a100"), Job(global_batch=1, seq_len=1024))
    layout = Layout(offload=True, schedule=schedule)
    assert (
        explain(problem, layout).memory.peak
        == explain(problem, layout.replace(offload=False)).memory.peak
    )


def test_refusals():
    with pytest.raises(LayoutError, match="uneven stages"):
        LayoutGrid.of(Layout(pp=2, partition=(4, 8)))
