"""Agreement between real ranks, and what a what-if adds: without torch."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.emulate import EmulationError
from perfmodel.emulate.environment import (
    DELAYED,
    KINDS,
    Call,
    Conditions,
    Environment,
    EnvironmentClient,
    Orders,
    delayed_as,
)
from perfmodel.errors import PerfModelError

CALL = Call("all_reduce", 8, "float32", "sum")


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    made = Environment(
        str(tmp_path / "socket"), lambda kind, nbytes, members: (nbytes * 1.0, float(len(members)))
    )
    yield made
    made.close()


def line(environment: Environment, rank: int) -> EnvironmentClient:
    return EnvironmentClient(environment._listener.address, rank)  # pyright: ignore[reportArgumentType]


def meet(environment: Environment, calls: dict[int, Call]) -> dict[int, object]:
    """What each rank is answered, all asking at once."""
    answers: dict[int, object] = {}

    def ask(rank: int, call: Call) -> None:
        try:
            answers[rank] = line(environment, rank).meet(
                "world", tuple(calls), 3, call, float(rank)
            )
        except EmulationError as error:
            answers[rank] = str(error)

    threads = [threading.Thread(target=ask, args=item) for item in calls.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    return answers


def test_ranks_that_agree_start_when_the_last_has_come(environment: Environment) -> None:
    assert meet(environment, {0: CALL, 2: CALL, 5: CALL}) == {0: 5.0, 2: 5.0, 5: 5.0}
    assert environment.failure == ""


@pytest.mark.parametrize(
    "other", [Call("barrier", 1, "uint8"), Call("all_reduce", 16, "float32", "sum")]
)
def test_ranks_that_disagree_are_named(environment: Environment, other: Call) -> None:
    answers = meet(environment, {0: CALL, 1: other})
    assert set(answers.values()) == {environment.failure}
    for part in ("call #3 of group world", "rank 0", "rank 1", str(CALL), str(other)):
        assert part in environment.failure


def test_a_rank_that_does_not_come_is_found(environment: Environment) -> None:

    def wait() -> None:
        with pytest.raises(EmulationError):
            line(environment, 0).meet("world", (0, 1), 0, CALL, 0.0)

    thread = threading.Thread(target=wait)
    thread.start()
    environment.clock_s = 1.0
    while not (found := environment.stuck(-1.0, set())):
        pass
    assert "rank 0 waits in all_reduce" in found
    assert "rank 1 has not come" in found
    assert environment.stuck(1e9, set()) == ""
    assert "rank 1 has ended" in environment.stuck(1e9, {1})
    environment.fail(found)
    thread.join(10)
    assert not thread.is_alive()


def test_prices_are_of_the_group_and_asked_once(environment: Environment) -> None:
    rank = line(environment, 0)
    rank.ask("group", "pair", (0, 4))
    assert rank.price("pair", CALL) == (8.0, 2.0)
    environment.close()
    assert rank.price("pair", CALL) == (8.0, 2.0)
    with pytest.raises(EmulationError, match="has ranks"):
        rank.ask("group", "pair", (0, 3))


def test_a_price_that_fails_ends_all(environment: Environment) -> None:
    with pytest.raises(EmulationError, match="unknown"):
        line(environment, 0).price("unknown", CALL)
    assert "unknown" in environment.failure


def orders(**more) -> Orders:
    return Orders(address="", rank=0, world_size=8, real_ranks=(0,), out="", **more)


def test_orders_travel_as_text(monkeypatch: pytest.MonkeyPatch) -> None:
    sent = orders(delays_s={"all_reduce": 0.1}, sweep_s=(0.0, 1.0), swept="all_gather")
    monkeypatch.setenv("PERFMODEL_EMULATION", sent.to_json())
    assert Orders.from_environment() == sent


def test_delays_by_kind_and_by_iteration() -> None:
    conditions = Conditions(
        orders(delays_s={"send_recv": 0.5}, swept="all_reduce", sweep_s=(1.0, 2.0), sweep_every=3)
    )
    assert [conditions.extra_s("all_reduce", i) for i in (0, 2, 3, 5, 6)] == [1, 1, 2, 2, 1]
    assert conditions.extra_s("recv", 0) == 0.5
    assert conditions.extra_s("barrier", 0) == 0


times_s = st.floats(0, 1e3)


@given(
    delays_s=st.dictionaries(st.sampled_from(DELAYED), times_s),
    swept=st.sampled_from(DELAYED),
    data=st.data(),
)
def test_every_kind_takes_longer_by_its_own_delay(
    delays_s: dict[str, float], swept: str, data: st.DataObject
) -> None:
    sweep_s = tuple(data.draw(st.lists(times_s, min_size=1, max_size=5)))
    every, iteration = data.draw(st.integers(1, 5)), data.draw(st.integers(0, 100))
    asked = orders(
        delays_s=delays_s,
        swept=swept,
        sweep_s=sweep_s,
        sweep_every=every,
        straggler=2.0,
        fail_rank=3,
    )
    for kind in KINDS:
        wanted_s = delays_s.get(delayed_as(kind), 0.0) + (
            sweep_s[iteration // every % len(sweep_s)] if delayed_as(kind) == swept else 0.0
        )
        assert Conditions(asked).extra_s(kind, iteration) == pytest.approx(wanted_s)
        assert Conditions(asked.without_what_if()).extra_s(kind, iteration) == 0.0


@pytest.mark.parametrize(
    "asked",
    [
        *({"delays_s": {"all_reduce": bad}} for bad in (-1e-3, float("nan"), float("inf"))),
        {"delays_s": {"send": 1.0}},
        {"delays_s": {"all_reduced": 1.0}},
        {"swept": "all_gather", "sweep_s": (0.0, float("nan"))},
        {"swept": "all_gather", "sweep_s": ()},
        {"swept": "all_gather", "sweep_s": (0.0,), "sweep_every": 0},
        {"straggler": 0.0},
        {"straggler": float("nan")},
        {"straggler": float("inf")},
        {"jitter": -0.1},
        {"jitter": float("nan")},
    ],
    ids=str,
)
def test_impossible_what_ifs_are_refused(asked: dict[str, Any]) -> None:
    with pytest.raises(PerfModelError):
        orders(**asked)


def test_stragglers_come_later_in_proportion_to_what_they_computed() -> None:
    conditions = Conditions(orders(straggler=1.5))
    assert conditions.late_s(10.0, 7) == 0.0  # never yet together
    conditions.together(10.0)
    assert conditions.late_s(12.0, 7) == pytest.approx(1.0)
    assert conditions.late_s(12.0, 0) == 0.0
    conditions.together(13.0)
    assert conditions.late_s(13.0, 7) == 0.0


def test_jitter_is_the_largest_of_all_emulated_ranks() -> None:
    conditions, emulated = Conditions(orders(jitter=0.1)), 50
    late_s = []
    for start_s in range(1, 2001):
        conditions.together(start_s)
        late_s.append(conditions.late_s(start_s + 0.5, emulated) / 0.5)
        # until they are together again
        assert conditions.late_s(start_s + 0.5, emulated) / 0.5 == late_s[-1]
    drawn = np.random.default_rng(0).lognormal(0.0, 0.1, (4000, emulated)).max(axis=1) - 1
    assert np.quantile(late_s, (0.1, 0.5, 0.9)) == pytest.approx(
        np.quantile(drawn, (0.1, 0.5, 0.9)), rel=0.06
    )


def test_a_dead_rank_ends_only_the_groups_that_it_is_in() -> None:
    conditions = Conditions(orders(fail_rank=3, fail_call=2))
    world = tuple(range(8))
    conditions.check_alive(world, "first")
    with pytest.raises(EmulationError, match="second: emulated rank 3"):
        conditions.check_alive(world, "second")
    conditions.check_alive((0, 1), "pair")
