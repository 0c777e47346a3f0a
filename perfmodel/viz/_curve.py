"""Step time against one parameter."""

from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.viz._save import save_png
from perfmodel.what_if import Curve

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def draw_curve(curve: Curve) -> "Figure":
    """A line with its points; of a delay also how much of it is hidden."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.2), layout="constrained", dpi=150)
    axis = figure.subplots()
    axis.plot(curve.values, curve.step_s, color="#0072B2", marker="o", markersize=3, linewidth=1.2)
    if curve.hidden_up_to is not None and curve.hidden_up_to <= max(curve.values):
        axis.axvline(curve.hidden_up_to, color="#D55E00", linewidth=1, linestyle="--")
        axis.text(curve.hidden_up_to, min(curve.step_s), f" hidden up to {curve.hidden_up_to:.3g} s", fontsize=7)
    axis.set_xlabel(curve.name.replace("_s", " / s").replace("_", " ") + (" (multiple)" if curve.multiple else ""))
    axis.set_ylabel("step time / s")
    axis.set_ylim(0, None)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
    return figure


def write_curve(curve: Curve, path: Path) -> None:
    """Write the picture as PNG, atomically."""
    save_png(draw_curve(curve), path)
