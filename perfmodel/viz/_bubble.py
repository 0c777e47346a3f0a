"""Idle share of the pipeline against the number of micro-batches, schedule by schedule."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.display import LINES
from perfmodel.errors import PerfModelError
from perfmodel.schedule import ScheduleFacts
from perfmodel.viz._style import Width, legend_below, log_ticks, new_figure, styled

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLES = ("-", "--", ":", "-.")


@styled
def draw_bubble_curves(facts: Sequence[ScheduleFacts], width: Width = "column") -> "Figure":
    """One line per schedule: bubble fraction against micro-batches of a step.

    Raises:
        PerfModelError: no facts.
    """
    if not facts:
        raise PerfModelError("bubble picture: no schedule can run with these stages and micro-batches; change them")
    figure = new_figure(width, 2.5)
    axis = figure.subplots()
    # larger markers first, so that equal curves show under each other
    for i, name in enumerate(dict.fromkeys(f.schedule for f in facts)):
        own = sorted((f for f in facts if f.schedule == name), key=lambda f: f.micro_batches)
        axis.plot(
            [f.micro_batches for f in own], [100 * f.bubble_fraction for f in own], label=name,
            color=LINES[i % len(LINES)], marker=_MARKERS[i % len(_MARKERS)], linestyle=_STYLES[i // len(LINES) % 4],
            markersize=max(2.0, 4.5 - 0.5 * i),
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    log_ticks(axis.xaxis, sorted({f.micro_batches for f in facts}))
    axis.set_ylim(0, None)
    axis.set_xlabel("micro-batches per step")
    axis.set_ylabel("bubble in %")
    stages = sorted({f.stages for f in facts})
    axis.set_title(f"{', '.join(map(str, stages))} stages")
    legend_below(figure, *axis.get_legend_handles_labels())
    return figure
