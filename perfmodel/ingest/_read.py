"""Which reader for which format, and which format for which file."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

from perfmodel.errors import PerfModelError, TableError, UnknownNameError
from perfmodel.ingest._chrome import read_chrome
from perfmodel.ingest._files import read_bytes, read_json, read_text
from perfmodel.ingest._jax_trace import is_jax_trace, read_jax_traces
from perfmodel.ingest._kineto import is_kineto, kineto_activities, read_kineto
from perfmodel.ingest._kineto_calls import kineto_calls
from perfmodel.ingest._kineto_rows import kineto_rows
from perfmodel.ingest._measured_trace import Activity, MeasuredTrace, trace_of
from perfmodel.ingest._nccl_json import read_nccl_json
from perfmodel.ingest._nccl_tests import read_nccl_text
from perfmodel.ingest._nsys import is_sqlite, nsys_calls, nsys_rows, read_nsys
from perfmodel.ingest._options import ReadOptions
from perfmodel.ingest._osu import read_osu
from perfmodel.ingest._own import is_own, read_own
from perfmodel.ingest._profile import Detail, Profile, profile_of
from perfmodel.ingest._rows import Measurements, Row, measurements
from perfmodel.ingest._xplane import read_xplane, xplane_activities, xplane_calls, xplane_paths, xplane_rows

if TYPE_CHECKING:
    import pandas as pd

TABLE_FORMATS: Final = ("nccl-tests", "osu", "kineto", "nsys", "xplane")
"""Formats that hold rows of measurement tables."""
TRACE_FORMATS: Final = ("kineto", "nsys", "xplane", "jax-trace", "perfmodel")
"""Formats that hold timelines."""
FORMATS: Final = tuple(dict.fromkeys((*TABLE_FORMATS, *TRACE_FORMATS)))


def import_measurements(format: str, paths: Sequence[Path | str], options: ReadOptions | None = None) -> Measurements:
    """Rows of the measurement tables from the files of a benchmark or profiler.

    Args:
        format: one of `TABLE_FORMATS`, or `auto`.
        paths: files (of ranks, or of repeats: rows of equal shapes become their median), or profile directories of JAX.
        options: what the files do not say.

    Raises:
        UnknownNameError: another format.
        TableError: a file that is missing, damaged, of another format or version, or has impossible values.
    """
    files, format = _chosen(paths, format, TABLE_FORMATS, "measurement format")
    skipped: Counter[str] = Counter()
    return measurements(format, _rows(format, files, options or ReadOptions(), skipped), skipped)


def read_measurements(
    format: str, paths: Sequence[Path | str], options: ReadOptions | None = None, kind: str = ""
) -> "pd.DataFrame":
    """The table of `import_measurements`: of kernels, or of collectives where there are only those.

    Args:
        format: as for `import_measurements`.
        paths: as for `import_measurements`.
        options: what the files do not say.
        kind: `compute` or `collective` to say which; needed only where the files hold both.

    Raises:
        TableError: also where the files hold no such row.
    """
    found = import_measurements(format, paths, options)
    tables = {"compute": found.kernels, "collective": found.collectives}
    if kind and kind not in tables:
        raise UnknownNameError("kind of table", kind, tables)
    table = tables[kind] if kind else found.kernels if len(found.kernels) else found.collectives
    if not len(table):
        reasons = "; ".join(f"{reason}: {count}" for reason, count in list(found.skipped.items())[:3])
        raise TableError(f"{paths[0]}: no {kind or 'usable'} row in it{f' ({reasons})' if reasons else ''}")
    return table


def read_trace(format: str, paths: Sequence[Path | str]) -> MeasuredTrace:
    """One timeline of all devices from the files of a profiler, or from a trace of this package.

    Args:
        format: one of `TRACE_FORMATS`, or `auto`.
        paths: files of ranks, or profile directories of JAX.

    Raises:
        UnknownNameError: another format.
        TableError: as `import_measurements`; or no activity of a device.
    """
    files, format = _chosen(paths, format, TRACE_FORMATS, "trace format")
    return trace_of(_activities(format, files), files[0])


def read_profile(format: str, paths: Sequence[Path | str]) -> Profile:
    """Calls of operators and collectives, with all that the profiler says of them, and the timeline of all devices.

    Args:
        format: one of `TRACE_FORMATS` but `perfmodel`, or `auto`.
        paths: files of ranks (some or all of a job's), or profile directories of JAX.

    Raises:
        UnknownNameError: another format.
        TableError: as `read_trace`.
    """
    files, format = _chosen(paths, format, TRACE_FORMATS[:-1], "format of profiles")
    match format:
        case "kineto":
            found = kineto_calls([read_kineto(path, n) for n, path in enumerate(files)])
        case "nsys":
            found = nsys_calls([read_nsys(path) for path in files])
        case "xplane":
            found = xplane_calls([read_xplane(p) for path in files for p in xplane_paths(path)])
        case _:
            found = [(activity, Detail(number)) for number, activity in enumerate(read_jax_traces(files))]
    return profile_of(found, files[0])


def detect_format(path: Path | str) -> str:
    """The format of a file, by its content.

    Raises:
        TableError: no file, or of no format that this package reads.
    """
    path = Path(path)
    if path.is_dir() or path.name.endswith(".xplane.pb"):
        return "xplane"
    data = read_bytes(path)
    if is_sqlite(data):
        return "nsys"
    if data.lstrip().startswith(b"{"):
        top = read_json(path)
        if "traceEvents" in top:
            trace = read_chrome(path)
            tests = {"perfmodel": is_own, "kineto": is_kineto, "jax-trace": is_jax_trace}
            for name, test in tests.items():
                if test(trace):
                    return name
        elif "results" in top or "out_of_bounds" in top:
            return "nccl-tests"
    elif b"# OSU " in data:
        return "osu"
    elif b"Out of bounds values" in data or b"out-of-place" in data:
        return "nccl-tests"
    raise TableError(f"{path}: of no known format; say which: {', '.join(FORMATS)}")


def _rows(format: str, files: list[Path], options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    match format:
        case "nccl-tests":
            return [row for path in files for row in _nccl(path, options, skipped)]
        case "osu":
            return [row for path in files for row in read_osu(path, read_text(path), options, skipped)]
        case "kineto":
            return kineto_rows([read_kineto(path, n) for n, path in enumerate(files)], options, skipped)
        case "nsys":
            return nsys_rows([read_nsys(path) for path in files], options, skipped)
        case _:
            return xplane_rows([read_xplane(p) for path in files for p in xplane_paths(path)], options, skipped)


def _nccl(path: Path, options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    if read_bytes(path).lstrip().startswith(b"{"):
        return read_nccl_json(path, read_json(path), options, skipped)
    return read_nccl_text(path, read_text(path), options, skipped)


def _activities(format: str, files: list[Path]) -> list[Activity]:
    match format:
        case "kineto":
            return kineto_activities([read_kineto(path, n) for n, path in enumerate(files)])
        case "nsys":
            return [activity for activity, _ in nsys_calls([read_nsys(path) for path in files])]
        case "xplane":
            return xplane_activities([read_xplane(p) for path in files for p in xplane_paths(path)])
        case "jax-trace":
            return read_jax_traces(files)
        case _:
            if len(files) > 1:
                raise PerfModelError("a trace of perfmodel is one file for all devices; give one")
            return read_own(files[0])


def _chosen(paths: Sequence[Path | str], format: str, formats: Sequence[str], kind: str) -> tuple[list[Path], str]:
    """The files, and their format: as it is named, or for `auto` that of the first."""
    if not paths:
        raise PerfModelError("no file given")
    files = [Path(path) for path in paths]
    format = detect_format(files[0]) if format == "auto" else format
    if format not in formats:
        raise UnknownNameError(kind, format, (*formats, "auto"))
    return files, format
