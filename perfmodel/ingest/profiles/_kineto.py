"""PyTorch profiler (Kineto) Chrome traces: activities of devices, and kernels with the operators
that launched them.

A kernel is tied to its launch by `correlation`, and to its operator by `External id` or, where that
names none, as the innermost operator around the launch. Its pass and step are those whose ranges
lie around the launch. A trace without a device's kernels is read as one of the CPU: its outermost
operators are the activities.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.errors import TableError
from perfmodel.ingest._files import integer, listing, mapping, text
from perfmodel.ingest.profiles._measured_trace import (
    Activity,
    ActivityKind,
    Range,
    Tags,
    kind_of,
    numbered,
    parse_tags,
    tags_at,
)
from perfmodel.ingest.profiles._torch_ops import AUTOGRAD
from perfmodel.ingest.profiles.chrome import ChromeEvent, ChromeTrace, read_chrome

_KERNEL: Final = ("kernel", "mtia_ccp_events", "hpu_op")
_COPIES: Final = ("gpu_memcpy", "gpu_memset", "memcpy", "memset")
_LAUNCHES: Final = (
    "cuda_runtime",
    "cuda_driver",
    "runtime",
    "privateuse1_runtime",
    "hip_runtime",
    "mtia_runtime",
    "xpu_runtime",
)
"""Categories of events (libkineto's ActivityType), of accelerators of all makes."""
_OPERATORS: Final = ("cpu_op", "operator")


@dataclass(frozen=True)
class KinetoFile:
    """One rank's trace, with times in seconds since the file's own zero."""

    rank: int
    base_ns: int
    """Time of the file's zero on the clock of all ranks (`baseTimeNanoseconds`)."""
    world_size: int
    """Ranks of a job with a single process group; 1 if there are several or none is named."""
    device_name: str
    device_work: tuple[ChromeEvent, ...]
    """Kernels and copies; empty for a trace of the CPU alone."""
    operators: tuple[ChromeEvent, ...]
    launches: dict[int, ChromeEvent]
    """Runtime calls by the correlation number of the kernels that they launch."""
    ranges: tuple[ChromeEvent, ...]
    """Ranges that the user's code annotated."""


_OWN_CATEGORIES: Final = ("cpu_op", "cuda_runtime", "cuda_driver", "gpu_memcpy")


def is_kineto(trace: ChromeTrace) -> bool:
    """Whether the PyTorch profiler wrote the trace.

    Tools that cut traces write only the list of events, whose categories then tell the profiler.
    """
    if trace.data:
        return "schemaVersion" in trace.data or "deviceProperties" in trace.data
    return any(event.category.lower() in _OWN_CATEGORIES for event in trace.events)


def read_kineto(path: Path, position: int) -> KinetoFile:
    """Read one file; the rank comes from its `distributedInfo`, else from its position among the
    files.

    Raises:
        TableError: not a Kineto trace, another schema version, or malformed events.
    """
    trace = read_chrome(path)
    if not is_kineto(trace):
        raise TableError(
            f"{path}: this is not a trace of torch.profiler, because it has no schemaVersion; name its format instead"
        )
    if trace.data.get("schemaVersion", 1) != 1:
        raise TableError(
            f"{path}: schemaVersion is {trace.data['schemaVersion']!r}; perfmodel reads version 1; export it "
            "in that version"
        )
    # Categories changed their case between versions of libkineto ("Kernel", "kernel").
    by_category: dict[str, list[ChromeEvent]] = {}
    for event in trace.events:
        by_category.setdefault(event.category.lower(), []).append(event)

    def pick(categories: Sequence[str]) -> tuple[ChromeEvent, ...]:
        picked: list[ChromeEvent] = []
        for category in categories:
            picked += by_category.get(category, ())
        return tuple(picked)

    properties = listing(trace.data.get("deviceProperties", []), "deviceProperties", path)
    first = mapping(properties[0], "deviceProperties", path) if properties else {}
    distributed = mapping(trace.data.get("distributedInfo", {}), "distributedInfo", path)
    groups = listing(distributed.get("pg_config", []), "pg_config", path)
    # Collectives on a CPU do not name their group: it is known only where the job has a single one,
    # of all ranks.
    world_size = 1
    if len(groups) <= 1:
        world_size = integer(distributed.get("world_size", 1), "world_size", path, 1)
    return KinetoFile(
        rank=integer(distributed.get("rank", position), "rank", path),
        base_ns=integer(trace.data.get("baseTimeNanoseconds", 0), "baseTimeNanoseconds", path),
        world_size=world_size,
        device_name=text(first.get("name", ""), "name of the device", path),
        device_work=pick(_KERNEL + _COPIES),
        operators=pick(_OPERATORS),
        launches={
            integer(e.args["correlation"], "correlation", e.place): e
            for e in pick(_LAUNCHES)
            if "correlation" in e.args
        },
        ranges=pick(("user_annotation",)),
    )


def kineto_activities(files: Sequence[KinetoFile]) -> list[Activity]:
    """Activities of all ranks on one clock; a device for every (rank, device) that has any."""
    activities = []
    for file, shift_us in on_one_clock(files):
        activities += [
            ((file.rank, activity.device), activity)
            for activity in _activities_of_file(file, shift_us)
        ]
    return numbered(activities)


def on_one_clock(files: Sequence[KinetoFile]) -> list[tuple[KinetoFile, float]]:
    """Each file with the microseconds to add to its times."""
    base_ns = min(file.base_ns for file in files)
    # Old traces count microseconds from the epoch: take that out before it costs digits.
    starts_us: list[float] = []
    for file in files:
        starts_us += [event.start_us for event in (*file.device_work, *file.operators)]
    origin_us = min(starts_us, default=0.0)
    return [(file, (file.base_ns - base_ns) * 1e-3 - origin_us) for file in files]


def external_id(event: ChromeEvent) -> int | None:
    """The number that ties a kernel to its operator."""
    for name in ("External id", "external id"):
        if name in event.args:
            return integer(event.args[name], name, event.place)
    return None


def launch_of(file: KinetoFile, event: ChromeEvent) -> ChromeEvent | None:
    """The runtime call that launched a kernel, if the file has it."""
    return file.launches.get(
        integer(event.args.get("correlation", -1), "correlation", event.place, -1)
    )


def operators_of_kernels(file: KinetoFile) -> list[ChromeEvent | None]:
    """The operator that launched each kernel or copy of the device."""
    # With nested operators the last that has an id is the innermost, which launched the kernel.
    by_id: dict[int, ChromeEvent] = {}
    for operator in file.operators:
        number = external_id(operator)
        if number is not None:
            by_id[number] = operator
    operators: list[ChromeEvent | None] = []
    for kernel in file.device_work:
        number = external_id(kernel)
        operators.append(None if number is None else by_id.get(number))

    # Ids that name few operators are those of something else: then the operator around a kernel's
    # launch is its own.
    named = sum(operator is not None for operator in operators)
    if 2 * named >= len(operators) or not file.operators:
        return operators
    launches = [launch_of(file, kernel) for kernel in file.device_work]
    parents = parents_of([*file.operators, *(launch for launch in launches if launch is not None)])
    # Times are rounded, so that a launch may seem to lie inside the launch before it; that is no
    # operator.
    operator_ids = {id(operator) for operator in file.operators}
    around: list[ChromeEvent | None] = []
    for launch in launches:
        candidates = () if launch is None else parents[id(launch)]
        around.append(next((event for event in candidates if id(event) in operator_ids), None))
    return around


def parents_of(events: Sequence[ChromeEvent]) -> dict[int, tuple[ChromeEvent, ...]]:
    """Calls around each event of its thread, innermost first, by identity of the event."""
    open_calls: dict[tuple[Any, Any], list[ChromeEvent]] = defaultdict(list)
    parents: dict[int, tuple[ChromeEvent, ...]] = {}
    for event in sorted(events, key=lambda e: (e.start_us, -e.duration_us)):
        stack = open_calls[event.pid, event.tid]
        while stack and stack[-1].end_us <= event.start_us:
            stack.pop()
        parents[id(event)] = tuple(reversed(stack))
        stack.append(event)
    return parents


def _activities_of_file(file: KinetoFile, shift_us: float) -> list[Activity]:
    if not file.device_work:
        return activities_of(file, outermost(file.operators), None, shift_us)
    return activities_of(file, file.device_work, operators_of_kernels(file), shift_us)


def activities_of(
    file: KinetoFile,
    events: Sequence[ChromeEvent],
    operators: Sequence[ChromeEvent | None] | None,
    shift_us: float,
) -> list[Activity]:
    """Events of one rank as activities: kernels with the operators that launched them, or the
    host's own (None)."""
    launched_us = [event.start_us for event in events]
    if operators is not None:
        # The ranges of a step lie around the host's calls: a kernel may run long after them. So the
        # time of the runtime call counts, else that of the operator, else that of the kernel
        # itself.
        launches = [launch_of(file, event) for event in events]
        launched_us = [
            (launch or operator or event).start_us
            for launch, operator, event in zip(launches, operators, events, strict=True)
        ]
    tags = _tags(file, np.array(launched_us, float))
    distinct_threads = dict.fromkeys((event.pid, event.tid) for event in events)
    threads = {key: number for number, key in enumerate(distinct_threads)}
    return [
        _activity(event, tag, operators is not None, threads[event.pid, event.tid], shift_us)
        for event, tag in zip(events, tags, strict=True)
    ]


def _activity(
    event: ChromeEvent, tags: Tags, on_device: bool, thread: int, shift_us: float
) -> Activity:
    # MTIA's copies stand among its kernels.
    copies = event.category.lower() in _COPIES or event.name == "dma_request"
    kind = ActivityKind.COPY if copies else kind_of(event.name)
    device = integer(event.args.get("device", 0), "device", event.place) if on_device else 0
    stream = (
        integer(event.args.get("stream", thread), "stream", event.place) if on_device else thread
    )
    start_s = (event.start_us + shift_us) * 1e-6
    end_s = (event.end_us + shift_us) * 1e-6
    return Activity(device, stream, start_s, end_s, event.name, kind, *tags)


def _tags(file: KinetoFile, at_us: np.ndarray) -> list[Tags]:
    """Tags of the user's ranges at these times; a missing phase is derived from autograd's own
    calls."""
    said = tags_at((Range(e.start_us, e.end_us, parse_tags(e.name)) for e in file.ranges), at_us)
    # Most users mark no passes, but everything that autograd's engine calls belongs to the backward
    # pass.
    backward = [
        Range(e.start_us, e.end_us, Tags("backward"))
        for e in file.operators
        if e.name.startswith(AUTOGRAD)
    ]
    if not backward:
        return said
    guessed = [tags.phase or "forward" for tags in tags_at(backward, at_us)]
    return [
        tags if tags.phase else tags._replace(phase=phase)
        for tags, phase in zip(said, guessed, strict=True)
    ]


def outermost(events: Sequence[ChromeEvent]) -> list[ChromeEvent]:
    """Events that are not nested in another one of their thread."""
    outer: list[ChromeEvent] = []
    end_us: dict[tuple[Any, Any], float] = {}
    for event in sorted(events, key=lambda e: (e.start_us, -e.duration_us)):
        thread = (event.pid, event.tid)
        if event.start_us >= end_us.get(thread, -1.0):
            outer.append(event)
            end_us[thread] = event.end_us
    return outer
