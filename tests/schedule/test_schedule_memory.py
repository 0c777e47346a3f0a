"""Activations alive at once: closed forms of the papers, and counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.schedule import Phase, from_orders, get_schedule, looped_stages
from perfmodel.schedule.memory import in_flight, peak_live

p_ = st.integers(1, 8)
m_ = st.integers(1, 20)


@given(p=p_, m=m_)
def test_1f1b_holds_min_m_and_p_minus_d(p: int, m: int) -> None:
    expected = np.minimum(m, p - np.arange(p))[:, None]
    np.testing.assert_array_equal(in_flight(get_schedule("1f1b")(p, m, 1)), expected)


@given(p=p_, m=m_, v=st.integers(1, 3))
def test_gpipe_holds_everything(p: int, m: int, v: int) -> None:
    np.testing.assert_array_equal(in_flight(get_schedule("gpipe")(p, m, v)), np.full((p, v), m))


@given(p=p_, rounds=st.integers(1, 3), v=st.integers(2, 4))
def test_interleaved_holds_its_warm_up_and_one(p: int, rounds: int, v: int) -> None:
    """Megatron: 2 (p - 1 - d) + (v - 1) p warm-up forwards and the one of the steady state."""
    m = rounds * p
    schedule = get_schedule("interleaved")(p, m, v)
    expected = np.minimum(2 * (p - 1 - np.arange(p)) + (v - 1) * p + 1, m * v)
    np.testing.assert_array_equal(peak_live(schedule, np.ones(p * v)), expected)


@given(p=p_, m=m_, v=st.integers(2, 3))
def test_ragged_interleaved_holds_no_more_than_padded(p: int, m: int, v: int) -> None:
    ragged, padded = (get_schedule("interleaved")(p, n, v) for n in (m, -(-m // p) * p))
    assert (in_flight(ragged) <= in_flight(padded)).all()


@given(
    name=st.sampled_from(["gpipe", "1f1b", "interleaved"]),
    p=st.integers(1, 5),
    m=st.integers(1, 8),
    v=st.integers(1, 3),
    seed=st.integers(0, 99),
)
def test_peaks_against_counting_by_hand(name: str, p: int, m: int, v: int, seed: int) -> None:
    schedule = get_schedule(name)(p, m, 1 if name == "1f1b" else v)
    size = np.random.default_rng(seed).integers(0, 100, schedule.n_stages)
    peak, most = np.zeros(p), np.zeros(schedule.stage.shape, int)
    for device in range(p):
        alive = np.zeros(schedule.chunks, int)
        for instruction in schedule.order(device):
            alive[instruction.chunk] += 1 if instruction.phase == Phase.FORWARD else -1
            most[device] = np.maximum(most[device], alive)
            peak[device] = max(peak[device], (alive * size[schedule.stage[device]]).sum())
    np.testing.assert_array_equal(in_flight(schedule), most)
    np.testing.assert_allclose(peak_live(schedule, size), peak)


def test_forward_only_holds_one() -> None:
    schedule = get_schedule("forward")(3, 5, 2)
    np.testing.assert_array_equal(in_flight(schedule), np.ones((3, 2)))


def test_split_backward_holds_until_the_weight_gradient() -> None:
    f, _, bi, bw = Phase
    order = [(f, 0, 0), (bi, 0, 0), (f, 0, 1), (bi, 0, 1), (bw, 0, 0), (bw, 0, 1)]
    schedule = from_orders("split", looped_stages(1, 1), 2, [order])
    np.testing.assert_array_equal(in_flight(schedule), [[2]])


def test_bytes_need_one_entry_per_stage() -> None:
    with pytest.raises(PerfModelError, match="each of 4 stages"):
        peak_live(get_schedule("1f1b")(4, 4, 1), np.ones(3))
