"""Draws memory and link utilisation of every pipeline rank over the step."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import BLUE, ramp, shade
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction
from perfmodel.program import Stream
from perfmodel.timeline import MemorySteps, Slices, slices
from perfmodel.units import GIB
from perfmodel.viz._style import Width, new_figure, set_title, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_NAMED_UP_TO = 4
"""Most ranks for which each line is named in the legend."""
_ALL_UP_TO: Final = 16
_COLUMN_PT: Final = 4.0
"""Width below which the rise and fall of successive micro-batches cannot be distinguished."""
_TIGHT: Final = {"columnspacing": 0.9, "handletextpad": 0.4, "borderaxespad": 0.2}
_LEAST_SHARE: Final = 0.4
"""Least used share of the capacity for which the axis includes the capacity."""


@styled
def draw_memory(prediction: Prediction, width: Width = "column") -> "Figure":
    """One line per pipeline rank, from dark (first) to light (last), under the device's capacity.

    With more micro-batches than can be distinguished, the highest use in every few points of width
    is drawn; the axis says so. With more than 16 ranks, a regular selection and the fullest rank
    are drawn.

    Raises:
        PerfModelError: the prediction holds no timeline.
    """
    end_s = max(prediction.step_time_s, prediction.kept_timeline.makespan_s)
    figure = new_figure(width, 2.3)
    memory_lines(figure.subplots(), prediction, end_s)
    set_title(figure, f"{prediction.model}, {prediction.layout_notation}")
    return figure


def memory_lines(axis: "Axes", prediction: Prediction, end_s: float) -> None:
    """Draw the bytes in use on every rank, the capacity, and a legend."""
    steps = prediction.memory_over_time().steps
    per_s, unit = time_unit(end_s)
    ranks_in_legend = {0, len(steps) // 2, len(steps) - 1}
    if len(steps) <= _NAMED_UP_TO:
        ranks_in_legend = set(range(len(steps)))
    columns = int(axis.get_figure().get_figwidth() * 72 / _COLUMN_PT)  # type: ignore[union-attr]
    crowded = max(len(rank_steps.time_s) for rank_steps in steps) > 2 * columns
    edges_s = np.linspace(0, end_s, columns + 1)
    highest = 0.0

    # Ranks are a ramp of one hue: their order matters, not their identity.
    colours = ramp(len(steps))
    for rank in drawn_ranks(steps):
        rank_steps = steps[rank]
        time_s = rank_steps.time_s
        in_use_bytes = rank_steps.in_use_bytes
        if crowded:
            time_s = edges_s[:-1]
            in_use_bytes = highs(rank_steps, edges_s)
        in_use_gib = np.append(in_use_bytes, in_use_bytes[-1]) / GIB
        highest = max(highest, float(in_use_gib.max()))
        # The first says what the numbers in the legend are.
        label = None
        if rank in ranks_in_legend:
            label = f"rank {rank}" if rank == 0 else str(rank)
        # Lines below are wider, so that equal ones show under each other.
        wide = 0.8 + 0.25 * (len(steps) - 1 - rank) * (len(steps) <= _NAMED_UP_TO)
        axis.step(
            np.append(time_s, end_s) * per_s,
            in_use_gib,
            where="post",
            color=colours[rank],
            linewidth=wide,
            label=label,
        )

    # A capacity far above everything would press the lines to the bottom. It is then named
    # instead of drawn in scale.
    capacity = prediction.memory_capacity_bytes / GIB
    beyond = highest < _LEAST_SHARE * capacity
    name = f"capacity {capacity:.3g} GiB" + " (above)" * beyond
    axis.axhline(capacity, color="black", linewidth=0.8, linestyle="--", label=name)
    axis.set_xlim(0, end_s * per_s)
    axis.set_ylim(0, 1.2 * highest if beyond else 1.05 * max(highest, capacity))
    axis.set_ylabel("memory in GiB")
    note = f" (highest of every {edges_s[1] * per_s:.2g} {unit})" if crowded else ""
    axis.set_xlabel(f"time in {unit}{note}")
    axis.legend(
        loc="lower right",
        bbox_to_anchor=(1.0, 1.0),
        ncols=len(ranks_in_legend) + 1,
        **_TIGHT,
    )


def drawn_ranks(steps: Sequence[MemorySteps]) -> list[int]:
    """The ranks to draw: all, or with many ranks a regular selection plus the fullest."""
    if len(steps) <= _ALL_UP_TO:
        return list(range(len(steps)))
    fullest = int(np.argmax([rank_steps.in_use_bytes.max() for rank_steps in steps]))
    spread = np.linspace(0, len(steps) - 1, _ALL_UP_TO // 2 + 1).astype(int).tolist()
    return sorted({fullest, len(steps) // 2, *spread})


def highs(steps: MemorySteps, edges_s: Float[np.ndarray, " bins+1"]) -> Float[np.ndarray, " bins"]:
    """Maximum bytes in use in each bin."""
    # A bin holds the value from before it, too, until the first change in it.
    first = np.searchsorted(steps.time_s, edges_s[:-1], side="right") - 1
    last = np.searchsorted(steps.time_s, edges_s[1:], side="left")
    padded = np.append(steps.in_use_bytes, -np.inf)
    bounds = np.stack([np.maximum(first, 0), np.maximum(last, first + 1)], axis=1).ravel()
    return np.maximum.reduceat(padded, bounds)[::2]


_LINKS: Final = (
    ("pipeline transfers", (Stream.SEND,)),
    ("data-parallel collectives", (Stream.DATA_COMM,)),
    ("host memory", (Stream.OFFLOAD, Stream.RELOAD)),
)
_BINS: Final = {"column": 150, "page": 300}


@styled
def draw_link_utilisation(prediction: Prediction, width: Width = "column") -> "Figure":
    """Draw a panel per kind of link with a row per pipeline rank, darker where the link is busier.

    Collectives within passes (tensor, context and expert parallelism) are part of the passes and
    not shown.

    Raises:
        PerfModelError: the prediction holds no timeline, or no link is used.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    timeline = prediction.kept_timeline
    drawn = slices(timeline)
    ranks = timeline.structure.devices
    end_s = max(prediction.step_time_s, timeline.makespan_s)
    used = [(name, streams) for name, streams in _LINKS if np.isin(drawn.stream, streams).any()]
    if not used:
        raise PerfModelError(
            f"link utilisation: {prediction.layout_notation} has no communication between ranks; give another layout"
        )

    # One panel per kind of link that is used.
    per_s, unit = time_unit(end_s)
    edges_s = np.linspace(0, end_s, _BINS[width] + 1)
    figure = new_figure(width, 0.75 + len(used) * (0.32 + max(0.35, min(1.6, 0.1 * ranks))))
    shades = ["white", shade(BLUE, 0.45), shade(BLUE, 0), "#001B33"]
    white_to_dark = LinearSegmentedColormap.from_list("busy", shades)
    axes = figure.subplots(len(used), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (name, streams) in zip(axes, used, strict=True):
        share = busy_share(drawn.select(np.isin(drawn.stream, streams)), ranks, edges_s)

        # The square root of the share makes links visible that are busy for a few per cent.
        image = axis.imshow(
            share,
            aspect="auto",
            extent=(0, end_s * per_s, ranks - 0.5, -0.5),
            norm=PowerNorm(0.5, 0, 1),
            cmap=white_to_dark,
            interpolation="nearest",
        )
        axis.set_title(f"{name}: busy {share.mean():.1%} of the step", pad=2)
        axis.set_ylabel("rank")
        step = max(1, -(-ranks // 8))
        axis.set_yticks(range(0, ranks, step))
    axes[-1].set_xlabel(f"time in {unit}")
    bar = figure.colorbar(
        image,
        ax=axes,
        aspect=12 * len(used),
        pad=0.01,
        shrink=0.9,
        ticks=(0, 0.1, 0.5, 1),
        format="%g",
    )
    bar.set_label("share of time busy")
    bar.outline.set_linewidth(0.4)  # pyright: ignore[reportCallIssue]
    set_title(figure, f"{prediction.model}, {prediction.layout_notation}")
    return figure


def busy_share(
    drawn: Slices, ranks: int, edges_s: Float[np.ndarray, " bins+1"]
) -> Float[np.ndarray, "ranks bins"]:
    """Share of each bin in which at least one of a rank's slices runs."""
    share = np.zeros((ranks, len(edges_s) - 1))
    for rank in range(ranks):
        on_rank = drawn.device == rank
        start_s = drawn.start_s[on_rank]
        end_s = np.maximum.accumulate(drawn.end_s[on_rank])
        # Each slice adds what lies beyond all before it.
        begin_s = np.maximum(start_s, np.r_[-np.inf, end_s[:-1]])
        added = end_s > begin_s
        if added.any():
            # Busy time up to a point is piecewise linear; its difference over a bin is the bin's.
            knots = np.stack([begin_s[added], end_s[added]], axis=1).ravel()
            busy_s = np.repeat(np.r_[0.0, np.cumsum((end_s - begin_s)[added])], 2)[1:-1]
            share[rank] = np.diff(np.interp(edges_s, knots, busy_s)) / np.diff(edges_s)
    return share
