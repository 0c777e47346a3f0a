"""How much more or less one site's runs scatter than those of the typical site: unknown, so integrated over.

A site scatters in two ways: by what its layouts share with those near them, its settings and its events, and by what
is each layout's and each run's own. Each has a scale, log-normal over sites (standard deviations `scatter`), the same
for all runs of a site: a mixture of normals with heavy tails, which a site's own runs narrow. Integrals over the scales
are sums over the nodes of Gauss and Hermite.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from jaxtyping import Float

NODES: Final = (3, 5)
"""Of the two scales. The second, of which runs tell more and more, is the wider."""
_HALVINGS: Final = 50


@dataclass(frozen=True, eq=False)
class Scales:
    """Nodes of the two scales."""

    within: Float[np.ndarray, " nodes"]
    """By what the variance of what layouts share is multiplied, and that of settings and events."""
    own: Float[np.ndarray, " nodes"]
    """By what that of layouts and runs by themselves is."""
    weight: Float[np.ndarray, " nodes"]


@lru_cache
def standard_nodes() -> tuple[Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"], Float[np.ndarray, " nodes"]]:
    """Both logs of scales in standard deviations, and weights, of every pair of nodes."""
    (a, of_a), (b, of_b) = (np.polynomial.hermite_e.hermegauss(n) for n in NODES)
    weight = np.outer(of_a, of_b).ravel()
    return np.repeat(a, NODES[1]), np.tile(b, NODES[0]), weight / weight.sum()


def scales(scatter: tuple[float, float]) -> Scales:
    """Of a site of which nothing is known; one node where all scatter alike."""
    if not any(scatter):
        return Scales(np.ones(1), np.ones(1), np.ones(1))
    within, own, weight = standard_nodes()
    return Scales(np.exp(2 * scatter[0] * within), np.exp(2 * scatter[1] * own), weight)


def half_width(
    variance: Float[np.ndarray, "nodes *shape"], weight: Float[np.ndarray, " nodes"], inside: float = 0.9
) -> Float[np.ndarray, "*shape"]:
    """Of the central interval that holds a share of a mixture of normals around 0, by bisection."""
    from scipy.special import ndtr

    sd = np.sqrt(variance).reshape(len(weight), -1)
    per_sd, share = 1 / np.maximum(sd, 1e-300), (1 + inside) / 2
    low, step = np.zeros(sd.shape[1]), 10 * sd.max(axis=0) + 1e-300
    for _ in range(_HALVINGS):
        step = step / 2
        low = low + step * (weight @ ndtr((low + step) * per_sd) < share)
    return (low + step / 2).reshape(variance.shape[1:])
