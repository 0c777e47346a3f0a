"""Names of picture files."""

from pathlib import Path
from typing import Final

from perfmodel.errors import PerfModelError

PICTURE_SUFFIXES: Final = (".png", ".pdf", ".svg")


def require_picture(path: Path | str) -> str:
    """The suffix of a picture's file, in lower case.

    Raises:
        PerfModelError: a suffix that no picture is written with.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in PICTURE_SUFFIXES:
        raise PerfModelError(f"{path}: a picture is written as {', '.join(PICTURE_SUFFIXES)}; name the file so")
    return suffix
