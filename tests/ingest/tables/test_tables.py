"""Tables are checked at the door: every defect is named with file, column and row."""

import gzip
import os
from concurrent.futures import ThreadPoolExecutor

import pandas as pd
import pytest

from perfmodel.errors import TableError
from perfmodel.ingest.tables import read_table, write_table, write_text

GOOD = "device,op_family,op,dtype,m,n,k,time_us\nA100,gemm,linear,bf16,128,256,512,12.5\nA100,gemm,linear,bf16,1,2,3,2.5\n"


def _write(tmp_path, text, name="t.csv"):
    path = tmp_path / name
    path.write_text(text)
    return path


def test_round_trip_in_every_format(tmp_path):
    table = read_table(_write(tmp_path, GOOD))
    for name in ("copy.csv", "copy.csv.gz", "copy.parquet"):
        write_table(tmp_path / name, table)
        pd.testing.assert_frame_equal(read_table(tmp_path / name), table, check_dtype=False)


def test_unknown_suffix_is_refused(tmp_path):
    with pytest.raises(TableError, match=r"\.csv, \.csv\.gz, \.parquet"):
        write_table(tmp_path / "t.xlsx", pd.DataFrame())


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (GOOD.replace("12.5", "nan"), r"time_us .* row 0"),
        (GOOD.replace(",2.5\n", ",-2.5\n"), r"time_us .* row 1"),
        (GOOD.replace("12.5", "0"), "above zero"),
        (GOOD.replace("12.5", "inf"), "finite"),
        (GOOD.replace("12.5", "fast"), "fast"),
        (GOOD.replace("128", "0"), r"m must be .* row 0"),
        (GOOD.replace("time_us", "time"), r"'time' has no unit; rename it to 'time_us'"),
        (GOOD.replace("time_us", "time_ms"), "convert the column to microseconds"),
        (GOOD.replace("device,", "machine,"), "'device' is missing"),
        (GOOD.replace("op_family", "family"), "op_family"),
        ("", "not a readable table"),
        (
            "device,collective,num_ranks,num_nodes,time_us\nA100-SXM4-40GB,all_reduce,4,8,12.5\n",
            "row 0 has 8 nodes for 4 ranks",
        ),
    ],
)
def test_defects_are_named(tmp_path, text, message):
    path = _write(tmp_path, text)
    with pytest.raises(TableError, match=message) as caught:
        read_table(path)
    assert str(path) in str(caught.value)


def test_truncated_gzip_is_named(tmp_path):
    path = tmp_path / "t.csv.gz"
    data = gzip.compress(GOOD.encode() * 200)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(TableError, match="is the file complete"):
        read_table(path)


def test_missing_file_is_named(tmp_path):
    with pytest.raises(TableError, match="no such file"):
        read_table(tmp_path / "absent.csv")


def test_empty_text_cells_are_empty_strings(tmp_path):
    table = read_table(_write(tmp_path, GOOD.replace("linear,bf16,1,", ",bf16,1,")))
    assert table["op"].tolist() == ["linear", ""]


def test_interrupted_write_keeps_the_old_file(tmp_path):
    from perfmodel.ingest.tables import write_atomic

    path = tmp_path / "kept.txt"
    write_text(path, "old")

    def fail(file):
        file.write(b"half of the ne")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomic(path, fail)
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["kept.txt"]


def test_public_tables_are_readable(data_dir):
    for file in sorted(data_dir.glob("*/gemm.csv.gz")):
        assert (read_table(file)["time_us"] > 0).all()


def test_row_that_breaks_off_is_named(tmp_path):
    path = _write(tmp_path, GOOD.rstrip()[:-10])
    with pytest.raises(TableError, match=r"ends within a row .*is the file complete"):
        read_table(path)
    assert len(read_table(_write(tmp_path, GOOD.rstrip()))) == 2  # no line end, but all cells


def test_what_cannot_be_written_is_named_by_its_own_name(tmp_path):
    (tmp_path / "file").write_text("kept")
    (tmp_path / "folder").mkdir()
    for path, why in (
        (tmp_path / "folder", "directory"),
        (tmp_path / "file" / "x", "its folder is a file"),
    ):
        with pytest.raises(OSError, match=f"cannot be written .*{why}") as caught:
            write_text(path, "new")
        assert caught.value.filename == str(path)
    assert (tmp_path / "file").read_text() == "kept"
    assert {p.name for p in tmp_path.iterdir()} == {"file", "folder"}


def test_a_pipe_is_written_and_stays_one(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(path.read_text)
        write_text(path, "through")
        assert read.result(timeout=10) == "through"
    assert path.is_fifo()
