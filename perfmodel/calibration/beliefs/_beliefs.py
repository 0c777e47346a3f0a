"""Beliefs about events' times given measurements: kriging of log residuals over a base price.

The posterior describes all functions that agree with the measurements. Its covariance says how much
they disagree elsewhere, and so which measurement would settle which event.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log
from typing import Final

import numpy as np
from jaxtyping import Float
from scipy.linalg import cholesky, solve_triangular

from perfmodel.calibration.beliefs._covariance import (
    Component,
    Hyperparameters,
    Points,
    covariance,
    fit_hyperparameters,
)
from perfmodel.cost.learn import kernel_physics
from perfmodel.cost.learn.rows import rows_from_ops
from perfmodel.cost.learn.stack import Figures
from perfmodel.ops import FAMILIES, Collective, Op
from perfmodel.spec import Device

Base = Callable[[Sequence[Op]], Float[np.ndarray, " ops"]]
"""Function that prices ops before anything is measured: the present calibration, or an analytical
bound."""

NOISE: Final = 2 * log(0.01)
"""Log variance of a measured median: the stopping rule's half-width of 2 % is two standard
deviations."""
SHORT_NOISE: Final = 2 * log(0.05)
"""Log variance of a measured median that is added for times near the clock's resolution (5 %)."""
SHORT_S: Final = 8e-6
FEWEST_MEASUREMENTS: Final = 16
"""Least number of measurements of a group to which hyperparameters are fitted."""
START: Final = {
    "offset": 2 * log(0.4),
    "kind": 2 * log(0.2),
    "smooth": 2 * log(0.25),
    "rough": 2 * log(0.15),
}
"""Prior log variances: the base is off by a half, and shapes differ from it by a quarter."""
EVENT_VARIANCE: Final = 2 * log(0.05)
"""Prior log variance of the part of an event's time that its neighbours do not share."""
LEAST_EVENT_VARIANCE: Final = 2 * log(0.02)
"""Least value of this variance after a fit, because kernels of neighbouring shapes differ by this
much."""
MOST_FITTED_POINTS: Final = 128
"""Most points that hyperparameters are fitted to."""
COLLECTIVE_AXES: Final = ("bytes", "ranks", "nodes")


def group_of(op: Op) -> str:
    """Name of the group of ops that inform one another."""
    return "collective" if isinstance(op, Collective) else op.family


def components(axes: tuple[str, ...]) -> tuple[Component, ...]:
    """Return the covariance components of a residual: offsets overall and per kind, smooth and
    rough trends, and a nugget."""
    return (
        Component(()),
        Component(("kind",)),
        Component((), axes),
        Component(("kind",), axes, rough=True),
        Component(("event",)),
    )


@dataclass(frozen=True)
class Group:
    """The measured events of one group, conditioned on."""

    components: tuple[Component, ...]
    """Parts of the residuals."""
    hyper: Hyperparameters
    """Variances and lengths of these parts."""
    points: Points
    """The measured events as points."""
    lower: Float[np.ndarray, "measured measured"]
    """Cholesky factor L of their covariance with noise."""
    white: Float[np.ndarray, " measured"]
    """L^-1 times their log residuals."""


@dataclass(frozen=True)
class Located:
    """The events of one group, and how strongly each depends on those that were measured."""

    index: np.ndarray
    """Places of the events in the list that they come from."""
    points: Points
    """The events as points."""
    known: Float[np.ndarray, "measured events"]
    """L^-1 times the covariance of the measured events with these; no rows before anything is
    measured."""


Events = dict[str, Located]
"""A list of events by group."""


def take(events: Events, position: int) -> Events:
    """Return a list that contains one event of a list."""
    for name, part in events.items():
        places = np.flatnonzero(part.index == position)
        if len(places):
            return {
                name: Located(np.zeros(1, int), part.points.take(places), part.known[:, places])
            }
    raise IndexError(position)


def _count(events: Events) -> int:
    """Events in a list of all groups."""
    return sum(len(part.index) for part in events.values())


@dataclass(frozen=True)
class Beliefs:
    """Normal distribution of ops' log times given the measurements."""

    base: Base
    device: Device
    measured: Mapping[Op, float] = field(default_factory=dict)
    """Op to seconds."""
    groups: Mapping[str, Group] = field(default_factory=dict)

    def log_time(self, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
        """Expected log seconds of each op; for an op that was measured, the measurement."""
        result = np.log(self.base(ops))
        for name, part in self.locate(ops).items():
            if name in self.groups:
                result[part.index] += self.groups[name].white @ part.known
        # Measured events keep their measured times, which kriging would smooth.
        known = [i for i, op in enumerate(ops) if op in self.measured]
        result[known] = np.log([self.measured[ops[i]] for i in known])
        return result

    def locate(self, ops: Sequence[Op]) -> Events:
        """Group `ops` and find the points from which their covariances are computed."""
        events = {}
        for name, index in by_group(ops).items():
            group_ops = [ops[i] for i in index]

            # Whiten the covariance with the measured events once: both means and covariances are
            # products with it.
            points = points_of(group_ops, self.device, np.log(self.base(group_ops)))
            group = self.groups.get(name)
            known = np.zeros((0, len(group_ops)))
            if group:
                cross_covariance = covariance(group.components, group.hyper, group.points, points)
                known = solve_triangular(group.lower, cross_covariance, lower=True)
            events[name] = Located(index, points, known)
        return events

    def covariance(
        self, row_events: Events, column_events: Events
    ) -> Float[np.ndarray, "rows columns"]:
        """Posterior covariance of log times (Rasmussen and Williams, eq. 2.24), by group."""
        result = np.zeros((_count(row_events), _count(column_events)))
        for name in row_events.keys() & column_events.keys():
            rows, columns = row_events[name], column_events[name]
            kinds, hyper = self._believed(name, rows.points)
            # Subtract the variance that the measured events explain.
            explained = rows.known.T @ columns.known
            group_covariance = covariance(kinds, hyper, rows.points, columns.points) - explained
            result[np.ix_(rows.index, columns.index)] = group_covariance
        return result

    def variance(self, events: Events) -> Float[np.ndarray, " events"]:
        """Posterior variance of log times: the diagonal of their covariance."""
        result = np.zeros(_count(events))
        for name, part in events.items():
            # Every component correlates an event fully with itself.
            before = np.exp(self._believed(name, part.points)[1].variance).sum()
            result[part.index] = before - (part.known**2).sum(axis=0)
        return np.maximum(result, 1e-12)

    def _believed(self, name: str, points: Points) -> tuple[tuple[Component, ...], Hyperparameters]:
        if name in self.groups:
            return self.groups[name].components, self.groups[name].hyper
        kinds = components(tuple(points.coordinates))
        return kinds, prior(kinds)


def prior(kinds: Sequence[Component]) -> Hyperparameters:
    """Return the beliefs before enough is measured."""
    default = Hyperparameters.default(kinds)
    return Hyperparameters(
        np.array([*START.values(), EVENT_VARIANCE]), default.length, NOISE, SHORT_NOISE
    )


def condition(
    base: Base, device: Device, measured: Mapping[Op, float], earlier: Beliefs | None = None
) -> Beliefs:
    """Return the beliefs after conditioning on measured seconds.

    Args:
        earlier: beliefs whose hyperparameters are kept for groups that have grown by less than
            half.
    """
    ops = list(measured)
    groups = {}
    for name, index in by_group(ops).items():
        group_ops = [ops[i] for i in index]
        log_base = np.log(base(group_ops))
        points = points_of(group_ops, device, log_base)
        residual = np.log([measured[op] for op in group_ops]) - log_base
        group_before = earlier.groups.get(name) if earlier else None
        kinds = components(tuple(points.coordinates))
        # Hyperparameters change little while a group grows little, and fitting them takes long.
        if group_before and len(group_ops) < 1.5 * len(group_before.points):
            hyper = group_before.hyper
        else:
            hyper = _fit(kinds, points, residual)

        # Kriging with noise: factorise K + N once, and keep L and L^-1 y.
        matrix = covariance(kinds, hyper, points)
        noise = np.exp(hyper.noise) + np.exp(hyper.noise_short) * points.unrest
        matrix[np.diag_indices(len(group_ops))] += noise
        lower = cholesky(matrix, lower=True)
        groups[name] = Group(
            kinds, hyper, points, lower, solve_triangular(lower, residual, lower=True)
        )
    return Beliefs(base, device, dict(measured), groups)


def _fit(kinds: tuple[Component, ...], points: Points, residual: np.ndarray) -> Hyperparameters:
    """Maximum-likelihood hyperparameters of a group; scatter beyond measurement noise is assigned
    to the events.

    The variances are multiplied by 1 + p / n for p parameters fitted to n points, as in Akaike's
    final prediction error, because a fit to few points underestimates them.
    """
    n = len(points)
    if n < FEWEST_MEASUREMENTS:
        return prior(kinds)
    # The cost of the likelihood grows with the cube of the number of points, so it is fitted to a
    # sample.
    sample = np.random.default_rng(0).permutation(n)[:MOST_FITTED_POINTS]
    fit = fit_hyperparameters(kinds[:-1], points, residual, sample)

    # Scatter that the smooth terms leave is partly the clock's noise, which is known, and partly a
    # property of each event.
    event_variance = max(np.exp(fit.noise) - np.exp(NOISE), np.exp(LEAST_EVENT_VARIANCE))
    inflation = np.log1p((len(fit.variance) + sum(map(len, fit.length)) + 2) / n)
    variance = np.append(fit.variance, np.log(event_variance)) + inflation
    return Hyperparameters(variance, (*fit.length, np.zeros(0)), NOISE, fit.noise_short)


def by_group(ops: Sequence[Op]) -> dict[str, np.ndarray]:
    """Indices of the ops of each group."""
    index: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        index.setdefault(group_of(op), []).append(i)
    return {name: np.array(members) for name, members in index.items()}


def points_of(ops: Sequence[Op], device: Device, log_base: np.ndarray) -> Points:
    """Ops of one group as kriging points, in log2 of their work on this device."""
    if isinstance(ops[0], Collective):
        # Doublings make the same ratio of sizes the same distance, whatever the size.
        table = np.array([(op.bytes, op.num_ranks, op.num_nodes) for op in ops], float)  # pyright: ignore
        doublings = np.log2(np.maximum(table, 1))
        axes: dict[str, np.ndarray] = dict(zip(COLLECTIVE_AXES, doublings.T, strict=True))
        kinds = np.array([op.collective for op in ops], object)  # pyright: ignore
    else:
        rows = rows_from_ops(ops)  # pyright: ignore[reportArgumentType]
        physics, _ = kernel_physics(Figures.of(device), rows)
        names = [axis.name for axis in FAMILIES[rows.family].axes]
        axes = dict(
            zip(names, (np.broadcast_to(axis, len(ops)) for axis in physics.axes), strict=True)
        )
        kinds = rows.by_kind(str).astype(object)
    events = np.array([_label(op) for op in ops], object)

    # Times near the clock's resolution scatter more (`SHORT_NOISE`).
    unrest = np.minimum(1.0, (SHORT_S / np.exp(log_base)) ** 2)
    return Points({"kind": kinds, "event": events}, axes, unrest)


def _label(op: Op) -> str:
    """Return a label that is equal for ops that are the same event.

    How many groups share a collective's links makes no other event of it.
    """
    if isinstance(op, Collective):
        return f"{op.collective} {op.bytes:.4g} {op.num_ranks} {op.ranks_per_node} {op.dtype}"
    return repr(op)
