"""Collective tables in canonical form: what makes one series, links by name, exchanges of
experts."""

import numpy as np
import pandas as pd
import pytest

from perfmodel.cost.learn.collectives import collective_rows, ranks_fold
from perfmodel.cost.learn.collectives.expert_exchanges import (
    fit_moe_series,
    moe_curve,
    moe_prior,
    moe_rows,
    relative_moe_vector,
)
from perfmodel.cost.learn.collectives.links import link_class
from perfmodel.ingest import published_collectives


def _frame(**columns) -> pd.DataFrame:
    base = {
        "source": "s",
        "device": "A100",
        "interconnect": "NVSwitch",
        "collective": "all_reduce",
        "algorithm": "auto",
        "num_ranks": 8,
        "num_nodes": 1,
        "ranks_per_node": 8,
        "bytes": 1e6,
        "dtype": "fp16",
        "software": "nccl",
        "variant": "",
        "time_us": 10.0,
    }
    return pd.DataFrame(
        base | columns, index=range(max(len(v) for v in columns.values()) if columns else 1)
    )


def test_repeats_of_one_way_of_running_are_one_series():
    rows = collective_rows(
        _frame(variant=["in_place", "out_of_place", "4_concurrent_groups", "default;in_place", "x"])
    )
    assert rows.of_series("way").tolist() == ["", "", "", "default", "x"]


def test_placement_is_inferred_where_it_is_not_stated():
    rows = collective_rows(
        _frame(
            num_ranks=[4, 16, 32, 2],
            num_nodes=[np.nan, 2, np.nan, np.nan],
            ranks_per_node=[np.nan] * 4,
        )
    )
    assert rows.ranks_per_node.tolist() == [4, 8, 8, 2]


def test_a_send_is_a_pair_inside_a_node_or_one_rank_of_each_node():
    rows = collective_rows(
        _frame(collective=["send_recv"] * 4, num_ranks=[64, 2, 2, 64], ranks_per_node=[64, 2, 1, 8])
    )
    assert rows.ranks.tolist() == [2, 2, 2, 8]
    assert rows.ranks_per_node.tolist() == [2, 2, 1, 1]


def test_second_counts_and_doubtful_rows_are_not_clean():
    rows = collective_rows(_frame(in_place=[0, 1, 0], check=["", "", "degraded_fabric"]))
    assert rows.doubtful.tolist() == [False, True, True]


def test_checks_that_name_no_defect_are_clean():
    checks = [
        "device_inferred",
        "rounded_busbw",
        "tcp_fallback_example;device_inferred",
        "tcp_sockets_not_rdma",
    ]
    rows = collective_rows(_frame(check=checks))
    assert rows.doubtful.tolist() == [False, False, True, True]


def test_the_algorithm_that_a_run_was_held_to():
    names = [
        "auto",
        "ring",
        "tree",
        "nvls",
        "nvls_tree",
        "collnet_direct(SHARP)",
        "NCCL 2.0 MPI",
        "ring-neighbour",
    ]
    rows = collective_rows(_frame(algorithm=names))
    assert rows.algorithm.tolist() == ["", "ring", "tree", "nvls", "nvls_tree", "collnet", "", ""]
    assert rows.any_algorithm.tolist() == [True] + [False] * 7


def test_reductions_of_servers_are_direct_and_eager_ones_are_launched_by_the_host():
    ways = ["vLLM_custom_eager", "vLLM_custom_graph", "TRTLLM"]
    rows = collective_rows(_frame(algorithm=["custom"] * 3, variant=ways))
    assert rows.algorithm.tolist() == ["direct"] * 3
    assert rows.host_launches.tolist() == [True, False, False]
    assert not collective_rows(_frame()).host_launches.any()


def test_trays_of_a_rack_are_one_node():
    rows = collective_rows(
        _frame(
            num_ranks=[64, 72, 144, 144], ranks_per_node=[4, 4, 4, 72], nics_per_node=[4, 4, 4, 72]
        ).assign(device="GB200-NVL72", interconnect="NVL72-NVLink5", nic_gbit_per_s=400)
    )
    assert rows.ranks_per_node.tolist() == [64, 72, 72, 72]
    assert rows.between.tolist() == [False, False, True, True]
    assert {fabric.node_size for fabric in rows.fabric} == {72}
    assert {fabric.levels[1].bandwidth for fabric in rows.fabric} == {50e9}


def test_a_network_without_a_name_is_told_by_its_adapters():
    def rate(**more) -> float:
        row = _frame().assign(
            device="H100-SXM5-80GB", interconnect="NVLink4+carrier pigeon", num_ranks=16, **more
        )
        return collective_rows(row).fabric[0].levels[1].bandwidth

    assert rate(nics_per_node=4, nic_gbit_per_s=200) == 4 * 25e9 / 8
    assert rate(nics_per_node=8, nic_gbit_per_s=800) == 100e9
    # four of twelve adapters serve storage
    assert rate(nics_per_node=12, nic_gbit_per_s=400) == 50e9
    assert rate() == 50e9


def test_published_bus_bandwidths_as_a_table():
    table = published_collectives(
        pd.DataFrame(
            {
                "id": ["a-centre", "a-95th", "a-5th", "b"],
                "device": "V100-SXM2-32GB",
                "n_devices": 16,
                "n_nodes": 4,
                "link": "Omni-Path 4 links per node",
                "collective": ["all_reduce"] * 3 + ["all_gather"],
                "size_bytes": 1.6e9,
                "busbw_GBps": 10.0,
            }
        )
    )
    assert table["variant"].tolist() == ["a-centre", "b"]
    np.testing.assert_allclose(table["time_us"], [2 * 15e8 / 10e3, 15e8 / 10e3])
    assert set(table["nics_per_node"]) == {4}


@pytest.mark.parametrize(
    ("interconnect", "device", "between", "name"),
    [
        ("NVSwitch-NVLink3", "A100-SXM4-80GB", False, "NVLink3"),
        ("NVSwitch-DGX", "H100-80GB", False, "NVLink4"),
        ("NVL72-NVLink5", "GB300-NVL72", False, "NVLink5"),
        ("pairwise-NVLink-bridge+PCIe", "A40", False, "NVLink-bridge"),
        ("NVLink3-intra+Slingshot11-inter", "A100-SXM4-80GB", True, "Slingshot"),
        ("InfiniBand-NDR-inter", "GH200-96GB", True, "InfiniBand-NDR"),
        ("PCIe3/IB", "TitanX", True, "InfiniBand-HDR"),
        ("AWS EFA", "H100", True, "EFA"),
        ("NVSwitch-intra+RDMA-400G-inter", "H100", True, "unnamed-network"),
        ("NVLink4", "GH200-96GB", False, "NVLink4-mesh"),
        ("carrier pigeon", "H100", True, "unknown-inter"),
    ],
)
def test_links_by_name(interconnect, device, between, name):
    assert link_class(interconnect, device, between).name == name


def test_rank_counts_between_others_are_the_ones_left_out():
    rows = collective_rows(
        _frame(
            num_ranks=[2, 4, 8, 16, 32], num_nodes=[1, 1, 1, 2, 4], ranks_per_node=[2, 4, 8, 8, 8]
        )
    )
    assert (ranks_fold(rows) >= 0).tolist() == [False, True, False, False, False]


def _exchange(tokens: np.ndarray, device: str = "H100-SXM-80GB", **more) -> pd.DataFrame:
    base = {
        "software": "deepep",
        "device": device,
        "interconnect": "NVSwitch-NVLink4",
        "collective": "moe_dispatch",
        "mode": "normal",
        "num_nodes": 1,
        "tokens": tokens,
        "hidden": 7168,
        "topk": 8,
        "experts": 256,
        "sms": 24,
        "time_us": 1.0,
    }
    return pd.DataFrame(base | more)


def test_constants_of_exchanges_come_back_and_carry_to_relatives():
    tokens = 2.0 ** np.arange(1, 17)
    rows = moe_rows(pd.concat([_exchange(tokens, sms=s) for s in (4, 8, 24)], ignore_index=True))
    truth = np.log([30e-6, 200e9, 45e9, 15e9])
    known = fit_moe_series(rows.__class__(**{**vars(rows), "time_s": moe_curve(truth, rows)}))
    (vector,) = known.values()
    np.testing.assert_allclose(moe_curve(vector, rows), moe_curve(truth, rows), rtol=0.1)
    other = rows.keys[0]._replace(device="H200-SXM-141GB")
    np.testing.assert_allclose(relative_moe_vector(other, known), vector, atol=0.05)
    np.testing.assert_allclose(relative_moe_vector(other, {}), moe_prior(other))


def test_disturbed_exchanges_are_skipped():
    rows = moe_rows(_exchange(np.array([1.0, 2.0])).assign(variant=["", "suspect_interference"]))
    assert rows.skipped.tolist() == ["", "marked as suspect"]


def test_more_tokens_experts_per_token_or_nodes_take_longer():
    vector = moe_prior(moe_rows(_exchange(np.array([1.0]))).keys[0])
    one = np.array([4096.0])
    more = [_exchange(2 * one), _exchange(one, topk=16), _exchange(one, num_nodes=4)]
    rows = moe_rows(pd.concat([_exchange(one), *more]))
    base, *others = moe_curve(vector, rows)
    assert all(other > base for other in others)
