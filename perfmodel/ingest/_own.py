"""Chrome traces that this package writes: of predictions (`perfmodel timeline`), of runs (`perfmodel run --out`)
and of what it read (`perfmodel import --timeline`)."""

from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.ingest._chrome import (
    ChromeEvent,
    ChromeTrace,
    chrome_trace,
    complete_event,
    device_and_stream,
    name_event,
    read_chrome,
    write_chrome,
)
from perfmodel.ingest._files import integer
from perfmodel.ingest._measured_trace import PHASES, Activity, ActivityKind, MeasuredTrace

_COMPUTE_STREAM: Final = 0
_COPIES: Final = ("offload", "reload")
_MARKS: Final = ({"layout", "step_time_s"}, {"program", "makespan_s"}, {"trace_format", "makespan_s"})


def is_own(trace: ChromeTrace) -> bool:
    """Whether this package wrote it: only its traces have these fields at the top."""
    other = trace.data.get("otherData")
    return isinstance(other, dict) and any(keys <= other.keys() for keys in _MARKS)


def read_own(path: Path) -> list[Activity]:
    """Activities of a trace; what a prediction shows inside of passes are not activities of their own.

    Raises:
        TableError: not a trace of this package, or a malformed one.
    """
    trace = read_chrome(path)
    if not is_own(trace):
        raise TableError(f"{path}: not a trace of perfmodel; name its format (kineto, jax-trace) instead")
    return [_activity(event) for event in trace.events if "inside" not in event.args]


def _activity(event: ChromeEvent) -> Activity:
    device, stream = device_and_stream(event)
    args = event.args
    phase = args.get("event", "")
    phase = "" if phase == "zero" else phase
    if phase not in PHASES:
        raise TableError(f"{event.where}: unknown event {phase!r}; write the trace again with this release")

    def tag(name: str) -> int:
        return integer(args.get(name, -1), name, event.where, -1)

    kind = ActivityKind.COMPUTE if stream == _COMPUTE_STREAM else ActivityKind.COMMUNICATION
    kind = ActivityKind.COPY if phase in _COPIES else kind
    if "kind" in args:
        kind = ActivityKind(min(tag("kind"), max(ActivityKind)))
    return Activity(
        device, stream, event.start_us * 1e-6, event.end_us * 1e-6, event.name, kind, phase, tag("stage"),
        tag("micro_batch"), tag("step"),
    )  # fmt: skip


def write_measured_trace(trace: MeasuredTrace, path: Path | str, format: str) -> None:
    """Write a trace so that `read_trace("perfmodel", ...)` and Perfetto read it; compressed if the name ends in .gz.

    Args:
        trace: as from `read_trace`.
        path: file to write, atomically.
        format: what it was read from, to be noted in the file.
    """
    rows = trace.to_frame().to_dict(orient="records")
    names = [
        name_event("process_name", device, 0, f"device {device}") for device in sorted({row["device"] for row in rows})
    ]
    events = [
        complete_event(
            row["device"], row["stream"], row["start_s"], row["end_s"] - row["start_s"], row["name"], row["kind"],
            {"kind": kind, "event": row["phase"]} | {name: row[name] for name in ("stage", "micro_batch", "step")},
        )
        for row, kind in zip(rows, trace.kind.tolist(), strict=True)
    ]  # fmt: skip
    write_chrome(chrome_trace([*names, *events], {"trace_format": format, "makespan_s": trace.batch_time_s}), path)
