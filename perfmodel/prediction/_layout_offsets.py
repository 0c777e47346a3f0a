"""What like layouts of one site have in common that no factor explains: a Gaussian process over layouts, part of the
model of sites (`_population`).

Without it the factors have to explain what is not theirs, and runs that resemble one another count as so many witnesses
(Kennedy and O'Hagan, J. R. Stat. Soc. B 63, 2001).
"""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.spec import Layout

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

    def shared(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance of what layouts share; with the distance it falls as exp(-distance / length): continuous, not
        smooth, as step times over layouts are."""
        return self.near**2 * np.exp(-_apart(a, b) / self.length)

    def alone(
        self, a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]
    ) -> Float[np.ndarray, "n m"]:
        """Covariance of what is a layout's own."""
        return self.own**2 * (_apart(a, b) == 0)


def _apart(a: Float[np.ndarray, "n coordinates"], b: Float[np.ndarray, "m coordinates"]) -> Float[np.ndarray, "n m"]:
    return np.sqrt(((a[:, None] - b[None]) ** 2).sum(axis=2))
