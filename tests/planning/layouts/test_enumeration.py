"""Grids hold exactly the layouts that a plain loop over all combinations finds."""

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import product

import pytest

from perfmodel import catalog
from perfmodel.errors import LayoutError, Reason, Rejection, UnknownNameError
from perfmodel.planning.layouts import (
    SearchSpace,
    default_space,
    enumerate_grids,
    enumerate_layouts,
    restrict,
    with_options,
    with_schedules,
)
from perfmodel.prediction import check_layout
from perfmodel.prediction.composition import placement_on_network
from perfmodel.schedule import get_schedule
from perfmodel.spec import Job, Layout, Problem
from perfmodel.spec.parts import Experts
from perfmodel.workload import Shard, blocks


def plain_enumeration(space: SearchSpace, case) -> set[Layout]:
    """Every combination of values, one by one, kept if it can run and no option of it is idle."""
    model, job, found = case.model, case.job, set()
    divides = cache(lambda shard: blocks(model, job, shard))
    etps = space.etp if model.experts else (None,)
    for tp, cp, pp, ep, etp, micro_batch in product(
        space.tp, space.cp, space.pp, space.ep, etps, space.micro_batch
    ):
        dp, rest = divmod(case.devices, tp * cp * pp)
        if etp == tp and None in etps:
            continue
        if (
            rest
            or not dp
            or tp * cp * dp % (ep * (etp or tp))
            or job.global_batch % (dp * micro_batch)
        ):
            continue
        alone = dp * cp == 1 and tp == ep * (etp or tp)
        for vpp, schedule, zero, recompute, again, sequence, reduce, gather, overlap in product(
            space.vpp,
            space.schedule,
            space.zero,
            space.recompute,
            space.recompute_full_layers,
            space.sequence_parallel,
            space.overlap_grad_reduce,
            space.overlap_param_gather,
            space.tp_overlap,
        ):
            if pp == 1 and (vpp > 1 or schedule != "1f1b"):
                continue
            if vpp > 1 and (schedule != "1f1b" or model.layers % (pp * vpp)):
                continue
            idle = [
                sequence and tp == 1,
                overlap and tp == 1,
                zero and alone,
                not reduce and alone,
                not gather and not zero,
                again and recompute == "full",
            ]
            if any(idle):
                continue
            layout = Layout(
                tp=tp,
                cp=cp,
                pp=pp,
                dp=dp,
                ep=ep,
                etp=etp,
                micro_batch=micro_batch,
                vpp=vpp,
                schedule="interleaved" if vpp > 1 else schedule,
                zero=zero,
                recompute=recompute,
                recompute_full_layers=again,
                sequence_parallel=sequence,
                overlap_grad_reduce=reduce,
                overlap_param_gather=gather,
                tp_overlap=overlap,
            )
            scheduler = get_schedule(layout.schedule)
            chunks = scheduler.chunks_for(vpp)
            stages = int(scheduler.stage_map(pp, chunks).max()) + 1
            try:
                check_layout(model, case.cluster, job, layout, case.devices)
                divides(Shard.of(layout))
            except LayoutError:
                continue
            if (scheduler.chunks and stages > model.layers) or sum(again or ()) >= -(
                -model.layers // stages
            ):
                continue
            found.add(layout)
    return found


@pytest.mark.parametrize(
    ("schedules", "options"), [("", ""), ("1f1b,zb-v,chimera", "overlap,tp_overlap,recompute")]
)
def test_grids_hold_what_a_plain_loop_finds(case, schedules, options):
    space = default_space(case)
    space = with_options(with_schedules(space, schedules), options, case.cluster)
    if options:  # the plain loop takes a millisecond a layout
        thinned = space.recompute_full_layers[::4]
        space = replace(space, micro_batch=(2, 16), vpp=(1, 3, 12), recompute_full_layers=thinned)
    layouts = list(enumerate_layouts(space, case, Counter()))
    assert len(layouts) == len(set(layouts)) > 100
    assert set(layouts) == plain_enumeration(space, case)


@pytest.mark.parametrize("fixed", ["", "etp=1", "tp=4,ep=8,etp=1"])
def test_experts_are_folded_where_it_is_asked_for(case, fixed):
    net = replace(
        case.model,
        layers=4,
        tied_embeddings=False,
        experts=Experts(count=16, topk=2, ffn_hidden=2048),
    )
    of = replace(case, model=net, devices=8)
    space = with_options(default_space(of), "folding", of.cluster)
    space = replace(restrict(space, fixed), schedule=("1f1b",), micro_batch=(1, 2), vpp=(1,))
    layouts = list(enumerate_layouts(space, of, Counter()))
    assert len(layouts) == len(set(layouts))
    assert set(layouts) == plain_enumeration(space, of)
    assert any(layout.etp == 1 and layout.ep > layout.dp * layout.cp for layout in layouts)
    assert len({layout.canonical for layout in layouts}) == len(layouts)


def test_orders_that_place_all_groups_alike_are_one(case):
    space = default_space(case.replace(devices=64))
    space = with_options(space, "order", case.cluster)
    orders = {}
    for grid in enumerate_grids(space, case.replace(devices=64), Counter()):
        of_degrees = [
            grid.degrees.replace(order=shard.order)
            for shard in grid.shards
            if not shard.sequence_parallel
        ]
        places = {placement_on_network(layout, case.cluster) for layout in of_degrees}
        assert len(places) == len(of_degrees)
        assert of_degrees[0].order == Layout().order or not of_degrees
        lay = grid.degrees
        orders[lay.tp, lay.pp, lay.dp] = len(of_degrees)
    assert orders[64 // 8, 1, 8] == 2  # tensor parallel inside nodes, or data parallel
    assert orders[4, 4, 4] > 2


def test_fewer_devices_are_offered_only_when_asked_for(case):
    few = default_space(case.replace(devices=6), fewer_devices=True)
    every = list(enumerate_layouts(few, case.replace(devices=6), Counter()))
    assert {layout.devices for layout in every} == {1, 2, 3, 4, 6}
    exact = set(
        enumerate_layouts(replace(few, fewer_devices=False), case.replace(devices=6), Counter())
    )
    assert exact == {layout for layout in every if layout.devices == 6}


def test_inference_varies_batch_split_like_distir():
    model, cluster = catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100")
    job = Job(global_batch=64, seq_len=1024, mode="inference")
    problem = Problem(model=model, cluster=cluster, job=job, devices=16)
    space = default_space(problem)
    layouts = list(enumerate_layouts(space, problem, Counter()))
    # D x T x P over powers of two, K micro-batches: DistIR, section 5.1
    found = {(lay.dp, lay.tp, lay.pp, job.num_microbatches(lay)) for lay in layouts}
    powers = (1, 2, 4, 8, 16)
    expected = {
        (d, t, p, 2**k)
        for d, t, p in product(powers, powers, powers)
        if d * t * p == 16
        for k in range(7)
        if d * 2**k <= 64
    }
    assert found == expected
    assert {(lay.zero, lay.recompute) for lay in layouts} == {(0, "none")}


def test_experts_without_sequence_parallelism_are_left_out():
    model, cluster = catalog.model("mixtral-8x7b"), catalog.cluster("dgx-a100")
    job, rejected = Job(global_batch=32, seq_len=4096), Counter()
    problem = Problem(model=model, cluster=cluster, job=job, devices=16)
    space = default_space(problem)
    layouts = list(enumerate_layouts(space, problem, rejected))
    assert any(layout.ep > 1 and layout.tp > 1 for layout in layouts)
    assert all(layout.sequence_parallel for layout in layouts if layout.ep > 1 and layout.tp > 1)
    assert rejected[Rejection(Reason.EXPERT_SEQUENCE)]


def test_refusals(case):
    space = default_space(case)
    with pytest.raises(LayoutError, match="derives dp"):
        restrict(space, "dp=2")
    with pytest.raises(UnknownNameError, match="did you mean"):
        restrict(space, "tpp=2")
    with pytest.raises(UnknownNameError, match="recompute"):
        with_options(space, "recomputed", case.cluster)
