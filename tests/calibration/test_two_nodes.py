import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.calibration import distsim_all_reduce_time, reachable
from perfmodel.ops import Collective
from perfmodel.units import dtype_bytes

CLUSTER = catalog.cluster("dgx-a100")


def collective(
    kind: str, ranks: int, per_node: int, n_bytes: float = 2.0**24, **changes
) -> Collective:
    return Collective(
        collective=kind, bytes=n_bytes, num_ranks=ranks, ranks_per_node=per_node, **changes
    )  # pyright: ignore


def test_what_fits_is_measured_as_it_is_but_alone():
    found = reachable(collective("all_reduce", 8, 4, concurrent=2, level=1), CLUSTER)
    assert found.exact
    assert found.ops == (collective("all_reduce", 8, 4, level=1),)


def test_all_reduce_beyond_eight_ranks_is_measured_at_eight_and_four():
    # DistSim section 4.2: 8 ranks stand for more; here as many to a node as the group has and may
    # have
    found = reachable(collective("all_reduce", 64, 8, level=1), CLUSTER)
    assert not found.exact
    assert [(op.num_ranks, op.ranks_per_node) for op in found.ops] == [(8, 4), (4, 2)]
    inside = reachable(collective("all_reduce", 16, 16), catalog.cluster("dgx-a100"))
    assert [(op.num_ranks, op.ranks_per_node) for op in inside.ops] == [(8, 8), (4, 4)]


def test_other_collectives_of_many_nodes_use_both_nodes_fully():
    found = reachable(collective("all_gather", 64, 8, level=1), CLUSTER)
    assert [(op.num_ranks, op.ranks_per_node) for op in found.ops] == [(16, 8), (8, 4)]
    single = reachable(collective("all_gather", 16, 1, level=1), CLUSTER)
    assert [(op.num_ranks, op.ranks_per_node) for op in single.ops] == [(2, 1)]


@given(
    st.sampled_from(["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]),
    st.integers(1, 8),
    st.integers(1, 40),
    st.floats(1, 1e9),
    st.sampled_from(["bf16", "fp32"]),
)
def test_every_measurement_fits_two_nodes_and_splits_evenly(kind, per_node, nodes, n_bytes, dtype):
    if per_node * nodes < 2:
        return
    op = collective(kind, per_node * nodes, per_node, n_bytes, dtype=dtype)
    found = reachable(op, CLUSTER)
    assert found.ops
    for part in found.ops:
        assert 2 <= part.num_ranks <= min(op.num_ranks, 16)
        assert part.num_nodes <= 2
        assert part.concurrent == 1
        assert part.bytes % (part.num_ranks * dtype_bytes(dtype)) == 0
        assert kind != "all_reduce" or part.num_ranks <= 8


def test_send_recv_between_nodes_needs_two():
    hop = collective("send_recv", 2, 1, level=1, concurrent=8)
    assert reachable(hop, CLUSTER).ops == (collective("send_recv", 2, 1, level=1),)
    assert reachable(hop, CLUSTER).exact


@pytest.mark.parametrize("kind", ["all_reduce", "all_gather"])
def test_one_node_holds_no_more_than_its_devices(kind):
    for part in reachable(collective(kind, 64, 8, level=1), CLUSTER, nodes=1).ops:
        assert part.num_nodes == 1
        assert part.num_ranks <= 8


def test_distsim_extrapolation_is_the_bandwidth_part_of_the_ring():
    """DistSim section 4.2: exact where latency is nothing, and constant for many devices."""
    ring = lambda n: 2 * (n - 1) / n * 1e9 / 20e9  # noqa: E731
    for n in (8, 9, 16, 1024):
        assert distsim_all_reduce_time(ring(8), n) == pytest.approx(ring(n), rel=1e-12)
