"""Boxes in rows: what every picture of passes over time is made of."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.display import text_colour

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MARGIN_IN: Final = 0.45
"""Of a figure's width, what is left of its axes."""
_POINTS_PER_DIGIT: Final = 0.62
"""Width of a digit as a share of its height."""
_STRIP: Final = 0.16
"""Share of a box's height that the critical path's strip takes."""
_LEAST_LABEL_PT: Final = 3.8


@dataclass(frozen=True, kw_only=True)
class Boxes:
    """Parallel arrays, one entry per box; times in the axis' unit, rows counted from the top."""

    left: Float[np.ndarray, " boxes"]
    right: Float[np.ndarray, " boxes"]
    top: Float[np.ndarray, " boxes"]
    height: Float[np.ndarray, " boxes"]
    colour: list[str]
    label: list[str]
    """Written inside where it fits."""
    critical: Bool[np.ndarray, " boxes"]


def draw_boxes(axis: "Axes", boxes: Boxes, lo: float, hi: float, row_in: float) -> None:
    """Boxes that meet `lo`..`hi`, labels where they fit, and the critical path as a black strip and line.

    Args:
        axis: gets the limits `lo`..`hi`.
        row_in: height of a row in inches.
    """
    from matplotlib.collections import LineCollection, PolyCollection

    axis.set_xlim(lo, hi)
    shown = np.flatnonzero((boxes.right > lo) & (boxes.left < hi))
    axis_in = axis.get_figure().get_figwidth() - _MARGIN_IN  # type: ignore[union-attr]
    wide_pt = (boxes.right - boxes.left) * 72 * axis_in / (hi - lo)
    colours = [boxes.colour[i] for i in shown.tolist()]
    axis.add_collection(
        PolyCollection(
            _corners(boxes, shown, 0.0, 1.0),
            facecolors=colours,
            edgecolors=["white" if wide else "none" for wide in (wide_pt[shown] > 2).tolist()],
            linewidths=0.4,
        )
    )
    critical = shown[boxes.critical[shown]]
    if len(critical):
        strips = _corners(boxes, critical, 1 - _STRIP, 1.0)
        axis.add_collection(PolyCollection(strips, facecolors="black", edgecolors="black", linewidths=0.15))
        axis.add_collection(LineCollection(_handovers(boxes), colors="black", linewidths=0.6))
    high_pt = 72 * row_in * boxes.height
    for i in shown.tolist():
        size_pt = min(6.0, 0.72 * high_pt[i], (wide_pt[i] - 1) / _POINTS_PER_DIGIT / max(1, len(boxes.label[i])))
        if boxes.label[i] and size_pt >= _LEAST_LABEL_PT and boxes.left[i] >= lo and boxes.right[i] <= hi:
            middle = boxes.top[i] + boxes.height[i] * (1 - _STRIP * boxes.critical[i]) / 2
            axis.text(
                (boxes.left[i] + boxes.right[i]) / 2, middle, boxes.label[i], fontsize=size_pt, ha="center",
                va="center_baseline", color=text_colour(boxes.colour[i]), clip_on=True,
            )  # fmt: skip


def _corners(boxes: Boxes, chosen: Any, upper: float, lower: float) -> list[np.ndarray]:
    """Of every chosen box, shape (4, 2)."""
    left, right, top, height = (getattr(boxes, name)[chosen] for name in ("left", "right", "top", "height"))
    y0, y1 = top + upper * height, top + lower * height
    corners = ((left, y0), (right, y0), (right, y1), (left, y1))
    return list(np.stack([np.stack(xy, axis=1) for xy in corners], axis=1))


def _handovers(boxes: Boxes) -> list[list[tuple[float, float]]]:
    """Lines from each critical box to the next in another row."""
    order = np.flatnonzero(boxes.critical)
    order = order[np.argsort(boxes.left[order], kind="stable")]
    y = (boxes.top + boxes.height * (1 - _STRIP / 2))[order].tolist()
    left, right = boxes.left[order].tolist(), boxes.right[order].tolist()
    return [
        [(right[i], y[i]), (left[i + 1], y[i + 1])] for i in range(len(order) - 1) if y[i] != y[i + 1]
    ]  # fmt: skip
