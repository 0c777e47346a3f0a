"""`perfmodel import` of collectives: links are named or the file is refused; what `fit` makes of
them is said."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from perfmodel import catalog
from perfmodel.cli import main
from perfmodel.cost import interconnect_of
from perfmodel.cost.learn.collectives.links import is_known, is_network, link_class
from perfmodel.ingest.tables import read_table

sys.path.append(str(Path(__file__).parents[1] / "ingest"))
import reader_cases as cases

ROWS = {2**i: (20 + 1.75 * 2**i / 230e3, 21 + 1.75 * 2**i / 230e3) for i in range(10, 31)}
SLOW = {size: (100 * a, 100 * b) for size, (a, b) in ROWS.items()}


def write(folder: Path, format: str) -> tuple[str, Path]:
    """A file with collectives, of one of the importers."""
    path = folder / f"{format}.log"
    match format:
        case "nccl-tests":
            path.write_text(cases.nccl_text(ROWS))
        case "nccl-json":
            cases.write_json(path, cases.nccl_json(ROWS))
        case "osu":
            path.write_text(cases.osu_text({size: a for size, (a, _) in ROWS.items()}))
        case _:
            cases.write_json(path, cases.kineto_json())
    return format.replace("nccl-json", "nccl-tests"), path


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    assert main([*map(str, arguments)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def answer(capsys: pytest.CaptureFixture[str], *arguments: object) -> dict[str, Any]:
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("format", ["nccl-tests", "nccl-json", "osu", "kineto"])
def test_no_importer_guesses_links(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, path = write(tmp_path, format)
    device = [] if format == "nccl-json" else ["--device", "A100-SXM4-80GB"]
    ranks = ["--ranks", "8"] if format == "osu" else []
    table = tmp_path / "table.csv"
    call = ["import", name, path, "--kind", "collective", "--out", table, *device, *ranks]
    assert "--cluster NAME or --interconnect" in refused(capsys, *call)
    assert "'string' does not name a known link" in refused(
        capsys, *call, "--interconnect", "string"
    )
    assert "not both" in refused(capsys, *call, "--interconnect", "PCIe4", "--cluster", "dgx-a100")
    assert not table.exists()
    cluster = "dgx-h100" if format == "nccl-json" else "dgx-a100"
    answer(capsys, *call, "--cluster", cluster)
    found = read_table(table)
    assert set(found["interconnect"]) == {interconnect_of(catalog.cluster(cluster))}
    assert found["ranks_per_node"].notna().all()


def test_a_cluster_of_other_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path = write(tmp_path, "nccl-tests")
    error = refused(
        capsys, "import", name, path, "--out", tmp_path / "t.csv", "--cluster", "dgx-h100"
    )
    assert "the ranks ran on A100-SXM4-80GB, but dgx-h100 has H100-SXM5-80GB" in error


@pytest.mark.parametrize("format", ["nccl-tests", "nccl-json"])
def test_logs_that_do_not_name_their_program(
    format: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, path = write(tmp_path, format)
    table, links = tmp_path / "t.csv", ["--interconnect", "NVLink + InfiniBand NDR"]
    error = refused(
        capsys, "import", name, path, "--out", table, *links, "--collective", "send_recv"
    )
    assert "all_reduce_perf, not of send_recv" in error
    path.write_text(path.read_text().replace("_perf", ""))
    if format == "nccl-tests":  # the printed bandwidths tell which collective it is
        answer(capsys, "import", name, path, "--out", table, *links)
        assert set(read_table(table)["collective"]) == {"all_reduce"}
        assert "is 1.750" in refused(
            capsys, "import", name, path, "--out", table, *links, "--collective", "all_to_all"
        )
        return
    assert "--collective NAME" in refused(capsys, "import", name, path, "--out", table, *links)
    assert "unknown collective 'gather'" in refused(
        capsys, "import", name, path, "--out", table, *links, "--collective", "gather"
    )
    answer(capsys, "import", name, path, "--out", table, *links, "--collective", "all_to_all")
    assert set(read_table(table)["collective"]) == {"all_to_all"}


def test_rows_that_fit_would_set_aside_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log, table, out = tmp_path / "log.txt", tmp_path / "t.csv", tmp_path / "fit"
    log.write_text(cases.nccl_text(SLOW))
    report = answer(capsys, "import", "nccl-tests", log, "--cluster", "dgx-a100", "--out", table)
    ((reason, count),) = report["set_aside"].items()
    assert (count, "below 20%" in reason) == (42, True)
    assert (
        main(["import", "nccl-tests", str(log), "--cluster", "dgx-a100", "--out", str(table)]) == 0
    )
    assert "fit will set aside 42: A100-SXM4-80GB all_reduce: below 20%" in capsys.readouterr().out
    assert "no collective row can be used" in refused(capsys, "fit", table, "--out", out)


def test_fit_says_what_it_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name, path = write(tmp_path, "nccl-tests")
    table, out = tmp_path / "t.csv", tmp_path / "fit"
    answer(capsys, "import", name, path, "--cluster", "dgx-a100", "--out", table)
    report = answer(capsys, "fit", table, "--out", out)["collectives"]
    assert list(report["replaced"]) == ["all_reduce on A100-SXM4-80GB, NVLink3 inside a node"]
    assert report["kept"] > 150
    assert main(["fit", str(table), "--out", str(out)]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "replaces 9 shipped series: all_reduce on A100-SXM4-80GB, NVLink3 inside a node" in shown


@pytest.mark.parametrize("name", catalog.clusters())
def test_words_of_a_cluster_mean_its_links(name: str) -> None:
    """A table that names the cluster's links is priced relative to the cluster's own rates."""
    cluster = catalog.cluster(name)
    words, device = interconnect_of(cluster), cluster.device.name
    flat = is_network(cluster.levels[0].name, device)
    assert is_network(words, device) == flat
    for index, level in enumerate(cluster.levels[:2]):
        between = flat or index > 0
        assert is_known(words, device, between)
        rate = link_class(words, device, between).bandwidth_bytes_per_s
        assert (
            rate >= level.bandwidth_bytes_per_s
            if between
            else rate == pytest.approx(level.bandwidth_bytes_per_s)
        )
