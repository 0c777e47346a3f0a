"""Layouts between step time, memory and cost: those that no other beats in everything."""

from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float

from perfmodel.display import BLUE, GREY, VERMILLION
from perfmodel.errors import PerfModelError
from perfmodel.units import GIB
from perfmodel.viz._style import Width, log_ticks, new_figure, styled, time_unit, wrapped

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LETTERS = "ABCDEFGH"
_ROUND = tuple(float(f"{d}e{e}") for e in range(-6, 9) for d in (1, 1.5, 2, 3, 5, 7))
"""Where the logarithmic axes may have ticks."""


@styled
def draw_pareto(
    layouts: "pd.DataFrame", cost: str = "", cost_label: str = "", width: Width = "column", named: int = 4
) -> "Figure":
    """Step time against memory, and against cost where there is one; the fronts, with some of their layouts named.

    Args:
        layouts: a row per layout: `layout`, `step_time_s`, `peak_bytes` (as `SearchResult.to_frame` has them); with
            `devices` too, where they differ, the layouts are named with it.
        cost: column of what a step costs, in any unit; none by default.
        cost_label: of its axis.
        named: layouts of the first panel's front that get a letter and a line below.

    Raises:
        PerfModelError: a column that is missing, or no row.
    """
    from matplotlib.lines import Line2D
    from matplotlib.patheffects import withStroke

    wanted = ["layout", "step_time_s", "peak_bytes", *([cost] if cost else [])]
    if missing := [name for name in wanted if name not in layouts]:
        raise PerfModelError(f"Pareto picture: the table has no column {missing[0]}; it needs {', '.join(wanted)}")
    if layouts.empty:
        raise PerfModelError("Pareto picture: the table has no layout; widen the search")
    per_s, unit = time_unit(float(np.median(layouts["step_time_s"])))
    time = layouts["step_time_s"].to_numpy() * per_s
    sides = [(layouts["peak_bytes"].to_numpy() / GIB, "peak memory in GiB")]
    if cost:
        sides.append((layouts[cost].to_numpy(), cost_label or cost.replace("_", " ")))
    beside = width == "page" and len(sides) == 2
    figure = new_figure(width, 3.0 if len(sides) == 1 or beside else 4.8)
    shape = (1, len(sides)) if beside else (len(sides), 1)
    axes = figure.subplots(*shape, squeeze=False).ravel()
    efficient = non_dominated(np.stack([time, *(values for values, _ in sides)], axis=1))
    fronts = [_panel(axis, time, *side, efficient) for axis, side in zip(axes, sides, strict=True)]
    counts = layouts["devices"].to_numpy() if "devices" in layouts else np.zeros(1)
    for axis in axes if beside else axes[-1:]:
        axis.set_xlabel(f"step time in {unit}")
    chosen = fronts[0][np.unique(np.linspace(0, len(fronts[0]) - 1, min(named, len(fronts[0]))).round().astype(int))]
    handles, labels = axes[0].get_legend_handles_labels()
    most = int(figure.get_figwidth() * 72 / 4.2)
    for letter, i in zip(_LETTERS, chosen.tolist(), strict=False):
        for axis, (values, _) in zip(axes, sides, strict=True):
            axis.plot(time[i], values[i], "o", color="none", markeredgecolor="black", markersize=4.2, zorder=4)
            axis.annotate(letter, (time[i], values[i]), xytext=(2, 3), textcoords="offset points", fontsize=7,
                          path_effects=[withStroke(linewidth=1.5, foreground="white")], zorder=5)  # fmt: skip
        handles.append(Line2D([], [], linestyle="", marker=f"$\\mathrm{{{letter}}}$", color="black", markersize=4.5,
                              markeredgewidth=0))  # fmt: skip
        on = f"{counts[i]} devices: " if len(set(counts.tolist())) > 1 else ""
        labels.append(wrapped(on + str(layouts["layout"].iloc[i]), most))
    figure.legend(handles, labels, loc="outside lower left", fontsize=6)
    return figure


def _panel(
    axis: "Axes",
    time: Float[np.ndarray, " layouts"],
    values: Float[np.ndarray, " layouts"],
    label: str,
    efficient: Bool[np.ndarray, " layouts"],
) -> np.ndarray:
    """Draw one side of the front; returns the layouts on its edge, fastest first."""
    edge = np.flatnonzero(non_dominated(np.stack([time, values], axis=1)))
    edge = edge[np.argsort(time[edge], kind="stable")]
    axis.scatter(time, values, s=2, color=GREY, alpha=0.5, linewidths=0, label="layouts that fit", rasterized=True)
    if efficient.sum() > len(edge):
        rest = np.setdiff1d(np.flatnonzero(efficient), edge)
        axis.scatter(time[rest], values[rest], s=7, facecolors="none", edgecolors=BLUE, linewidths=0.6,
                     label="Pareto front of time, memory and cost")  # fmt: skip
    axis.step(time[edge], values[edge], where="post", color=VERMILLION, linewidth=0.9)
    name = "Pareto front" if efficient.sum() == len(edge) else "Pareto front of a panel's two"
    axis.plot(time[edge], values[edge], "o", color=VERMILLION, markersize=3, label=name)
    axis.set_xscale("log")
    slowest = float(time[efficient].max())
    axis.set_xlim(0.97 * time.min(), 1.1 * slowest)
    log_ticks(axis.xaxis, [t for t in _ROUND if 0.97 * time.min() <= t <= 1.1 * slowest])
    axis.set_yscale("log")
    seen = values[time <= 1.1 * slowest]
    lowest, highest = 0.8 * float(seen.min()), 1.25 * float(seen.max())
    axis.set_ylim(lowest, highest)
    log_ticks(axis.yaxis, [v for v in _ROUND if lowest <= v <= highest][:: 1 + (highest > 60 * lowest)])
    axis.set_ylabel(label)
    return edge


def non_dominated(points: Float[np.ndarray, "points objectives"]) -> Bool[np.ndarray, " points"]:
    """Points that no other is at most equal to in every objective and below in one (all are minimised)."""
    order = np.lexsort(points.T[::-1])
    kept = np.zeros(len(points), bool)
    front = np.empty((0, points.shape[1]))
    for i in order.tolist():
        # whatever could beat the point comes before it
        at_most = (front <= points[i]).all(axis=1)
        if not (at_most & (front < points[i]).any(axis=1)).any():
            kept[i] = True
            front = np.concatenate([front, points[i : i + 1]])
    return kept
