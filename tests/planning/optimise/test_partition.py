"""Uneven stages of real layouts: against all partitions, and as layouts that predict accepts."""

from dataclasses import replace
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import LayoutError
from perfmodel.planning.optimise import (
    balanced,
    partition,
    partition_bound_s,
    partition_stages,
    passes_and_transfers_s,
    refine,
    spread_bound_s,
)
from perfmodel.prediction import evaluate, explain, step_problem
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.spec import Cluster, Job, Layout


def fixed_model(cluster: str = "dgx-a100", layers: int = 9, batch: int = 16):
    model = replace(catalog.model("llama3-8b"), layers=layers)
    return step_problem(model, catalog.cluster(cluster), Job(global_batch=batch, seq_len=2048))


def all_partitions(layers: int) -> list[tuple[int, int, int]]:
    return [(a, b, layers - a - b) for a in range(layers) for b in range(1, layers - a + 1)]


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1", "zb-h2"])
def test_best_of_all_partitions_is_found_and_bounded(schedule: str) -> None:
    problem, layout = fixed_model(), Layout(tp=2, pp=3, dp=2, schedule=schedule)
    every = evaluate(
        problem, [layout.replace(partition=sizes) for sizes in all_partitions(9)]
    ).step_time_s
    found = partition_stages(problem, layout)
    assert found.step_time_s == pytest.approx(every.min(), rel=1e-5)
    assert found.certificate.lower_bound_s <= every.min() * (1 + 1e-6)
    assert found.certificate.lower_bound_s == partition_bound_s(problem, layout)
    assert found.gap < (0.2 if schedule in ("1f1b", "gpipe") else 0.4)
    assert found.given_s is not None
    assert found.step_time_s < found.given_s  # the head weighs as much as two layers


def test_found_layout_predicts_the_same() -> None:
    found = partition("gpt-oss-20b", "dgx-h100", "pp=8", global_batch=64, seq_len=4096)
    again = pm.predict("gpt-oss-20b", "dgx-h100", str(found.layout), global_batch=64, seq_len=4096)
    assert again.step_time_s == found.step_time_s
    assert found.given_s is not None
    assert found.step_time_s < 0.8 * found.given_s
    assert found.gap < 0.05
    assert found.to_dict()["layout"] == found.prediction.layout_notation


def test_layers_to_recompute_are_kept_where_recompute_is_not_chosen_and_chosen_anew_where_it_is() -> (
    None
):
    problem, layout = fixed_model(), Layout(tp=2, pp=3, dp=2)
    prescribed = layout.replace(recompute_full_layers=(2, 1, 1))
    free, anew = partition_stages(problem, layout), partition_stages(problem, prescribed)
    assert (anew.layout, anew.step_time_s) == (free.layout, free.step_time_s)
    assert anew.certificate == free.certificate
    kept = partition_stages(problem, prescribed, recompute=False)
    assert kept.layout.recompute_full_layers == (2, 1, 1)
    possible = [
        sizes
        for sizes in all_partitions(9)
        if all(n >= k for n, k in zip(sizes, (2, 1, 1), strict=True))
    ]
    every = evaluate(
        problem, [prescribed.replace(partition=sizes) for sizes in possible]
    ).step_time_s
    assert kept.certificate.lower_bound_s <= every.min() * (1 + 1e-6)
    assert kept.step_time_s == pytest.approx(every.min(), rel=1e-5)


def test_what_does_not_fit_recomputes_where_it_must() -> None:
    found = partition("llama3-8b", "dgx-a100", "pp=8,schedule=gpipe", global_batch=64, seq_len=2048)
    assert found.given_s is None
    assert found.prediction.fits
    full, sizes = found.layout.recompute_full_layers, found.layout.partition
    assert full is not None
    assert sizes is not None
    assert 0 < sum(full) < sum(sizes)


def test_several_stages_per_rank_are_improved_by_moves() -> None:
    found = partition_stages(fixed_model(layers=16), Layout(tp=2, pp=2, vpp=2))
    assert found.given_s is not None
    assert found.certificate.lower_bound_s <= found.step_time_s < found.given_s


def test_moves_that_lengthen_the_timeline_are_ruled_out_without_evaluation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And what is found does not depend on it."""
    layout = Layout(tp=2, pp=4, vpp=4)
    evaluated: list[int] = []

    def counted(problem, layouts):
        evaluated.append(len(layouts))
        return evaluate(problem, layouts)

    monkeypatch.setattr("perfmodel.planning.optimise._partition.evaluate", counted)
    found = partition_stages(fixed_model(layers=32, batch=64), layout)
    assert sum(evaluated) < 0.25 * found.evaluated
    monkeypatch.setattr(
        "perfmodel.planning.optimise._partition.passes_and_transfers_s",
        lambda problem, layouts: np.zeros(len(layouts)),
    )
    every = partition_stages(fixed_model(layers=32, batch=64), layout)
    assert (every.layout, every.step_time_s, every.evaluated) == (
        found.layout,
        found.step_time_s,
        found.evaluated,
    )


def cuts_of(layers: int, stages: int) -> st.SearchStrategy[tuple[int, ...]]:
    """Layers of every stage; the first and the last may have none, as one with only an embedding or
    a head."""
    ends = st.lists(
        st.integers(0, layers), min_size=stages - 1, max_size=stages - 1, unique=True
    ).map(sorted)
    return ends.map(lambda inner: tuple(np.diff([0, *inner, layers]).tolist()))


@given(
    layout=st.sampled_from(
        [
            Layout(tp=2, pp=3),
            Layout(tp=2, pp=3, schedule="gpipe", recompute="full"),
            Layout(tp=2, pp=3, dp=2, schedule="zb-h1", recompute="selective"),
            Layout(pp=3, dp=2, zero=3, overlap_param_gather=True, overlap_grad_reduce=True),
            Layout(tp=2, pp=3, dp=2, zero=1, overlap_param_gather=True, overlap_grad_reduce=True),
            Layout(tp=2, pp=2, vpp=2, schedule="interleaved", offload=True),
            Layout(tp=2, pp=3, dp=2, schedule="pipedream"),
            Layout(tp=2, pp=3, dp=2, schedule="seq1f1b"),
        ]
    ),
    framework=st.sampled_from(["generic", "megatron-core", "deepspeed"]),
    data=st.data(),
)
def test_no_step_is_shorter_than_its_passes_and_transfers(
    layout: Layout, framework: str, data: st.DataObject
) -> None:
    """And where nothing comes beside these, the timeline is little longer."""
    sizes = data.draw(cuts_of(9, layout.pp * layout.vpp))
    problem = replace(fixed_model(batch=12), framework=catalog.framework(framework))
    cut = layout.replace(partition=sizes)
    (least_s,), (step_s,) = (
        passes_and_transfers_s(problem, [cut]),
        evaluate(problem, [cut]).step_time_s,
    )
    assert 0 <= least_s <= step_s * (1 + 1e-6)
    assert (least_s > 0) == (layout.schedule not in ("pipedream", "seq1f1b"))
    if layout == Layout(tp=2, pp=3):
        assert least_s > 0.9 * step_s


def test_impossible_ones_are_refused() -> None:
    with pytest.raises(LayoutError, match="pp > 1"):
        partition("gpt3-1.3b", "dgx-a100", "pp=1", global_batch=8)
    with pytest.raises(LayoutError, match="fits into memory"):
        partition("gpt3-175b", "dgx-a100", "pp=4", global_batch=8)


def test_refined_layouts_are_ranked_and_nothing_better_is_left_out() -> None:
    problem = fixed_model()
    layouts = [
        Layout(tp=2, pp=3, dp=2),
        Layout(tp=2, pp=3, dp=2, schedule="gpipe"),
        Layout(tp=4, pp=3),
        Layout(tp=2),
    ]
    results = refine(problem, layouts)
    every = [partition_stages(problem, layout).step_time_s for layout in layouts[:3]]
    assert results[0].step_time_s == pytest.approx(min(every))
    assert [r.step_time_s for r in results] == sorted(r.step_time_s for r in results)


def two_kinds(first: str, second: str, layers: int = 9, batch: int = 16, few: int = 2):
    """Some devices of one cluster's, and twice as many of another's."""
    kinds = [
        replace(catalog.cluster(name), name=kind, max_devices=n)
        for kind, name, n in (("many", first, 2 * few), ("few", second, few))
    ]
    model = replace(catalog.model("llama3-8b"), layers=layers)
    return step_problem(
        model, Cluster.of_kinds("mixed", kinds), Job(global_batch=batch, seq_len=2048)
    )


def test_one_kind_under_two_names_is_one_kind() -> None:
    layout = Layout(tp=8, pp=3)
    mixed = partition_stages(two_kinds("dgx-a100", "dgx-a100", few=8), layout)
    alone = partition_stages(fixed_model(), layout)
    assert mixed.step_time_s == pytest.approx(alone.step_time_s, rel=1e-6)
    least_s = alone.certificate.lower_bound_s
    # what the next kind gathers is left out
    assert 0.99 * least_s < mixed.certificate.lower_bound_s <= least_s


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb-h1"])
def test_best_of_all_orders_of_kinds_and_partitions_is_found_and_bounded(schedule: str) -> None:
    problem, layout = two_kinds("dgx-a100", "dgx-h100"), Layout(tp=2, pp=3, schedule=schedule)
    orders = sorted(set(permutations(("many", "many", "few"))))
    every = evaluate(
        problem,
        [
            layout.replace(partition=sizes, kinds=kinds)
            for sizes in all_partitions(9)
            for kinds in orders
        ],
    ).step_time_s
    found = partition_stages(problem, layout)
    assert found.step_time_s == pytest.approx(every.min(), rel=1e-5)
    assert found.certificate.lower_bound_s <= every.min() * (1 + 1e-6)
    assert found.gap < 0.1
    sizes = dict(zip(found.layout.partition or (), found.layout.kinds or (), strict=True))
    assert sizes[max(sizes)] == "few"  # the faster
    assert found.given_s is not None
    assert found.step_time_s < 0.95 * found.given_s
    again = explain(problem, found.layout)
    assert again.step_time_s == found.step_time_s


def test_cheap_bounds_are_below_exact_ones() -> None:
    problem = two_kinds("dgx-a100", "dgx-h100")
    for schedule in ("1f1b", "gpipe", "zb-h1", "pipedream"):
        layout = Layout(tp=2, pp=3, schedule=schedule, kinds=("many", "many", "few"))
        cuts, bound_s = balanced(problem, layout)
        assert spread_bound_s(problem, layout) <= bound_s * (1 + 1e-9)
        assert cuts
        assert bound_s <= evaluate(problem, cuts).step_time_s.min() * (1 + 1e-5)


def test_bounds_of_single_stages_are_those_of_the_layout() -> None:
    problem = fixed_model()
    assert partition_bound_s(problem, Layout(tp=2)) == lower_bounds_s(problem, [Layout(tp=2)])[0]
    assert np.isinf(
        partition_bound_s(
            step_problem(
                catalog.model("gpt3-175b"),
                catalog.cluster("dgx-a100"),
                Job(global_batch=8, seq_len=2048),
            ),
            Layout(pp=4),
        )
    )
