"""`perfmodel import` and `perfmodel compare` as a user calls them."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from perfmodel.cli import main
from perfmodel.ingest.tables import read_table

sys.path.append(str(Path(__file__).parents[1] / "ingest"))
import reader_cases as cases

PREDICT = ["timeline", "--model", "gpt3-2.7b", "--cluster", "dgx-a100", "--global-batch", "8"]


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_import_of_a_benchmark(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, table = tmp_path / "log.txt", tmp_path / "table.csv"
    log.write_text(cases.nccl_text({1024: (20.0, 21.0), 4096: (30.0, 31.0)}))
    report = answer(capsys, "import", "nccl-tests", log, "--cluster", "dgx-a100", "--out", table)
    assert (report["collectives"], report["kernels"], report["skipped"]) == (4, 0, {})
    assert report["written"] == [str(table)]
    assert read_table(table)["time_us"].tolist() == [20.0, 21.0, 30.0, 31.0]
    assert set(read_table(table)["interconnect"]) == {"NVLink3 NVSwitch + InfiniBand HDR"}
    words = ["--interconnect", "PCIe4", "--device", "my-gpu"]
    assert main(["import", "auto", str(log), "--out", str(table), *words]) == 0
    assert "4 rows of collectives (4 all_reduce)" in capsys.readouterr().out
    assert set(read_table(table)["device"]) == {"my-gpu"}


def test_import_of_a_profile(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Both kinds of rows and the timeline from one file."""
    path = cases.write_json(tmp_path / "rank0.json", cases.kineto_json())
    out, trace = tmp_path / "rows.csv", tmp_path / "trace.json.gz"
    links = ["--cluster", "dgx-a100"]
    report = answer(capsys, "import", "auto", path, "--out", out, "--timeline", trace, *links)
    assert report["written"] == [str(out), str(tmp_path / "rows.collectives.csv"), str(trace)]
    assert [len(read_table(name)) for name in report["written"][:2]] == [2, 1]
    assert (report["activities"], report["devices"]) == (10, 1)
    assert report["skipped"] == {"no row for operator aten::unknown": 2}
    one = answer(capsys, "import", "kineto", path, "--out", out, "--kind", "collective", *links)
    assert one["written"] == [str(out)]
    assert read_table(out)["collective"].tolist() == ["all_reduce"]
    assert answer(capsys, "import", "kineto", path, "--out", out, "--kind", "compute")[
        "written"
    ] == [str(out)]


def test_a_timeline_is_written_where_no_table_can_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace recorded without shapes has no row for a table, and says so; alone, the table is
    refused."""
    data = cases.kineto_json(ranks=1)
    for event in data["traceEvents"]:
        event.get("args", {}).pop("Input Dims", None)
    data["traceEvents"] = [
        event for event in data["traceEvents"] if "nccl" not in event["name"].lower()
    ]
    path = cases.write_json(tmp_path / "rank0.json", data)
    out, trace = tmp_path / "rows.csv", tmp_path / "trace.json.gz"
    report = answer(capsys, "import", "kineto", path, "--out", out, "--timeline", trace)
    assert report["written"] == [str(trace)]
    assert "no row for a table" in report["no_table"]
    assert report["activities"] > 0
    assert main(["import", "kineto", str(path), "--out", str(out), "--timeline", str(trace)]) == 0
    assert "no table was written" in capsys.readouterr().out
    assert main(["import", "kineto", str(path), "--out", str(out)]) == 2
    assert not out.exists()


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    predicted, measured = tmp_path / "p.json.gz", tmp_path / "m.json"
    assert main([*PREDICT, "--layout", "tp=4,pp=2", "--out", str(predicted)]) == 0
    assert main([*PREDICT, "--layout", "tp=2,pp=2", "--out", str(measured)]) == 0
    capsys.readouterr()
    png, out = tmp_path / "both.png", tmp_path / "errors.csv"
    report = answer(
        capsys,
        "compare",
        "--predicted",
        predicted,
        "--measured",
        measured,
        "--png",
        png,
        "--out",
        out,
    )
    assert report["matched_by"] == "name"
    error = abs(report["predicted_batch_s"] / report["measured_batch_s"] - 1)
    assert report["batch_time_error"] == pytest.approx(error)
    assert len(report["devices"]) == 2
    assert 0 < report["mean_activity_error"] < 1
    assert png.read_bytes().startswith(b"\x89PNG")
    assert out.read_text().startswith("device,stage,phase,micro_batch")
    assert main(["compare", "--predicted", str(predicted), "--measured", str(predicted)]) == 0
    shown = capsys.readouterr().out
    assert "error 0.00%" in shown
    assert "stage error: median 0.00%" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["import", "kineto", "x.json"], "nothing to write"),
        (["import", "kineto", "x.json", "--out", "t.csv"], "no such file"),
        (["import", "gantt", "x.json", "--out", "t.csv"], "unknown measurement format 'gantt'"),
        (["import", "osu", "x.json", "--out", "t.csv", "--ranks", "0"], "ranks must be at least 1"),
        (["compare", "--predicted", "x.json", "--measured", "y.json"], "no such file"),
    ],
)
def test_bad_input(
    arguments: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
