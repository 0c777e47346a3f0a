"""Search: complete, ranked, certified, honest about what it rejected."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from perfmodel.errors import LayoutError, Reason, UnknownNameError
from perfmodel.planning.layouts import (
    default_space,
    enumerate_layouts,
    evaluation,
    restrict,
    search,
    with_options,
    with_schedules,
)
from perfmodel.prediction import evaluate, explain
from perfmodel.prediction.memory import peak_memory
from perfmodel.spec import Layout, Problem


def found(case, *, space=None, top=5, **options):
    return search(
        case.model,
        case.cluster,
        devices=case.devices,
        global_batch=case.job.global_batch,
        job=case.job,
        space=space,
        top=top,
        **options,
    )


@pytest.fixture(scope="module")
def result(case):
    return found(case)


def test_ranking_is_ascending_and_fits(result):
    times = [p.step_time_s for p in result.layouts]
    assert times == sorted(times)
    assert all(p.fits for p in result.layouts)
    assert len(result.layouts) == 5
    assert result.evaluated == len(result.evaluation.step_time_s) <= result.feasible
    assert (np.diff(result.evaluation.step_time_s) >= 0).all()


def test_no_layout_that_was_pruned_beats_the_winners(case, monkeypatch):
    space = default_space(case)
    space = with_options(
        with_schedules(space, "1f1b,gpipe,zb-h1,chimera"), "overlap,tp_overlap", case.cluster
    )
    space = restrict(space, "micro_batch=1")
    monkeypatch.setattr(evaluation, "FIRST_BATCH", 8)
    monkeypatch.setattr(evaluation, "BATCH", 64)
    pruned = found(case, space=space, top=8, distinct=False)
    layouts = list(enumerate_layouts(space, case, Counter()))
    peak, _ = peak_memory(case.step_problem, layouts)
    usable = case.cluster.device.memory_bytes * (
        1 - case.step_problem.framework.memory.memory_margin
    )
    feasible = [layout for layout, p in zip(layouts, peak.tolist(), strict=True) if p <= usable]
    every = np.sort(evaluate(case.step_problem, feasible).step_time_s)
    assert pruned.feasible == len(feasible)
    assert pruned.evaluated < 0.5 * len(feasible)
    np.testing.assert_allclose([p.step_time_s for p in pruned.layouts], every[:8], rtol=1e-5)
    assert pruned.certificate == "exact"
    assert pruned.gap == 0
    assert all(
        bound_s <= p.step_time_s * (1 + 1e-5)
        for p, bound_s in zip(pruned.layouts, pruned.bounds_s, strict=True)
    )


def test_every_layout_that_fits_has_a_row(case, result):
    frame = result.frame()
    assert len(frame) == result.feasible
    evaluated = frame.dropna(subset="step_time_s")
    assert len(evaluated) == result.evaluated
    assert (evaluated["bound_s"] <= evaluated["step_time_s"] * (1 + 1e-5)).all()
    # of equally fast ones that of least memory
    best = frame.sort_values(["step_time_s", "peak_bytes"]).iloc[0]
    winner = result.layouts[0]
    assert best["peak_bytes"] == pytest.approx(winner.memory.peak)
    for name in (
        "tp",
        "pp",
        "dp",
        "schedule",
        "vpp",
        "zero",
        "recompute",
        "sequence_parallel",
        "order",
        "micro_batch",
    ):
        assert best[name] == getattr(winner.layout, name), name


def test_dimensions_can_be_fixed(case):
    space = default_space(case)
    fixed = found(
        case, space=restrict(space, "tp=2,zero=1,tp_overlap=true,order=ep-dp-tp-cp-pp"), top=3
    )
    assert {(p.layout.tp, p.layout.overlap.tp_overlap) for p in fixed.layouts} == {(2, True)}
    assert {p.layout.zero for p in fixed.layouts} <= {0, 1}
    assert {p.layout.order for p in fixed.layouts} == {"ep-dp-tp-cp-pp"}


def test_recomputing_some_layers_beats_all_or_none_where_memory_is_short(case):
    plain = "tp=1,pp=4,micro_batch=2,vpp=1,schedule=1f1b,zero=1"
    fields = Layout.parse(f"dp=2,{plain}")
    none, full = peak_memory(case.step_problem, [fields, fields.replace(recompute="full")])[
        0
    ].tolist()
    # all activations do not fit, half of them do
    usable = (none + full) / 2 / (1 - case.step_problem.framework.memory.memory_margin)
    cluster = replace(case.cluster, device=replace(case.cluster.device, memory_bytes=usable))
    short = replace(case, cluster=cluster)
    space = restrict(default_space(case.replace(cluster=cluster)), plain)
    few = found(short, space=space, top=1).layouts[0]
    many = found(short, space=with_options(space, "recompute", cluster), top=1).layouts[0]
    assert few.layout.recompute == "full"
    assert many.layout.recompute_full_layers
    assert many.step_time_s < few.step_time_s


def test_fewer_devices_win_where_the_batch_is_small(case):
    job = replace(case.job, global_batch=2, seq_len=128)
    small = replace(case, job=job, devices=13)
    space = default_space(
        Problem(model=small.model, cluster=small.cluster, job=job, devices=13), fewer_devices=True
    )
    best = found(small, space=space, top=1).layouts[0]
    assert best.devices < 13


def test_inference_is_searched(case):
    served = replace(case, job=replace(case.job, mode="inference"))
    result = found(served, top=3)
    assert {p.layout.recompute for p in result.layouts} == {"none"}
    assert result.layouts[0].step_time_s < found(case, top=1).layouts[0].step_time_s


def test_refusals(case):
    with pytest.raises(UnknownNameError, match="method"):
        found(case, method="guess")
    with pytest.raises(LayoutError, match=r"no layout .* is possible"):
        search(case.model, case.cluster, devices=7 * 11 * 13, global_batch=2)


def test_result_is_exported(result):
    exported = result.to_dict()
    assert set(exported) >= {
        "evaluated",
        "feasible",
        "seconds",
        "layouts",
        "rejected",
        "lower_bound_s",
        "gap",
        "certificate",
        "complete",
    }
    assert set(exported["layouts"][0]) >= {"layout", "step_time_s", "lower_bound_s", "gap"}
    assert exported["layouts"][0]["gap"] == 0
    assert len(result.to_frame()) == 5
    assert "<table" in result._repr_html_()


def test_a_whole_search_traces_few_functions(case):
    from perfmodel.timeline import count_traces

    with count_traces() as traces:
        search("gpt3-2.7b", case.cluster, devices=32, global_batch=64, seq_len=2048, top=5)
    assert traces.total <= 16


def test_explained_times_are_those_ranked_by(case, result):
    for p in result.layouts[:2]:
        assert explain(case.step_problem, p.layout).step_time_s == p.step_time_s


def test_a_variant_that_recomputes_or_offloads_more_is_never_faster(case):
    """What a search leaves out unevaluated, because another that fits recomputes less, is no
    loss."""
    space = restrict(
        with_options(default_space(case), "recompute,offload", case.cluster), "micro_batch=1,pp=2"
    )
    every = search(case, space=space, top=5, every=True)
    candidates, numbers = every.evaluation.candidates, every.evaluation.number
    lost = candidates.dominated(numbers)
    assert 0 < lost.sum() < len(lost)
    best: dict[object, float] = {}
    rows = list(
        zip(
            candidates.layouts(numbers),
            every.evaluation.step_time_s.tolist(),
            lost.tolist(),
            strict=True,
        )
    )

    def base(layout):
        return layout.replace(recompute="none", recompute_full_layers=None, offload=False)

    for layout, step_s, dominated in rows:
        if not dominated:
            best[base(layout)] = min(step_s, best.get(base(layout), np.inf))
    assert all(
        step_s >= best[base(layout)] * (1 - 1e-6) for layout, step_s, dominated in rows if dominated
    )
    few = search(case, space=space, top=5)
    assert few.evaluated < every.evaluated
    assert [p.layout for p in few.layouts] == [p.layout for p in every.layouts]
    assert few.lower_bound_s == few.layouts[0].step_time_s
    counted = sum(
        n for why, n in few.rejections.items() if why.reason in (Reason.VARIANT, Reason.SLOWER)
    )
    assert few.evaluated + counted == few.feasible
