"""Intervals and posteriors of drawn sites, kept in `known_sites.csv`.

Priors, runs and errors are drawn by a seed and no fitted constant is among them: what is stored is
the arithmetic of `SitePrior`, `FittedRuns` and of conformal intervals. A change that is meant to
move it is followed by

    PYTHONPATH=tests python tests/prediction/known_sites.py
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from constant_rates import SITE, Rates
from known_steps import BASES
from stored_figures import StoredCase, write_cases

from perfmodel import catalog
from perfmodel.cost.learn.intervals import (
    bucketed,
    conformal,
    conformal_quantile,
    figures_of_errors,
    in_range_intervals,
)
from perfmodel.prediction import StepProblem, explain, joint_errors, step_problem
from perfmodel.prediction.composition import layout_coordinates
from perfmodel.prediction.sites import (
    CLASSES,
    DEGREES,
    NEUTRAL,
    Adjustment,
    Coverage,
    FittedRuns,
    Seen,
    SitePopulation,
)
from perfmodel.prediction.sites.known_runs import (
    LayoutKernel,
    coordinates,
    half_width,
    scales,
    widened,
)
from perfmodel.spec import Framework, Layout

TABLE = Path(__file__).with_suffix(".csv")
N = len(CLASSES)
DEVICES = ("H100-SXM5-80GB", "A100-SXM4-80GB", "MI300X", "TPU-v5p")
FRAMEWORKS = (Framework(), Framework(name="seen", since=2023), Framework(name="unseen", since=2021))
MODELS = ("llama3-8b", "mixtral-8x7b", "resnet-50")


def drawn_population(seed: int) -> SitePopulation:
    """A population with every term, with posteriors of all sites, of a framework and of an
    architecture."""
    rng = np.random.default_rng(seed)
    posteriors = {}
    for name in ("|", "seen|", "|Hopper", "seen|Hopper"):
        root = 0.1 * rng.normal(size=(N, N))
        covariance = root @ root.T
        posteriors[name] = {
            "mean": (0.1 * rng.normal(size=N)).tolist(),
            "covariance": covariance[np.tril_indices(N)].tolist(),
        }
    drivers = NEUTRAL.site_prior(Framework(name="any"), catalog.device(DEVICES[0])).unknown
    common = {
        "degrees": rng.uniform(0.02, 0.2, len(DEGREES)).tolist(),
        "events": rng.uniform(0.5, 2.0),
        "near": 0.05,
        "length": 2.5,
        "layout": 0.03,
        "noise": 0.02,
        "scatter": [0.4 * (seed % 2), 0.9 * (seed % 2)],
        "coverage": {"base": 0.1, "power": 0.9, "added": dict.fromkeys(drivers, 0.1)},
        "doubt": 1.7,
        "held_given": 1.2,
    }
    seen = Seen(frozenset({"seen"}), frozenset({"Hopper"}), frozenset({2023}), frozenset({"dense"}))
    return SitePopulation(common=common, posteriors=posteriors, seen=seen)


def interval_cases() -> Iterator[StoredCase]:
    """Intervals of steps of every framework, device and model under drawn populations."""
    for seed in range(2):
        population, rng = drawn_population(seed), np.random.default_rng(100 + seed)
        base = f"population {seed}"
        for framework in FRAMEWORKS:
            for device in DEVICES:
                for model in MODELS:
                    prior = population.site_prior(
                        framework, catalog.device(device), catalog.model(model)
                    )
                    shares = dict(zip(CLASSES, rng.dirichlet(np.ones(N)).tolist(), strict=True))
                    degrees = dict(
                        zip(DEGREES, rng.uniform(0, 1, len(DEGREES)).tolist(), strict=True)
                    )
                    events = {"products": 0.1, "attention": float(rng.uniform(0, 0.3))}
                    interval = prior.interval(shares, events, degrees)
                    figures = {
                        "half": interval.half_width,
                        "lower": interval.lower,
                        "upper": interval.upper,
                    }
                    figures |= {
                        f"source.{name}".replace(" ", ""): sd
                        for name, sd in interval.sources.items()
                    }
                    figures |= {f"unknown.{name}": value for name, value in prior.unknown.items()}
                    figures |= {
                        f"mean.{name}": value
                        for name, value in prior.expected(catalog.device(device)).values
                    }
                    figures["coverage"] = prior.coverage.half_width(
                        0.2, dict.fromkeys(prior.unknown, 0.5)
                    )
                    name = f"{framework.name} on {device} with {model}"
                    yield StoredCase(
                        base, name, {key: value for key, value in figures.items() if value}
                    )


def step_cases() -> Iterator[StoredCase]:
    """Intervals of steps, and how far layouts of one site differ, before any run and given runs of
    that site."""
    for base in ("dense", "experts", "two kinds of nodes"):
        step = BASES[base]
        site = replace(SITE, population=drawn_population(1), unstated=0.4, contradictions=0.3)
        framework = replace(step.framework, name="seen", since=2023)
        problem = step_problem(step.model, step.cluster, step.job, None, framework, site=site)
        problem = problem.repriced(Rates(), Rates())
        layouts = [
            step.layout,
            step.layout.replace(recompute="full"),
            step.layout.replace(micro_batch=2),
        ]
        if not step.cluster.kinds:
            # Without stages it has errors of other events.
            layouts.append(Layout(dp=16, zero=3))
        yield StoredCase(f"step, {base}", f"step, {base}", _errors(problem, layouts))
        if not step.cluster.kinds:
            adjusted = problem.adjusted(_adjustment(problem, layouts[0]))
            yield StoredCase(f"step, {base}", "given runs", _errors(adjusted, layouts))


def _errors(problem: StepProblem, layouts: Sequence[Layout]) -> dict[str, float]:
    """Intervals of layouts with their sources, and the probability that each is faster than each
    other."""
    predictions = [explain(problem, layout) for layout in layouts]
    figures: dict[str, float] = {}
    for i, prediction in enumerate(predictions):
        figures |= {f"lo{i}": prediction.step_time_lo_s, f"hi{i}": prediction.step_time_hi_s}
        by_source = prediction.uncertainty.by_source
        # A decomposition happens to give independent combinations, whose squares sum to the same.
        figures[f"fit{i}"] = float(
            np.linalg.norm([sd for name, sd in by_source.items() if "fit" in name])
        )
        figures |= {
            f"source{i}.{name}".replace(" ", ""): abs(sd)
            for name, sd in by_source.items()
            if "fit" not in name
        }
    if not problem.kinds:
        joint = joint_errors(problem, predictions)
        gap = np.log([prediction.step_time_s for prediction in predictions])
        below = joint.below(gap - gap[:, None]).ravel().tolist()
        figures |= {f"below{i}": value for i, value in enumerate(below)}
        figures["noise"] = float(joint.weight @ joint.noise.sum(axis=1))
    return {name: value for name, value in figures.items() if value}


def _adjustment(problem: StepProblem, layout: Layout) -> Adjustment:
    """Parameters that three runs of a site narrowed."""
    names = ("gemm", "attention", "inter_node.all_reduce.beta", "host_op_s")
    rng = np.random.default_rng(11)
    points = [layout_coordinates(problem.setting, layout.replace(micro_batch=n)) for n in (1, 2, 4)]
    runs = FittedRuns(
        at=tuple(points),
        slopes=tuple(map(tuple, rng.uniform(0.05, 0.4, (3, len(names))).tolist())),
        error=(0.12, 0.09, 0.15),
        weight=(1.0, 2.0, 1.0),
        covariance=tuple(map(tuple, (0.02 * np.eye(len(names))).tolist())),
        layout_kernel=LayoutKernel(amplitude=0.06, length_scale=3.0, nugget=0.03),
        noise=0.02,
        scatter=(0.4, 0.9),
        noise_inflation=1.8,
        coverage_factor=1.3,
    )
    device = problem.cluster.device.name
    half_width = tuple((name, 0.05) for name in names)
    values = tuple(zip(names, (0.1, 0.05, 0.2, -0.1), strict=True))
    return Adjustment(device=device, values=values, half_width=half_width, runs=runs)


def run_cases() -> Iterator[StoredCase]:
    """What drawn runs of a site say of other layouts."""
    rng = np.random.default_rng(7)
    layouts = [
        Layout(tp=2**i, pp=2 ** (i % 3), dp=4, cp=1 + i % 2, micro_batch=1 + i % 3)
        for i in range(4)
    ]
    others = np.array([coordinates(8e9, 4096, layout.replace(zero=1)) for layout in layouts])
    for runs, traces, scatter in (
        (1, 0, 0.0),
        (1, 1, 0.5),
        (3, 0, 0.5),
        (3, 2, 0.0),
        (6, 1, 0.8),
        (8, 0, 0.5),
    ):
        places = [
            coordinates(7e9 * (1 + i // 4), 2048, layouts[i % 4].replace(ep=1)) for i in range(runs)
        ]
        root = 0.2 * rng.normal(size=(3, 3))
        fitted = FittedRuns(
            at=tuple(places),
            slopes=tuple(map(tuple, rng.uniform(0, 0.5, (runs + traces, 3)).tolist())),
            error=tuple((0.3 + 0.1 * rng.normal(size=runs + traces)).tolist()),
            weight=tuple(rng.uniform(0.5, 2.0, runs + traces).tolist()),
            covariance=tuple(map(tuple, (root @ root.T).tolist())),
            layout_kernel=LayoutKernel(amplitude=0.06, length_scale=3.0, nugget=0.03),
            noise=0.02,
            scatter=(scatter, 1.5 * scatter),
            noise_inflation=1.8,
            coverage_factor=1.3,
        )
        fitted = FittedRuns.from_dict(fitted.to_dict())
        weight = fitted.known.scales.weight
        joint = fitted.joint(rng.uniform(0, 0.5, (4, 3)), others, rng.uniform(0, 0.1, (4, 2)))
        figures = {"overall": fitted.overall, "noise": float(weight @ fitted.noise_variance)}
        figures |= {f"value{i}": value for i, value in enumerate(fitted.values.tolist())}
        figures |= {
            f"posterior{i}": value for i, value in enumerate(fitted.posterior.ravel().tolist())
        }
        figures |= {f"mean{i}": value for i, value in enumerate(fitted.mean(others).tolist())}
        figures |= {
            f"joint{i}": value
            for i, value in enumerate(np.tensordot(weight, joint, 1).ravel().tolist())
        }
        half = half_width(np.diagonal(joint, axis1=1, axis2=2), weight)
        figures |= {f"half{i}": value for i, value in enumerate(half.tolist())}
        figures |= {
            f"widened{i}": value
            for i, value in enumerate(widened(half, 1.4, np.full(4, 0.3)).tolist())
        }
        name = f"{runs} runs, {traces} traces, scatter {scatter}"
        yield StoredCase(name, name, {key: value for key, value in figures.items() if value})


def error_cases() -> Iterator[StoredCase]:
    """Conformal intervals of drawn errors, few and many."""
    for n in (0, 1, 5, 39, 40, 180, 400, 900):
        rng = np.random.default_rng(n)
        error, log_time = 0.2 * rng.normal(size=n) + 0.05, rng.normal(size=n) - 8
        figures = {
            f"figure.{name}": float(value) for name, value in figures_of_errors(error).items()
        }
        if n:
            groups, pooled = in_range_intervals(error, log_time, rng.integers(0, 5, n))
            quantiles = {"all": bucketed(error, log_time), "pooled": pooled} | {
                f"g{key}": of for key, of in groups.items()
            }
            for name, of in quantiles.items():
                for part, values in zip(("edges", "low", "high"), of.to_list(), strict=True):
                    figures |= {f"{name}.{part}{i}": value for i, value in enumerate(values)}
                figures[f"{name}.at"] = float(sum(map(np.sum, of.at(log_time))))
            figures |= dict(zip(("low", "high"), conformal(error), strict=True))
            figures |= {
                f"quantile{level}": conformal_quantile(error, level) for level in (0.5, 0.9)
            }
        yield StoredCase(
            f"{n} errors", f"{n} errors", {key: value for key, value in figures.items() if value}
        )


def cases() -> Iterator[StoredCase]:
    """Everything that is stored."""
    yield from interval_cases()
    yield from step_cases()
    yield from run_cases()
    yield from error_cases()
    for scatter in ((0.0, 0.0), (0.4, 0.0), (0.3, 1.1)):
        nodes = scales(scatter).with_overall_factor()
        figures = {
            f"{name}{i}": value
            for name in ("within", "single", "weight")
            for i, value in enumerate(getattr(nodes, name).tolist())
        }
        yield StoredCase(f"scatter {scatter}", f"scatter {scatter}", figures)
    coverage = Coverage(base=0.2, power=0.8, added={"a": 0.3, "b": 0.1})
    for factor in (0.0, 0.3):
        scaled = replace(coverage.scaled(factor), power=0.7)
        name = f"coverage {factor}"
        yield StoredCase(
            name,
            name,
            {f"{x}": scaled.half_width(0.1, {"a": x, "b": 1 - x}) for x in (0.0, 0.2, 1.0)},
        )


if __name__ == "__main__":
    write_cases(TABLE, cases())
