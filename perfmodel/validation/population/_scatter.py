"""Likelihood of left-out runs' errors, if each source scatters by unknown scales of its own."""

from typing import Any, NamedTuple

import numpy as np

from perfmodel.prediction.sites.known_runs import standard_nodes


class OwnParts(NamedTuple):
    """Covariances [runs, runs] specific to a source, without noise.

    They are apart because a source scatters by two scales (`Scales` of
    `perfmodel.prediction.sites.known_runs`), of which each multiplies one part.
    """

    level: Any
    """Part from factors of the source and the site, which no scale of a site multiplies."""
    left_open: Any
    """Part from what each run leaves open, which no scale of a site multiplies."""
    within: Any
    """Part from settings, events and layouts near one another: multiplied by the scale within the
    source."""
    repeats: Any
    """Part from repeats of one layout: multiplied by the scale of a run's own."""

    @property
    def fixed(self) -> Any:
        """Covariance that no scale of a site multiplies."""
        return self.level + self.left_open

    @property
    def scatter(self) -> Any:
        """Covariance of differences between runs of a source: all parts except the level."""
        return self.left_open + self.within + self.repeats

    def scaled(self, level_scale: Any, scale: Any, noise: Any) -> Any:
        """Covariance with noise, by the scales of each run's source.

        Args:
            level_scale, scale: scales of level and scatter [runs].
            noise: variance of each run's noise, of which `scale` takes part [runs].
        """
        xp = self.level.__array_namespace__()
        return (
            self.level * level_scale[:, None]
            + self.scatter * scale[:, None]
            + xp.diag(noise * scale)
        )


class LeftOut(NamedTuple):
    """Each run's prediction without its fold."""

    residual: Any
    """log(measured / predicted) [runs] beyond the posterior mean given the other folds."""
    shared: Any
    """Posterior covariance [runs, runs] of the part that runs share with other sources; 0 between
    folds."""
    own_parts: OwnParts
    """Covariances of the part that is specific to each source."""
    noise: Any
    """Independent variance of each run."""


class ScatteredErrors(NamedTuple):
    """Errors of left-out runs, and their covariance for each pair of a source's scales."""

    residual: Any
    """log(measured / predicted) [runs] beyond what other sources say of it."""
    fixed: Any
    """Covariance [runs, runs] that no scale multiplies."""
    within: Any
    """Covariance that the first scale multiplies: what layouts near one another share."""
    repeats: Any
    """Covariance that the second scale multiplies: what repeats of a layout share."""
    noise: Any
    """Variance of each run, which the second scale multiplies."""
    scales: tuple[Any, Any]
    """Nodes of a quadrature over the two scales [nodes]."""
    log_weight: Any
    """Logarithm of each node's weight [nodes, 1]."""

    def score_unseen(self, index: Any, there: Any) -> Any:
        """Mean log score of a source's runs when none is known.

        Args:
            index: the source's runs, padded [members].
            there: False for padding.
        """
        import jax.numpy as jnp
        from jax.scipy.special import logsumexp

        fixed = jnp.diag(self.fixed)[index]
        within = jnp.diag(self.within)[index]
        repeats = jnp.diag(self.repeats)[index]
        variance = (
            fixed
            + self.scales[0][:, None] * within
            + self.scales[1][:, None] * (repeats + self.noise)
        )

        # The density of a mixture: that of every node, weighted by how likely the node is.
        log = logsumexp(_log_normal(self.residual[index], variance) + self.log_weight, axis=0)
        return jnp.where(there, log, 0.0).sum() / there.sum()

    def score_given(self, index: Any, there: Any, enough: Any, drawn: Any) -> Any:
        """Mean log score of a source's other runs given the drawn ones.

        Args:
            index, there: as in `score_unseen`.
            enough: whether the source has more runs than are drawn; otherwise it scores 0.
            drawn: positions of the known runs among `index`.
        """
        import jax
        import jax.numpy as jnp
        from jax.scipy.special import logsumexp

        # The known runs themselves are not predicted, nor is padding.
        is_unknown = there.at[drawn].set(False)

        # The source's block of every part; every node multiplies the parts by its own scales.
        block = (index[:, None], index)
        fixed = self.fixed[block]
        within = self.within[block]
        repeats = self.repeats[block]
        noise = self.noise * jnp.eye(len(index))

        def condition(scale: Any, own_scale: Any) -> tuple[Any, Any]:
            """Log likelihoods of the known runs in sequence, and of the others given them."""
            covariance = fixed + scale * within + own_scale * (repeats + noise)
            covariance, remainder, log = _conditioned(
                covariance, self.residual[index], drawn, enough
            )
            # Known runs have no remaining error and are not predicted.
            variance = jnp.where(is_unknown, jnp.diag(covariance), 1.0)
            return log, _log_normal(remainder, variance)

        # Bayes' rule over the nodes: one under which the known runs are likely counts more
        # for the others.
        likely, log = jax.vmap(condition)(*self.scales)
        likely = likely[:, None] + self.log_weight
        log = logsumexp(log + likely, axis=0) - logsumexp(likely)

        # A source with too few runs scores 0.
        log = jnp.where(is_unknown, log, 0.0)
        return jnp.where(enough, log.sum() / jnp.maximum(is_unknown.sum(), 1), 0.0)


def scattered_errors(left_out: LeftOut, deviations: Any) -> ScatteredErrors:
    """Errors of left-out runs under a quadrature over the two log-normal scales of a source.

    Args:
        deviations: standard deviations of the logarithms of the square roots of both scales.
    """
    import jax.numpy as jnp

    nodes = standard_nodes()
    own_parts = left_out.own_parts
    return ScatteredErrors(
        residual=left_out.residual,
        fixed=left_out.shared + own_parts.fixed,
        within=own_parts.within,
        repeats=own_parts.repeats,
        noise=left_out.noise,
        scales=(
            jnp.exp(2 * deviations[0] * nodes.within),
            jnp.exp(2 * deviations[1] * nodes.single),
        ),
        log_weight=np.log(nodes.weight)[:, None],
    )


def _conditioned(covariance: Any, errors: Any, known: Any, enough: Any) -> tuple[Any, Any, Any]:
    """Covariance and errors of a source's runs, given known ones, and their log likelihood.

    One known run after another is conditioned on: steps of Gaussian elimination.
    """
    import jax
    import jax.numpy as jnp

    def given(state: tuple[Any, Any, Any], run: Any) -> tuple[tuple[Any, Any, Any], None]:
        covariance, remainder, log = state
        with_run = covariance[:, run]
        # A source with too few runs has none to divide by; its score is not counted.
        variance = jnp.where(enough, with_run[run], 1.0)
        log = log + _log_normal(remainder[run], variance)
        gain = with_run / variance
        return (covariance - gain[:, None] * with_run, remainder - gain * remainder[run], log), None

    state, _ = jax.lax.scan(given, (covariance, errors, jnp.zeros(())), known)
    return state


def _log_normal(error: Any, variance: Any) -> Any:
    import jax.numpy as jnp

    return -0.5 * (error**2 / variance + jnp.log(2 * jnp.pi * variance))
