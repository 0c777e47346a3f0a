"""PyTorch profiler (Kineto) Chrome traces: activities of devices, and kernels with the operators that launched them.

Kernels are tied to operators by `External id`, to their launch by `correlation`; the passes and steps that they
belong to are those whose ranges lie around the launch. A trace without a device's kernels is read as one of the
CPU: its outermost operators are the activities.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import TableError
from perfmodel.ingest._annotations import Range, Tags, parse_tags, tags_at, with_default_phase
from perfmodel.ingest._chrome import ChromeEvent, ChromeTrace, read_chrome
from perfmodel.ingest._files import integer, listing, mapping, text
from perfmodel.ingest._measured_trace import Activity, ActivityKind, kind_of, numbered
from perfmodel.ingest._torch_ops import AUTOGRAD

_KERNEL: Final = ("kernel",)
_COPIES: Final = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES: Final = ("cuda_runtime", "cuda_driver", "runtime", "privateuse1_runtime", "hip_runtime")
_OPERATORS: Final = ("cpu_op", "operator")


@dataclass(frozen=True)
class KinetoFile:
    """One rank's trace, with times in seconds since the file's own zero."""

    path: Path
    rank: int
    base_ns: int
    """What the zero is on the common clock (`baseTimeNanoseconds`)."""
    device_name: str
    device_work: tuple[ChromeEvent, ...]
    """Kernels and copies; empty for a trace of the CPU alone."""
    operators: tuple[ChromeEvent, ...]
    launches: dict[int, ChromeEvent]
    """By correlation."""
    ranges: tuple[ChromeEvent, ...]
    """User annotations."""


def is_kineto(trace: ChromeTrace) -> bool:
    """Whether the PyTorch profiler wrote it."""
    return "schemaVersion" in trace.data or "deviceProperties" in trace.data


def read_kineto(path: Path, position: int = 0) -> KinetoFile:
    """Read one file; its rank is what it says (`distributedInfo`), else its position among the files.

    Raises:
        TableError: not a Kineto trace, another schema version, or malformed events.
    """
    trace = read_chrome(path)
    if not is_kineto(trace):
        raise TableError(f"{path}: not a trace of torch.profiler (no schemaVersion); name its format instead")
    if trace.data.get("schemaVersion", 1) != 1:
        raise TableError(f"{path}: schemaVersion {trace.data['schemaVersion']!r}; this release reads version 1")
    of_category: dict[str, list[ChromeEvent]] = {}
    for event in trace.events:
        of_category.setdefault(event.category.lower(), []).append(event)

    def pick(categories: Sequence[str]) -> tuple[ChromeEvent, ...]:
        return tuple(event for name in categories for event in of_category.get(name, ()))

    properties = listing(trace.data.get("deviceProperties", []), "deviceProperties", path)
    first = mapping(properties[0], "deviceProperties", path) if properties else {}
    distributed = mapping(trace.data.get("distributedInfo", {}), "distributedInfo", path)
    return KinetoFile(
        path=path,
        rank=integer(distributed.get("rank", position), "rank", path),
        base_ns=integer(trace.data.get("baseTimeNanoseconds", 0), "baseTimeNanoseconds", path),
        device_name=text(first.get("name", ""), "name of the device", path),
        device_work=pick(_KERNEL + _COPIES),
        operators=pick(_OPERATORS),
        launches={
            integer(e.args["correlation"], "correlation", e.where): e
            for e in pick(_LAUNCHES)
            if "correlation" in e.args
        },
        ranges=pick(("user_annotation",)),
    )


def kineto_activities(files: Sequence[KinetoFile]) -> list[Activity]:
    """Activities of all ranks on one clock; a device for every (rank, device) that has any."""
    base_ns = min(file.base_ns for file in files)
    # old traces count microseconds from the epoch: take that out before it costs digits
    origin_us = min((e.start_us for file in files for e in (*file.device_work, *file.operators)), default=0.0)
    found = []
    for file in files:
        shift_us = (file.base_ns - base_ns) * 1e-3 - origin_us
        found += [((file.rank, activity.device), activity) for activity in _of_file(file, shift_us)]
    return numbered(found)


def external_id(event: ChromeEvent) -> int | None:
    """The number that ties a kernel to its operator."""
    for name in ("External id", "external id"):
        if name in event.args:
            return integer(event.args[name], name, event.where)
    return None


def launch_us(file: KinetoFile, event: ChromeEvent, operator: ChromeEvent | None) -> float:
    """When a kernel was launched: its runtime call, else its operator, else its own start."""
    launch = file.launches.get(integer(event.args.get("correlation", -1), "correlation", event.where, -1))
    return (launch or operator or event).start_us


def operators_by_id(file: KinetoFile) -> dict[int, ChromeEvent]:
    """Operators by `External id`."""
    return {number: event for event in file.operators if (number := external_id(event)) is not None}


def _of_file(file: KinetoFile, shift_us: float) -> list[Activity]:
    events = list(file.device_work) or outermost(file.operators)
    on_device = bool(file.device_work)
    by_id = operators_by_id(file) if on_device else {}
    ids = [external_id(e) if on_device else None for e in events]
    operators = [None if number is None else by_id.get(number) for number in ids]
    launched_us = [
        launch_us(file, event, operator) if on_device else event.start_us
        for event, operator in zip(events, operators, strict=True)
    ]
    tags = _tags(file, np.array(launched_us, float))
    threads = {key: number for number, key in enumerate(dict.fromkeys((e.pid, e.tid) for e in events))}
    return [
        _activity(event, tag, on_device, threads[event.pid, event.tid], shift_us)
        for event, tag in zip(events, tags, strict=True)
    ]


def _activity(event: ChromeEvent, tags: Tags, on_device: bool, thread: int, shift_us: float) -> Activity:
    kind = ActivityKind.COPY if event.category.lower() in _COPIES else kind_of(event.name)
    device = integer(event.args.get("device", 0), "device", event.where) if on_device else 0
    stream = integer(event.args.get("stream", thread), "stream", event.where) if on_device else thread
    start_s, end_s = (event.start_us + shift_us) * 1e-6, (event.end_us + shift_us) * 1e-6
    return Activity(
        device, stream, start_s, end_s, event.name, kind, tags.phase, tags.stage, tags.micro_batch, tags.step
    )  # fmt: skip


def _tags(file: KinetoFile, at_us: np.ndarray) -> list[Tags]:
    """What the user's ranges say; a phase that they do not say is told by autograd's and the optimizer's own."""
    marked = [(e, parse_tags(e.name)) for e in file.ranges]
    said = tags_at([Range(e.start_us, e.end_us, t) for e, t in marked if t != Tags()], at_us)
    backward = [Range(e.start_us, e.end_us, Tags("backward")) for e in file.operators if e.name.startswith(AUTOGRAD)]
    if not backward:
        return said
    guessed = [tags.phase or "forward" for tags in tags_at(backward, at_us)]
    return with_default_phase(said, guessed)


def outermost(events: Sequence[ChromeEvent]) -> list[ChromeEvent]:
    """Events that lie in no other one of their thread."""
    found: list[ChromeEvent] = []
    end_us: dict[tuple[Any, Any], float] = {}
    for event in sorted(events, key=lambda e: (e.start_us, -e.duration_us)):
        thread = (event.pid, event.tid)
        if event.start_us >= end_us.get(thread, -1.0):
            found.append(event)
            end_us[thread] = event.end_us
    return found
