"""What like runs have in common that no parameter explains: a Gaussian process over layouts.

Kennedy and O'Hagan (J. R. Stat. Soc. B 63, 2001) calibrate a model together with its discrepancy, for otherwise the
parameters have to explain what is not theirs, and runs that resemble one another count as so many witnesses.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.spec import Layout

LENGTH: Final = 2.0
"""Doublings of one degree, or of the model, after which the correlation has fallen to 1/e."""
SAME: Final = 1e-6
"""Share of the variance by which repeats of one run differ, for the sake of the factorisation."""

Coordinates = tuple[float, ...]


def coordinates(parameters: float, seq_len: int, layout: Layout) -> Coordinates:
    """Where a run stands: doublings of tp, pp, dp, cp, ep, micro-batch, sequence and parameters."""
    degrees = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep, layout.micro_batch)
    return tuple(np.log2([*degrees, seq_len, parameters]).tolist())


def correlation(
    a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
) -> Float[np.ndarray, "n m"]:
    """exp(-distance / length): continuous, not smooth, as step times over layouts are."""
    return np.exp(-np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2)) / LENGTH)


def covariance(at: Float[np.ndarray, "n coordinates"], amplitude: float) -> Float[np.ndarray, "n n"]:
    """Prior covariance of the offsets of runs."""
    return amplitude**2 * (correlation(at, at) + SAME * np.eye(len(at)))


@dataclass(frozen=True)
class Discrepancy:
    """Log offsets at runs, carried over to layouts near them."""

    at: tuple[Coordinates, ...]
    offset: tuple[float, ...]
    """Of each run: what its step takes beyond the parameters, in log time."""
    variance: tuple[float, ...]
    """Of each run's own noise."""
    amplitude: float
    """Prior standard deviation of an offset."""

    @cached_property
    def _points(self) -> Float[np.ndarray, "runs coordinates"]:
        return np.array(self.at)

    @cached_property
    def _kernel(self) -> Float[np.ndarray, "runs runs"]:
        return covariance(self._points, self.amplitude)

    @cached_property
    def _weights(self) -> Float[np.ndarray, " runs"]:
        return np.linalg.solve(self._kernel, np.array(self.offset))

    @cached_property
    def _precision(self) -> Float[np.ndarray, "runs runs"]:
        return np.linalg.inv(self._kernel + np.diag(self.variance))

    def mean(self, where: Coordinates) -> float:
        """Expected log offset of a layout."""
        return float(self._near(where) @ self._weights)

    def spread(self, where: Coordinates) -> float:
        """Variance of the log offset of a layout."""
        near = self._near(where)
        return self.amplitude**2 - float(near @ self._precision @ near)

    def joint(self, where: Sequence[Coordinates]) -> Float[np.ndarray, "n n"]:
        """Covariance of the log offsets of layouts; its diagonal is `spread`."""
        at = np.array(where)
        near = self.amplitude**2 * correlation(at, self._points)
        return self.amplitude**2 * correlation(at, at) - near @ self._precision @ near.T

    def _near(self, where: Coordinates) -> Float[np.ndarray, " runs"]:
        return self.amplitude**2 * correlation(np.array([where]), self._points)[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "at": [list(point) for point in self.at],
            "offset": list(self.offset),
            "variance": list(self.variance),
            "amplitude": self.amplitude,
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "Discrepancy":
        """Inverse of `to_dict`."""
        return cls(
            at=tuple(tuple(map(float, point)) for point in value["at"]),
            offset=tuple(map(float, value["offset"])),
            variance=tuple(map(float, value["variance"])),
            amplitude=float(value["amplitude"]),
        )
