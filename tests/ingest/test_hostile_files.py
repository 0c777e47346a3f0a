"""Files made to exhaust memory or time are refused at once, in one line that names the file."""

import bz2
import gzip
import io
import lzma
import time
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from safetensors.numpy import save

import perfmodel as pm
from perfmodel.catalog.job_files import read_job
from perfmodel.cli import main
from perfmodel.cost.learn import load_regressor
from perfmodel.cost.learn.training import read_recipe
from perfmodel.emulate import PriceTable
from perfmodel.errors import PerfModelError
from perfmodel.files import LIMIT_VARIABLE, MOST_DEPTH, require_archive_within
from perfmodel.ingest import detect_format, read_measurements, read_profile, read_trace
from perfmodel.ingest.launch import parse_launch, read_launch
from perfmodel.ir.importers import input_value
from perfmodel.measure import read_plan
from perfmodel.validation.rows import read_rows

LIMIT_GB = 0.002
COMPRESSORS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
TABLE = b"device,op_family,dtype,time_us,m,n,k\n" + b"h100,gemm,bf16,1,8,8,8\n" * 2


@pytest.fixture
def small_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, str(LIMIT_GB))


READERS: dict[str, tuple[str, bytes, Callable[[Path], object]]] = {
    "table": ("t.csv", TABLE + b"h100,gemm,bf16,1,8,8,8\n" * 200_000, pm.read_table),
    "runs": ("t.csv", b"case_id,source\n" + b"a,b\n" * 1_000_000, read_rows),
    "prices": (
        "t.csv",
        b"collective,ranks,bytes,time_s\n" + b"all_reduce,2,8,1\n" * 200_000,
        PriceTable.read,
    ),
    "trace": (
        "t.json",
        b'{"traceEvents": [' + b" " * 4_000_000 + b"]}",
        lambda path: read_trace("kineto", [path]),
    ),
    "profile": (
        "t.json",
        b'{"traceEvents": [' + b" " * 4_000_000 + b"]}",
        lambda path: read_profile("kineto", [path]),
    ),
    "nccl-tests": (
        "t.txt",
        b"# out-of-place\n" * 300_000,
        lambda path: read_measurements("nccl-tests", [path]),
    ),
    "osu": ("t.txt", b"# OSU MPI\n" * 400_000, lambda path: read_measurements("osu", [path])),
    "any format": ("t.txt", b"\n" * 4_000_000, detect_format),
    "xplane": ("t.xplane.pb", b"\0" * 4_000_000, lambda path: read_trace("xplane", [path])),
}
"""Name, content beyond the limit, and reader of every kind of file that may be compressed."""


@pytest.mark.usefixtures("small_limit")
@pytest.mark.parametrize("ending", ["", *COMPRESSORS])
@pytest.mark.parametrize("kind", READERS)
def test_content_beyond_the_limit_is_refused_before_it_is_held(
    kind: str, ending: str, tmp_path: Path
) -> None:
    name, content, read = READERS[kind]
    path = tmp_path / f"{name}{ending}"
    path.write_bytes(COMPRESSORS.get(ending, bytes)(content))
    tracemalloc.start()
    try:
        with pytest.raises(PerfModelError, match=r"holds more than 0\.002 GB") as error:
            read(path)
        assert tracemalloc.get_traced_memory()[1] < 20e6
    finally:
        tracemalloc.stop()
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_a_compressed_table_is_read_whatever_its_name_says(ending: str, tmp_path: Path) -> None:
    plain = tmp_path / "plain.csv"
    plain.write_bytes(TABLE)
    path = tmp_path / "table.csv"
    path.write_bytes(COMPRESSORS[ending](TABLE))
    pd.testing.assert_frame_equal(pm.read_table(path), pm.read_table(plain))


@pytest.mark.parametrize("ending", COMPRESSORS)
def test_damaged_compressed_data_is_refused_in_one_line(ending: str, tmp_path: Path) -> None:
    path = tmp_path / f"t.csv{ending}"
    content = COMPRESSORS[ending](TABLE * 50)
    for damaged in (content[: len(content) // 2], content[:20] + bytes(8) + content[28:]):
        path.write_bytes(damaged)
        for read in (pm.read_table, read_rows, PriceTable.read, detect_format):
            with pytest.raises(PerfModelError) as error:
                read(path)
            assert "\n" not in str(error.value)


@pytest.mark.usefixtures("small_limit")
def test_parquet_of_runs_and_dictionaries_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    for table in (
        pd.DataFrame({"time_us": np.ones(1_000_000)}),
        pd.DataFrame({"software": ["x" * 10_000] * 1_000}),
    ):
        table.to_parquet(path)
        assert path.stat().st_size < 100_000
        with pytest.raises(PerfModelError, match="holds more than"):
            pm.read_table(path)


@pytest.mark.usefixtures("small_limit")
def test_archives_are_refused_by_their_table_of_contents(tmp_path: Path) -> None:
    bomb = tmp_path / "inputs.npz"
    np.savez_compressed(bomb, x=np.zeros(1_000_000))
    with pytest.raises(PerfModelError, match="holds more than"):
        require_archive_within(bomb)
    # weights that take on disk what they take in memory are what they seem
    stored = tmp_path / "module.pt2"
    with zipfile.ZipFile(stored, "w", zipfile.ZIP_STORED) as archive:
        archive.writestr("weights", bytes(3_000_000))
    require_archive_within(stored)


@pytest.mark.parametrize("text", ["", "0", "-1", "x", "nan", "inf"])
def test_a_limit_that_is_none_is_refused(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(LIMIT_VARIABLE, text)
    path = tmp_path / "t.csv.gz"
    path.write_bytes(gzip.compress(TABLE))
    if not text:
        assert len(pm.read_table(path)) == 2
        return
    with pytest.raises(PerfModelError, match=LIMIT_VARIABLE):
        pm.read_table(path)


DEEP = (MOST_DEPTH + 2, 900, 100_000)
"""Levels: one too many, as many as Python just parses, more than it parses."""
NESTED_JSON = {
    "lists": lambda depth: '{"a": ' + "[" * depth + "]" * depth + "}",
    "tables": lambda depth: '{"a":' * depth + "1" + "}" * depth,
}
NESTED_TOML = {
    "lists": lambda depth: "a = " + "[" * depth + "]" * depth,
    "tables": lambda depth: "a = " + "{a = " * depth + "1" + "}" * depth,
    "dotted keys": lambda depth: ".".join(["a"] * min(depth, 5_000)) + " = 1",
}
NESTED_YAML = {
    "lists": lambda depth: "a: " + "[" * depth + "]" * depth,
    "tables": lambda depth: "a: " + "{a: " * depth + "1" + "}" * depth,
    "dashes": lambda depth: "a:\n  " + "- " * min(depth, 5_000) + "1",
}
JSON_READERS = (pm.model, read_launch, detect_format)
TOML_READERS = (read_job, read_launch, read_plan, read_recipe, pm.cluster, pm.model)


@pytest.mark.parametrize("depth", DEEP)
def test_nesting_is_bounded_in_every_notation(depth: int, tmp_path: Path) -> None:
    cases = [
        *((".json", make(depth), read) for make in NESTED_JSON.values() for read in JSON_READERS),
        *((".toml", make(depth), read) for make in NESTED_TOML.values() for read in TOML_READERS),
        *((".yaml", make(depth), read_launch) for make in NESTED_YAML.values()),
    ]
    for ending, text, read in cases:
        path = tmp_path / f"nested{ending}"
        path.write_text(text)
        started_s = time.process_time()
        with pytest.raises(PerfModelError, match="nested deeper than 64 levels"):
            read(path if read not in (pm.cluster, pm.model) else str(path))
        assert time.process_time() - started_s < 5


def doubled(first: str, again: Callable[[int], str], levels: int = 60) -> str:
    """Lines of which each stands for the one before it several times."""
    return "\n".join([first, *(again(i) for i in range(1, levels))]) + "\n"


BOMBS = {
    "lists of aliases": doubled("a0: &a0 [1, 1]", lambda i: f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]"),
    "tables of aliases": doubled(
        "a0: &a0 {x: 1}", lambda i: f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}"
    ),
    "merged tables": doubled(
        "a0: &a0 {x: 1}", lambda i: f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}"
    ),
    "keys": doubled("a0: &a0 [1, 1]", lambda i: f"a{i}: &a{i} {{? [*a{i - 1}, *a{i - 1}] : 1}}"),
    "an alias in itself": "a: &a [*a, *a]\n",
    "references in text": doubled("a0: xx", lambda i: f"a{i}: '${{a{i - 1}}}${{a{i - 1}}}'"),
    "references in lists": doubled(
        "a0: [1]", lambda i: f"a{i}: ['${{a{i - 1}}}', '${{a{i - 1}}}']"
    ),
    "products": doubled(
        "a0: 9", lambda i: f"a{i}: '${{multiply:{','.join(['9' * 18] * 300)}}}'", 3
    ),
    "many keys": "".join(f"k{i}: 1\n" for i in range(30_000)),
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_yaml_that_multiplies_is_refused_soon(bomb: str) -> None:
    started_s = time.process_time()
    with pytest.raises(PerfModelError) as error:
        parse_launch(BOMBS[bomb], "bomb.yaml")
    assert time.process_time() - started_s < (10 if bomb == "many keys" else 1)
    assert "\n" not in str(error.value)


SCRIPTS = {
    "text": doubled("A0=xx", lambda i: f'A{i}="$A{i - 1}$A{i - 1}"'),
    "arrays": doubled("A0=(x x)", lambda i: f"A{i}=(${{A{i - 1}[@]}} ${{A{i - 1}[@]}})"),
    "appended": doubled("A=x", lambda i: 'A+="$A"'),
    "numbers": doubled("A0=9999", lambda i: f"A{i}=$((A{i - 1} * A{i - 1}))"),
    "defaults": "A=" + "${B:-" * 3_000 + "x" + "}" * 3_000 + "\n",
}


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_that_multiply_are_refused_soon(script: str) -> None:
    started_s = time.process_time()
    with pytest.raises(PerfModelError) as error:
        parse_launch(SCRIPTS[script], "bomb.sh")
    assert time.process_time() - started_s < 20
    assert "\n" not in str(error.value)


def test_a_device_that_never_ends_is_no_file(capsys: pytest.CaptureFixture[str]) -> None:
    commands = (
        ["predict", "--from", "/dev/zero", "--cluster", "dgx-h100"],
        ["schedules", "file:/dev/zero", "--stages", "2", "--micro-batches", "2"],
        ["calibrate", "--plan", "/dev/zero", "--dry-run"],
    )
    for command in commands:
        status = main(command)
        out, err = capsys.readouterr()
        assert (status, out, err.count("\n")) == (2, "", 1)


def test_arrays_whose_header_promises_more_than_there_is(tmp_path: Path) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        head, {"shape": (10**13,), "fortran_order": False, "descr": "<f8"}
    )
    path = tmp_path / "x.npy"
    path.write_bytes(head.getvalue() + bytes(64))
    with pytest.raises(PerfModelError, match="--input-value"):
        input_value(f"x={path}")


def test_nesting_inside_what_weights_say_of_themselves(tmp_path: Path) -> None:
    path = tmp_path / "gemm.safetensors"
    nested = "[" * 100_000 + "]" * 100_000
    path.write_bytes(
        save(
            {"a": np.zeros(1)},
            {"format": "perfmodel-kernels", "schema_version": "3", "description": nested},
        )
    )
    with pytest.raises(PerfModelError, match="lacks"):
        load_regressor(path)
