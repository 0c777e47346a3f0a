"""Layouts of one site in pairs: is the probability that one is faster right, and what does choosing by it cost?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfmodel.planning.layouts import Evidence, weighed
from perfmodel.validation import Choice

NANOTRON = "ultrascale-playbook sweep (nanotron)"
"""Whose pipelines take longer than anything explains (`studies.excess`): reported apart."""
LEAST, MOST = 5, 12
"""Layouts of a group from which the next run is chosen: at least, and the first by prediction at most."""


def next_run(some: Sequence[Choice]) -> dict[str, Any]:
    """By source, mean regret of the layout chosen now, after one run drawn at random, after the layout predicted
    fastest is run, and after the run of the least expected regret; each updates all layouts by their covariance."""
    found: dict[str, list[tuple[float, ...]]] = {}
    for one in some:
        if len(one.predicted) < LEAST:
            continue
        first = np.argsort(one.predicted)[:MOST]
        mean, measured = one.predicted[first], one.measured[first]
        covariance = np.tensordot(one.joint.weight, one.joint.covariance, 1)[np.ix_(first, first)]
        loads = np.linalg.cholesky(covariance + 1e-10 * np.eye(len(first)))
        told = weighed(mean, loads, [Evidence("run", (at,), loads[[at]], np.zeros(1)) for at in range(len(first))])
        after = [_regret(mean, covariance, measured, at) for at in range(len(first))]
        found.setdefault(one.source, []).append(
            (_loss(measured, int(mean.argmin())), float(np.mean(after)), after[0], after[told.worth[0].places[0]])
        )
    names = ("now", "random", "first", "chosen")
    return {
        source: {"groups": len(rows)} | dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        for source, rows in found.items()
    }


def _regret(mean: np.ndarray, covariance: np.ndarray, measured: np.ndarray, at: int) -> float:
    """Of the layout of the least posterior mean once one is run."""
    shift = covariance[:, at] / covariance[at, at] * (measured[at] - mean[at])
    return _loss(measured, int((mean + shift).argmin()))


def _loss(measured: np.ndarray, chosen: int) -> float:
    return float(np.expm1(measured[chosen] - measured.min()))
