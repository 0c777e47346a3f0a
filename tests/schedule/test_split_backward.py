"""Zero-bubble, V-shaped and DualPipe schedules against their authors' bubble and memory figures."""

import numpy as np
import pytest
from schedule_times import live_micro_batches, longest_device_span, makespan, uniform

from perfmodel.errors import LayoutError
from perfmodel.schedule import Phase, check, get_schedule

DEPTHS = [2, 4, 8, 16]


@pytest.mark.parametrize("p", DEPTHS)
def test_zb_h1_and_h2_bubbles(p: int) -> None:
    """Qi et al. 2024, table 2: (p-1)(F+B+W), (p-1)(F+B-W), (p-1)(F+B-2W), here with F = B = W."""
    m, passes = 3 * p, uniform(p, 1, 2)
    assert longest_device_span(get_schedule("1f1b")(p, m), passes) == 3 * m + 3 * (p - 1)
    assert longest_device_span(get_schedule("zb-h1")(p, m), passes) == 3 * m + p - 1
    assert longest_device_span(get_schedule("zb-h2")(p, m), passes) == 3 * m


@pytest.mark.parametrize("p", DEPTHS)
def test_zb_memory(p: int) -> None:
    m = 3 * p
    assert live_micro_batches(get_schedule("zb-h1")(p, m)).tolist() == [p] * p
    assert live_micro_batches(get_schedule("zb-h2")(p, m)).max() == 2 * p - 1


@pytest.mark.parametrize("p", [4, 8, 16])
def test_v_shapes_trade_memory_for_bubbles(p: int) -> None:
    m, passes = 4 * p, uniform(2 * p, 0.5, 1)
    schedules = [get_schedule(name)(p, m) for name in ("v-min", "v-half", "zb-v")]
    memory = [live_micro_batches(schedule).max() for schedule in schedules]
    bubble = [longest_device_span(schedule, passes) - 3 * m for schedule in schedules]
    of_1f1b = 3 * (p - 1)
    assert memory[0] <= p / 3 + 1.5
    assert memory[1] <= p / 2 + 2
    assert memory[2] <= p
    assert memory == sorted(memory)
    assert bubble == sorted(bubble, reverse=True)
    assert max(bubble) < 0.7 * of_1f1b
    assert bubble[2] == 0


@pytest.mark.parametrize("p", [2, 3, 5, 8, 10, 12, 16, 24])
def test_zb_v_has_no_bubble_from_twice_as_many_micro_batches_as_devices(p: int) -> None:
    """Qi et al. 2024b: where passes are equal, and with the activation memory of 1F1B. 16 stages
    and 192 micro-batches take 1,152 units."""
    for m in (2 * p, 2 * p + 1, 3 * p, 12 * p):
        schedule = get_schedule("zb-v")(p, m)
        assert longest_device_span(schedule, uniform(2 * p, 1, 2)) == 6 * m
        assert live_micro_batches(schedule).max() <= p


@pytest.mark.parametrize("p", [2, 4, 8])
@pytest.mark.parametrize("rounds", [2, 4])
def test_dualpipe_bubble_and_memory(p: int, rounds: int) -> None:
    """DeepSeek-V3, table 2: bubble (p/2 - 1)(F&B + B - 3W), p + 1 micro-batches in flight."""
    m = p * rounds
    schedule = get_schedule("dualpipe")(p, m)
    assert check(schedule) == ()
    assert makespan(schedule, uniform(p, 1, 2)) == 3 * m + (p / 2 - 1) * (3 + 2 - 3)
    assert live_micro_batches(schedule).max() * 2 / schedule.replicas == p + 1
    v = get_schedule("dualpipe-v")(p, m)
    assert check(v) == ()
    assert makespan(v, uniform(2 * p, 1, 2)) == 6 * m + (p - 1) * 2


def test_dualpipe_pairs_forwards_with_backwards_of_the_other_direction() -> None:
    schedule = get_schedule("dualpipe")(8, 32)
    first = np.flatnonzero(schedule.paired)
    assert len(first) == 180
    assert (schedule.phase[first] == Phase.FORWARD).all()
    assert (schedule.phase[first + 1] == Phase.BACKWARD).all()
    assert (schedule.chunk[first] != schedule.chunk[first + 1]).all()
    assert (schedule.device[first] == schedule.device[first + 1]).all()


def test_dualpipe_wants_enough_micro_batches() -> None:
    with pytest.raises(LayoutError, match="even number of at least 8 micro-batches, got 6"):
        get_schedule("dualpipe")(8, 6)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_seq1f1b_divides_bubble_and_memory(slices: int) -> None:
    p, m = 4, 8
    schedule = get_schedule(f"seq1f1b:{slices}")(p, m)
    assert check(schedule) == ()
    bubble = makespan(schedule, uniform(p, 1 / slices, 2 / slices)) - 3 * m
    assert bubble == pytest.approx(3 * (p - 1) / slices)
    assert live_micro_batches(schedule)[0] == (p + slices - 1) / slices
    order = [(i.phase, i.micro_batch) for i in schedule.order(p - 1)]
    backwards = [batch for phase, batch in order if phase == Phase.BACKWARD]
    assert backwards[:slices] == list(reversed(range(slices)))


@pytest.mark.parametrize(
    "name", ["gpipe", "1f1b", "zb-h2", "zb-v", "chimera-doubling", "dualpipe", "nf1b", "seq1f1b"]
)
def test_large_schedules_are_built_in_numpy(name: str) -> None:
    """32 stages and 512 micro-batches: no loop over instructions in Python may creep in (timed in
    benchmarks/)."""
    schedule = get_schedule(name)(32, 512)
    assert schedule.n_instructions >= 16_000
    assert check(schedule) == ()
