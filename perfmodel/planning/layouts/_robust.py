"""Ranks layouts under prediction errors that layouts share: probabilities and regrets."""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files
from io import BytesIO
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.normal import normal_cdf, normal_quantile
from perfmodel.planning.layouts._objective import STEP_TIME, Goal
from perfmodel.planning.layouts.expressions import Interval
from perfmodel.prediction import Prediction, joint_errors

DRAWS: Final = 2**13
SOBOL_FILE: Final = "sobol.npy"
"""Direction numbers of Sobol sequences, written by `training/sobol_directions.py`; importing
`scipy.stats` for them would take half a second of every search."""
MOST_STORED: Final = 104
"""Dimensions of the longest sequence in the file."""
RESOLUTION: Final = 2.0**-30
"""Distance between neighbouring values of SciPy's Sobol points."""
TINY: Final = 1e-12
TIE: Final = 0.05
"""Two layouts are tied if the probability that one is better is this close to one half."""


@dataclass(frozen=True, eq=False)
class Robustness:
    """Robustness of ranked layouts to prediction errors.

    Log step times are a mixture of joint normals around the predictions (`joint_errors`). Errors of
    op families on which two layouts spend the same time cancel in their difference, so that one can
    be faster for certain although the intervals overlap.
    """

    better: Float[np.ndarray, "layouts layouts"]
    """Probability that the layout of the row is better than that of the column."""
    best: Float[np.ndarray, " layouts"]
    """Probability that each layout is the best of these."""
    regret: Float[np.ndarray, " layouts"]
    """Expected loss against the best of these layouts, as a share of the slower one's step, so that
    no unlikely site dominates."""
    upper: Float[np.ndarray, " layouts"]
    """The objective at the upper end of the layout's 90 % interval."""

    def order(self, criterion: str) -> list[int]:
        """Sort positions by one of `ORDERS`; ties keep their previous order."""
        sort_keys = {"regret": self.regret, "upper": self.upper, "best": -self.best}
        return np.argsort(sort_keys[criterion], kind="stable").tolist()

    @property
    def ranks(self) -> list[int]:
        """Ranks of the layouts from 1; layouts that are statistically tied with the first of a rank
        share it (`TIE`)."""
        ranks: list[int] = []
        for place in range(len(self.best)):
            # Compare with the first of the rank, not with the neighbour: a chain of near ties
            # would otherwise join layouts that clearly differ.
            first = ranks[-1] - 1 if ranks else place
            is_tied = abs(float(self.better[first, place]) - 0.5) <= TIE
            ranks.append(first + 1 if is_tied else place + 1)
        return ranks

    def among(self, places: Sequence[int]) -> "Robustness":
        """Return the figures of some layouts, still computed against all layouts."""
        chosen = np.array(places)
        return Robustness(
            self.better[np.ix_(chosen, chosen)],
            self.best[chosen],
            self.regret[chosen],
            self.upper[chosen],
        )

    def figures_of(self, place: int) -> dict[str, float | int | bool]:
        """The figures of one layout, for JSON."""
        ranks = self.ranks
        return {
            "rank": ranks[place],
            "tied": ranks.count(ranks[place]) > 1,
            "probability_first_better": float(self.better[0, place]),
            "probability_best": float(self.best[place]),
            "expected_regret": float(self.regret[place]),
            "upper": float(self.upper[place]),
        }


def robustness(goal: Goal, predictions: Sequence[Prediction]) -> Robustness:
    """Compute probabilities and regrets of layouts under a goal.

    Of step times, the probability that one beats another is exact but for the nodes of the mixture
    (`Joint.below`). Everything else is a mean over `DRAWS` scrambled Sobol points (quasi-Monte
    Carlo, Owen 1998; error about 0.002).
    """
    # Draw all layouts' errors together. Step times are log-normal about the predictions.
    step_s = np.array([p.step_time_s for p in predictions])
    joint = joint_errors(goal.step_problem, predictions)
    errors = mixture_draws(square_root(joint.covariance), joint.weight)
    drawn = _values(goal, predictions, step_s * np.exp(errors))
    least_s = drawn.min(axis=1, keepdims=True)
    fastest_share = np.bincount(drawn.argmin(axis=1), minlength=len(step_s)) / DRAWS

    # Two log step times are jointly normal, so that P(x_i < x_j) has a closed form. Other
    # objectives count draws, with ties as halves.
    if goal.objective == STEP_TIME:
        better = joint.below(np.log(step_s) - np.log(step_s)[:, None])
    else:
        better = np.stack(
            [(layout_draws[:, None] < drawn).mean(axis=0) for layout_draws in drawn.T]
        )
        better += (
            np.stack([(layout_draws[:, None] == drawn).mean(axis=0) for layout_draws in drawn.T])
            / 2
        )
    upper = _values(goal, predictions, np.array([[p.step_time_hi_s for p in predictions]]))[0]

    # The loss as a share of the larger of both values is at most 1 for positive objectives, so
    # that no unlikely draw dominates the mean.
    loss = (drawn - least_s) / np.maximum(np.maximum(np.abs(drawn), np.abs(least_s)), 1e-300)
    return Robustness(better, fastest_share, loss.mean(axis=0), upper)


def square_root(
    covariance: Float[np.ndarray, "*nodes rows rows"],
) -> Float[np.ndarray, "*nodes rows rows"]:
    """Square root of possibly singular covariance matrices."""
    # Cholesky fails on singular matrices, which equal layouts give. Rounding may make eigenvalues
    # slightly negative.
    values, vectors = np.linalg.eigh(covariance)
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]


def mixture_draws(
    root: Float[np.ndarray, "nodes rows columns"], weight: Float[np.ndarray, " nodes"]
) -> Float[np.ndarray, "draws rows"]:
    """Draws of root w with w standard normal, identical at every call; an additional dimension
    chooses the node of the mixture."""
    if len(weight) == 1:
        return standard_normal(root.shape[2]) @ root[0].T

    # The last coordinate of each point picks the node of the mixture by inverting its cumulative
    # weights.
    normal = standard_normal(root.shape[2] + 1)
    node = np.searchsorted(np.cumsum(weight)[:-1], normal_cdf(normal[:, -1]))
    draws = np.empty((len(normal), root.shape[1]))
    for component in range(len(root)):
        draws[node == component] = normal[node == component, :-1] @ root[component].T
    return draws


def standard_normal(dimensions: int) -> Float[np.ndarray, "draws dimensions"]:
    """Standard normal draws, the same at every call."""
    if not dimensions:
        return np.zeros((DRAWS, 0))

    # Clipping keeps the normal quantile finite.
    return normal_quantile(np.clip(sobol_points(dimensions), TINY, 1 - TINY))


def sobol_points(dimensions: int) -> Float[np.ndarray, "draws dimensions"]:
    """The first `DRAWS` points of SciPy's scrambled Sobol sequence, with a fixed seed."""
    if dimensions > MOST_STORED:
        from scipy.stats import qmc

        return qmc.Sobol(dimensions, rng=np.random.default_rng(0)).random(DRAWS)

    # The table holds sequences of 1, 2, 3 ... dimensions one after another, a row per dimension.
    table = np.load(BytesIO((files("perfmodel.planning.layouts") / SOBOL_FILE).read_bytes()))
    numbers = table[dimensions * (dimensions - 1) // 2 :][:dimensions]
    first_point, directions = numbers[:, :1], numbers[:, 1:]

    # Antonov and Saleev (1979): a point is the one before, changed by the direction number of the
    # lowest zero bit of that one's index.
    index = np.arange(DRAWS - 1)
    lowest_zero_bit = np.log2(~index & (index + 1)).astype(int)
    changes = np.concatenate([first_point, directions[:, lowest_zero_bit]], axis=1)
    return np.bitwise_xor.accumulate(changes, axis=1).T * RESOLUTION


def _values(
    goal: Goal,
    predictions: Sequence[Prediction],
    step_s: Float[np.ndarray, "draws layouts"],
) -> Float[np.ndarray, "draws layouts"]:
    """The objective of layouts with other step times; constraints are judged as predicted."""
    formula = goal.objective.formula(goal.quantities_of(predictions, Interval.exactly(step_s)))
    return np.broadcast_to(formula.lo, step_s.shape)
