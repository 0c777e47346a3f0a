"""`perfmodel doctor` reports what there is, and what is wrong, without failing."""

import json
import os
import time

import pytest

from perfmodel.cli import main
from perfmodel.session import CACHE_SHARES, CACHES, cache_folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path))
    (tmp_path / "structures").mkdir()
    (tmp_path / "structures" / "one.bin").write_bytes(bytes(3000))
    return tmp_path


def doctor(capsys, *arguments):
    assert main(["doctor", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


def test_reports_extras_devices_and_caches(capsys, cache):
    report = doctor(capsys)
    assert report["packages"]["jax"]
    assert report["jax_devices"]
    assert report["extras"]["viz"] == "installed"
    caches = report["caches"]
    assert (caches["folder"], caches["structures_files"], caches["structures_bytes"]) == (
        str(cache),
        1,
        3000,
    )
    assert caches["limit_bytes"] == 2e9
    assert not report["problems"]


def test_names_a_cache_above_its_limit_and_clears_it(capsys, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", "1e-6")
    (problem,) = doctor(capsys)["problems"]
    assert "--clear-cache" in problem
    report = doctor(capsys, "--clear-cache")
    assert report["caches"]["structures_files"] == 0
    assert not report["problems"]


def test_lists_and_clears_every_cache(capsys, cache):
    """No other folder is written: code asks for its cache by a name of this list."""
    for name in CACHES:
        (cache / name / "inner").mkdir(parents=True, exist_ok=True)
        (cache / name / "inner" / "file").write_bytes(bytes(10))
    caches = doctor(capsys)["caches"]
    assert all(caches[name] == str(cache_folder(name)) for name in CACHES)
    assert all(caches[f"{name}_bytes"] >= 10 for name in CACHES)
    assert {*CACHE_SHARES} < {*CACHES}
    doctor(capsys, "--clear-cache")
    assert not [path for path in cache.rglob("*") if path.is_file()]
    with pytest.raises(ValueError, match="other"):
        cache_folder("other")


def test_compiled_evaluators_are_limited_once_an_hour(cache, monkeypatch):
    """By any command that predicts, be its input wrong."""
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", "1e-6")

    def left_of(name: str) -> bool:
        path = cache / "xla" / name
        path.write_bytes(bytes(5000))
        assert main(["simulate", "no such file", "--cluster", "dgx-a100"]) == 2
        return path.exists()

    (cache / "xla").mkdir()
    assert not left_of("before the first look")
    assert left_of("within an hour")
    an_hour_ago = time.time() - 3601
    os.utime(cache / "xla" / ".looked", (an_hour_ago, an_hour_ago))
    assert not left_of("after an hour")


def test_names_a_setting_that_is_wrong(capsys, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", "much")
    (problem,) = doctor(capsys)["problems"]
    assert "PERFMODEL_CACHE_LIMIT_GB='much'" in problem


def test_describes_ones_own_calibration(capsys, tmp_path):
    assert main(["doctor", "--calibration", str(tmp_path / "nowhere")]) == 2
    assert "nowhere" in capsys.readouterr().err


def test_the_table_says_how_to_install_an_extra(capsys, monkeypatch):
    remedy = "without onnx: pip install 'perfmodel[onnx]'"
    monkeypatch.setattr("perfmodel.cli._doctor._extras", lambda: {"onnx": remedy})
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["doctor"]) == 0
    assert remedy in capsys.readouterr().out
