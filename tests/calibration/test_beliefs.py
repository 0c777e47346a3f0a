"""Kriging of residuals against the dense formulas, and choices against trying out every
candidate."""

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.calibration import choose, most_uncertain, step_variance
from perfmodel.calibration.beliefs import (
    NOISE,
    SHORT_NOISE,
    Beliefs,
    condition,
    covariance,
    points_of,
)
from perfmodel.cost import roofline_seconds
from perfmodel.ops import Collective, Gemm, KernelOp, MemoryBound, Op

DEVICE = catalog.device("A100-SXM4-80GB")
RNG = np.random.default_rng(0)


def base(ops) -> np.ndarray:
    kernel = [op for op in ops if not isinstance(op, Collective)]
    times = iter(roofline_seconds(DEVICE, kernel).tolist() if kernel else ())
    return np.array(
        [1e-5 + op.bytes / 1e11 if isinstance(op, Collective) else next(times) for op in ops]
    )


GEMMS: list[KernelOp] = [
    Gemm(m=int(m), n=int(n), k=int(k), pass_=name)
    for m in (256, 1024, 4096)
    for n, k in ((512, 2048), (4096, 1024))
    for name in ("fwd", "dgrad")
]
STREAMS: list[KernelOp] = [
    MemoryBound(op="add", rows=rows, hidden=1024, n_inputs=2) for rows in (64, 512, 4096)
]
SENDS: list[Op] = [
    Collective(collective="send_recv", bytes=2.0**e, num_ranks=2, ranks_per_node=2)
    for e in (12, 16, 20, 24)
]
MIXED: list[Op] = [*GEMMS, *STREAMS, *SENDS]


def measured(ops) -> dict[Op, float]:
    return dict(zip(ops, base(ops) * np.exp(0.3 + 0.1 * np.sin(np.arange(len(ops)))), strict=True))


def test_posterior_is_that_of_the_dense_formulas():
    """Rasmussen and Williams, eqs. 2.23 and 2.24."""
    known, asked = GEMMS[::2], GEMMS[1::2]
    times = measured(known)
    beliefs = condition(base, DEVICE, times)
    group = beliefs.groups["gemm"]
    points = [points_of(ops, DEVICE, np.log(base(ops))) for ops in (known, asked)]
    k = lambda a, b: covariance(group.components, group.hyper, a, b)  # noqa: E731
    noise = np.exp(group.hyper.noise) + np.exp(group.hyper.noise_short) * points[0].unrest
    inverse = np.linalg.inv(k(points[0], points[0]) + np.diag(noise))
    near = k(points[1], points[0])
    residual = np.log(list(times.values())) - np.log(base(known))
    events = beliefs.locate(asked)
    np.testing.assert_allclose(
        beliefs.log_time(asked), np.log(base(asked)) + near @ inverse @ residual, rtol=1e-9
    )
    expected = k(points[1], points[1]) - near @ inverse @ near.T
    np.testing.assert_allclose(beliefs.covariance(events, events), expected, atol=1e-10)
    np.testing.assert_allclose(beliefs.variance(events), np.diag(expected), atol=1e-10)


def test_a_measured_event_has_its_time_and_little_doubt():
    beliefs = condition(base, DEVICE, measured(GEMMS[:4]))
    np.testing.assert_allclose(
        np.exp(beliefs.log_time(GEMMS[:4])), list(measured(GEMMS[:4]).values())
    )
    variance = beliefs.variance(beliefs.locate(MIXED))
    assert (variance[:4] <= np.exp(NOISE) + np.exp(SHORT_NOISE)).all()
    assert (variance[4 : len(GEMMS)] > 2 * np.exp(NOISE)).all()
    # other families were not measured and know nothing of it
    before = Beliefs(base, DEVICE)
    np.testing.assert_array_equal(
        variance[len(GEMMS) :], before.variance(before.locate(MIXED))[len(GEMMS) :]
    )


def test_many_measurements_fit_the_hyperparameters_and_predict_the_rest():
    rng = np.random.default_rng(1)
    ops = [Gemm(m=int(m), n=int(n), k=int(k)) for m, n, k in 2 ** rng.uniform(7, 13, (120, 3))]
    true_s = base(ops) * np.exp(
        0.4 - 0.05 * np.log2([op.m for op in ops]) + rng.normal(0, 0.02, len(ops))
    )
    beliefs = condition(base, DEVICE, dict(zip(ops[:80], true_s[:80], strict=True)))
    off = beliefs.log_time(ops[80:]) - np.log(true_s[80:])
    half = 1.645 * np.sqrt(beliefs.variance(beliefs.locate(ops[80:])))
    assert np.abs(off).mean() < 0.04
    assert (np.abs(off) <= half).mean() >= 0.8
    assert half.mean() < 0.12


def test_choice_is_what_trying_out_every_candidate_gives():
    beliefs = condition(base, DEVICE, measured(GEMMS[:2]))
    needed, pool = beliefs.locate(MIXED), beliefs.locate(MIXED[2:])
    shares = np.abs(np.random.default_rng(2).normal(size=(2, len(MIXED))))
    chosen = choose(beliefs, needed, shares, pool, 5)
    both = beliefs.covariance(needed, needed)
    assert step_variance(beliefs, needed, shares) == pytest.approx(
        np.diag(shares @ both @ shares.T)
    )
    slow: list[int] = []
    for _ in range(5):
        left = [i for i in range(2, len(MIXED)) if i not in slow]

        def after(i: int, both: np.ndarray = both) -> np.ndarray:
            return both - np.outer(both[:, i], both[:, i]) / (both[i, i] + np.exp(NOISE))

        slow.append(min(left, key=lambda i: float(np.trace(shares @ after(i) @ shares.T))))
        both = after(slow[-1])
    assert [i + 2 for i in chosen] == slow


def test_what_no_step_depends_on_is_never_chosen():
    beliefs = Beliefs(base, DEVICE)
    needed, pool = beliefs.locate(GEMMS), beliefs.locate(MIXED)
    shares = np.full((1, len(GEMMS)), 1 / len(GEMMS))
    assert set(choose(beliefs, needed, shares, pool, len(MIXED))) <= set(range(len(GEMMS)))
    assert set(most_uncertain(beliefs, pool, len(MIXED))) == set(range(len(MIXED)))


def test_a_group_beside_others_is_the_same_event():
    alone = Collective(
        collective="all_gather", bytes=2.0**24, num_ranks=16, ranks_per_node=8, level=1
    )
    beside = Collective(
        collective="all_gather",
        bytes=2.0**24,
        num_ranks=16,
        ranks_per_node=8,
        level=2,
        concurrent=4,
    )
    beliefs = condition(base, DEVICE, {alone: 2 * base([alone])[0]})
    assert np.exp(beliefs.log_time([beside])) == pytest.approx(2 * base([beside]), rel=0.02)
