"""Times already predicted, found again by one hash per op."""

from collections.abc import Sequence

import numpy as np

from perfmodel.cost._events import EventTimes
from perfmodel.learn import PROVENANCE, Prediction
from perfmodel.spec import KernelOp

_LABELS = np.array(PROVENANCE, object)


class KnownTimes:
    """Times of ops on one device under one software."""

    def __init__(self) -> None:
        self._code: dict[KernelOp, int] = {}
        self._seconds = np.zeros((0, 3))
        self._provenance = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return len(self._code)

    def codes(self, ops: Sequence[KernelOp]) -> tuple[np.ndarray, list[KernelOp]]:
        """Position of every op, and the distinct ones that were not known (`add` their times next)."""
        code, before = self._code, len(self._code)
        positions = np.array([code.setdefault(op, len(code)) for op in ops], np.int64)
        if len(code) == before:
            return positions, []
        fresh, first = np.unique(positions, return_index=True)
        return positions, [ops[i] for i in first[fresh >= before]]

    def add(self, prediction: Prediction) -> None:
        """Times of the new ops, in the order that `codes` gave them."""
        seconds = np.exp(np.stack([prediction.log_time, prediction.log_low, prediction.log_high], axis=1))
        start, end = len(self._code) - len(seconds), len(self._code)
        if end > len(self._seconds):
            room = max(2 * len(self._seconds), end)
            self._seconds = np.concatenate([self._seconds[:start], np.zeros((room - start, 3))])
            self._provenance = np.concatenate([self._provenance[:start], np.zeros(room - start, np.int64)])
        self._seconds[start:end] = seconds
        self._provenance[start:end] = prediction.provenance

    def drop(self, new: Sequence[KernelOp]) -> None:
        """Take new ops back that could not be predicted."""
        for op in new:
            del self._code[op]

    def forget(self) -> None:
        """Start anew."""
        self.__init__()

    def times(self, codes: np.ndarray) -> EventTimes:
        """Times at positions."""
        time_s, lo_s, hi_s = self._seconds[codes].T
        return EventTimes(time_s, lo_s, hi_s, tuple(_LABELS[self._provenance[codes]].tolist()))
