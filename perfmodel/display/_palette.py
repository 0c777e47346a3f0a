"""The colour and name of each kind of event in pictures, tables and pages.

The hues are those of Okabe and Ito, "Color Universal Design" (2008), which readers with any kind of
colour vision tell apart. Pipeline replicas and model chunks are lighter shades of their kind's
colour, so that they stay apart in greyscale too.
"""

import importlib
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

from perfmodel.errors import PerfModelError

BLACK = "#000000"
ORANGE = "#E69F00"
SKY = "#56B4E9"
GREEN = "#009E73"
YELLOW = "#F0E442"
BLUE = "#0072B2"
VERMILLION = "#D55E00"
PURPLE = "#CC79A7"
GREY = "#999999"


class Look(NamedTuple):
    """Colour and name of one kind of event."""

    colour: str
    """Colour as #RRGGBB."""
    label: str


EVENTS: Final = {
    "forward": Look(SKY, "forward"),
    "backward": Look(GREEN, "backward"),
    "backward_input": Look(GREEN, "backward (input)"),
    "backward_weight": Look(YELLOW, "backward (weight)"),
    "send_forward": Look(GREY, "send activation"),
    "send_backward": Look("#6E6E6E", "send gradient"),
    "grad_reduce": Look(VERMILLION, "gradient reduction"),
    "param_gather": Look(PURPLE, "weight gather"),
    "param_gather_backward": Look("#E3B5CF", "weight gather (backward)"),
    "embedding_reduce": Look(ORANGE, "embedding all-reduce"),
    "optimizer": Look(BLUE, "optimizer"),
    "offload": Look("#8C6D46", "offload to host"),
    "reload": Look("#C3A983", "reload from host"),
    "compute": Look("#5B7083", "computation"),
    "communication": Look(VERMILLION, "communication"),
    "copy": Look("#8C6D46", "copy"),
}
"""Looks by the name of a `program.Kind`, or of a `readers.ActivityKind` if a trace does not name
the kind."""

PARTS: Final = {
    "forward": Look(SKY, "forward"),
    "recompute": Look("#B7DEF6", "recompute"),
    "backward": Look(GREEN, "backward"),
    "clock_under_load": Look("#7A2E2E", "clock under load"),
    "kernels_slower_in_runs": Look("#B08A8A", "kernels slower in runs"),
    "tensor_parallel_communication": Look(ORANGE, "tensor-parallel comm."),
    "context_parallel_communication": Look("#F3CF80", "context-parallel comm."),
    "expert_parallel_communication": Look(PURPLE, "expert-parallel comm."),
    "data_parallel_communication_exposed": Look(VERMILLION, "data-parallel comm., exposed"),
    "pipeline_communication_exposed": Look(GREY, "pipeline comm., exposed"),
    "host_copies_exposed": Look("#C8A27E", "copies to the host, exposed"),
    "kernels_slowed_by_communication": Look("#B39DDB", "kernels slowed by comm."),
    "quantising": Look("#A6D0C9", "quantising operands"),
    "waiting_for_slowest_rank": Look("#E8A0BF", "waiting for slowest rank"),
    "optimizer": Look(BLUE, "optimizer"),
    "kernel_launch_gaps": Look("#5B7083", "launch gaps"),
    "bubble": Look("#E6E6E6", "bubble"),
}
"""Looks by the name of a part of `Prediction.breakdown_s`, in the order in which bars stack
them."""


def part_looks(names: Iterable[str]) -> dict[str, Look]:
    """Looks of all `PARTS`, followed by those of other parts in the breakdowns."""
    unlisted = {
        name: Look("#B39DDB", name.replace("_", " ")) for name in names if name not in PARTS
    }
    return PARTS | unlisted


LINES: Final = (BLUE, VERMILLION, GREEN, PURPLE, ORANGE, SKY, BLACK)
"""Colours of curves that do not represent kinds of events."""


def shade(colour: str, lightness: float) -> str:
    """Lighten a colour towards white by a share (0 leaves it unchanged)."""
    return "#" + "".join(f"{round(c + (255 - c) * lightness):02X}" for c in _rgb(colour))


def text_colour(background: str) -> str:
    """Black or white, whichever has more contrast by WCAG 2.1."""
    # Undo the sRGB gamma, then weigh the channels as the eye does.
    linear = []
    for value in _rgb(background):
        # The curve of sRGB is straight for the darkest values.
        if value <= 10:
            linear.append(value / 255 / 12.92)
        else:
            linear.append(((value / 255 + 0.055) / 1.055) ** 2.4)
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return BLACK if (luminance + 0.05) ** 2 > 0.05 * 1.05 else "#FFFFFF"


def _rgb(colour: str) -> tuple[int, int, int]:
    red = int(colour[1:3], 16)
    green = int(colour[3:5], 16)
    blue = int(colour[5:7], 16)
    return red, green, blue


def ramp(n: int) -> list[str]:
    """Colours of `n` ordered things, dark to light: the cividis map (Nuñez et al., PLoS ONE 13(7),
    2018) up to where it is still seen on white."""
    knots = ("#00204C", "#31446B", "#666970", "#958F78", "#CBBA69")

    # Interpolate linearly between the nearest two knots.
    last = len(knots) - 1
    colours = []
    for i in range(n):
        place = i / max(1, n - 1) * last
        knot = int(place)
        colours.append(_blended(knots[knot], knots[min(knot + 1, last)], place % 1))
    return colours


def _blended(first: str, second: str, share: float) -> str:
    pairs = zip(_rgb(first), _rgb(second), strict=True)
    return "#" + "".join(f"{round(a + (b - a) * share):02X}" for a, b in pairs)


PICTURE_SUFFIXES: Final = (".png", ".pdf", ".svg")


def require_picture(path: Path | str) -> str:
    """The suffix of a picture's file, in lower case.

    Raises:
        PerfModelError: a suffix that no picture is written with; no matplotlib.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURE_SUFFIXES:
        raise PerfModelError(
            f"{path}: a picture's file name must end in {', '.join(PICTURE_SUFFIXES)}; use one of these"
        )
    require_matplotlib()
    return suffix


def require_matplotlib() -> None:
    """Raise `PerfModelError` if matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PerfModelError(
            f"pictures need matplotlib ({error}); install it: pip install 'perfmodel[viz]'"
        ) from None
