"""Runs of a site with the parameters fitted to them, and the posterior for its other layouts.

Runs and predictions are related in two ways: by their slopes, the derivatives of log time by the
parameters, whose prior covariance comes from factors and tables; and by their coordinates, because
similar layouts have similar errors. The update is that of all runs of a site (`known_runs`); the
parameters are its mean, so that nothing is counted twice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import numpy as np
from jaxtyping import Float

from perfmodel.prediction.sites.known_runs import (
    Coordinates,
    CovarianceTerms,
    KnownRuns,
    LayoutKernel,
    known_runs,
    scales,
)

Rows = tuple[tuple[float, ...], ...]
"""A matrix that can be hashed and stored."""


@dataclass(frozen=True, kw_only=True)
class FittedRuns:
    """Runs of one site, and their traces, as normal errors around the centre of the parameters'
    prior."""

    at: tuple[Coordinates, ...]
    """Coordinates of the runs."""
    slopes: Rows = field(hash=False)
    """Derivatives of the log time of every observation with respect to the parameters."""
    error: tuple[float, ...]
    """Log of measured over predicted time of every observation."""
    weight: tuple[float, ...]
    """Weight of every observation: the variance of its noise is that of one run divided by the
    weight."""
    covariance: Rows
    """Covariance of the parameters, before the runs."""
    layout_kernel: LayoutKernel
    """Covariance of layouts beyond the factors, as in `SitePrior.layout_kernel`."""
    noise: float
    """Standard deviation of the noise of one run at the typical site."""
    scatter: tuple[float, float]
    """How much sites differ in the two scales of `Scales`, as in `SitePrior.scatter`."""
    noise_inflation: float
    """Factor on the noise variance of known runs, as in `SitePrior.noise_inflation`."""
    coverage_factor: float
    """Factor on half-widths once runs are known, as in `SitePrior.coverage_factor`."""

    @cached_property
    def known(self) -> KnownRuns:
        """Posterior of the site given the runs."""
        # Whole runs come first, with inflated noise; then what their traces add.
        noise = self.noise**2 / np.array(self.weight)
        noise[: len(self.at)] *= self.noise_inflation

        # One factor on all runs shows only where several layouts agree on it.
        nodes = scales(self.scatter)
        if len(set(self.at)) > 1:
            nodes = nodes.with_overall_factor()
        prior = self._covariance_terms(self._slopes, self._points, self._slopes, self._points)
        return known_runs(prior, noise, np.array(self.error), nodes)

    @cached_property
    def values(self) -> Float[np.ndarray, " parameters"]:
        """Expected parameters, less the centre of their prior."""
        return self._prior @ self._slopes.T @ (self.known.scales.weight @ self.known.pull)

    @cached_property
    def posterior(self) -> Float[np.ndarray, "parameters parameters"]:
        """Covariance of the parameters, given the runs."""
        no_terms = np.zeros_like(self._prior)
        none_with_runs = np.zeros_like(self._slopes)
        with_runs = CovarianceTerms(self._slopes @ self._prior, none_with_runs, none_with_runs)
        covariance_of_nodes = self.known.covariance(
            CovarianceTerms(self._prior, no_terms, no_terms), with_runs
        )
        return np.tensordot(self.known.scales.weight, covariance_of_nodes, 1)

    @cached_property
    def overall(self) -> float:
        """Expected log of the overall factor on all runs of the site."""
        nodes = self.known.scales
        return float(nodes.weight @ (nodes.overall * self.known.pull.sum(axis=1)))

    @cached_property
    def noise_variance(self) -> Float[np.ndarray, " nodes"]:
        """Variance of the noise of one run of this site, at every node."""
        return self.known.scales.single * self.noise**2

    def mean(
        self, points: Float[np.ndarray, "layouts coordinates"]
    ) -> Float[np.ndarray, " layouts"]:
        """Expected log offsets of layouts beyond the parameters.

        Args:
            points: coordinates of the layouts.
        """
        shared_pull, alone_pull = self._pulls
        shared_mean = self.layout_kernel.shared(points, self._points) @ shared_pull
        alone_mean = self.layout_kernel.alone(points, self._points) @ alone_pull
        return self.overall + shared_mean + alone_mean

    def joint(
        self,
        slopes: Float[np.ndarray, "layouts parameters"],
        points: Float[np.ndarray, "layouts coordinates"],
        beyond: Float[np.ndarray, "layouts sources"],
    ) -> Float[np.ndarray, "nodes layouts layouts"]:
        """Covariance of the log step times of layouts given the runs, without the noise of one run.

        Args:
            slopes: derivatives of the log step times with respect to the parameters.
            points: coordinates of the layouts.
            beyond: standard deviations from events that are less certain than those of the runs, by
                source.
        """
        prior = self._covariance_terms(slopes, points, slopes, points)
        prior = replace(prior, within=prior.within + beyond @ beyond.T)
        return self.known.covariance(
            prior, self._covariance_terms(self._slopes, self._points, slopes, points)
        )

    def _covariance_terms(
        self,
        slopes: Float[np.ndarray, "n parameters"],
        points: Float[np.ndarray, "runs coordinates"],
        other_slopes: Float[np.ndarray, "m parameters"],
        other_points: Float[np.ndarray, "layouts coordinates"],
    ) -> CovarianceTerms:
        """Covariances of observations with others."""
        # Observations from traces have slopes but no coordinates: only the parameters and the
        # overall factor relate them to layouts.
        shared, alone = np.zeros((2, len(slopes), len(other_slopes)))
        shared[: len(points), : len(other_points)] = self.layout_kernel.shared(points, other_points)
        alone[: len(points), : len(other_points)] = self.layout_kernel.alone(points, other_points)
        return CovarianceTerms(slopes @ self._prior @ other_slopes.T, shared, alone, overall=1.0)

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
        """Factors of both terms of the layout kernel with every run, from which shifts are
        computed."""
        nodes = self.known.scales
        pull = nodes.weight[:, None] * self.known.pull[:, : len(self.at)]
        return nodes.within @ pull, nodes.single @ pull

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return values | {"layout_kernel": vars(self.layout_kernel)}

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> "FittedRuns":
        """Read what `to_dict` returns."""
        first, second = map(float, value["scatter"])
        return cls(
            at=_rows(value["at"]),
            slopes=_rows(value["slopes"]),
            error=tuple(map(float, value["error"])),
            weight=tuple(map(float, value["weight"])),
            covariance=_rows(value["covariance"]),
            layout_kernel=LayoutKernel(
                **{name: float(number) for name, number in value["layout_kernel"].items()}
            ),
            noise=float(value["noise"]),
            scatter=(first, second),
            noise_inflation=float(value["noise_inflation"]),
            coverage_factor=float(value["coverage_factor"]),
        )


def _rows(values: Sequence[Sequence[float]]) -> Rows:
    return tuple(tuple(map(float, row)) for row in values)
