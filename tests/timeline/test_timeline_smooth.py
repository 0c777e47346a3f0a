"""Smooth makespans and jittered gradients."""

from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from timeline_cases import distinct_durations, pipeline_1f1b, structures

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.timeline import attribution, compile_structure, makespan, makespan_and_grad, smooth_makespan
from perfmodel.timeline._precision import double_precision

PIPELINE = pipeline_1f1b(4, 8)
ABOVE = {"logsumexp": np.log(2), "sqrt": 0.5}
"""What one maximum adds at most, in units of the smoothing."""


@settings(max_examples=25)
@given(structures(), st.integers(0, 99), st.sampled_from(["logsumexp", "sqrt"]), st.sampled_from([1.0, 0.1, 1e-3]))
def test_bounds(structure, seed, kind, smoothing_s):
    compiled, durations = compile_structure(structure), distinct_durations(structure, seed)
    hard = makespan(compiled, durations)
    with double_precision():
        smooth = float(smooth_makespan(compiled, jnp.asarray(durations), smoothing_s, kind))
    assert hard * (1 - 1e-12) <= smooth <= hard + structure.n_ops * ABOVE[kind] * smoothing_s + 1e-9


@pytest.mark.parametrize("kind", ["logsumexp", "sqrt"])
def test_converges_to_the_makespan_and_its_gradient(kind):
    compiled, durations = compile_structure(PIPELINE), distinct_durations(PIPELINE)
    span, gradient = makespan_and_grad(compiled, durations)
    with double_precision():
        at = jnp.asarray(durations)
        gaps = [float(smooth_makespan(compiled, at, s, kind)) - span for s in (1e-1, 1e-2, 1e-3, 1e-4)]
        smooth = jax.grad(lambda d: smooth_makespan(compiled, d, 1e-6, kind))(at)
    assert all(near < far for far, near in pairwise(gaps))
    assert gaps[-1] < 1e-5 * span
    np.testing.assert_allclose(smooth, gradient, atol=1e-4)


@pytest.mark.parametrize("kind", ["logsumexp", "sqrt"])
def test_gradients_are_finite_and_agree_with_finite_differences(kind):
    """Also where everything ties, and for smoothings that are far below and above the times."""
    compiled = compile_structure(PIPELINE)
    tied = jnp.array([0, 1.0, 1.0, 0.0])
    for smoothing_s in (1e-12, 1e-6, 1.0, 1e6):
        gradient = jax.grad(lambda d, s=smoothing_s: smooth_makespan(compiled, d, s, kind))(tied)
        assert jnp.isfinite(gradient).all()
    with double_precision():
        at = jnp.asarray(distinct_durations(PIPELINE))
        function = jax.jit(lambda d: smooth_makespan(compiled, d, 0.2, kind))
        reverse, forward = jax.grad(function)(at), jax.jacfwd(function)(at)
        steps = 1e-6 * jnp.eye(len(at))[1:]
        numeric = [(function(at + e) - function(at - e)) / 2e-6 for e in steps]
        hessian = jax.hessian(function)(at)
    np.testing.assert_allclose(reverse, forward, rtol=1e-9)
    np.testing.assert_allclose(reverse[1:], numeric, rtol=1e-6)
    assert np.isfinite(hessian).all()
    assert np.abs(hessian).max() > 0


def test_bad_smoothing():
    compiled = compile_structure(PIPELINE)
    with pytest.raises(PerfModelError, match="smoothing_s must be above 0"):
        smooth_makespan(compiled, np.ones(4), 0.0)
    with pytest.raises(UnknownNameError, match="did you mean 'sqrt'"):
        smooth_makespan(compiled, np.ones(4), 0.1, "sqr")  # pyright: ignore[reportArgumentType]


def test_attribution_shares_ties_out():
    """Two equal branches: the hard gradient takes the first, noise takes each half of the time."""
    from timeline_cases import structure_of

    compiled = compile_structure(structure_of([(-1, -1), (-1, -1), (0, 1)], [1, 2, 3]))
    durations = np.array([0, 1.0, 1.0, 1.0])
    result = attribution(compiled, durations, jax.random.key(0), lanes=2000, sigma=0.01)
    assert result.criticality[0] == 0
    assert result.criticality[3] == 1
    np.testing.assert_allclose(result.criticality[1:3], 0.5, atol=0.05)
    # The larger of two normals of deviation 0.01 is 0.01 / sqrt(pi) above their mean.
    assert result.expected_makespan_s == pytest.approx(2 + 0.01 / np.sqrt(np.pi), abs=1e-3)
    assert result.makespan_std_s == pytest.approx(0.013, abs=2e-3)


def test_attribution_without_noise_is_the_gradient():
    compiled, durations = compile_structure(PIPELINE), distinct_durations(PIPELINE)
    span, gradient = makespan_and_grad(compiled, durations)
    result = attribution(compiled, durations, jax.random.key(1), sigma=0.0)
    np.testing.assert_array_equal(result.criticality, gradient)
    assert result.expected_makespan_s == pytest.approx(span, rel=1e-6)


def test_bad_attribution():
    compiled = compile_structure(PIPELINE)
    for wrong, message in (({"lanes": 0}, "at least 1 lane"), ({"sigma": -1.0}, "sigma must be")):
        with pytest.raises(PerfModelError, match=message):
            attribution(compiled, np.ones(4), jax.random.key(0), **wrong)
