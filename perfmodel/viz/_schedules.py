"""Pictures of schedules as in the papers' figures, and of training under their weight versions."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from perfmodel.interpreter import TrainingCurve
from perfmodel.program import Kind
from perfmodel.schedule import PassTimes, Phase, Schedule, starts_and_ends
from perfmodel.viz._colours import COLOURS
from perfmodel.viz._events import LABELS
from perfmodel.viz._save import save_png

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_NUMBERED_UP_TO = 60
"""Passes on a device up to which their micro-batch numbers can be read."""


def draw_schedules(schedules: Sequence[tuple[Schedule, PassTimes]]) -> "Figure":
    """One panel per schedule: a row per device, a box per pass with its micro-batch, framed on chunks above 0."""
    from matplotlib.figure import Figure

    heights = [0.8 + 0.22 * schedule.devices for schedule, _ in schedules]
    figure = Figure(figsize=(10, sum(heights) + 0.4), layout="constrained", dpi=150)
    axes = figure.subplots(len(schedules), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axis, (schedule, times) in zip(axes, schedules, strict=True):
        _panel(axis, schedule, times)
    kinds = sorted({Kind[Phase(phase).name] for schedule, _ in schedules for phase in np.unique(schedule.phase)})
    labels: dict[str, list[str]] = {}
    for kind in kinds:
        labels.setdefault(COLOURS[kind], []).append(LABELS[kind])
    handles = [axes[0].barh(0, 0, color=colour, label=", ".join(names)) for colour, names in labels.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=7, frameon=False)
    return figure


def write_schedules(schedules: Sequence[tuple[Schedule, PassTimes]], path: Path) -> None:
    """Write the picture as PNG, atomically."""
    save_png(draw_schedules(schedules), path)


def _panel(axis: "Axes", schedule: Schedule, times: PassTimes) -> None:
    start, end = starts_and_ends(schedule, times)
    busiest = int(np.diff(schedule.offsets).max())
    idle = 1 - float((end - start).sum()) / (schedule.devices * float(end.max()))
    for i, (phase, chunk) in enumerate(zip(schedule.phase.tolist(), schedule.chunk.tolist(), strict=True)):
        y = float(schedule.device[i])
        colour = COLOURS[Kind[Phase(phase).name]]
        axis.broken_barh(
            [(start[i], end[i] - start[i])], (y - 0.42, 0.84), facecolor=colour,
            edgecolor="black" if chunk else "white", linewidth=0.7 if chunk else 0.3,
        )  # fmt: skip
        if busiest <= _NUMBERED_UP_TO:
            first = int(schedule.micro_batch[i])
            text = f"{first}" if schedule.span[i] == 1 else f"{first}-{first + schedule.span[i] - 1}"
            axis.text((start[i] + end[i]) / 2, y, text, ha="center", va="center", fontsize=4.5)
    axis.set_title(f"{schedule.name}: {end.max():.4g} s, {idle:.1%} idle", loc="left", fontsize=8)
    axis.set_xlim(0, end.max())
    axis.set_ylim(schedule.devices - 0.5, -0.5)
    axis.set_yticks(range(schedule.devices))
    axis.set_ylabel("device", fontsize=7)
    axis.tick_params(labelsize=6)


def draw_training_curves(curves: Sequence[TrainingCurve]) -> "Figure":
    """Loss against predicted wall-clock time, and against updates: hardware and statistical efficiency."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3.6), layout="constrained", dpi=150)
    by_time, by_update = figure.subplots(1, 2, sharey=True)
    for curve, colour in zip(curves, _LINES * (len(curves) // len(_LINES) + 1), strict=False):
        label = f"{curve.schedule} (version difference {curve.version_difference[-1]})"
        by_time.plot(curve.time_s, curve.loss, color=colour, label=label, linewidth=1)
        by_update.plot(np.arange(1, len(curve.loss) + 1), curve.loss, color=colour, linewidth=1)
    by_time.set(xlabel="predicted time / s", ylabel="loss", yscale="log")
    by_update.set(xlabel="update")
    by_time.legend(fontsize=7)
    return figure


def write_training_curves(curves: Sequence[TrainingCurve], path: Path) -> None:
    """Write the picture as PNG, atomically."""
    save_png(draw_training_curves(curves), path)
