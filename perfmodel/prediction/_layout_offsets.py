"""What like layouts of one site have in common that no factor explains: a Gaussian process over layouts, part of the
model of sites (`_population`).

Without it the factors have to explain what is not theirs, and runs that resemble one another count as so many witnesses
(Kennedy and O'Hagan, J. R. Stat. Soc. B 63, 2001).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.spec import Layout

SAME: Final = 1e-6
"""Share of the variance by which repeats of one run differ, for the sake of the factorisation."""

Coordinates = tuple[float, ...]


def coordinates(parameters: float, seq_len: int, layout: Layout) -> Coordinates:
    """Where a run stands: doublings of tp, pp, dp, cp, ep, micro-batch, sequence and parameters."""
    degrees = (layout.tp, layout.pp, layout.dp, layout.cp, layout.ep, layout.micro_batch)
    return tuple(np.log2([*degrees, seq_len, parameters]).tolist())


@dataclass(frozen=True)
class Likeness:
    """How layouts of one site are alike before any run, in log time."""

    near: float
    """Standard deviation of what layouts near one another share."""
    length: float
    """Distance after which its correlation has fallen to 1/e."""
    own: float
    """Standard deviation of what is one layout's own, the same in its repeats."""

    def between(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance; with the distance it falls as exp(-distance / length): continuous, not smooth, as step times
        over layouts are."""
        apart = np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))
        return self.near**2 * np.exp(-apart / self.length) + self.own**2 * (apart == 0)

    def of(self, at: Float[np.ndarray, "n coordinates"]) -> Float[np.ndarray, "n n"]:
        """Prior covariance of the offsets of runs."""
        return self.between(at, at) + SAME * self.near**2 * np.eye(len(at))


@dataclass(frozen=True)
class LayoutOffsets:
    """Log offsets at runs, carried over to layouts near them."""

    at: tuple[Coordinates, ...]
    offset: tuple[float, ...]
    """Of each run: what its step takes beyond the parameters, in log time."""
    variance: tuple[float, ...]
    """Of each run's own noise."""
    likeness: Likeness

    @cached_property
    def _points(self) -> Float[np.ndarray, "runs coordinates"]:
        return np.array(self.at)

    @cached_property
    def _kernel(self) -> Float[np.ndarray, "runs runs"]:
        return self.likeness.of(self._points)

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
        return self.likeness.near**2 + self.likeness.own**2 - float(near @ self._precision @ near)

    def joint(self, where: Sequence[Coordinates]) -> Float[np.ndarray, "n n"]:
        """Covariance of the log offsets of layouts; its diagonal is `spread`."""
        at = np.array(where)
        near = self.likeness.between(at, self._points)
        return self.likeness.between(at, at) - near @ self._precision @ near.T

    def _near(self, where: Coordinates) -> Float[np.ndarray, " runs"]:
        return self.likeness.between(np.array([where]), self._points)[0]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "at": [list(point) for point in self.at],
            "offset": list(self.offset),
            "variance": list(self.variance),
            "likeness": vars(self.likeness),
        }

    @classmethod
    def from_dict(cls, value: dict[str, Any]) -> "LayoutOffsets":
        """Inverse of `to_dict`."""
        return cls(
            at=tuple(tuple(map(float, point)) for point in value["at"]),
            offset=tuple(map(float, value["offset"])),
            variance=tuple(map(float, value["variance"])),
            likeness=Likeness(**{name: float(one) for name, one in value["likeness"].items()}),
        )
