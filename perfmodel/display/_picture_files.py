"""Names of picture files, and what it takes to draw them."""

import importlib
from pathlib import Path
from typing import Final

from perfmodel.errors import PerfModelError

PICTURE_SUFFIXES: Final = (".png", ".pdf", ".svg")


def require_picture(path: Path | str) -> str:
    """The suffix of a picture's file, in lower case.

    Raises:
        PerfModelError: a suffix that no picture is written with; no matplotlib.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURE_SUFFIXES:
        raise PerfModelError(f"{path}: a picture is written as {', '.join(PICTURE_SUFFIXES)}; name the file so")
    require_matplotlib()
    return suffix


def require_matplotlib() -> None:
    """Raise `PerfModelError` where matplotlib is not installed."""
    try:
        importlib.import_module("matplotlib")
    except ImportError as error:
        raise PerfModelError(f"pictures need matplotlib ({error}); install it: pip install 'perfmodel[viz]'") from None
