"""The JAX profiler's Chrome traces (`*.trace.json.gz`): for people, with fewer facts than the xplane file."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.ingest._annotations import Range, Tags, parse_tags, tags_at
from perfmodel.ingest._chrome import ChromeEvent, ChromeTrace, read_chrome
from perfmodel.ingest._files import integer
from perfmodel.ingest._measured_trace import Activity, kind_of, numbered

_DEVICE: Final = re.compile(r"/device:(?:GPU|TPU|CUSTOM\w*):(\d+)")


def is_jax_trace(trace: ChromeTrace) -> bool:
    """Whether the JAX profiler wrote it: its processes are called after XSpace's planes."""
    return any(name.startswith(("/host:", "/device:")) for name in trace.process_names.values())


def read_jax_traces(paths: Sequence[Path]) -> list[Activity]:
    """Activities of all files; a device for every (file, device) that has any.

    Raises:
        TableError: malformed files.
    """
    return numbered(((n, a.device), a) for n, path in enumerate(paths) for a in _of_file(read_chrome(path)))


def _of_file(trace: ChromeTrace) -> list[Activity]:
    devices = {pid: int(m[1]) for pid, name in trace.process_names.items() if (m := _DEVICE.fullmatch(name))}
    work = _of_devices(trace, devices) or _of_cpu(trace)
    ranges = [
        Range(event.start_us, event.end_us, tags)
        for event in trace.events
        if event.pid not in devices and (tags := _tags(event)) != Tags()
    ]
    at_us = np.array([event.start_us for _, _, event in work], float)
    return [
        _activity(device, stream, event, tags)
        for (device, stream, event), tags in zip(work, tags_at(ranges, at_us), strict=True)
    ]


def _of_devices(trace: ChromeTrace, devices: dict[Any, int]) -> list[tuple[int, int, ChromeEvent]]:
    lines = {key: name for key, name in trace.thread_names.items() if key[0] in devices}
    streams = {key for key, name in lines.items() if name.startswith("Stream")}
    chosen = streams or {key for key, name in lines.items() if name in ("XLA Ops", "Async XLA Ops")}
    numbers = {key: number for number, key in enumerate(sorted(chosen, key=str))}
    return [
        (devices[event.pid], numbers[event.pid, event.tid], event)
        for event in trace.events
        if (event.pid, event.tid) in chosen
    ]


def _of_cpu(trace: ChromeTrace) -> list[tuple[int, int, ChromeEvent]]:
    return [
        (integer(event.args["device_ordinal"], "device_ordinal", event.where), 0, event)
        for event in trace.events
        if "hlo_op" in event.args and "device_ordinal" in event.args
    ]


def _tags(event: ChromeEvent) -> Tags:
    if "step_num" in event.args:
        return Tags(step=integer(event.args["step_num"], "step_num", event.where))
    return parse_tags(event.name)


def _activity(device: int, stream: int, event: ChromeEvent, tags: Tags) -> Activity:
    name = str(event.args.get("hlo_op", event.name))
    return Activity(device, stream, event.start_us * 1e-6, event.end_us * 1e-6, name, kind_of(event.name, name), *tags)
