from pathlib import Path

import pandas as pd
import pytest

from perfmodel.errors import TableError
from perfmodel.ingest.tables import read_table, write_table
from perfmodel.measure.tables import SUSPECT, compare, write_card
from perfmodel.measure.timing import StoppingRule


def row(
    m: int, time_us: float, half: float | None = 0.01, variant: str = "", family: str = "gemm"
) -> dict:
    return {
        "device": "box",
        "op_family": family,
        "dtype": "fp32",
        "m": m,
        "time_us": time_us,
        "ci95_half_width": half,
        "interference": 0.0,
        "variant": variant,
        "software": "x",
    }


A = [
    row(1, 10),
    row(2, 10),
    row(3, 10),
    row(3, 30, variant="cold"),
    row(4, 10, None),
    row(5, 1),
    row(1, 7, family="memory"),
]
B = [
    row(4, 20, None),
    row(3, 33, variant="unfused_cold"),
    row(2, 10.1),
    row(1, 12),
    row(6, 1),
    row(3, 99, variant=SUSPECT),
    row(7, 1),
]


def write(folder: Path, rows: list[dict], packages: tuple[str, ...] = ()) -> Path:
    folder.mkdir()
    path = folder / "t.csv"
    write_table(path, pd.DataFrame(rows))
    write_card(
        path, read_table(path), StoppingRule(), {"threads": len(packages)}, packages=packages
    )
    return path


def test_rows_are_matched_by_op_shape_and_cache(tmp_path: Path):
    report = compare(write(tmp_path / "a", A), write(tmp_path / "b", B, ("numpy",)))
    gemm, memory = report["families"]["gemm"], report["families"]["memory"]
    # 1: 12/10, apart; 2: 10.1/10, within; 3 cold: 33/30, apart; 4: 20/10, no interval
    assert gemm["rows"] == 4
    assert gemm["median_ratio"] == pytest.approx((1.1 + 1.2) / 2)
    assert (gemm["with_intervals"], gemm["beyond_intervals"]) == (3, pytest.approx(2 / 3))
    assert (gemm["only_in_first"], gemm["only_in_second"]) == (2, 2)
    assert memory == {
        "rows": 0,
        "median_ratio": None,
        "with_intervals": 0,
        "beyond_intervals": None,
        "only_in_first": 1,
        "only_in_second": 0,
    }
    assert report["suspect_rows"] == [0, 1]
    assert set(report["cards"]) == {"software.numpy", "method.threads"}
    assert report["cards"]["software.numpy"][0] is None


def test_folders_are_all_their_tables_and_a_table_equals_itself(tmp_path: Path):
    path = write(tmp_path / "a", A)
    report = compare(tmp_path / "a", path)
    assert report["cards"] == {}
    assert all(
        f["beyond_intervals"] in (0, None) and f["only_in_first"] == 0
        for f in report["families"].values()
    )


def test_other_peoples_tables_need_no_card(tmp_path: Path):
    for name in ("a.csv", "b.csv"):
        write_table(
            tmp_path / name,
            pd.DataFrame([row(1, 1), row(1, 3)]).drop(columns=["ci95_half_width", "interference"]),
        )
    report = compare(tmp_path / "a.csv", tmp_path / "b.csv")
    assert report["families"]["gemm"]["rows"] == 1
    assert report["families"]["gemm"]["median_ratio"] == 1.0


def test_missing_sides_are_named(tmp_path: Path):
    with pytest.raises(TableError, match="no table with a card"):
        compare(tmp_path, tmp_path)
    with pytest.raises(TableError, match=r"none\.csv"):
        compare(tmp_path / "none.csv", tmp_path / "none.csv")
