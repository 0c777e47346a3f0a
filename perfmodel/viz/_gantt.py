"""Gantt chart of a step: one row per pipeline rank, as in the papers' schedule figures."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import EVENTS, shade
from perfmodel.prediction import Prediction
from perfmodel.program import ProgramSpec, Stream
from perfmodel.timeline import KIND_NAMES, Slices, slices
from perfmodel.units import number_of
from perfmodel.viz._boxes import Boxes, draw_boxes
from perfmodel.viz._style import (
    WIDTHS_IN,
    Width,
    device_ticks,
    legend_below,
    new_figure,
    save_figure,
    set_title,
    styled,
    time_unit,
    wrapped,
)
from perfmodel.viz.over_time import memory_lines

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_SIDE: Final = (Stream.DATA_COMM, Stream.OFFLOAD, Stream.RELOAD)
_PASS_IN: Final = 0.1
"""Least width of a pass in which a number of two digits is legible."""
_LIGHTEST: Final = 0.6
"""Share by which the last chunk's colour is lightened towards white."""


@styled
def gantt(prediction: Prediction, width: Width = "page") -> "Figure":
    """Draw the step, an enlarged part with micro-batch numbers, and memory over time.

    Where passes are too short to be drawn one by one, the row shows how much of the time each kind
    takes, stacked. The enlarged part is the beginning of the step if every rank runs a backward
    pass within it; otherwise it is the time around the first backward pass of the last rank.

    A black strip under a box says that it is on the critical path, a black line where the path goes
    to another rank. Chunks of the model, and the two directions of a bidirectional pipeline, are
    shades of a kind's colour.

    Raises:
        PerfModelError: the prediction holds no timeline.
    """
    from matplotlib.legend_handler import HandlerTuple
    from matplotlib.lines import Line2D

    # Computation on top, side streams below; neighbouring slices of one pass are joined.
    timeline = prediction.kept_timeline
    drawn = slices(timeline)
    drawn = drawn.select(np.isin(drawn.stream, (Stream.COMPUTE, *_SIDE))).joined()
    # Without a flush between steps the timeline is that of several.
    ranks = timeline.structure.devices
    end_s = max(prediction.step_time_s, timeline.makespan_s)
    from_s, zoom_s = _zoom_s(drawn, end_s, width)
    views = [(0.0, end_s)]
    if zoom_s <= 0.7 * end_s:
        views.append((from_s, from_s + zoom_s))
    # Numbers of micro-batches are read in the last view, which gets the room for them.
    row_of_whole_in = max(0.05, min(0.17, 2.2 / ranks))
    row_of_last_in = max(0.07, min(0.17, 3.9 / ranks))
    rows_in = [row_of_whole_in, row_of_last_in][-len(views) :]
    heights = [ranks * row_in for row_in in rows_in]

    # Heights in inches: rows, axes and titles, then legend and the memory panel.
    legend_and_memory_in = 2.1 if width == "page" else 2.4
    figure = new_figure(width, sum(heights) + 0.42 * len(views) + legend_and_memory_in)
    axes = figure.subplots(len(views) + 1, 1, squeeze=False, height_ratios=[*heights, 0.75])[:, 0]

    # The first view shows all, without numbers. Shades of chunks are left to the view in which
    # they can be told apart.
    chunks = stage_chunks(prediction)
    for axis, view, row_in in zip(axes, views, rows_in, strict=False):
        last = view is views[-1]
        notes = ["the whole step"] if view is views[0] else [_enlarged(view)]
        notes += _draw_view(
            axis, drawn, chunks if last else chunks[:, :1], view, row_in, numbered=last
        )
        device_ticks(axis, ranks, "pipeline rank")
        axis.set_title(wrapped("; ".join(notes), int(14 * WIDTHS_IN[width])), pad=3)
        axis.set_xlabel(f"time in {time_unit(view[1] - view[0])[1]}" if len(views) == 2 else "")
    if len(views) == 2:
        _mark(axes[0], views[1], end_s)

    # Then the memory panel on the same axis of time, titles and legend.
    memory_lines(axes[-1], prediction, end_s)
    set_title(
        figure,
        f"{prediction.model} on {number_of(prediction.devices, 'device')} of {prediction.cluster}, {prediction.layout_notation}",
        f"step {prediction.step_time_s:.3g} s, bubble {prediction.bubble_fraction:.1%}, MFU {prediction.mfu:.1%}",
    )
    handles, labels = pass_legend(drawn, chunks)
    handles.append(Line2D([], [], color="black", linewidth=2))
    side_by_side = {tuple: HandlerTuple(ndivide=None, pad=0)}
    legend_below(figure, handles, [*labels, "critical path"], handler_map=side_by_side)
    return figure


def _draw_view(
    axis: "Axes",
    drawn: Slices,
    chunks: Int[np.ndarray, "devices chunks"],
    view: tuple[float, float],
    row_in: float,
    *,
    numbered: bool,
) -> list[str]:
    """Draw the boxes of a timeline between two times; return notes on what a reader sees there.

    Args:
        view: first and last second.
        row_in: height of a rank's row in inches.
        numbered: write the numbers of micro-batches where they fit.
    """
    start_s, end_s = view
    per_s, _ = time_unit(end_s - start_s)
    boxes = _boxes(drawn, chunks, per_s, numbered=numbered)
    shows_shares = draw_boxes(axis, boxes, start_s * per_s, end_s * per_s, row_in)
    notes = []
    if any(text.get_text() for text in axis.texts):
        notes.append("numbers: micro-batches")
    if shows_shares:
        notes.append("where boxes would be too thin: shares of the time")
    return notes


def _enlarged(view: tuple[float, float]) -> str:
    """The note on the part of a step that is enlarged."""
    per_s, unit = time_unit(view[1] - view[0])
    return f"enlarged: {(view[1] - view[0]) * per_s:.3g} {unit} of it"


def _mark(axis: "Axes", view: tuple[float, float], end_s: float) -> None:
    """Mark the part of the whole step that is enlarged below by a bar above it."""
    per_s, _ = time_unit(end_s)
    axis.plot(
        [at_s * per_s for at_s in view],
        (0, 0),
        color="black",
        linewidth=2,
        solid_capstyle="butt",
        clip_on=False,
        transform=axis.get_xaxis_transform(),
    )


def write_gantt(prediction: Prediction, path: Path | str, width: Width = "page") -> None:
    """Write the Gantt chart as PNG, PDF or SVG."""
    save_figure(gantt(prediction, width), path)


def stage_chunks(prediction: Prediction) -> Int[np.ndarray, "devices chunks"]:
    """Global stage of every chunk of every pipeline rank."""
    layout = prediction.layout
    spec = ProgramSpec(
        schedule=layout.effective_schedule,
        stages=layout.pp,
        micro_batches=1,
        chunks=layout.vpp,
    )
    return spec.stage_map


def chunk_shades(colour: str, chunks: int) -> list[str]:
    """A kind's colour for each chunk of a device, the first as it is, the last lightest."""
    return [shade(colour, _LIGHTEST * i / max(1, chunks - 1)) for i in range(chunks)]


def pass_legend(
    drawn: Slices, stage_map: Int[np.ndarray, "devices chunks"]
) -> tuple[list[Any], list[str]]:
    """Handles and labels of the kinds drawn; of passes one patch per shade."""
    from matplotlib.patches import Patch

    chunks = stage_map.shape[1]
    # Two chunks of opposite order are the two directions of a bidirectional pipeline.
    down = stage_map[-1] >= stage_map[0]
    shades_mean = "" if chunks == 1 else f"chunks 0 to {chunks - 1}"
    if chunks == 2 and down[0] != down[1]:
        shades_mean = "down, up"
    handles, labels = [], []
    for kind in np.unique(drawn.kind).tolist():
        look = EVENTS[KIND_NAMES[kind]]
        computes = (drawn.stream[drawn.kind == kind] == Stream.COMPUTE).all()
        has_shades = chunks > 1 and computes and kind_of_pass(kind)
        colours = chunk_shades(look.colour, chunks if has_shades else 1)
        handles.append(tuple(Patch(color=colour) for colour in colours))
        label = f"{look.label} ({shades_mean})" if has_shades else look.label
        labels.append(label)
    return handles, labels


def kind_of_pass(kind: int) -> bool:
    """Whether the kind is a forward or backward pass."""
    return KIND_NAMES[kind].startswith(("forward", "backward"))


def _zoom_s(drawn: Slices, end_s: float, width: Width) -> tuple[float, float]:
    """Start of the enlarged part, and the most seconds at which its numbers are legible."""
    # Numbers are readable from `_PASS_IN` on, and a quarter of the passes may be too short for
    # them.
    is_pass = (drawn.stream == Stream.COMPUTE) & (drawn.micro_batch >= 0)
    typical_s = float(np.quantile(drawn.duration_s[is_pass], 0.25)) if is_pass.any() else end_s
    zoom_s = min(end_s, typical_s * WIDTHS_IN[width] / _PASS_IN)

    # The interesting part is where the pipeline turns: every rank has begun its backward passes.
    backward_kinds = [kind for kind, name in enumerate(KIND_NAMES) if name.startswith("backward")]
    backward = is_pass & np.isin(drawn.kind, backward_kinds)
    turned = backward if backward.any() else is_pass
    first_s = []
    for rank in set(drawn.device.tolist()):
        on_rank = turned & (drawn.device == rank)
        first_s.append(drawn.start_s[on_rank].min(initial=end_s))
    all_turned_s = max(first_s, default=0.0)
    if all_turned_s < zoom_s:
        return 0.0, zoom_s
    return min(all_turned_s - zoom_s / 2, end_s - zoom_s), zoom_s


def _boxes(
    drawn: Slices, stage_map: Int[np.ndarray, "devices chunks"], per_s: float, numbered: bool
) -> Boxes:
    """Return a timeline's boxes: a row per pipeline rank, chunks in shades of a colour."""
    chunk = np.argmax(stage_map[drawn.device] == drawn.stage[:, None], axis=1)
    chunks = stage_map.shape[1]
    shades = {}
    for kind in set(drawn.kind.tolist()):
        shades[kind] = chunk_shades(EVENTS[KIND_NAMES[kind]].colour, chunks)

    # Only passes have a number and a chunk's shade.
    compute = drawn.stream == Stream.COMPUTE
    colours = []
    for kind, chunk_of_slice in zip(drawn.kind.tolist(), chunk.tolist(), strict=True):
        colours.append(shades[kind][chunk_of_slice if kind_of_pass(kind) else 0])
    labels = []
    for micro_batch, computes in zip(drawn.micro_batch.tolist(), compute.tolist(), strict=True):
        labels.append(str(micro_batch) if numbered and micro_batch >= 0 and computes else "")
    top, height = _lanes(drawn.stream)
    return Boxes(
        start=drawn.start_s * per_s,
        end=drawn.end_s * per_s,
        top=drawn.device + top,
        height=height,
        colour=colours,
        label=labels,
        critical=drawn.critical,
    )


def _lanes(
    stream: Int[np.ndarray, " slices"],
) -> tuple[Float[np.ndarray, " slices"], Float[np.ndarray, " slices"]]:
    """Top and height inside a rank's row: computation above, other streams that are used below."""
    used: Sequence[int] = [s for s in _SIDE if (stream == s).any()]
    compute_high = 0.9 if not used else 0.62
    high = 0.26 / max(1, len(used))
    top = np.full(len(stream), 0.05)
    height = np.full(len(stream), compute_high)
    for place, used_stream in enumerate(used):
        top[stream == used_stream] = 0.69 + place * high
        height[stream == used_stream] = high
    return top, height
