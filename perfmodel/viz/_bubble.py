"""Idle share of the pipeline against the number of micro-batches, schedule by schedule."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.display import LINES
from perfmodel.errors import PerfModelError
from perfmodel.schedule import ScheduleFacts
from perfmodel.viz._style import WIDTHS_IN, Width, legend_below, log_ticks, new_figure, styled, wrapped

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_STYLES = ("-", "--", ":", "-.")
_CHARACTERS_PER_IN = 20
_LINE_IN = 0.13
"""Of the legend."""


@styled
def draw_bubble_curves(facts: Sequence[ScheduleFacts], width: Width = "column") -> "Figure":
    """One line per schedule, or per schedules of equal bubbles: bubble fraction against micro-batches of a step.

    Raises:
        PerfModelError: no facts.
    """
    if not facts:
        raise PerfModelError("bubble picture: no schedule can run with these stages and micro-batches; change them")
    curves: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in dict.fromkeys(f.schedule for f in facts):
        own = sorted((f.micro_batches, round(100 * f.bubble_fraction, 6)) for f in facts if f.schedule == name)
        curves.setdefault(tuple(own), []).append(name)
    most = int(WIDTHS_IN[width] * _CHARACTERS_PER_IN)
    labels = [wrapped(", ".join(names), most) for names in curves.values()]
    figure = new_figure(width, 2.2 + _LINE_IN * sum(label.count("\n") + 1 for label in labels))
    axis = figure.subplots()
    for i, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        axis.plot(
            *zip(*curve, strict=True), label=label, color=LINES[i % len(LINES)], marker=_MARKERS[i % len(_MARKERS)],
            linestyle=_STYLES[i // len(LINES) % 4],
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
