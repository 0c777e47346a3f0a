"""Priced without a program: memory is that of exact predictions, the bound is never beaten."""

from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.layouts import (
    default_space,
    enumerate_grids,
    gather,
    with_options,
    with_schedules,
)
from perfmodel.prediction import check_layout, evaluate, step_problem
from perfmodel.prediction.grids import GridCosts, LayoutGrid, lower_bounds_s, price_grids
from perfmodel.prediction.memory import CATEGORIES, peak_memory
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Job, Layout

NAMES = [name for name in schedule_names() if name != "forward"] + ["chimera:4", "seq1f1b:4"]


def everything(case):
    space = default_space(case)
    space = with_options(with_schedules(space, "all"), "all", case.cluster)
    return list(enumerate_grids(space, case, Counter()))


def test_memory_is_that_of_exact_predictions(case):
    rng, layouts, ours, largest = np.random.default_rng(0), [], [], []
    for cost in price_grids(case.step_problem, everything(case)):
        for place in rng.choice(cost.grid.places(), 8).tolist():
            layouts.append(cost.grid.layout(place))
            index = np.unravel_index(place, cost.grid.shape)
            ours.append(np.broadcast_to(cost.spread(cost.peak_bytes), cost.grid.shape)[index])
            largest.append(
                CATEGORIES[np.broadcast_to(cost.spread(cost.largest), cost.grid.shape)[index]]
            )
    expected, parts = peak_memory(case.step_problem, layouts)
    np.testing.assert_allclose(ours, expected, rtol=1e-12)
    assert largest == parts


def test_choices_of_which_no_layout_fits_are_left_out_and_counted(case):
    """All others stay, with the memory and the bounds that they have in the whole grid."""
    grids = everything(case)[::16]
    whole = list(price_grids(case.step_problem, grids))
    peaks = np.concatenate([cost.peak_bytes.ravel() for cost in whole])
    narrowed = 0
    for usable_bytes in (0.0, *np.quantile(peaks, [0.02, 0.3])):
        costs = price_grids(case.step_problem, grids, usable_bytes)
        for cost, before, grid in zip(costs, whole, grids, strict=True):
            assert cost.grid.size == len(cost.grid.places()) == len(list(cost.grid.layouts()))
            over = before.too_large(usable_bytes)
            assert (cost.too_large(usable_bytes) + cost.left_out).tolist() == over.tolist()
            fits = before.fits(usable_bytes)
            if not fits.any():
                assert cost.grid is grid
                assert np.isinf(cost.bound_s).all()
                continue
            layouts_fit = fitting(cost, usable_bytes)
            for axis in range(4):  # every choice that is left has a layout that fits
                assert layouts_fit.any(axis=tuple(i for i in range(4) if i != axis)).all()
            narrowed += cost.grid.shape != before.grid.shape
            expected = dict(fitting_bounds(before, usable_bytes))
            assert dict(fitting_bounds(cost, usable_bytes)) == pytest.approx(expected, rel=1e-6)
    assert narrowed


def test_candidates_within_less_memory_are_those_that_need_no_more(case):
    """The same numbers and bounds; fields of some layouts are those of all at their places."""
    candidates = gather(price_grids(case.step_problem, everything(case)[::16]), np.inf, Counter())
    needed_bytes = candidates.column("memory_bytes")
    limit_bytes = float(np.median(needed_bytes))
    within = candidates.within(limit_bytes)
    expected_s = np.where(needed_bytes <= limit_bytes, candidates.bound_s, np.inf)
    np.testing.assert_array_equal(within.bound_s, expected_s)
    assert 0 < within.feasible < candidates.feasible

    some = np.random.default_rng(0).permutation(len(needed_bytes))[:200]
    for name in ("memory_bytes", "tp", "devices", "zero", "vpp", "etp"):
        whole = candidates.column(name)
        np.testing.assert_array_equal(candidates.column_of(name, some), whole[some])


def fitting(cost: GridCosts, usable_bytes: float) -> np.ndarray:
    """Which layouts of a grid fit."""
    return np.broadcast_to(cost.spread(cost.fits(usable_bytes)), cost.grid.shape)


def fitting_bounds(cost: GridCosts, usable_bytes: float) -> Iterator[tuple[Layout, float]]:
    """The layouts of a grid that fit, with their bounds."""
    bound_s = np.broadcast_to(cost.bound_s, cost.grid.shape).ravel()
    for place in np.flatnonzero(fitting(cost, usable_bytes)).tolist():
        yield cost.grid.layout(place), float(bound_s[place])


@st.composite
def layouts(draw) -> Layout:
    name = draw(st.sampled_from(NAMES))
    pp = draw(st.sampled_from([1, 2, 3, 4, 6, 8]))
    tp, dp = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 2, 8]))
    recompute = draw(st.sampled_from(["none", "selective", "full"]))
    if draw(st.integers(0, 5)) == 0:
        return Layout(
            tp=tp,
            dp=dp,
            zero=draw(st.integers(0, 3)) if dp > 1 else 0,
            offload_layers=draw(st.integers(0, 9)),
        )
    return Layout(
        tp=tp,
        pp=pp,
        dp=dp,
        micro_batch=draw(st.sampled_from([1, 2, 4])),
        schedule=name,
        vpp=draw(st.sampled_from([1, 2, 3]))
        if name in ("interleaved", "breadth-first", "gpipe") and pp > 1
        else 1,
        zero=draw(st.integers(0, 3)) if dp > 1 else 0,
        recompute=recompute,
        recompute_full_layers=draw(st.sampled_from([None, (1,), (2,), (3,)]))
        if recompute != "full"
        else None,
        sequence_parallel=draw(st.booleans()),
        overlap_grad_reduce=draw(st.booleans()),
        overlap_param_gather=draw(st.booleans()),
        tp_overlap=draw(st.booleans()),
        offload=draw(st.booleans()),
        order=draw(st.sampled_from(["tp-cp-ep-dp-pp", "pp-tp-cp-ep-dp", "ep-dp-cp-tp-pp"])),
    )


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(layouts(), min_size=1, max_size=4), st.sampled_from([48, 96]))
def test_no_layout_beats_its_bound(found, batch):
    model, cluster = catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100")
    job = Job(global_batch=batch, seq_len=2048)
    possible = []
    for layout in found:
        try:
            check_layout(model, cluster, job, layout)
            scheduler = get_schedule(layout.schedule)
            scheduler.require(
                layout.pp, job.num_microbatches(layout), scheduler.chunks_for(layout.vpp)
            )
            stages = int(scheduler.stage_map(layout.pp, scheduler.chunks_for(layout.vpp)).max()) + 1
        except LayoutError:
            continue
        if stages <= model.layers and job.num_microbatches(layout) <= 48:
            possible.append(layout)
    if not possible:
        return
    problem = step_problem(model, cluster, job)
    bound = np.array(
        [
            cost.bound_s.item()
            for cost in price_grids(problem, [LayoutGrid.of(lay) for lay in possible])
        ]
    )
    exact = evaluate(problem, possible).step_time_s
    assert (bound <= exact * (1 + 1e-5)).all(), [
        lay for lay, b, e in zip(possible, bound, exact, strict=True) if b > e
    ]
    assert (bound > 0).all()


def test_grids_with_the_same_stages_on_other_ranks_keep_apart(case):
    """Two stages on one rank, and on two."""
    found = [Layout(schedule="v-half"), Layout(pp=2, recompute="full"), Layout(schedule="gems")]
    (together,) = [lower_bounds_s(case.step_problem, found)]
    assert together.tolist() == [lower_bounds_s(case.step_problem, [layout])[0] for layout in found]


@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved", "zb-h1"])
def test_the_bound_is_close_where_one_rank_decides(case, name):
    vpp = 2 if name == "interleaved" else 1
    layout = Layout(pp=4, dp=2, schedule=name, vpp=vpp, zero=1)
    (cost,) = price_grids(case.step_problem, [LayoutGrid.of(layout)])
    assert cost.bound_s.item() > 0.9 * evaluate(case.step_problem, [layout]).step_time_s[0]
