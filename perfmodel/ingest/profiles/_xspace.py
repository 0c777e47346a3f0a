"""XSpace files (`*.xplane.pb`) of the JAX profiler: planes of lines of events, with statistics.

Field numbers are those of tsl/profiler/protobuf/xplane.proto.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from perfmodel.errors import TableError
from perfmodel.ingest._files import read_bytes
from perfmodel.ingest.profiles._wire import Field, fields, integer, submessages, text


@dataclass(frozen=True)
class XEvent:
    """An event; times in picoseconds on the clock of all lines of the file."""

    name: str
    start_ps: int
    duration_ps: int
    stats: Mapping[str, Any]


@dataclass(frozen=True)
class XLine:
    """Events of one thread or stream."""

    name: str
    events: tuple[XEvent, ...]


@dataclass(frozen=True)
class XPlane:
    """A device, a host, or facts without times."""

    name: str
    lines: tuple[XLine, ...]
    facts: Mapping[str, Mapping[str, Any]]
    """Statistics of the kinds of events, by the kind's name (of the metadata plane: of the compiled
    modules)."""


def read_xspace(path: Path) -> tuple[XPlane, ...]:
    """Planes of a file.

    Raises:
        TableError: no XSpace, a truncated one, or events at negative times.
    """
    message = fields(read_bytes(path), path)
    planes = tuple(_plane(data, path) for data in submessages(message, 1))
    if not planes:
        raise TableError(
            f"{path}: this is not an xplane.pb file of the JAX profiler, because it has no plane; record it again"
        )
    return planes


def _plane(data: bytes, path: Path) -> XPlane:
    """Parse an `XPlane` message: its names first, then its lines of events that refer to them."""
    message = fields(data, path)
    name = text(message, 2)
    # Names are stored once per plane (fields 4 and 5 are protobuf maps: key 1, value 2), events
    # refer to their numbers.
    stat_names: dict[int, str] = {}
    for entry in submessages(message, 5):
        pair = fields(entry, path)
        for value in submessages(pair, 2):
            stat_names[integer(pair, 1)] = text(fields(value, path), 2)
    kinds: dict[int, tuple[str, Mapping[str, Any]]] = {}
    for entry in submessages(message, 4):
        pair = fields(entry, path)
        for value in submessages(pair, 2):
            kind = fields(value, path)
            kinds[integer(pair, 1)] = (
                text(kind, 2),
                _stats(submessages(kind, 5), stat_names, path),
            )
    lines = []
    for data_of_line in submessages(message, 3):
        line = fields(data_of_line, path)
        # Lines start at a nanosecond of their own, events are counted from there in picoseconds.
        origin_ps = integer(line, 3) * 1000
        events = tuple(
            _event(
                event,
                origin_ps,
                kinds,
                stat_names,
                f"{path}: {name or 'plane'}, event {index}",
                path,
            )
            for index, event in enumerate(submessages(line, 4))
        )
        lines.append(XLine(text(line, 11) or text(line, 2), events))
    return XPlane(
        name, tuple(lines), {kind: dict(stats) for kind, stats in kinds.values() if stats}
    )


def _event(
    data: bytes,
    origin_ps: int,
    kinds: Mapping[int, tuple[str, Mapping[str, Any]]],
    stat_names: Mapping[int, str],
    place: str,
    path: Path,
) -> XEvent:
    """Parse one event of a line, with times in seconds."""
    message = fields(data, path)
    kind = integer(message, 1)
    if kind not in kinds:
        raise TableError(
            f"{place}: the file does not describe kind {kind} of event; record it again"
        )
    name, facts = kinds[kind]
    start_ps = origin_ps + integer(message, 2)
    duration_ps = integer(message, 3)
    if start_ps < 0 or duration_ps < 0:
        raise TableError(
            f"{place}: it starts at {start_ps} ps and takes {duration_ps} ps; record it again"
        )
    # Statistics of all events of a kind are stored with the kind; an event's own statistics replace
    # them.
    return XEvent(
        name, start_ps, duration_ps, {**facts, **_stats(submessages(message, 4), stat_names, path)}
    )


def _stats(items: list[bytes], names: Mapping[int, str], path: Path) -> dict[str, Any]:
    stats: dict[str, Any] = {}
    for data in items:
        message = fields(data, path)
        stats[names.get(integer(message, 1), "")] = _value(message, names)
    return stats


def _value(message: dict[int, list[Field]], names: Mapping[int, str]) -> Any:
    """The value of a statistic."""
    # Fields of XStat: 2 a double, 3 and 4 integers, 5 text, 6 bytes, 7 the number of a name.
    doubles = submessages(message, 2)
    if doubles:
        return struct.unpack("<d", doubles[-1])[0] if len(doubles[-1]) == 8 else None
    if 7 in message:
        return names.get(integer(message, 7), "")
    if 5 in message:
        return text(message, 5)
    if 6 in message:
        return submessages(message, 6)[-1] if submessages(message, 6) else b""
    return integer(message, 4) if 4 in message else integer(message, 3)
