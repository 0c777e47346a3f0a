"""Interactive, self-contained HTML pages: the timeline, and the report of layouts."""

import base64
import html
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Final

from perfmodel.display._html import escaped
from perfmodel.display._palette import Look, ramp, text_colour
from perfmodel.display._repr import json_text
from perfmodel.errors import plain_text
from perfmodel.units import number_of

if TYPE_CHECKING:  # the command line imports this package before it needs an array
    import numpy as np

COLUMNS: Final = {
    "start": "float64",
    "duration": "float64",
    "device": "int32",
    "stream": "uint8",
    "kind": "uint8",
    "stage": "int32",
    "micro_batch": "int32",
    "critical": "uint8",
    "inside": "int32",
}
"""Columns of the events on the page, with their types."""


def timeline_page(
    events: Mapping[str, Any],
    *,
    kinds: Sequence[Look],
    streams: Sequence[str],
    devices: int,
    end_s: float,
    memory: Sequence[Any] = (),
    capacity_bytes: float | None = None,
    inside: Sequence[Sequence[Any]] = (),
    title: str = "timeline",
) -> str:
    """The timeline page, with zoom, search and tooltips.

    Args:
        events: a column for each of `COLUMNS`, of equal lengths, in any order; times in seconds,
            `kind` a place in `kinds`, `stream` one in `streams` (the first is drawn highest), -1
            where an event has no micro-batch; `inside`, which may be missing, a place in `inside`,
            or -1.
        kinds: colour and name of each kind.
        memory: `in_use_bytes` of each device, constant between its `time_s`, drawn below; left out
            if empty.
        inside: blocks of some events in their order: `name`, `time_s`, and `events` with `name`,
            `time_s`, `count`, and `group` of those that communicate.
    """
    import numpy as np

    columns = {"inside": np.full(len(events["start"]), -1)}
    for name in COLUMNS:
        if name in events:
            columns[name] = np.asarray(events[name])

    # The page searches by bisection within a device's stream, so that events come sorted.
    order = np.lexsort((columns["start"], columns["stream"], columns["device"]))
    data = {name: _packed(columns[name][order], kind) for name, kind in COLUMNS.items()}

    # Text on a box is black or white, whichever is read better on its colour.
    looks = []
    for kind in kinds:
        looks.append({"label": kind.label, "colour": kind.colour, "text": text_colour(kind.colour)})
    memory_of_devices = []
    for device_memory, colour in zip(memory, ramp(len(memory)), strict=True):
        time = _packed(device_memory.time_s, "float64")
        in_use = _packed(device_memory.in_use_bytes, "float64")
        memory_of_devices.append({"colour": colour, "time": time, "bytes": in_use})
    data |= {
        "end_s": float(end_s),
        "devices": devices,
        "kinds": looks,
        "streams": list(streams),
        "capacity_bytes": capacity_bytes,
        **_events_inside_passes(inside),
        "memory": memory_of_devices,
    }
    return _filled("timeline", ("timeline",), title, data)


def _events_inside_passes(of_events: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """`names`, the distinct `blocks` [name, seconds, [[name, seconds, count, whether it
    communicates]]], and the indices of each event's blocks (`passes`)."""
    names: dict[str, int] = {}
    blocks: dict[Any, int] = {}
    passes = []
    for of_event in of_events:
        passes.append([blocks.setdefault(block, len(blocks)) for block in of_event])

    # Names repeat, so blocks and their events refer to a list of them.
    def place(name: str) -> int:
        return names.setdefault(name, len(names))

    listed = []
    for block in blocks:
        block_place = place(block.name.replace("_", " "))
        events = []
        for event in block.events:
            events.append(
                [place(event.name), event.time_s, round(event.count, 3), int(bool(event.group))]
            )
        listed.append([block_place, block.time_s, events])
    return {"names": list(names), "blocks": listed, "passes": passes}


def decision_page(data: Mapping[str, Any]) -> str:
    """The page of a search or a layout: a table to sort and filter, and a layout's details.

    Args:
        data: values of `planning.decision.DecisionReport.data`.
    """
    scripts = ("page", "report_values", "report_table", "report_scatter", "report_layout", "report")
    job = data["job"]
    return _filled(
        "report",
        scripts,
        f"{job['model']} on {number_of(job['devices'], 'device')} of {job['cluster']}",
        data,
    )


def calibration_page(data: Mapping[str, Any]) -> str:
    """The page of a calibration: errors by group, predicted and measured, what to measure next.

    Args:
        data: values of `validation.CalibrationReport.data`.
    """
    name = data["calibration"]
    title = "The shipped calibration" if name == "shipped" else f"Calibration {name}"
    return _filled("calibration", ("page", "calibration"), title, data, style="report")


def _filled(
    name: str, scripts: Sequence[str], title: str, data: Mapping[str, Any], style: str = ""
) -> str:
    """The body of `assets` of this name in the frame of all pages, with its style, its scripts one
    after another, and its data."""
    assets = files("perfmodel.display") / "assets"
    parts = {
        "TITLE": escaped(title),
        "STYLE": (assets / f"{style or name}.css").read_text("utf-8"),
        "SCRIPT": "\n".join((assets / f"{script}.js").read_text("utf-8") for script in scripts),
        # A `<` in the data could end the script element.
        "DATA": json_text(_plain_values(data)).replace("<", "\\u003c"),
    }
    frame = (assets / "page.html").read_text("utf-8")
    body = (assets / f"{name}.html").read_text("utf-8")

    # Names stand between @ signs: `before` ends at the first one, so that every second piece of
    # the rest is a name. A replacement of one name after the other would also replace what looks
    # like a name in the data.
    before, *rest = frame.replace("@BODY@", body).split("@")
    return before + "".join(parts[p] if i % 2 == 0 else p for i, p in enumerate(rest))


def _plain_values(value: Any) -> Any:
    """Data of a page with all texts and keys cleaned of characters that reorder or hide text,
    because scripts show them unchanged."""
    if isinstance(value, str):
        return plain_text(value)
    if isinstance(value, Mapping):
        return {_plain_values(key): _plain_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_values(inner) for inner in value]
    return value


def inline_frame(page: str, height_px: int = 480, title: str = "timeline") -> str:
    """The page inside an iframe, for notebooks."""
    return (
        f'<iframe srcdoc="{html.escape(page)}" style="width: 100%; height: {height_px}px; border: 1px solid #ddd" '
        f'title="{escaped(title)}"></iframe>'
    )


def _packed(values: "np.ndarray", kind: str) -> str:
    """Encode numbers as text that the page's script turns into a typed array."""
    import numpy as np

    # Browsers read the bytes as typed arrays, which are little-endian wherever they run.
    little_endian = np.dtype(kind).newbyteorder("<")
    packed = np.ascontiguousarray(values, kind).astype(little_endian)
    return base64.b64encode(packed.tobytes()).decode()
