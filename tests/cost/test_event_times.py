"""Times of events as records: rows, parts, floors and ceilings."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from perfmodel import catalog
from perfmodel.cost import EventTimes, event_times
from perfmodel.ops import Collective, Gemm


def times(*seconds: float, provenance: str = "measured") -> EventTimes:
    time_s = np.array(seconds)
    return EventTimes(time_s, 0.5 * time_s, 2.0 * time_s, (provenance,) * len(seconds))


def test_rows_and_back() -> None:
    found = times(1.0, 2.0)
    rows = list(found.rows())
    assert rows == [(1.0, 0.5, 2.0, "measured"), (2.0, 1.0, 4.0, "measured")]
    again = EventTimes.of_rows([(*row, "more") for row in rows])
    assert list(again.rows()) == rows
    assert EventTimes.of_rows([]).time_s.shape == (0,)


def test_parts_are_put_where_they_belong() -> None:
    found = EventTimes.together(
        3, [([2, 0], times(1.0, 2.0)), ([1], times(3.0, provenance="learned"))]
    )
    assert found.time_s.tolist() == [2.0, 3.0, 1.0]
    assert found.hi_s.tolist() == [4.0, 6.0, 2.0]
    assert found.provenance == ("measured", "learned", "measured")


def test_scaled_and_longer_times_take_their_intervals_with_them() -> None:
    by = np.array([2.0, 3.0])
    scaled, longer = times(1.0, 2.0).scaled(by), times(1.0, 2.0).plus(by)
    assert [scaled.time_s.tolist(), scaled.lo_s.tolist(), scaled.hi_s.tolist()] == [
        [2, 6],
        [1, 3],
        [4, 12],
    ]
    assert [longer.time_s.tolist(), longer.lo_s.tolist(), longer.hi_s.tolist()] == [
        [3, 5],
        [2.5, 4],
        [4, 7],
    ]


@pytest.mark.parametrize(
    ("bound", "kept_at_least", "kept_at_most"), [(1.5, [False, True], [True, False])]
)
def test_bounds_replace_what_lies_beyond_them(
    bound: float, kept_at_least: list, kept_at_most: list
) -> None:
    found, bounds = times(1.0, 2.0), times(bound, bound, provenance="analytical")
    for limited, kept in (
        (found.at_least([0, 1], bounds), kept_at_least),
        (found.at_most([0, 1], bounds), kept_at_most),
    ):
        expected = [own if keep else bound for own, keep in zip((1.0, 2.0), kept, strict=True)]
        assert limited.time_s.tolist() == expected
        assert limited.lo_s.tolist() == [0.5 * one for one in expected]
        assert limited.provenance == tuple("measured" if keep else "analytical" for keep in kept)
    assert found.at_least([1], times(5.0)).time_s.tolist() == [1.0, 5.0]
    assert found.replaced([0], times(9.0, provenance="learned")).time_s.tolist() == [9.0, 2.0]


class OfBytes:
    """Collectives that take a second per byte."""

    def times(self, cluster: Any, ops: Any) -> EventTimes:
        return times(*(op.bytes for op in ops))


class OfRows:
    """Kernels that take a second per row."""

    def times(self, device: Any, ops: Any) -> EventTimes:
        return times(*(float(op.m) for op in ops))


def collective(
    n_bytes: float, ranks: int, per_node: int, kind: str = "all_reduce", relayed: float = 0.0
) -> Collective:
    return Collective(
        collective=kind,  # pyright: ignore[reportArgumentType]
        bytes=n_bytes,
        num_ranks=ranks,
        ranks_per_node=per_node,
        level=int(ranks > per_node),
        relayed_bytes=relayed,
    )


CLUSTER = catalog.cluster("dgx-h100")


def priced(*ops: Any, **level: float) -> list[float]:
    between = replace(CLUSTER.levels[1], **level)
    cluster = replace(CLUSTER, levels=(CLUSTER.levels[0], between))
    return event_times(ops, cluster, OfRows(), OfBytes()).time_s.tolist()


def test_kernels_and_collectives_keep_their_order() -> None:
    ops = (collective(7.0, 8, 8), Gemm(m=3, n=1, k=1), collective(5.0, 16, 8), Gemm(m=2, n=1, k=1))
    assert priced(*ops, contention=0.0, rank_latency_s=0.0) == [7.0, 3.0, 5.0, 2.0]
    assert priced(contention=0.0) == []
    assert priced(ops[1]) == [3.0]


def test_nodes_contend_with_a_power_of_their_number_and_ranks_of_rings_wait_for_each_other() -> (
    None
):
    inside, between = collective(7.0, 8, 8), collective(5.0, 32, 8)
    assert priced(inside, between, contention=0.5, rank_latency_s=0.0) == [7.0, 5.0 * 4**0.5]
    assert priced(inside, between, contention=0.0, rank_latency_s=0.1) == pytest.approx(
        [7.0, 5.0 + 31 * 0.1]
    )
    for kind, waits in (
        ("all_gather", 1),
        ("reduce_scatter", 1),
        ("broadcast", 1),
        ("all_to_all", 0),
        ("send_recv", 0),
    ):
        op = collective(5.0, 32, 8, kind)
        assert priced(op, contention=0.0, rank_latency_s=0.1) == pytest.approx(
            [5.0 + waits * 31 * 0.1]
        )


def test_what_nodes_hand_on_inside_takes_its_time() -> None:
    """No less than the relayed bytes among the ranks of a node; nothing where a node has one of
    them."""
    for relayed, expected in ((3.0, 5.0), (9.0, 9.0)):
        op = collective(5.0, 32, 8, "all_to_all", relayed)
        assert priced(op, contention=0.0, rank_latency_s=0.0) == [expected]
    alone = collective(5.0, 32, 1, "all_to_all", 9.0)
    assert priced(alone, contention=0.0, rank_latency_s=0.0) == [5.0]
