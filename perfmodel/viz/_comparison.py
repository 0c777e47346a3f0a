"""A predicted and a measured timeline, one above the other on the same time axis."""

from typing import TYPE_CHECKING, Final

import numpy as np

from perfmodel.display import EVENTS
from perfmodel.readers import PHASES, ActivityKind, MeasuredTrace
from perfmodel.viz._boxes import Boxes, draw_boxes
from perfmodel.viz._style import Width, device_ticks, legend_below, new_figure, set_title, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_COMPUTE_LANE: Final = (0.05, 0.62)
_SIDE_LANE: Final = (0.69, 0.26)


@styled
def draw_comparison(
    predicted: MeasuredTrace, measured: MeasuredTrace, title: str = "", width: Width = "page"
) -> "Figure":
    """Two panels of one row per device: computations above, communication and copies below.

    Both begin with their first computation. Of a measured trace of several steps the first is drawn.
    """
    from matplotlib.patches import Patch

    step = measured.steps()[0]
    row_in = max(0.07, min(0.2, 3.0 / max(predicted.devices, step.devices)))
    heights = [row_in * trace.devices for trace in (predicted, step)]
    figure = new_figure(width, sum(heights) + 1.15 + 0.12 * title.count("\n"))
    axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    origins_s = [_first_computation_s(trace) for trace in (predicted, step)]
    end_s = max(float(t.end_s.max()) - o for t, o in zip((predicted, step), origins_s, strict=True))
    per_s, unit = time_unit(end_s)
    drawn: dict[str, str] = {}
    for axis, name, trace, origin_s in zip(axes, ("predicted", "measured"), (predicted, step), origins_s, strict=True):
        looks = [EVENTS[_event(trace, i)] for i in range(trace.n)]
        drawn |= {look.label: look.colour for look in looks}
        draw_boxes(axis, _boxes(trace, [look.colour for look in looks], origin_s, per_s), 0.0, end_s * per_s, row_in)
        device_ticks(axis, trace.devices, "device")
        axis.set_title(f"{name}: {trace.batch_time_s * per_s:.4g} {unit}", pad=2)
    axes[1].set_xlabel(f"time since the first computation in {unit}")
    set_title(figure, title)
    legend_below(figure, [Patch(color=colour) for colour in drawn.values()], list(drawn))
    return figure


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
