"""Output streams that replace escape sequences in names."""

import re
from typing import Any, Final

from perfmodel.errors import REPLACEMENT, STEERING, plain_text

# Remove what tables and progress bars use only on terminals: colours, moves of the cursor, carriage
# returns.
_STYLES: Final = r"\x1b\[\??[0-9;]*[mA-KhlG]|\r"
_STEERING_BUT_STYLES: Final = re.compile(f"(?P<style>{_STYLES})|{STEERING}")


class PlainStream:
    """Standard output or error without terminal control sequences from data; on a terminal, colours
    and progress bars still work."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write the text without the characters that `plain_text` replaces."""
        if self._stream.isatty():
            text = _STEERING_BUT_STYLES.sub(lambda match: match["style"] or REPLACEMENT, text)
        else:
            text = plain_text(text)
        return self._stream.write(text)

    def writelines(self, lines: Any) -> None:
        """Write each line as `write` does."""
        for line in lines:
            self.write(line)

    def flush(self) -> None:
        """Flush the stream."""
        self._stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
