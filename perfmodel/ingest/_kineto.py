"""PyTorch profiler (Kineto) Chrome traces: activities of devices, and kernels with the operators that launched them.

Kernels are tied to their launch by `correlation`, to operators by `External id` or, where that names none, as the
innermost ones around the launch; the passes and steps that they belong to are those whose ranges lie around the launch.
A trace without a device's kernels is read as one of the CPU: its outermost operators are the activities.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import TableError
from perfmodel.ingest._chrome import ChromeEvent, ChromeTrace, read_chrome
from perfmodel.ingest._files import integer, listing, mapping, text
from perfmodel.ingest._measured_trace import (
    Activity,
    ActivityKind,
    Range,
    Tags,
    kind_of,
    numbered,
    parse_tags,
    tags_at,
)
from perfmodel.ingest._torch_ops import AUTOGRAD

_KERNEL: Final = ("kernel", "mtia_ccp_events", "hpu_op")
_COPIES: Final = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES: Final = (
    "cuda_runtime", "cuda_driver", "runtime", "privateuse1_runtime", "hip_runtime", "mtia_runtime", "xpu_runtime",
)  # fmt: skip
"""Categories of events (libkineto's ActivityType), of accelerators of all makes."""
_OPERATORS: Final = ("cpu_op", "operator")


@dataclass(frozen=True)
class KinetoFile:
    """One rank's trace, with times in seconds since the file's own zero."""

    rank: int
    base_ns: int
    """What the zero is on the common clock (`baseTimeNanoseconds`)."""
    world_size: int
    """Ranks of a job with a single process group; 1 where there are several, or none is named."""
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


def read_kineto(path: Path, position: int) -> KinetoFile:
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
    groups = listing(distributed.get("pg_config", []), "pg_config", path)
    return KinetoFile(
        rank=integer(distributed.get("rank", position), "rank", path),
        base_ns=integer(trace.data.get("baseTimeNanoseconds", 0), "baseTimeNanoseconds", path),
        world_size=integer(distributed.get("world_size", 1), "world_size", path, 1) if len(groups) <= 1 else 1,
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
    found = []
    for file, shift_us in on_one_clock(files):
        found += [((file.rank, activity.device), activity) for activity in _of_file(file, shift_us)]
    return numbered(found)


def on_one_clock(files: Sequence[KinetoFile]) -> list[tuple[KinetoFile, float]]:
    """Each file with the microseconds to add to its times."""
    base_ns = min(file.base_ns for file in files)
    # old traces count microseconds from the epoch: take that out before it costs digits
    origin_us = min((e.start_us for file in files for e in (*file.device_work, *file.operators)), default=0.0)
    return [(file, (file.base_ns - base_ns) * 1e-3 - origin_us) for file in files]


def external_id(event: ChromeEvent) -> int | None:
    """The number that ties a kernel to its operator."""
    for name in ("External id", "external id"):
        if name in event.args:
            return integer(event.args[name], name, event.where)
    return None


def launch_of(file: KinetoFile, event: ChromeEvent) -> ChromeEvent | None:
    """The runtime call that launched a kernel, where the file has it."""
    return file.launches.get(integer(event.args.get("correlation", -1), "correlation", event.where, -1))


def operators_of_kernels(file: KinetoFile) -> list[ChromeEvent | None]:
    """For each kernel or copy of the device the operator that launched it."""
    by_id = {number: event for event in file.operators if (number := external_id(event)) is not None}
    found = [by_id.get(number) if (number := external_id(e)) is not None else None for e in file.device_work]
    if 2 * sum(each is not None for each in found) >= len(found) or not file.operators:
        return found  # otherwise the ids are not those of operators
    launches = [launch_of(file, event) for event in file.device_work]
    around = parents_of([*file.operators, *(each for each in launches if each is not None)])
    # Times are rounded, so that a launch may seem to lie inside the launch before it; that is no operator.
    is_operator = {id(event) for event in file.operators}
    return [
        None if each is None else next((event for event in around[id(each)] if id(event) in is_operator), None)
        for each in launches
    ]


def parents_of(events: Sequence[ChromeEvent]) -> dict[int, tuple[ChromeEvent, ...]]:
    """Calls around each event of its thread, innermost first, by identity of the event."""
    open_calls: dict[tuple[Any, Any], list[ChromeEvent]] = defaultdict(list)
    found: dict[int, tuple[ChromeEvent, ...]] = {}
    for event in sorted(events, key=lambda e: (e.start_us, -e.duration_us)):
        stack = open_calls[event.pid, event.tid]
        while stack and stack[-1].end_us <= event.start_us:
            stack.pop()
        found[id(event)] = tuple(reversed(stack))
        stack.append(event)
    return found


def _of_file(file: KinetoFile, shift_us: float) -> list[Activity]:
    if not file.device_work:
        return activities_of(file, outermost(file.operators), None, shift_us)
    return activities_of(file, file.device_work, operators_of_kernels(file), shift_us)


def activities_of(
    file: KinetoFile,
    events: Sequence[ChromeEvent],
    operators: Sequence[ChromeEvent | None] | None,
    shift_us: float,
) -> list[Activity]:
    """Events of one rank as activities: kernels with the operators that launched them, or the host's own (None)."""
    launched_us = [event.start_us for event in events]
    if operators is not None:  # the runtime call, else the operator, else the kernel itself
        launches = [launch_of(file, event) for event in events]
        launched_us = [(a or b or c).start_us for a, b, c in zip(launches, operators, events, strict=True)]
    tags = _tags(file, np.array(launched_us, float))
    threads = {key: number for number, key in enumerate(dict.fromkeys((e.pid, e.tid) for e in events))}
    return [
        _activity(event, tag, operators is not None, threads[event.pid, event.tid], shift_us)
        for event, tag in zip(events, tags, strict=True)
    ]


def _activity(event: ChromeEvent, tags: Tags, on_device: bool, thread: int, shift_us: float) -> Activity:
    copies = event.category.lower() in _COPIES or event.name == "dma_request"  # MTIA's
    kind = ActivityKind.COPY if copies else kind_of(event.name)
    device = integer(event.args.get("device", 0), "device", event.where) if on_device else 0
    stream = integer(event.args.get("stream", thread), "stream", event.where) if on_device else thread
    start_s, end_s = (event.start_us + shift_us) * 1e-6, (event.end_us + shift_us) * 1e-6
    return Activity(device, stream, start_s, end_s, event.name, kind, *tags)


def _tags(file: KinetoFile, at_us: np.ndarray) -> list[Tags]:
    """What the user's ranges say; a phase that they do not say is told by autograd's and the optimizer's own."""
    said = tags_at((Range(e.start_us, e.end_us, parse_tags(e.name)) for e in file.ranges), at_us)
    backward = [Range(e.start_us, e.end_us, Tags("backward")) for e in file.operators if e.name.startswith(AUTOGRAD)]
    if not backward:
        return said
    guessed = (tags.phase or "forward" for tags in tags_at(backward, at_us))
    return [tags if tags.phase else tags._replace(phase=phase) for tags, phase in zip(said, guessed, strict=True)]


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
