"""Real processes exchange data over gloo, JAX's and torch's; how their calls are timed."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.errors import CalibrationError, PerfModelError, UnknownNameError
from perfmodel.measure.backends import (
    KernelBeside,
    Transport,
    beside_row,
    collective_row,
    transport_of,
)
from perfmodel.measure.ranks import RankGroup, check_collective, groups_at_once, transfer_time_s
from perfmodel.measure.tables import Point, point_key, row_key
from perfmodel.measure.timing import Meter, NoMeter, Sample, StoppingRule
from perfmodel.ops import Collective, CollectiveKind, Gemm

RANKS = 2


def collective(kind: CollectiveKind, size: int = 64, **changes) -> Collective:
    return Collective(
        **{
            "collective": kind,
            "bytes": size,
            "num_ranks": RANKS,
            "ranks_per_node": RANKS,
            "dtype": "fp32",
            **changes,
        }
    )


@pytest.fixture(scope="module", params=["jax", "torch"])
def transport(request: pytest.FixtureRequest) -> Transport:
    pytest.importorskip(request.param, reason=f"{request.param} is not installed")
    return transport_of(request.param)


@pytest.fixture(scope="module")
def group(transport: Transport) -> Iterator[RankGroup]:
    with RankGroup(RANKS, transport.session) as group:
        yield group


def buffers(op: Collective) -> list[np.ndarray]:
    """What each rank holds before: i modulo 1024, plus its rank."""
    count = int(op.bytes) // 4 // (op.num_ranks if op.collective == "all_gather" else 1)
    return [np.arange(count) % 1024 + float(rank) for rank in range(op.num_ranks)]


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 4))
def test_groups_at_once_stand_beside_one_another_on_every_node(
    nodes: int, per_node: int, groups: int
):
    op = collective(
        "all_reduce", num_ranks=nodes * per_node, ranks_per_node=per_node, concurrent=groups
    )
    ranks = np.array(groups_at_once(op))
    assert sorted(ranks.ravel()) == list(range(nodes * per_node * groups))
    assert (ranks[:, :1] <= ranks).all()
    node = ranks // (per_node * groups)
    assert (node == np.arange(nodes * per_node) // per_node).all()


@pytest.mark.slow
def test_two_groups_at_once_do_not_mix_their_data(transport: Transport):
    op = collective("all_reduce", 64, concurrent=2)
    with RankGroup(2 * RANKS, transport.session) as group:
        group.load(op)
        group.ask("run", 2)
        values = group.values()
        row = collective_row(
            group, op, "box", StoppingRule(max_s=0.2), NoMeter(), transport, "loopback"
        )
    own = np.arange(16) % 1024
    for rank, value in enumerate(values):
        first = rank // RANKS * RANKS
        assert np.array_equal(value, 2 * own + first + first + 1)
    assert row["variant"] == "groups_at_once_2"
    assert row_key(row) == point_key(Point(op)) != point_key(Point(collective("all_reduce", 64)))


class GroupOfKnownLength:
    """Ranks on which a call of a kernel takes a second and a collective 0.3."""

    def __init__(self) -> None:
        self.collectives: list[int] = []

    def sample_kernel(
        self, op: Gemm, calls: int, collectives: int, meter: Meter
    ) -> tuple[Sample, bool]:
        self.collectives.append(collectives)
        return Sample(calls, 1.0 * calls, 0.0), not collectives or 0.3 * collectives > calls


@given(st.lists(st.integers(1, 50), min_size=1, max_size=4))
def test_collectives_outlast_the_kernel_that_they_run_beside(calls: list[int]) -> None:
    group: Any = GroupOfKnownLength()
    sample = KernelBeside(
        group, Point(Gemm(m=8, n=8, k=8), beside=collective("all_reduce")), NoMeter()
    )
    for number in calls:
        assert sample(number).calls == number
        assert 0.3 * group.collectives[-1] > number
    # A kernel by itself runs without any.
    alone: Any = GroupOfKnownLength()
    KernelBeside(alone, Point(Gemm(m=8, n=8, k=8)), NoMeter())(1)
    assert alone.collectives == [0]


def test_collectives_that_are_too_short_are_refused() -> None:
    group: Any = GroupOfKnownLength()
    sample = KernelBeside(
        group, Point(Gemm(m=8, n=8, k=8), beside=collective("all_reduce")), NoMeter()
    )
    with pytest.raises(CalibrationError, match="give larger ones"):
        sample(10**6)


def test_kernels_run_on_all_ranks_beside_a_collective(
    group: RankGroup, transport: Transport
) -> None:
    if transport.package != "torch":
        pytest.skip("only torch runs kernels beside collectives")
    op, kernel = collective("all_reduce", 1 << 16), Gemm(m=64, n=64, k=64, dtype="fp32")
    group.load(op)
    rule = StoppingRule(max_s=0.2)
    rows = [
        beside_row(group, Point(kernel, beside=beside), "box", rule, NoMeter(), "torch")
        for beside in (None, op)
    ]
    assert [row["variant"] for row in rows] == ["", "beside_all_reduce_65536_bytes_2_ranks"]
    assert all(row["time_us"] > 0 for row in rows)
    assert (
        row_key(rows[1])
        == point_key(Point(kernel, beside=op))
        != row_key(rows[0])
        == point_key(Point(kernel))
    )


@pytest.mark.parametrize("size", [8, 64, 8192])
def test_every_rank_ends_with_the_right_numbers(group: RankGroup, size: int):
    def result(kind: CollectiveKind) -> tuple[list[np.ndarray], list[np.ndarray]]:
        op = collective(kind, size)
        group.load(op)
        group.ask("run", 2)  # which leaves the input as it was
        return buffers(op), group.values()

    held, values = result("all_reduce")
    assert all(np.array_equal(v, held[0] + held[1]) for v in values)
    held, values = result("all_gather")
    assert all(np.array_equal(v, np.concatenate(held)) for v in values)
    assert values[0].nbytes / 2 == size  # float64 copies of fp32: `bytes` is the gathered output
    held, values = result("reduce_scatter")
    assert np.array_equal(np.concatenate(values), held[0] + held[1])
    held, values = result("all_to_all")
    halves = [np.split(h, 2) for h in held]
    assert all(
        np.array_equal(v, np.concatenate([halves[0][r], halves[1][r]]))
        for r, v in enumerate(values)
    )
    held, values = result("send_recv")
    assert all(np.array_equal(v, held[rank - 1]) for rank, v in enumerate(values))


def test_a_collective_becomes_a_row(group: RankGroup, transport: Transport):
    rule = StoppingRule(
        half_width=0.5, min_repeats=2, max_repeats=2, max_s=1.0, interference_limit=0.99
    )
    row = collective_row(
        group, collective("all_reduce", 4096), "cpu", rule, transport.meter(), transport, "veth"
    )
    assert (row["collective"], row["bytes"], row["num_ranks"], row["num_nodes"]) == (
        "all_reduce",
        4096,
        2,
        1,
    )
    assert (row["algorithm"], row["interconnect"]) == ("gloo", "veth")
    assert row["software"].startswith(transport.package)
    assert row["software"].endswith("-gloo")
    assert row["time_us"] > 0


def test_failing_and_dying_ranks_are_named():
    with (
        RankGroup(RANKS) as group,
        pytest.raises(CalibrationError, match=r"rank [01]: no_such_request failed"),
    ):
        group.ask("no_such_request")
    with RankGroup(RANKS) as group:
        group._members[1].process.kill()
        group._members[1].process.join()
        with pytest.raises(CalibrationError, match="rank 1 ended unexpectedly"):
            group.ask("own_s")


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (collective("broadcast"), "broadcast"),
        (collective("all_reduce", dtype="fp8"), "fp8"),
        (collective("all_reduce", ranks_per_node=1), "ranks_per_node"),
        (collective("reduce_scatter", 20), "multiple of 8"),
        (collective("all_gather", 0), "multiple of 8"),
    ],
)
def test_refuses_what_local_ranks_cannot_run(op: Collective, message: str):
    with pytest.raises(PerfModelError, match=message):
        check_collective(op)


def test_refusals_come_before_any_process_starts():
    with pytest.raises(UnknownNameError, match="broadcast"):
        check_collective(collective("broadcast"))
    with pytest.raises(PerfModelError, match="2 to 64 ranks"):
        RankGroup(1)


def test_a_group_runs_only_collectives_of_its_size(group: RankGroup):
    with pytest.raises(PerfModelError, match="2 ranks"):
        group.load(collective("all_reduce", num_ranks=4, ranks_per_node=4))


def test_a_transfer_takes_what_the_side_that_came_last_saw():
    """DistSim section 4.2: it begins when the second of the calls is launched and ends when both
    return."""
    send = [[0.0, 5.0], [10.0, 12.0]]
    receive = [[3.0, 5.0], [7.0, 12.0]]
    assert transfer_time_s(send, receive).tolist() == [2.0, 2.0]  # pyright: ignore
    # the receiver's clock may be another
    shifted = [[100 + a, 100 + b] for a, b in receive]
    assert transfer_time_s(send, shifted).tolist() == [2.0, 2.0]  # pyright: ignore
    with pytest.raises(CalibrationError, match="two equal lists"):
        transfer_time_s(send, receive[:1])  # pyright: ignore
    with pytest.raises(CalibrationError, match="before it starts"):
        transfer_time_s([[1.0, 0.0]], [[0.0, 1.0]])  # pyright: ignore


@pytest.mark.parametrize(("kind", "wall_s"), [("send_recv", 4.0), ("all_reduce", 12.0)])
def test_a_group_counts_messages_so(
    kind: CollectiveKind, wall_s: float, monkeypatch: pytest.MonkeyPatch
):
    """Of a collective the slowest rank counts, from the start of its first call to the end of its
    last."""
    group = RankGroup(2)
    answers = {
        "load": [None] * 2,
        "own_s": [0.0] * 2,
        "run": [[(0.0, 5.0), (10.0, 12.0)], [(3.0, 5.0), (7.0, 12.0)]],
    }
    monkeypatch.setattr(group, "ask", lambda name, *_: answers[name])
    group.load(Collective(collective=kind, bytes=64, num_ranks=2, ranks_per_node=2, dtype="fp32"))
    assert group.sample(2, NoMeter()).wall_s == wall_s
