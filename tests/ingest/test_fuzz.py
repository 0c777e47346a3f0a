"""Damaged files of every format: one clear line that names the file, or a sensible result; never
another error."""

import gzip
import json
from collections.abc import Callable
from contextlib import closing
from copy import deepcopy
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import reader_cases as cases
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from perfmodel.errors import PerfModelError
from perfmodel.ingest import (
    FORMATS,
    TABLE_FORMATS,
    TRACE_FORMATS,
    ReadOptions,
    detect_format,
    import_measurements,
    read_trace,
)
from perfmodel.ingest.profiles.chrome import write_measured_trace

FUZZ = settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
ROWS = {1024: (20.0, 21.0), 1048576: (50.0, 55.5)}
OPTIONS = ReadOptions(device="A100-SXM4-80GB", ranks=8)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """A sound file of every format."""
    folder = tmp_path_factory.mktemp("sound")
    kineto = cases.write_json(folder / "kineto.json", cases.kineto_json())
    write_measured_trace(read_trace("kineto", [kineto]), folder / "own.json", "kineto")
    return {
        "nccl-tests": cases.nccl_text(ROWS).encode(),
        "nccl-json": json.dumps(cases.nccl_json(ROWS)).encode(),
        "osu": cases.osu_text({4: 2.5, 1024: 8.0}).encode(),
        "kineto": kineto.read_bytes(),
        "kineto-gz": gzip.compress(kineto.read_bytes()),
        "nsys": cases.nsys_file(folder / "report.sqlite").read_bytes(),
        "xplane": cases.gpu_xspace(),
        "jax-trace": json.dumps(jax_trace()).encode(),
        "perfmodel": (folder / "own.json").read_bytes(),
    }


def jax_trace() -> dict[str, Any]:
    names = {1: "/host:CPU", 3: "/device:GPU:0"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in names.items()
    ]
    events.append(
        {
            "ph": "M",
            "pid": 3,
            "tid": 13,
            "name": "thread_name",
            "args": {"name": "Stream #13(Compute)"},
        }
    )
    events.append(
        {
            "ph": "X",
            "pid": 1,
            "tid": 1,
            "ts": 0,
            "dur": 90.0,
            "name": "train",
            "args": {"step_num": "2"},
        }
    )
    events.append(
        {
            "ph": "X",
            "pid": 3,
            "tid": 13,
            "ts": 5.0,
            "dur": 7.5,
            "name": "k",
            "args": {"hlo_op": "dot.3"},
        }
    )
    return {"displayTimeUnit": "ns", "traceEvents": events}


def read_everything(format: str, path: Path) -> None:
    """Read a file all ways; only errors of the package may come, in one line that names the
    file."""
    format = format.removesuffix("-gz").replace("nccl-json", "nccl-tests")
    calls: list[Callable[[], object]] = [lambda: detect_format(path)]
    if format in TABLE_FORMATS:
        calls.append(lambda: import_measurements(format, [path], OPTIONS))
    if format in TRACE_FORMATS:
        calls.append(lambda: read_trace(format, [path]))
    for call in calls:
        try:
            call()
        except PerfModelError as error:
            said = str(error)
        else:
            continue
        assert "\n" not in said
        assert path.name in said


def test_sound_files_are_read(sound: dict[str, bytes], tmp_path: Path) -> None:
    for name, data in sound.items():
        format = name.removesuffix("-gz").replace("nccl-json", "nccl-tests")
        path = tmp_path / (f"{name}.xplane.pb" if name == "xplane" else name)
        path.write_bytes(data)
        assert detect_format(path) == format
        if format in TABLE_FORMATS:
            found = import_measurements(format, [path], OPTIONS)
            assert len(found.kernels) + len(found.collectives) > 0
        if format in TRACE_FORMATS:
            assert read_trace(format, [path]).n > 0


PLACES = st.integers(0, 2**16)
"""Bytes of a file, counted on from its beginning where it is shorter."""
CHANGES = st.lists(
    st.tuples(st.just("insert"), PLACES, st.binary(min_size=1, max_size=8))
    | st.tuples(st.just("remove"), PLACES, st.integers(1, 40))
    | st.tuples(st.just("flip"), PLACES, st.integers(0, 255)),
    max_size=6,
)


@pytest.mark.parametrize(
    "format",
    [
        "nccl-tests",
        "nccl-json",
        "osu",
        "kineto",
        "kineto-gz",
        "nsys",
        "xplane",
        "jax-trace",
        "perfmodel",
    ],
)
@FUZZ
@given(changes=CHANGES, kept=st.none() | PLACES)
def test_damaged_bytes(
    format: str,
    sound: dict[str, bytes],
    tmp_path: Path,
    changes: list[tuple[str, int, Any]],
    kept: int | None,
) -> None:
    """Truncated, and with bytes flipped, removed and inserted."""
    content = bytearray(sound[format])
    for what, place, value in changes:
        at = place % max(len(content), 1)
        if what == "insert":
            content[at:at] = value
        elif what == "remove":
            del content[at : at + value]
        elif content:
            content[at] = value
    if kept is not None:
        del content[kept % (len(content) + 1) :]
    path = tmp_path / "damaged"
    path.write_bytes(bytes(content))
    read_everything(format, path)


@pytest.mark.parametrize("format", FORMATS)
@FUZZ
@given(content=st.binary(max_size=200))
@example(content=b"")
@example(content=b"{}")
@example(content=b"[]")
@example(content=b"SQLite format 3\0")
@example(content=b"\x1f\x8b")
@example(content=b'{"traceEvents": [[]], "schemaVersion": 1}')
@example(content=b'{"traceEvents": {"a": 1}}')
@example(content=b"[" * 100_000)
@example(content=b'{"version": 1' + b"0" * 5000 + b"}")
def test_garbage(format: str, tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "garbage"
    path.write_bytes(content)
    read_everything(format, path)


ODD_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(10**20), 10**20),
    st.floats(),
    st.text(max_size=5),
    st.builds(list),
    st.builds(dict),
    st.builds(lambda: [[1, [2]]]),
    st.just("1e400"),
    st.just("us"),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Every place in a JSON value."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value)
        if isinstance(value, list)
        else ()
    )
    return [path, *(place for key, inner in items for place in places(inner, (*path, key)))]


@pytest.mark.parametrize("format", ["nccl-json", "kineto", "jax-trace", "perfmodel"])
@FUZZ
@given(data=st.data())
def test_odd_json_values(
    format: str, sound: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    """Negative, infinite and missing numbers, texts for numbers, lists for objects, anywhere."""
    value = deepcopy(json.loads(sound[format]))
    for _ in range(data.draw(st.integers(1, 3), label="changes")):
        *outer, last = data.draw(st.sampled_from(places(value)[1:]), label="place")
        holder = reduce(getitem, outer, value)
        holder[last] = data.draw(ODD_VALUES, label="value")
    path = tmp_path / "odd.json"
    path.write_text(json.dumps(value))
    read_everything(format, path)


@pytest.mark.parametrize(
    "table",
    ["CUPTI_ACTIVITY_KIND_KERNEL", "CUPTI_ACTIVITY_KIND_RUNTIME", "NVTX_EVENTS", "StringIds"],
)
@FUZZ
@given(data=st.data())
def test_odd_database_values(
    table: str, sound: dict[str, bytes], tmp_path: Path, data: st.DataObject
) -> None:
    import sqlite3

    values = st.one_of(
        st.none(),
        st.integers(-(2**63), 2**63 - 1),
        st.floats(allow_nan=False),
        st.text(max_size=5),
        st.binary(max_size=5),
        st.sampled_from([b"0", b"17", "0", "17", "1e3"]),
    )
    path = tmp_path / "odd.sqlite"
    path.write_bytes(sound["nsys"])
    with closing(sqlite3.connect(path)) as db, db:
        columns = [row[1] for row in db.execute(f"PRAGMA table_info({table})")]
        column = data.draw(st.sampled_from(columns), label="column")
        value = data.draw(values, label="value")
        try:
            db.execute(f'UPDATE {table} SET "{column}" = ?', (value,))
        except sqlite3.Error:
            return
    read_everything("nsys", path)


@FUZZ
@given(st.integers(-(2**63), 2**64 - 1), st.integers(-(2**63), 2**64 - 1))
def test_odd_times_of_xplane(
    tmp_path_factory: pytest.TempPathFactory, start_ps: int, duration_ps: int
) -> None:
    path = tmp_path_factory.mktemp("odd") / "odd.xplane.pb"
    path.write_bytes(cases.gpu_xspace(start_ps, duration_ps))
    read_everything("xplane", path)
