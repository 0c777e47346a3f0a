"""Runs predicted without their teams, and the score of what is left, against plain conditioning of
normal variables."""

import jax
import numpy as np
import pytest
from scipy.stats import multivariate_normal, norm

from perfmodel.prediction.sites import CLASSES, DEGREES
from perfmodel.prediction.sites.known_runs import scales
from perfmodel.validation.population import (
    SHARED,
    START,
    Score,
    SiteRuns,
    factors,
    own_parts,
    unpack,
)

RUNS_OF_SOURCE = (1, 2, 4, 10, 9, 3, 5)
TEAM_OF_SOURCE = ("a", "b", "a+c", "c", "d", "a", "e")
"""Folds leave out between 3 and 18 runs: they come in several batches."""


@pytest.fixture(scope="module")
def runs() -> SiteRuns:
    rng = np.random.default_rng(0)
    of_source = np.repeat(np.arange(len(RUNS_OF_SOURCE)), RUNS_OF_SOURCE)
    count = len(of_source)
    names = np.array([f"source {at}" for at in of_source])
    return SiteRuns(
        log=rng.normal(0.0, 0.2, count),
        log_undone=np.zeros(count),
        looked_at=np.zeros(count, bool),
        shares=rng.dirichlet(np.ones(len(CLASSES)), count),
        degrees=rng.random((count, len(DEGREES))),
        events=0.05 * rng.random(count),
        at=rng.normal(0.0, 2.0, (count, 3)),
        layout=np.arange(count) // 2,
        open_deviation=0.1 * rng.random(count),
        contradictions=np.zeros(count),
        labels={
            "framework": np.array([f"framework {at % 3}" for at in of_source]),
            "architecture": np.array([f"architecture {at % 2}" for at in range(count)]),
            "source": names,
            "group": np.array([TEAM_OF_SOURCE[at] for at in of_source]),
            "year": np.full(count, "2024"),
            "model_kind": np.full(count, "decoder"),
        },
    )


def test_a_run_is_predicted_from_the_runs_of_other_teams(runs: SiteRuns) -> None:
    with jax.enable_x64(True):
        score = Score(runs)
        state = score.start()
        left_out = score.left_out(state)
        hyper = {name: np.asarray(values) for name, values in unpack(state.vector).items()}
        parts = own_parts(hyper, runs.arrays())
        shared = factors(hyper, runs.arrays(), SHARED)
    noise = np.full(len(runs.log), hyper["noise"][0] ** 2)
    total = shared + parts.scaled(np.ones(len(noise)), np.ones(len(noise)), noise)

    teams = [set(group.split("+")) for group in runs.labels["group"]]
    for source in score.sources.tolist():
        chosen = np.flatnonzero(runs.labels["source"] == source)
        others = np.array([not (teams[chosen[0]] & team) for team in teams])
        gain = total[np.ix_(chosen, np.flatnonzero(others))] @ np.linalg.inv(
            total[np.ix_(others, others)]
        )
        residual = runs.log[chosen] - gain @ runs.log[others]
        np.testing.assert_allclose(np.asarray(left_out.residual)[chosen], residual, rtol=1e-8)
        covariance = shared[np.ix_(chosen, chosen)] - gain @ total[np.ix_(others, chosen)]
        np.testing.assert_allclose(
            np.asarray(left_out.shared)[np.ix_(chosen, chosen)], covariance, atol=1e-10
        )


@pytest.mark.slow
def test_the_score_is_that_of_normal_variables(runs: SiteRuns) -> None:
    """Of every source as a whole and given 1, 3 and 8 of its runs, as a mixture over how much it
    scatters."""
    with jax.enable_x64(True):
        score = Score(runs)
        state = score.start()
        negative = float(
            score(
                state.vector,
                state.level_scale,
                state.scale,
                state.weight,
                np.ones(len(score.sources)),
            )
        )
        left_out = score.left_out(state)
    nodes = scales((START["scatter"][0], START["scatter"][1]))
    residual = np.asarray(left_out.residual)
    fixed = np.asarray(left_out.shared) + np.asarray(left_out.own_parts.fixed)
    within, repeats = np.asarray(left_out.own_parts.within), np.asarray(left_out.own_parts.repeats)
    repeats = repeats + float(left_out.noise) * np.eye(len(residual))

    def mean_log_score(chosen: np.ndarray, known: np.ndarray) -> float:
        """Mean log density of each run that is not known, given those that are."""
        block, others = np.ix_(chosen, chosen), np.setdiff1d(np.arange(len(chosen)), known)
        log_known, log_others = [], []
        for of_within, of_single in zip(nodes.within, nodes.single, strict=True):
            covariance = fixed[block] + of_within * within[block] + of_single * repeats[block]
            of_known = covariance[np.ix_(known, known)]
            gain = covariance[np.ix_(others, known)] @ np.linalg.inv(of_known)
            variance = np.diag(
                covariance[np.ix_(others, others)] - gain @ covariance[np.ix_(known, others)]
            )
            error = residual[chosen]
            log_others.append(
                norm.logpdf(error[others] - gain @ error[known], scale=np.sqrt(variance))
            )
            log_known.append(
                multivariate_normal.logpdf(error[known], cov=of_known) if len(known) else 0.0
            )
        weight = nodes.weight * np.exp(log_known)
        return float(np.log(weight / weight.sum() @ np.exp(log_others)).mean())

    expected = 0.0
    for source, members, there in zip(
        range(len(score.sources)), score.members, score.there, strict=True
    ):
        expected += mean_log_score(members[there], np.zeros(0, int))
        for drawn, has_more in score.known.values():
            if has_more[source]:
                expected += 0.5 * np.mean(
                    [mean_log_score(members[there], known) for known in drawn[source]]
                )
    assert -negative == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_the_gradient_of_the_score_is_that_of_differences(runs: SiteRuns) -> None:
    with jax.enable_x64(True):
        score = Score(runs)
        state = score.start()
        rest = (state.level_scale, state.scale, state.weight, np.ones(len(score.sources)))
        compiled = jax.jit(jax.value_and_grad(score))
        gradient = np.asarray(compiled(state.vector, *rest)[1])
        step = 1e-5
        for at in range(len(state.vector)):
            direction = step * np.eye(len(state.vector))[at]
            above, below = (
                float(compiled(state.vector + sign * direction, *rest)[0]) for sign in (1, -1)
            )
            assert gradient[at] == pytest.approx((above - below) / (2 * step), rel=1e-4, abs=1e-6)
