"""What is searched is whole and stated, for every kind of model; variants of one layout are one
row."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from thinned import one_in

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import Reason, Rejection
from perfmodel.planning.layouts import (
    default_space,
    enumerate_layouts,
    restrict,
    search,
    with_options,
)
from perfmodel.prediction import evaluate, step_problem
from perfmodel.prediction.memory import peak_memory
from perfmodel.spec import Job, Layout, Mlp, Problem

MODELS = [
    "gpt3-125m",
    "mixtral-8x7b",
    "t5-small",
    "bert-base",
    "gpt-oss-20b",
    "mlp-1b",
    "resnet-50",
    "vgg-16",
]


@pytest.mark.parametrize("batch", [1, 60, 97, 1024])
@pytest.mark.parametrize("mode", ["train", "inference"])
def test_micro_batches_are_all_divisors_of_the_batch(batch, mode):
    job = Job(global_batch=batch, seq_len=1, mode=mode)
    space = default_space(
        Problem(
            model=catalog.model("mlp-1b"), cluster=catalog.cluster("dgx-2"), job=job, devices=16
        )
    )
    assert space.micro_batch == tuple(n for n in range(1, batch + 1) if batch % n == 0)


@pytest.mark.parametrize(("devices", "options"), [(8, "all"), (12, "recompute,overlap"), (96, "")])
@pytest.mark.parametrize("name", one_in(3, MODELS))
def test_every_kind_of_model_can_be_laid_out_and_evaluated(name, devices, options):
    """Degrees that a model cannot do are counted, and leave a space of layouts that all can be
    evaluated."""
    model, cluster = catalog.model(name), catalog.cluster("dgx-a100")
    if getattr(model, "experts", None) and options == "all":
        devices //= 2  # degrees of experts multiply what there is to list
    job, rejected = Job(global_batch=2 * devices, seq_len=min(model.seq_len, 512)), Counter()
    problem = Problem(model=model, cluster=cluster, job=job, devices=devices)
    space = with_options(default_space(problem), options, cluster)
    layouts = list(enumerate_layouts(space, problem, rejected))
    assert len(layouts) == len(set(layouts)) > 0
    assert all(" tp=" not in str(why) and name not in str(why) for why in rejected)
    some = np.random.default_rng(0).choice(len(layouts), min(6, len(layouts)), replace=False)
    assert (
        evaluate(step_problem(model, cluster, job), [layouts[i] for i in some]).step_time_s > 0
    ).all()


def test_an_mlp_takes_the_micro_batch_that_is_fastest_of_all():
    found = search("mlp-1b", "dgx-2", devices=16, global_batch=4096, top=1)
    assert found.layouts[0].layout.micro_batch > 16
    capped = restrict(
        default_space(catalog.problem("mlp-1b", "dgx-2", devices=16, global_batch=4096)),
        "micro_batch=16",
    )
    assert (
        found.layouts[0].step_time_s
        < search("mlp-1b", "dgx-2", devices=16, global_batch=4096, top=1, space=capped)
        .layouts[0]
        .step_time_s
    )


def test_the_result_states_its_space(case):
    found = search(case.model, case.cluster, devices=8, global_batch=16, job=case.job, top=1)
    assert found.to_dict()["space"]["micro_batch"] == (1, 2, 4, 8, 16)
    assert "micro_batch 1 2 4 8 16" in str(found.space)
    assert "schedule 1f1b gpipe" in str(found.space)


@pytest.mark.slow
def test_the_search_ranks_as_evaluating_every_layout_does(case):
    """Every layout that fits, evaluated one by one, against the best and against what is told to be
    one with it."""
    job = replace(case.job, global_batch=32)
    space = with_options(
        default_space(case.replace(job=job, devices=4)), "recompute,overlap", case.cluster
    )
    every = search(
        case.model,
        case.cluster,
        devices=4,
        global_batch=32,
        job=job,
        space=space,
        every=True,
        distinct=False,
        method="enumerate",
        top=1,
    )
    assert every.evaluated == every.feasible
    found = search(
        case.model,
        case.cluster,
        devices=4,
        global_batch=32,
        job=job,
        space=space,
        method="enumerate",
        top=8,
    )
    assert found.evaluated < every.evaluated
    seen, expected = set(), []
    ranking = every.ranking()
    memory, _ = peak_memory(
        step_problem(case.model, case.cluster, job), [layout for layout, _ in ranking]
    )
    for _, (layout, step_s) in sorted(
        zip(memory.tolist(), ranking, strict=True), key=lambda row: (row[1][1], row[0])
    ):
        same = layout.replace(recompute="none", recompute_full_layers=None, offload=False)
        price = (
            layout.tp,
            layout.pp,
            layout.dp,
            layout.micro_batch,
            layout.schedule,
            layout.vpp,
            step_s,
        )
        if not {same, price} & seen:
            expected.append(step_s)
        seen |= {same, price}
    np.testing.assert_allclose([p.step_time_s for p in found.layouts], expected[:8], rtol=1e-5)


def test_variants_of_one_layout_are_one_row(case):
    space = with_options(default_space(case.replace(devices=8)), "all", case.cluster)
    found = search(
        case.model,
        case.cluster,
        devices=8,
        global_batch=16,
        job=case.job,
        space=space,
        method="enumerate",
    )
    rows = [
        p.layout.replace(recompute="none", recompute_full_layers=None, offload=False)
        for p in found.layouts
    ]
    assert len(set(rows)) == len(rows) == 10
    prices = [
        (p.layout.tp, p.layout.pp, p.layout.micro_batch, p.layout.vpp, p.step_time_s)
        for p in found.layouts
    ]
    assert len(set(prices)) == 10
    assert found.evaluation.alike > 0


def test_options_without_effect_are_not_tried():
    model, cluster = Mlp(name="m", layers=8, hidden=4096), catalog.cluster("dgx-a100")
    job = Job(global_batch=8, seq_len=1)
    problem = Problem(model=model, cluster=cluster, job=job, devices=8)
    space = with_options(default_space(problem), "overlap", cluster)
    layouts = list(enumerate_layouts(space, problem, Counter()))
    # there is no attention to recompute
    assert {layout.recompute for layout in layouts} == {
        "none",
        "full",
    }
    assert not any(layout.sequence_parallel for layout in layouts)  # nor a sequence to split
    frozen = list(
        enumerate_layouts(space, problem.replace(job=replace(job, frozen=True)), Counter())
    )
    assert {layout.zero for layout in frozen} == {0, 3}
    assert all(layout.overlap.overlap_grad_reduce for layout in frozen)
    assert Layout(dp=8) in frozen


def test_stages_cut_anew_do_not_beat_the_lower_bound():
    found = search(
        "llama3-8b",
        "dgx-a100",
        devices=8,
        global_batch=16,
        seq_len=2048,
        top=3,
        method="auto",
        space=lambda problem: restrict(default_space(problem), "pp=8,schedule=1f1b,vpp=1"),
    )
    assert found.improvements
    assert all(found.lower_bound_s <= p.step_time_s for p in found.layouts)
    assert found.lower_bound <= found.values[0]


def test_layers_are_offloaded_where_nothing_is_piped_or_recomputed():
    problem = pm.problem("gpt3-1.3b", "dgx-a100", devices=8, global_batch=16)
    space = with_options(default_space(problem), "offload", problem.cluster)
    rejected: Counter[Rejection] = Counter()
    layouts = list(enumerate_layouts(space, problem, rejected))
    offloaded = [layout for layout in layouts if layout.offload_layers]
    # of 24 layers, and of those tried
    assert {layout.offload_layers for layout in offloaded} == {
        4,
        8,
        12,
        16,
    }
    assert all(layout.pp == 1 and layout.recompute == "none" for layout in offloaded)
    assert len(set(layouts)) == len(layouts)
    fixed = restrict(default_space(problem), "offload_layers=12")
    assert {layout.offload_layers for layout in enumerate_layouts(fixed, problem, rejected)} == {12}
    assert rejected[Rejection(Reason.OFFLOADED_LAYERS)] > 0


def test_search_finds_offloaded_layers_where_nothing_else_fits():
    """A link so fast that copies cost nothing, and too little memory for all activations."""
    own = pm.problem("gpt3-1.3b", "dgx-a100", devices=1, global_batch=2, seq_len=4096)
    device = replace(own.cluster.device, host_bandwidth_bytes_per_s=1e15, memory_bytes=42 * 2**30)
    own = replace(own, cluster=replace(own.cluster, device=device))
    space = restrict(with_options(default_space(own), "offload", own.cluster), "micro_batch=2")
    best = search(own, space=space, top=3).layouts[0]
    assert best.layout.offload_layers > 0
    assert best.fits
