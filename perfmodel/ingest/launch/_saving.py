"""The checkpoint interval in a launch file; predictions do not need it, but reading a log does."""

import re
from typing import Final

_INTERVALS: Final = re.compile(
    r"(?:--|\b)(?:save[-_]interval|save[-_]steps|checkpoint[-_]interval|checkpoint[-_]period|every_n_train_steps)"
    r"""["']?\s*[=:\s]\s*["']?(\d+)"""
)
_TITAN: Final = re.compile(
    r"^\[checkpoint\]\s*$(?:\n(?!\[).*)*?\n\s*interval\s*=\s*(\d+)", re.MULTILINE
)


def save_every(text: str) -> int | None:
    """Steps between two checkpoints; None if the file does not state it."""
    interval = _INTERVALS.search(text) or _TITAN.search(text)
    return int(interval[1]) or None if interval else None
