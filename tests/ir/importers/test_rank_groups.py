"""Replica groups in HLO's notations, and collectives placed on clusters."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.catalog import cluster
from perfmodel.errors import PerfModelError
from perfmodel.ir.importers import CollectiveRow, OpTable, axis_groups, parse_groups


def test_notations_agree():
    rows = ((0, 1, 2, 3), (4, 5, 6, 7))
    columns = ((0, 4), (1, 5), (2, 6), (3, 7))
    for text in (
        "{{0,1,2,3},{4,5,6,7}}",
        "[2,4]<=[8]",
        "mesh['a'=2,'b'=4] {'b'}",
        "mesh['a'=8] {'a':(2)4}",
    ):
        assert parse_groups(text, 8) == rows
    for text in (
        "{{0,4},{1,5},{2,6},{3,7}}",
        "[4,2]<=[2,4]T(1,0)",
        "mesh['a'=2,'b'=4] {'a'}",
        "mesh['a'=8] {'a':(1)2}",
        "mesh['b'=4,'a'=2], device_ids=([2,4]T(1,0)) {'a'}",
        "mesh['b'=4,'a'=2], device_ids=([0,4,1,5,2,6,3,7]) {'a'}",
    ):
        assert parse_groups(text, 8) == columns
    assert parse_groups("", 3) == parse_groups("{}", 3) == ((0, 1, 2),)


@given(sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4), data=st.data())
def test_groups_along_axes(sizes, data):
    """Two ranks share a group if and only if they agree on all other axes."""
    names = [f"a{i}" for i in range(len(sizes))]
    wanted = set(data.draw(st.lists(st.sampled_from(names), unique=True, min_size=1)))
    places = dict(enumerate(itertools.product(*map(range, sizes))))
    expected = {}
    for rank, place in places.items():
        key = tuple(p for name, p in zip(names, place, strict=True) if name not in wanted)
        expected.setdefault(key, set()).add(rank)
    found = axis_groups(dict(zip(names, sizes, strict=True)), [n for n in names if n in wanted])
    assert sorted(map(sorted, found)) == sorted(map(sorted, expected.values()))


def test_an_unknown_axis_is_named():
    with pytest.raises(PerfModelError, match="mesh axis 'tp'"):
        axis_groups({"x": 2}, ["tp"])


def test_groups_on_a_cluster_of_nodes_of_eight():
    dgx = cluster("dgx-h100")

    def placed(groups, kind="all_reduce"):
        op = CollectiveRow(kind, 1e6, tuple(map(tuple, groups)), "bf16", "x").on(dgx)
        return op.num_ranks, op.ranks_per_node, op.concurrent

    assert placed([range(8), range(8, 16)]) == (8, 8, 1)
    assert placed([range(16)]) == (16, 8, 1)
    assert placed([(i, i + 8) for i in range(8)]) == (2, 1, 8)
    assert placed([(0, 1, 8, 9), (2, 3, 10, 11)]) == (4, 2, 2)
    ring = [(i, (i + 1) % 16) for i in range(16)]
    assert placed(ring, "send_recv") == (2, 1, 2)  # in and out of each node
    with pytest.raises(PerfModelError, match="a larger cluster"):
        placed([(0, dgx.capacity)])


def test_collectives_wait_for_their_ranks_as_in_predictions():
    """Networks that add a latency per rank of a ring add it to imported collectives too."""
    here = cluster("aws-p4d")
    without = replace(
        here, levels=tuple(replace(level, rank_latency_s=0.0) for level in here.levels)
    )
    row = CollectiveRow("all_reduce", 1e8, (tuple(range(16)),), "bf16", "x")
    table = OpTable(name="reduction", kernels=(), collectives=(row,), n_devices=16)
    times = [table.predict(where).collective_time_s for where in (here, without)]
    assert times[0] - times[1] == pytest.approx(15 * here.levels[1].rank_latency_s)
