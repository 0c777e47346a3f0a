"""Where the step goes, against tensor-, pipeline- and data-parallel degree."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.display import part_looks
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction
from perfmodel.viz._style import Width, legend_below, new_figure, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALWAYS = ("tp", "pp", "dp")
_IF_VARIED = ("cp", "ep", "vpp", "micro_batch", "zero")
_IN_WORDS = ("schedule", "recompute")
_LEAST_SHARE = 0.002


@styled
def draw_breakdown(predictions: Sequence[Prediction], width: Width = "column") -> "Figure":
    """One bar per layout: seconds by activity, a whisker for the 90 % interval, the layout's degrees below.

    Parts shorter than 0.2 % of the longest step are left out of the legend.

    Raises:
        PerfModelError: no prediction.
    """
    if not predictions:
        raise PerfModelError("breakdown picture: no layout to draw; give at least one prediction")
    rows = _rows(predictions)
    per_s, unit = time_unit(max(p.step_time_s for p in predictions))
    x, bottom = np.arange(len(predictions)), np.zeros(len(predictions))
    longest = max(p.step_time_s for p in predictions) * per_s
    looks = part_looks(name for p in predictions for name in p.breakdown_s)
    heights = {name: per_s * np.array([p.breakdown_s.get(name, 0.0) for p in predictions]) for name in looks}
    told = sum(height.max() > _LEAST_SHARE * longest for height in heights.values())
    figure = new_figure(width, 1.7 + 0.11 * len(rows) + 0.1 * told)
    axis = figure.subplots()
    handles, labels = [], []
    for name, height in heights.items():
        drawn = axis.bar(x, height, 0.78, bottom=bottom, color=looks[name].colour, edgecolor="white", linewidth=0.2)
        bottom += height
        if height.max() > _LEAST_SHARE * longest:
            handles.append(drawn[0])
            labels.append(looks[name].label)
    totals = per_s * np.array([[p.step_time_s, p.step_time_lo_s, p.step_time_hi_s] for p in predictions])
    spread = np.abs(totals[:, 1:] - totals[:, :1]).T
    look = {"ecolor": "black", "elinewidth": 0.6, "capsize": 1.5, "capthick": 0.6}
    whiskers = axis.errorbar(x, totals[:, 0], spread, fmt="none", **look)
    for i, p in enumerate(predictions):
        if not p.fits:
            axis.text(i, totals[i, 2], "does not fit", rotation=90, ha="center", va="bottom", fontsize=5.5)
    axis.set_ylabel(f"step time in {unit}")
    axis.set_xlim(-0.6, len(x) - 0.4)
    _degrees(axis, predictions, rows)
    # bars are read from the bottom up, so is the legend
    legend_below(figure, [whiskers, *handles[::-1]], ["90 % interval", *labels[::-1]])
    return figure


def _rows(predictions: Sequence[Prediction]) -> list[str]:
    """Fields of the layouts to write below their bars: numbers that vary, and words where numbers do not tell apart."""
    rows = [*_ALWAYS, *(n for n in _IF_VARIED if len({getattr(p.layout, n) for p in predictions}) > 1)]
    if len({tuple(getattr(p.layout, n) for n in rows) for p in predictions}) < len(predictions):
        rows += [n for n in _IN_WORDS if len({getattr(p.layout, n) for p in predictions}) > 1]
    return rows


def _degrees(axis: "Axes", predictions: Sequence[Prediction], rows: Sequence[str]) -> None:
    """Under every bar its layout's degrees, a row for each with its name on the left; words stand upright."""
    words = any(name in _IN_WORDS for name in rows)
    texts = [(" " if words else "\n").join(str(getattr(p.layout, name)) for name in rows) for p in predictions]
    axis.set_xticks(range(len(texts)), texts, rotation=90 if words else 0)
    axis.tick_params(axis="x", length=0)
    names = [name.replace("_", "-") for name in rows]
    if words:
        axis.set_xlabel(" ".join(names))
        return
    axis.annotate(
        "\n".join(names), (0, 0), xytext=(-4, -3.5), xycoords="axes fraction", textcoords="offset points", ha="right",
        va="top", fontsize=axis.get_xticklabels()[0].get_fontsize(),
    )  # fmt: skip
