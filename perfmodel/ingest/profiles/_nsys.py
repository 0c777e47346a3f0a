"""Nsight Systems reports exported with `nsys export --type sqlite`.

Tables and columns come and go with versions: the reader uses those that exist, and names a missing
one only where it cannot do without it. Times are nanoseconds since the session's start; several
reports are put on one clock by the epoch of that start (`TARGET_INFO_SESSION_START_TIME`).

Rows are of kernels under the NVTX ranges that PyTorch's `emit_nvtx(record_shapes=True)` (or
`nsys profile --pytorch=autograd-shapes-nvtx`) pushes for every operator with its shapes.
"""

import ast
import re
import sqlite3
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.errors import TableError
from perfmodel.files import why_no_file
from perfmodel.ingest._files import integer
from perfmodel.ingest._rows import ReadOptions, Row
from perfmodel.ingest.profiles._measured_trace import (
    Activity,
    ActivityKind,
    Range,
    is_communication,
    kind_of,
    numbered,
    parse_tags,
    tags_at,
)
from perfmodel.ingest.profiles._profile import Detail
from perfmodel.ingest.profiles._torch_ops import TorchOp, op_row

_TIMES: Final = ("start", "end")
_PUSH_POP, _START_END = 59, 60
"""Event types of NVTX ranges."""
Record = dict[str, Any]


class OperatorCall(NamedTuple):
    """One call of an operator, described by the NVTX range around it."""

    start_ns: int
    end_ns: int
    op: TorchOp


@dataclass(frozen=True)
class NsysFile:
    """Kernels, copies, launches and ranges of one report; times in nanoseconds since the session's
    start."""

    path: Path
    epoch_ns: int | None
    """Start of the session; None for old reports, which do not state it."""
    device_names: dict[int, str]
    kernels: tuple[Record, ...]
    """Rows of kernels, `name` as text."""
    copies: tuple[Record, ...]
    launches: dict[tuple[int, int], Record]
    """Runtime calls by (process, correlation)."""
    ranges: tuple[Record, ...]
    """NVTX ranges, `name` as text."""


def is_sqlite(data: bytes) -> bool:
    """Whether bytes begin like an SQLite file."""
    return data.startswith(b"SQLite format 3\0")


def read_nsys(path: Path) -> NsysFile:
    """Read one exported report.

    Raises:
        TableError: not an SQLite file, a damaged one, one without kernels, or with columns of an
            unknown schema.
    """
    if not path.is_file():
        raise TableError(f"{path}: {why_no_file(path)}")
    with path.open("rb") as file:
        if not is_sqlite(file.read(16)):
            raise TableError(
                f"{path}: this is not an SQLite file; export the report by nsys export --type sqlite REPORT"
            )
    try:
        # Read-only: SQLite would otherwise write its journal beside a stranger's report.
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as connection:
            connection.row_factory = sqlite3.Row
            return _Reader(path, connection).read()
    except (sqlite3.Error, OverflowError, UnicodeDecodeError) as error:
        raise TableError(
            f"{path}: the SQLite data are damaged ({error}); export the report again"
        ) from None


def _on_one_clock(
    files: Sequence[NsysFile],
) -> list[tuple[NsysFile, list[tuple[tuple[int, int], Activity]]]]:
    without_epoch = [file for file in files if file.epoch_ns is None]
    if len(files) > 1 and without_epoch:
        raise TableError(
            f"{without_epoch[0].path}: no TARGET_INFO_SESSION_START_TIME, so its clock cannot be aligned; give one "
            "report, or export with a newer Nsight Systems"
        )
    # Integers until the differences are taken: nanoseconds of an epoch are too many digits for a
    # float.
    first_ns = min(file.epoch_ns or 0 for file in files)
    return [(file, _activities_of_file(file, (file.epoch_ns or 0) - first_ns)) for file in files]


def launch_of(file: NsysFile, kernel: Record) -> Record | None:
    """The runtime call that launched a kernel, if the report has it."""
    return file.launches.get((_process(kernel.get("globalPid")), kernel.get("correlationId", -1)))


def launched_ns(file: NsysFile, kernel: Record) -> tuple[int, int]:
    """Time and thread of a kernel's launch; its own start and thread 0 if the report lacks the
    call."""
    launch = launch_of(file, kernel) or {"start": kernel["start"]}
    return launch["start"], launch.get("globalTid") or 0


class _Reader:
    """One open report."""

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self._path = path
        self._connection = connection
        # Which tables there are depends on what was traced and on the version.
        tables = connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view')"
        )
        self._tables = {str(row[0]) for row in tables}
        meta = {
            row["name"]: str(row["value"])
            for row in self._rows("META_DATA_EXPORT", ("name", "value"))
        }
        self._version = meta.get("EXPORT_SCHEMA_VERSION", "unknown")
        self._strings = {
            row["id"]: str(row["value"]) for row in self._rows("StringIds", ("id", "value"))
        }

    def read(self) -> NsysFile:
        """Read the kernels, copies and ranges of an export."""
        if "CUPTI_ACTIVITY_KIND_KERNEL" not in self._tables:
            raise TableError(
                f"{self._path}: no table CUPTI_ACTIVITY_KIND_KERNEL (schema version {self._version}); record with "
                "nsys profile --trace=cuda,nvtx"
            )
        # Demangled names tell templates (element types, tile sizes) apart, short ones do not.
        kernels = [
            row | {"name": self._name(row, ("demangledName", "shortName", "name"))}
            for row in self._checked("CUPTI_ACTIVITY_KIND_KERNEL", "deviceId", "streamId")
        ]
        copies = []
        for table, name in (
            ("CUPTI_ACTIVITY_KIND_MEMCPY", "memcpy"),
            ("CUPTI_ACTIVITY_KIND_MEMSET", "memset"),
        ):
            for row in self._checked(table, "deviceId", "streamId"):
                copies.append(row | {"name": name})
        # Correlation numbers are counted per process: only both together tell a launch.
        launches = {
            (_process(row.get("globalTid")), row["correlationId"]): row
            for row in self._checked("CUPTI_ACTIVITY_KIND_RUNTIME", "correlationId")
        }
        ranges = [
            row | {"name": row.get("text") or self._strings.get(row.get("textId") or -1, "")}
            for row in self._rows("NVTX_EVENTS", _TIMES)
            if row["end"] is not None and row.get("eventType", _PUSH_POP) in (_PUSH_POP, _START_END)
        ]
        epochs = [
            row["utcEpochNs"]
            for row in self._rows("TARGET_INFO_SESSION_START_TIME", ("utcEpochNs",))
        ]
        names = {
            row["id"]: str(row["name"]) for row in self._rows("TARGET_INFO_GPU", ("id", "name"))
        }
        return NsysFile(
            path=self._path,
            epoch_ns=integer(epochs[0], "utcEpochNs", self._path) if epochs else None,
            device_names=names,
            kernels=tuple(kernels),
            copies=tuple(copies),
            launches=launches,
            ranges=tuple(self._with_times("NVTX_EVENTS", ranges)),
        )

    def _rows(self, table: str, needed: tuple[str, ...]) -> Iterator[Record]:
        """Rows of a table; none if the report lacks it."""
        if table not in self._tables:
            return
        cursor = self._connection.execute(f'SELECT * FROM "{table}"')
        columns = [str(column[0]) for column in cursor.description]
        missing = [name for name in needed if name not in columns]
        if missing:
            raise TableError(
                f"{self._path}: {table} has no column {missing[0]} (schema version {self._version}; it has "
                f"{', '.join(columns[:8])}); export with another version of Nsight Systems"
            )
        for row in cursor:
            yield dict(zip(columns, row, strict=True))

    def _checked(self, table: str, *integer_columns: str) -> Iterator[Record]:
        """Rows with times, and whole numbers in these columns."""
        for index, row in enumerate(
            self._with_times(table, self._rows(table, (*_TIMES, *integer_columns)))
        ):
            for name in integer_columns:
                integer(row[name], name, f"{self._path}: {table} row {index}")
            yield row

    def _with_times(self, table: str, rows: Iterable[Record]) -> Iterator[Record]:
        for index, row in enumerate(rows):
            place = f"{self._path}: {table} row {index}"
            start_ns = integer(row["start"], "start", place)
            if integer(row["end"], "end", place) < start_ns:
                raise TableError(
                    f"{place}: the event ends at {row['end']} ns, before its start at {start_ns}; record it again"
                )
            yield row

    def _name(self, row: Record, columns: tuple[str, ...]) -> str:
        for column in columns:
            value = row.get(column)
            if value is None:
                continue
            # Most columns hold the number of a string.
            return self._strings.get(value, str(value)) if isinstance(value, int) else str(value)
        return "kernel"


def _activities_of_file(file: NsysFile, shift_ns: int) -> list[tuple[tuple[int, int], Activity]]:
    work = [*file.kernels, *file.copies]
    # Ranges are the host's: a kernel belongs to those around its launch, not around its own time.
    at_s = np.array([launched_ns(file, row)[0] for row in work], float) * 1e-9
    ranges = (
        Range(row["start"] * 1e-9, row["end"] * 1e-9, parse_tags(str(row["name"])))
        for row in file.ranges
    )
    keyed_activities = []
    for index, (row, tags) in enumerate(zip(work, tags_at(ranges, at_s), strict=True)):
        kind = ActivityKind.COPY if index >= len(file.kernels) else kind_of(row["name"])
        start_s = (row["start"] + shift_ns) * 1e-9
        end_s = (row["end"] + shift_ns) * 1e-9
        activity = Activity(0, int(row["streamId"]), start_s, end_s, row["name"], kind, *tags)
        keyed_activities.append(((int(row["deviceId"]), _process(row.get("globalPid"))), activity))
    return keyed_activities


def _process(global_id: Any) -> int:
    """The process of a global thread or process number (their low 24 bits are the thread)."""
    return global_id >> 24 if isinstance(global_id, int) else 0


def nsys_calls(files: Sequence[NsysFile]) -> list[tuple[Activity, Detail]]:
    """Kernels and copies of all reports on one clock, with the operators whose NVTX ranges lie
    around their launches; a device for every (report, process, device) that has any.

    Raises:
        TableError: several reports of which one does not say when it began, or records with
            impossible times.
    """
    keyed_calls: list[tuple[tuple[int, ...], Activity, Detail]] = []
    for number, (file, activities) in enumerate(_on_one_clock(files)):
        calls = _operator_calls(file)
        for position, (row, (key, activity)) in enumerate(
            zip([*file.kernels, *file.copies], activities, strict=True)
        ):
            launch = launch_of(file, row)
            call = None
            launched_s = float("nan")
            if launch is not None:
                # On the common clock the launch is as far from the kernel as in the report.
                launched_s = activity.start_s + (launch["end"] - row["start"]) * 1e-9
                call = _innermost(calls.get(launch.get("globalTid") or 0, []), launch["start"])
            if call is None or activity.kind != ActivityKind.COMPUTE:
                detail = Detail((number, "kernel", position), launched_s=launched_s)
            else:
                columns = _columns_of_kernel(call, row["name"])
                detail = Detail((number, id(call)), call.op.name, columns, launched_s)
            keyed_calls.append(((number, *key), activity, detail))
    devices = numbered((key, activity) for key, activity, _ in keyed_calls)
    return [
        (activity, detail) for activity, (_, _, detail) in zip(devices, keyed_calls, strict=True)
    ]


def _columns_of_kernel(call: OperatorCall, kernel_name: str) -> Row | None:
    """The columns of an operator whose kernel has this name; None if no table has such a row."""
    columns = op_row(call.op)
    # NVTX ranges give sizes only: the element type stands in the kernel's name.
    dtype = _dtype([kernel_name])
    return columns | {"dtype": dtype} if columns is not None and dtype else columns


_OPERATOR: Final = re.compile(r"(?P<name>aten::\w+),.*?sizes = (?P<sizes>\[[\[\]\d,\s]*\])")
_DTYPE: Final = {"bf16": "bf16", "bfloat16": "bf16", "fp16": "fp16", "half": "fp16", "f16": "fp16"}
_DTYPE_WORD: Final = re.compile(r"bfloat16|bf16|fp16|half|(?<![b\d])f16", re.I)


def nsys_rows(files: Sequence[NsysFile], options: ReadOptions, skipped: Counter[str]) -> list[Row]:
    """A row per call of an operator, whose time is that of the kernels that it launched."""
    rows: list[Row] = []
    for file in files:
        rows += _rows_of_file(file, options, skipped)
    return rows


def _rows_of_file(file: NsysFile, options: ReadOptions, skipped: Counter[str]) -> Iterator[Row]:
    """Rows of the operators, each with the time of all its kernels."""
    calls = _operator_calls(file)
    # An operator's time is the sum of the kernels whose launches lie in its range.
    kernels_by_call: dict[int, tuple[OperatorCall, list[Record]]] = {}
    for kernel in file.kernels:
        if is_communication(kernel["name"]):
            skipped["communication kernel: Nsight Systems does not record its size"] += 1
            continue
        at_ns, thread = launched_ns(file, kernel)
        call = _innermost(calls.get(thread, []), at_ns)
        if call is None:
            skipped[
                "kernel outside of any operator's NVTX range with shapes (emit_nvtx(record_shapes=True))"
            ] += 1
        else:
            kernels_by_call.setdefault(id(call), (call, []))[1].append(kernel)
    for call, kernels in kernels_by_call.values():
        row = op_row(call.op)
        time_us = sum(kernel["end"] - kernel["start"] for kernel in kernels) * 1e-3
        if row is None:
            skipped[f"no row for operator {call.op.name}"] += 1
        elif time_us > 0:
            device = options.name_of(file.device_names.get(int(kernels[0]["deviceId"]), ""))
            dtype = _dtype([kernel["name"] for kernel in kernels])
            timing = {
                "dtype": dtype,
                "time_us": time_us,
                "software": "torch",
                "variant": "nsys kernels",
            }
            yield {"source": "nsys", "device": device} | row | timing


def _dtype(names: Sequence[str]) -> str:
    """The element type that the names of an operator's kernels agree on."""
    # Mixed names (a bf16 kernel that adds up in fp32) leave it open.
    dtypes: set[str] = set()
    for name in names:
        dtypes |= {_DTYPE[alias.lower()] for alias in _DTYPE_WORD.findall(name)}
    return dtypes.pop() if len(dtypes) == 1 else ""


def _operator_calls(file: NsysFile) -> dict[int, list[OperatorCall]]:
    """Operators' ranges by thread, sorted by start."""
    calls: dict[int, list[OperatorCall]] = defaultdict(list)
    for row in file.ranges:
        # `aten::linear, seq = 12, op_id = 3, sizes = [[8, 1024], [4096, 1024]]` of torch's
        # emit_nvtx.
        operator = _OPERATOR.search(str(row["name"]))
        if operator is None:
            continue
        try:
            shapes: Any = ast.literal_eval(operator["sizes"])
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        operand_shapes = tuple(tuple(shape) if isinstance(shape, list) else () for shape in shapes)
        op = TorchOp(operator["name"], operand_shapes, ())
        calls[row.get("globalTid") or 0].append(OperatorCall(row["start"], row["end"], op))
    for thread_calls in calls.values():
        thread_calls.sort(key=lambda call: (call.start_ns, -call.end_ns))
    return calls


def _innermost(calls: list[OperatorCall], at_ns: int) -> OperatorCall | None:
    """The innermost open call (calls of a thread nest)."""
    # From the last call that had begun backwards: nested calls that have ended are passed over.
    for index in range(bisect_right(calls, at_ns, key=lambda call: call.start_ns) - 1, -1, -1):
        if calls[index].end_ns >= at_ns:
            return calls[index]
    return None
