"""Activations alive at once: closed forms of the papers, and counting by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.schedule import (
    Instruction,
    Phase,
    Schedule,
    from_orders,
    get_schedule,
    looped_stages,
    parse_schedule,
    schedule_names,
    weight_versions,
)
from perfmodel.schedule.memory import (
    alive_at_peak,
    in_flight,
    live_state,
    offloaded_at_peak,
    offloads,
    peak_live,
)

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


SHAPES = [(1, 3), (2, 4), (4, 4), (4, 8), (6, 12)]
"""Devices and micro-batches."""


def made(name: str, p: int, m: int) -> Schedule:
    try:
        return get_schedule(name)(p, m)
    except LayoutError:
        pytest.skip("the schedule has no such pipeline")


def ends(instruction: Instruction) -> bool:
    """Whether activations are gone behind an instruction: behind a whole backward, or the gradient
    of weights."""
    return instruction.phase in (Phase.BACKWARD, Phase.BACKWARD_WEIGHT)


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "forward"])
def test_peaks_of_every_schedule_against_a_walk_through_its_orders(
    name: str, p: int, m: int
) -> None:
    """A forward takes its micro-batches' activations, what ends their backward gives them back;
    where a device holds most in all, and most of each chunk."""
    schedule = made(name, p, m)
    size = np.random.default_rng(p).integers(1, 100, schedule.n_stages)
    for device in range(schedule.devices):
        alive = np.zeros(schedule.chunks, int)
        most, at_peak, peak = alive.copy(), alive.copy(), 0
        for instruction in schedule.order(device):
            if instruction.phase == Phase.FORWARD:
                alive[instruction.chunk] += instruction.span
            elif ends(instruction):
                alive[instruction.chunk] -= instruction.span
            most = np.maximum(most, alive)
            if alive.sum() > at_peak.sum():
                at_peak = alive.copy()
            peak = max(peak, int(alive @ size[schedule.stage[device]]))
        assert not alive.any()
        assert in_flight(schedule)[device].tolist() == most.tolist()
        assert alive_at_peak(schedule)[device].tolist() == at_peak.tolist()
        assert peak_live(schedule, size)[device] == peak


@pytest.mark.parametrize(("p", "m"), SHAPES)
@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "forward"])
def test_activations_leave_for_the_host_where_something_runs_meanwhile(
    name: str, p: int, m: int
) -> None:
    check_offloads(made(name, p, m))


@pytest.mark.parametrize(
    "order",
    [
        "F0 F1 F2 F3 F4 F5 B0-1 B2-3 B4-5",
        "F0 F1 F2-3 F4 F5 B0 B1 B2-3 B4-5",
        "F0 F1 F2 F3 B3 B2 B1 B0",
    ],
)
def test_what_passes_of_several_micro_batches_keep_or_take_stays_on_the_device(order: str) -> None:
    check_offloads(parse_schedule(f"stages 0\n{order}\n"))


def check_offloads(schedule: Schedule) -> None:
    """Activations are out before the forward after the next one, and back while the instruction
    before their backward runs: those of a single micro-batch, whose backward comes later than right
    behind that forward."""
    expected = []
    alive_at_most = np.zeros((schedule.devices, schedule.chunks), int)
    for device in range(schedule.devices):
        order = list(schedule.order(device))
        first = int(schedule.offsets[device])
        forwards = [place for place, one in enumerate(order) if one.phase == Phase.FORWARD]
        out: dict[int, list[int]] = {}
        back: dict[int, list[int]] = {}
        for number, place in enumerate(forwards):
            one = order[place]
            backward = next(
                at
                for at, other in enumerate(order)
                if other.phase in (Phase.BACKWARD, Phase.BACKWARD_INPUT)
                and other.chunk == one.chunk
                and other.micro_batch <= one.micro_batch < other.micro_batch + other.span
            )
            is_single = one.span == order[backward].span == 1
            after_next = forwards[number + 2] if number + 2 < len(forwards) else None
            if is_single and after_next is not None and backward > after_next + 1:
                expected.append((first + place, first + after_next, first + backward))
                out.setdefault(after_next, []).append(one.chunk)
                back.setdefault(backward - 1, []).append(one.chunk)
        alive = np.zeros(schedule.chunks, int)
        for place, one in enumerate(order):
            changes = [(chunk, -1) for chunk in out.get(place, [])]
            changes += [(chunk, 1) for chunk in back.get(place, [])]
            changes.append((one.chunk, one.span * ((one.phase == Phase.FORWARD) - ends(one))))
            for chunk, change in changes:
                alive[chunk] += change
                if alive.sum() > alive_at_most[device].sum():
                    alive_at_most[device] = alive
    found = offloads(schedule)
    columns = (found.forward.tolist(), found.next_but_one.tolist(), found.backward.tolist())
    assert sorted(zip(*columns, strict=True)) == sorted(expected)
    np.testing.assert_array_equal(offloaded_at_peak(schedule), alive_at_most)


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("name", schedule_names())
def test_live_state_of_every_schedule(name: str, offload: bool) -> None:
    """Micro-batches at the peak, of which slices are parts; the forwards before the first other
    pass; weight versions where steps do not flush."""
    schedule = get_schedule(name)(4, 8)
    state = live_state(schedule, offload, get_schedule(name).weights)
    alive = offloaded_at_peak(schedule) if offload else alive_at_peak(schedule)
    np.testing.assert_array_equal(state.activations * schedule.slices, alive)
    phases = [[one.phase for one in schedule.order(device)] for device in range(schedule.devices)]
    warm_up = [
        next((place for place, phase in enumerate(order) if phase != Phase.FORWARD), len(order))
        for order in phases
    ]
    assert state.warm_up.tolist() == warm_up
    assert state.split == any(Phase.BACKWARD_WEIGHT in order for order in phases)
    assert state.replicas == schedule.stage.size // schedule.n_stages
    flushes = live_state(schedule, offload, "flush")
    assert flushes.versions.tolist() == [1] * 4
    expected = weight_versions(schedule, get_schedule(name).weights).stored
    assert state.versions.tolist() == (
        [1] * 4 if get_schedule(name).weights == "flush" else expected.tolist()
    )


def test_streams_of_steps_keep_the_weights_that_passes_began_with() -> None:
    """PipeDream, arXiv 1806.03377, section 3.3: as many versions as micro-batches are under way;
    2BW keeps two (arXiv 2006.09503, section 3.1)."""
    stream = {name: get_schedule(name)(4, 1, 1, 16) for name in ("pipedream", "pipedream-2bw")}
    versions = {
        name: live_state(one, False, get_schedule(name).weights).versions
        for name, one in stream.items()
    }
    assert versions["pipedream"].tolist() == [4, 3, 2, 1]
    assert versions["pipedream-2bw"].max() == 2
    assert live_state(stream["pipedream"], False, "flush").versions.tolist() == [1] * 4


@pytest.mark.parametrize("slots", [0, 2, 3])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_planned_places_hold_activations_on_all_stages_but_the_last(slots: int, p: int) -> None:
    """OneFlow's buffers: as many places as a multiple of the stages, or what is alive anyway."""
    state = live_state(get_schedule("1f1b")(p, 40, 1), False, "flush")
    planned = state.with_slots(slots, p).activations[:, 0].tolist()
    alive = [float(p - rank) for rank in range(p)]
    places = slots * p if p > 1 else 0
    assert planned == [max(a, places if rank < p - 1 else 0) for rank, a in enumerate(alive)]
