"""The shortest order of split passes by mixed-integer programming; small cases only."""

from itertools import combinations

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp

from perfmodel.schedule import PassTimes, Phase

F, B, W = Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT


def shortest_makespan(times: PassTimes, micro_batches: int, limit: int) -> float:
    """Least time from the first to the last pass, with at most `limit` micro-batches alive on a
    device.

    Variables: a start per pass, one bit per pair of passes of a device (which goes first), the
    makespan. Micro-batches are alike, so that each phase runs them in order.
    """
    p = len(times.forward_s)
    m = micro_batches
    passes = [(phase, d, i) for phase in (F, B, W) for d in range(p) for i in range(m)]
    at = {work: k for k, work in enumerate(passes)}
    pairs = [pair for d in range(p) for pair in combinations([w for w in passes if w[1] == d], 2)]
    first = {pair: len(passes) + k for k, pair in enumerate(pairs)}
    n = len(passes) + len(pairs) + 1
    span = n - 1
    seconds = {work: float(times.by_phase[work[0]][work[1]]) for work in passes}
    big = sum(seconds.values()) + 2 * p * m * times.transfer_s
    rows: list[np.ndarray] = []
    lower: list[float] = []

    def require(terms: dict[int, float], at_least: float) -> None:
        row = np.zeros(n)
        for variable, factor in terms.items():
            row[variable] += factor
        rows.append(row)
        lower.append(at_least)

    def after(work: tuple, before: tuple, delay: float = 0.0) -> None:
        require({at[work]: 1, at[before]: -1}, seconds[before] + delay)

    for phase, d, i in passes:
        require({span: 1, at[phase, d, i]: -1}, seconds[phase, d, i])
        if i:
            after((phase, d, i), (phase, d, i - 1))
        if phase == F and d:
            after((F, d, i), (F, d - 1, i), times.transfer_s)
        if phase == B:
            after((B, d, i), (F, d, i))
            if d < p - 1:
                after((B, d, i), (B, d + 1, i), times.transfer_s)
        if phase == W:
            after((W, d, i), (B, d, i))
    for (one, other), bit in first.items():
        require({at[other]: 1, at[one]: -1, bit: -big}, seconds[one] - big)
        require({at[one]: 1, at[other]: -1, bit: big}, seconds[other])
    for d in range(p):
        for i in range(limit, m):  # forward i starts after the weight gradient of i - limit
            after((F, d, i), (W, d, i - limit))
    integer = np.zeros(n)
    integer[len(passes) : -1] = 1
    upper = np.full(n, np.inf)
    upper[len(passes) : -1] = 1
    cost = np.zeros(n)
    cost[span] = 1
    result = milp(
        cost,
        constraints=LinearConstraint(np.array(rows), lower),
        integrality=integer,
        bounds=Bounds(0, upper),
        options={"time_limit": 60},
    )
    assert result.status == 0, result.message
    return float(result.fun)
