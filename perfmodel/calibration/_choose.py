"""Which events to measure next: those whose measurement narrows the step time most."""

import numpy as np
from jaxtyping import Float

from perfmodel.calibration._beliefs import NOISE, Beliefs, Events, take


def step_variance(
    beliefs: Beliefs, ops: Events, shares: Float[np.ndarray, "layouts ops"]
) -> Float[np.ndarray, " layouts"]:
    """Variance of every layout's log step time: s^T C s, with C the covariance of the events' log times.

    Args:
        ops: the events, in the order of `shares`' columns.
        shares: s = d log(step time) / d log(event time), the timeline's gradient.
    """
    return np.einsum("li,ij,lj->l", shares, beliefs.covariance(ops, ops), shares)


def choose(
    beliefs: Beliefs, ops: Events, shares: Float[np.ndarray, "layouts ops"], pool: Events, count: int
) -> list[int]:
    """Up to `count` candidates of `pool`, one after the other.

    Measuring candidate c, of variance v and noise n, takes (s^T C_c)^2 / (v + n) off a layout's variance, with
    C_c the covariance of the layout's events with it: disagreement weighted by the share of the step time that
    depends on it (the variance reduction of Cohn, Ghahramani and Jordan, JAIR 4, 1996, for a weighted sum). What
    the layouts gain is summed. Each next one is chosen as if those before it were measured, which keeps a batch
    diverse.
    """
    return _greedy(beliefs, pool, count, shares @ beliefs.covariance(ops, pool))


def most_uncertain(beliefs: Beliefs, pool: Events, count: int) -> list[int]:
    """Up to `count` candidates by disagreement alone, whatever depends on them: what `choose` is held against."""
    return _greedy(beliefs, pool, count, None)


def _greedy(
    beliefs: Beliefs, pool: Events, count: int, of_steps: Float[np.ndarray, "layouts pool"] | None
) -> list[int]:
    """Candidates by falling gain; `of_steps`: covariance of the log step times with each candidate's log time."""
    variance = beliefs.variance(pool)
    chosen: list[int] = []
    seen: list[Float[np.ndarray, " pool"]] = []
    for _ in range(min(count, len(variance))):
        gain = variance.copy() if of_steps is None else (of_steps**2).sum(axis=0) / (variance + np.exp(NOISE))
        gain[chosen] = -1.0
        best = int(np.argmax(gain))
        if gain[best] <= 0:
            break
        column = beliefs.covariance(pool, take(pool, best))[:, 0] - sum(past * past[best] for past in seen)
        column = column / np.sqrt(variance[best] + np.exp(NOISE))
        if of_steps is not None:
            of_steps = of_steps - np.outer(of_steps[:, best] / np.sqrt(variance[best] + np.exp(NOISE)), column)
        variance = np.maximum(variance - column**2, 1e-12)
        chosen.append(best)
        seen.append(column)
    return chosen
