"""Fits the constants of the base time by robust least squares per stack and kind, with priors."""

from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float64

from perfmodel.cost.learn.parameters import FLOOR_POWER, JOINT_POWER, power_join
from perfmodel.cost.learn.training._tables import Samples
from perfmodel.ops import KernelKind
from perfmodel.ops.physics import compute_seconds, memory_seconds

NO_FLOOR: Final = float(np.log(1e-9))
_TYPICAL_FLOOR: Final = float(np.log(35e-6))
_PRIOR_WEIGHT: Final = 2.0
"""Priors count as this many measurements per constant."""
_SHOWS_FLOOR: Final = 500
"""Rows of a kind from which its shortest times show the launch floor."""
_MOST_ROWS: Final = 3000
"""Rows that the constants of one group are fitted to, drawn at random where there are more."""


class Base(NamedTuple):
    """Log constants per group [G] and the group of every sample [n]."""

    groups: tuple[tuple[int, KernelKind], ...]
    """Stack index and kind of each group."""
    index: np.ndarray
    log_fixed_s: Float64[np.ndarray, "G"]
    log_compute: Float64[np.ndarray, "G"]
    log_memory: Float64[np.ndarray, "G"]
    log_floor_s: Float64[np.ndarray, "G"]


def fit_base(samples: Samples, seed: int = 0) -> Base:
    """Constants of every (stack, kind) with at least one sample.

    Each fit minimises soft-L1 log residuals over launch time, compute and memory efficiency (and,
    for eager sources, the launch floor), drawn to typical values where data are few.
    """
    rng = np.random.default_rng(seed)
    groups, index = groups_of_samples(samples)
    rows = [np.flatnonzero(index == g) for g in range(len(groups))]

    # Four constants need no more rows than this, and least squares takes as long as there are rows.
    thinned = []
    for rows_of_group in rows:
        if len(rows_of_group) > _MOST_ROWS:
            rows_of_group = rng.choice(rows_of_group, _MOST_ROWS, replace=False)
        thinned.append(rows_of_group)

    constants = np.zeros((len(groups), 4))
    # Large groups come first: their launch floors are the prior of small ones.
    floors: dict[tuple[str, KernelKind], list[float]] = {}
    for g in sorted(range(len(groups)), key=lambda g: -len(rows[g])):
        stack = samples.stacks[groups[g][0]]
        known_floors = floors.setdefault((stack.source, groups[g][1]), [])
        floor = float(np.median(known_floors)) if known_floors else _TYPICAL_FLOOR
        constants[g] = _fit_group(samples.take(thinned[g]), stack.host_launch, floor)
        if len(rows[g]) >= _SHOWS_FLOOR:
            known_floors.append(constants[g, 3])
    return Base(groups, index, *constants.T)


def groups_of_samples(samples: Samples) -> tuple[tuple[tuple[int, KernelKind], ...], np.ndarray]:
    """Every pair of stack index and kind that was measured, and which of them each sample has
    [n]."""
    kinds = sorted(samples.rows.kinds)
    joint = samples.stack * len(kinds) + samples.rows.by_kind(kinds.index)
    unique, index = np.unique(joint, return_inverse=True)
    return tuple((int(u // len(kinds)), kinds[u % len(kinds)]) for u in unique), index


def _fit_group(samples: Samples, host_launch: bool, floor: float) -> np.ndarray:
    """Logs of launch, of the shares of peak rate and bandwidth, and of the floor, that fit the
    samples best."""
    from scipy.optimize import least_squares

    physics, machine = samples.physics()
    compute = compute_seconds(np, physics, machine)
    memory = memory_seconds(np, physics, machine)
    target = np.log(samples.time_s)
    lowest = float(np.quantile(target, 0.02))
    launch = np.log(3e-6) if host_launch else min(np.log(5e-6), lowest - 0.1)

    # Priors: launch, shares of the peak rate and of the bandwidth that are typical, and the floor.
    # The shortest times show the launch floor only if they are as short as launches are.
    prior = np.array([launch, np.log(0.6), np.log(0.75), min(lowest - 0.05, floor)])
    spread = np.array([0.1 if host_launch else 1.0, 1.0, 0.35, 0.3])
    free = 4 if host_launch else 3

    def residuals(parameters: Sequence[float]) -> np.ndarray:
        """Errors of the samples' log times, then distances from the prior."""
        log_launch, log_rate_share, log_bandwidth_share, *log_floor = parameters
        compute_s = compute * np.exp(-log_rate_share)
        memory_s = memory * np.exp(-log_bandwidth_share)
        kernel_s = np.exp(log_launch) + power_join(np, compute_s, memory_s, JOINT_POWER)
        log_time = np.log(kernel_s)
        # as `join_floor`: a kernel hides behind the host's launch
        if host_launch:
            log_time = np.logaddexp(FLOOR_POWER * log_time, FLOOR_POWER * log_floor[0])
            log_time = log_time / FLOOR_POWER
        from_prior = (np.asarray(parameters) - prior[:free]) / spread[:free]
        return np.concatenate([log_time - target, np.sqrt(_PRIOR_WEIGHT) * 0.3 * from_prior])

    fit = least_squares(residuals, prior[:free], loss="soft_l1", f_scale=0.2, max_nfev=60)
    if not host_launch:
        return np.append(fit.x, NO_FLOOR)
    return np.append(fit.x[:3], min(fit.x[3], lowest))
