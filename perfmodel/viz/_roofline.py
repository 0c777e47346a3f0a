"""Measured kernels under a device's roofs (Williams, Waterman and Patterson, CACM 52(4), 2009)."""

from typing import TYPE_CHECKING, Any

import numpy as np

from perfmodel.display import LINES
from perfmodel.errors import PerfModelError
from perfmodel.spec import Device
from perfmodel.viz._style import Width, legend_below, new_figure, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MOST_POINTS = 3000
"""Of a family; a regular sample of more."""


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
    from matplotlib.ticker import LogLocator, NullFormatter

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
        style: dict[str, Any] = {"marker": _MARKERS[i % len(_MARKERS)], "color": LINES[i % len(LINES)]}
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
    for side in (axis.xaxis, axis.yaxis):
        side.set_major_locator(LogLocator(numticks=12))
        side.set_minor_locator(LogLocator(subs="all", numticks=99))
        side.set_minor_formatter(NullFormatter())
    axis.set_title(device.name)
    handles, labels = axis.get_legend_handles_labels()
    legend_below(figure, handles, labels, markerscale=1.8)
    for handle in figure.legends[0].legend_handles:
        if handle is not None:
            handle.set_alpha(1)
    return figure
