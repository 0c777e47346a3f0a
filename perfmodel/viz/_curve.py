"""Draws step time against machine parameters, and against an emulated delay."""

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.display import LINES, VERMILLION
from perfmodel.errors import PerfModelError
from perfmodel.planning.what_if import Curve
from perfmodel.units import duration
from perfmodel.viz._style import MARKERS, Width, new_figure, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from perfmodel.emulate import EmulatedCurve

_HYPHENED = re.compile(r"\b(all|reduce|inter|intra) (reduce|gather|scatter|to all|node)")
_LEAST_SPAN = 0.1
"""Least span of the axis as a share of the step, so that a flat curve looks flat."""


@styled
def draw_curves(curves: Sequence[Curve], width: Width = "column") -> "Figure":
    """Draw one panel for all parameters swept as multiples, and one for each other parameter.

    The panel of a delay marks how long a delay the step hides.

    Raises:
        PerfModelError: no curve.
    """
    if not curves:
        raise PerfModelError("what-if picture: there is no curve to draw; give at least one sweep")

    # Multiples of different parameters share an axis; absolute values do not.
    multiples = [curve for curve in curves if curve.multiple]
    panels = [[curve] for curve in curves if not curve.multiple]
    if multiples:
        panels.insert(0, multiples)

    # A column has room for one panel, a page for three.
    panels_per_row = min(len(panels), 1 if width == "column" else 3)
    rows = -(-len(panels) // panels_per_row)
    figure = new_figure(width, 2.1 * rows)
    grid = figure.subplots(rows, panels_per_row, squeeze=False).ravel()
    for axis, panel in zip(grid, panels, strict=False):
        _panel(axis, panel)
    for axis in grid[len(panels) :]:
        axis.set_axis_off()
    if len(multiples) > 1:
        grid[0].legend(
            grid[0].get_lines(), [_parameter_words(curve.name) for curve in multiples], loc="best"
        )
    return figure


def _panel(axis: "Axes", curves: Sequence[Curve]) -> None:
    """Draw curves that share an axis."""
    longest_s = max(max(curve.step_s) for curve in curves)

    # Times are written in the unit of the longest.
    per_s, unit = time_unit(longest_s)
    first = curves[0]
    seconds = first.name.endswith("_s") and not first.multiple
    scale, unit_of_values = time_unit(max(first.values)) if seconds else (1.0, "")
    for i, curve in enumerate(curves):
        steps = [per_s * s for s in curve.step_s]
        values = [scale * v for v in curve.values]
        axis.plot(values, steps, color=LINES[i % len(LINES)], marker=MARKERS[i % len(MARKERS)])
    if first.multiple:
        one_parameter = f"{_parameter_words(first.name)}, relative to today"
        axis.set_xlabel(one_parameter if len(curves) == 1 else "factor, relative to today")

        # A factor of four or more is read better on a logarithmic axis.
        if min(first.values) > 0 and max(first.values) / min(first.values) >= 4:
            axis.set_xscale("log", base=2)
            axis.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    else:
        label = _parameter_words(first.name)
        axis.set_xlabel(f"{label} in {unit_of_values}" if seconds else label)
    if first.hidden_up_to and min(first.values) <= first.hidden_up_to <= max(first.values):
        axis.axvline(first.hidden_up_to * scale, color=VERMILLION, linewidth=0.8, linestyle="--")
        axis.set_title(f"hidden up to {duration(first.hidden_up_to)}", color=VERMILLION)

    # A flat curve shall look flat: the axis spans at least a tenth of the step.
    lo = min(min(curve.step_s) for curve in curves) * per_s
    hi = longest_s * per_s
    room = max(hi - lo, _LEAST_SPAN * hi)
    axis.set_ylim((lo + hi - 1.15 * room) / 2, (lo + hi + 1.15 * room) / 2)
    axis.set_ylabel(f"step time in {unit}")


def _parameter_words(name: str) -> str:
    """A parameter's name for people, without its unit."""
    spaced = name.removesuffix("_s").replace("_", " ")
    return _HYPHENED.sub(r"\1-\2", spaced)


@styled
def draw_emulated_curve(curve: "EmulatedCurve", width: Width = "column") -> "Figure":
    """Draw emulated points with error bars and the predicted line, as in NeuronaBox's figure 4."""
    figure = new_figure(width, 2.2)
    axis = figure.subplots()
    ms = 1e3 * np.array(curve.delays_s)
    axis.plot(ms, 1e3 * np.array(curve.predicted_s), color=LINES[0], label="predicted")
    axis.errorbar(
        ms,
        1e3 * np.array(curve.emulated_s),
        1e3 * np.array(curve.spread_s),
        fmt="o",
        color=VERMILLION,
        elinewidth=0.8,
        label="emulated",
    )
    # The delay from which on the step is longer, if the sweep has reached it.
    hidden_ms = 1e3 * (curve.hidden_s + curve.delays_s[0])
    if ms[0] < hidden_ms < ms[-1]:
        axis.axvline(hidden_ms, color="grey", linewidth=0.8, linestyle="--")
        axis.annotate(
            f"hidden up to {duration(hidden_ms / 1e3)}",
            (hidden_ms, 0),
            xycoords=("data", "axes fraction"),
            xytext=(2, 2),
            textcoords="offset points",
        )
    axis.set_xlabel(f"delay of every {curve.collective.replace('_', '-')} in ms")
    axis.set_ylabel("iteration time in ms")
    axis.set_ylim(0, None)
    axis.legend()
    return figure
