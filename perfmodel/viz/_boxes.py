"""Boxes in rows, the basis of all pictures of passes over time."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.display import text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN_IN: Final = 0.45
"""Part of a figure's width that lies to the left of its axes."""
_POINTS_PER_DIGIT: Final = 0.62
"""Width of a digit as a share of its height."""
_STRIP: Final = 0.16
"""Share of a box's height that the critical path's strip takes."""
_LEAST_LABEL_PT: Final = 3.8
_NARROW_PT: Final = 1.5
"""Boxes below this width would blend into colours that the legend lacks."""
_SHORT_PT: Final = 6.0
"""Boxes below this width are drawn like the narrow ones of their lane, so that a lane looks
uniform."""
_COLUMN_PT: Final = 1.5
"""Distance between the points at which shares of time are drawn."""
_MOST_COLUMNS: Final = 8
"""Most points over which a share is averaged."""
_LEAST_NARROW: Final = 20
"""Least number of narrow boxes of a lane for which shares are drawn instead."""


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Parallel arrays, one entry per box; times in the axis' unit, rows counted from the top."""

    start: Float[np.ndarray, " boxes"]
    end: Float[np.ndarray, " boxes"]
    top: Float[np.ndarray, " boxes"]
    """Upper edge, in rows from the top."""
    height: Float[np.ndarray, " boxes"]
    """Height of each box in rows."""
    colour: list[str]
    """Colour of each box."""
    label: list[str]
    """Text inside, written where it fits."""
    critical: Bool[np.ndarray, " boxes"]
    """Whether the box is on the critical path."""


def draw_boxes(axis: "Axes", boxes: Boxes, lo: float, hi: float, row_in: float) -> bool:
    """Draw the boxes within `lo`..`hi`, labels where they fit, and the critical path as a black
    strip and line.

    Where a row's boxes are too narrow to be told apart, the shares of the time that their colours
    take are stacked in the row instead: the result says whether there is such a row.

    Args:
        axis: axis to draw on; it gets the limits `lo`..`hi`.
        row_in: height of a row in inches.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    # Work in points on paper, because the printed width of a box decides whether it can be seen.
    axis.set_xlim(lo, hi)
    visible = np.flatnonzero((boxes.end > lo) & (boxes.start < hi))
    axis_in = axis.get_figure().get_figwidth() - _MARGIN_IN  # type: ignore[union-attr]
    wide_pt = (boxes.end - boxes.start) * 72 * axis_in / (hi - lo)
    single, lanes = _single_and_shared(boxes, visible, wide_pt)
    axis.add_collection(
        PolyCollection(
            _corners(boxes, single, 0.0),
            facecolors=[boxes.colour[i] for i in single.tolist()],
            edgecolors=["white" if wide else "none" for wide in (wide_pt[single] > 2).tolist()],
            linewidths=0.4,
        )
    )

    # Lanes of thin boxes are drawn as stacked shares, sampled every few points.
    column = _COLUMN_PT * (hi - lo) / (72 * axis_in)
    # Colours are stacked in the same order in all lanes.
    colours: dict[str, None] = {}
    for lane in lanes:
        colours |= dict.fromkeys(boxes.colour[i] for i in lane.tolist())
    for lane in lanes:
        _draw_shares(axis, boxes, lane, list(colours), np.arange(lo, hi + column, column))

    # The critical path: a black strip in its boxes, and lines where it goes to another row.
    critical = visible[boxes.critical[visible]]
    if len(critical):
        strips = _corners(boxes, critical, 1 - _STRIP)
        axis.add_collection(
            PolyCollection(strips, facecolors="black", edgecolors="black", linewidths=0.15)
        )
        axis.add_collection(LineCollection(_handovers(boxes), colors="black", linewidths=0.6))

    # Labels are as large as their box allows, and left out where that is too small to be read.
    high_pt = 72 * row_in * boxes.height
    for i in visible.tolist():
        label = boxes.label[i]
        is_whole = boxes.start[i] >= lo and boxes.end[i] <= hi
        across_pt = (wide_pt[i] - 1) / _POINTS_PER_DIGIT / max(1, len(label))
        size_pt = min(6.0, 0.72 * high_pt[i], across_pt)
        if label and size_pt >= _LEAST_LABEL_PT and is_whole:
            middle = boxes.top[i] + boxes.height[i] * (1 - _STRIP * boxes.critical[i]) / 2
            axis.text(
                (boxes.start[i] + boxes.end[i]) / 2,
                middle,
                label,
                fontsize=size_pt,
                ha="center",
                va="center_baseline",
                color=text_colour(boxes.colour[i]),
                clip_on=True,
            )
    return bool(lanes)


def _single_and_shared(
    boxes: Boxes, visible: Int[np.ndarray, " shown"], wide_pt: Float[np.ndarray, " boxes"]
) -> tuple[Int[np.ndarray, " whole"], list[Int[np.ndarray, " lane"]]]:
    """Divide boxes into those drawn one by one, and those of lanes full of narrow ones."""
    # A lane is drawn as shares as soon as many of its boxes are too narrow to be seen.
    short = visible[wide_pt[visible] < _SHORT_PT]
    places = np.stack([boxes.top[short], boxes.height[short]], axis=1)
    distinct, lane_of = np.unique(places, axis=0, return_inverse=True)
    lanes = [short[lane_of.ravel() == lane] for lane in range(len(distinct))]
    crowded = []
    for lane in lanes:
        if np.count_nonzero(wide_pt[lane] < _NARROW_PT) >= _LEAST_NARROW:
            crowded.append(lane)
    if not crowded:
        return visible, []
    return np.setdiff1d(visible, np.concatenate(crowded)), crowded


def _draw_shares(
    axis: "Axes",
    boxes: Boxes,
    lane: Int[np.ndarray, " lane"],
    colours: list[str],
    points_s: Float[np.ndarray, " points"],
) -> None:
    """Draw a lane's boxes as shares: at each point, stacked shares of the time around it."""
    colour_of = np.array([boxes.colour[i] for i in lane.tolist()])
    starts = [np.sort(boxes.start[lane[colour_of == colour]]) for colour in colours]
    # A share is averaged over at least a period of the slowest colour, so that it does not flicker.
    periods = [
        float(np.median(np.diff(colour_starts)))
        for colour_starts in starts
        if len(colour_starts) > 1
    ]
    column = points_s[1] - points_s[0]
    span = min(max(column, *periods), _MOST_COLUMNS * column) if periods else column
    shares = np.stack(
        [_share(boxes, lane[colour_of == colour], points_s, span) for colour in colours]
    )
    # Boxes of one lane may overlap in a measured trace.
    shares /= np.maximum(1, shares.sum(axis=0))
    bottom = float((boxes.top + boxes.height)[lane[0]])
    height = float(boxes.height[lane[0]])
    below = np.cumsum(shares, axis=0) - shares
    for colour, share_below, share in zip(colours, below, shares, strict=True):
        if share.any():
            lower = bottom - height * share_below
            upper = bottom - height * (share_below + share)
            axis.fill_between(points_s, lower, upper, where=share > 0, color=colour, linewidth=0)


def _share(
    boxes: Boxes,
    chosen: Int[np.ndarray, " chosen"],
    points_s: Float[np.ndarray, " points"],
    span: float,
) -> Float[np.ndarray, " points"]:
    """Share of the `span` around every point that the boxes cover."""
    if not len(chosen):
        return np.zeros(len(points_s))

    # Covered time up to a point is a piecewise linear function, which rises over boxes and is
    # flat between. The share of a window is its rise over the window.
    chosen = chosen[np.argsort(boxes.start[chosen], kind="stable")]
    knots = np.stack([boxes.start[chosen], boxes.end[chosen]], axis=1).ravel()
    lengths = boxes.end[chosen] - boxes.start[chosen]
    covered = np.repeat(np.r_[0.0, np.cumsum(lengths)], 2)[1:-1]

    # Overlapping boxes of measured traces would make the knots fall, which `np.interp` does not
    # allow.
    ascending = np.maximum.accumulate(knots)
    before = np.interp(points_s - span / 2, ascending, covered)
    after = np.interp(points_s + span / 2, ascending, covered)
    return (after - before) / span


def _corners(boxes: Boxes, chosen: Any, upper: float) -> list[np.ndarray]:
    """Corners of every chosen box, from a share of its height down, shape (4, 2)."""
    start, end = boxes.start[chosen], boxes.end[chosen]
    bottom = boxes.top[chosen] + boxes.height[chosen]
    top = boxes.top[chosen] + upper * boxes.height[chosen]
    corners = ((start, top), (end, top), (end, bottom), (start, bottom))
    return list(np.stack([np.stack(xy, axis=1) for xy in corners], axis=1))


def _handovers(boxes: Boxes) -> list[list[tuple[float, float]]]:
    """Lines from each critical box to the next in another row."""
    # Critical boxes in order of start are the path; a line is needed where it changes rows.
    order = np.flatnonzero(boxes.critical)
    order = order[np.argsort(boxes.start[order], kind="stable")]
    y = (boxes.top + boxes.height * (1 - _STRIP / 2))[order].tolist()
    start = boxes.start[order].tolist()
    end = boxes.end[order].tolist()
    lines = []
    for i in range(len(order) - 1):
        if y[i] != y[i + 1]:
            lines.append([(end[i], y[i]), (start[i + 1], y[i + 1])])
    return lines
