"""Gantt chart of a step: one row per pipeline rank, as in the papers' schedule figures."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.prediction import Prediction
from perfmodel.program import Kind, Stream
from perfmodel.units import GIB
from perfmodel.viz._colours import COLOURS
from perfmodel.viz._events import LABELS, Slices, slices
from perfmodel.viz._save import save_png
from perfmodel.viz._trace import _timeline

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_DRAWN_STREAMS = (Stream.COMPUTE, Stream.DATA_COMM)
_LANE = {Stream.COMPUTE: (0.0, 0.62), Stream.DATA_COMM: (0.66, 0.22)}
"""Top and height of each stream inside a rank's row."""


def gantt(prediction: Prediction) -> "Figure":
    """The whole step, its first part enlarged (with micro-batch numbers where they fit), and memory over time."""
    from matplotlib.figure import Figure

    timeline = _timeline(prediction)
    drawn = slices(timeline)
    # without a flush between steps the timeline is that of several
    ranks, step_s = timeline.structure.devices, max(prediction.step_time_s, timeline.makespan_s)
    zoom_s = _zoom(drawn, ranks, step_s)
    height = 0.6 + 0.22 * min(ranks, 40) + 0.4
    panels = 2 if zoom_s < 0.7 * step_s else 1
    figure = Figure(figsize=(10, height * panels + 2.6), layout="constrained", dpi=150)
    axes = figure.subplots(panels + 1, 1, squeeze=False, height_ratios=[height] * panels + [1.5])[:, 0]
    for axis, (lo, hi) in zip(axes[:panels], ((0.0, step_s), (0.0, zoom_s)), strict=False):
        _panel(axis, drawn, ranks, lo, hi)
    if panels == 2:
        axes[1].set_title(f"first {zoom_s:.3g} s", loc="left", fontsize=9)
    _memory_panel(axes[-1], prediction, step_s)
    figure.suptitle(
        f"{prediction.model} on {prediction.devices} x {prediction.cluster}, {prediction.layout}\n"
        f"step {prediction.step_time_s:.3f} s, bubble {prediction.bubble_fraction:.1%}, MFU {prediction.mfu:.1%}; "
        "outlined: critical path",
        fontsize=9,
    )
    _legend(figure, drawn)
    return figure


def write_gantt(prediction: Prediction, path: Path | str) -> None:
    """Write the Gantt chart as PNG."""
    save_png(gantt(prediction), path)


def _zoom(drawn: Slices, ranks: int, step_s: float) -> float:
    """Long enough for the warm-up and a few micro-batches of steady state."""
    compute = drawn.stream == Stream.COMPUTE
    longest = float(np.median(drawn.duration_s[compute])) if compute.any() else step_s
    return min(step_s, longest * (3 * ranks + 12))


def _panel(axis: "Axes", drawn: Slices, ranks: int, lo_s: float, hi_s: float) -> None:
    from matplotlib.collections import PolyCollection

    span_s = hi_s - lo_s
    boxes: list[Any] = []
    faces: list[str] = []
    edges: list[str] = []
    for start, duration, device, stream, kind, _, micro_batch, critical in drawn:
        if stream not in _DRAWN_STREAMS or start > hi_s or start + duration < lo_s:
            continue
        top, height = _LANE[Stream(stream)]
        y0, y1 = device + top, device + top + height
        x1 = start + duration
        boxes.append([(start, y0), (x1, y0), (x1, y1), (start, y1)])
        faces.append(COLOURS[Kind(kind)])
        edges.append("#000000" if critical else "#ffffff")
        if micro_batch >= 0 and stream == Stream.COMPUTE and duration / span_s > 0.011 and x1 <= hi_s:
            axis.text((start + x1) / 2, (y0 + y1) / 2, str(micro_batch), ha="center", va="center", fontsize=6)
    many = len(boxes) > 4000
    axis.add_collection(
        PolyCollection(boxes, facecolors=faces, edgecolors=faces if many else edges, linewidths=0.0 if many else 0.5)
    )
    axis.set_xlim(lo_s, hi_s)
    axis.set_ylim(ranks, 0)
    step = max(1, ranks // 16)
    axis.set_yticks([d + 0.45 for d in range(0, ranks, step)], [str(d) for d in range(0, ranks, step)], fontsize=7)
    axis.set_ylabel("pipeline rank", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _memory_panel(axis: "Axes", prediction: Prediction, end_s: float) -> None:
    """Bytes in use on first, middle and last rank, below the device's capacity."""
    steps = prediction.memory_over_time().steps
    chosen = sorted({0, len(steps) // 2, len(steps) - 1})
    for rank, colour in zip(chosen, ("#0072B2", "#E69F00", "#CC79A7"), strict=False):
        time_s = np.append(steps[rank].time_s, end_s)
        held = np.append(steps[rank].in_use_bytes, steps[rank].in_use_bytes[-1]) / GIB
        axis.step(time_s, held, where="post", color=colour, linewidth=1.0, label=f"rank {rank}")
    axis.axhline(
        prediction.memory_capacity_bytes / GIB, color="#000000", linewidth=0.8, linestyle="--", label="capacity"
    )
    axis.set_xlim(0, end_s)
    axis.set_ylim(0, None)
    axis.set_ylabel("memory in GiB", fontsize=8)
    axis.set_xlabel("time in s", fontsize=9)
    axis.tick_params(labelsize=8)
    axis.legend(fontsize=7, frameon=False, ncols=4, loc="best")
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)


def _legend(figure: "Figure", drawn: Slices) -> None:
    from matplotlib.patches import Patch

    shown = [Kind(k) for k in np.unique(drawn.kind[np.isin(drawn.stream, _DRAWN_STREAMS)]).tolist()]
    of_colour: dict[str, str] = {}
    for kind in shown:
        of_colour.setdefault(COLOURS[kind], LABELS[kind])
    patches = [Patch(color=colour, label=label) for colour, label in of_colour.items()]
    figure.legend(
        handles=patches,
        loc="outside lower center",
        ncols=min(6, max(1, len(patches))),
        fontsize=8,
        frameon=False,
    )
