"""Times of kernels by the regressor that knows the closest device, and bounds of them by other
kernels: those on wider elements, and those on half of a batch."""

import numpy as np
from jaxtyping import Bool

from perfmodel.cost._roofline import HALF_WIDTH, least_of_rows, roofline_time
from perfmodel.cost.learn import (
    Prediction,
    PriceQuery,
    Query,
    Regressor,
    WeightFiles,
    load_family,
)


class FamilyRegressors:
    """The regressors of every op family in a calibration's weights, loaded on first use."""

    def __init__(self, weights: WeightFiles) -> None:
        self._weights = weights
        self._families: dict[str, tuple[Regressor, ...]] = {}

    def of(self, family: str) -> tuple[Regressor, ...]:
        """Regressors of one family, a user's before the shipped ones."""
        if family not in self._families:
            self._families[family] = load_family(self._weights, family)
        return self._families[family]

    def unnamed(self, request: PriceQuery) -> Bool[np.ndarray, "n"]:
        """Whether each row's query names no source that the weights were fitted to."""
        measured: set[str] = set()
        for regressor in self.of(request.rows.family):
            measured.update(stack.source for stack in regressor.stacks)
        return request.of_query(lambda query: query.source not in measured).astype(bool)

    def predict(self, request: PriceQuery) -> Prediction:
        """Times of rows, each by the regressor of its dtype that knows the closest device; else by
        the roofline.

        A user's regressors stand before the shipped ones (`load_family`), so they win where both
        are as close.
        """
        regressors = self.of(request.rows.family)

        def closest(query: Query, dtype: str) -> int:
            """Index of the regressor with the most similar device; -1 if none supports the
            dtype."""
            closeness = [regressor.closeness(query.figures, dtype) for regressor in regressors]
            return int(np.argmax(closeness)) if closeness and max(closeness) >= 0 else -1

        # few distinct devices and dtypes stand behind many rows
        pairs, pair_of = request.combinations()
        chosen: dict[tuple[Query, str], int] = {}
        for query, kind in pairs:
            if (query, kind.dtype) not in chosen:
                chosen[query, kind.dtype] = closest(query, kind.dtype)
        regressor_of = np.array([chosen[query, kind.dtype] for query, kind in pairs], int)[pair_of]

        answers = Prediction.empty(len(request))
        for index in np.unique(regressor_of):
            rows_of_regressor = np.flatnonzero(regressor_of == index)
            part = request.take(rows_of_regressor)
            answers.put(
                rows_of_regressor,
                regressors[index].predict(part) if index >= 0 else by_roofline(part),
            )
        return answers


def by_roofline(request: PriceQuery) -> Prediction:
    """Times by the roofline alone, for kernels without a regressor."""
    return Prediction.around(request.log_of(roofline_time), HALF_WIDTH, "analytical")


def between_half_and_all(answers: Prediction, index: np.ndarray, wide: Prediction) -> None:
    """Limit times at positions to 50 % to 100 % of the times with elements twice as wide."""
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
