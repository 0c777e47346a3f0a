"""Search: complete, ranked, honest about what it rejected."""

from collections import Counter
from itertools import product

import pytest

from perfmodel import catalog
from perfmodel.errors import LayoutError, UnknownNameError
from perfmodel.layout_search import default_space, enumerate_layouts, restrict, search
from perfmodel.prediction import explain, step_model
from perfmodel.spec import Job

MODEL, CLUSTER, DEVICES = "gpt3-1.3b", "dgx-a100", 16
JOB = Job(global_batch=32, seq_len=2048)


@pytest.fixture(scope="module")
def result():
    return search(MODEL, CLUSTER, devices=DEVICES, global_batch=32, seq_len=2048, top=5)


def test_ranking_is_ascending_and_fits(result):
    times = [p.step_time_s for p in result.layouts]
    assert times == sorted(times)
    assert all(p.fits for p in result.layouts)
    assert len(result.layouts) == 5
    assert result.evaluated == len(result.step_time_s) <= result.feasible
    assert (result.step_time_s[:-1] <= result.step_time_s[1:]).all()


def test_winner_beats_every_layout_found_by_brute_force(result):
    fixed = step_model(catalog.model(MODEL), catalog.cluster(CLUSTER), JOB)
    best = result.layouts[0].step_time_s
    space = default_space(fixed.model, fixed.cluster, JOB, DEVICES)
    candidates = list(enumerate_layouts(space, fixed.model, fixed.cluster, JOB, DEVICES, Counter()))
    for layout in candidates[:: max(1, len(candidates) // 60)]:
        p = explain(fixed, layout)
        assert not p.fits or p.step_time_s >= best * (1 - 1e-5)


def test_the_bound_is_sound_and_prunes_no_winner(monkeypatch):
    import perfmodel.layout_search._search as module

    fixed = step_model(catalog.model(MODEL), catalog.cluster(CLUSTER), JOB)
    space = default_space(fixed.model, fixed.cluster, JOB, DEVICES)
    layouts = list(enumerate_layouts(space, fixed.model, fixed.cluster, JOB, DEVICES, Counter()))
    assert (fixed.lower_bound_s(layouts) <= fixed.evaluate(layouts).step_time_s * (1 + 1e-5)).all()
    whole = search(MODEL, CLUSTER, devices=DEVICES, global_batch=32, top=8)
    monkeypatch.setattr(module, "FIRST_BATCH", 16)
    pruned = search(MODEL, CLUSTER, devices=DEVICES, global_batch=32, top=8)
    assert pruned.evaluated < whole.evaluated
    assert [p.step_time_s for p in pruned.layouts] == [p.step_time_s for p in whole.layouts]


def test_enumeration_is_complete_and_without_duplicates():
    model, cluster = catalog.model(MODEL), catalog.cluster(CLUSTER)
    space = default_space(model, cluster, JOB, DEVICES)
    layouts = list(enumerate_layouts(space, model, cluster, JOB, DEVICES, Counter()))
    assert len(layouts) == len(set(layouts))
    assert all(layout.devices == DEVICES for layout in layouts)
    degrees = {(lay.tp, lay.pp, lay.dp) for lay in layouts}
    powers = (1, 2, 4, 8, 16)
    expected = {
        (tp, pp, DEVICES // (tp * pp))
        for tp, pp in product(powers, powers)
        if DEVICES % (tp * pp) == 0 and model.heads % tp == 0 and pp <= model.layers
    }
    assert degrees == expected


def test_dimensions_can_be_fixed():
    result = search(
        MODEL, CLUSTER, devices=DEVICES, global_batch=32, seq_len=2048, top=3,
        space=restrict(
            default_space(catalog.model(MODEL), catalog.cluster(CLUSTER), JOB, DEVICES), "tp=2,zero=1,tp_overlap=true"
        ),
    )  # fmt: skip
    assert {(p.layout.tp, p.layout.tp_overlap) for p in result.layouts} == {(2, True)}
    assert {p.layout.zero for p in result.layouts} <= {0, 1}


def test_refusals():
    space = default_space(catalog.model(MODEL), catalog.cluster(CLUSTER), JOB, DEVICES)
    with pytest.raises(LayoutError, match="derives dp"):
        restrict(space, "dp=2")
    with pytest.raises(UnknownNameError, match="did you mean"):
        restrict(space, "tpp=2")
    with pytest.raises(UnknownNameError, match="method"):
        search(MODEL, CLUSTER, devices=16, global_batch=32, method="guess")
    with pytest.raises(LayoutError, match=r"no layout .* is possible"):
        search(MODEL, CLUSTER, devices=7 * 11 * 13, global_batch=2)


def test_result_is_exported(result):
    assert set(result.to_dict()) >= {"evaluated", "feasible", "seconds", "layouts", "rejected"}
    frame = result.to_frame()
    assert len(frame) == 5
    assert "<table" in result._repr_html_()


def test_a_whole_search_traces_few_functions():
    from perfmodel.timeline import count_traces

    with count_traces() as traces:
        search("gpt3-2.7b", CLUSTER, devices=32, global_batch=64, seq_len=2048, top=5)
    assert traces.total <= 16
