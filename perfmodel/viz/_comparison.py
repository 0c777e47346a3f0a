"""A predicted and a measured timeline, one above the other on the same time axis."""

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from perfmodel.program import Kind
from perfmodel.readers import ActivityKind, MeasuredTrace
from perfmodel.viz._colours import COLOURS
from perfmodel.viz._events import LABELS
from perfmodel.viz._save import save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_UNTOLD: Final = {
    ActivityKind.COMPUTE: ("#555555", "computation"),
    ActivityKind.COMMUNICATION: ("#D55E00", "communication"),
    ActivityKind.COPY: ("#999999", "copy"),
}
"""Colour and label of activities of which the trace does not say the phase."""
_LANE: Final = {ActivityKind.COMPUTE: (0.0, 0.62)}
_SIDE_LANE: Final = (0.66, 0.22)
_NUMBERED_UP_TO: Final = 400
"""Activities up to which micro-batch numbers can be read."""


def draw_comparison(predicted: MeasuredTrace, measured: MeasuredTrace, title: str = "") -> "Figure":
    """Two panels of one row per device: computations above, communication and copies below.

    Both begin with their first computation. Of a measured trace of several steps the first is drawn.
    """
    from matplotlib.figure import Figure

    step = measured.steps()[0]
    heights = [0.5 + 0.22 * trace.devices for trace in (predicted, step)]
    figure = Figure(figsize=(10, sum(heights) + 1.3), layout="constrained", dpi=150)
    axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    shown: dict[str, str] = {}
    ends_s = [
        _panel(axis, trace, f"{name}, {1e3 * trace.batch_time_s:.4g} ms", shown)
        for axis, name, trace in zip(axes, ("predicted", "measured"), (predicted, step), strict=True)
    ]
    axes[1].set_xlim(0, max(ends_s) * 1e3)
    axes[1].set_xlabel("time since the first computation in ms", fontsize=9)
    if title:
        figure.suptitle(title, fontsize=9)
    _legend(figure, shown)
    return figure


def write_comparison(predicted: MeasuredTrace, measured: MeasuredTrace, path: Path | str, title: str = "") -> None:
    """Write the picture as PNG, atomically."""
    save_png(draw_comparison(predicted, measured, title), path)


def _panel(axis: "Axes", trace: MeasuredTrace, title: str, shown: dict[str, str]) -> float:
    """Draw one trace; returns its last end."""
    from matplotlib.collections import PolyCollection

    computes = trace.kind == ActivityKind.COMPUTE
    origin_s = float(trace.start_s[computes].min()) if computes.any() else 0.0
    boxes: list[Any] = []
    faces: list[str] = []
    columns = (trace.device, trace.start_s, trace.end_s, trace.kind, trace.phase, trace.micro_batch)
    for device, start_s, end_s, kind, phase, micro_batch in zip(*(c.tolist() for c in columns), strict=True):
        top, height = _LANE.get(ActivityKind(kind), _SIDE_LANE)
        x0, x1, y0 = (start_s - origin_s) * 1e3, (end_s - origin_s) * 1e3, device + top
        colour, label = (COLOURS[Kind(phase)], LABELS[Kind(phase)]) if phase else _UNTOLD[ActivityKind(kind)]
        shown.setdefault(colour, label)
        boxes.append([(x0, y0), (x1, y0), (x1, y0 + height), (x0, y0 + height)])
        faces.append(colour)
        wide = (end_s - start_s) > 0.011 * trace.batch_time_s
        if micro_batch >= 0 and kind == ActivityKind.COMPUTE and wide and trace.n <= _NUMBERED_UP_TO:
            axis.text((x0 + x1) / 2, y0 + height / 2, str(micro_batch), ha="center", va="center", fontsize=6)
    many = len(boxes) > 4000
    axis.add_collection(PolyCollection(boxes, facecolors=faces, edgecolors="#ffffff", linewidths=0.0 if many else 0.3))
    axis.set_title(title, loc="left", fontsize=9)
    axis.set_ylim(trace.devices, 0)
    every = max(1, trace.devices // 16)
    axis.set_yticks(
        [device + 0.45 for device in range(0, trace.devices, every)],
        [str(device) for device in range(0, trace.devices, every)],
        fontsize=7,
    )
    axis.set_ylabel("device", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return float(trace.end_s.max()) - origin_s


def _legend(figure: "Figure", shown: dict[str, str]) -> None:
    from matplotlib.patches import Patch

    patches = [Patch(color=colour, label=label) for colour, label in shown.items()]
    figure.legend(
        handles=patches, loc="outside lower center", ncols=min(6, max(1, len(patches))), fontsize=8, frameon=False
    )
