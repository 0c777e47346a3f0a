"""Memory in use on every pipeline rank over the step."""

from typing import TYPE_CHECKING

import numpy as np

from perfmodel.display import ramp
from perfmodel.prediction import Prediction
from perfmodel.units import GIB
from perfmodel.viz._require import timeline_of
from perfmodel.viz._style import Width, new_figure, set_title, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_UP_TO = 4
"""Ranks up to which each line has its name in the legend."""


@styled
def draw_memory(prediction: Prediction, width: Width = "column") -> "Figure":
    """One line per pipeline rank, from dark (first) to light (last), under the device's capacity.

    Raises:
        PerfModelError: the prediction holds no timeline.
    """
    end_s = max(prediction.step_time_s, timeline_of(prediction).makespan_s)
    figure = new_figure(width, 2.3)
    memory_lines(figure.subplots(), prediction, end_s)
    set_title(figure, f"{prediction.model}, {prediction.layout}")
    return figure


def memory_lines(axis: "Axes", prediction: Prediction, end_s: float) -> None:
    """Bytes in use on every rank, the capacity, and a legend beside them."""
    steps = prediction.memory_over_time().steps
    per_s, unit = time_unit(end_s)
    named = set(range(len(steps))) if len(steps) <= _NAMED_UP_TO else {0, len(steps) // 2, len(steps) - 1}
    for rank, (own, colour) in enumerate(zip(steps, ramp(len(steps)), strict=True)):
        time = np.append(own.time_s, end_s) * per_s
        held = np.append(own.in_use_bytes, own.in_use_bytes[-1]) / GIB
        label = f"rank {rank}" if rank in named else None
        axis.step(time, held, where="post", color=colour, linewidth=0.8, label=label)
    capacity = prediction.memory_capacity_bytes / GIB
    axis.axhline(capacity, color="black", linewidth=0.8, linestyle="--", label="capacity")
    axis.set_xlim(0, end_s * per_s)
    axis.set_ylim(0, None)
    axis.set_ylabel("memory in GiB")
    axis.set_xlabel(f"time in {unit}")
    axis.legend(loc="lower right", bbox_to_anchor=(1.0, 1.0), ncols=min(5, len(named) + 1))
