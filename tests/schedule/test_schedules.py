"""Orders of the built-in schedules against the papers' descriptions, written out as lists."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import perfmodel
from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.schedule import (
    NEVER,
    PassTimes,
    Phase,
    Schedule,
    check,
    even_split,
    forward_part,
    from_keys,
    from_orders,
    get_schedule,
    looped_stages,
    register,
    require_valid,
    schedule_names,
)
from perfmodel.schedule.facts import starts_and_ends

F, B = Phase.FORWARD, Phase.BACKWARD
Order = list[tuple[Phase, int, int]]


def listed(schedule: Schedule) -> list[Order]:
    return [
        [(i.phase, i.chunk, i.micro_batch) for i in schedule.order(d)]
        for d in range(schedule.devices)
    ]


def one_forward_one_backward(forwards: Order, backwards: Order, warm_up: int) -> Order:
    """Warm-up forwards, then one forward and one backward in turn, then the remaining backwards."""
    warm_up = min(warm_up, len(forwards))
    order = forwards[:warm_up]
    for k, forward in enumerate(forwards[warm_up:]):
        order = [*order, forward, backwards[k]]
    return order + backwards[len(forwards) - warm_up :]


sizes = {"p": st.integers(1, 9), "m": st.integers(1, 20), "v": st.integers(1, 4)}


@given(**sizes)
def test_every_schedule_does_all_work_once_without_deadlock(p: int, m: int, v: int) -> None:
    for name in schedule_names():
        scheduler = get_schedule(name)
        chunks = scheduler.chunks or v
        even = name.startswith(("chimera", "dualpipe")) and name != "dualpipe-v"
        if (even and p % 2) or (name == "dualpipe" and (m < p or m % 2)):
            with pytest.raises(LayoutError, match="even number"):
                scheduler(p, m, chunks)
            continue
        schedule = scheduler(p, m, chunks)
        assert check(schedule) == ()
        assert schedule.forward_only == (name == "forward")
        np.testing.assert_array_equal(schedule.stage, scheduler.stage_map(p, chunks))
        work = schedule.span.sum() // schedule.slices
        split = (schedule.phase == Phase.BACKWARD_WEIGHT).sum()
        assert work - split == schedule.n_stages * m * (1 if name == "forward" else 2)


@given(p=st.integers(1, 9), m=st.integers(1, 20))
def test_gpipe_and_1f1b_orders(p: int, m: int) -> None:
    forwards, backwards = [(F, 0, i) for i in range(m)], [(B, 0, i) for i in range(m)]
    assert listed(get_schedule("gpipe")(p, m, 1)) == [forwards + backwards] * p
    assert listed(get_schedule("1f1b")(p, m, 1)) == [
        one_forward_one_backward(forwards, backwards, p - 1 - d) for d in range(p)
    ]


@given(p=st.integers(1, 6), rounds=st.integers(1, 4), v=st.integers(2, 4))
def test_interleaved_is_megatron_order_for_multiples_of_p(p: int, rounds: int, v: int) -> None:
    m = p * rounds
    groups = [range(g * p, g * p + p) for g in range(rounds)]
    forwards = [(F, c, i) for group in groups for c in range(v) for i in group]
    backwards = [(B, c, i) for group in groups for c in reversed(range(v)) for i in group]
    assert listed(get_schedule("interleaved")(p, m, v)) == [
        one_forward_one_backward(forwards, backwards, 2 * (p - 1 - d) + (v - 1) * p)
        for d in range(p)
    ]


@given(**sizes)
def test_ragged_interleaved_is_the_padded_order_with_missing_work_struck_out(
    p: int, m: int, v: int
) -> None:
    padded = listed(get_schedule("interleaved")(p, -(-m // p) * p, v))
    struck = [[work for work in order if work[2] < m] for order in padded]
    if v > 1:
        assert listed(get_schedule("interleaved")(p, m, v)) == struck


def test_ragged_last_group_with_megatron_warm_up_would_deadlock() -> None:
    """Why the order is not simply Megatron's rule applied to a shorter last group."""
    p, m, v = 6, 7, 4
    groups = [range(6), range(6, 7)]
    forwards = [(F, c, i) for group in groups for c in range(v) for i in group]
    backwards = [(B, c, i) for group in groups for c in reversed(range(v)) for i in group]
    orders = [
        one_forward_one_backward(forwards, backwards, 2 * (p - 1 - d) + (v - 1) * p)
        for d in range(p)
    ]
    naive = from_orders("naive", looped_stages(p, v), m, orders)
    assert {problem.kind for problem in check(naive)} == {"deadlock"}
    assert check(get_schedule("interleaved")(p, m, v)) == ()


@given(p=st.integers(1, 6), m=st.integers(1, 9), v=st.integers(1, 3))
def test_forward_part_equals_forward_order(p: int, m: int, v: int) -> None:
    inference = forward_part(get_schedule("interleaved")(p, m, v))
    assert listed(inference) == listed(get_schedule("forward")(p, m, v))
    assert check(inference) == ()


def test_keys_that_ignore_dependencies_still_give_valid_slots() -> None:
    key = np.arange(8).reshape(1, 1, 8) * np.ones((3, 1, 1), int)
    schedule = from_keys("late backwards", looped_stages(3, 1), {F: key, B: key + 8})
    assert listed(schedule) == listed(get_schedule("gpipe")(3, 8, 1))
    assert check(schedule) == ()
    for need in schedule.dependencies:
        waits = need != NEVER
        assert (schedule.slot[need[waits]] < schedule.slot[waits]).all()


def test_bidirectional_pipelines_are_one_formula() -> None:
    """Chimera's order (Li and Hoefler 2021, figure 3) for m = p: stages live on two devices
    each."""
    p = m = 6
    d, i = np.arange(p)[:, None], np.arange(m)
    absent = np.full((p, 2, m), -1)
    down, up = i < m // 2, i >= m // 2
    forward, backward = absent.copy(), absent.copy()
    for chunk, here, stage in ((0, down, d), (1, up, p - 1 - d)):
        start = 2 * (i % (m // 2))
        forward[:, chunk] = np.where(here, stage + start, -1)
        backward[:, chunk] = np.where(here, 2 * p - 1 - stage + start, -1)
    stages = np.concatenate([d, p - 1 - d], axis=1)
    chimera = from_keys("chimera", stages, {F: forward, B: backward})
    assert check(chimera) == ()
    assert chimera.slot.max() + 1 == 3 * p - 2  # bubble (p - 2) / (2m + p - 2) for equal passes


def test_registry_names_and_suggests() -> None:
    assert {"gpipe", "1f1b", "interleaved", "forward"} <= set(schedule_names())
    with pytest.raises(UnknownNameError, match=r"unknown schedule 'interlaved'.*'interleaved'"):
        get_schedule("interlaved")
    with pytest.raises(PerfModelError, match="already registered"):
        register("gpipe")(get_schedule("gpipe"))


@pytest.mark.parametrize(
    ("p", "m", "v"), [(0, 1, 1), (1, -1, 1), (1, 1, 0), (True, 1, 1), (2, 1.5, 1)]
)
def test_counts_must_be_positive_whole_numbers(p: int, m: int, v: int) -> None:
    with pytest.raises(LayoutError, match="whole number of at least 1"):
        get_schedule("gpipe")(p, m, v)


def test_1f1b_with_chunks_names_the_remedy() -> None:
    with pytest.raises(LayoutError, match="schedule=interleaved"):
        get_schedule("1f1b")(4, 8, 2)


def test_impossible_instructions_are_refused_by_name() -> None:
    with pytest.raises(
        PerfModelError, match=r"device 1 position 0: micro_batch 2 is not in 0\.\.1"
    ):
        from_orders("bad", looped_stages(2, 1), 2, [[(F, 0, 0)], [(F, 0, 2)]])
    with pytest.raises(PerfModelError, match="1 orders for 2 devices"):
        from_orders("bad", looped_stages(2, 1), 2, [[(F, 0, 0)]])
    with pytest.raises(PerfModelError, match="one shape"):
        from_keys(
            "bad", looped_stages(1, 1), {F: np.zeros((1, 1, 2), int), B: np.zeros((1, 2), int)}
        )


@pytest.mark.parametrize("offsets", [(1, 2, 4), (0, 2, 3), (0, 5, 4), (0, 2, 5)])
def test_orders_of_devices_follow_one_another(offsets: tuple[int, ...]) -> None:
    """From the first instruction to the last, none before another's."""
    good = get_schedule("gpipe")(2, 1)
    assert good.offsets.tolist() == [0, 2, 4]
    with pytest.raises(PerfModelError, match="offsets must rise from 0 to 4"):
        replace(good, offsets=np.array(offsets))


ROLES = {Phase.FORWARD: 0, Phase.BACKWARD: 1, Phase.BACKWARD_INPUT: 1, Phase.BACKWARD_WEIGHT: 2}
"""A whole backward makes the gradient of inputs that other stages wait for."""


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "forward"])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8)])
def test_passes_wait_for_their_neighbours(name: str, p: int, m: int) -> None:
    """Forwards for the stage before and the slice before, gradients of inputs for their forward,
    the stage after and the slice after, gradients of weights for those of inputs; an instruction of
    several micro-batches for the last."""
    schedule = get_schedule(name)(p, m)
    instructions = [schedule[index] for index in range(schedule.n_instructions)]
    done: dict[tuple[int, int, int], int] = {}
    for index, one in enumerate(instructions):
        stage = int(schedule.instruction_stage[index])
        for batch in range(one.micro_batch, one.micro_batch + one.span):
            done[ROLES[one.phase], stage, batch] = index
    found = schedule.dependencies
    for index, one in enumerate(instructions):
        role, stage = ROLES[one.phase], int(schedule.instruction_stage[index])
        needs: dict[str, list[int]] = {"upstream": [], "same_stage": [], "neighbouring_slice": []}
        for batch in range(one.micro_batch, one.micro_batch + one.span):
            if role != 2:
                needs["upstream"].append(
                    done.get((role, stage + (1 if role else -1), batch), NEVER)
                )
                other = batch + (1 if role else -1)
                if other // schedule.slices == batch // schedule.slices:
                    needs["neighbouring_slice"].append(done[role, stage, other])
            if role:
                needs["same_stage"].append(done[role - 1, stage, batch])
        for field, expected in needs.items():
            assert getattr(found, field)[index] == max(expected, default=NEVER), (one, field)


@pytest.mark.parametrize("name", ["dualpipe", "dualpipe-v"])
def test_pairs_start_together_and_end_together(name: str) -> None:
    """Whoever needs one of a pair waits for its second, and the first of a pair waits for what
    either of them needs."""
    schedule = get_schedule(name)(4, 8)
    assert schedule.paired.any()
    needs = np.stack(schedule.dependencies)
    waits = np.stack(schedule.waits)
    for index in range(schedule.n_instructions):
        pair = [index, index + 1] if schedule.paired[index] else [index]
        expected = set()
        for need in needs[:, pair].ravel().tolist():
            if need != NEVER:
                expected.add(need + 1 if schedule.paired[need] else need)
        assert set(waits[:, index].tolist()) - {NEVER} == expected, schedule[index]


def test_require_valid_counts_what_else_is_wrong() -> None:
    empty = from_orders("empty", looped_stages(1, 1), 3, [[(F, 0, 0)]])
    with pytest.raises(
        PerfModelError, match=r"missing: no device runs F of stage 0.*\(and 1 more\)"
    ):
        require_valid(empty)


NEW = """from perfmodel.schedule._registry import get_schedule, register
from perfmodel.schedule._schedule import Schedule


@register("reversed")
def reversed_(devices: int, micro_batches: int, chunks: int) -> Schedule:
    return get_schedule("gpipe").build(devices, micro_batches, chunks)
"""


def test_a_schedule_is_one_file_of_the_package(tmp_path: Path) -> None:
    """A copy of the package, of links, with a module more."""
    package = Path(perfmodel.__file__).parent
    (tmp_path / "perfmodel" / "schedule").mkdir(parents=True)
    for part in (package, package / "schedule"):
        for one in part.iterdir():
            if one.name not in ("schedule", "__pycache__"):
                (tmp_path / one.relative_to(package.parent)).symlink_to(one)
    (tmp_path / "perfmodel" / "schedule" / "_reversed.py").write_text(NEW)
    asked = (
        "from perfmodel.schedule import get_schedule; print(get_schedule('reversed')(2, 4).devices)"
    )
    done = subprocess.run(
        [sys.executable, "-c", asked], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "2\n", done.stderr


@pytest.mark.parametrize(("p", "m"), [(1, 1), (4, 4), (4, 12)])
def test_messages_take_no_time_unless_told(p: int, m: int) -> None:
    """(m + p - 1) passes each way, of 1F1B."""
    schedule = get_schedule("1f1b")(p, m)
    for times in (PassTimes(np.ones(p), np.ones(p), np.ones(p)), PassTimes.uniform(p, 1.0, 2.0)):
        assert times.transfer_s == 0
        assert starts_and_ends(schedule, times)[1].max() == 3 * (m + p - 1)
    late = PassTimes.uniform(p, 1.0, 2.0, transfer_s=0.5)
    assert starts_and_ends(schedule, late)[1].max() >= 3 * (m + p - 1) + 2 * (p - 1) * 0.5


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [
        (8, [2, 2, 2, 2]),
        (9, [2, 3, 2, 2]),
        (10, [2, 3, 3, 2]),
        (11, [3, 3, 3, 2]),
        (3, [1, 1, 1, 0]),
        (2, [0, 1, 1, 0]),  # the ends hold embedding and head
    ],
)
def test_what_does_not_divide_goes_to_the_middle(layers: int, sizes: list[int]) -> None:
    assert even_split(layers, 4).tolist() == sizes
    with pytest.raises(LayoutError, match="too few for 4 pipeline stages"):
        even_split(1, 4)


@pytest.mark.parametrize(
    ("name", "devices", "micro_batches", "steps"),
    [
        # until the first micro-batch is back, 2p passes, and again as long where no flush lets
        # devices meet
        ("1f1b", 4, 8, 2),
        ("1f1b", 4, 2, 4),
        ("1f1b", 4, 3, 3),
        ("pipedream", 4, 8, 4),
        ("pipedream", 4, 2, 8),
        ("pipedream", 4, 3, 6),
    ],
)
def test_a_stream_is_steady_once_the_first_micro_batch_is_back(
    name: str, devices: int, micro_batches: int, steps: int
) -> None:
    assert get_schedule(name).steady_steps(devices, micro_batches) == steps
