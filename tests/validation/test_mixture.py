"""Mixtures of log-normal step times: quantiles, weights, effects of choices, and a few that stand
for all."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from perfmodel.validation.unstated.mixture import (
    LogNormalMixture,
    Tuning,
    choice_effects,
    fits_after_tries,
    posterior_weights,
    representatives,
    tuned_weights,
    weighted_median,
)

_Z = 1.6448536269514722


def mixture_of(weight, median, deviation) -> LogNormalMixture:
    """Components with the same deviation below and above their median."""
    weight, median, deviation = (np.array(values, float) for values in (weight, median, deviation))
    ends = np.exp(_Z * deviation)
    return LogNormalMixture(weight / weight.sum(), median, median / ends, median * ends)


def test_one_completion_is_itself_to_the_bit():
    alone = LogNormalMixture(np.ones(1), np.array([0.123456789]), np.array([0.1]), np.array([0.3]))
    assert [alone.quantile(share) for share in (0.05, 0.5, 0.95)] == [0.1, 0.123456789, 0.3]


def test_copies_of_one_completion_are_that_completion():
    copies = LogNormalMixture(np.full(3, 1 / 3), np.full(3, 2.0), np.full(3, 1.5), np.full(3, 3.5))
    assert [copies.quantile(share) for share in (0.05, 0.5, 0.95)] == pytest.approx(
        [1.5, 2.0, 3.5], rel=1e-9
    )


def test_two_equal_weights_are_symmetric_in_the_logarithm():
    mixture = mixture_of([1, 1], [1.0, 4.0], [0.1, 0.1])
    assert mixture.quantile(0.5) == pytest.approx(2.0, rel=1e-6)
    assert mixture.quantile(0.05) * mixture.quantile(0.95) == pytest.approx(4.0, rel=1e-9)


@given(
    st.lists(
        st.tuples(st.floats(0.01, 1), st.floats(0.1, 10), st.floats(0.02, 0.8)),
        min_size=2,
        max_size=6,
    ),
    st.sampled_from([0.05, 0.25, 0.5, 0.75, 0.95]),
)
def test_quantiles_are_those_of_an_oracle(components, share):
    weight, median, deviation = map(np.array, zip(*components, strict=True))
    weight = weight / weight.sum()

    def excess(log_value: float) -> float:
        return float(weight @ norm.cdf((log_value - np.log(median)) / deviation)) - share

    oracle = np.exp(brentq(excess, -20, 20, xtol=1e-13))
    assert mixture_of(weight, median, deviation).quantile(share) == pytest.approx(oracle, rel=1e-6)


@given(st.floats(0.01, 0.98), st.floats(0.01, 0.5))
def test_more_weight_on_the_slower_completion_never_makes_it_faster(weight, more):
    heavier = min(0.99, weight + more)
    for share in (0.05, 0.5, 0.95):
        before = mixture_of([1 - weight, weight], [1.0, 2.0], [0.2, 0.3]).quantile(share)
        after = mixture_of([1 - heavier, heavier], [1.0, 2.0], [0.2, 0.3]).quantile(share)
        assert after >= before - 1e-12


def test_weights_are_prior_times_likelihood():
    weights = posterior_weights(np.array([0.5, 0.25, 0.25]), np.array([0.0, 0.5, 1.0]))
    assert weights == pytest.approx([0, 1 / 3, 2 / 3])
    # Evidence against everything leaves the prior.
    assert posterior_weights(np.array([1.0, 3.0]), np.zeros(2)) == pytest.approx([0.25, 0.75])


GROUPS = st.lists(
    st.tuples(st.floats(0.01, 1), st.floats(0, 1), st.sampled_from("ab")), min_size=1, max_size=8
)


@given(GROUPS, st.integers(1, 6))
def test_tries_never_make_it_harder_to_fit_nor_better_than_the_best(completions, tries):
    weight, fits, groups = map(np.array, zip(*completions, strict=True))
    weight = weight / weight.sum()
    once, often = (fits_after_tries(weight, fits, groups.tolist(), n) for n in (1, tries))
    assert once == pytest.approx(weight @ fits)
    best = sum(
        weight[groups == group].sum() * fits[groups == group].max()
        for group in set(groups.tolist())
    )
    assert once - 1e-9 <= often <= best + 1e-9
    # Enough tries come upon the best.
    assert fits_after_tries(weight, fits, groups.tolist(), 100_000) == pytest.approx(best, abs=1e-3)


def test_tries_are_draws_where_it_is_certain_what_fits():
    weight, fits = np.array([0.9, 0.1]), np.array([0.0, 1.0])
    assert fits_after_tries(weight, fits, "aa", 4) == pytest.approx(1 - 0.9**4)
    # What nobody can choose is not tried.
    assert fits_after_tries(weight, fits, "ab", 4) == pytest.approx(0.1)


def test_people_prefer_what_is_faster():
    weight, times = np.array([0.5, 0.5]), np.array([1.0, 2.0])
    assert tuned_weights(weight, times, ["a", "a"], Tuning()) == pytest.approx(weight)
    assert tuned_weights(weight, times, ["a", "a"], Tuning(choices=1.0)) == pytest.approx(
        [2 / 3, 1 / 3]
    )
    assert tuned_weights(weight, times, ["a", "a"], Tuning(choices=1e4)) == pytest.approx([1, 0])
    # Nobody can choose between networks, but fewer jobs are run on the slow one.
    networks = ["fast network", "slow network"]
    assert tuned_weights(weight, times, networks, Tuning(choices=8.0)) == pytest.approx(weight)
    assert tuned_weights(weight, times, networks, Tuning(sites=1.0)) == pytest.approx(
        [2 / 3, 1 / 3]
    )


COMPLETIONS = st.lists(
    st.tuples(st.floats(0.01, 1), st.floats(0.1, 10), st.sampled_from("abc")),
    min_size=1,
    max_size=8,
)


@given(COMPLETIONS, st.floats(0, 12))
def test_what_a_group_weighs_stays_where_only_choices_are_tuned(completions, exponent):
    weight, times, groups = zip(*completions, strict=True)
    weight, times = np.array(weight) / np.sum(weight), np.array(times)
    tuned = tuned_weights(weight, times, groups, Tuning(choices=exponent))
    for group in set(groups):
        inside = np.array([each == group for each in groups])
        assert tuned[inside].sum() == pytest.approx(weight[inside].sum())


@given(COMPLETIONS, st.floats(0, 12), st.floats(0, 12))
def test_preference_for_what_is_faster_makes_nothing_slower(completions, choices, sites):
    weight, times, groups = zip(*completions, strict=True)
    weight, times = np.array(weight) / np.sum(weight), np.array(times)
    tuned = tuned_weights(weight, times, groups, Tuning(choices, sites))
    assert tuned.sum() == pytest.approx(1)
    assert tuned @ np.log(times) <= weight @ np.log(times) + 1e-9


@given(st.floats(0.1, 0.9), st.floats(1.2, 3.0))
def test_a_density_is_the_slope_of_the_distribution(weight, ratio):
    mixture = mixture_of([weight, 1 - weight], [1.0, ratio], [0.2, 0.4])
    for value in (0.9, 1.1, 1.5, 2.5):
        step = 1e-5
        slope = (mixture.below(value * np.exp(step)) - mixture.below(value * np.exp(-step))) / (
            2 * step
        )
        assert mixture.density(value) == pytest.approx(slope, rel=1e-3)


def test_weighted_median():
    values, weight = np.array([3.0, 1.0, 2.0]), np.array([0.2, 0.5, 0.3])
    assert weighted_median(values, weight) == 1.0
    assert weighted_median(values, np.array([0.2, 0.4, 0.4])) == 2.0
    assert weighted_median(np.array([7.0]), np.ones(1)) == 7.0


def test_effects_of_independent_choices_add_up():
    chosen, times, weight = [], [], []
    for recompute, slower, chance in (("none", 1.0, 0.7), ("full", 1.3, 0.3)):
        for zero, longer, likely in (("0", 1.0, 0.6), ("1", 1.1, 0.4)):
            chosen.append({"recompute": recompute, "zero": zero})
            times.append(slower * longer)
            weight.append(chance * likely)
    weight, times = np.array(weight), np.array(times)
    effects = choice_effects(weight, times, chosen, answer=1.0)
    assert [effect.name for effect in effects] == ["recompute", "zero"]
    variance = weight @ (np.log(times) - weight @ np.log(times)) ** 2
    assert sum(effect.variance for effect in effects) == pytest.approx(variance)
    # Of a choice alone: the variance of two points.
    assert effects[0].variance == pytest.approx(0.7 * 0.3 * np.log(1.3) ** 2)


def test_an_effect_is_said_relative_to_the_answer():
    times = np.array([0.9, 1.2])
    (effect,) = choice_effects(
        np.array([0.5, 0.5]), times, [{"recompute": "none"}, {"recompute": "full"}], 1.0
    )
    assert effect.text == "recompute (-10% to +20%)"


def test_a_value_that_is_next_to_impossible_does_not_widen_the_range():
    chosen = [{"zero": "0"}, {"zero": "1"}, {"zero": "3"}]
    (effect,) = choice_effects(np.array([0.5, 0.49, 0.01]), np.array([1.0, 1.1, 9.0]), chosen, 1.0)
    assert effect.highest == pytest.approx(0.1)


@given(st.lists(st.floats(0.001, 1), min_size=1, max_size=200), st.integers(2, 24))
def test_few_stand_for_all(weights, most):
    kept, share = representatives(np.array(weights), most)
    assert len(kept) <= most
    assert share.sum() == pytest.approx(1)
    assert int(np.argmax(weights)) in kept.tolist()
    whole = np.array(weights) / np.sum(weights)
    if len(weights) <= most:
        assert share == pytest.approx(whole)
    for i, part in zip(kept.tolist(), share.tolist(), strict=True):
        if whole[i] >= 1 / most:
            assert part == pytest.approx(whole[i])
    again, same = representatives(np.array(weights), most)
    assert (again.tolist(), same.tolist()) == (kept.tolist(), share.tolist())


def test_few_are_fair_to_a_choice_that_alternates():
    """A hundred equal items whose last choice is yes and no in turn: about half of those kept are
    yes."""
    kept, share = representatives(np.ones(100), 16)
    assert float(share[kept % 2 == 0].sum()) == pytest.approx(0.5, abs=0.15)
    assert float(share[kept < 50].sum()) == pytest.approx(0.5, abs=0.1)
