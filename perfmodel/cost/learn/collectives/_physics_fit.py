"""Least squares for the effects of the physical curve, over all measured fabrics at once."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import log
from typing import Final, NamedTuple

import numpy as np

from perfmodel.cost.learn.collectives._fabrics import Fabric
from perfmodel.cost.learn.collectives._link_constants import (
    BETWEEN,
    Effect,
    constants,
    effects,
    expected,
)
from perfmodel.cost.learn.collectives._physics import collective_time
from perfmodel.cost.learn.collectives._rows import CollectiveRows
from perfmodel.cost.learn.collectives.links import LinkConstants, TierConstants
from perfmodel.ingest.tables import groups_of

NOISE: Final = 0.25
"""Standard deviation of the log error of one placement, relative to which priors of effects are
weighted; fabrics of one class differ by this much."""
KNEE: Final = 0.15
"""Log error beyond which a point pulls no harder (soft L1): congested and misconfigured runs."""
DISPATCH: Final = (log(3e-6), 1.5)
"""Log of the dispatch cost [s] expected of a source, and its standard deviation."""
POINTS: Final = 10
"""Number of sizes per placement."""
STEP: Final = 1e-6
"""Step of forward differences."""
_LOG: Final = logging.getLogger(__name__)
_OF_TIER: Final = len(fields(TierConstants))
_CONSTANTS: Final = len(fields(LinkConstants)) - 2 + 2 * _OF_TIER
"""Numbers that the constants of a link consist of: those of both tiers, then the others."""


def physical_time(values: Mapping[Effect, float], rows: CollectiveRows) -> np.ndarray:
    """Time of every row's collective by the physical curve [s], without other traffic."""
    return _Placements(rows).time(values)


class _Link(NamedTuple):
    """The inputs, besides the effects, that determine the constants of a row."""

    kind: str
    fabric: Fabric
    ranks_per_node: float
    algorithm: str
    host_launches: bool
    between: bool

    @property
    def level(self) -> int:
        """Level of the fabric that the collective runs on."""
        return len(self.fabric.levels) - 1 if self.between else 0

    def effects(self) -> tuple[Effect, ...]:
        """Effects that the constants depend on."""
        return effects(self.kind, self.fabric.inside.link, self.fabric.levels[self.level].link)

    def constants(self, values: Mapping[Effect, float]) -> list[float]:
        """The constants as numbers: those of both tiers, then the others."""
        by_network = self.algorithm == "collnet"
        link = constants(
            values,
            self.kind,
            self.fabric,
            level=self.level,
            ranks_per_node=self.ranks_per_node,
            concurrent=1.0,
            in_network=by_network,
            spans_nodes=self.between,
            host_launches=self.host_launches,
        )
        inside, between, *others = vars(link).values()
        return [*vars(inside).values(), *vars(between).values(), *others]


def _link_constants(numbers: np.ndarray) -> LinkConstants:
    """Constants of links from their numbers, float64[constants, n], as `_Link.constants` lists
    them."""
    inside, between, others = np.split(numbers, [_OF_TIER, 2 * _OF_TIER])
    return LinkConstants(TierConstants(*inside), TierConstants(*between), *others)


class _Placements:
    """Rows with the distinct sets of constants that they need, so that a fit computes each set
    once."""

    def __init__(self, rows: CollectiveRows) -> None:
        self.rows = rows
        numbers: dict[_Link, int] = {}
        link_of_row = []
        columns = (
            rows.kind,
            rows.fabric,
            rows.ranks_per_node,
            rows.algorithm,
            rows.host_launches,
            rows.between,
        )
        for parts in zip(*columns, strict=True):
            link_of_row.append(numbers.setdefault(_Link(*parts), len(numbers)))
        self.links = list(numbers)
        self.link_of_row = np.array(link_of_row, dtype=np.int64)
        self.by_kind = groups_of(rows.kind, rows.algorithm)

    def table(self, values: Mapping[Effect, float]) -> np.ndarray:
        """Constants of every set, float64[k, fields]."""
        return np.array([link.constants(values) for link in self.links]).reshape(-1, _CONSTANTS)

    def time(self, values: Mapping[Effect, float]) -> np.ndarray:
        """Seconds of every row."""
        return self.of_table(self.table(values))

    def of_table(self, table: np.ndarray) -> np.ndarray:
        """Seconds of every row by constants of every set, float64[k, fields]."""
        rows = self.rows
        time_s = np.zeros(len(rows))
        for (kind, algorithm), index in self.by_kind:
            time_s[index] = collective_time(
                kind,
                rows.buffer_bytes[index],
                rows.ranks[index],
                rows.ranks_per_node[index],
                _link_constants(table[self.link_of_row[index]].T),
                algorithm,
            )
        return time_s

    def derivative(self, values: Mapping[Effect, float], names: Sequence[Effect]) -> np.ndarray:
        """Derivative of every row's seconds with respect to every effect, float64[n, names]: the
        derivative of the curve by its constants (forward differences) times that of the constants
        by the few effects of each set."""
        table = self.table(values)
        time_s = self.of_table(table)

        # By the constants: all sets move at once, as no row depends on two of them.
        by_field = np.zeros((_CONSTANTS, len(self.rows)))
        steps = np.maximum(np.abs(table), 1e-12) * STEP
        for field in range(_CONSTANTS):
            shifted = table.copy()
            shifted[:, field] += steps[:, field]
            by_field[field] = (self.of_table(shifted) - time_s) / steps[self.link_of_row, field]

        # By the effects that a set has, through its constants.
        result = np.zeros((len(self.rows), len(names)))
        column = {name: i for i, name in enumerate(names)}
        for number, link in enumerate(self.links):
            rows = np.flatnonzero(self.link_of_row == number)
            for name in link.effects():
                if name not in column:
                    continue
                moved_values = {**values, name: values[name] + STEP}
                change = (np.array(link.constants(moved_values)) - table[number]) / STEP
                result[rows, column[name]] = change @ by_field[:, rows]
        return result


def fit_between(rows: CollectiveRows, known: Mapping[Effect, float]) -> dict[Effect, float]:
    """Effects fitted to rows over several nodes only; effects inside a node are `known`."""
    inside_effects = {
        effect: value for effect, value in known.items() if effect.part not in BETWEEN
    }
    return fit_physics(rows.take(rows.between), known, inside_effects)


def fit_physics(
    rows: CollectiveRows,
    start: Mapping[Effect, float] | None = None,
    fixed: Mapping[Effect, float] | None = None,
) -> dict[Effect, float]:
    """Effects of the physical curve by maximum a posteriori, robust to congested and misconfigured
    runs.

    Every placement of every series counts alike. Tables timed from the host have a dispatch cost of
    their source, which is fitted beside and left out of predictions. `start`: effects to begin the
    search at; `fixed`: effects that stay as they are.
    """
    from scipy.optimize import least_squares

    thin, weight = _thinned(rows)
    fixed = fixed or {}
    names = [name for name in _names(thin) if name not in fixed]

    # One vector: effects, then a dispatch cost for each source. The search moves in units of their
    # standard deviations from what is expected, so that the prior is the identity.
    sources, source_of_row = np.unique(thin.of_series("source").astype(str), return_inverse=True)
    n_effects = len(names)
    middle, deviation = np.array([expected(name) for name in names] + [DISPATCH] * len(sources)).T
    places = _Placements(thin)
    observed = np.log(thin.time_s)

    def at(move: np.ndarray) -> tuple[dict[Effect, float], np.ndarray]:
        """Effects, and every row's dispatch cost [s]."""
        vector = middle + deviation * move
        values = dict(zip(names, vector[:n_effects].tolist(), strict=True))
        dispatch_s = np.exp(vector[n_effects:])
        return {**fixed, **values}, dispatch_s[source_of_row]

    def residual(move: np.ndarray) -> np.ndarray:
        values, dispatch_s = at(move)
        error = np.log(places.time(values) + dispatch_s) - observed
        return np.concatenate([weight * _robust(error) / NOISE, move])

    def jacobian(move: np.ndarray) -> np.ndarray:
        values, dispatch_s = at(move)
        total_s = places.time(values) + dispatch_s
        error = np.log(total_s) - observed
        by_effect = places.derivative(values, names)
        by_dispatch = np.eye(len(sources))[source_of_row] * dispatch_s[:, None]
        derivative = np.concatenate([by_effect, by_dispatch], axis=1) * deviation
        row_derivatives = (weight * _robust_slope(error) / total_s / NOISE)[:, None] * derivative
        return np.concatenate([row_derivatives, np.eye(len(middle))])

    begin = middle.copy()
    for number, name in enumerate(names):
        if start is not None and name in start:
            begin[number] = start[name]
    first_move = (begin - middle) / deviation
    solution = least_squares(
        residual,
        first_move,
        jac=jacobian,  # pyright: ignore[reportArgumentType]
        method="trf",
        max_nfev=25,
        ftol=1e-4,
    )
    vector = middle + deviation * solution.x
    _LOG.info(
        "%d effects of %d placements' points, cost %.1f", len(middle), len(thin), solution.cost
    )
    fitted = {
        name: round(float(value), 4) for name, value in zip(names, vector[:n_effects], strict=True)
    }
    return {**fixed, **fitted}


def _robust(error: np.ndarray) -> np.ndarray:
    """Residual whose square is the soft L1 of a log error: quadratic up to the knee, linear
    beyond."""
    root = np.sqrt(1 + (error / KNEE) ** 2)
    return np.sign(error) * KNEE * np.sqrt(2 * (root - 1))


def _robust_slope(error: np.ndarray) -> np.ndarray:
    """Derivative of `_robust` with respect to the error; 1 at 0."""
    root = np.sqrt(1 + (error / KNEE) ** 2)
    slope = np.abs(error) / (root * KNEE * np.sqrt(2 * (root - 1)) + 1e-12)
    return np.where(np.abs(error) < 1e-6, 1.0, slope)


def _names(rows: CollectiveRows) -> list[Effect]:
    """All effects that the rows depend on, sorted."""
    names: dict[Effect, None] = {}
    for kind, fabric, outside in set(zip(rows.kind, rows.fabric, rows.between, strict=True)):
        for name in effects(kind, fabric.inside.link, fabric.levels[-1].link):
            if outside or name.part not in BETWEEN:
                names[name] = None
    return sorted(names, key=str)


def _thinned(rows: CollectiveRows) -> tuple[CollectiveRows, np.ndarray]:
    """`POINTS` rows of median time per series and placement, even in the logarithm of the size, and
    their weights."""
    keep, weight = [], []
    for _, index in groups_of(rows.series, rows.ranks, rows.ranks_per_node):
        size = np.log2(rows.buffer_bytes[index])
        edges = np.linspace(size.min(), size.max() + 1e-9, POINTS + 1)
        cell = np.searchsorted(edges, size, side="right")
        chosen = []
        for number in np.unique(cell):
            part = index[cell == number]
            # by time per byte, as sizes differ within a cell
            ordered = part[np.argsort(rows.time_s[part] / rows.buffer_bytes[part], kind="stable")]
            chosen.append(ordered[len(ordered) // 2])
        keep += chosen
        weight += [(1 / len(chosen)) ** 0.5] * len(chosen)
    return rows.take(np.array(keep)), np.array(weight)
