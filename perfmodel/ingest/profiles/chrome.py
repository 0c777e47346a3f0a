"""Reads and writes Chrome traces (Trace Event Format), including this package's own: of predictions
(`perfmodel timeline`), of runs (`perfmodel run --out`) and of imported profiles
(`perfmodel import --timeline`)."""

import gzip
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from perfmodel.display import json_text, shorten_reprs
from perfmodel.errors import TableError
from perfmodel.ingest._files import integer, listing, mapping, number, read_json, text
from perfmodel.ingest.profiles._measured_trace import PHASES, Activity, ActivityKind, MeasuredTrace
from perfmodel.ingest.tables import write_bytes

_DISPLAY_UNITS: Final = ("ms", "ns")


@dataclass(frozen=True)
class ChromeEvent:
    """A complete event (`ph` X)."""

    name: str
    category: str
    pid: Any
    tid: Any
    start_us: float
    duration_us: float
    args: Mapping[str, Any]
    place: str
    """File and number of the event, for messages."""

    @property
    def end_us(self) -> float:
        return self.start_us + self.duration_us


@dataclass(frozen=True)
class ChromeTrace:
    """A whole file; times in microseconds, as the format has them."""

    events: tuple[ChromeEvent, ...]
    process_names: Mapping[Any, str]
    thread_names: Mapping[tuple[Any, Any], str]
    data: Mapping[str, Any]
    """Everything else at the top of the file."""


def read_chrome(path: Path) -> ChromeTrace:
    """Read a trace (json or json.gz).

    Raises:
        TableError: not a Chrome trace, an unknown display unit, or an event with a missing,
            negative or infinite time.
    """
    # Chrome also opens a file that is only the list of events (its Trace Event Format).
    data = read_json(path, list_key="traceEvents")
    if "traceEvents" not in data:
        raise TableError(
            f"{path}: this is not a Chrome trace, because it has no traceEvents; name its format"
        )
    unit = data.get("displayTimeUnit", "ms")
    if unit not in _DISPLAY_UNITS:
        raise TableError(
            f"{path}: displayTimeUnit must be ms or ns, got {unit!r}; correct it (times are in us either way)"
        )
    events: list[ChromeEvent] = []
    processes: dict[Any, str] = {}
    threads: dict[tuple[Any, Any], str] = {}
    # Complete events (X) carry the times and metadata (M) the names. Flows,
    # counters and instants say nothing that a timeline holds.
    for index, item in enumerate(listing(data["traceEvents"], "traceEvents", path)):
        place = f"{path}: event {index}"
        event = mapping(item, "an event", place)
        kind = event.get("ph")
        if kind == "X":
            events.append(_complete(event, place))
        elif kind == "M":
            _name(event, place, processes, threads)
    header = {name: value for name, value in data.items() if name != "traceEvents"}
    return ChromeTrace(tuple(events), processes, threads, header)


def _complete(event: Mapping[str, Any], place: str) -> ChromeEvent:
    args = event.get("args", {})
    return ChromeEvent(
        name=text(event.get("name", ""), "name", place),
        category=text(event.get("cat", ""), "cat", place),
        pid=_key(event.get("pid"), place),
        tid=_key(event.get("tid"), place),
        start_us=number(event.get("ts"), "ts", place, 0),
        duration_us=number(event.get("dur", 0), "dur", place, 0),
        args=mapping(args, "args", place) if args is not None else {},
        place=place,
    )


def _name(
    event: Mapping[str, Any],
    place: str,
    processes: dict[Any, str],
    threads: dict[tuple[Any, Any], str],
) -> None:
    metadata = event.get("name")
    if metadata not in ("process_name", "thread_name"):
        return
    name = text(mapping(event.get("args", {}), "args", place).get("name", ""), "name", place)
    pid = _key(event.get("pid"), place)
    tid = _key(event.get("tid"), place)
    if metadata == "process_name":
        processes[pid] = name
    else:
        threads[pid, tid] = name


def _key(value: Any, place: str) -> Any:
    if isinstance(value, (dict, list)):
        raise TableError(
            f"{place}: pid and tid must be numbers or text, got {type(value).__name__}; export the trace again"
        )
    return value


def complete_event(
    device: int,
    stream: int,
    start_s: float,
    duration_s: float,
    name: str,
    category: str,
    args: Mapping[str, Any],
) -> dict[str, Any]:
    """An event of a trace to be written."""
    return {
        "ph": "X",
        "pid": device,
        "tid": stream,
        "ts": start_s * 1e6,
        "dur": duration_s * 1e6,
        "name": name,
        "cat": category,
        "args": args,
    }


def name_event(metadata: str, device: int, stream: int, name: str) -> dict[str, Any]:
    """A metadata event that names a process (`metadata` is `process_name`) or a thread
    (`thread_name`)."""
    return {"ph": "M", "name": metadata, "pid": device, "tid": stream, "args": {"name": name}}


def chrome_trace(
    events: Iterable[dict[str, Any]], description: Mapping[str, Any]
) -> dict[str, Any]:
    """A trace as the JSON object of the format; `description` states what was traced."""
    return {"traceEvents": list(events), "displayTimeUnit": "ms", "otherData": description}


def write_chrome(trace: Mapping[str, Any], path: Path | str) -> None:
    """Write a trace as JSON, atomically; compressed if the name ends in .gz."""
    # A time stamp in the archive would make equal traces differ.
    data = json_text(trace).encode()
    # The highest level of compression, Python's default, takes twice as long and saves a percent.
    if str(path).endswith(".gz"):
        data = gzip.compress(data, compresslevel=6, mtime=0)
    write_bytes(path, data)


_COMPUTE_STREAM: Final = 0
_COPIES: Final = ("offload", "reload")
_MARKS: Final = (
    {"layout", "step_time_s"},
    {"program", "makespan_s"},
    {"trace_format", "makespan_s"},
)


def is_own(trace: ChromeTrace) -> bool:
    """Whether this package wrote the trace, by the top-level fields that only its traces have."""
    description = trace.data.get("otherData")
    return isinstance(description, dict) and any(keys <= description.keys() for keys in _MARKS)


def read_own(path: Path) -> list[Activity]:
    """Activities of a trace that this package wrote.

    The events that a prediction draws inside of its passes would count time twice, and are left
    out.

    Raises:
        TableError: not a trace of this package, or a malformed one.
    """
    trace = read_chrome(path)
    if not is_own(trace):
        raise TableError(
            f"{path}: perfmodel did not write this trace; name its format instead (kineto, jax-trace)"
        )
    return [_own_activity(event) for event in trace.events if "inside" not in event.args]


def _own_activity(event: ChromeEvent) -> Activity:
    """Convert an event of a trace of this package to an activity; raises `TableError` for events
    that it never writes."""
    device = integer(event.pid, "pid", event.place)
    stream = integer(event.tid, "tid", event.place)
    fields = event.args
    phase = fields.get("event", "")
    # `Kind.ZERO` of a predicted timeline is the class of events that belong to no pass.
    phase = "" if phase == "zero" else phase
    if phase not in PHASES:
        raise TableError(
            f"{event.place}: perfmodel does not know event {phase!r}; write the trace again with this release"
        )

    def tag(name: str) -> int:
        return integer(fields.get(name, -1), name, event.place, -1)

    # Traces of predictions have no kind: the stream and the phase tell it.
    if "kind" in fields:
        kind = ActivityKind(min(tag("kind"), max(ActivityKind)))
    elif phase in _COPIES:
        kind = ActivityKind.COPY
    elif stream == _COMPUTE_STREAM:
        kind = ActivityKind.COMPUTE
    else:
        kind = ActivityKind.COMMUNICATION
    return Activity(
        device=device,
        stream=stream,
        start_s=event.start_us * 1e-6,
        end_s=event.end_us * 1e-6,
        name=event.name,
        kind=kind,
        phase=phase,
        stage=tag("stage"),
        micro_batch=tag("micro_batch"),
        step=tag("step"),
    )


def write_measured_trace(trace: MeasuredTrace, path: Path | str, format: str) -> None:
    """Write a trace so that `read_trace("perfmodel", ...)` and Perfetto read it; compressed if the
    name ends in .gz.

    Args:
        trace: the trace to write, such as `read_trace` returns.
        path: file to write, atomically.
        format: format that it was read from, to be noted in the file.
    """
    # All tags are written, so that reading the file back gives the same trace.
    rows = trace.to_frame().to_dict(orient="records")
    devices = sorted({row["device"] for row in rows})
    events = [name_event("process_name", device, 0, f"device {device}") for device in devices]
    for row, kind in zip(rows, trace.kind.tolist(), strict=True):
        fields = {
            "kind": kind,
            "event": row["phase"],
            "stage": row["stage"],
            "micro_batch": row["micro_batch"],
            "step": row["step"],
        }
        duration_s = row["end_s"] - row["start_s"]
        event = complete_event(
            row["device"],
            row["stream"],
            row["start_s"],
            duration_s,
            row["name"],
            row["kind"],
            fields,
        )
        events.append(event)
    description = {"trace_format": format, "makespan_s": trace.batch_time_s}
    write_chrome(chrome_trace(events, description), path)


shorten_reprs(__name__)
