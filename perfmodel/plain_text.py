"""Removes escape sequences from untrusted text, such as names in files, before it is shown."""

import re
from typing import Final

# Characters that reorder or hide text, control characters but tab and line feed.
_MARKS: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"

# Escape sequences as a whole, so that nothing of them is left: strings for the terminal, then commands to it.
_STRINGS: Final = r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
_COMMANDS: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]"
STEERING: Final = f"{_STRINGS}|{_COMMANDS}|{_MARKS}"
"""Pattern of what is left out."""
_STEERING: Final = re.compile(STEERING)


def plain_text(text: str) -> str:
    """Remove escape sequences, control characters and bidirectional marks from a text."""
    # Nearly all texts are plain, which is quick to see.
    return text if text.isascii() and text.isprintable() else _STEERING.sub("", text)
