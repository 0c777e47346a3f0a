"""The update of the model of sites by known runs, against Gaussian processes written out; and
intervals of sites whose scatter is unknown."""

import importlib
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.prediction import GAUSS_90
from perfmodel.prediction.sites import FittedRuns
from perfmodel.prediction.sites.known_runs import (
    OUTLIERS,
    CovarianceTerms,
    LayoutKernel,
    coordinates,
    half_width,
    known_runs,
    scales,
    widened,
)
from perfmodel.spec import Layout

UPDATE = importlib.import_module("perfmodel.prediction.sites.known_runs")
"""The module, whose name its function has too."""

NOISE = 0.02
LAYOUT_KERNEL = LayoutKernel(amplitude=0.05, length_scale=2.0, nugget=0.02)
ALIKE = scales((0.0, 0.0))
UNKNOWN = scales((0.5, 1.2))


def site(n: int, together: float = 0.1) -> CovarianceTerms:
    """Runs that share a factor, of layouts that have nothing else in common."""
    return CovarianceTerms(np.full((n, n), together**2), 0.03**2 * np.eye(n), 0.02**2 * np.eye(n))


def fitted(errors: list[float], at: list[float], scatter: tuple[float, float]) -> FittedRuns:
    """Runs of layouts on a line, moved by one parameter that half of each step depends on."""
    n = len(errors)
    return FittedRuns(
        at=tuple((x,) for x in at),
        slopes=((0.5,),) * n,
        error=tuple(errors),
        weight=(1.0,) * n,
        covariance=((0.04,),),
        layout_kernel=LAYOUT_KERNEL,
        noise=NOISE,
        scatter=scatter,
        noise_inflation=1.0,
        coverage_factor=1.0,
    )


def test_with_one_scale_and_no_outlier_it_is_a_gaussian_process():
    of, error = site(4), np.array([0.05, 0.06, 0.04])
    known, others = np.arange(3), np.array([3])
    found = known_runs(of.take(known, known), np.full(3, 1e4 * NOISE**2), error, ALIKE)
    across = of.take(known, others)
    total = of.take(known, known).under(ALIKE)[0] + 1e4 * NOISE**2 * np.eye(3)
    # noise this large makes no run an outlier: Student t weighs all of them by 5/4
    total -= 0.2 * 1e4 * NOISE**2 * np.eye(3)
    expected = across.fixed.T @ np.linalg.solve(total, error)
    assert found.shift(across)[0] == pytest.approx(expected, rel=1e-3)
    left = of.take(others, others).under(ALIKE)[0] - across.fixed.T @ np.linalg.solve(
        total, across.fixed
    )
    assert found.covariance(of.take(others, others), across)[0] == pytest.approx(left, rel=1e-3)


@pytest.mark.parametrize("of", [ALIKE, UNKNOWN])
def test_ten_repeats_are_not_ten_witnesses(of):
    def told(runs: int, repeats: bool) -> float:
        apart = np.ones((runs, runs)) if repeats else np.eye(runs)
        prior = CovarianceTerms(np.full((runs, runs), 0.05**2), 0.05**2 * apart, 0.02**2 * apart)
        found = known_runs(prior, np.full(runs, NOISE**2), np.full(runs, 0.1), of)
        across = CovarianceTerms(
            np.full((runs, 1), 0.05**2), np.zeros((runs, 1)), np.zeros((runs, 1))
        )
        return (found.scales.weight @ found.shift(across)).item()

    one, repeated, different = told(1, True), told(10, True), told(10, False)
    assert one < repeated < one + 0.25 * (different - one)
    assert different > 0.08


def test_a_run_that_lies_far_off_moves_little():
    error, other = np.array([0.0, 0.01, -0.01, 0.0, 0.9]), np.array([5])
    known = np.arange(5)
    found = known_runs(site(6).take(known, known), np.full(5, NOISE**2), error, UNKNOWN)
    shift = found.scales.weight @ found.shift(site(6).take(known, other))
    assert abs(shift.item()) < 0.03


def test_a_site_whose_runs_scatter_stays_uncertain():
    def left(spread: float) -> float:
        error = spread * np.array([1.0, -1.0, 0.5, -0.5])
        found = known_runs(site(4), np.full(4, NOISE**2), error, UNKNOWN)
        nothing = CovarianceTerms(np.zeros((4, 1)), np.zeros((4, 1)), np.zeros((4, 1)))
        other = found.covariance(site(4).take(np.array([0]), np.array([0])), nothing)[:, 0, 0]
        return float(found.scales.weight @ other)

    assert left(0.3) > 2 * left(0.01)


@given(runs=st.integers(1, 6), error=st.floats(-1.0, 1.0), where=st.floats(-3.0, 3.0))
def test_one_factor_on_all_runs_shows_where_several_layouts_agree_on_it_alone(
    runs: int, error: float, where: float
):
    """However often one layout ran, a layout far from it is not moved beyond what the parameters
    move it by."""
    far = np.array([[where + 1e3]])
    of_one = fitted([error] * runs, [where] * runs, (0.5, 1.2))
    assert of_one.overall == 0
    assert of_one.mean(far)[0] == pytest.approx(0, abs=1e-12)
    of_several = fitted([1.0] * 3, [where, where + 2, where + 4], (0.5, 1.2))
    assert of_several.overall > 0.1
    assert of_several.mean(far)[0] == pytest.approx(of_several.overall)


@pytest.mark.parametrize("scatter", [(0.0, 0.0), (0.5, 1.2)])
def test_parameters_and_offsets_are_parts_of_one_update(scatter):
    """What the parameter moves a layout by, and its offset, are what its covariance with the runs
    says."""
    runs = fitted([0.08, 0.1, 0.02], [0.0, 1.0, 6.0], scatter)
    where, slopes = np.array([[0.5]]), np.array([[0.5]])
    points = np.array(runs.at)
    of_parameter = np.full((3, 1), 0.25 * 0.04)
    across = CovarianceTerms(
        of_parameter,
        LAYOUT_KERNEL.shared(points, where),
        LAYOUT_KERNEL.alone(points, where),
        overall=1.0,
    )
    whole = runs.known.scales.weight @ runs.known.shift(across)
    assert slopes[0] @ runs.values + runs.mean(where)[0] == pytest.approx(whole.item(), rel=1e-6)
    beyond = np.array([[0.03]])
    spread = runs.joint(slopes, where, np.zeros((1, 0)))
    assert (runs.joint(slopes, where, beyond) >= spread).all()
    assert runs.posterior[0, 0] < 0.04
    assert FittedRuns.from_dict(runs.to_dict()) == runs


def test_traces_tell_of_parameters_and_not_of_layouts():
    run = fitted([0.1], [0.0], (0.5, 1.2))
    traced = replace(run, slopes=((0.5,), (1.0,)), error=(0.1, 0.2), weight=(1.0, 1.0))
    assert traced.posterior[0, 0] < 0.6 * run.posterior[0, 0]
    assert traced.values[0] == pytest.approx(0.2, abs=0.03)
    assert abs(traced.mean(np.array([[0.0]]))[0]) < 0.3 * abs(run.mean(np.array([[0.0]]))[0])


@pytest.mark.parametrize("of", [(0.0, 0.0), (0.5, 1.2)])
def test_runs_that_are_doubted_say_less_and_no_run_to_come_is_noisier(of):
    sure = fitted([0.1, 0.08], [0.0, 1.0], of)
    doubted = replace(sure, noise_inflation=8.0)
    assert 0.3 * sure.values[0] < doubted.values[0] < 0.99 * sure.values[0]
    assert doubted.posterior[0, 0] > 1.01 * sure.posterior[0, 0]
    assert (doubted.noise_variance @ doubted.known.scales.weight) < 1.5 * (
        sure.noise_variance @ sure.known.scales.weight
    )


def test_runs_that_agree_leave_no_interval_wider_than_before():
    half, before = np.array([0.1, 0.18, 0.3]), np.full(3, 0.2)
    assert widened(half, 1.2, before) == pytest.approx([0.12, 0.2, 0.3])


def test_layouts_lie_apart_by_octaves_of_every_degree() -> None:
    layout = Layout(tp=2, pp=4, dp=8, cp=16, ep=32, micro_batch=64)
    assert coordinates(2.0**33, 2**11, layout) == (1, 2, 3, 4, 5, 6, 11, 33)


def test_one_scale_is_the_normal_distribution():
    one = scales((0.0, 0.0))
    assert half_width(np.array([[0.04, 0.25]]), one.weight) == pytest.approx(
        GAUSS_90 * np.array([0.2, 0.5])
    )


def test_the_interval_holds_nine_tenths_of_sites_that_scatter_otherwise():
    rng, of = np.random.default_rng(0), (0.4, 1.0)
    within, own = (np.exp(s * rng.standard_normal(200_000)) for s in of)
    drawn = rng.standard_normal(len(own)) * np.sqrt(
        0.03**2 + (0.05 * within) ** 2 + (0.04 * own) ** 2
    )
    nodes = scales(of)
    half = half_width(0.03**2 + 0.05**2 * nodes.within + 0.04**2 * nodes.single, nodes.weight)
    assert (np.abs(drawn) <= half).mean() == pytest.approx(0.9, abs=0.01)
    normal = GAUSS_90 * np.sqrt(0.03**2 + 0.05**2 + 0.04**2)
    assert half > normal
    assert half_width(np.full(len(nodes.weight), 0.01), nodes.weight) == pytest.approx(
        GAUSS_90 * 0.1
    )


def update_by_hand(
    prior: CovarianceTerms, noise: np.ndarray, error: np.ndarray, within: float, own: float
) -> tuple[float, np.ndarray, np.ndarray]:
    """Log likelihood, precision and pull of one node: Student's t by reweighting until nothing
    moves."""
    covariance, weight = (
        prior.fixed + within * prior.within + own * prior.repeats,
        np.ones(len(error)),
    )
    for _ in range(5000):
        inverse = np.linalg.inv(covariance + np.diag(own * noise / weight))
        pull = inverse @ error
        moved = (OUTLIERS + 1) / (OUTLIERS + pull**2 * own * noise / weight**2)
        if np.abs(moved - weight).max() < 1e-12:
            break
        weight = moved
    log = -0.5 * pull @ error + 0.5 * np.linalg.slogdet(inverse)[1]
    return log + OUTLIERS / 2 * (np.log(weight) - weight + 1).sum(), inverse, pull


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("outlier", [0.0, 0.8])
def test_nodes_are_reweighted_each_by_itself_and_weigh_by_their_likelihood(
    seed: int, outlier: float
) -> None:
    n, rng = 6, np.random.default_rng(seed)
    error = rng.normal(0.0, 0.05, n) + outlier * (np.arange(n) == 0)
    noise = np.linspace(0.01, 0.03, n) ** 2
    prior = CovarianceTerms(np.full((n, n), 0.05**2), 0.03**2 * np.eye(n), 0.01**2 * np.eye(n))
    found = known_runs(prior, noise, error, UNKNOWN)
    # what is unlikely is left out on the way
    assert len(found.scales.weight) < len(UNKNOWN.weight) or not outlier

    nodes = zip(UNKNOWN.within.tolist(), UNKNOWN.single.tolist(), strict=True)
    logs, inverses, pulls = zip(
        *(update_by_hand(prior, noise, error, *node) for node in nodes), strict=True
    )
    likely = np.exp(np.array(logs) - max(logs)) * UNKNOWN.weight
    likely /= likely.sum()
    across = CovarianceTerms(np.full((n, 1), 0.05**2), np.full((n, 1), 0.02**2), np.zeros((n, 1)))
    other = CovarianceTerms(
        np.full((1, 1), 0.05**2), np.full((1, 1), 0.03**2), np.full((1, 1), 0.01**2)
    )
    with_runs = across.under(UNKNOWN)[:, :, 0]
    shifts = np.array([row @ pull for row, pull in zip(with_runs, pulls, strict=True)])
    assert (found.scales.weight @ found.shift(across)).item() == pytest.approx(
        likely @ shifts, rel=1e-2
    )
    left = [
        v - row @ inv @ row
        for v, row, inv in zip(other.under(UNKNOWN)[:, 0, 0], with_runs, inverses, strict=True)
    ]
    between = likely @ (shifts - likely @ shifts) ** 2
    variance = found.scales.weight @ found.covariance(other, across)[:, 0, 0]
    assert variance == pytest.approx(likely @ np.array(left) + between, rel=1e-2)


@pytest.mark.parametrize("rounds", [1, 2, 3, 6, 50])
def test_nodes_and_their_posteriors_are_as_many_in_whatever_round_it_ends(
    rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs far apart make most nodes of the quadrature unlikely, so that they are left out."""
    monkeypatch.setattr(UPDATE, "_MOST_ROUNDS", rounds)
    monkeypatch.setattr(UPDATE, "_SETTLED", 0)
    monkeypatch.setattr(UPDATE, "_ENOUGH", 0.0)
    monkeypatch.setattr(UPDATE, "_UNLIKELY", 0.5)
    error = np.array([0.9, -0.9, 0.8, -0.7])
    found = known_runs(site(4), np.full(4, NOISE**2), error, UNKNOWN)
    assert len(found.scales.weight) == len(found.inverse) == len(found.pull)
    assert rounds == 1 or len(found.scales.weight) < len(UNKNOWN.weight)
