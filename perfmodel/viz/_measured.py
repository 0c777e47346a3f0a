"""Pictures of measurements: parity plots, rooflines (Williams, Waterman and Patterson, CACM 52(4),
2009) and timeline comparisons."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from textwrap import shorten
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from perfmodel.display import BLUE, EVENTS, GREY, LINES, VERMILLION
from perfmodel.errors import PerfModelError
from perfmodel.ingest import MeasuredTrace
from perfmodel.ingest.profiles import PHASES, ActivityKind
from perfmodel.spec import Device
from perfmodel.units import plural
from perfmodel.viz._boxes import Boxes, draw_boxes
from perfmodel.viz._style import (
    MARKERS,
    WIDTHS_IN,
    Width,
    device_ticks,
    legend_below,
    new_figure,
    set_title,
    styled,
    time_unit,
)

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_INTERVALS_UP_TO = 150
"""Most rows for which every interval is drawn; with more rows, those of a regular sample."""
_POINTS_UP_TO = 5000
_MOST_POINTS = 3000
"""Most points of a family; with more, a regular sample is drawn."""
_COMPUTE_LANE: Final = (0.05, 0.62)
_SIDE_LANE: Final = (0.69, 0.26)
_SEEN_GAP: Final = 0.001
"""Gap, as a share of the step, that is half a point wide on a page."""


@styled
def draw_parity(rows: "pd.DataFrame", width: Width = "column") -> "Figure":
    """Draw a panel per group with a point per row, its 90 % interval, the line of equality and
    lines at +-25 %.

    Args:
        rows: `group`, `measured_s`, `predicted_s`, `lo_s`, `hi_s` (interval of the prediction);
            rows with a NaN are left out.

    Raises:
        PerfModelError: no row that has both times.
    """
    rows = rows.loc[(rows[["measured_s", "predicted_s", "lo_s", "hi_s"]] > 0).all(axis=1)]
    if rows.empty:
        raise PerfModelError(
            "parity picture: no row was both measured and predicted; give other tables"
        )
    groups = [(str(name), members) for name, members in rows.groupby("group", sort=True)]

    # Square panels, two beside each other in a column and four on a page.
    across = min(len(groups), 2 if width == "column" else 4)
    down = -(-len(groups) // across)
    side_in = WIDTHS_IN[width] / across
    figure = new_figure(width, (min(side_in, 2.6) + 0.3) * down + 0.3)
    grid = figure.subplots(down, across, squeeze=False).ravel()
    for axis, (name, members) in zip(grid, groups, strict=False):
        _panel(axis, name, members)
    for axis in grid[len(groups) :]:
        axis.set_axis_off()
    for place, axis in enumerate(grid[: len(groups)]):
        axis.set_ylabel("predicted time in s" if place % across == 0 else "")
        axis.set_xlabel("measured time in s" if place + across >= len(groups) else "")
    legend_below(figure, *grid[0].get_legend_handles_labels())
    return figure


def _panel(axis: "Axes", name: str, rows: "pd.DataFrame") -> None:
    """Draw the rows of one group."""
    measured = rows["measured_s"].to_numpy()
    predicted = rows["predicted_s"].to_numpy()
    lo = rows["lo_s"].to_numpy()
    hi = rows["hi_s"].to_numpy()

    # Both axes span the same times, so that equal times lie on the diagonal.
    shortest = min(measured.min(), predicted.min())
    longest = max(measured.max(), predicted.max())
    ends = np.array([shortest / 1.5, longest * 1.5])
    # At least a decade is shown, so that its ticks can be read.
    room = max(1.0, (10 * ends[0] / ends[1]) ** 0.5)
    ends *= [1 / room, room]
    axis.fill_between(
        ends,
        ends / 1.25,
        ends * 1.25,
        color=GREY,
        alpha=0.25,
        linewidth=0,
        label="within 25 %",
    )
    axis.plot(ends, ends, color="black", linewidth=0.7, label="equal")

    # So many points and intervals would cover one another. With many rows, intervals are drawn only
    # for a regular sample over the range of times.
    sampled = np.arange(0, len(rows), -(-len(rows) // _POINTS_UP_TO))
    ranked = np.argsort(measured, kind="stable")
    sample = ranked[:: -(-len(rows) // _INTERVALS_UP_TO)]
    bar_label = "90 % interval" if len(sample) == len(rows) else "90 % interval (a sample)"
    axis.vlines(
        measured[sample],
        lo[sample],
        hi[sample],
        color=VERMILLION,
        linewidth=0.5,
        alpha=0.7,
        label=bar_label,
    )
    size = 6 if len(sampled) < 300 else 2
    axis.scatter(
        measured[sampled],
        predicted[sampled],
        s=size,
        color=BLUE,
        linewidths=0,
        alpha=0.6,
        rasterized=True,
        label="rows",
    )

    # Figures are of all rows, also where only a sample is drawn.
    error = np.abs(predicted / measured - 1)
    covered_share = float(((lo <= measured) & (measured <= hi)).mean())
    axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
    title = [
        shorten(name, 24, placeholder="..."),
        f"{len(rows):,} {plural('row', len(rows))}, {covered_share:.0%} inside",
        f"MAPE {error.mean():.1%}, median {np.median(error):.1%}",
    ]
    axis.set_title("\n".join(title), fontsize=6, pad=3)
    axis.set_box_aspect(1)
    _decades(axis, limit=6)


@styled
def draw_roofline(device: Device, kernels: "pd.DataFrame", width: Width = "column") -> "Figure":
    """Draw the reached rate against arithmetic intensity, with a marker per op family and a roof
    per element type.

    Args:
        device: device whose bandwidth and peak rates are drawn.
        kernels: a row per measured kernel: `family`, `dtype`, `flops`, `bytes`, `time_s`.

    Raises:
        PerfModelError: no kernel with work and time above zero.
    """
    has_work = (kernels["flops"] > 0) & (kernels["bytes"] > 0)
    kernels = kernels.loc[has_work & (kernels["time_s"] > 0)]
    if kernels.empty:
        raise PerfModelError(
            f"roofline: the tables have no measured kernel of {device.name}; give tables of this device"
        )
    figure = new_figure(width, 2.8)
    axis = figure.subplots()
    intensity = kernels["flops"].to_numpy() / kernels["bytes"].to_numpy()
    rate = kernels["flops"].to_numpy() / kernels["time_s"].to_numpy()
    _draw_families(axis, kernels["family"].to_numpy(), intensity, rate)

    # A decade beside what was measured, and the ridge of every roof.
    peaks: dict[float, list[str]] = {}
    for dtype in dict.fromkeys(kernels["dtype"]):
        peaks.setdefault(device.peak.flops_per_s(dtype.partition("_")[0]), []).append(dtype)
    bandwidth = device.memory_bandwidth_bytes_per_s
    lowest = intensity.min() / 2
    highest = max(intensity.max(), max(peaks) / bandwidth) * 3
    _draw_roofs(axis, peaks, bandwidth, lowest, highest)
    axis.set(
        xscale="log",
        yscale="log",
        xlim=(lowest, highest),
        ylim=(rate.min() / 2, max(peaks) * 2.5),
    )
    axis.set_xlabel("arithmetic intensity in FLOP per byte")
    axis.set_ylabel("rate in FLOP/s")
    _decades(axis, limit=12)
    axis.set_title(device.name)
    handles, labels = axis.get_legend_handles_labels()
    legend_below(figure, handles, labels, markerscale=1.8)

    # Points are transparent in the cloud, and opaque in the legend.
    for handle in figure.legends[0].legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return figure


def _draw_families(
    axis: "Axes", family: np.ndarray, intensity: np.ndarray, rate: np.ndarray
) -> None:
    """Draw kernels as points, by family."""
    # The largest families first: those drawn later lie on top.
    families = sorted(set(family.tolist()), key=lambda name: -int((family == name).sum()))
    for i, name in enumerate(families):
        family_places = np.flatnonzero(family == name)
        family_places = family_places[:: -(-len(family_places) // _MOST_POINTS)]

        # Families differ in marker and colour, for print without colours.
        style: dict[str, Any] = {
            "marker": MARKERS[i % len(MARKERS)],
            "color": LINES[i % len(LINES)],
        }
        axis.scatter(
            intensity[family_places],
            rate[family_places],
            s=4,
            alpha=0.35,
            linewidths=0,
            rasterized=True,
            label=name,
            **style,
        )


def _draw_roofs(
    axis: "Axes",
    peaks: Mapping[float, Sequence[str]],
    bandwidth: float,
    lowest: float,
    highest: float,
) -> None:
    """Draw the roof of each peak rate, with the element types that have it, and write the bandwidth
    beside the slope.

    Args:
        peaks: element types by peak rate in FLOP/s.
        bandwidth: bytes/s of the device's memory.
        lowest, highest: ends of the axis of intensities.
    """
    import matplotlib.patheffects as effects

    # A roof is the slope of the memory bandwidth up to the ridge, then the peak of the element
    # types that share it.
    halo = [effects.withStroke(linewidth=2, foreground="white")]
    for peak, dtypes in sorted(peaks.items()):
        ridge = peak / bandwidth
        axis.plot(
            [lowest, ridge, highest], [lowest * bandwidth, peak, peak], color="black", linewidth=0.9
        )
        axis.annotate(
            f"{', '.join(sorted(dtypes))}: {peak / 1e12:.3g} TFLOP/s",
            (highest, peak),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            fontsize=6,
            path_effects=halo,
        )

    # The bandwidth is written above the middle of the slope.
    middle = (lowest * min(peaks) / bandwidth) ** 0.5
    axis.annotate(
        f"{bandwidth / 1e12:.3g} TB/s",
        (middle, middle * bandwidth),
        xytext=(-3, 2),
        textcoords="offset points",
        ha="right",
        va="bottom",
        fontsize=6,
    )


def _decades(axis: "Axes", limit: int) -> None:
    """Set logarithmic axes with a limited number of labels, and marks in between."""
    from matplotlib.ticker import LogLocator, NullFormatter

    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(numticks=limit))
        side.set_minor_locator(LogLocator(subs="all", numticks=99))
        side.set_minor_formatter(NullFormatter())


@styled
def draw_comparison(
    predicted: MeasuredTrace,
    measured: MeasuredTrace,
    title: str = "",
    width: Width = "page",
) -> "Figure":
    """Draw two timelines, a row per device: computations above, communication and copies below.

    Both begin with their first computation, and only the first step of a measured trace is drawn.
    Kernels of one pass without visible gaps are drawn as one box.
    """
    from matplotlib.patches import Patch

    # Both panels share the axis of time, so that equal widths mean equal times.
    predicted_s = predicted.batch_time_s
    measured_s = measured.steps()[0].batch_time_s
    predicted = _joined(predicted)
    step = _joined(measured.steps()[0])
    row_in = max(0.07, min(0.2, 3.0 / max(predicted.devices, step.devices)))
    heights = [row_in * trace.devices for trace in (predicted, step)]
    figure = new_figure(width, sum(heights) + 1.15 + 0.12 * title.count("\n"))
    axes = figure.subplots(2, 1, sharex=True, height_ratios=heights)
    origins_s = [_first_computation_s(trace) for trace in (predicted, step)]
    end_s = max(float(t.end_s.max()) - o for t, o in zip((predicted, step), origins_s, strict=True))
    per_s, unit = time_unit(end_s)
    drawn: dict[str, str] = {}
    titles = (
        f"predicted: {predicted_s * per_s:.4g} {unit}",
        f"measured: {measured_s * per_s:.4g} {unit}",
    )
    for axis, name, trace, origin_s in zip(axes, titles, (predicted, step), origins_s, strict=True):
        looks = [EVENTS[_event(trace, i)] for i in range(trace.n)]
        drawn |= {look.label: look.colour for look in looks}
        boxes = _boxes(trace, [look.colour for look in looks], origin_s, per_s)
        draw_boxes(axis, boxes, 0.0, end_s * per_s, row_in)
        device_ticks(axis, trace.devices, "device")
        axis.set_title(name, pad=2)
    axes[1].set_xlabel(f"time since the first computation in {unit}")
    set_title(figure, title)
    legend_below(figure, [Patch(color=colour) for colour in drawn.values()], list(drawn))
    return figure


def _joined(trace: MeasuredTrace) -> MeasuredTrace:
    """Merge activities of one pass that follow one another on a stream almost without gaps."""
    # A pass of thousands of kernels would be too many boxes to draw, and looks the same as one.
    # Sort by device, stream and start, so that neighbours in the array are neighbours in time.
    order = np.lexsort((trace.start_s, trace.stream, trace.device))
    tags = [trace.device, trace.stream, trace.kind, trace.phase, trace.stage, trace.micro_batch]
    tags = np.stack(tags)[:, order]
    start_s, end_s = trace.start_s[order], trace.end_s[order]
    has_gap = start_s[1:] - end_s[:-1] > _SEEN_GAP * trace.batch_time_s
    differs = (tags[:, 1:] != tags[:, :-1]).any(axis=0)
    starts_anew = has_gap | differs

    # An activity begins a new box unless it continues the pass before it.
    passes = (trace.phase[order] > 0) & (trace.kind[order] == ActivityKind.COMPUTE)
    first = np.flatnonzero(np.r_[True, starts_anew | ~passes[1:]])
    ends_s = np.maximum.reduceat(end_s, first)
    joined = trace.select(order[first])
    return replace(joined, end_s=ends_s)


def _first_computation_s(trace: MeasuredTrace) -> float:
    computes = trace.kind == ActivityKind.COMPUTE
    starts_s = trace.start_s[computes] if computes.any() else trace.start_s
    return float(starts_s.min())


def _event(trace: MeasuredTrace, i: int) -> str:
    """Name in `EVENTS` of an activity: its phase or, without one, the resource it uses."""
    return PHASES[trace.phase[i]] or ActivityKind(trace.kind[i]).name.lower()


def _boxes(trace: MeasuredTrace, colours: list[str], origin_s: float, per_s: float) -> Boxes:
    """Return the boxes of a trace: a row per device, computation above the rest."""
    compute = trace.kind == ActivityKind.COMPUTE
    compute_top, compute_height = _COMPUTE_LANE
    side_top, side_height = _SIDE_LANE
    labels = []
    for micro_batch, computes in zip(trace.micro_batch.tolist(), compute.tolist(), strict=True):
        labels.append(str(micro_batch) if computes and micro_batch >= 0 else "")
    return Boxes(
        start=(trace.start_s - origin_s) * per_s,
        end=(trace.end_s - origin_s) * per_s,
        top=trace.device + np.where(compute, compute_top, side_top),
        height=np.where(compute, compute_height, side_height),
        colour=colours,
        label=labels,
        critical=np.zeros(trace.n, bool),
    )
