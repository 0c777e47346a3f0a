"""How busy the links of every pipeline rank are over the step."""

from typing import TYPE_CHECKING, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import BLUE, shade
from perfmodel.errors import PerfModelError
from perfmodel.prediction import Prediction
from perfmodel.program import Stream
from perfmodel.timeline import Slices, slices
from perfmodel.viz._style import Width, new_figure, set_title, styled, time_unit

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LINKS: Final = (
    ("pipeline transfers", (Stream.SEND,)),
    ("data-parallel collectives", (Stream.DATA_COMM,)),
    ("host memory", (Stream.OFFLOAD, Stream.RELOAD)),
)
_BINS: Final = {"column": 150, "page": 300}


@styled
def draw_link_utilisation(prediction: Prediction, width: Width = "column") -> "Figure":
    """A panel per kind of link that is used: a row per pipeline rank, darker where it is busy for more of the time.

    Collectives within passes (tensor, context and expert parallelism) are part of the passes and not shown.

    Raises:
        PerfModelError: the prediction holds no timeline, or no link is used.
    """
    from matplotlib.colors import LinearSegmentedColormap, PowerNorm

    timeline = prediction.kept_timeline
    drawn, ranks = slices(timeline), timeline.structure.devices
    end_s = max(prediction.step_time_s, timeline.makespan_s)
    used = [(name, streams) for name, streams in _LINKS if np.isin(drawn.stream, streams).any()]
    if not used:
        raise PerfModelError(f"link utilisation: {prediction.layout} sends nothing between ranks; give another layout")
    per_s, unit = time_unit(end_s)
    edges_s = np.linspace(0, end_s, _BINS[width] + 1)
    figure = new_figure(width, 0.75 + len(used) * (0.32 + max(0.35, min(1.6, 0.1 * ranks))))
    whites = LinearSegmentedColormap.from_list("busy", ["white", shade(BLUE, 0.45), shade(BLUE, 0), "#001B33"])
    axes = figure.subplots(len(used), 1, squeeze=False, sharex=True)[:, 0]
    for axis, (name, streams) in zip(axes, used, strict=True):
        share = busy_share(drawn.select(np.isin(drawn.stream, streams)), ranks, edges_s)
        image = axis.imshow(
            share, aspect="auto", extent=(0, end_s * per_s, ranks - 0.5, -0.5), norm=PowerNorm(0.5, 0, 1), cmap=whites,
            interpolation="nearest",
        )  # fmt: skip
        axis.set_title(f"{name}: busy {share.mean():.1%} of the step", pad=2)
        axis.set_ylabel("rank")
        every = max(1, -(-ranks // 8))
        axis.set_yticks(range(0, ranks, every))
    axes[-1].set_xlabel(f"time in {unit}")
    bar = figure.colorbar(
        image, ax=axes, aspect=12 * len(used), pad=0.01, shrink=0.9, ticks=(0, 0.1, 0.5, 1), format="%g"
    )
    bar.set_label("share of time busy")
    bar.outline.set_linewidth(0.4)  # pyright: ignore[reportCallIssue]
    set_title(figure, f"{prediction.model}, {prediction.layout}")
    return figure


def busy_share(drawn: Slices, ranks: int, edges_s: Float[np.ndarray, " bins+1"]) -> Float[np.ndarray, "ranks bins"]:
    """Share of every bin in which at least one of a rank's slices runs."""
    share = np.zeros((ranks, len(edges_s) - 1))
    for rank in range(ranks):
        own = drawn.device == rank
        start_s, end_s = drawn.start_s[own], np.maximum.accumulate(drawn.end_s[own])
        begin_s = np.maximum(start_s, np.r_[-np.inf, end_s[:-1]])  # each adds what lies beyond all before it
        added = end_s > begin_s
        if added.any():
            knots = np.stack([begin_s[added], end_s[added]], axis=1).ravel()
            busy_s = np.repeat(np.r_[0.0, np.cumsum((end_s - begin_s)[added])], 2)[1:-1]
            share[rank] = np.diff(np.interp(edges_s, knots, busy_s)) / np.diff(edges_s)
    return share
