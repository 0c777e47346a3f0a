"""`validate kernels`: figures, skipped rows, bad tables."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from perfmodel.errors import TableError
from perfmodel.validation import validate_kernels


def table(**columns: object) -> pd.DataFrame:
    base = {
        "source": "lab",
        "device": "H100",
        "op_family": "gemm",
        "op": "linear",
        "dtype": "bf16",
        "m": [512, 1024],
        "n": 4096,
        "k": 4096,
        "pass": "fwd",
        "time_us": [30.0, 55.0],
    }
    return pd.DataFrame({**base, **columns})


def test_report_and_predictions(tmp_path: Path) -> None:
    path, out = tmp_path / "gemm.csv", tmp_path / "predictions.csv"
    table().to_csv(path, index=False)
    report = validate_kernels([path], None, out)
    figures = report["families"]["gemm"]["H100"]
    assert figures["n"] == 2
    assert {"median_ape", "mean_ape", "p90_ape", "bias", "coverage_90"} <= set(figures)
    assert report["skipped"] == {}
    predictions = pd.read_csv(out)
    assert predictions["row"].tolist() == [0, 1]
    ape = np.abs(predictions["predicted_time_us"] / [30.0, 55.0] - 1)
    assert figures["mean_ape"] == pytest.approx(ape.mean())
    assert (predictions["lo_us"] <= predictions["hi_us"]).all()


def test_rows_that_cannot_be_priced_are_counted(tmp_path: Path) -> None:
    parts = [
        table(),
        table(device="Abacus"),
        table(dtype="fp13"),
        table(op_family="rnn"),
        table(m=[np.nan, np.nan]),
    ]
    path, out = tmp_path / "gemm.csv.gz", tmp_path / "predictions.csv"
    pd.concat(parts).to_csv(path, index=False)
    report = validate_kernels([path], None, out)
    assert sum(report["skipped"].values()) == 8
    assert len(report["skipped"]) == 4
    predictions = pd.read_csv(out)
    assert predictions["predicted_time_us"].notna().sum() == 2
    assert predictions["skipped_reason"].notna().sum() == 8


def test_collectives_that_their_table_marks_count_or_not(tmp_path: Path) -> None:
    rows = pd.DataFrame(
        {
            "source": "lab",
            "device": "H100",
            "collective": "all_reduce",
            "num_ranks": 8,
            "num_nodes": 1,
            "interconnect": "NVLink4",
            "bytes": 1 << 26,
            "time_us": 400.0,
            "check": ["", "degraded_fabric", ""],
            "in_place": [0, 0, 1],
        }
    )
    rows.to_csv(tmp_path / "nccl.csv", index=False)
    n = [
        validate_kernels([tmp_path / "nccl.csv"], marked=marked)["all"]["n"]
        for marked in (True, False)
    ]
    assert n == [3, 1]


@pytest.mark.parametrize(
    "change", [{"time_us": [np.nan, 1.0]}, {"time_us": [-1.0, 1.0]}, {"time_us": ["fast", 1.0]}]
)
def test_bad_times_are_refused(tmp_path: Path, change: dict) -> None:
    path = tmp_path / "gemm.csv"
    table(**change).to_csv(path, index=False)
    with pytest.raises(TableError, match="time_us"):
        validate_kernels([path])


def test_shared_tables_are_predicted_well(data_dir: Path) -> None:
    """In-sample sanity of the shipped weights (the kept-out errors are in training/report.md)."""
    report = validate_kernels(
        [data_dir / "simumax" / "gemm.csv.gz", data_dir / "vidur" / "embedding.csv.gz"]
    )
    assert report["families"]["gemm"]["all"]["mean_ape"] < 0.12
    assert report["families"]["embedding"]["all"]["mean_ape"] < 0.05
    assert report["skipped"] == {}
