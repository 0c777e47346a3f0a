"""Common style of all pictures: widths, type sizes, axes, files."""

import io
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import cache, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, ParamSpec, TypeVar

from perfmodel.display import require_matplotlib, require_picture
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Width = Literal["column", "page"]
WIDTHS_IN: Final = {"column": 3.4, "page": 7.0}
"""Width in inches of one column, and of the page, in the usual two-column proceedings."""
MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
"""Markers of curves, or of clouds of points, in one picture."""
_SMALL, _BODY = 6.5, 7.5
_NOTEBOOK_DPI: Final = 150
_FEW_ROWS: Final = 2
_STYLE: Final[dict[Any, Any]] = {
    "font.size": _BODY,
    "axes.titlesize": _BODY,
    "axes.labelsize": _BODY,
    "xtick.labelsize": _SMALL,
    "ytick.labelsize": _SMALL,
    "legend.fontsize": _SMALL,
    "figure.titlesize": _BODY,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.linewidth": 0.6,
    "axes.titlelocation": "left",
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "xtick.major.size": 2.5,
    "ytick.major.size": 2.5,
    "xtick.minor.width": 0.4,
    "ytick.minor.width": 0.4,
    "xtick.minor.size": 1.5,
    "ytick.minor.size": 1.5,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "legend.frameon": False,
    "legend.handlelength": 1.4,
    "legend.columnspacing": 1.2,
    "legend.handletextpad": 0.5,
    "legend.borderaxespad": 0.3,
    "hatch.linewidth": 0.5,
    "figure.dpi": 100,
    "figure.constrained_layout.h_pad": 0.04,
    "figure.constrained_layout.w_pad": 0.03,
}
_FILE_STYLE: Final[dict[Any, Any]] = {
    "pdf.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "perfmodel",
}

P = ParamSpec("P")
R = TypeVar("R")


def styled(draw: Callable[P, R]) -> Callable[P, R]:
    """Run a drawing function under the pictures' type sizes and lines."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> R:
        require_matplotlib()
        import matplotlib as mpl

        with mpl.rc_context(_STYLE):
            return draw(*args, **kwargs)

    return drawn


def new_figure(width: Width, height_in: float) -> "Figure":
    """Create an empty figure of a column's or page's width.

    Raises:
        PerfModelError: another width.
    """
    if width not in WIDTHS_IN:
        raise PerfModelError(f"picture: width must be one of {', '.join(WIDTHS_IN)}, got {width!r}")
    return _picture()(figsize=(WIDTHS_IN[width], height_in), layout="constrained")


@cache
def _picture() -> "type[Figure]":
    """Class of figures that notebooks show without any setting of matplotlib."""
    from matplotlib.figure import Figure

    class Picture(Figure):
        def _repr_png_(self) -> bytes:
            buffer = io.BytesIO()
            self.savefig(buffer, format="png", dpi=_NOTEBOOK_DPI)
            return buffer.getvalue()

    return Picture


def save_figure(figure: "Figure", path: Path | str) -> None:
    """Write a figure as PNG (300 dots per inch), PDF or SVG by the file's suffix, atomically.

    Raises:
        PerfModelError: another suffix.
    """
    import matplotlib as mpl

    suffix = require_picture(path)
    buffer = io.BytesIO()

    # Without dates, the same figure gives the same bytes.
    undated_by_suffix = {".png": {}, ".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
    undated: dict[str, Any] = undated_by_suffix[suffix]
    with mpl.rc_context(_FILE_STYLE):
        figure.savefig(buffer, format=suffix[1:], dpi=300, metadata=undated)
    write_bytes(path, buffer.getvalue())


def set_title(figure: "Figure", *lines: str) -> None:
    """Set a title, wrapped at the figure's width."""
    # A character of a proportional face is about half as wide as high.
    most_characters = int(figure.get_figwidth() * 72 / (_BODY * 0.56))
    text = "\n".join(wrapped(line, most_characters) for line in lines if line)
    if text:
        figure.suptitle(text, x=0.01, ha="left", fontsize=_BODY)


def wrapped(text: str, most_characters: int) -> str:
    """Wrap text to a width; layouts are broken after commas."""
    return "\n".join(textwrap.wrap(re.sub(r",(?=\S)", ", ", text), most_characters))


def legend_below(
    figure: "Figure", handles: Sequence[Any], labels: Sequence[str], **options: Any
) -> None:
    """Draw a legend under the picture, in as many columns as fit its width."""
    if not handles:
        return
    # In heights of a character.
    room = figure.get_figwidth() * 72 / _SMALL

    # Widths of entries in heights of a character: half of one per letter, plus handle and gaps.
    # All in one row if it takes them, else columns as wide as the widest.
    widths = [0.5 * len(label) + 3.6 for label in labels]
    columns = len(labels) if sum(widths) < room else max(1, int(room / max(widths)))
    rows = -(-len(labels) // columns)
    # Divide the entries over the rows as evenly as possible.
    columns = -(-len(labels) // rows)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, **options)


def time_unit(seconds: float) -> tuple[float, str]:
    """The time unit for an axis of this length: units per second, and the name."""
    # Milliseconds from 1 ms on, seconds from 1 s on.
    for per_s, name in ((1.0, "s"), (1e3, "ms")):
        if seconds * per_s >= 1:
            return per_s, name
    return 1e6, "µs"


def log_ticks(axis: Any, values: Sequence[float]) -> None:
    """Plain numbers at the given places of a logarithmic x or y axis, and nowhere else."""
    from matplotlib.ticker import FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(values)))
    axis.set_major_formatter(lambda value, _: f"{value:g}")
    axis.set_minor_locator(NullLocator())


def device_ticks(axis: "Axes", devices: int, label: str) -> None:
    """Label rows with numbers from the top, as densely as possible without overlap.

    The noun that they number stands beside the axis where there are enough rows, else in front of
    each number.
    """
    step = max(1, -(-devices // 16))
    short = label.split()[-1]
    before = f"{short} " if devices <= _FEW_ROWS else ""
    axis.set_ylim(devices, 0)
    numbered = range(0, devices, step)
    axis.set_yticks([d + 0.5 for d in numbered], [f"{before}{d}" for d in numbered])
    axis.tick_params(axis="y", length=0)
    axis.spines["left"].set_visible(False)
    if before:
        axis.set_ylabel("")
    else:
        axis.set_ylabel(short if devices <= 2 * _FEW_ROWS else label)
