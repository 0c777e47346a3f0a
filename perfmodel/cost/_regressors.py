"""Chooses the regressor of a kernel: the one that knows the closest device."""

import numpy as np
from jaxtyping import Bool

from perfmodel.cost._roofline import HALF_WIDTH, roofline_time
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
