"""Bounds of kernel times by those of other kernels: of wider elements, of halves of a batch."""

import numpy as np
from jaxtyping import Bool

from perfmodel.cost._roofline import least_of_rows
from perfmodel.cost.learn import Prediction, PriceQuery


def between_half_and_all(answers: Prediction, index: np.ndarray, wide: Prediction) -> None:
    """Limit times at positions to between half and all of those of elements twice as wide."""
    log_time = answers.log_time[index]
    answers.move(index, np.clip(log_time, wide.log_time - np.log(2.0), wide.log_time) - log_time)


def bound_by_halves_and_nominal_rate(
    answers: Prediction, request: PriceQuery, half: np.ndarray, unmeasured: Bool[np.ndarray, "n"]
) -> None:
    """Let attention take no longer than two halves of its batch, nor less than its FLOPs at the
    nominal rate.

    Args:
        request: rows in ascending order of their batches (`with_half_batches`).
        half: the row of half of each, itself where it has none.
        unmeasured: rows that the nominal rate bounds.
    """
    log_nominal = np.full(len(request), -np.inf)
    index = np.flatnonzero(unmeasured)
    log_nominal[index] = request.take(index).log_of(least_of_rows)

    # halves before wholes, so that each is bounded by its bounded half
    batch_ends = np.flatnonzero(np.diff(request.rows.shape["batch"])) + 1
    for index in np.split(np.arange(len(request)), batch_ends):
        log_two_halves = answers.log_time[half[index]] + np.log(2.0)
        answers.move(index, np.minimum(log_two_halves - answers.log_time[index], 0.0))
        answers.move(index, np.maximum(log_nominal[index] - answers.log_time[index], 0.0))
