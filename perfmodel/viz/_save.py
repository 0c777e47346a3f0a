"""Figures to files."""

import io
from pathlib import Path
from typing import TYPE_CHECKING

from perfmodel.io import write_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_png(figure: "Figure", path: Path | str) -> None:
    """Write a figure as PNG, atomically."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    write_bytes(path, buffer.getvalue())
