"""Text for a terminal without what could steer it: names come from files, and files from anyone."""

import re
from typing import Any, Final

# characters that reorder or hide text, control characters but tab and line feed
_MARKS: Final = r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]"
# escape sequences as a whole, so that nothing of them is left: strings for the terminal, then commands to it
_STRINGS: Final = r"\x1b[\]PX^_][^\x07\x1b\n]*(?:\x07|\x1b\\)?"
_COMMANDS: Final = r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]|\x1b[ -/]*[0-~]"
_STEERING: Final = re.compile(f"{_STRINGS}|{_COMMANDS}|{_MARKS}")
# what tables and progress bars use on a terminal stays there: colours, moves of the cursor, carriage returns
_STYLES: Final = r"\x1b\[\??[0-9;]*[mA-KhlG]|\r"
_STEERING_BUT_STYLES: Final = re.compile(f"(?P<style>{_STYLES})|{_STRINGS}|{_COMMANDS}|{_MARKS}")


def plain_text(text: str) -> str:
    """A text without escape sequences, control characters and marks that reorder or hide what follows."""
    return _STEERING.sub("", text)


class PlainStream:
    """Standard output or error, to which nothing is written that steers a terminal; one that is a terminal keeps the
    colours and moves of the cursor that tables and progress bars consist of."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without what `plain_text` leaves out."""
        if self._stream.isatty():
            text = _STEERING_BUT_STYLES.sub(lambda match: match["style"] or "", text)
        else:
            text = plain_text(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write each line as `write` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Hand on what is buffered."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
