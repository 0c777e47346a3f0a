"""Closed forms of collectives against step-by-step schedules, NumPy against JAX, gradients three ways."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel.errors import UnknownNameError
from perfmodel.learn import TERMS, LinkConstants, alpha_beta_time, collective_curve, distsim_all_reduce_time

ALPHA_S, BANDWIDTH, GAMMA = 3e-6, 20e9, 1e-12
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")


def _walk(step_bytes: list[float], added: list[float]) -> float:
    """Time of messages in sequence, each followed by adding up some bytes."""
    return sum(ALPHA_S + size / BANDWIDTH for size in step_bytes) + GAMMA * sum(added)


def _ring_all_reduce(size: float, n: int) -> float:
    chunk = size / n
    return _walk([chunk] * (2 * (n - 1)), [chunk] * (n - 1))


def _rabenseifner(size: float, n: int) -> float:
    halves = [size / 2 ** (i + 1) for i in range(int(np.log2(n)))]
    return _walk(halves + halves[::-1], halves)


def _recursive_doubling(size: float, n: int) -> float:
    rounds = int(np.log2(n))
    return _walk([size] * rounds, [size] * rounds)


def _halving(size: float, n: int) -> float:
    halves = [size / 2 ** (i + 1) for i in range(int(np.log2(n)))]
    return _walk(halves, halves)


def _bruck(size: float, n: int) -> float:
    return _walk([size / 2] * int(np.log2(n)), [])


SCHEDULES = {
    ("all_reduce", "ring"): _ring_all_reduce,
    ("all_reduce", "rabenseifner"): _rabenseifner,
    ("all_reduce", "recursive_doubling"): _recursive_doubling,
    ("all_gather", "ring"): lambda s, n: _walk([s / n] * (n - 1), []),
    ("all_gather", "recursive_doubling"): lambda s, n: _walk([s / 2**i for i in range(1, int(np.log2(n)) + 1)], []),
    ("reduce_scatter", "ring"): lambda s, n: _walk([s / n] * (n - 1), [s / n] * (n - 1)),
    ("reduce_scatter", "recursive_halving"): _halving,
    ("all_to_all", "pairwise"): lambda s, n: _walk([s / n] * (n - 1), []),
    ("all_to_all", "bruck"): _bruck,
    ("send_recv", "direct"): lambda s, n: _walk([s], []),
    ("broadcast", "binomial"): lambda s, n: _walk([s] * int(np.log2(n)), []),
}  # fmt: skip


@pytest.mark.parametrize("key", SCHEDULES, ids="/".join)
@given(log_n=st.integers(1, 8), size=st.floats(1.0, 1e10))
@settings(max_examples=20, deadline=None)
def test_closed_form_equals_the_schedule_walked_step_by_step(key, log_n, size):
    n = 2**log_n
    closed = alpha_beta_time(*key, size, n, ALPHA_S, BANDWIDTH, GAMMA)
    np.testing.assert_allclose(closed, SCHEDULES[key](size, n), rtol=1e-12)


@pytest.mark.parametrize("key", TERMS, ids="/".join)
def test_one_rank_takes_no_time(key):
    assert alpha_beta_time(*key, 1e9, 1, ALPHA_S, BANDWIDTH, GAMMA) == pytest.approx(0.0, abs=1e-15)


def test_bandwidth_optimal_algorithms_send_no_less_than_the_lower_bound():
    """Chan et al. 2007, table 2: (n - 1) / n of the buffer, twice that for all-reduce."""
    for (kind, _), terms in TERMS.items():
        for n in (2, 3, 8, 64):
            bound = (2 if kind == "all_reduce" else 1) * (n - 1) / n
            if kind in ("all_reduce", "all_gather", "reduce_scatter") and (kind, _) != ("all_reduce", "in_switch"):
                assert terms.volume(n) >= bound - 1e-12


def test_distsim_extrapolation_is_the_bandwidth_part_of_the_ring():
    """DistSim section 4.2: exact where latency is nothing, and constant for many devices."""
    measured_8 = alpha_beta_time("all_reduce", "ring", 1e9, 8, 0.0, BANDWIDTH)
    for n in (8, 9, 16, 1024):
        expected = alpha_beta_time("all_reduce", "ring", 1e9, n, 0.0, BANDWIDTH)
        np.testing.assert_allclose(distsim_all_reduce_time(measured_8, n), expected, rtol=1e-12)


def test_unknown_algorithm_is_named_with_a_suggestion():
    with pytest.raises(UnknownNameError, match="all_reduce/ring"):
        alpha_beta_time("all_reduce", "rign", 1e6, 8, ALPHA_S, BANDWIDTH)


def _constants(xp=np):
    values = (5e-6, 1e-6, 6e-6, 200e9, 20e9, 0.4, 3.0, 0.1)
    return LinkConstants(*(xp.asarray(v) for v in values))


@pytest.mark.parametrize("kind", KINDS)
def test_curve_is_the_same_in_numpy_and_jax(kind):
    size, ranks = np.geomspace(1e2, 1e10, 9), np.array([2, 3, 4, 8, 16, 64, 512, 1024, 8192.0])
    per_node = np.minimum(ranks, 8)
    with jax.enable_x64(True):
        ours = collective_curve(kind, jnp.asarray(size), jnp.asarray(ranks), jnp.asarray(per_node), _constants(jnp))
    np.testing.assert_allclose(
        np.asarray(ours), collective_curve(kind, size, ranks, per_node, _constants()), rtol=1e-12
    )  # fmt: skip


@functools.lru_cache
def _log_time(kind):
    """log time over [log bytes, log constants..., exponent], its gradients both ways; compiled once."""

    def log_time(vector, ranks, per_node):
        size, *rest = vector
        constants = LinkConstants(*(jnp.exp(v) for v in rest[:-1]), rest[-1])
        return jnp.log(collective_curve(kind, jnp.exp(size), ranks, per_node, constants))

    return jax.jit(log_time), jax.jit(jax.grad(log_time)), jax.jit(jax.jacfwd(log_time))


@pytest.mark.parametrize("kind", KINDS)
@given(
    log_size=st.floats(6, 23),
    ranks=st.sampled_from([2.0, 5.0, 8.0, 16.0, 64.0, 4096.0]),
    per_node=st.sampled_from([1.0, 4.0, 8.0]),
)
@settings(max_examples=12, deadline=None)
def test_gradients_forward_reverse_and_by_finite_differences_agree(kind, log_size, ranks, per_node):
    per_node = min(per_node, ranks)
    with jax.enable_x64(True):
        value, reverse, forward = _log_time(kind)
        point = np.array([log_size, *np.log([5e-6, 1e-6, 6e-6, 200e9, 20e9, 0.4, 2.9]), 0.1])
        step = 1e-5 * np.eye(len(point))
        finite = [(value(point + e, ranks, per_node) - value(point - e, ranks, per_node)) / 2e-5 for e in step]
        backward = np.asarray(reverse(point, ranks, per_node))
        np.testing.assert_allclose(backward, forward(point, ranks, per_node), rtol=1e-9, atol=1e-12)
        np.testing.assert_allclose(backward, finite, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_textbook_forms_are_differentiable_in_every_real_argument(kind):
    algorithm = next(a for k, a in TERMS if k == kind)

    def time(arguments):
        size, alpha, bandwidth = arguments
        return alpha_beta_time(kind, algorithm, size, 8.0, alpha, bandwidth)

    with jax.enable_x64(True):
        gradient = jax.grad(time)(jnp.array([1e8, 2e-6, 1e11]))
    terms = TERMS[kind, algorithm]
    steps, volume = float(terms.steps(8.0)), float(terms.volume(8.0))
    np.testing.assert_allclose(gradient, [volume / 1e11, steps, -volume * 1e8 / 1e22], rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_curve_grows_with_size_and_latency_and_falls_with_bandwidth(kind):
    size = np.geomspace(1e3, 1e10, 200)
    times = collective_curve(kind, size, 64.0, 8.0, _constants())
    assert np.all(np.diff(times) > -0.02 * times[1:])  # the smooth minimum may dip by a hair
    c = _constants()
    slower = dataclasses.replace(
        c,
        hop_intra_s=2 * c.hop_intra_s,
        hop_inter_s=2 * c.hop_inter_s,
        bandwidth_intra=c.bandwidth_intra / 2,
        bandwidth_inter=c.bandwidth_inter / 2,
    )
    assert np.all(collective_curve(kind, size, 64.0, 8.0, slower) > times)


def test_large_messages_reach_the_bandwidth_of_the_slower_tier():
    c = _constants()
    inside = collective_curve("all_reduce", 1e11, 8.0, 8.0, c)
    between = collective_curve("all_gather", 1e11, 64.0, 8.0, c)
    assert 2 * 7 / 8 * 1e11 / inside == pytest.approx(200e9, rel=0.05)
    assert 63 / 64 * 1e11 / between == pytest.approx(8 * 20e9, rel=0.35)
    assert 63 / 64 * 1e11 / between < 8 * 20e9 * 1.01
