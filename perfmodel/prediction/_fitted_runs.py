"""A site's own runs beside the parameters that were fitted to them: what both say of its other layouts.

Runs and predictions are seen by what moves them: their slopes by the parameters, whose prior covariance is the factors'
and the tables', and their coordinates, by which layouts near one another are alike. The update is that of all runs of
a site (`known_runs`); the parameters are its mean, so that nothing is counted twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._known_runs import Coordinates, CovarianceTerms, KnownRuns, LayoutKernel, known_runs, scales

Rows = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, kw_only=True)
class FittedRuns:
    """Runs of one site, then what their traces add, as normal errors about the centre of the parameters' prior."""

    at: tuple[Coordinates, ...]
    """Of the runs."""
    slopes: Rows = field(hash=False)
    """Derivatives of the log time of every observation by the parameters."""
    error: tuple[float, ...]
    """Log of measured over predicted time of every observation."""
    weight: tuple[float, ...]
    """Of every observation."""
    covariance: Rows
    """Of the parameters, before the runs."""
    likeness: LayoutKernel
    noise: float
    """Standard deviation of the noise of one run at the typical site."""
    scatter: tuple[float, float]
    doubt: float
    held: float
    """These three as in `SitePrior`, `held` as `held_given`."""

    @cached_property
    def known(self) -> KnownRuns:
        """What the runs say."""
        own = self._slopes, self._points
        noise = self.noise**2 / np.array(self.weight)
        noise[: len(self.at)] *= self.doubt
        nodes = scales(self.scatter)
        if len(set(self.at)) > 1:  # one layout agrees with no other
            nodes = nodes.with_overall_factor()
        return known_runs(self._parts(*own, *own), noise, np.array(self.error), nodes)

    @cached_property
    def values(self) -> Float[np.ndarray, " parameters"]:
        """Expected parameters, less the centre of their prior."""
        return self._prior @ self._slopes.T @ (self.known.scales.weight @ self.known.pull)

    @cached_property
    def posterior(self) -> Float[np.ndarray, "parameters parameters"]:
        """Covariance of the parameters."""
        none, none_with_runs = np.zeros_like(self._prior), np.zeros_like(self._slopes)
        with_runs = CovarianceTerms(self._slopes @ self._prior, none_with_runs, none_with_runs)
        of_nodes = self.known.covariance(CovarianceTerms(self._prior, none, none), with_runs)
        return np.tensordot(self.known.scales.weight, of_nodes, 1)

    @cached_property
    def overall(self) -> float:
        """Expected log of the factor that moves all runs of the site alike, beside its parameters."""
        nodes = self.known.scales
        return float(nodes.weight @ (nodes.overall * self.known.pull.sum(axis=1)))

    @cached_property
    def noise_variance(self) -> Float[np.ndarray, " nodes"]:
        """Of one run of this site, at every node."""
        return self.known.scales.own * self.noise**2

    def mean(self, where: Float[np.ndarray, "layouts coordinates"]) -> Float[np.ndarray, " layouts"]:
        """Expected log offsets of layouts beyond the parameters."""
        shared, alone = self._pulls
        near = self.likeness.shared(where, self._points) @ shared
        same = self.likeness.alone(where, self._points) @ alone
        return self.overall + near + same

    def joint(
        self,
        slopes: Float[np.ndarray, "layouts parameters"],
        where: Float[np.ndarray, "layouts coordinates"],
        beyond: Float[np.ndarray, "layouts sources"],
    ) -> Float[np.ndarray, "nodes layouts layouts"]:
        """Covariance of the log step times of layouts given the runs, without the noise of one run.

        Args:
            slopes: derivatives of the log step times by the parameters.
            beyond: standard deviations from events that are less certain than those of the runs, by source.
        """
        prior = self._parts(slopes, where, slopes, where)
        prior = replace(prior, within=prior.within + beyond @ beyond.T)
        return self.known.covariance(prior, self._parts(self._slopes, self._points, slopes, where))

    def _parts(
        self,
        slopes: Float[np.ndarray, "n parameters"],
        at: Float[np.ndarray, "runs coordinates"],
        others: Float[np.ndarray, "m parameters"],
        where: Float[np.ndarray, "layouts coordinates"],
    ) -> CovarianceTerms:
        """Of observations with others; what traces add to runs is alike by the parameters and the overall factor."""
        shared, alone = np.zeros((2, len(slopes), len(others)))
        shared[: len(at), : len(where)] = self.likeness.shared(at, where)
        alone[: len(at), : len(where)] = self.likeness.alone(at, where)
        return CovarianceTerms(slopes @ self._prior @ others.T, shared, alone, overall=1.0)

    @cached_property
    def _points(self) -> Float[np.ndarray, "runs coordinates"]:
        return np.array(self.at)

    @cached_property
    def _slopes(self) -> Float[np.ndarray, "observations parameters"]:
        return np.array(self.slopes).reshape(len(self.error), len(self.covariance))

    @cached_property
    def _prior(self) -> Float[np.ndarray, "parameters parameters"]:
        return np.array(self.covariance).reshape(len(self.covariance), len(self.covariance))

    @cached_property
    def _pulls(self) -> tuple[Float[np.ndarray, " runs"], Float[np.ndarray, " runs"]]:
        """By what the two parts of the likeness with every run are multiplied."""
        of = self.known.scales
        pull = of.weight[:, None] * self.known.pull[:, : len(self.at)]
        return of.within @ pull, of.own @ pull

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {one.name: getattr(self, one.name) for one in fields(self)} | {"likeness": vars(self.likeness)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "FittedRuns":
        """Inverse of `to_dict`."""
        first, second = map(float, value["scatter"])
        return cls(
            at=_rows(value["at"]),
            slopes=_rows(value["slopes"]),
            error=tuple(map(float, value["error"])),
            weight=tuple(map(float, value["weight"])),
            covariance=_rows(value["covariance"]),
            likeness=LayoutKernel(**{name: float(one) for name, one in value["likeness"].items()}),
            noise=float(value["noise"]),
            scatter=(first, second),
            doubt=float(value["doubt"]),
            held=float(value["held"]),
        )


def _rows(values: Sequence[Sequence[float]]) -> Rows:
    return tuple(tuple(map(float, row)) for row in values)
