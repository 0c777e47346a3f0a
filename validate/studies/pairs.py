"""Layouts of one site in pairs: is the probability that one is faster right, and what does choosing by it cost?"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from perfmodel.planning.layouts import expected_given, runs_and_pairs, square_root, weighed
from perfmodel.validation import Choice

NANOTRON = "ultrascale-playbook sweep (nanotron)"
"""Whose pipelines take longer than anything explains (`studies.excess`): reported apart."""
LEAST, MOST = 5, 12
"""Layouts of a group from which the next run is chosen: at least, and the first by prediction at most."""


def next_run(some: Sequence[Choice]) -> dict[str, Any]:
    """By source, mean regret of the layout chosen now; after the measurement of the least expected regret (a run, or
    one beside a run of the first layout, as `calibrate --for-decision` weighs them, and of how many `runs`); after one
    of as many runs drawn at random; and after a run of the layout predicted fastest. Each updates all layouts by their
    joint distribution."""
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
        source: {"groups": len(rows)} | dict(zip(names, np.mean(rows, axis=0).tolist(), strict=True))
        for source, rows in found.items()
    }


def _loss(measured: np.ndarray, chosen: int) -> float:
    return float(np.expm1(measured[chosen] - measured.min()))
