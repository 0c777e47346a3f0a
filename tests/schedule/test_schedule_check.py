"""The checker finds what is wrong and where, on schedules broken by hand."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.schedule import (
    Instruction,
    Phase,
    Schedule,
    Work,
    check,
    from_orders,
    get_schedule,
    looped_stages,
    schedule_names,
)

F, B, BI, BW = Phase
Order = list[tuple[Phase, int, int]]


def two_devices(first: Order, second: Order, micro_batches: int = 2) -> Schedule:
    return from_orders("by hand", looped_stages(2, 1), micro_batches, [first, second])


FIRST = [(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)]
SECOND = [(F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1)]


def test_sound_schedules_pass() -> None:
    assert check(two_devices(FIRST, SECOND)) == ()
    split = [(F, 0, 0), (BI, 0, 0), (F, 0, 1), (BI, 0, 1), (BW, 0, 0), (BW, 0, 1)]
    assert check(two_devices(FIRST, split)) == ()


def test_missing_work() -> None:
    (problem,) = check(two_devices(FIRST[:-1], SECOND))
    assert problem.kind == "missing"
    assert problem.instruction == Instruction(
        device=0, position=-1, phase=B, chunk=0, micro_batch=1
    )
    assert "no device runs B of stage 0 for micro-batch 1" in str(problem)


def test_missing_weight_gradient() -> None:
    (problem,) = check(two_devices(FIRST, [*SECOND[:1], (BI, 0, 0), *SECOND[2:]]))
    assert (problem.kind, problem.instruction.phase) == ("missing", BW)


def test_duplicate_work() -> None:
    (problem,) = check(two_devices(FIRST, [*SECOND, (F, 0, 1)]))
    assert problem.kind == "duplicate"
    assert problem.instruction == Instruction(device=1, position=4, phase=F, chunk=0, micro_batch=1)
    assert "device 1 position 4 (F chunk 0 micro-batch 1)" in str(problem)


def test_whole_and_split_backward_is_a_duplicate() -> None:
    problems = check(two_devices(FIRST, [*SECOND, (BI, 0, 0), (BW, 0, 0)]))
    assert [(p.kind, p.instruction.phase, p.instruction.position) for p in problems] == [
        ("duplicate", B, 1)
    ]


def test_backward_before_its_forward() -> None:
    (problem,) = check(two_devices(FIRST, [(B, 0, 0), (F, 0, 0), (F, 0, 1), (B, 0, 1)]))
    assert problem.kind == "order"
    assert problem.instruction == Instruction(device=1, position=0, phase=B, chunk=0, micro_batch=0)


def test_stage_before_the_one_that_feeds_it_on_the_same_device() -> None:
    orders = [[(F, 1, 0), (F, 0, 0), (B, 1, 0), (B, 0, 0)]]
    (problem,) = check(from_orders("by hand", looped_stages(1, 2), 1, orders))
    assert (problem.kind, problem.instruction.chunk) == ("order", 1)


def test_backward_away_from_its_forward() -> None:
    stage = [[0, 1], [1, 0]]  # both devices hold both stages
    orders = [[(F, 0, 0), (B, 1, 0), (B, 0, 0)], [(F, 0, 0)]]
    problems = check(from_orders("by hand", stage, 1, orders))
    assert [(p.kind, p.instruction.position) for p in problems] == [("placement", 1)]


PLACES = list(product(range(3), range(2)))
"""Chunks of three devices, each of which holds the only stage."""


@pytest.mark.parametrize(("forward", "backward"), list(product(PLACES, PLACES)))
def test_a_backward_on_any_other_place_than_its_forward_is_named(
    forward: tuple[int, int], backward: tuple[int, int]
) -> None:
    orders: list[Order] = [[], [], []]
    for phase, (device, chunk) in ((F, forward), (B, backward)):
        orders[device].append((phase, chunk, 0))
    problems = check(from_orders("by hand", np.zeros((3, 2), int), 1, orders))
    assert [problem.kind for problem in problems] == ([] if forward == backward else ["placement"])
    assert all("must run on the same device" in str(problem) for problem in problems)


def test_deadlock_names_the_waiting_instructions() -> None:
    """Device 0 wants B0 before it sends F1, device 1 wants F1 before it runs B0."""
    first = [(F, 0, 0), (B, 0, 0), (F, 0, 1), (B, 0, 1)]
    second = [(F, 0, 0), (F, 0, 1), (B, 0, 0), (B, 0, 1)]
    problems = check(two_devices(first, second))
    assert [(p.kind, p.instruction) for p in problems] == [
        ("deadlock", Instruction(0, 1, B, 0, 0)),
        ("deadlock", Instruction(1, 1, F, 0, 1)),
    ]
    assert "waits for device 0 position 2 (F chunk 0 micro-batch 1), which never starts" in str(
        problems[1]
    )


@given(st.data())
def test_any_two_swapped_instructions_are_found_or_harmless(data: st.DataObject) -> None:
    """Against the plain statement: a schedule runs iff devices that block on data get through."""
    p, m, v = (
        data.draw(st.integers(2, 4)),
        data.draw(st.integers(1, 5)),
        data.draw(st.integers(1, 2)),
    )
    good = get_schedule("interleaved")(p, m, v)
    orders = [[(i.phase, i.chunk, i.micro_batch) for i in good.order(d)] for d in range(p)]
    order = orders[data.draw(st.integers(0, p - 1))]
    a, b = data.draw(st.tuples(*[st.integers(0, len(order) - 1)] * 2))
    order[a], order[b] = order[b], order[a]
    assert (check(from_orders("swapped", good.stage, m, orders)) == ()) == _runs(orders, p, v)


def _runs(orders: list[Order], p: int, v: int) -> bool:
    queues = [list(order) for order in orders]
    done: set[tuple[Phase, int, int]] = set()
    moved = True
    while moved:
        moved = False
        for device, queue in enumerate(queues):
            while queue:
                phase, chunk, i = queue[0]
                stage = chunk * p + device
                needs = {(F, stage - 1, i)} if phase == F else {(B, stage + 1, i), (F, stage, i)}
                if any(0 <= s < p * v and (f, s, i) not in done for f, s, i in needs):
                    break
                done.add((phase, stage, i))
                queue.pop(0)
                moved = True
    return not any(queues)


@pytest.mark.parametrize("name", [name for name in schedule_names() if name != "forward"])
def test_whatever_is_left_out_or_done_twice_is_named(name: str) -> None:
    """Every instruction of a schedule once: without it its work is missing, of each of its
    micro-batches, and nothing else is wrong; with it twice, the second one is surplus."""
    good = get_schedule(name)(4, 8)
    orders = [list(good.order(device)) for device in range(good.devices)]
    assert check(good) == ()
    for device, order in enumerate(orders):
        for place, dropped in enumerate(order):
            works = [
                [Work(i.phase, i.chunk, i.micro_batch, span=i.span) for i in each]
                for each in orders
            ]
            (work,) = works[device][place : place + 1]
            del works[device][place]
            problems = check(
                from_orders(name, good.stage, good.micro_batches, works, slices=good.slices)
            )
            missing = [problem for problem in problems if problem.kind == "missing"]
            batches = range(dropped.micro_batch, dropped.micro_batch + dropped.span)
            assert [problem.instruction.micro_batch for problem in missing] == list(batches)
            assert {problem.instruction.phase for problem in missing} == {dropped.phase}
            assert not [problem for problem in problems if problem.kind == "duplicate"]
            works[device].insert(place, work)
            works[device].append(work)
            problems = check(
                from_orders(name, good.stage, good.micro_batches, works, slices=good.slices)
            )
            (surplus,) = [
                problem.instruction for problem in problems if problem.kind == "duplicate"
            ]
            assert (surplus.device, surplus.position) == (device, len(order))


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_a_dropped_instruction_is_named(name: str) -> None:
    good = get_schedule(name)(3, 4, 1)
    orders = [[(i.phase, i.chunk, i.micro_batch) for i in good.order(d)] for d in range(3)]
    phase, chunk, i = orders[1].pop(3)
    (problem,) = check(from_orders(name, good.stage, 4, orders))
    assert problem.kind == "missing"
    assert problem.instruction == Instruction(1, -1, phase, chunk, i)
