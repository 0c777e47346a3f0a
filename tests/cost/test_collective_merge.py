"""A site's fit stands beside the shipped one: on its own fabric and kind it counts, nowhere
else."""

import numpy as np
import pandas as pd
import pytest

from perfmodel import catalog
from perfmodel.cost import CollectiveModel
from perfmodel.cost.learn import fit_calibration, weight_files
from perfmodel.cost.learn.collectives import collective_weights
from perfmodel.ops import Collective

KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send_recv", "broadcast")
SIZE = 2.0 ** np.arange(10, 31)


def log(
    device: str, links: str, kind: str, bus: float, ranks: int = 8, per_node: int = 8
) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "source": "site",
            "device": device,
            "interconnect": links,
            "collective": kind,
            "algorithm": "auto",
            "num_ranks": ranks,
            "ranks_per_node": per_node,
            "bytes": SIZE,
            "dtype": "fp32",
            "software": "nccl",
            "variant": "",
            "time_us": 30 + 1.75e6 * SIZE / bus,
        }
    )


def ops(kind: str, devices: int) -> list[Collective]:
    counts = (
        [(2, 2)]
        if kind == "send_recv"
        else [(2, 2), (4, 4), (8, 4), (8, 8), (16, 8), (64, 8), (64, 1)]
    )
    return [
        Collective(collective=kind, bytes=size, num_ranks=n, ranks_per_node=r, level=int(n > r))
        for n, r in counts
        if n <= devices
        for size in (1e4, 1e7, 1e9)
    ]


LOGS = {
    "inside": (
        log("A100-SXM4-80GB", "NVLink3 NVSwitch", "all_reduce", 150e9),
        {("dgx-a100", "all_reduce")},
    ),
    "between": (
        log("A100-SXM4-80GB", "NVLink3 + InfiniBand HDR", "all_gather", 120e9, 16, 8),
        {("dgx-a100", "all_gather")},
    ),
    "another name of the device": (
        log("A100-80GB", "NVSwitch-DGX", "reduce_scatter", 150e9),
        {("dgx-a100", "reduce_scatter")},
    ),
    "a device that was never measured": (
        log("MI300X", "XGMI", "all_reduce", 200e9),
        {("mi300x-platform", "all_reduce")},
    ),
}


def times_s(model: CollectiveModel) -> dict[tuple[str, str], np.ndarray]:
    """Of every kind of collective on every cluster of the catalog."""
    seconds = {}
    for name in catalog.clusters():
        cluster = catalog.cluster(name)
        for kind in KINDS:
            seconds[name, kind] = model.times(cluster, ops(kind, cluster.capacity)).time_s
    return seconds


@pytest.fixture(scope="module")
def shipped_s() -> dict[tuple[str, str], np.ndarray]:
    return times_s(CollectiveModel.load())


# two logs of different devices or kinds are fitted together: what one moves is none of the other's
@pytest.mark.parametrize(
    "names",
    [("inside", "another name of the device"), ("between", "a device that was never measured")],
    ids=" and ".join,
)
def test_only_the_measured_fabric_and_kind_move(
    names: tuple[str, ...], shipped_s: dict, tmp_path
) -> None:
    fit_calibration([LOGS[name][0] for name in names], tmp_path)
    touched = set[tuple[str, str]]().union(*(LOGS[name][1] for name in names))
    after_s = times_s(CollectiveModel.load(tmp_path))
    moved = {key for key in after_s if not np.array_equal(after_s[key], shipped_s[key])}
    same_fabric = {(c, k) for c in ("generic", "jean-zay-a100") for k in KINDS} | {
        (c, "broadcast") for c, _ in touched
    }
    assert touched <= moved
    assert moved <= touched | same_fabric


def test_measured_times_come_back_and_others_are_as_shipped(tmp_path) -> None:
    table, _ = LOGS["inside"]
    fit_calibration(table, tmp_path)
    model, cluster = CollectiveModel.load(tmp_path), catalog.cluster("dgx-a100")
    sizes = SIZE[-8:]
    found = model.times(
        cluster,
        [
            Collective(collective="all_reduce", bytes=s, num_ranks=8, ranks_per_node=8, level=0)
            for s in sizes
        ],
    )
    np.testing.assert_allclose(found.time_s, 1e-6 * table["time_us"][-8:], rtol=0.05)
    assert set(found.provenance) == {"measured"}
    np.testing.assert_allclose(model.table_times(table).time_s, 1e-6 * table["time_us"], rtol=0.05)


def test_every_shipped_series_is_kept_and_the_report_says_which_are_replaced(tmp_path) -> None:
    table, _ = LOGS["inside"]
    report = fit_calibration(table, tmp_path)["collectives"]
    shipped = collective_weights(weight_files(None))
    merged = collective_weights(weight_files(tmp_path))
    assert set(shipped.series) < set(merged.series)
    assert report["kept"] == len(shipped.series) + len(shipped.moe.series)
    ((fabric, names),) = report["replaced"].items()
    assert fabric == "all_reduce on A100-SXM4-80GB, NVLink3 inside a node"
    assert "aiconfigurator|A100-SXM4-80GB|NVSwitch-NVLink3|all_reduce|auto|nccl-tests" in names
    rows = pd.DataFrame(
        {
            "source": "vtrain",
            "device": "V100-SXM",
            "interconnect": "NVLink2",
            "collective": "all_reduce",
            "algorithm": "auto",
            "num_ranks": 4,
            "ranks_per_node": 4,
            "bytes": SIZE,
        }
    )
    before, after = (CollectiveModel(weights).table_times(rows) for weights in (shipped, merged))
    np.testing.assert_array_equal(before.time_s, after.time_s)


def test_a_measured_table_of_mixed_kinds_says_all(tmp_path) -> None:
    a100 = ("A100-SXM4-80GB", "NVLink3 NVSwitch")
    report = fit_calibration(
        [log(*a100, kind, 150e9) for kind in ("all_gather", "all_to_all")], tmp_path
    )
    assert len(report["collectives"]["replaced"]) == 2
    assert report["collectives"]["series"] == 2


def test_a_forced_algorithm_counts_where_nothing_else_was_measured(tmp_path) -> None:
    table, _ = LOGS["inside"]
    fit_calibration(table.assign(algorithm="ring", variant="NCCL_ALGO=Ring"), tmp_path)
    op = Collective(collective="all_reduce", bytes=1e9, num_ranks=8, ranks_per_node=8, level=0)
    found = CollectiveModel.load(tmp_path).times(catalog.cluster("dgx-a100"), [op])
    assert found.time_s[0] == pytest.approx(30e-6 + 1.75e9 / 150e9, rel=0.1)
