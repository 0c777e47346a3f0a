"""A timeline as an interactive page."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perfmodel.display import EVENTS, Look, MemoryLine, timeline_page
from perfmodel.timeline._memory import MemoryTimeline
from perfmodel.timeline._slices import KIND_NAMES, Slices

STREAM_NAMES: Final = (
    "compute",
    "data-parallel communication",
    "pipeline sends",
    "offload to host",
    "reload from host",
)
"""In the order of `program.Stream`."""


def timeline_html(
    drawn: Slices,
    devices: int,
    makespan_s: float,
    memory: MemoryTimeline | None = None,
    capacity_bytes: float | None = None,
    title: str = "",
    inside: Mapping[int, Sequence[Any]] | None = None,
) -> str:
    """The page of what is drawn of a step on so many devices; the rest as of `Timeline.to_html`."""
    inside = inside or {}
    places = {one: place for place, one in enumerate(inside)}
    return timeline_page(
        {
            "start": drawn.start_s,
            "duration": drawn.duration_s,
            **{name: getattr(drawn, name) for name in ("device", "stream", "kind", "stage", "micro_batch", "critical")},
            "inside": [places.get(one, -1) for one in drawn.duration_class.tolist()],
        },
        kinds=[EVENTS.get(name, Look("#000000", name)) for name in KIND_NAMES],
        streams=STREAM_NAMES,
        devices=devices,
        end_s=max(makespan_s, 1e-12),
        memory=[MemoryLine(time_s=m.time_s, in_use_bytes=m.in_use_bytes) for m in memory.steps] if memory else (),
        capacity_bytes=capacity_bytes,
        inside=list(inside.values()),
        title=title or f"{devices} pipeline ranks, {makespan_s:.4g} s",
    )
