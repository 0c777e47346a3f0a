"""Which layout is best when predictions may err: probabilities and regrets over the errors that layouts share."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float
from scipy.special import ndtr, ndtri
from scipy.stats import qmc

from perfmodel.planning.layouts._intervals import Interval
from perfmodel.planning.layouts._objective import STEP_TIME, Goal
from perfmodel.prediction import Prediction, log_covariance

DRAWS: Final = 2**13
TINY: Final = 1e-12


@dataclass(frozen=True, eq=False)
class Robustness:
    """How ranked layouts compare when all predictions err together.

    Log step times are jointly normal about the predictions (`log_covariance`): what two layouts spend alike on the same
    family of ops cancels between them, so that they may differ surely though their intervals overlap.
    """

    better: Float[np.ndarray, "layouts layouts"]
    """Probability that the layout of the row is better than that of the column."""
    best: Float[np.ndarray, " layouts"]
    """Probability to be the best of these."""
    regret: Float[np.ndarray, " layouts"]
    """Expected relative loss against the best of these."""
    upper: Float[np.ndarray, " layouts"]
    """The objective at the upper end of the layout's 90 % interval."""

    def order(self, by: str) -> list[int]:
        """Places by one of `ORDERS`, ties as ranked before."""
        key = {"regret": self.regret, "upper": self.upper, "best": -self.best}[by]
        return np.argsort(key, kind="stable").tolist()

    def kept(self, places: Sequence[int]) -> "Robustness":
        """The same figures (against all) for some of the layouts."""
        some = np.array(places)
        return Robustness(self.better[np.ix_(some, some)], self.best[some], self.regret[some], self.upper[some])

    def of(self, place: int) -> dict[str, float]:
        """Figures of one layout, for JSON."""
        return {
            "probability_best": float(self.best[place]),
            "expected_regret": float(self.regret[place]),
            "upper": float(self.upper[place]),
        }


def robustness(goal: Goal, predictions: Sequence[Prediction]) -> Robustness:
    """Probabilities and regrets of some layouts under a goal.

    Of step times, the probability that one beats another is exact: Phi((log T_j - log T_i) / sd(log T_i - log T_j)).
    Everything else is a mean over `DRAWS` scrambled Sobol points (quasi-Monte Carlo, Owen 1998; error about 0.002).
    """
    step_s = np.array([p.step_time_s for p in predictions])
    covariance = log_covariance(goal.step_problem, predictions)
    values, vectors = np.linalg.eigh(covariance)
    root = (vectors * np.sqrt(np.maximum(values, 0.0)))[:, values > TINY]
    drawn = _values(goal, predictions, step_s * np.exp(standard_normal(root.shape[1]) @ root.T))
    least = drawn.min(axis=1, keepdims=True)
    best = np.bincount(drawn.argmin(axis=1), minlength=len(step_s)) / DRAWS
    if goal.objective == STEP_TIME:
        variance = np.diag(covariance)
        sd = np.sqrt(np.maximum(variance[:, None] + variance - 2 * covariance, TINY))
        better = ndtr((np.log(step_s) - np.log(step_s)[:, None]) / sd)
    else:
        better = np.stack([(one[:, None] < drawn).mean(axis=0) for one in drawn.T])
        better += np.stack([(one[:, None] == drawn).mean(axis=0) for one in drawn.T]) / 2
    upper = _values(goal, predictions, np.array([[p.step_time_hi_s for p in predictions]]))[0]
    return Robustness(better, best, ((drawn - least) / np.abs(least)).mean(axis=0), upper)


def standard_normal(dimensions: int) -> Float[np.ndarray, "draws dimensions"]:
    """The same draws at every call."""
    if not dimensions:
        return np.zeros((DRAWS, 0))
    uniform = qmc.Sobol(dimensions, rng=np.random.default_rng(0)).random(DRAWS)
    return ndtri(np.clip(uniform, TINY, 1 - TINY))


def _values(
    goal: Goal, predictions: Sequence[Prediction], step_s: Float[np.ndarray, "draws layouts"]
) -> Float[np.ndarray, "draws layouts"]:
    """The objective of layouts whose steps take otherwise; constraints are held by the predictions."""
    formula = goal.objective.formula(goal.of(predictions, Interval.exactly(step_s)))
    return np.broadcast_to(formula.lo, step_s.shape)
