"""JAX profiles: `*.xplane.pb` files, the directories that `jax.profiler.trace` writes them to, and
its Chrome traces (`*.trace.json.gz`), which contain less.

Activities are the events of device planes (GPU: the lines of streams; TPU: the line of XLA ops); of
a profile of CPUs the host's events that name an HLO instruction and a device. Steps and passes are
those of the host's annotations (`StepTraceAnnotation`, `TraceAnnotation`) around the event's start.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from perfmodel.errors import TableError
from perfmodel.ingest._files import integer
from perfmodel.ingest._rows import CollectiveCalls, ReadOptions, Row
from perfmodel.ingest.profiles._hlo_modules import HloModule, modules
from perfmodel.ingest.profiles._measured_trace import (
    Activity,
    Range,
    Tags,
    kind_of,
    numbered,
    parse_tags,
    tags_at,
)
from perfmodel.ingest.profiles._profile import Detail
from perfmodel.ingest.profiles._xspace import XEvent, XPlane, read_xspace
from perfmodel.ingest.profiles.chrome import ChromeEvent, ChromeTrace, read_chrome

_DEVICE: Final = re.compile(r"/device:(?:GPU|TPU|CUSTOM\w*):(\d+)")
_OP_LINES: Final = ("XLA Ops", "Async XLA Ops")
_CPU: Final = "/host:CPU"
_METADATA: Final = "/host:metadata"
_NO_MODULE: Final = "event of a module that the profile lacks"


class DeviceEvent(NamedTuple):
    """An event on a stream of a device of one process."""

    device: int
    stream: int
    event: XEvent


@dataclass(frozen=True)
class XplaneFile:
    """One process's profile."""

    work: tuple[DeviceEvent, ...]
    """Events of all devices; for CPU profiles, the events of XLA on the host."""
    ranges: tuple[Range, ...]
    modules: dict[str, HloModule]


def xplane_paths(path: Path) -> list[Path]:
    """The profile itself, or those of the newest session in a directory of the profiler.

    Raises:
        TableError: a directory without profiles.
    """
    if not path.is_dir():
        return [path]
    profiles = sorted(path.rglob("*.xplane.pb"))
    if not profiles:
        raise TableError(
            f"{path}: the directory has no *.xplane.pb; give the one that jax.profiler.trace wrote to"
        )
    # Sessions are folders called after their time: all processes of one write into the same.
    newest = max(file.parent for file in profiles)
    return [file for file in profiles if file.parent == newest]


def read_xplane(path: Path) -> XplaneFile:
    """Read one profile.

    Raises:
        TableError: as `read_xspace`.
    """
    planes = read_xspace(path)
    work: list[DeviceEvent] = []
    hosts = [plane for plane in planes if plane.name == _CPU]
    ranges: list[Range] = []
    known: dict[str, HloModule] = {}
    for plane in planes:
        device = _DEVICE.fullmatch(plane.name)
        if device:
            work += _events_of_device(int(device[1]), plane)
        elif plane.name == _METADATA:
            known |= modules(plane.facts, path)
    # Where a device was recorded, the host's own events only launch its work.
    if not work:
        for plane in hosts:
            work += _from_cpu(plane, path)
    for plane in hosts:
        for line in plane.lines:
            ranges += [_range(event) for event in line.events]
    return XplaneFile(tuple(work), tuple(ranges), known)


def xplane_activities(files: Sequence[XplaneFile]) -> list[Activity]:
    """Activities of all processes; every pair of a process and its device counts as a device.

    Profiles of one session share the clock of their hosts.
    """
    activities = []
    for position, file in enumerate(files):
        at_s = np.array([event.start_ps for _, _, event in file.work], float) * 1e-12
        for (device, stream, event), tags in zip(
            file.work, tags_at(file.ranges, at_s), strict=True
        ):
            activities.append(((position, device), _activity(event, stream, tags)))
    return numbered(activities)


def _count_devices(files: Sequence[XplaneFile]) -> int:
    """Number of devices of all processes that have an event."""
    devices = set()
    for position, file in enumerate(files):
        devices |= {(position, device) for device, _, _ in file.work}
    return len(devices)


_CONTAINERS: Final = re.compile(r"(while|call|conditional|async-(start|update|done))(\.\d+)*")
"""Instructions whose events enclose the events of others."""


def xplane_calls(files: Sequence[XplaneFile]) -> list[tuple[Activity, Detail]]:
    """Activities of all processes with their calls, without instructions that only contain
    others."""
    n_devices = _count_devices(files)
    activities = iter(xplane_activities(files))
    calls = []
    number = -1
    for file in files:
        for _, _, event in file.work:
            number += 1
            activity = next(activities)
            # The body of a loop or a call has events of its own: its time would count twice.
            if _CONTAINERS.fullmatch(activity.name):
                continue
            module = file.modules.get(str(event.stats.get("hlo_module", "")))
            row = module.row(_instruction(event), n_devices) if module else _NO_MODULE
            calls.append((activity, Detail(number, row=None if isinstance(row, str) else row)))
    return calls


def xplane_rows(
    files: Sequence[XplaneFile], options: ReadOptions, skipped: Counter[str]
) -> list[Row]:
    """Matrix products and collectives as rows, with shapes from the modules in the profile."""
    rows: list[Row] = []
    calls = CollectiveCalls()
    n_devices = _count_devices(files)
    for position, file in enumerate(files):
        for device, _, event in file.work:
            name = str(event.stats.get("hlo_module", ""))
            row = _NO_MODULE
            if name in file.modules:
                row = file.modules[name].row(_instruction(event), n_devices)
            if isinstance(row, str):
                skipped[row] += 1
                continue
            if event.duration_ps <= 0:
                continue
            time_us = event.duration_ps * 1e-6
            row = {"source": "xplane", "device": options.name_of("")} | row
            if "collective" in row:
                row |= {"algorithm": "auto"} | options.nodes(int(row["num_ranks"]))
                # Instructions of a program are the same on all devices: module and name pair the
                # kernels of one collective.
                calls.add(row, f"{name} {_instruction(event)}", (position, device), time_us)
            else:
                rows.append(row | {"time_us": time_us, "software": "xla", "variant": "xplane"})
    return rows + [row | {"software": "xla"} for row in calls.rows()]


def _events_of_device(number: int, plane: XPlane) -> list[DeviceEvent]:
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    # A GPU has a line per stream, a TPU lines of XLA's operations.
    chosen = streams or [line for line in plane.lines if line.name in _OP_LINES]
    events: list[DeviceEvent] = []
    for index, line in enumerate(chosen):
        events += [DeviceEvent(number, index, event) for event in line.events]
    return events


def _from_cpu(plane: XPlane, path: Path) -> list[DeviceEvent]:
    """XLA's own events on the host, as one stream per device regardless of the thread."""
    events = []
    for line in plane.lines:
        for event in line.events:
            # Thunks of XLA's CPU client have an event at their end too, which repeats the first.
            if (
                "hlo_op" in event.stats
                and "device_ordinal" in event.stats
                and not event.name.startswith("end: ")
            ):
                device = integer(
                    event.stats["device_ordinal"], "device_ordinal", f"{path}: {event.name}"
                )
                events.append(DeviceEvent(device, 0, event))
    return events


def _range(event: XEvent) -> Range:
    # `StepTraceAnnotation` gives its number as a statistic; other annotations say steps and passes
    # in their names.
    step: Any = event.stats.get("step_num")
    tags = Tags(step=step) if isinstance(step, int) and step >= 0 else parse_tags(event.name)
    return Range(event.start_ps * 1e-12, (event.start_ps + event.duration_ps) * 1e-12, tags)


def _instruction(event: XEvent) -> str:
    return str(event.stats.get("hlo_op", event.name)).lstrip("%").split(" ")[0]


def _activity(event: XEvent, stream: int, tags: Tags) -> Activity:
    name = _instruction(event)
    start_s = event.start_ps * 1e-12
    end_s = start_s + event.duration_ps * 1e-12
    return Activity(0, stream, start_s, end_s, name, kind_of(event.name, name), *tags)


def is_jax_trace(trace: ChromeTrace) -> bool:
    """Whether the JAX profiler wrote the trace: its processes are named after XSpace's planes."""
    return any(name.startswith(("/host:", "/device:")) for name in trace.process_names.values())


def read_jax_traces(paths: Sequence[Path]) -> list[Activity]:
    """Activities of all files; a device for every (file, device) that has any.

    Raises:
        TableError: malformed files.
    """
    activities = []
    for position, path in enumerate(paths):
        for activity in _from_chrome(read_chrome(path)):
            activities.append(((position, activity.device), activity))
    return numbered(activities)


def _from_chrome(trace: ChromeTrace) -> list[Activity]:
    # The viewer's copy of a profile has planes as processes and lines as threads, and no modules:
    # times alone.
    devices: dict[Any, int] = {}
    for pid, name in trace.process_names.items():
        device = _DEVICE.fullmatch(name)
        if device:
            devices[pid] = int(device[1])
    work = _chrome_devices(trace, devices) or _chrome_cpu(trace)
    ranges = [
        Range(e.start_us, e.end_us, _chrome_tags(e)) for e in trace.events if e.pid not in devices
    ]
    at_us = np.array([event.start_us for _, _, event in work], float)
    return [
        _chrome_activity(device, stream, event, tags)
        for (device, stream, event), tags in zip(work, tags_at(ranges, at_us), strict=True)
    ]


def _chrome_devices(
    trace: ChromeTrace, devices: dict[Any, int]
) -> list[tuple[int, int, ChromeEvent]]:
    lines = {key: name for key, name in trace.thread_names.items() if key[0] in devices}
    streams = {key for key, name in lines.items() if name.startswith("Stream")}
    chosen = streams or {key for key, name in lines.items() if name in _OP_LINES}
    numbers = {key: number for number, key in enumerate(sorted(chosen, key=str))}
    return [
        (devices[event.pid], numbers[event.pid, event.tid], event)
        for event in trace.events
        if (event.pid, event.tid) in chosen
    ]


def _chrome_cpu(trace: ChromeTrace) -> list[tuple[int, int, ChromeEvent]]:
    return [
        (integer(event.args["device_ordinal"], "device_ordinal", event.place), 0, event)
        for event in trace.events
        if "hlo_op" in event.args and "device_ordinal" in event.args
    ]


def _chrome_tags(event: ChromeEvent) -> Tags:
    if "step_num" in event.args:
        return Tags(step=integer(event.args["step_num"], "step_num", event.place))
    return parse_tags(event.name)


def _chrome_activity(device: int, stream: int, event: ChromeEvent, tags: Tags) -> Activity:
    name = str(event.args.get("hlo_op", event.name))
    return Activity(
        device,
        stream,
        event.start_us * 1e-6,
        event.end_us * 1e-6,
        name,
        kind_of(event.name, name),
        *tags,
    )
