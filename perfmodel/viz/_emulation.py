"""Iteration time against a delay: what was emulated, what the timeline predicts, what is hidden."""

from typing import TYPE_CHECKING

import numpy as np

from perfmodel.display import LINES, VERMILLION
from perfmodel.execution.emulation import EmulatedCurve
from perfmodel.viz._style import Width, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@styled
def draw_emulated_curve(curve: EmulatedCurve, width: Width = "column") -> "Figure":
    """Points with error bars beside the predicted line, as in NeuronaBox's figure 4."""
    figure = new_figure(width, 2.2)
    axis = figure.subplots()
    ms = 1e3 * np.array(curve.delays_s)
    axis.plot(ms, 1e3 * np.array(curve.predicted_s), color=LINES[0], label="predicted")
    axis.errorbar(
        ms, 1e3 * np.array(curve.emulated_s), 1e3 * np.array(curve.spread_s), fmt="o", color=VERMILLION,
        elinewidth=0.8, label="emulated",
    )  # fmt: skip
    hidden_ms = 1e3 * (curve.hidden_s + curve.delays_s[0])
    if ms[0] < hidden_ms < ms[-1]:
        axis.axvline(hidden_ms, color="grey", linewidth=0.8, linestyle="--")
        axis.annotate(
            f"hidden up to {hidden_ms:.3g} ms", (hidden_ms, 0), xycoords=("data", "axes fraction"), xytext=(2, 2),
            textcoords="offset points",
        )  # fmt: skip
    axis.set_xlabel(f"delay of every {curve.collective.replace('_', '-')} in ms")
    axis.set_ylabel("iteration time in ms")
    axis.set_ylim(0, None)
    axis.legend()
    return figure
