"""Pictures of schedules, their bubbles, and training under their weight versions."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from perfmodel.display import EVENTS, LINES
from perfmodel.errors import PerfModelError
from perfmodel.schedule import PassTimes, Phase, Schedule
from perfmodel.schedule.facts import ScheduleFacts, starts_and_ends
from perfmodel.viz._boxes import Boxes, draw_boxes
from perfmodel.viz._gantt import chunk_shades
from perfmodel.viz._style import (
    MARKERS,
    WIDTHS_IN,
    Width,
    device_ticks,
    legend_below,
    log_ticks,
    new_figure,
    styled,
    wrapped,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from perfmodel.ir.interpreter import TrainingCurve

_STYLES: Final = ("-", "--", ":", "-.")
_ROW_IN: Final = 0.15
_LEAST_ROW_IN: Final = 0.06
_PANEL_IN: Final = 3.9
"""Largest height of a panel; beyond it rows become lower."""


class _DrawnSchedule(NamedTuple):
    """A schedule with the times of its passes and, if the title shows them, its facts."""

    schedule: Schedule
    times: PassTimes
    facts: ScheduleFacts | None = None


@styled
def draw_schedules(
    schedules: Sequence[tuple[Schedule, PassTimes] | tuple[Schedule, PassTimes, ScheduleFacts]],
    width: Width = "page",
) -> "Figure":
    """Draw a panel per schedule on a common time scale: a row per device, a box per pass.

    Chunks above 0 (of a bidirectional schedule, the direction up) are lighter. Titles give the
    makespan of the drawn passes and, if the schedule's facts are given, the bubble of a step and
    the steady interval of overlapping steps.

    Raises:
        PerfModelError: no schedules, or passes that take no time.
    """
    from matplotlib.patches import Patch

    if not schedules:
        raise PerfModelError(
            "schedules picture: no schedule supports these numbers of stages and micro-batches; change them"
        )

    # All panels share a scale of time and a height of rows, so that schedules can be compared.
    panels = []
    for schedule, times, *facts in schedules:
        panels.append(_DrawnSchedule(schedule, times, *facts))
    most_devices = max(panel.schedule.devices for panel in panels)
    row_in = max(_LEAST_ROW_IN, min(_ROW_IN, _PANEL_IN / most_devices))
    heights = [row_in * panel.schedule.devices for panel in panels]
    figure = new_figure(width, sum(heights) + 0.36 * len(panels) + 0.5)
    axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)[:, 0]
    ends_s = []
    for panel in panels:
        _, pass_ends_s = starts_and_ends(panel.schedule, panel.times)
        ends_s.append(float(pass_ends_s.max()))
    if not min(ends_s) > 0:
        raise PerfModelError(
            "schedules picture: passes of zero length cannot be drawn; give times above 0"
        )
    for axis, panel in zip(axes, panels, strict=True):
        _panel(axis, panel.schedule, panel.times, max(ends_s), row_in)
        title = _title(panel.schedule, panel.times)
        if panel.facts is not None:
            title = _facts_title(panel.facts)
        axis.set_title(title, pad=2)
    axes[-1].set_xlabel("time in s")

    # Phases of one colour share a patch of the legend.
    phases: set[int] = set()
    for panel in panels:
        phases.update(panel.schedule.phase.tolist())
    labels_by_colour: dict[str, list[str]] = {}
    for name in [_name(phase) for phase in sorted(phases)]:
        labels_by_colour.setdefault(EVENTS[name].colour, []).append(EVENTS[name].label)
    patches = [Patch(color=colour) for colour in labels_by_colour]
    texts = [", ".join(labels) for labels in labels_by_colour.values()]
    if any(panel.schedule.chunks > 1 for panel in panels):
        patches.append(Patch(color=chunk_shades(EVENTS["forward"].colour, 2)[1]))
        texts.append("lighter: further chunks, direction up")
    legend_below(figure, patches, texts)
    return figure


def _panel(
    axis: "Axes", schedule: Schedule, times: PassTimes, longest_s: float, row_in: float
) -> None:
    """Draw one schedule, a row per device."""
    start, end = starts_and_ends(schedule, times)
    shades = {}
    for phase in set(schedule.phase.tolist()):
        shades[phase] = chunk_shades(EVENTS[_name(phase)].colour, schedule.chunks)
    colours = []
    for phase, chunk in zip(schedule.phase.tolist(), schedule.chunk.tolist(), strict=True):
        colours.append(shades[phase][chunk])

    # A pass may be of several micro-batches.
    labels = []
    for first, span in zip(schedule.micro_batch.tolist(), schedule.span.tolist(), strict=True):
        label = f"{first}" if span == 1 else f"{first}-{first + span - 1}"
        labels.append(label)
    boxes = Boxes(
        start=start,
        end=end,
        top=schedule.device + 0.05,
        height=np.full(len(start), 0.9),
        colour=colours,
        label=labels,
        critical=np.zeros(len(start), bool),
    )
    draw_boxes(axis, boxes, 0.0, longest_s, row_in)
    device_ticks(axis, schedule.devices, "device")


def _facts_title(facts: ScheduleFacts) -> str:
    parts = [f"makespan {facts.makespan_s:.4g} s", f"bubble {facts.bubble_fraction:.1%}"]
    if facts.steady_interval_s != facts.makespan_s:
        parts.insert(1, f"steady interval {facts.steady_interval_s:.4g} s")
    return f"{facts.schedule}: {', '.join(parts)}"


def _title(schedule: Schedule, times: PassTimes) -> str:
    # Idle share over all devices up to the makespan.
    start, end = starts_and_ends(schedule, times)
    idle = 1 - float((end - start).sum()) / (schedule.devices * float(end.max()))
    return f"{schedule.name}: makespan {float(end.max()):.4g} s, {idle:.1%} idle"


def _name(phase: int) -> str:
    return Phase(phase).name.lower()


@styled
def draw_training_curves(curves: "Sequence[TrainingCurve]", width: Width = "page") -> "Figure":
    """Draw the loss against predicted wall-clock time and against updates."""
    figure = new_figure(width, 2.6)
    by_time, by_update = figure.subplots(1, 2, sharey=True)
    lines, labels = [], []
    for i, curve in enumerate(curves):
        linestyle = _STYLES[i // len(LINES) % len(_STYLES)]
        style = {"color": LINES[i % len(LINES)], "linestyle": linestyle}
        lines += by_time.plot(curve.time_s, curve.loss, **style)
        labels.append(f"{curve.schedule} (version difference {curve.version_difference[-1]})")
        by_update.plot(np.arange(1, len(curve.loss) + 1), curve.loss, **style)
    by_time.set(xlabel="predicted time in s", ylabel="loss", yscale="log")
    by_update.set(xlabel="update")
    legend_below(figure, lines, labels)
    return figure


_CHARACTERS_PER_IN = 20
_LINE_IN = 0.13
"""Height of a line of the legend."""


@styled
def draw_bubble_curves(facts: Sequence[ScheduleFacts], width: Width = "column") -> "Figure":
    """Draw the bubble fraction against the number of micro-batches, one line per schedule.

    Raises:
        PerfModelError: no facts.
    """
    if not facts:
        raise PerfModelError(
            "bubble picture: no schedule supports these numbers of stages and micro-batches; change them"
        )

    # Schedules of equal bubbles would hide each other: they share a line and a label. Rounding
    # joins those equal but for it.
    curves: dict[tuple[tuple[int, float], ...], list[str]] = {}
    for name in dict.fromkeys(f.schedule for f in facts):
        points = []
        for f in facts:
            if f.schedule == name:
                points.append((f.micro_batches, round(100 * f.bubble_fraction, 6)))
        curves.setdefault(tuple(sorted(points)), []).append(name)
    most_characters = int(WIDTHS_IN[width] * _CHARACTERS_PER_IN)
    labels = [wrapped(", ".join(names), most_characters) for names in curves.values()]
    figure = new_figure(width, 2.2 + _LINE_IN * sum(label.count("\n") + 1 for label in labels))
    axis = figure.subplots()
    for i, (curve, label) in enumerate(zip(curves, labels, strict=True)):
        axis.plot(
            [micro_batches for micro_batches, _ in curve],
            [bubble for _, bubble in curve],
            label=label,
            color=LINES[i % len(LINES)],
            marker=MARKERS[i % len(MARKERS)],
            linestyle=_STYLES[i // len(LINES) % len(_STYLES)],
        )
    axis.set_xscale("log", base=2)
    log_ticks(axis.xaxis, sorted({f.micro_batches for f in facts}))
    axis.set_ylim(0, None)
    axis.set_xlabel("micro-batches per step")
    axis.set_ylabel("bubble in %")
    stages = sorted({f.stages for f in facts})
    axis.set_title(f"{', '.join(map(str, stages))} stages")
    legend_below(figure, *axis.get_legend_handles_labels())
    return figure
