"""A timeline as an interactive page."""

import html
from collections.abc import Mapping, Sequence
from typing import Any

from perfmodel.display import EVENTS, Look, MemoryLine, inline_frame, timeline_page
from perfmodel.timeline._memory import MemoryTimeline
from perfmodel.timeline._slices import KIND_NAMES, slices
from perfmodel.timeline._timeline import Timeline

STREAM_NAMES = ("compute", "data-parallel communication", "pipeline sends", "offload to host", "reload from host")
"""In the order of `program.Stream`."""
_INLINE_UP_TO = 20_000
"""Events up to which a notebook holds the page itself (half a megabyte)."""


def timeline_html(
    timeline: Timeline,
    memory: MemoryTimeline | None = None,
    capacity_bytes: float | None = None,
    title: str = "",
    inside: Mapping[int, Sequence[Any]] | None = None,
) -> str:
    """The page; see `Timeline.to_html`."""
    drawn, inside = slices(timeline), inside or {}
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
        devices=timeline.structure.devices,
        end_s=max(timeline.makespan_s, 1e-12),
        memory=[MemoryLine(time_s=m.time_s, in_use_bytes=m.in_use_bytes) for m in memory.steps] if memory else (),
        capacity_bytes=capacity_bytes,
        inside=list(inside.values()),
        title=title or f"{timeline.structure.devices} pipeline ranks, {timeline.makespan_s:.4g} s",
    )


def timeline_frame(
    timeline: Timeline, memory: MemoryTimeline | None = None, capacity_bytes: float | None = None, title: str = ""
) -> str:
    """The page inside another; of a timeline too long for a notebook a line that says what to do."""
    if timeline.structure.n_ops > _INLINE_UP_TO:
        facts = f"{timeline.structure.n_ops:,} ops, {timeline.makespan_s:.4g} s, idle {timeline.idle_fraction():.1%}"
        return (
            f"<p>{html.escape(facts)}; too long to show here: write <code>to_html()</code> to a file and open it.</p>"
        )
    return inline_frame(timeline_html(timeline, memory, capacity_bytes, title))
