"""Measured times: beside their predictions with intervals, and kernels under a device's roofs (Williams, Waterman and
Patterson, CACM 52(4), 2009)."""

from textwrap import shorten
from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.display import BLUE, GREY, LINES, VERMILLION
from perfmodel.errors import PerfModelError
from perfmodel.spec import Device
from perfmodel.viz._style import MARKERS, WIDTHS_IN, Width, legend_below, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INTERVALS_UP_TO = 150
"""Rows up to which each has its interval drawn; of more, a regular sample has."""
_POINTS_UP_TO = 5000
_MOST_POINTS = 3000
"""Of a family; a regular sample of more."""


@styled
def draw_parity(rows: "pd.DataFrame", width: Width = "column") -> "Figure":
    """A panel per group: a point per row, its 90 % interval, the line of equality and +-25 % beside it.

    Args:
        rows: `group`, `measured_s`, `predicted_s`, `lo_s`, `hi_s` (interval of the prediction); rows with a NaN are
            left out.

    Raises:
        PerfModelError: no row that has both times.
    """
    rows = rows.loc[(rows[["measured_s", "predicted_s", "lo_s", "hi_s"]] > 0).all(axis=1)]
    if rows.empty:
        raise PerfModelError("parity picture: no row was both measured and predicted")
    groups = [(str(name), own) for name, own in rows.groupby("group", sort=True)]
    across = min(len(groups), 2 if width == "column" else 4)
    down = -(-len(groups) // across)
    side_in = WIDTHS_IN[width] / across
    figure = new_figure(width, (min(side_in, 2.6) + 0.3) * down + 0.3)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axis, (name, own) in zip(grid, groups, strict=False):
        _panel(axis, name, own)
    for axis in grid[len(groups) :]:
        axis.set_axis_off()
    for place, axis in enumerate(grid[: len(groups)]):
        axis.set_ylabel("predicted time in s" if place % across == 0 else "")
        axis.set_xlabel("measured time in s" if place + across >= len(groups) else "")
    legend_below(figure, *grid[0].get_legend_handles_labels())
    return figure


def _panel(axis: "Axes", name: str, rows: "pd.DataFrame") -> None:
    measured, predicted, lo, hi = (rows[c].to_numpy() for c in ("measured_s", "predicted_s", "lo_s", "hi_s"))
    ends = np.array([min(measured.min(), predicted.min()) / 1.5, max(measured.max(), predicted.max()) * 1.5])
    room = max(1.0, (10 * ends[0] / ends[1]) ** 0.5)  # at least a decade, so that its ticks can be read
    ends *= [1 / room, room]
    axis.fill_between(ends, ends / 1.25, ends * 1.25, color=GREY, alpha=0.25, linewidth=0, label="within 25 %")
    axis.plot(ends, ends, color="black", linewidth=0.7, label="equal")
    shown = np.arange(0, len(rows), -(-len(rows) // _POINTS_UP_TO))
    ranked = np.argsort(measured, kind="stable")
    sample = ranked[:: -(-len(rows) // _INTERVALS_UP_TO)]
    every = "90 % interval" if len(sample) == len(rows) else "90 % interval (a sample)"
    axis.vlines(measured[sample], lo[sample], hi[sample], color=VERMILLION, linewidth=0.5, alpha=0.7, label=every)
    size = 6 if len(shown) < 300 else 2
    axis.scatter(measured[shown], predicted[shown], s=size, color=BLUE, linewidths=0, alpha=0.6, rasterized=True,
                 label="rows")  # fmt: skip
    error = np.abs(predicted / measured - 1)
    inside = float(((lo <= measured) & (measured <= hi)).mean())
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    counted = f"{len(rows):,} row{'s' * (len(rows) != 1)}, {inside:.0%} inside"
    axis.set_title(
        f"{shorten(name, 24, placeholder='...')}\n{counted}\nMAPE {error.mean():.1%}, median {np.median(error):.1%}",
        fontsize=6,
        pad=3,
    )
    axis.set_box_aspect(1)
    _decades(axis, most=6)


@styled
def draw_roofline(device: Device, kernels: "pd.DataFrame", width: Width = "column") -> "Figure":
    """Rate reached against arithmetic intensity, a marker per op family, and a roof per element type.

    Args:
        device: whose bandwidth and peak rates are drawn.
        kernels: a row per measured kernel: `family`, `dtype`, `flops`, `bytes`, `time_s`.

    Raises:
        PerfModelError: no kernel with work and time above zero.
    """
    import matplotlib.patheffects as effects

    kernels = kernels.loc[(kernels["flops"] > 0) & (kernels["bytes"] > 0) & (kernels["time_s"] > 0)]
    if kernels.empty:
        raise PerfModelError(f"roofline: no measured kernel of {device.name} in the tables; give its tables")
    figure = new_figure(width, 2.8)
    axis = figure.subplots()
    intensity = kernels["flops"].to_numpy() / kernels["bytes"].to_numpy()
    rate = kernels["flops"].to_numpy() / kernels["time_s"].to_numpy()
    family = kernels["family"].to_numpy()
    families = sorted(set(family.tolist()), key=lambda name: -int((family == name).sum()))
    for i, name in enumerate(families):
        own = np.flatnonzero(family == name)
        own = own[:: -(-len(own) // _MOST_POINTS)]
        style: dict[str, Any] = {"marker": MARKERS[i % len(MARKERS)], "color": LINES[i % len(LINES)]}
        axis.scatter(intensity[own], rate[own], s=4, alpha=0.35, linewidths=0, rasterized=True, label=name, **style)
    # a decade beside what was measured, and the ridge of every roof
    peaks: dict[float, list[str]] = {}
    for dtype in dict.fromkeys(kernels["dtype"]):
        peaks.setdefault(device.peak.flops_per_s(dtype.partition("_")[0]), []).append(dtype)
    bandwidth = device.memory_bandwidth_bytes_per_s
    left, right = intensity.min() / 2, max(intensity.max(), max(peaks) / bandwidth) * 3
    halo = [effects.withStroke(linewidth=2, foreground="white")]
    for peak, dtypes in sorted(peaks.items()):
        axis.plot([left, peak / bandwidth, right], [left * bandwidth, peak, peak], color="black", linewidth=0.9)
        axis.annotate(
            f"{', '.join(sorted(dtypes))}: {peak / 1e12:.3g} TFLOP/s", (right, peak), xytext=(0, 2),
            textcoords="offset points", ha="right", va="bottom", fontsize=6, path_effects=halo,
        )  # fmt: skip
    middle = (left * min(peaks) / bandwidth) ** 0.5  # of the slope; the text ends above it
    axis.annotate(
        f"{bandwidth / 1e12:.3g} TB/s", (middle, middle * bandwidth), xytext=(-3, 2), textcoords="offset points",
        ha="right", va="bottom", fontsize=6,
    )  # fmt: skip
    axis.set(xscale="log", yscale="log", xlim=(left, right), ylim=(rate.min() / 2, max(peaks) * 2.5))
    axis.set_xlabel("arithmetic intensity in FLOP per byte")
    axis.set_ylabel("rate in FLOP/s")
    _decades(axis, most=12)
    axis.set_title(device.name)
    handles, labels = axis.get_legend_handles_labels()
    legend_below(figure, handles, labels, markerscale=1.8)
    for handle in figure.legends[0].legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return figure


def _decades(axis: "Axes", most: int) -> None:
    """Logarithmic axes with at most so many numbers, and marks for all between."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(numticks=most))
        side.set_minor_locator(LogLocator(subs="all", numticks=99))
        side.set_minor_formatter(NullFormatter())
