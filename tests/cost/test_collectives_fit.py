"""Fitting from tables: known constants come back, small tables do, files fail closed."""

import json

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save, save_file

from perfmodel import catalog
from perfmodel.cost import CollectiveModel
from perfmodel.cost.learn import weight_files
from perfmodel.cost.learn.collectives import (
    FILE_NAME,
    LinkConstants,
    collective_rows,
    collective_time,
    collective_weights,
    fit_physics,
    physical_time,
)
from perfmodel.cost.learn.collectives.links import TierConstants
from perfmodel.cost.learn.training import fit_collectives
from perfmodel.errors import CalibrationError, TableError
from perfmodel.files import UNSEALED, sealed
from perfmodel.ops import Collective

TRUE = LinkConstants(
    inside=TierConstants(
        hop_s=0.9e-6,
        hop_full_s=4e-6,
        hop_line_s=2e-6,
        latency_shift_s=0.0,
        usual_latency_s=2e-6,
        bytes_per_s=180e9,
    ),
    between=TierConstants(
        hop_s=7e-6,
        hop_full_s=15e-6,
        hop_line_s=9e-6,
        latency_shift_s=0.0,
        usual_latency_s=5e-6,
        bytes_per_s=21e9,
    ),
    launch_s=8e-6,
    hop_switch_s=5e-6,
    line_share=0.92,
    peer_s=3e-6,
    low_latency_share=0.4,
    peer_exponent=0.0,
    node_exponent=0.03,
    switch_share=0.0,
    network_share=0.0,
    tree_share=0.8,
    neighbour_share=0.4,
    post_s=1.4e-6,
    eager_bytes=1e30,
)


def _table(
    kind: str = "all_reduce", device: str = "A100-SXM4-80GB", noise: float = 0.01
) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    frames = []
    for ranks, per_node in ((2, 2), (4, 4), (8, 8), (16, 8), (32, 8)):
        size = 2.0 ** np.arange(10, 31)
        time_s = collective_time(kind, size, float(ranks), float(per_node), TRUE)
        frames.append(
            pd.DataFrame(
                {
                    "source": "lab",
                    "device": device,
                    "interconnect": "NVLink3 + InfiniBand HDR",
                    "collective": kind,
                    "algorithm": "auto",
                    "num_ranks": ranks,
                    "num_nodes": -(-ranks // per_node),
                    "ranks_per_node": per_node,
                    "bytes": size,
                    "dtype": "fp32",
                    "software": "nccl",
                    "variant": "",
                    "time_us": time_s * 1e6 * np.exp(generator.normal(0, noise, len(size))),
                }
            )
        )
    return pd.concat(frames, ignore_index=True)


def _gloo(rows: int = 20) -> pd.DataFrame:
    """A round trip per ring step at 1.2 GB/s, as four local processes over gloo behave."""
    size = np.geomspace(1e3, 1e8, rows)
    time_s = 2 * 3 * 60e-6 + 1.5 * size / 1.2e9
    return pd.DataFrame(
        {
            "device": "CPU",
            "interconnect": "gloo loopback",
            "collective": "all_reduce",
            "num_ranks": 4,
            "bytes": size,
            "time_us": time_s * 1e6,
        }
    )


def test_physics_is_fitted_over_tables_and_outliers_do_not_bend_it():
    table = pd.concat([_table(), _table("all_gather"), _table("all_to_all")], ignore_index=True)
    rows = collective_rows(table)
    clean = np.abs(physical_time(fit_physics(rows), rows) / rows.time_s - 1)
    assert np.median(clean) < 0.1
    spoiled = table.copy()
    spoiled.loc[::25, "time_us"] *= 20
    bent = np.abs(physical_time(fit_physics(collective_rows(spoiled)), rows) / rows.time_s - 1)
    assert np.median(bent) < np.median(clean) + 0.05


def test_physics_carries_to_links_never_measured():
    """Fitted to InfiniBand HDR alone, a network of half the rate takes twice as long for large
    messages."""
    table = _table()
    values = fit_physics(collective_rows(table))
    large = table[(table["num_ranks"] == 32) & (table["bytes"] == 2**30)]
    other = collective_rows(large.assign(interconnect="NVLink3 + InfiniBand EDR"))
    own = collective_rows(large)
    assert physical_time(values, other)[0] / physical_time(values, own)[0] == pytest.approx(
        2, rel=0.2
    )


def test_sizes_and_rank_counts_left_out_are_predicted(tmp_path):
    table = _table()
    kept = ~table["bytes"].isin([2.0**15, 2.0**24]) & (table["num_ranks"] != 4)
    fit_collectives([table[kept]], tmp_path, base=collective_weights(weight_files(None)))
    times = CollectiveModel.load(tmp_path).table_times(table[~kept])
    error = np.abs(times.time_s * 1e6 / table[~kept]["time_us"] - 1)
    assert error[table["num_ranks"] != 4].max() < 0.11
    assert error.mean() < 0.1
    source = np.array(times.provenance)
    assert set(source[(table[~kept]["num_ranks"] == 4).to_numpy()]) == {"learned"}
    assert set(source[(table[~kept]["num_ranks"] != 4).to_numpy()]) == {"measured"}


def test_direct_reductions_have_a_usual_price_beside_the_librarys(tmp_path):
    """Tables of others on the same fabric are priced by them, and the host's time comes on top."""
    library = _table(noise=0.0).query("num_nodes == 1 and bytes < 1e5")
    direct = library.assign(algorithm="custom", time_us=library["time_us"] / 3)
    eager = direct.assign(variant="served_eager", time_us=np.maximum(direct["time_us"], 60.0))
    shipped = collective_weights(weight_files(None))
    fit_collectives([library, direct, eager], tmp_path, base=shipped)
    model = CollectiveModel.load(tmp_path)

    def times_us(table: pd.DataFrame) -> np.ndarray:
        return model.table_times(table.assign(source="others")).time_s * 1e6

    np.testing.assert_allclose(times_us(library), library["time_us"], rtol=0.15)
    np.testing.assert_allclose(times_us(direct), direct["time_us"], rtol=0.15)
    eager_us, replayed_us = times_us(eager), times_us(direct)
    np.testing.assert_allclose(eager_us, np.maximum(replayed_us, eager_us.min()), rtol=0.1)
    assert eager_us.min() > 1.5 * replayed_us.max()


def test_twenty_rows_of_gloo_are_enough(tmp_path):
    table = _gloo()
    fit_collectives([table], tmp_path)
    times = CollectiveModel.load(tmp_path).table_times(table)
    assert np.abs(times.time_s * 1e6 / table["time_us"] - 1).mean() < 0.05
    assert np.all(times.lo_s <= times.time_s)
    assert np.all(times.time_s <= times.hi_s)


def test_what_was_measured_over_a_machines_loopback_prices_its_processes(tmp_path):
    """As `calibrate` writes it: all ranks on one host."""
    table = _gloo().assign(ranks_per_node=4, num_nodes=1)
    fit_collectives([table], tmp_path)
    ops = [
        Collective(collective="all_reduce", bytes=size, num_ranks=4, ranks_per_node=4, level=0)
        for size in table["bytes"]
    ]
    times = CollectiveModel.load(tmp_path).times(catalog.cluster("localhost"), ops)
    assert set(times.provenance) == {"measured"}
    assert np.abs(times.time_s * 1e6 / table["time_us"] - 1).mean() < 0.05


def test_files_round_trip_and_do_not_depend_on_the_run(tmp_path):
    first = fit_collectives([_table()], tmp_path / "a")
    fit_collectives([_table()], tmp_path / "b")
    assert (tmp_path / "a" / FILE_NAME).read_bytes() == (tmp_path / "b" / FILE_NAME).read_bytes()
    table = _table()
    loaded = CollectiveModel.load(tmp_path / "a").table_times(table)
    np.testing.assert_allclose(
        loaded.time_s, CollectiveModel(first).table_times(table).time_s, rtol=1e-12
    )


def test_physics_of_a_base_is_kept(tmp_path):
    base = collective_weights(weight_files(None))
    assert fit_collectives([_table()], tmp_path, base=base).physics == base.physics


@pytest.mark.parametrize(
    "tables",
    [[], [pd.DataFrame({"collective": ["all_reduce"], "num_ranks": [4], "time_us": [1.0]})]],
)
def test_nothing_to_fit_is_an_error(tables, tmp_path):
    with pytest.raises(TableError, match="bytes, num_ranks and time_us"):
        fit_collectives(tables, tmp_path)


def test_missing_calibration(tmp_path):
    with pytest.raises(CalibrationError, match="this calibration does not exist"):
        CollectiveModel.load(tmp_path / "nowhere")
    with pytest.raises(CalibrationError, match="perfmodel fit"):
        CollectiveModel.load(tmp_path)


def test_a_folder_of_other_weights_leaves_collectives_to_the_shipped_ones(tmp_path):
    (tmp_path / "gemm.safetensors").write_bytes(b"other")
    shipped = CollectiveModel.load()
    assert CollectiveModel.load(tmp_path).weights.series == shipped.weights.series


@pytest.mark.parametrize("keep", [0, 20, 1000])
def test_truncated_calibration(tmp_path, keep):
    fit_collectives([_gloo()], tmp_path)
    path = tmp_path / FILE_NAME
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CalibrationError, match="truncated"):
        CollectiveModel.load(tmp_path)


def test_another_schema_version_and_missing_arrays(tmp_path):
    fit_collectives([_gloo()], tmp_path)
    path = tmp_path / FILE_NAME
    arrays = load_file(path)
    save_file(arrays, path, {"perfmodel": json.dumps({"schema": "perfmodel-collectives/0"})})
    with pytest.raises(CalibrationError, match="perfmodel-collectives/0"):
        CollectiveModel.load(tmp_path)
    fit_collectives([_gloo()], tmp_path)
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as handle:
        meta = handle.metadata()
    arrays.pop("curves/start")
    path.write_bytes(sealed(save(arrays, meta | {"checksum": UNSEALED})))
    with pytest.raises(CalibrationError, match="incomplete"):
        CollectiveModel.load(tmp_path)
