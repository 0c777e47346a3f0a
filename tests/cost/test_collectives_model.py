"""Collectives on clusters: sensible for any of them, smooth, shared links, fast."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from perfmodel import catalog
from perfmodel.cost import CollectiveModel
from perfmodel.cost.learn.collectives import NODES, RANKS, collective_rows, set_aside
from perfmodel.ops import Collective, CollectiveKind
from perfmodel.spec import Cluster, Device, NetworkLevel, PeakRates

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
PROVENANCE = {"measured", "learned", "analytical", "extrapolated"}


def cluster(
    device: str = "A100-SXM4-80GB",
    link: str = "NVLink3",
    link_gb: float = 300,
    node: int = 8,
    network: str = "InfiniBand HDR",
    network_gb: float = 25,
    latency_us: float = 5,
) -> Cluster:
    """A two-level cluster; bandwidths in GB/s per device."""
    gpu = Device(
        name=device,
        vendor="v",
        architecture="a",
        memory_bytes=8e10,
        memory_bandwidth_bytes_per_s=2e12,
        peak=PeakRates(bf16=3e14),
        compute_units=108,
        clock_hz=1.4e9,
        l2_bytes=4e7,
        link_bandwidth_bytes_per_s=link_gb * 1e9,
    )
    levels = (
        NetworkLevel(name=link, size=node, bandwidth_bytes_per_s=link_gb * 1e9, latency_s=2e-6),
        NetworkLevel(
            name=network,
            size=node * 8192,
            bandwidth_bytes_per_s=network_gb * 1e9,
            latency_s=latency_us * 1e-6,
        ),
    )
    return Cluster(name="test", device=gpu, levels=levels)


def op(kind: str, size: float, ranks: int, per_node: int, concurrent: int = 1) -> Collective:
    return Collective(
        collective=kind,
        bytes=size,
        num_ranks=ranks,
        ranks_per_node=per_node,
        level=int(ranks > per_node),
        concurrent=concurrent,
    )


@pytest.fixture(scope="module", name="model")
def _model() -> CollectiveModel:
    return CollectiveModel.load()


def bus_gb(
    model: CollectiveModel, where: Cluster, kind: str, ranks: int, per_node: int, size: float = 1e9
) -> float:
    """Bus bandwidth as nccl-tests reports it, GB/s."""
    factor = {"all_reduce": 2 * (ranks - 1) / ranks, "send_recv": 1.0}.get(
        kind, (ranks - 1) / ranks
    )
    return factor * size / model.times(where, [op(kind, size, ranks, per_node)]).time_s[0] / 1e9


ANY_CLUSTER = [
    cluster(),
    cluster("H100-SXM5-80GB", "NVLink4", 450, 8, "InfiniBand NDR", 50),
    cluster("H100-SXM5-80GB", "NVLink4", 450, 8, "AWS EFA", 50, 15),
    cluster("V100-SXM2-32GB", "NVLink2", 150, 8, "InfiniBand EDR", 12.5 / 8),
    cluster("A40", "PCIe4", 32, 4, "InfiniBand HDR", 6.25),
    cluster("GB300-NVL72", "NVLink5", 900, 72, "InfiniBand XDR", 100),
    cluster("MI300X", "XGMI", 448, 8, "RoCE 400G", 50),
    cluster("TPU-v5p", "ICI", 600, 1, "DCN", 3),
    cluster("toaster", "bread", 1, 2, "string", 0.1, 1000),
]


@pytest.mark.parametrize("where", ANY_CLUSTER, ids=lambda c: f"{c.device.name}-{c.levels[1].name}")
@pytest.mark.parametrize("kind", KINDS)
def test_every_cluster_gets_finite_smooth_times(model, where, kind):
    node = where.devices_per_node
    for ranks, per_node in (
        (2, min(2, node)),
        (node, node),
        (2 * node, node),
        (64 * node, 1),
        (8192, node),
    ):
        if per_node > ranks or ranks < 2 or (kind == "send_recv" and ranks > 2):
            continue
        sizes = np.geomspace(1.0, 1e11, 300)
        times = model.times(where, [op(kind, s, ranks, per_node) for s in sizes])
        assert np.all(np.isfinite(times.time_s))
        assert np.all(times.time_s > 5e-7)
        assert np.all((times.lo_s <= times.time_s) & (times.time_s < times.hi_s))
        assert set(times.provenance) <= PROVENANCE
        steps = np.diff(np.log(times.time_s))
        # 9 % more bytes: never a jump, and never faster by more than a protocol change explains
        assert steps.max() < 0.35
        assert steps.min() > -0.15
        assert times.time_s[-1] > 3 * times.time_s[0]


def test_one_rank_is_free_and_no_ops_are_no_times(model):
    times = model.times(cluster(), [op(kind, 1e6, 1, 1) for kind in KINDS])
    assert np.all(times.time_s == 0)
    assert len(model.times(cluster(), []).time_s) == 0


def test_large_messages_reach_measured_bus_bandwidths(model):
    """nccl-tests in the public tables: A100 222-237 GB/s (8 ranks), H100 about 445 (8 ranks, 0.5
    GB); between nodes 85 to 97 % of line rate on healthy InfiniBand."""
    a100, h100 = cluster(), cluster("H100-SXM-80GB", "NVLink4", 450, 8, "InfiniBand NDR", 50)
    assert 205 <= bus_gb(model, a100, "all_reduce", 8, 8) <= 245
    assert 340 <= bus_gb(model, h100, "all_reduce", 8, 8) <= 480
    assert 300 <= bus_gb(model, h100, "all_gather", 8, 8) <= 380
    assert bus_gb(model, a100, "send_recv", 2, 1) * 1.2 >= 0.8 * 25
    assert bus_gb(model, a100, "send_recv", 2, 1) < 25
    assert 0.75 * 200 <= bus_gb(model, a100, "all_gather", 64, 8, 4e9) <= 200
    assert 0.75 * 25 <= bus_gb(model, a100, "all_reduce", 64, 1, 4e9) <= 25


def test_small_messages_have_real_latencies(model):
    small = [op(kind, 1024.0, 8, 8) for kind in KINDS[:4]]
    assert np.all(((t := model.times(cluster(), small).time_s) > 3e-6) & (t < 60e-6))
    far = model.times(
        cluster(), [op("all_reduce", 1024.0, 64, 8), op("all_reduce", 1024.0, 1024, 8)]
    ).time_s
    assert 25e-6 < far[0] < far[1] < 400e-6


def test_groups_that_share_links_wait_for_one_another(model):
    shared = cluster("V100-SXM2-32GB", "NVLink2", 150, 8, "InfiniBand EDR", 12.5 / 8)
    times = model.times(shared, [op("all_reduce", 1e9, 4, 1, c) for c in (1, 2, 4, 8)]).time_s
    np.testing.assert_allclose(times[1:] / times[:-1], 2.0, rtol=0.05)
    own = model.times(cluster(), [op("all_reduce", 1e9, 4, 1, c) for c in (1, 8)]).time_s
    np.testing.assert_allclose(own[0], own[1], rtol=1e-9)  # eight adapters, one per device


def test_a_node_joined_by_a_network_s_ports_is_a_node(model):
    # Gaudi: ports of the die join the cards of a server, and have the name of a network
    gaudi = cluster(
        link="21x 100 GbE RoCE", link_gb=262.5, network="3x 100 GbE RoCE", network_gb=37.5
    )
    alone, beside = (
        model.times(gaudi, [op("all_reduce", 1e9, 16, 1, n)]).time_s[0] for n in (1, 8)
    )
    assert beside == pytest.approx(alone)  # each card has ports of its own
    assert bus_gb(model, gaudi, "all_reduce", 16, 1) > 0.7 * 37.5


def test_bandwidth_and_latency_of_the_cluster_count(model):
    base, wide = cluster(), cluster(network_gb=50)
    slow = cluster(latency_us=50)
    big, small = op("all_gather", 4e9, 64, 1, 8), op("all_reduce", 1024.0, 64, 8)
    assert model.times(base, [big]).time_s[0] / model.times(wide, [big]).time_s[0] == pytest.approx(
        1.9, abs=0.2
    )
    assert model.times(slow, [small]).time_s[0] > 2 * model.times(base, [small]).time_s[0]


def test_third_level_narrows_what_crosses_it(model):
    two = cluster()
    pods = (
        *two.levels,
        NetworkLevel(
            name="InfiniBand HDR", size=8 * 8192 * 4, bandwidth_bytes_per_s=5e9, latency_s=5e-6
        ),
    )
    three = Cluster(name="pods", device=two.device, levels=pods)
    near = Collective(collective="all_gather", bytes=4e9, num_ranks=64, ranks_per_node=8, level=1)
    far = Collective(collective="all_gather", bytes=4e9, num_ranks=64, ranks_per_node=8, level=2)
    times = model.times(three, [near, far]).time_s
    assert times[0] == pytest.approx(model.times(two, [near]).time_s[0], rel=1e-9)
    assert times[1] > 4 * times[0]


@given(
    kind=st.sampled_from(KINDS),
    size=st.floats(1, 1e11),
    log_ranks=st.integers(1, 13),
    concurrent=st.integers(1, 8),
)
@settings(max_examples=60, deadline=None)
def test_more_bytes_or_sharing_never_help_much(kind, size, log_ranks, concurrent):
    model, ranks = _shared_model(), 2**log_ranks
    ranks = 2 if kind == "send_recv" else ranks
    per_node = min(ranks, 4)
    once, twice, crowded = model.times(
        cluster(),
        [
            op(kind, size, ranks, per_node),
            op(kind, 2 * size, ranks, per_node),
            op(kind, size, ranks, per_node, concurrent),
        ],
    ).time_s
    assert twice > 0.85 * once
    assert crowded > 0.9 * once


_LOADED: list[CollectiveModel] = []


def _shared_model() -> CollectiveModel:
    if not _LOADED:
        _LOADED.append(CollectiveModel.load())
    return _LOADED[0]


def test_unknown_rows_are_skipped_with_a_reason(model):
    table = pd.DataFrame(
        {
            "source": "x",
            "device": "A100-SXM4-80GB",
            "interconnect": "NVLink3",
            "collective": [
                "all_reduce",
                "gather",
                "all_reduce",
                "all_reduce",
                "moe_dispatch",
                "all_reduce",
            ],
            "num_ranks": [8, 8, np.nan, 8, 8, 8],
            "bytes": [1e6, 1e6, 1e6, np.nan, np.nan, 1e6],
            "tokens": [np.nan] * 6,
            "time_us": 1.0,
        }
    )
    times = model.table_times(table)
    assert np.isfinite(times.time_s).tolist() == [True, False, False, False, False, True]
    assert times.provenance[1] == "skipped: collective 'gather' is not modelled"
    assert times.provenance[2] == "skipped: no num_ranks"
    assert times.provenance[3] == "skipped: no bytes"
    assert times.provenance[4] == "skipped: no tokens"
    assert len(model.table_times(table.iloc[:0]).time_s) == 0
    assert (
        model.table_times(pd.DataFrame({"collective": ["all_reduce"]}))
        .provenance[0]
        .startswith("skipped")
    )


@pytest.mark.shared
def test_measured_tables_are_honoured(model, data_dir):
    """Rows that the shipped weights were fitted to come back, and their intervals cover them."""
    errors, covered = [], []
    for name in (
        "aiconfigurator/collective_nccl",
        "vtrain/collective",
        "aiconfigurator/moe_alltoall",
    ):
        table = pd.read_csv(data_dir / f"{name}.csv.gz", low_memory=False).sample(
            400, random_state=0
        )
        if "moe" not in name:
            table = table[set_aside(collective_rows(table)) == ""]
        times = model.table_times(table)
        errors.append(np.abs(times.time_s * 1e6 / table["time_us"] - 1).mean())
        covered.append(
            np.mean((times.lo_s * 1e6 <= table["time_us"]) & (table["time_us"] <= times.hi_s * 1e6))
        )
    assert max(errors) < 0.05
    assert min(covered) > 0.85


@pytest.mark.shared
def test_a_large_machine_never_fitted_is_predicted_within_a_factor(model, data_dir):
    """Alps (GH200, Slingshot, 4 to 1024 ranks) states no licence: it validates, it never trains."""
    table = pd.read_csv(data_dir / "alps_gh200" / "collective.csv.gz")
    table = table[(table["variant"] == "default;out_of_place") & (table["bytes"] >= 1 << 22)]
    where = cluster("GH200-96GB", "NVLink4", 450, 4, "Slingshot 11", 25, 5)
    ops = [
        op("all_reduce", b, n, r)
        for b, n, r in table[["bytes", "num_ranks", "ranks_per_node"]].to_numpy()
    ]
    ratio = model.times(where, ops).time_s * 1e6 / table["time_us"].to_numpy()
    assert np.median(np.abs(np.log(ratio))) < np.log(1.6)


@pytest.mark.parametrize("name", ["dgx-h100", "l40s-x8", "alps", "dgx-1v"])
@pytest.mark.parametrize("kind", ["all_reduce", "all_gather", "all_to_all"])
def test_twice_the_latency_takes_at_most_twice_as_long(name: str, kind: CollectiveKind) -> None:
    cluster = catalog.cluster(name)
    slower = replace(
        cluster, levels=tuple(replace(x, latency_s=2 * x.latency_s) for x in cluster.levels)
    )
    node = cluster.devices_per_node
    ops = [
        Collective(
            collective=kind,
            bytes=2.0**size,
            num_ranks=n,
            ranks_per_node=min(n, node),
            level=int(n > node),
        )
        for n in (2, node, 4 * node)
        if n <= cluster.capacity
        for size in range(8, 31)
    ]
    before, after = (CollectiveModel.load().times(one, ops).time_s for one in (cluster, slower))
    assert (after >= before * (1 - 1e-9)).all()
    assert (after <= 2 * before * (1 + 1e-9)).all()


def test_prices_are_computed_at_the_sizes_that_groups_have() -> None:
    """Even numbers, then multiples of 4 and of 8: parts of usual nodes. In between prices are
    interpolated."""
    even, fours, eights = set(range(2, 21, 2)), set(range(4, 41, 4)), set(range(8, 73, 8))
    assert set(RANKS) == {3, 5, 7, 96} | even | fours | eights | {2**k for k in range(1, 15)}
    assert set(NODES) == {2**k for k in range(18)} | {3 * 2**k for k in range(5)}
    for counts in (RANKS, NODES):
        steps = counts[1:] / counts[:-1]
        assert (steps > 1).all()
        assert (steps <= 2).all()
