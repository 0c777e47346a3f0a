"""Structures on disk: equal to fresh ones, and rebuilt whenever a file is not exactly what was
written."""

import dataclasses
import os
import re
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest
from timeline_cases import distinct_durations, pipeline_1f1b

from perfmodel.errors import PerfModelError
from perfmodel.prediction import _pipeline
from perfmodel.program import ProgramSpec, Structure, build
from perfmodel.session import cache_dir, cache_limit_bytes
from perfmodel.timeline import (
    CompiledStructure,
    _structure_files,
    compile_structure,
    load_structure,
    makespan,
    save_structure,
)

SPEC = ProgramSpec(stages=4, micro_batches=8, grad_reduce="overlap")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def only_file(folder: Path) -> Path:
    (path,) = (folder / "structures").rglob("*.bin")
    return path


def load_or_compile(
    key: str, build: Callable[[], Structure]
) -> tuple[Structure, CompiledStructure]:
    """The structure of a key and its compiled form, as predictions get them."""
    compiled = load_structure(key)
    if compiled is None:
        compiled = compile_structure(build())
        save_structure(key, compiled)
    return compiled.structure, compiled


def fail():
    raise RuntimeError("built although it was on disk")


def assert_equal(a, b):
    for field in dataclasses.fields(a):
        x, y = getattr(a, field.name), getattr(b, field.name)
        if dataclasses.is_dataclass(x):
            assert_equal(x, y)
        else:
            np.testing.assert_array_equal(x, y)
            assert getattr(x, "dtype", None) == getattr(y, "dtype", None)


@pytest.mark.parametrize("structure", [build(SPEC), pipeline_1f1b(3, 7)], ids=["lags", "sends"])
def test_loads_what_was_stored(structure):
    _, stored = load_or_compile("key", lambda: structure)
    loaded, compiled = load_or_compile("key", fail)
    assert_equal(loaded, structure)
    assert_equal(compiled, stored)
    durations = distinct_durations(structure)
    assert makespan(compiled, durations) == makespan(stored, durations)
    assert not compiled.program.flags.writeable


def damaged(content: bytes) -> list[bytes]:
    middle = len(content) - 100
    return [
        b"",
        content[:10],
        content[: len(content) // 2],
        content[:-1],
        content + b"x",
        b"x" + content,
        content.replace(b'"key": "', b'"key": "0'),
        content.replace(b'"checksum": ', b'"checksum": 1'),
        content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        content[: len(_structure_files._MAGIC)] + b"[]\n",
        content[: len(_structure_files._MAGIC)] + b"\xff\xfe\n",
    ]


def test_other_code_has_files_of_its_own(folder, monkeypatch):
    """What an earlier version of the package built is not taken for what this one would build."""
    structure, built = pipeline_1f1b(3, 7), []
    load_or_compile("key", lambda: structure)
    monkeypatch.setattr(_structure_files, "code_digest", lambda *packages: "other")
    for _ in range(2):
        load_or_compile("key", lambda: built.append(1) or structure)
    assert built == [1]


@pytest.mark.parametrize(
    "code", [_structure_files.CODE, _pipeline.CODE], ids=["structures", "pipelines"]
)
def test_what_files_follow_from_is_whole(code):
    """A module that one of the listed modules imports from its own package is listed too."""
    for name in code:
        package, _, module = name.rpartition(".")
        source = files(package) / f"{module}.py"
        if source.is_file():
            imported = re.findall(rf"from ({re.escape(package)}\.\w+) import", source.read_text())
            assert set(imported) <= set(code), name


@pytest.mark.parametrize("case", range(11))
def test_a_damaged_file_is_replaced(folder, case):
    structure = pipeline_1f1b(3, 7)
    load_or_compile("key", lambda: structure)
    path = only_file(folder)
    content = path.read_bytes()
    path.write_bytes(damaged(content)[case])
    built = []
    _, compiled = load_or_compile("key", lambda: built.append(1) or structure)
    assert built
    assert compiled.n_ops == structure.n_ops
    assert path.read_bytes() == content


def test_another_key_is_another_structure(folder):
    small, large = pipeline_1f1b(2, 2), pipeline_1f1b(3, 3)
    load_or_compile("small", lambda: small)
    path = only_file(folder)
    assert load_or_compile("large", lambda: large)[0] is large
    _structure_files._path("other").parent.mkdir(exist_ok=True)
    path.replace(_structure_files._path("other"))
    assert load_or_compile("other", lambda: large)[0] is large


def test_a_cache_that_cannot_be_written_is_done_without(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("PERFMODEL_CACHE", str(tmp_path / "file"))
    structure = pipeline_1f1b(2, 2)
    assert load_or_compile("key", lambda: structure)[0] is structure


@pytest.mark.parametrize(
    ("platform", "variable", "inside"),
    [
        ("linux", "XDG_CACHE_HOME", "perfmodel"),
        ("win32", "LOCALAPPDATA", "perfmodel"),
        ("darwin", "HOME", "Library/Caches/perfmodel"),
    ],
)
def test_where_caches_are(platform, variable, inside, tmp_path, monkeypatch):
    monkeypatch.delenv("PERFMODEL_CACHE")
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv(variable, str(tmp_path))
    assert cache_dir() == tmp_path / inside


def test_a_large_structure_is_loaded_not_built():
    spec = ProgramSpec(stages=32, micro_batches=256, sends="op")
    _, built = load_or_compile("large", lambda: build(spec))
    assert load_or_compile("large", fail)[1].n_ops == built.n_ops


def sizes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*.bin"))


def test_files_of_earlier_versions_go(folder):
    (folder / "structures").mkdir(parents=True, exist_ok=True)
    (folder / "structures" / "old.bin").write_bytes(b"perfmodel structure\n")
    load_or_compile("0", lambda: pipeline_1f1b(2, 2))
    assert not (folder / "structures" / "old.bin").exists()
    assert only_file(folder)


def test_the_least_recently_used_make_room(folder, monkeypatch):
    structure = pipeline_1f1b(2, 2)
    load_or_compile("0", lambda: structure)
    size = only_file(folder).stat().st_size + 16  # keys differ in length
    same = [
        str(i)
        for i in range(2000)
        if _structure_files._path(str(i)).parent == _structure_files._path("0").parent
    ][:4]
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", str(3.5 * size * 16 / 0.75e9))
    for age, key in enumerate(same[:3]):
        load_or_compile(key, lambda: structure)
        os.utime(_structure_files._path(key), (1e9 - age, 1e9 - age))
    load_or_compile(same[2], fail)  # the oldest by writing, now used last
    load_or_compile(same[3], lambda: structure)
    assert [_structure_files._path(key).exists() for key in same] == [True, False, True, True]


def test_threads_stay_within_the_limit_together(folder, monkeypatch):
    structure = pipeline_1f1b(2, 2)
    load_or_compile("key", lambda: structure)
    limit = 40 * only_file(folder).stat().st_size
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", str(limit / 0.75e9))
    with ThreadPoolExecutor(4) as pool:
        found = list(
            pool.map(lambda i: load_or_compile(f"key {i}", lambda: structure)[0], range(400))
        )
    assert all(one.n_ops == structure.n_ops for one in found)
    assert 0 < sizes(folder) <= limit
    assert not [path for path in folder.rglob("tmp*") if path.is_file()]


def test_no_cache_at_all(folder, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", "0")
    load_or_compile("key", lambda: pipeline_1f1b(2, 2))
    assert sizes(folder) == 0


@pytest.mark.parametrize("value", ["much", "-1", "inf", "nan"])
def test_a_limit_that_is_no_size_is_refused(value, monkeypatch):
    monkeypatch.setenv("PERFMODEL_CACHE_LIMIT_GB", value)
    with pytest.raises(PerfModelError, match="PERFMODEL_CACHE_LIMIT_GB"):
        cache_limit_bytes()
