"""Pictures that compare layouts: step breakdowns, and Pareto fronts of time, memory, cost."""

from collections.abc import Mapping, Sequence
from itertools import chain, product
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.display import BLUE, GREY, VERMILLION, part_looks
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction
from perfmodel.units import GIB
from perfmodel.viz._style import (
    Width,
    legend_below,
    log_ticks,
    new_figure,
    styled,
    time_unit,
    wrapped,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_ALWAYS = ("tp", "pp", "dp")
_IF_VARIED = ("cp", "ep", "vpp", "micro_batch", "zero")
_IN_WORDS = ("schedule", "recompute")
_LEAST_SHARE = 0.002


@styled
def draw_breakdown(predictions: Sequence[Prediction], width: Width = "column") -> "Figure":
    """Draw a bar per layout: seconds by activity, the 90 % interval, the degrees below.

    Parts shorter than 0.2 % of the longest step are left out of the legend.

    Raises:
        PerfModelError: no prediction.
    """
    if not predictions:
        raise PerfModelError(
            "breakdown picture: there is no layout to draw; give at least one prediction"
        )
    rows = _rows(predictions)
    per_s, unit = time_unit(max(p.step_time_s for p in predictions))
    x = np.arange(len(predictions))
    bottom = np.zeros(len(predictions))
    longest = max(p.step_time_s for p in predictions) * per_s
    looks = part_looks(chain.from_iterable(p.breakdown_s for p in predictions))

    # Parts that are hardly seen are drawn, but have no place in the legend.
    heights = {}
    for name in looks:
        heights[name] = per_s * np.array([p.breakdown_s.get(name, 0.0) for p in predictions])
    n_labels = sum(height.max() > _LEAST_SHARE * longest for height in heights.values())
    figure = new_figure(width, 1.7 + 0.11 * len(rows) + 0.1 * n_labels)
    axis = figure.subplots()
    handles, labels = [], []
    for name, height in heights.items():
        drawn = axis.bar(
            x,
            height,
            0.78,
            bottom=bottom,
            color=looks[name].colour,
            edgecolor="white",
            linewidth=0.2,
        )
        bottom += height
        if height.max() > _LEAST_SHARE * longest:
            handles.append(drawn[0])
            labels.append(looks[name].label)

    # Whiskers reach from the step to both ends of its interval.
    totals = per_s * np.array(
        [[p.step_time_s, p.step_time_lo_s, p.step_time_hi_s] for p in predictions]
    )
    spread = np.abs(totals[:, 1:] - totals[:, :1]).T
    look = {"ecolor": "black", "elinewidth": 0.6, "capsize": 1.5, "capthick": 0.6}
    whiskers = axis.errorbar(x, totals[:, 0], spread, fmt="none", **look)
    for i, p in enumerate(predictions):
        if not p.fits:
            axis.text(
                i,
                totals[i, 2],
                "does not fit",
                rotation=90,
                ha="center",
                va="bottom",
                fontsize=5.5,
            )
    axis.set_ylabel(f"step time in {unit}")
    axis.set_xlim(-0.6, len(x) - 0.4)
    _degrees(axis, predictions, rows)
    # Bars are read from the bottom up, and so is the legend.
    legend_below(figure, [whiskers, *handles[::-1]], ["90 % interval", *labels[::-1]])
    return figure


def _rows(predictions: Sequence[Prediction]) -> list[str]:
    """Fields of the layouts to write below their bars: numbers that vary, and words if numbers do
    not distinguish them."""
    layouts = [p.layout for p in predictions]

    def varies(name: str) -> bool:
        return len({layout.value(name) for layout in layouts}) > 1

    # Words are long, so that they are written only if numbers do not tell the layouts apart.
    rows = [*_ALWAYS, *filter(varies, _IF_VARIED)]
    told_apart = set()
    for layout in layouts:
        told_apart.add(tuple(layout.value(name) for name in rows))
    if len(told_apart) < len(layouts):
        rows += filter(varies, _IN_WORDS)
    return rows


def _degrees(axis: "Axes", predictions: Sequence[Prediction], rows: Sequence[str]) -> None:
    """Write each layout's degrees under its bar, a row per degree; words stand upright."""
    # Numbers fit below one another under a bar; words do not.
    has_words = any(name in _IN_WORDS for name in rows)
    texts = []
    for p in predictions:
        values = [str(p.layout.value(name)) for name in rows]
        texts.append((" " if has_words else "\n").join(values))
    axis.set_xticks(range(len(texts)), texts, rotation=90 if has_words else 0)
    axis.tick_params(axis="x", length=0)
    names = [name.replace("_", "-") for name in rows]
    if has_words:
        axis.set_xlabel(" ".join(names))
        return
    axis.annotate(
        "\n".join(names),
        (0, 0),
        xytext=(-4, -3.5),
        xycoords="axes fraction",
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=axis.get_xticklabels()[0].get_fontsize(),
    )


_LETTERS = "ABCD"
"""Letters that label selected layouts of a front."""
_DIGITS = (1, 1.5, 2, 3, 5, 7)
_ROUND = tuple(float(f"{digits}e{exponent}") for exponent, digits in product(range(-6, 9), _DIGITS))
"""Multiples of powers of ten at which logarithmic axes may have ticks."""


@styled
def draw_pareto(
    layouts: "pd.DataFrame", cost: str = "", cost_label: str = "", width: Width = "column"
) -> "Figure":
    """Draw step time against memory, and against cost if given, with Pareto fronts. Some layouts of
    the first front are labelled.

    Args:
        layouts: a row per layout: `layout`, `step_time_s`, `peak_bytes` (as `SearchResult.to_frame`
            has them). If it also has `devices`, and they differ, labels name the number of devices.
        cost: column of what a step costs, in any unit; none by default.
        cost_label: label of the cost axis.

    Raises:
        PerfModelError: a column that is missing, or no row.
    """
    columns = ["layout", "step_time_s", "peak_bytes"]
    if cost:
        columns.append(cost)
    missing = [name for name in columns if name not in layouts]
    if missing:
        raise PerfModelError(
            f"Pareto picture: the table has no column {missing[0]}; it needs {', '.join(columns)}"
        )
    if layouts.empty:
        raise PerfModelError("Pareto picture: the table has no layouts; widen the search")
    per_s, unit = time_unit(float(np.median(layouts["step_time_s"])))
    time = layouts["step_time_s"].to_numpy() * per_s
    sides = [(layouts["peak_bytes"].to_numpy() / GIB, "peak memory in GiB")]
    if cost:
        sides.append((layouts[cost].to_numpy(), cost_label or cost.replace("_", " ")))
    side_by_side = width == "page" and len(sides) == 2
    figure = new_figure(width, 3.0 if len(sides) == 1 or side_by_side else 4.8)
    shape = (1, len(sides)) if side_by_side else (len(sides), 1)
    axes = figure.subplots(*shape, squeeze=False).ravel()
    # Each panel shows its own front, and the layouts that no other beats in all objectives
    # together.
    efficient = non_dominated(np.stack([time, *(values for values, _ in sides)], axis=1))
    fronts = [_panel(axis, time, *side, efficient) for axis, side in zip(axes, sides, strict=True)]
    for axis in axes if side_by_side else axes[-1:]:
        axis.set_xlabel(f"step time in {unit}")

    # Letters at equal distances along the first panel's front, its ends included.
    named = min(len(_LETTERS), len(fronts[0]))
    places = np.linspace(0, len(fronts[0]) - 1, named).round().astype(int)
    chosen = fronts[0][np.unique(places)]
    letters = dict(zip(_LETTERS, chosen.tolist(), strict=False))
    for axis, (values, _) in zip(axes, sides, strict=True):
        for letter, i in letters.items():
            _mark_point(axis, letter, time[i], values[i])
    _add_legend(figure, axes[0], letters, layouts)
    return figure


def _mark_point(axis: "Axes", letter: str, x: float, y: float) -> None:
    """Draw a ring around a point, and its letter beside it."""
    from matplotlib.patheffects import withStroke

    axis.plot(
        x,
        y,
        "o",
        color="none",
        markeredgecolor="black",
        markersize=4.2,
        zorder=4,
    )
    axis.annotate(
        letter,
        (x, y),
        xytext=(2, 3),
        textcoords="offset points",
        fontsize=7,
        path_effects=[withStroke(linewidth=1.5, foreground="white")],
        zorder=5,
    )


def _add_legend(
    figure: "Figure", axis: "Axes", letters: Mapping[str, int], layouts: "pd.DataFrame"
) -> None:
    """Add a legend of the axis's marks and of the layouts that have letters, by their rows."""
    from matplotlib.lines import Line2D

    counts = layouts["devices"].to_numpy() if "devices" in layouts else np.zeros(1)
    counts_differ = len(set(counts.tolist())) > 1
    # The legend's text takes at most 4.2 points per character.
    most_characters = int(figure.get_figwidth() * 72 / 4.2)
    handles, labels = axis.get_legend_handles_labels()
    for letter, i in letters.items():
        letter_mark = {"marker": f"$\\mathrm{{{letter}}}$", "markersize": 4.5, "markeredgewidth": 0}
        handles.append(Line2D([], [], linestyle="", color="black", **letter_mark))
        device_text = f"{counts[i]} devices: " if counts_differ else ""
        labels.append(wrapped(device_text + str(layouts["layout"].iloc[i]), most_characters))
    figure.legend(handles, labels, loc="outside lower left", fontsize=6)


def _panel(
    axis: "Axes",
    time: Float[np.ndarray, " layouts"],
    values: Float[np.ndarray, " layouts"],
    label: str,
    efficient: Bool[np.ndarray, " layouts"],
) -> np.ndarray:
    """Draw one side of the front; returns the layouts on its edge, fastest first."""
    # Scatter all, then the front of all objectives, then the front of this panel's two.
    edge = np.flatnonzero(non_dominated(np.stack([time, values], axis=1)))
    edge = edge[np.argsort(time[edge], kind="stable")]
    axis.scatter(
        time,
        values,
        s=2,
        color=GREY,
        alpha=0.5,
        linewidths=0,
        label="layouts that fit",
        rasterized=True,
    )
    if efficient.sum() > len(edge):
        inner = np.setdiff1d(np.flatnonzero(efficient), edge)
        axis.scatter(
            time[inner],
            values[inner],
            s=7,
            facecolors="none",
            edgecolors=BLUE,
            linewidths=0.6,
            label="Pareto front of time, memory and cost",
        )
    axis.step(time[edge], values[edge], where="post", color=VERMILLION, linewidth=0.9)
    name = "Pareto front" if efficient.sum() == len(edge) else "Pareto front of this panel"
    axis.plot(time[edge], values[edge], "o", color=VERMILLION, markersize=3, label=name)
    axis.set_xscale("log")

    # Layouts much slower than the front are cut off: they would squeeze the front into a corner.
    slowest = float(time[efficient].max())
    shortest = 0.97 * time.min()
    longest = 1.1 * slowest
    axis.set_xlim(shortest, longest)
    log_ticks(axis.xaxis, [t for t in _ROUND if shortest <= t <= longest])
    axis.set_yscale("log")
    visible = values[time <= longest]
    lowest = 0.8 * float(visible.min())
    highest = 1.25 * float(visible.max())
    axis.set_ylim(lowest, highest)

    # Every second tick where all would touch.
    ticks = [v for v in _ROUND if lowest <= v <= highest]
    step = 2 if highest > 60 * lowest else 1
    log_ticks(axis.yaxis, ticks[::step])
    axis.set_ylabel(label)
    return edge


def non_dominated(points: Float[np.ndarray, "points objectives"]) -> Bool[np.ndarray, " points"]:
    """Mask of the non-dominated points (all objectives are minimised)."""
    # In lexicographic order, all points that could beat a point come before it, so one pass
    # suffices.
    order = np.lexsort(points.T[::-1])
    on_front = np.zeros(len(points), bool)
    front = np.empty((0, points.shape[1]))
    for i in order.tolist():
        # Whatever could beat the point comes before it.
        at_most = (front <= points[i]).all(axis=1)
        if not (at_most & (front < points[i]).any(axis=1)).any():
            on_front[i] = True
            front = np.concatenate([front, points[i : i + 1]])
    return on_front
