"""Fitting from tables: known constants come back, small tables do, files fail closed."""

import json

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import load_file, save_file

from perfmodel.cost import CollectiveModel
from perfmodel.errors import CalibrationError, TableError
from perfmodel.learn import LinkConstants, collective_curve, fit_collectives
from perfmodel.learn._collective_store import FILE_NAME, load_collective_weights

TRUE = LinkConstants(8e-6, 0.9e-6, 7e-6, 180e9, 21e9, 0.4, 3.0, 0.05)


def _table(kind: str = "all_reduce", device: str = "A100-SXM4-80GB", noise: float = 0.01) -> pd.DataFrame:
    generator = np.random.default_rng(0)
    frames = []
    for ranks, per_node in ((2, 2), (4, 4), (8, 8), (16, 8), (32, 8)):
        size = 2.0 ** np.arange(10, 31)
        time_s = collective_curve(kind, size, float(ranks), float(per_node), TRUE)
        frames.append(
            pd.DataFrame(
                {
                    "source": "lab", "device": device, "interconnect": "NVLink3 + InfiniBand HDR",
                    "collective": kind, "algorithm": "auto", "num_ranks": ranks,
                    "num_nodes": -(-ranks // per_node), "ranks_per_node": per_node, "bytes": size,
                    "dtype": "fp32", "software": "nccl", "variant": "",
                    "time_us": time_s * 1e6 * np.exp(generator.normal(0, noise, len(size))),
                }
            )
        )  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def _gloo(rows: int = 20) -> pd.DataFrame:
    """A round trip per ring step at 1.2 GB/s, as four local processes over gloo behave."""
    size = np.geomspace(1e3, 1e8, rows)
    time_s = 2 * 3 * 60e-6 + 1.5 * size / 1.2e9
    return pd.DataFrame(
        {"device": "CPU", "collective": "all_reduce", "num_ranks": 4, "bytes": size, "time_us": time_s * 1e6}
    )


def test_constants_of_a_synthetic_machine_come_back(tmp_path):
    weights = fit_collectives([_table()], tmp_path, studies=False)
    (series,) = weights.series
    fitted = LinkConstants.from_vector(series.vector)
    assert fitted.bandwidth_intra == pytest.approx(TRUE.bandwidth_intra, rel=0.1)
    assert fitted.bandwidth_inter == pytest.approx(TRUE.bandwidth_inter, rel=0.1)
    assert fitted.launch_s + fitted.hop_intra_s == pytest.approx(TRUE.launch_s + TRUE.hop_intra_s, rel=0.2)
    assert series.ranks == (2, 4, 8)
    assert series.ranks_between == (16, 32)


def test_sizes_and_rank_counts_left_out_are_predicted(tmp_path):
    table = _table()
    kept = ~table["bytes"].isin([2.0**15, 2.0**24]) & (table["num_ranks"] != 4)
    fit_collectives([table[kept]], tmp_path, studies=False)
    times = CollectiveModel.load(tmp_path).table_times(table[~kept])
    error = np.abs(times.time_s * 1e6 / table[~kept]["time_us"] - 1)
    assert error[table["num_ranks"] != 4].max() < 0.06
    assert error.mean() < 0.1
    source = np.array(times.provenance)
    assert set(source[(table[~kept]["num_ranks"] == 4).to_numpy()]) == {"learned"}


def test_twenty_rows_of_gloo_are_enough(tmp_path):
    table = _gloo()
    fit_collectives([table], tmp_path)
    times = CollectiveModel.load(tmp_path).table_times(table)
    assert np.abs(times.time_s * 1e6 / table["time_us"] - 1).mean() < 0.05
    assert np.all(times.lo_s <= times.time_s)
    assert np.all(times.time_s <= times.hi_s)


def test_files_round_trip_and_do_not_depend_on_the_run(tmp_path):
    first = fit_collectives([_table()], tmp_path / "a", seed=3)
    fit_collectives([_table()], tmp_path / "b", seed=3)
    assert (tmp_path / "a" / FILE_NAME).read_bytes() == (tmp_path / "b" / FILE_NAME).read_bytes()
    table = _table()
    loaded = CollectiveModel.load(tmp_path / "a").table_times(table)
    np.testing.assert_allclose(loaded.time_s, CollectiveModel(first).table_times(table).time_s, rtol=1e-12)


def test_an_earlier_fit_passes_on_its_hyperparameters(tmp_path):
    first = fit_collectives([_table()], tmp_path, studies=False)
    again = fit_collectives([_table()], tmp_path, studies=False, start=first)
    (name,) = first.corrections
    np.testing.assert_array_equal(
        again.corrections[name].kriging.hyper.variance, first.corrections[name].kriging.hyper.variance
    )


@pytest.mark.parametrize(
    "tables", [[], [pd.DataFrame({"collective": ["all_reduce"], "num_ranks": [4], "time_us": [1.0]})]]
)
def test_nothing_to_fit_is_an_error(tables, tmp_path):
    with pytest.raises(TableError, match="bytes, num_ranks and time_us"):
        fit_collectives(tables, tmp_path)


def test_missing_calibration(tmp_path):
    with pytest.raises(CalibrationError, match="no such calibration"):
        CollectiveModel.load(tmp_path / "nowhere")
    with pytest.raises(CalibrationError, match="perfmodel fit"):
        CollectiveModel.load(tmp_path)


def test_a_folder_of_other_weights_leaves_collectives_to_the_shipped_ones(tmp_path):
    (tmp_path / "gemm.safetensors").write_bytes(b"other")
    shipped = CollectiveModel.load()
    assert [s.name for s in CollectiveModel.load(tmp_path).weights.series] == [s.name for s in shipped.weights.series]


@pytest.mark.parametrize("keep", [0, 20, 3000])
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
        load_collective_weights(path)
    fit_collectives([_gloo()], tmp_path)
    from safetensors import safe_open

    with safe_open(path, framework="numpy") as handle:
        meta = handle.metadata()
    arrays.pop("series/bytes")
    save_file(arrays, path, meta)
    with pytest.raises(CalibrationError, match="incomplete"):
        load_collective_weights(path)
