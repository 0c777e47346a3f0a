"""The interval of a prediction: what makes it wide, by how much, and what layouts of one site
share."""

from dataclasses import replace
from math import exp, log, sqrt
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import brentq
from scipy.stats import norm

from perfmodel import catalog
from perfmodel.prediction import (
    GAUSS_90,
    Joint,
    Prediction,
    Site,
    StepProblem,
    event_shares,
    explain,
    joint_errors,
    priced_events,
    step_derivatives,
    step_problem,
)
from perfmodel.prediction.composition import joint_of, layout_coordinates, shared_errors
from perfmodel.prediction.sites import (
    CLASSES,
    DEGREES,
    NEUTRAL,
    UNKNOWNS,
    Adjustment,
    Coverage,
    FittedRuns,
    Seen,
    SitePrior,
    class_of,
    factors_of,
    key,
    model_kind,
    population,
    saturated,
)
from perfmodel.prediction.sites.known_runs import (
    CovarianceTerms,
    LayoutKernel,
    half_width,
    scales,
    widened,
)
from perfmodel.spec import Cluster, Device, Framework, Job, Layout
from perfmodel.spec.parts import AdaLN, DeltaNet, Experts, Mamba

JOB = Job(global_batch=32, seq_len=2048)
CLUSTER = catalog.cluster("dgx-h100")
MEGATRON = catalog.framework("megatron-core")
PLAIN = SitePrior(
    mean=np.zeros(len(CLASSES)),
    covariance=np.diag(np.arange(1.0, len(CLASSES) + 1) ** 2) * 1e-4,
    degrees=np.array([0.3, 0.2, 0.1]),
    events=0.5,
    layout_kernel=LayoutKernel(amplitude=0.04, length_scale=2.0, nugget=0.03),
    noise=0.02,
    scatter=(0.0, 0.0),
    coverage=Coverage(),
    unknown={},
    noise_inflation=1.0,
    coverage_factor=1.0,
)


def predicted(
    layout: Layout, framework: Framework = MEGATRON, model: str = "gpt3-6.7b"
) -> tuple[Prediction, Any]:
    problem = step_problem(catalog.model(model), CLUSTER, JOB, None, framework)
    return explain(problem, layout), problem


# --- widths
# --------------------------------------------------------------------------------------------


def test_ninety_per_cent_of_a_normal_lie_within_1_645_deviations() -> None:
    assert pytest.approx(norm.ppf(0.95)) == GAUSS_90
    for sd, inside in ((0.1, 0.9), (2.0, 0.5), (1.0, 0.99)):
        expected = sd * norm.ppf((1 + inside) / 2)
        assert half_width(np.array([sd**2]), np.ones(1), inside) == pytest.approx(expected)


def test_half_of_a_mixture_holds_nine_tenths_of_it() -> None:
    variance, weight = np.array([0.01, 0.04, 1.0]), np.array([0.5, 0.3, 0.2])
    half = float(half_width(variance, weight))
    inside = sum(
        w * (2 * norm.cdf(half / sqrt(v)) - 1) for w, v in zip(weight, variance, strict=True)
    )
    assert inside == pytest.approx(0.9)


def test_two_scales_are_log_normal_and_weigh_one_together() -> None:
    found = scales((0.3, 0.7))
    assert found.weight.sum() == pytest.approx(1.0)
    logs = np.log(found.within) / 2, np.log(found.single) / 2
    for values, sd in zip(logs, (0.3, 0.7), strict=True):
        assert found.weight @ values == pytest.approx(0.0, abs=1e-12)
        assert found.weight @ values**2 == pytest.approx(sd**2)
    assert found.weight @ (logs[0] * logs[1]) == pytest.approx(0.0, abs=1e-12)
    alike = scales((0.0, 0.0))
    assert (alike.within.tolist(), alike.single.tolist(), alike.weight.tolist()) == (
        [1.0],
        [1.0],
        [1.0],
    )


def test_a_half_width_adds_the_variances_of_factors_layouts_settings_and_noise() -> None:
    shares = {"products": 0.5, "inter_node": 0.3, "host": 0.2}
    of_factors = sum(
        (share * 0.01 * (1 + CLASSES.index(name))) ** 2 for name, share in shares.items()
    )
    for more in (0.0, 0.002):
        variance = of_factors + 0.04**2 + 0.03**2 + 0.02**2 + more
        assert PLAIN.half_width(shares, more) == pytest.approx(GAUSS_90 * sqrt(variance))


def test_an_interval_adds_the_variances_of_events_and_degrees_and_names_its_sources() -> None:
    shares = {"products": 0.7, "host": 0.3}
    interval = PLAIN.interval(
        shares, {"gemm": 0.1, "attention": 0.04}, {"extrapolated": 0.5, "bubble": 0.2}
    )
    of_events = {name: 0.5 * half / GAUSS_90 for name, half in (("gemm", 0.1), ("attention", 0.04))}
    of_degrees = {"unstated": 0.0, "extrapolated": 0.2 * 0.5, "bubble": 0.1 * 0.2}
    beyond = sum(sd**2 for sd in (*of_events.values(), *of_degrees.values()))
    assert interval.half_width == pytest.approx(PLAIN.half_width(shares, beyond))
    assert (interval.lower, interval.upper) == (exp(-interval.half_width), exp(interval.half_width))

    # Independent combinations of the classes' factors have the variance of the time that they make
    # together.
    sources = interval.sources
    variance_of_classes = sum(sources[f"site: {name}"] ** 2 for name in CLASSES)
    expected = sum((shares.get(name, 0.0) * 0.01 * (1 + i)) ** 2 for i, name in enumerate(CLASSES))
    assert variance_of_classes == pytest.approx(expected)
    assert {name: sources[f"events: {name}"] for name in of_events} == pytest.approx(of_events)
    assert {name: sources[f"site: {name}"] for name in of_degrees} == pytest.approx(of_degrees)
    assert sources["own"] == 0.02
    assert len(sources) == len(of_events) + len(CLASSES) + len(of_degrees) + 1


def test_what_is_unknown_of_a_run_adds_to_its_half_width_in_quadrature() -> None:
    coverage = Coverage(base=0.2, power=1.5, added={"device_unseen": 0.3, "settings_unstated": 0.8})
    known = exp(0.2) * PLAIN.half_width({"products": 1.0}, 0.001) ** 1.5
    quarter = 0.8**2 * saturated(0.25)
    for unknown, beyond in (
        ({}, 0.0),
        ({"device_unseen": 1.0, "settings_unstated": 0.25}, 0.3**2 + quarter),
    ):
        half = replace(PLAIN, coverage=coverage).half_width({"products": 1.0}, 0.001, unknown)
        assert half == pytest.approx(sqrt(known**2 + beyond))
    # what a run is known to have counts before what its site has
    of_site = replace(
        PLAIN, coverage=coverage, unknown={"device_unseen": 1.0, "settings_unstated": 1.0}
    )
    half = of_site.half_width({"products": 1.0}, 0.001, {"settings_unstated": 0.25})
    assert half == pytest.approx(sqrt(known**2 + 0.3**2 + quarter))


@given(st.floats(0, 1), st.floats(0, 1))
def test_the_first_part_of_a_driver_widens_most(share: float, more: float) -> None:
    assert (saturated(0.0), saturated(1.0)) == (0.0, pytest.approx(1.0))
    lower, upper = sorted((share, more))
    assert saturated(lower) <= saturated(upper)
    assert saturated((lower + upper) / 2) >= (saturated(lower) + saturated(upper)) / 2 - 1e-12


def test_scales_of_a_site_multiply_what_layouts_share_and_what_is_their_own() -> None:
    site_prior, shares = replace(PLAIN, scatter=(0.5, 0.9)), {"products": 1.0}
    nodes = site_prior.scales
    variance = 0.01**2 + nodes.within * (0.04**2 + 0.001) + nodes.single * (0.03**2 + 0.02**2)

    def outside(half: float) -> float:
        return float(nodes.weight @ (2 * norm.cdf(half / np.sqrt(variance)) - 1)) - 0.9

    assert site_prior.half_width(shares, 0.001) == pytest.approx(brentq(outside, 1e-6, 10.0))


@pytest.mark.parametrize(
    ("half", "before", "expected"), [(0.1, 0.5, 0.15), (0.4, 0.5, 0.5), (0.6, 0.5, 0.6)]
)
def test_what_runs_left_open_is_never_widened_beyond_what_was_before_them(
    half: float, before: float, expected: float
) -> None:
    assert widened(np.array(half), 1.5, np.array(before)) == pytest.approx(expected)


# --- of a step
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layout", [Layout(tp=8, pp=4), Layout(dp=32, zero=3), Layout(tp=2, pp=2, dp=8, zero=1)]
)
def test_an_interval_is_that_of_its_sources(layout: Layout) -> None:
    found, problem = predicted(layout)
    site_prior: SitePrior = problem.site_prior
    sources = found.uncertainty.by_source
    loads = np.array([sources[f"site: {name}"] for name in CLASSES])
    others = {name: sd for name, sd in sources.items() if name != "own" and name[6:] not in CLASSES}
    guessed = found.provenance["extrapolated"] + found.provenance["analytical"]
    unknown = {
        "settings_unstated": problem.site.unstated,
        "extrapolated": guessed,
        "contradictions": 0.0,
    }
    half = site_prior.half_width(
        found.uncertainty.class_shares, sum(sd**2 for sd in others.values()), unknown
    )
    assert log(found.step_time_hi_s / found.step_time_s) == pytest.approx(half)
    lower = max(found.step_time_s * exp(-half), found.time_account.kernels_alone_s)
    assert found.step_time_lo_s == pytest.approx(lower)
    shares = np.array([found.uncertainty.class_shares[name] for name in CLASSES])
    assert loads @ loads == pytest.approx(shares @ site_prior.covariance @ shares, rel=1e-6)
    assert sources["own"] == site_prior.noise


def test_a_step_is_less_certain_by_what_is_unstated_extrapolated_or_idle() -> None:
    problem = step_problem(catalog.model("gpt3-6.7b"), CLUSTER, JOB, None, MEGATRON)
    problem = replace(problem, site=replace(problem.site, unstated=0.25))
    found = explain(problem, Layout(tp=2, pp=4, dp=4))
    site_prior = problem.site_prior
    driven_by = {
        "unstated": 0.25,
        "extrapolated": found.provenance["extrapolated"] + found.provenance["analytical"],
        "bubble": found.bubble_fraction,
    }
    assert tuple(driven_by) == DEGREES
    assert found.bubble_fraction > 0.01
    for name, sd in zip(DEGREES, site_prior.degrees.tolist(), strict=True):
        assert found.uncertainty.by_source[f"site: {name}"] == pytest.approx(sd * driven_by[name])


def test_events_count_by_their_share_of_the_step_and_their_own_intervals() -> None:
    found, problem = predicted(Layout(tp=2, pp=2, dp=8, zero=1))
    events = event_shares(problem, found.layout)
    times = priced_events(problem, events.ops)
    half_widths = (times.hi_s - times.lo_s) / 2 / times.time_s
    expected: dict[str, float] = {}
    for op, seconds, half in zip(
        events.ops, events.critical_s.tolist(), half_widths.tolist(), strict=True
    ):
        name = f"events: {op.family}"
        share = seconds / found.step_time_s
        expected[name] = (
            expected.get(name, 0.0) + problem.site_prior.events * share * half / GAUSS_90
        )
    sources = {
        name: sd for name, sd in found.uncertainty.by_source.items() if name.startswith("events: ")
    }
    assert sources == pytest.approx(expected, rel=1e-6)


FITTED = ("gemm", "attention")
SEEN_HALF_WIDTH = 0.02


def with_runs(problem: StepProblem, held: float) -> StepProblem:
    """The problem after two runs of its site, to which two parameters were fitted."""
    runs = FittedRuns(
        at=((0.0,) * 8, (3.0,) + (0.0,) * 7),
        slopes=((0.6, 0.1), (0.5, 0.2)),
        error=(0.05, 0.08),
        weight=(1.0, 1.0),
        covariance=((0.02, 0.01), (0.01, 0.03)),
        layout_kernel=LayoutKernel(amplitude=0.05, length_scale=2.0, nugget=0.02),
        noise=0.03,
        scatter=(0.3, 0.5),
        noise_inflation=1.0,
        coverage_factor=held,
    )
    seen = (("gemm", SEEN_HALF_WIDTH),)
    values = tuple((name, 0.05) for name in FITTED)
    device = problem.cluster.device.name
    return problem.adjusted(Adjustment(device=device, values=values, half_width=seen, runs=runs))


@pytest.mark.parametrize("held", [0.5, 1.0, 50.0])
def test_after_runs_an_interval_is_what_they_leave_open(held: float) -> None:
    layout = Layout(tp=2, pp=2, dp=2, zero=1)
    _, before = predicted(layout)
    problem = with_runs(before, held)
    found, runs = explain(problem, layout), problem.adjustment.runs

    # events that are less certain than those of the runs were, by the parameter that moves them
    events = event_shares(problem, layout)
    times = priced_events(problem, events.ops)
    half_widths = (times.hi_s - times.lo_s) / 2 / times.time_s
    beyond: dict[str, float] = {}
    for op, seconds, half in zip(
        events.ops, events.critical_s.tolist(), half_widths.tolist(), strict=True
    ):
        name = factors_of(op)[1]
        seen = SEEN_HALF_WIDTH if name == "gemm" else 0.0
        share = seconds / found.step_time_s
        beyond[name] = beyond.get(name, 0.0) + share * sqrt(max(0.0, half**2 - seen**2)) / GAUSS_90
    sources = {
        name[8:]: sd
        for name, sd in found.uncertainty.by_source.items()
        if name.startswith("events: ")
    }
    assert sources == pytest.approx(beyond, rel=1e-6)

    derivatives = step_derivatives(problem, [layout], FITTED)
    slopes = derivatives.by_parameter / derivatives.step_s[:, None]
    where = np.array([layout_coordinates(problem.setting, layout)])
    signal = runs.joint(slopes, where, np.array([[*beyond.values()]]))[:, 0, 0]
    half = float(half_width(signal + runs.noise_variance, runs.known.scales.weight))
    told = log(found.step_time_hi_s / found.step_time_s)
    if held <= 1:
        assert told == pytest.approx(held * half, rel=1e-6)
    else:  # no wider than before any run
        assert half < told < held * half
    of_fit = np.array(
        [sd for name, sd in found.uncertainty.by_source.items() if name.startswith("fit: ")]
    )
    assert of_fit @ of_fit == pytest.approx((slopes @ runs.posterior @ slopes.T).item(), rel=1e-6)
    assert found.uncertainty.by_source["own"] == pytest.approx(problem.adjustment.noise)


def test_after_runs_layouts_share_what_the_runs_say() -> None:
    layouts = [Layout(tp=8), Layout(dp=8, zero=1), Layout(dp=8, zero=1, micro_batch=2)]
    problem = with_runs(predicted(layouts[0])[1], 1.0)
    predictions, runs = [explain(problem, layout) for layout in layouts], problem.adjustment.runs
    joint = joint_errors(problem, predictions)
    for i, prediction in enumerate(predictions):
        own = joint.covariance[:, i, i]
        half = float(half_width(own, joint.weight))
        assert log(prediction.step_time_hi_s / prediction.step_time_s) == pytest.approx(
            half, rel=1e-6
        )
    np.testing.assert_allclose(joint.noise, np.repeat(runs.noise_variance[:, None], 3, axis=1))
    np.testing.assert_allclose(joint.covariance, joint.covariance.transpose(0, 2, 1))
    apart = joint.covariance[:, 1, 1] + joint.covariance[:, 2, 2] - 2 * joint.covariance[:, 1, 2]
    assert (apart >= 2 * runs.noise_variance - 1e-12).all()


def test_shares_of_a_step_by_class_add_up_to_all_of_it() -> None:
    for layout in (Layout(tp=8), Layout(tp=2, pp=4, dp=4), Layout(dp=32, zero=3)):
        found, _ = predicted(layout)
        assert sum(found.uncertainty.class_shares.values()) == pytest.approx(1.0)
        assert (found.uncertainty.class_shares["inter_node"] > 0) == (layout.devices > 8)


# --- what layouts share
# --------------------------------------------------------------------------------


def test_layouts_near_one_another_are_alike_by_an_exponential_of_their_distance() -> None:
    layout_kernel = LayoutKernel(amplitude=0.2, length_scale=1.5, nugget=0.1)
    a, b = np.array([[0.0, 0.0], [3.0, 4.0]]), np.array([[0.0, 0.0]])
    np.testing.assert_allclose(layout_kernel.shared(a, b)[:, 0], 0.04 * np.exp([0.0, -5 / 1.5]))
    np.testing.assert_allclose(layout_kernel.alone(a, b)[:, 0], [0.01, 0.0])
    np.testing.assert_allclose(layout_kernel.shared(a, a), layout_kernel.shared(a, a).T)


def test_coordinates_are_doublings_of_degrees_sequence_and_parameters() -> None:
    _, problem = predicted(Layout())
    start = layout_coordinates(problem.setting, Layout())
    for field, place in {"tp": 0, "pp": 1, "dp": 2, "cp": 3, "micro_batch": 5}.items():
        moved = layout_coordinates(problem.setting, Layout(**{field: 8}))  # pyright: ignore[reportArgumentType]
        difference = np.array(moved) - np.array(start)
        assert difference[place] == 3.0
        assert np.count_nonzero(difference) == 1
    with_experts = layout_coordinates(problem.setting, Layout(dp=8, ep=8))
    assert (with_experts[4], with_experts[6]) == (3.0, 11.0)  # 2048 tokens
    larger, smaller = (
        layout_coordinates(step_problem(catalog.model(name), CLUSTER, JOB).setting, Layout())[7]
        for name in ("gpt3-13b", "gpt3-6.7b")
    )
    assert larger - smaller == pytest.approx(1.0, abs=0.1)


def test_what_sites_share_cancels_between_layouts_and_their_own_does_not() -> None:
    names = ["site: products", "events: gemm"]
    shared, own = np.array([[0.1, 0.05], [0.1, 0.05]]), np.array([0.02, 0.02])
    same, far = np.zeros((2, 8)), np.array([[0.0] * 8, [100.0] * 8])
    site_prior = replace(
        PLAIN, layout_kernel=LayoutKernel(amplitude=0.04, length_scale=2.0, nugget=0.0)
    )
    for where, left in ((same, 2 * 0.02**2), (far, 2 * 0.02**2 + 2 * 0.04**2)):
        joint = joint_of(site_prior, names, shared, own, where)
        (covariance,) = joint.covariance
        assert covariance[0, 0] == pytest.approx(0.1**2 + 0.05**2 + 0.04**2 + 0.02**2)
        assert covariance[0, 0] + covariance[1, 1] - 2 * covariance[0, 1] == pytest.approx(left)
        np.testing.assert_allclose(joint.noise, 0.02**2)


@pytest.mark.parametrize("framework", [MEGATRON, Framework()])
def test_errors_of_a_site_without_runs_are_what_the_record_says_of_them(
    framework: Framework,
) -> None:
    predictions = [
        predicted(layout, framework)[0] for layout in (Layout(tp=8), Layout(dp=8, zero=1))
    ]
    _, problem = predicted(Layout(tp=8), framework)
    joint = joint_errors(problem, predictions)
    where = np.array(
        [layout_coordinates(problem.setting, prediction.layout) for prediction in predictions]
    )
    expected = joint_of(problem.site_prior, *shared_errors(predictions), where)
    np.testing.assert_allclose(joint.covariance, expected.covariance)
    np.testing.assert_allclose(joint.noise, expected.noise)


def test_scales_move_what_is_within_a_site_and_its_noise_and_leave_factors() -> None:
    names = ["events: gemm", "site: bubble", "site: products"]
    shared, own = np.array([[0.03, 0.02, 0.1]]), np.array([0.02])
    site_prior = replace(PLAIN, scatter=(0.4, 0.8))
    joint, nodes = joint_of(site_prior, names, shared, own, np.zeros((1, 8))), site_prior.scales
    within, single = 0.03**2 + 0.02**2 + 0.04**2, 0.03**2 + 0.02**2
    np.testing.assert_allclose(
        joint.covariance[:, 0, 0], 0.1**2 + nodes.within * within + nodes.single * single
    )
    np.testing.assert_allclose(joint.noise[:, 0], nodes.single * 0.02**2)


def test_the_chance_that_a_layout_is_faster_is_that_of_a_normal_difference() -> None:
    covariance = np.array([[[0.04, 0.01], [0.01, 0.09]]])
    joint = Joint(covariance, np.ones(1), np.zeros((1, 2)))
    gap = np.array([[0.0, 0.2], [-0.2, 0.0]])
    below = joint.below(gap)
    sd = sqrt(0.04 + 0.09 - 2 * 0.01)
    assert below[0, 1] == pytest.approx(norm.cdf(0.2 / sd))
    assert below[1, 0] == pytest.approx(norm.cdf(-0.2 / sd))
    assert below[0, 0] == pytest.approx(0.5)


def test_sources_line_up_by_name_and_own_noise_stands_apart() -> None:
    names, shared, own = shared_errors([{"a": 0.1, "own": 0.02}, {"b": 0.3, "a": 0.2}, {}])
    assert names == ["a", "b"]
    np.testing.assert_allclose(shared, [[0.1, 0.0], [0.2, 0.3], [0.0, 0.0]])
    np.testing.assert_allclose(own, [0.02, 0.0, 0.0])
    none, nothing, alone = shared_errors([])
    assert (none, nothing.shape, alone.shape) == ([], (0, 0), (0,))


def test_parts_of_a_covariance_are_taken_together() -> None:
    values = np.arange(9.0).reshape(3, 3)
    parts = CovarianceTerms(values, 2 * values, 3 * values).take(np.array([0, 2]), np.array([1]))
    assert [part.tolist() for part in (parts.fixed, parts.within, parts.repeats)] == [
        [[1.0], [7.0]],
        [[2.0], [14.0]],
        [[3.0], [21.0]],
    ]
    alike = parts.under(scales((0.0, 0.0)))
    assert alike[0].tolist() == [[6.0], [42.0]]


# --- what the record says of a site
# --------------------------------------------------------------------


def test_parameters_move_the_class_that_they_time() -> None:
    of = {
        "gemm": "products",
        "bmm": "products",
        "conv": "products",
        "moe": "products",
        "attention": "attention",
        "memory": "memory",
        "embedding": "memory",
        "optimizer": "memory",
        "recurrence": "memory",
        "host_op_s": "host",
        "kernel_gap_s": "host",
        "intra_node.alpha": "intra_node",
        "inter_node.all_reduce.beta": "inter_node",
        "straggling": "other",
        "collective_skew_s": "other",
    }
    assert {name: class_of(name) for name in of} == of


def test_a_site_is_that_of_its_framework_and_device_or_of_the_nearest_that_is_known() -> None:
    known = population()
    hopper, unknown = (
        catalog.device("H100-SXM5-80GB"),
        replace(catalog.device("L40S"), architecture="Nobody's"),
    )
    of_both = known.site_prior(MEGATRON, hopper)
    assert of_both.mean.tolist() == known.posteriors[key(MEGATRON.name, "Hopper")]["mean"]
    assert (
        known.site_prior(MEGATRON, unknown).mean.tolist()
        == known.posteriors[key(MEGATRON.name, "")]["mean"]
    )
    nobody = replace(MEGATRON, name="nobody's")
    assert (
        known.site_prior(nobody, hopper).mean.tolist()
        == known.posteriors[key("", "Hopper")]["mean"]
    )
    assert known.site_prior(nobody, unknown).mean.tolist() == known.posteriors[key("", "")]["mean"]


def test_physics_alone_is_the_median_and_less_certain_by_what_the_record_is_off() -> None:
    hopper = catalog.device("H100-SXM5-80GB")
    of_device = population().site_prior(replace(MEGATRON, name="nobody's"), hopper)
    physics = population().site_prior(Framework(), hopper)
    assert physics.mean.tolist() == [0.0] * len(CLASSES)
    np.testing.assert_allclose(
        physics.covariance, of_device.covariance + np.outer(of_device.mean, of_device.mean)
    )


def test_covariances_are_symmetric_and_positive() -> None:
    site_prior = population().site_prior(MEGATRON, catalog.device("A100-SXM4-80GB"))
    np.testing.assert_allclose(site_prior.covariance, site_prior.covariance.T)
    np.testing.assert_allclose(
        site_prior.root @ site_prior.root.T, site_prior.covariance, atol=1e-11
    )
    stored = population().posteriors[key("", "")]["covariance"]
    assert len(stored) == len(CLASSES) * (len(CLASSES) + 1) // 2


def test_expected_factors_are_means_of_their_class() -> None:
    site_prior = replace(PLAIN, mean=np.arange(1.0, len(CLASSES) + 1))
    expected = site_prior.expected(catalog.device("H100-SXM5-80GB"))
    for name in (
        "gemm",
        "attention",
        "memory",
        "intra_node.alpha",
        "inter_node.send_recv.beta",
        "host_op_s",
    ):
        assert expected.value_of[name] == 1 + CLASSES.index(class_of(name))


def test_physics_that_is_certain_of_all_but_events_has_no_other_width() -> None:
    neutral = NEUTRAL.site_prior(MEGATRON, catalog.device("H100-SXM5-80GB"))
    assert neutral.half_width(dict.fromkeys(CLASSES, 0.1)) == pytest.approx(0.0, abs=1e-5)
    assert neutral.half_width({}, 0.01) == pytest.approx(GAUSS_90 * 0.1)
    assert (neutral.events, neutral.coverage_factor, neutral.noise_inflation) == (1.0, 1.0, 1.0)
    assert neutral.coverage == Coverage()
    assert neutral.degrees.tolist() == [0.0] * len(DEGREES)


def test_a_source_that_measured_none_of_the_record_leaves_nothing_out() -> None:
    assert population("nobody in the record").common == population().common


SEEN = Seen(
    frameworks=frozenset({"a"}),
    architectures=frozenset({"Hopper"}),
    years=frozenset({2024}),
    model_kinds=frozenset({"decoder"}),
)


@pytest.mark.parametrize(
    ("framework", "architecture", "year", "kind", "unknown"),
    [
        ("a", "Hopper", 2024, "decoder", set()),
        ("generic", "Hopper", 2024, "decoder", {"framework_unnamed"}),
        ("b", "Hopper", 2024, "decoder", {"framework_unseen"}),
        ("a", "Volta", 2024, "decoder", {"device_unseen"}),
        ("a", "Hopper", 2025, "decoder", {"year_unseen"}),
        ("a", "Hopper", 0, "", set()),  # nobody says which
        ("a", "Hopper", 2024, "encoder", {"model_unseen"}),
    ],
)
def test_what_a_record_has_not_seen_is_unknown(
    framework: str, architecture: str, year: int, kind: str, unknown: set[str]
) -> None:
    found = SEEN.unknown(framework, architecture, year, kind, generic="generic")
    assert {name for name, value in found.items() if value} == unknown
    assert set(found.values()) <= {0.0, 1.0}
    assert found.keys() <= UNKNOWNS.keys()
    assert Seen.from_dict(SEEN.to_dict()) == SEEN


DECODER = replace(catalog.model("gpt3-125m"), layers=2)
KINDS_OF_MODELS = {
    "decoder": DECODER,
    "encoder": replace(DECODER, causal=False),
    "encoder and decoder": replace(DECODER, decoder_layers=2),
    "mixture of experts": replace(DECODER, experts=Experts(count=4, topk=2, ffn_hidden=64)),
    "diffusion transformer": replace(DECODER, causal=False, adaln=AdaLN(classes=10)),
    "convolutions": catalog.model("resnet-50"),
    "multilayer perceptron": catalog.model("mlp-1b"),
}
MIXERS = {
    "mamba": {"mixers": "M-", "mamba": Mamba(heads=4, head_dim=8, state=4, groups=2)},
    "delta_net": {
        "mixers": "L-",
        "delta_net": DeltaNet(heads=4, key_heads=2, head_dim=8, key_dim=8),
    },
}


def test_kinds_of_models_are_told_by_what_they_are_made_of() -> None:
    assert {kind: model_kind(model) for kind, model in KINDS_OF_MODELS.items()} == {
        kind: kind for kind in KINDS_OF_MODELS
    }
    for mixers in MIXERS.values():
        assert model_kind(replace(DECODER, **mixers)) == "state-space layers"


@pytest.mark.parametrize("uncertain", ["A100-SXM4-80GB", "H100-SXM5-80GB"])
def test_of_several_kinds_of_nodes_the_one_of_which_least_is_known_decides(
    uncertain: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them comes first."""
    kinds = [
        replace(catalog.cluster(f"dgx-{name}"), name=name, max_devices=8)
        for name in ("a100", "h100")
    ]
    machine = Cluster.of_kinds("mixed", kinds, None)
    noise, usual = 0.5, Site.site_prior

    def half_width(global_batch: int) -> float:
        # Each has a problem of its own, whose results are not remembered.
        job = replace(JOB, global_batch=global_batch)
        problem = step_problem(catalog.model("gpt3-6.7b"), machine, job, None, MEGATRON)
        found = explain(problem, Layout(tp=4, pp=4))
        return log(found.step_time_hi_s / found.step_time_s)

    def noisy(site: Site, framework: Framework, device: Device, *rest: Any) -> SitePrior:
        prior = usual(site, framework, device, *rest)
        return (
            replace(prior, noise=noise, coverage=Coverage()) if device.name == uncertain else prior
        )

    before = half_width(48 if uncertain.startswith("A") else 56)
    monkeypatch.setattr(Site, "site_prior", noisy)
    assert before < GAUSS_90 * noise < half_width(96 if uncertain.startswith("A") else 112)


def test_one_site_in_twenty_may_differ_as_a_whole() -> None:
    """Contaminated normals (Berger and Berliner, 1986): every node once without an overall factor,
    and once with one of a standard deviation of a half."""
    nodes = scales((0.5, 1.2))
    both = nodes.with_overall_factor()
    usual, others = (
        both.take(np.broadcast_to(both.overall, both.weight.shape) == v) for v in (0.0, 0.5**2)
    )
    for part, chance in ((usual, 0.95), (others, 0.05)):
        np.testing.assert_allclose(part.weight, chance * nodes.weight)
        np.testing.assert_array_equal(part.within, nodes.within)
        np.testing.assert_array_equal(part.single, nodes.single)
    assert len(both.weight) == 2 * len(nodes.weight)
    # it is shared by step times of one site alone
    ones = np.ones((2, 2))
    for shared in (0.0, 1.0):
        under = CovarianceTerms(ones, 2 * ones, 3 * ones, overall=shared).under(both)
        expected = (
            1
            + shared * np.broadcast_to(both.overall, both.weight.shape)
            + 2 * both.within
            + 3 * both.single
        )
        np.testing.assert_allclose(under, expected[:, None, None] * ones)
