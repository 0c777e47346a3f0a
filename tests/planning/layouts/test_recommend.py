"""Which layout a search recommends: the best of those that are likely to fit into memory."""

from dataclasses import replace
from typing import Any

import pytest

import perfmodel as pm
from perfmodel import catalog
from perfmodel.errors import PerfModelError
from perfmodel.planning.layouts import SearchResult, evaluation, restrict, search
from perfmodel.planning.layouts import default_space as space_of
from perfmodel.prediction import explain
from perfmodel.prediction.memory import fit_probabilities
from perfmodel.prediction.sites.constants import memory_spread
from perfmodel.spec import Cluster
from perfmodel.units import fit_words

SPACE = "micro_batch=1,schedule=1f1b,vpp=1"
TIGHT = {"cluster": "dgx-h100", "devices": 8, "global_batch": 32, "fix": SPACE}


@pytest.fixture(scope="module")
def tight() -> SearchResult:
    """Layouts of which the fastest ones may not fit."""
    return pm.search("llama3-8b", top=3, **TIGHT)


@pytest.fixture(scope="module")
def every() -> dict[str, tuple[float, float]]:
    """Step time and probability to fit of every layout of the space that fits by its predicted
    need."""
    result = pm.search("llama3-8b", top=10**6, every=True, distinct=False, **TIGHT)
    return {p.layout_notation: (p.step_time_s, p.fits_probability) for p in result.layouts}


def test_the_fastest_that_surely_fits_is_recommended(
    tight: SearchResult, every: dict[str, tuple[float, float]]
) -> None:
    assert tight.layouts[0].fits_probability < 0.9  # or the case shows nothing
    safe_s = [step_s for step_s, probability in every.values() if probability >= 0.9]
    assert tight.first_to_try.fits_probability >= 0.9
    assert tight.first_to_try.step_time_s == pytest.approx(min(safe_s), rel=1e-6)
    assert tight.riskier is tight.layouts[0]
    assert tight.riskier.step_time_s < tight.first_to_try.step_time_s
    assert tight.to_dict()["recommended"]["layout"] == tight.first_to_try.layout_notation


@pytest.mark.parametrize("min_fit", [0.0, 0.3, 0.6, 0.99])
def test_the_probability_that_is_asked_for_is_held(
    every: dict[str, tuple[float, float]], min_fit: float
) -> None:
    found = pm.search("llama3-8b", top=3, min_fit=min_fit, **TIGHT)
    safe_s = [step_s for step_s, probability in every.values() if probability >= min_fit]
    assert found.first_to_try.fits_probability >= min_fit
    assert found.first_to_try.step_time_s == pytest.approx(min(safe_s), rel=1e-6)
    assert (found.riskier is None) == (found.first_to_try is found.layouts[0])


def test_where_nothing_surely_fits_the_likeliest_is_named(
    tight: SearchResult, every: dict[str, tuple[float, float]]
) -> None:
    found = pm.search("llama3-8b", top=3, min_fit=1 - 1e-15, **TIGHT)
    assert found.first_to_try.fits_probability == pytest.approx(
        max(chance for _, chance in every.values()), rel=1e-9
    )


def test_constraints_hold_for_the_recommended_layout(tight: SearchResult) -> None:
    limit_s = tight.first_to_try.step_time_s
    found = pm.search("llama3-8b", top=2, constraints=[f"step_time_s > {limit_s * 1.05}"], **TIGHT)
    assert found.first_to_try.fits_probability >= 0.9
    assert found.first_to_try.step_time_s > limit_s * 1.05


def test_of_several_batches_the_best_safe_layout_is_recommended() -> None:
    words = TIGHT | {"global_batch": [16, 32]}
    both = pm.search("llama3-8b", top=2, **words)
    alone = [
        pm.search("llama3-8b", top=2, **(TIGHT | {"global_batch": batch})) for batch in (16, 32)
    ]
    best = max(one.first_to_try.tokens_per_s_per_device for one in alone)
    assert both.first_to_try.fits_probability >= 0.9
    assert both.first_to_try.tokens_per_s_per_device == pytest.approx(best)


def test_probabilities_without_times_are_those_of_predictions(case) -> None:
    layouts = [
        p.layout for p in search(case, space=restrict(space_of(case), "pp=2"), top=5).layouts
    ]
    expected = [explain(case.step_problem, layout).fits_probability for layout in layouts]
    assert fit_probabilities(case.step_problem, layouts) == pytest.approx(expected)


@pytest.mark.parametrize("probability", [0.01, 0.3, 0.5, 0.9, 0.99])
def test_the_share_that_fits_is_the_inverse_of_the_probability(probability: float) -> None:
    spread = memory_spread()
    assert spread.probability(spread.share_that_fits(probability), 1.0) == pytest.approx(
        probability
    )
    assert spread.share_that_fits(0.0) == float("inf")


def test_a_safe_layout_is_sought_beyond_the_first_that_are_looked_at(
    tight: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order by value is looked at piece by piece, and the first piece may hold no safe one."""
    monkeypatch.setattr("perfmodel.planning.layouts._recommend.FIRST_SOUGHT", 1)
    found = pm.search("llama3-8b", top=1, **TIGHT)
    assert found.layouts[0].fits_probability < 0.9
    assert found.first_to_try.layout == tight.first_to_try.layout


def test_an_interrupt_ends_the_search_for_a_safe_layout(
    tight: SearchResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The likeliest of what is known by then is recommended."""
    searched = []

    def interrupted(*arguments: Any) -> evaluation.Evaluated:
        searched.append(arguments)
        return replace(evaluation.evaluate(*arguments), complete=False)

    monkeypatch.setattr("perfmodel.planning.layouts._recommend.FIRST_SOUGHT", 1)
    monkeypatch.setattr("perfmodel.planning.layouts._recommend.evaluate", interrupted)
    pm.search("llama3-8b", top=1, **TIGHT)
    assert len(searched) == 1


def test_nothing_is_searched_after_an_interrupt(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that surely fits is not looked for beyond the ranking."""
    evaluate_some, calls = evaluation.evaluate_some, []

    def interrupted(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyboardInterrupt
        evaluate_some(*arguments)

    monkeypatch.setattr(evaluation, "FIRST_BATCH", 4)
    monkeypatch.setattr(evaluation, "BATCH", 4)
    monkeypatch.setattr(evaluation, "evaluate_some", interrupted)
    partial = pm.search("llama3-8b", top=3, **TIGHT)
    assert not partial.complete
    assert len(calls) == 2
    likeliest = max(prediction.fits_probability for prediction in partial.layouts)
    assert likeliest < 0.9  # or the case shows nothing
    assert partial.first_to_try.fits_probability == likeliest


def test_a_layout_may_need_what_only_the_larger_devices_have() -> None:
    """On nodes of two kinds, the fastest layout that surely fits puts most layers on one of
    them."""
    kinds = []
    for name, like, memory_bytes in (("small", "dgx-a100", 5e9), ("large", "dgx-h100", 10e9)):
        node = catalog.cluster(like)
        device = replace(node.device, memory_bytes=memory_bytes)
        kinds.append(replace(node, name=name, max_devices=1, device=device))
    found = pm.search(
        replace(catalog.model("gpt3-1.3b"), layers=6),
        Cluster.of_kinds("mixed", kinds),
        devices=2,
        global_batch=8,
        seq_len=1024,
        fix="pp=2,micro_batch=1,schedule=1f1b",
        top=1,
    )
    assert found.layouts[0].fits_probability < 0.9  # or the case shows nothing
    assert found.first_to_try.fits_probability >= 0.9
    assert found.first_to_try.memory.peak > 5e9


def test_any_probability_is_enough_for_several_batches_too() -> None:
    found = pm.search("llama3-8b", top=1, min_fit=0.0, **(TIGHT | {"global_batch": [16, 32]}))
    assert found.first_to_try.layout == found.layouts[0].layout


@pytest.mark.parametrize("min_fit", [-0.1, 1.0, 7.0, float("nan")])
def test_what_is_no_probability_is_refused(min_fit: float) -> None:
    with pytest.raises(PerfModelError, match="min_fit"):
        pm.search("llama3-8b", min_fit=min_fit, **TIGHT)


@pytest.mark.parametrize(
    ("probability", "words"),
    [
        (1.0, "fits (probability 1.00)"),
        (0.9, "fits (probability 0.90)"),
        (0.896, "fits (probability 0.90)"),
        (0.89, "likely fits (probability 0.89)"),
        (0.5, "likely fits (probability 0.50)"),
        (0.35, "likely does not fit (probability 0.35)"),
        (0.1, "does not fit (probability 0.10)"),
        (0.0, "does not fit (probability 0.00)"),
    ],
)
def test_words_follow_the_probability(probability: float, words: str) -> None:
    assert fit_words(probability) == words


def test_a_result_without_a_recommendation_names_its_best(tight: SearchResult) -> None:
    without = replace(tight, recommendation=replace(tight.recommendation, prediction=None))
    assert without.first_to_try is tight.layouts[0]
