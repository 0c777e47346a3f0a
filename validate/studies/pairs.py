"""Choices between layouts of one job at one site: does the model order them as measurements do, is
the probability that one is faster right, and what does choosing by it cost?"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pandas as pd
from jaxtyping import Float
from scipy.stats import spearmanr
from studies.tables import percent, rows_table

from perfmodel.planning.layouts import square_root
from perfmodel.planning.layouts.measurement_values import (
    expected_given,
    runs_and_pairs,
    value_measurements,
)
from perfmodel.prediction import Joint, Prediction, Site, step_problem
from perfmodel.prediction.composition import joint_of, layout_coordinates, shared_errors
from perfmodel.prediction.sites import SitePrior
from perfmodel.validation import Case

NANOTRON: Final = "ultrascale-playbook sweep (nanotron)"
"""Whose pipelines take longer than anything explains (`studies.excess`): reported apart."""
LEAST, MOST = 5, 12
"""Layouts of a group that are ranked, and from which the next run is chosen: at least; of the
latter the first by prediction at most."""
ONE_JOB: Final = ("source", "device", "model", "n_devices", "seq_len", "global_batch", "dtype")
"""What runs have in common between which a user chooses."""
BINS: Final = (0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
"""Of the probability that the layout predicted faster is faster."""


def ranking(
    runs: pd.DataFrame, measured_s: np.ndarray, predicted_s: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Per source, over its groups of one job on one number of devices with at least 5 layouts.

    `spearman`: mean rank correlation of groups. `regret`: mean of (measured time of the layout
    predicted fastest / that of the fastest measured) - 1; `worst_regret` the largest.
    """
    # A layout that is not predicted cannot be chosen.
    good = np.isfinite(measured_s) & np.isfinite(predicted_s)
    frame = runs.assign(_measured=measured_s, _predicted=predicted_s)[good]
    correlations: dict[str, list[float]] = {}
    regrets: dict[str, list[float]] = {}
    for key, group in frame.groupby([name for name in ONE_JOB if name in frame], dropna=False):
        source = str(key[0])  # pyright: ignore[reportIndexIssue]
        measured = np.asarray(group["_measured"], float)
        predicted = np.asarray(group["_predicted"], float)
        # Equal times have no order.
        if len(group) < LEAST or np.ptp(measured) == 0 or np.ptp(predicted) == 0:
            continue
        correlation = float(spearmanr(measured, predicted)[0])  # pyright: ignore
        # What a user loses who runs the layout that is predicted fastest.
        regret = float(measured[predicted.argmin()] / measured.min() - 1)
        correlations.setdefault(source, []).append(correlation)
        regrets.setdefault(source, []).append(regret)

    by_source = {}
    for source, of_groups in correlations.items():
        by_source[source] = {
            "groups": len(of_groups),
            "spearman": float(np.mean(of_groups)),
            "regret": float(np.mean(regrets[source])),
            "worst_regret": float(np.max(regrets[source])),
        }
    return by_source


@dataclass(frozen=True, eq=False)
class PredictedRun:
    """A run's prediction without its source, and the distribution of its error."""

    log_s: float
    sources: Mapping[str, float]
    """`Uncertainty.by_source`."""
    at: tuple[float, ...]
    site_prior: SitePrior


@dataclass(frozen=True, eq=False)
class Choice:
    """Layouts of one job at one site."""

    source: str
    predicted: Float[np.ndarray, " layouts"]
    """Log step times."""
    measured: Float[np.ndarray, " layouts"]
    """Log step times."""
    joint: Joint

    @property
    def faster(self) -> Float[np.ndarray, "layouts layouts"]:
        """Probability that the layout of the row is faster than that of the column."""
        return self.joint.below(self.predicted - self.predicted[:, None])

    @property
    def regret(self) -> float:
        """Relative excess of the measured time of the layout predicted fastest over that of the
        layout measured fastest."""
        return float(np.expm1(self.measured[self.predicted.argmin()] - self.measured.min()))


def choices(
    runs: pd.DataFrame, measured_s: np.ndarray, predicted: Mapping[int, PredictedRun]
) -> list[Choice]:
    """Groups of at least two layouts of one job in the record; `runs` are given by their places."""
    timed = [place for place in predicted if np.isfinite(measured_s[place])]
    frame = runs.iloc[timed].assign(_place=timed)
    groups = []
    for key, group in frame.groupby([name for name in ONE_JOB if name in frame], dropna=False):
        # Repeats of a layout are no choice: the first stands for them.
        run_of_layout = {}
        for place in reversed(group["_place"].tolist()):
            run_of_layout[predicted[place].at, predicted[place].log_s] = place
        places = list(run_of_layout.values())[::-1]
        if len(places) > 1:
            source = str(key[0])  # pyright: ignore[reportIndexIssue]
            members = [predicted[place] for place in places]
            groups.append(_choice(source, members, np.log(measured_s[places])))
    return groups


def _choice(
    source: str, members: Sequence[PredictedRun], measured: Float[np.ndarray, " layouts"]
) -> Choice:
    """The layouts of one group with the joint distribution of their errors."""
    # What layouts err by together cancels in the difference of two, what each errs by does not.
    names, shared, separate = shared_errors([run.sources for run in members])
    coordinates = np.array([run.at for run in members])
    joint = joint_of(members[0].site_prior, names, shared, separate, coordinates)
    return Choice(source, np.array([run.log_s for run in members]), measured, joint)


def reliability(groups: Sequence[Choice]) -> dict[str, Any]:
    """Share of pairs in which the layout predicted faster was faster, by predicted probability.

    Pairs of one source weigh as many as its square root of them: 1,000 pairs of one sweep are not
    1,000 witnesses, nor is a source with 3 as good as one with 300.

    Returns:
        `bins`: `n` pairs, mean `probability` and share `faster` of each; `error`: mean distance
        between the two, valued as the pairs; `pairs`.
    """
    rows = []
    for group in groups:
        # Every pair once; two that took the same time say nothing.
        i, j = np.triu_indices(len(group.measured), 1)
        differ = group.measured[i] != group.measured[j]
        i, j = i[differ], j[differ]
        first_faster = group.measured[i] < group.measured[j]
        for p, was_faster in zip(group.faster[i, j].tolist(), first_faster.tolist(), strict=True):
            rows.append((group.source, max(p, 1 - p), was_faster == (p >= 0.5)))
    if not rows:
        return {"pairs": 0, "bins": [], "error": None}
    frame = pd.DataFrame(rows, columns=["source", "p", "right"])
    weight = frame.groupby("source")["p"].transform("size").to_numpy(float) ** -0.5
    p = frame["p"].to_numpy(float)
    right = frame["right"].to_numpy(float)
    bin_of_pair = np.clip(np.digitize(p, BINS) - 1, 0, len(BINS) - 2)

    bins = []
    error = 0.0
    for number in range(len(BINS) - 1):
        inside = bin_of_pair == number
        if not inside.any():
            continue
        weights = weight[inside]
        mean_probability = float(weights @ p[inside] / weights.sum())
        share_faster = float(weights @ right[inside] / weights.sum())
        bins.append(
            {
                "from": BINS[number],
                "to": BINS[number + 1],
                "n": int(inside.sum()),
                "probability": mean_probability,
                "faster": share_faster,
            }
        )
        error += float(weights.sum() / weight.sum()) * abs(mean_probability - share_faster)
    return {"pairs": len(frame), "bins": bins, "error": error}


def pairs_report(groups: Sequence[Choice], apart: Sequence[str]) -> dict[str, Any]:
    """`reliability` of the sources that are not `apart`, and of each of those; by source the
    `groups`, their mean `regret`, and the least that a choice at random would have."""
    by_source = {}
    for source in dict.fromkeys(group.source for group in groups):
        members = _groups_of_source(groups, source)
        # The mean over a group is what a choice by lot is expected to lose.
        random = [
            float(np.expm1(group.measured - group.measured.min()).mean()) for group in members
        ]
        pair_reliability = reliability(members)
        by_source[source] = {
            "groups": len(members),
            "regret": float(np.mean([group.regret for group in members])),
            "random": float(np.mean(random)),
            "apart": source in apart,
            "error": pair_reliability["error"],
            "pairs": pair_reliability["pairs"],
        }
    together = [group for group in groups if group.source not in apart]
    regrets = [group.regret for group in together]
    return {
        "reliability": reliability(together),
        "apart": {source: reliability(_groups_of_source(groups, source)) for source in apart},
        "groups": len(together),
        "regret": float(np.mean(regrets)) if regrets else None,
        "sources": by_source,
    }


def _groups_of_source(groups: Sequence[Choice], source: str) -> list[Choice]:
    """The choices of one source."""
    return [group for group in groups if group.source == source]


def predicted_run(case: Case, prediction: Prediction, site: Site) -> PredictedRun:
    """The predicted log time of a run, with what decides the distribution of its error."""
    # Which errors two layouts share depends on what they have in common.
    setting = step_problem(case.model, case.cluster, case.job, None, case.framework, site).setting
    return PredictedRun(
        log_s=float(np.log(prediction.step_time_s)),
        sources=prediction.uncertainty.by_source,
        at=layout_coordinates(setting, case.layout),
        site_prior=site.site_prior(case.framework, case.cluster.device),
    )


def next_run(groups: Sequence[Choice]) -> dict[str, Any]:
    """By source, mean regret of the layout chosen now; after the measurement of the least expected
    regret (a run, or one beside a run of the first layout, as `calibrate --for-decision` weighs
    them, and of how many `runs`); after one of as many runs drawn at random; and after a run of the
    layout predicted fastest. Each updates all layouts by their joint distribution."""
    by_source: dict[str, list[dict[str, float]]] = {}
    for group in groups:
        if len(group.predicted) >= LEAST:
            by_source.setdefault(group.source, []).append(_regrets_after_a_run(group))
    means = {}
    for source, rows in by_source.items():
        of_groups = np.array([list(row.values()) for row in rows]).mean(axis=0)
        means[source] = {"groups": len(rows)} | dict(zip(rows[0], of_groups.tolist(), strict=True))
    return means


def _regrets_after_a_run(group: Choice) -> dict[str, float]:
    """Regrets in one group by the measurement that was made, as `next_run` has them."""
    # Layouts in the order of their predictions: the first is the one chosen now.
    order = np.argsort(group.predicted)[:MOST]
    mean, measured = group.predicted[order], group.measured[order]
    loads = square_root(group.joint.covariance[:, order][:, :, order])
    weight = group.joint.weight

    # Every measurement that could be made: what would be chosen once its outcome is known?
    measurements = runs_and_pairs(loads, np.zeros(loads.shape[:2]), 0)
    regret_after: dict[tuple[int, ...], float] = {}
    for measurement in measurements:
        outcome = (measured - mean)[None, measurement.places]
        (shift,) = expected_given(loads, measurement, outcome, weight)
        regret_after[measurement.places] = _regret(measured, int((mean + shift).argmin()))

    chosen = value_measurements(mean, loads, measurements, weight=weight).worth[0].places
    as_many_runs = [regret for places, regret in regret_after.items() if len(places) == len(chosen)]
    return {
        "now": _regret(measured, 0),
        "random": float(np.mean(as_many_runs)),
        "first": regret_after[(0,)],
        "chosen": regret_after[chosen],
        "runs": len(chosen),
    }


def _regret(measured: np.ndarray, chosen: int) -> float:
    """Relative excess of a layout's time over the fastest, from log times."""
    return float(np.expm1(measured[chosen] - measured.min()))


def pairs_text(pairs: dict[str, Any]) -> list[str]:
    """Reliability and regret of choosing between layouts of one site, of `pairs_report` with
    `next_run`."""
    of_frameworks = [("frameworks that behave", pairs["reliability"]), *pairs["apart"].items()]
    errors = "; ".join(
        f"{name}: {figures['pairs']:,} pairs, {percent(figures['error'])}"
        for name, figures in of_frameworks
    )
    parts = [
        "## Pairs of layouts of one site",
        "Runs of one job of a source on as many devices, its source left out: the probability that the layout "
        "predicted faster is faster (joint, with heavy tails, as searches print it), and how often it was. Pairs of a "
        f"source count as many as the square root of their number. Mean distance of the two: {errors}.",
        _bins_table(of_frameworks),
        f"Regret of trying first the layout that is most probably faster than any other: mean over {pairs['groups']} "
        f"groups of at least two layouts {percent(pairs['regret'])} (to reach 3.0 %; nanotron's pipelines apart). "
        "At random: of a layout drawn from the group.",
        _regrets_table(pairs["sources"]),
    ]
    if pairs["next_run"]:
        parts += [
            f"One more measurement, of the first {MOST} layouts of a group of at least {LEAST}, then the layout of the "
            "least expected step: mean regret now, after a run of the layout predicted fastest, after the measurement "
            "of the least expected regret (`calibrate --for-decision`: a run, or one beside a run of the first), and "
            "after one of as many runs drawn at random.",
            _next_run_table(pairs["next_run"]),
        ]
    return parts


def _bins_table(of_frameworks: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Table of predicted probabilities beside how often they came true."""
    rows = []
    for name, figures in of_frameworks:
        for of_bin in figures["bins"]:
            rows.append(
                (
                    name,
                    f"{of_bin['from']:.0%} to {of_bin['to']:.0%}",
                    f"{of_bin['n']:,}",
                    percent(of_bin["probability"]),
                    percent(of_bin["faster"]),
                )
            )
    return rows_table(("runs", "probability", "pairs", "mean probability", "faster"), rows)


def _regrets_table(sources: Mapping[str, Mapping[str, Any]]) -> str:
    """Table of regret by source; sources that are reported apart come last."""
    rows = [
        (
            name,
            figures["groups"],
            f"{figures['pairs']:,}",
            percent(figures["error"]),
            percent(figures["regret"]),
            percent(figures["random"]),
        )
        for name, figures in sorted(sources.items(), key=lambda item: item[1]["apart"])
    ]
    return rows_table(("source", "groups", "pairs", "distance", "mean regret", "at random"), rows)


def _next_run_table(by_source: Mapping[str, Mapping[str, float]]) -> str:
    """Regret by source and measurement."""
    head = (
        "source",
        "groups",
        "now",
        "the first",
        "least expected regret",
        "its runs",
        "at random",
    )
    rows = [
        (
            name,
            figures["groups"],
            percent(figures["now"]),
            percent(figures["first"]),
            percent(figures["chosen"]),
            f"{figures['runs']:.1f}",
            percent(figures["random"]),
        )
        for name, figures in by_source.items()
    ]
    return rows_table(head, rows)
