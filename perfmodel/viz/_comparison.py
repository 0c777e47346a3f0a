"""A predicted and a measured timeline, one above the other on the same time axis."""

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from perfmodel.display import EVENTS
from perfmodel.ingest import PHASES, ActivityKind, MeasuredTrace
from perfmodel.viz._boxes import Boxes, draw_boxes
from perfmodel.viz._style import Width, device_ticks, legend_below, new_figure, set_title, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPUTE_LANE: Final = (0.05, 0.62)
_SIDE_LANE: Final = (0.69, 0.26)
_SEEN_GAP: Final = 0.001
"""Share of the step that is half a point of a page's width."""


@styled
def draw_comparison(
    predicted: MeasuredTrace, measured: MeasuredTrace, title: str = "", width: Width = "page"
) -> "Figure":
    """Two panels of one row per device: computations above, communication and copies below.

    Both begin with their first computation. Of a measured trace of several steps the first is drawn. Kernels of one
    pass with no gap that could be seen are one box.
    """
    from matplotlib.patches import Patch

    predicted_s, measured_s = predicted.batch_time_s, measured.steps()[0].batch_time_s
    predicted, step = _joined(predicted), _joined(measured.steps()[0])
    row_in = max(0.07, min(0.2, 3.0 / max(predicted.devices, step.devices)))
    heights = [row_in * trace.devices for trace in (predicted, step)]
    figure = new_figure(width, sum(heights) + 1.15 + 0.12 * title.count("\n"))
    axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    origins_s = [_first_computation_s(trace) for trace in (predicted, step)]
    end_s = max(float(t.end_s.max()) - o for t, o in zip((predicted, step), origins_s, strict=True))
    per_s, unit = time_unit(end_s)
    drawn: dict[str, str] = {}
    titles = (f"predicted: {predicted_s * per_s:.4g} {unit}", f"measured: {measured_s * per_s:.4g} {unit}")
    for axis, name, trace, origin_s in zip(axes, titles, (predicted, step), origins_s, strict=True):
        looks = [EVENTS[_event(trace, i)] for i in range(trace.n)]
        drawn |= {look.label: look.colour for look in looks}
        draw_boxes(axis, _boxes(trace, [look.colour for look in looks], origin_s, per_s), 0.0, end_s * per_s, row_in)
        device_ticks(axis, trace.devices, "device")
        axis.set_title(name, pad=2)
    axes[1].set_xlabel(f"time since the first computation in {unit}")
    set_title(figure, title)
    legend_below(figure, [Patch(color=colour) for colour in drawn.values()], list(drawn))
    return figure


def _joined(trace: MeasuredTrace) -> MeasuredTrace:
    """Activities of one pass that follow each other on a stream with hardly a gap as one."""
    order = np.lexsort((trace.start_s, trace.stream, trace.device))
    tags = np.stack([trace.device, trace.stream, trace.kind, trace.phase, trace.stage, trace.micro_batch])[:, order]
    start_s, end_s = trace.start_s[order], trace.end_s[order]
    apart = (start_s[1:] - end_s[:-1] > _SEEN_GAP * trace.batch_time_s) | (tags[:, 1:] != tags[:, :-1]).any(axis=0)
    passes = (trace.phase[order] > 0) & (trace.kind[order] == ActivityKind.COMPUTE)
    first = np.flatnonzero(np.r_[True, apart | ~passes[1:]])
    ends_s = np.maximum.reduceat(end_s, first)
    kept = trace.select(order[first])
    return replace(kept, end_s=ends_s)


def _first_computation_s(trace: MeasuredTrace) -> float:
    computes = trace.kind == ActivityKind.COMPUTE
    return float(trace.start_s[computes].min()) if computes.any() else float(trace.start_s.min())


def _event(trace: MeasuredTrace, i: int) -> str:
    """Name in `EVENTS` of an activity: its phase, or what it keeps busy where the trace tells no phase."""
    return PHASES[trace.phase[i]] or ActivityKind(trace.kind[i]).name.lower()


def _boxes(trace: MeasuredTrace, colours: list[str], origin_s: float, per_s: float) -> Boxes:
    compute = trace.kind == ActivityKind.COMPUTE
    top, height = (np.where(compute, *lanes) for lanes in zip(_COMPUTE_LANE, _SIDE_LANE, strict=True))
    return Boxes(
        left=(trace.start_s - origin_s) * per_s,
        right=(trace.end_s - origin_s) * per_s,
        top=trace.device + top,
        height=height,
        colour=colours,
        label=[
            str(m) if own and m >= 0 else ""
            for m, own in zip(trace.micro_batch.tolist(), compute.tolist(), strict=True)
        ],
        critical=np.zeros(trace.n, bool),
    )
