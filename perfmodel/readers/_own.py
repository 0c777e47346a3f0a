"""Chrome traces that this package writes: of predictions (`perfmodel timeline`) and runs (`perfmodel run --out`)."""

from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.readers._chrome import ChromeEvent, ChromeTrace, device_and_stream, read_chrome
from perfmodel.readers._files import integer
from perfmodel.readers._measured_trace import PHASES, Activity, ActivityKind

_COMPUTE_STREAM: Final = 0
_COPIES: Final = ("offload", "reload")


def is_own(trace: ChromeTrace) -> bool:
    """Whether this package wrote it: only its traces have these fields at the top."""
    other = trace.data.get("otherData")
    return isinstance(other, dict) and ("step_time_s" in other or {"program", "makespan_s"} <= other.keys())


def read_own(path: Path) -> list[Activity]:
    """Activities of a trace.

    Raises:
        TableError: not a trace of this package, or a malformed one.
    """
    trace = read_chrome(path)
    if not is_own(trace):
        raise TableError(f"{path}: not a trace of perfmodel; name its format (kineto, jax-trace) instead")
    return [_activity(event) for event in trace.events]


def _activity(event: ChromeEvent) -> Activity:
    device, stream = device_and_stream(event)
    args = event.args
    phase = args.get("phase", "")
    phase = "optimizer" if phase == "update" else phase
    if phase not in PHASES:
        raise TableError(f"{event.where}: unknown phase {phase!r}; write the trace again with this release")

    def tag(name: str) -> int:
        return integer(args.get(name, -1), name, event.where, -1)

    kind = ActivityKind.COMPUTE if stream == _COMPUTE_STREAM else ActivityKind.COMMUNICATION
    return Activity(
        device, stream, event.start_us * 1e-6, event.end_us * 1e-6, event.name,
        ActivityKind.COPY if phase in _COPIES else kind, phase, tag("stage"), tag("micro_batch"),
    )  # fmt: skip
