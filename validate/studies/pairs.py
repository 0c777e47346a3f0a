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
from perfmodel.planning.layouts.measurement_values import expected_given, runs_and_pairs, weighed
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
    good = np.isfinite(measured_s) & np.isfinite(predicted_s)
    frame = runs.assign(_measured=measured_s, _predicted=predicted_s)[good]
    found: dict[str, list[tuple[float, float]]] = {}
    for key, group in frame.groupby([name for name in ONE_JOB if name in frame], dropna=False):
        measured, predicted = (
            np.asarray(group["_measured"], float),
            np.asarray(group["_predicted"], float),
        )
        if len(group) < LEAST or np.ptp(measured) == 0 or np.ptp(predicted) == 0:
            continue
        regret = measured[predicted.argmin()] / measured.min() - 1
        found.setdefault(str(key[0]), []).append(
            (float(spearmanr(measured, predicted)[0]), float(regret))
        )  # pyright: ignore
    return {
        source: {
            "groups": len(pairs),
            "spearman": float(np.mean([rank for rank, _ in pairs])),
            "regret": float(np.mean([regret for _, regret in pairs])),
            "worst_regret": float(np.max([regret for _, regret in pairs])),
        }
        for source, pairs in found.items()
    }


@dataclass(frozen=True, eq=False)
class PredictedRun:
    """A run as predicted without its source, with what its prediction may err by."""

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
        """How much longer the layout that is most probably faster than any other takes than the
        fastest measured."""
        return float(np.expm1(self.measured[self.predicted.argmin()] - self.measured.min()))


def choices(
    runs: pd.DataFrame, measured_s: np.ndarray, predicted: Mapping[int, PredictedRun]
) -> list[Choice]:
    """The groups of at least two layouts of one job of the record, of `runs` by their places."""
    kept = [at for at in predicted if np.isfinite(measured_s[at])]
    frame = runs.iloc[kept].assign(_at=kept)
    found = []
    for key, group in frame.groupby([name for name in ONE_JOB if name in frame], dropna=False):
        at = group["_at"].tolist()
        # repeats of a layout are no choice: the first stands for them
        at = list({(predicted[i].at, predicted[i].log_s): i for i in reversed(at)}.values())[::-1]
        if len(at) > 1:
            found.append(_choice(str(key[0]), [predicted[i] for i in at], np.log(measured_s[at])))  # pyright: ignore
    return found


def _choice(
    source: str, some: Sequence[PredictedRun], measured: Float[np.ndarray, " layouts"]
) -> Choice:
    names, shared, own = shared_errors([one.sources for one in some])
    joint = joint_of(some[0].site_prior, names, shared, own, np.array([one.at for one in some]))
    return Choice(source, np.array([one.log_s for one in some]), measured, joint)


def reliability(some: Sequence[Choice]) -> dict[str, Any]:
    """How often the layout predicted faster was faster, by its probability.

    Pairs of one source weigh as many as its square root of them: 1,000 pairs of one sweep are not
    1,000 witnesses, nor is a source with 3 as good as one with 300.

    Returns:
        `bins`: `n` pairs, mean `probability` and share `faster` of each; `error`: mean distance
        between the two, weighed as the pairs; `pairs`.
    """
    rows = []
    for one in some:
        i, j = np.triu_indices(len(one.measured), 1)
        sure = one.faster[i, j]
        first = one.measured[i] < one.measured[j]
        differ = one.measured[i] != one.measured[j]
        rows += [
            (one.source, max(p, 1 - p), bool(was) == (p >= 0.5))
            for p, was, told in zip(sure.tolist(), first.tolist(), differ.tolist(), strict=True)
            if told
        ]
    if not rows:
        return {"pairs": 0, "bins": [], "error": None}
    frame = pd.DataFrame(rows, columns=["source", "p", "right"])
    weight = frame.groupby("source")["p"].transform("size").to_numpy(float) ** -0.5
    p, right = frame["p"].to_numpy(float), frame["right"].to_numpy(float)
    place = np.clip(np.digitize(p, BINS) - 1, 0, len(BINS) - 2)
    bins, error = [], 0.0
    for at in range(len(BINS) - 1):
        mine = place == at
        if mine.any():
            of = weight[mine]
            said, was = float(of @ p[mine] / of.sum()), float(of @ right[mine] / of.sum())
            bins.append(
                {
                    "from": BINS[at],
                    "to": BINS[at + 1],
                    "n": int(mine.sum()),
                    "probability": said,
                    "faster": was,
                }
            )
            error += float(of.sum() / weight.sum()) * abs(said - was)
    return {"pairs": len(frame), "bins": bins, "error": error}


def pairs_report(some: Sequence[Choice], apart: Sequence[str]) -> dict[str, Any]:
    """`reliability` of the sources that are not `apart`, and of each of those; by source the
    `groups`, their mean `regret`, and the least that a choice at random would have."""
    together = [one for one in some if one.source not in apart]
    by_source = {}
    for source in dict.fromkeys(one.source for one in some):
        own = [one for one in some if one.source == source]
        random = [float(np.expm1(one.measured - one.measured.min()).mean()) for one in own]
        by_source[source] = {
            "groups": len(own),
            "regret": float(np.mean([one.regret for one in own])),
            "random": float(np.mean(random)),
            "apart": source in apart,
            "error": (of := reliability(own))["error"],
            "pairs": of["pairs"],
        }
    regrets = [one.regret for one in together]
    return {
        "reliability": reliability(together),
        "apart": {
            source: reliability([one for one in some if one.source == source]) for source in apart
        },
        "groups": len(together),
        "regret": float(np.mean(regrets)) if regrets else None,
        "sources": by_source,
    }


def predicted_run(case: Case, prediction: Prediction, site: Site) -> PredictedRun:
    """What `choices` needs of a run that was predicted at a site."""
    setting = step_problem(case.model, case.cluster, case.job, None, case.framework, site).setting
    at, site_prior = (
        layout_coordinates(setting, case.layout),
        site.site_prior(case.framework, case.cluster.device),
    )
    return PredictedRun(
        float(np.log(prediction.step_time_s)), prediction.uncertainty.by_source, at, site_prior
    )


def next_run(some: Sequence[Choice]) -> dict[str, Any]:
    """By source, mean regret of the layout chosen now; after the measurement of the least expected
    regret (a run, or one beside a run of the first layout, as `calibrate --for-decision` weighs
    them, and of how many `runs`); after one of as many runs drawn at random; and after a run of the
    layout predicted fastest. Each updates all layouts by their joint distribution."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for one in some:
        if len(one.predicted) < LEAST:
            continue
        first = np.argsort(one.predicted)[:MOST]
        mean, measured = one.predicted[first], one.measured[first]
        loads, weight = square_root(one.joint.covariance[:, first][:, :, first]), one.joint.weight
        seen = runs_and_pairs(loads, np.zeros(loads.shape[:2]), 0)
        told = weighed(mean, loads, seen, weight=weight).worth[0].places
        after: dict[tuple[int, ...], float] = {}
        for run in seen:
            (shift,) = expected_given(loads, run, (measured - mean)[None, run.places], weight)
            after[run.places] = _loss(measured, int((mean + shift).argmin()))
        alike = [regret for places, regret in after.items() if len(places) == len(told)]
        found.setdefault(one.source, []).append(
            (_loss(measured, 0), float(np.mean(alike)), after[(0,)], after[told], len(told))
        )
    names = ("now", "random", "first", "chosen", "runs")
    return {
        source: {"groups": len(rows)}
        | dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        for source, rows in found.items()
    }


def _loss(measured: np.ndarray, chosen: int) -> float:
    return float(np.expm1(measured[chosen] - measured.min()))


def pairs_text(pairs: dict[str, Any]) -> list[str]:
    """Reliability and regret of choosing between layouts of one site, of `pairs_report` with
    `next_run`."""
    figures = [("frameworks that behave", pairs["reliability"]), *pairs["apart"].items()]
    rows = [
        (
            name,
            f"{one['from']:.0%} to {one['to']:.0%}",
            f"{one['n']:,}",
            percent(one["probability"]),
            percent(one["faster"]),
        )
        for name, of in figures
        for one in of["bins"]
    ]
    errors = "; ".join(
        f"{name}: {of['pairs']:,} pairs, {percent(of['error'])}" for name, of in figures
    )
    chosen = [
        (
            name,
            of["groups"],
            f"{of['pairs']:,}",
            percent(of["error"]),
            percent(of["regret"]),
            percent(of["random"]),
        )
        for name, of in sorted(pairs["sources"].items(), key=lambda one: one[1]["apart"])
    ]
    parts = [
        "## Pairs of layouts of one site",
        "Runs of one job of a source on as many devices, its source left out: the probability that the layout "
        "predicted faster is faster (joint, with heavy tails, as searches print it), and how often it was. Pairs of a "
        f"source count as many as the square root of their number. Mean distance of the two: {errors}.",
        rows_table(("runs", "probability", "pairs", "mean probability", "faster"), rows),
        f"Regret of trying first the layout that is most probably faster than any other: mean over {pairs['groups']} "
        f"groups of at least two layouts {percent(pairs['regret'])} (to reach 3.0 %; nanotron's pipelines apart). "
        "At random: of a layout drawn from the group.",
        rows_table(("source", "groups", "pairs", "distance", "mean regret", "at random"), chosen),
    ]
    if pairs["next_run"]:
        parts += [
            f"One more measurement, of the first {MOST} layouts of a group of at least {LEAST}, then the layout of the "
            "least expected step: mean regret now, after a run of the layout predicted fastest, after the measurement "
            "of the least expected regret (`calibrate --for-decision`: a run, or one beside a run of the first), and "
            "after one of as many runs drawn at random.",
            rows_table(
                (
                    "source",
                    "groups",
                    "now",
                    "the first",
                    "least expected regret",
                    "its runs",
                    "at random",
                ),
                (
                    (
                        name,
                        of["groups"],
                        *(percent(of[key]) for key in ("now", "first", "chosen")),
                        f"{of['runs']:.1f}",
                        percent(of["random"]),
                    )
                    for name, of in pairs["next_run"].items()
                ),
            ),
        ]
    return parts
