"""The reader of every format, and the detection of a file's format."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.errors import PerfModelError, TableError, UnknownNameError
from perfmodel.ingest._files import read_bytes, read_json, read_text
from perfmodel.ingest._nccl_json import read_nccl_json
from perfmodel.ingest._nccl_tests import read_nccl_text
from perfmodel.ingest._osu import read_osu
from perfmodel.ingest._rows import Measurements, ReadOptions, Row, measurements
from perfmodel.ingest.profiles import (
    Activity,
    Detail,
    MeasuredTrace,
    Profile,
    XplaneFile,
    is_jax_trace,
    is_kineto,
    is_sqlite,
    kineto_activities,
    kineto_calls,
    kineto_rows,
    nsys_calls,
    nsys_rows,
    profile_of,
    read_jax_traces,
    read_kineto,
    read_nsys,
    read_xplane,
    trace_of,
    xplane_activities,
    xplane_calls,
    xplane_paths,
    xplane_rows,
)
from perfmodel.ingest.profiles.chrome import is_own, read_chrome, read_own

if TYPE_CHECKING:
    import pandas as pd

Files = list[Path]


@dataclass(frozen=True)
class Reader:
    """A function that reads files of a format, and the kinds of content that these have."""

    read: Callable[[Files], Any]
    """Parses the files; the other functions take its result."""
    rows: Callable[[Any, ReadOptions, Counter[str]], list[Row]] | None = None
    """Rows of measurement tables."""
    activities: Callable[[Any], list[Activity]] | None = None
    """Activities of a timeline."""
    calls: Callable[[Any], list[tuple[Activity, Detail]]] | None = None
    """Activities with the calls of operators and collectives that they belong to."""


def _nccl(path: Path, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    if read_bytes(path).lstrip().startswith(b"{"):
        return read_nccl_json(path, read_json(path), options, skipped)
    return read_nccl_text(path, read_text(path), options, skipped)


def _read_own(files: Files) -> list[Activity]:
    if len(files) > 1:
        raise PerfModelError("a trace of perfmodel is one file for all devices; give one")
    return read_own(files[0])


def _osu(path: Path, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    return read_osu(path, read_text(path), options, skipped)


def _rows_of_each(
    read_rows: Callable[[Path, ReadOptions, Counter[str]], list[Row]],
) -> Callable[[Files, ReadOptions, Counter[str]], list[Row]]:
    """A reader of rows of many files, from one of rows of one file."""

    def rows(files: Files, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
        rows_of_files: list[Row] = []
        for path in files:
            rows_of_files += read_rows(path, options, skipped)
        return rows_of_files

    return rows


def _xplanes(files: Files) -> list[XplaneFile]:
    """Profiles of all files; a directory of JAX's profiler holds one for each process."""
    profiles: list[XplaneFile] = []
    for file in files:
        profiles += [read_xplane(path) for path in xplane_paths(file)]
    return profiles


READERS: Final = {
    # Benchmarks: rows alone.
    "nccl-tests": Reader(list, rows=_rows_of_each(_nccl)),
    "osu": Reader(list, rows=_rows_of_each(_osu)),
    # Profilers: the files are parsed once, and rows, timeline and calls are taken from the result.
    "kineto": Reader(
        lambda files: [read_kineto(path, n) for n, path in enumerate(files)],
        rows=kineto_rows,
        activities=kineto_activities,
        calls=kineto_calls,
    ),
    "nsys": Reader(
        lambda files: [read_nsys(path) for path in files],
        rows=nsys_rows,
        activities=lambda reports: [activity for activity, _ in nsys_calls(reports)],
        calls=nsys_calls,
    ),
    "xplane": Reader(
        _xplanes,
        rows=xplane_rows,
        activities=xplane_activities,
        calls=xplane_calls,
    ),
    "jax-trace": Reader(
        read_jax_traces,
        activities=list,
        calls=lambda activities: [
            (activity, Detail(number)) for number, activity in enumerate(activities)
        ],
    ),
    # Traces that this package wrote: a timeline alone.
    "perfmodel": Reader(_read_own, activities=list),
}
"""Readers by the names of their formats."""
FORMATS: Final = tuple(READERS)
TABLE_FORMATS: Final = tuple(name for name, reader in READERS.items() if reader.rows)
"""Formats that hold rows of measurement tables."""
TRACE_FORMATS: Final = tuple(name for name, reader in READERS.items() if reader.activities)
"""Formats that hold timelines."""


def import_measurements(
    format: str, paths: Sequence[Path | str], options: ReadOptions | None = None
) -> Measurements:
    """Read a benchmark's or profiler's files as rows of the measurement tables.

    Args:
        format: one of `TABLE_FORMATS`, or `auto`.
        paths: files (of ranks, or of repeats: rows of equal shapes become their median), or profile
            directories of JAX.
        options: settings that the files do not state.

    Raises:
        UnknownNameError: another format.
        TableError: a file that is missing, damaged, of another format or version, or has impossible
            values.
    """
    format, contents, rows = _opened(paths, format, "rows", "measurement format")
    skipped: Counter[str] = Counter()
    return measurements(format, rows(contents, options or ReadOptions(), skipped), skipped)


def read_measurements(
    format: str, paths: Sequence[Path | str], options: ReadOptions | None = None, kind: str = ""
) -> "pd.DataFrame":
    """Read a benchmark's or profiler's files as one table: of kernels, or of collectives if the
    files have no kernels.

    Args:
        format: as for `import_measurements`.
        paths: as for `import_measurements`.
        options: settings that the files do not state.
        kind: `compute` or `collective` to say which; needed only where the files hold both.

    Raises:
        TableError: also where the files hold no such row.
    """
    return next(iter(import_measurements(format, paths, options).tables(kind, paths[0]).values()))


def read_trace(format: str, paths: Sequence[Path | str]) -> MeasuredTrace:
    """Read a profiler's files, or a trace of this package, as one timeline of all devices.

    Args:
        format: one of `TRACE_FORMATS`, or `auto`.
        paths: files of ranks, or profile directories of JAX.

    Raises:
        UnknownNameError: another format.
        TableError: as `import_measurements`; or no activity of a device.
    """
    _, contents, activities = _opened(paths, format, "activities", "trace format")
    return trace_of(activities(contents), Path(paths[0]))


def read_profile(format: str, paths: Sequence[Path | str]) -> Profile:
    """Calls of operators and collectives, with everything that the profiler reports about them, and
    the timeline of all devices.

    Args:
        format: one of `TRACE_FORMATS` but `perfmodel`, or `auto`.
        paths: files of ranks (some or all of a job's), or profile directories of JAX.

    Raises:
        UnknownNameError: another format.
        TableError: as `read_trace`.
    """
    _, contents, calls = _opened(paths, format, "calls", "format of profiles")
    return profile_of(calls(contents), Path(paths[0]))


def detect_format(path: Path | str) -> str:
    """The format of a file, by its content.

    Raises:
        TableError: no file, or of no format that this package reads.
    """
    path = Path(path)
    # By content, not by ending: all profilers of Python write `*.json`, and logs of nccl-tests have
    # any name. Only XSpace's protobuf has no mark at its beginning.
    if path.is_dir() or path.name.endswith(".xplane.pb"):
        return "xplane"
    data = read_bytes(path)
    if is_sqlite(data):
        return "nsys"
    name = None
    if data.lstrip().startswith((b"{", b"[")):
        name = _json_format(path)
    elif b"# OSU " in data:
        name = "osu"
    elif b"Out of bounds values" in data or b"out-of-place" in data:
        name = "nccl-tests"
    if name is None:
        raise TableError(
            f"{path}: perfmodel does not recognise the format; give --format (format=), one of "
            f"{', '.join(FORMATS)}"
        )
    return name


def _json_format(path: Path) -> str | None:
    """The format of a JSON file, by its keys and, for traces, by their events."""
    top = read_json(path, list_key="traceEvents")
    if "traceEvents" in top:
        trace = read_chrome(path)
        tests = {"perfmodel": is_own, "kineto": is_kineto, "jax-trace": is_jax_trace}
        return next((name for name, test in tests.items() if test(trace)), None)
    return "nccl-tests" if "results" in top or "out_of_bounds" in top else None


def _opened(
    paths: Sequence[Path | str], format: str, content: str, kind: str
) -> tuple[str, Any, Any]:
    """Read files, and look up the function that extracts one kind of content.

    Args:
        paths: files of one format.
        format: name of the format; `auto` takes that of the first file.
        content: field of `Reader` that has the function.
        kind: kind of formats, for messages.

    Returns:
        Name of the format, what its reader made of the files, and the function.
    """
    if not paths:
        raise PerfModelError("no file is named; give at least one")
    files = [Path(path) for path in paths]
    format = detect_format(files[0]) if format == "auto" else format
    # A format that lacks this kind of content is refused before its files, which may be large, are
    # parsed.
    able = {name: reader for name, reader in READERS.items() if getattr(reader, content)}
    if format not in able:
        raise UnknownNameError(kind, format, (*able, "auto"))
    reader = able[format]
    return format, reader.read(files), getattr(reader, content)
