"""Intervals of runs of which little is known: folds that leave whole groups out, and the width that
covers them."""

from dataclasses import replace

import numpy as np
import pytest

from perfmodel.catalog import model
from perfmodel.prediction.sites import UNKNOWNS, Coverage, Seen, model_kind
from perfmodel.validation.population import (
    TEAM,
    LeftOutRuns,
    conformal_scale,
    covered_half_widths,
    fit_coverage,
    folds_of,
    team_folds,
    whole_group_folds,
)

NAMES = list(UNKNOWNS)


ADDED = 0.4
"""Half-width that a run without a named framework has beside the model's."""


def left_out_runs(n: int = 400, seed: int = 0) -> LeftOutRuns:
    """Runs of 40 sources whose errors follow the square root of the model's half-width, and are
    larger without a named framework."""
    rng = np.random.default_rng(seed)
    unknown = np.zeros((n, len(NAMES)))
    unknown[:, NAMES.index("framework_unnamed")] = np.arange(n) % 2
    half = np.exp(rng.normal(-2.5, 0.5, n))
    scale = np.hypot(0.5 * half**0.5, ADDED * unknown[:, NAMES.index("framework_unnamed")]) / 1.645
    return LeftOutRuns(
        left_out=np.where(np.arange(n) % 7 == 0, "framework", TEAM),
        source=np.array([f"s{at % 40}" for at in range(n)]),
        error=rng.standard_normal(n) * scale,
        half_width=half,
        unknown=unknown,
        open_deviation=np.zeros(n),
        looked_at=np.zeros(n, bool),
    )


def test_width_follows_what_makes_errors_larger() -> None:
    runs = left_out_runs(2000)
    fitted = fit_coverage(runs)
    assert set(fitted.added) == {"framework_unnamed"}
    assert fitted.added["framework_unnamed"] == pytest.approx(ADDED, rel=0.15)
    assert fitted.power == pytest.approx(0.5, abs=0.1)
    inside = np.abs(runs.error) <= covered_half_widths(fitted, runs)
    for unnamed in (0, 1):
        chosen = runs.unknown[:, NAMES.index("framework_unnamed")] == unnamed
        assert 0.85 < inside[chosen & (runs.left_out == TEAM)].mean() < 0.95


def test_intervals_hold_for_sources_that_nobody_looked_at() -> None:
    """However well those fit that were looked at, and although these are as many."""
    runs = left_out_runs(2000)
    looked_at = np.arange(2000) % 40 < 20
    runs = replace(runs, looked_at=looked_at, error=runs.error * np.where(looked_at, 0.2, 1.0))
    inside = np.abs(runs.error) <= covered_half_widths(fit_coverage(runs), runs)
    assert inside[~looked_at & (runs.left_out == TEAM)].mean() == pytest.approx(0.9, abs=0.02)


def test_what_a_run_leaves_open_is_not_paid_for_twice() -> None:
    """Errors that come from open choices alone leave the interval of the rest narrow."""
    runs = left_out_runs(2000)
    rng = np.random.default_rng(1)
    open_deviation = np.where(np.arange(2000) % 3 == 0, 0.4, 0.0)
    wider = replace(
        runs,
        error=runs.error + open_deviation * rng.standard_normal(2000),
        open_deviation=open_deviation,
    )
    before, after = fit_coverage(runs), fit_coverage(wider)
    assert after.half_width(0.2) == pytest.approx(before.half_width(0.2), rel=0.15)
    assert np.average(np.abs(wider.error) <= covered_half_widths(after, wider)) == pytest.approx(
        0.9, abs=0.02
    )


def test_knowing_less_makes_no_interval_narrower() -> None:
    runs = left_out_runs()
    easier = replace(runs, unknown=1 - runs.unknown)
    coverage = fit_coverage(easier)
    assert all(half >= 0 for half in coverage.added.values())
    nothing = coverage.half_width(0.2)
    for name in UNKNOWNS:
        assert coverage.half_width(0.2, {name: 1.0}) >= nothing


def test_predictions_have_the_width_that_was_fitted() -> None:
    runs = left_out_runs(50)
    coverage = Coverage(base=0.3, power=1.4, added={"framework_unnamed": 0.5, "device_unseen": 0.2})
    of_all = covered_half_widths(coverage, runs)
    of_each = [
        coverage.half_width(half, dict(zip(NAMES, unknown, strict=True)))
        for half, unknown in zip(runs.half_width.tolist(), runs.unknown.tolist(), strict=True)
    ]
    np.testing.assert_allclose(of_all, of_each)
    assert Coverage(**coverage.to_dict()) == coverage
    assert Coverage().half_width(0.37, dict.fromkeys(UNKNOWNS, 1.0)) == pytest.approx(0.37)


def test_a_quarter_of_a_driver_has_five_eighths_of_its_effect() -> None:
    """s (1 + c) / (s + c) at c = 1/4: nothing for nothing, all for all, and ever less for the next
    tenth."""
    coverage = Coverage(
        base=np.log(2.0), power=0.5, added={"extrapolated": 0.6, "settings_unstated": 0.3}
    )
    known = 2 * 0.25**0.5

    def half_width(**shares: float) -> float:
        return coverage.half_width(0.25, shares)

    assert half_width() == half_width(extrapolated=0.0) == pytest.approx(known)
    assert half_width(extrapolated=1.0) == pytest.approx(np.hypot(known, 0.6))
    assert half_width(extrapolated=0.25) == pytest.approx(np.hypot(known, 0.6 * (5 / 8) ** 0.5))
    assert half_width(extrapolated=1.0, settings_unstated=1.0) == pytest.approx(
        np.sqrt(known**2 + 0.6**2 + 0.3**2)
    )
    squares = [half_width(extrapolated=share) ** 2 for share in np.linspace(0, 1, 11)]
    assert (np.diff(squares) > 0).all()
    assert (np.diff(squares, 2) < 0).all()


def test_a_scaled_coverage_scales_every_interval() -> None:
    runs = left_out_runs(50)
    coverage = Coverage(base=-0.3, power=0.6, added={"framework_unnamed": 0.5})
    twice = covered_half_widths(coverage.scaled(np.log(2)), runs)
    np.testing.assert_allclose(twice, 2 * covered_half_widths(coverage, runs))


def test_widths_that_follow_errors_score_better_than_one_width() -> None:
    """The fit is of the score, on runs that it has not seen."""
    runs, others = left_out_runs(2000), left_out_runs(2000, seed=1)

    def score(half: np.ndarray) -> float:
        outside = np.maximum(np.abs(others.error) - half, 0.0)
        return float(np.mean(2 * half + 20 * outside))

    best_of_all = min(score(np.full(2000, half)) for half in np.linspace(0.05, 1.2, 116))
    assert score(covered_half_widths(fit_coverage(runs), others)) < 0.9 * best_of_all


def test_sources_that_were_looked_at_count_half() -> None:
    runs = left_out_runs()
    looked_at = runs.source == "s0"
    weight = replace(runs, looked_at=looked_at).weight
    of_teams = runs.left_out == TEAM
    total = {source: weight[of_teams & (runs.source == source)].sum() for source in ("s0", "s1")}
    assert total["s0"] == pytest.approx(0.5 * total["s1"])
    assert weight[~of_teams].sum() < 0.3 * weight[of_teams].sum()


def test_intervals_hold_nine_tenths_by_weight() -> None:
    over = np.array([0.5, 0.6, 5.0, 0.7])
    assert conformal_scale(over, np.ones(4)) == 5.0
    assert conformal_scale(over, np.array([1, 1, 0.01, 1.0])) == 0.7
    assert conformal_scale(np.zeros(0), np.zeros(0)) == 1.0


def test_a_team_is_left_out_with_all_that_share_one() -> None:
    folds = team_folds(["a", "a+b", "b", "c"])
    assert folds.names == ("a", "a+b", "b", "c")
    np.testing.assert_array_equal(folds.left_out[1], [True, True, True, False])
    np.testing.assert_array_equal(folds.left_out[0], [True, True, False, False])
    np.testing.assert_array_equal(folds.predicted, np.eye(4, dtype=bool))


def test_folds_come_in_batches_of_similar_size() -> None:
    """Each fold is in one batch, with its runs and those that it predicts, and hardly padded."""
    teams = [*("single" + str(i) for i in range(5)), *["small"] * 3, *["large"] * 60, "large+other"]
    folds = team_folds(teams)
    batched: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for batch in folds.by_size():
        sizes = batch.is_run.sum(axis=1)
        assert sizes.max() == batch.index.shape[1] <= 4 * sizes.min()
        for index, is_run, predicted in zip(*batch, strict=True):
            batched.setdefault(tuple(index[is_run].tolist()), []).append(
                tuple(index[predicted].tolist())
            )
    expected: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    for left_out, predicted in zip(folds.left_out, folds.predicted, strict=True):
        name = tuple(np.flatnonzero(left_out).tolist())
        expected.setdefault(name, []).append(tuple(np.flatnonzero(predicted).tolist()))
    assert {name: sorted(values) for name, values in batched.items()} == {
        name: sorted(values) for name, values in expected.items()
    }


def test_whole_groups_are_left_out_with_the_sources_that_have_them() -> None:
    folds = whole_group_folds(["x", "y", "y", "z"], ["s", "s", "t", "u"])
    np.testing.assert_array_equal(folds.left_out[folds.names.index("y")], [True, True, True, False])
    np.testing.assert_array_equal(folds.predicted.sum(axis=0), np.ones(4))
    # nothing is left to learn from
    assert whole_group_folds(["x", "x"], ["s", "t"]).names == ()


def test_kinds_of_folds_that_leave_nothing_are_left_out() -> None:
    words = {
        "framework": np.array(["f", "g"]),
        "architecture": np.array(["A", "A"]),
        "year": np.array(["1", "2"]),
        "model_kind": np.array(["k", "k"]),
        "source": np.array(["s", "t"]),
    }
    assert set(folds_of(words)) == {"framework", "year"}


def test_what_was_never_seen_is_told() -> None:
    seen = Seen(
        frozenset({"nemo"}), frozenset({"Hopper"}), frozenset({2024}), frozenset({"decoder"})
    )
    assert Seen.from_dict(seen.to_dict()) == seen
    known = seen.unknown("nemo", "Hopper", 2024, "decoder", generic="generic")
    assert not any(known.values())
    assert set(known) <= set(UNKNOWNS)
    strange = seen.unknown("other", "Volta", 2030, "convolutions", generic="generic")
    assert strange == {**dict.fromkeys(known, 1.0), "framework_unnamed": 0.0}
    unnamed = seen.unknown("generic", "Hopper", 0, "", generic="generic")
    assert unnamed == {**dict.fromkeys(known, 0.0), "framework_unnamed": 1.0}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("gpt3-175b", "decoder"),
        ("bert-large", "encoder"),
        ("mixtral-8x7b", "mixture of experts"),
        ("resnet-50", "convolutions"),
        ("deepseek-v3", "mixture of experts"),
    ],
)
def test_kinds_of_models(name: str, kind: str) -> None:
    assert model_kind(model(name)) == kind
