"""Printed results: lines of text and consoles for a terminal, a file or a string."""

import errno
import io
import os
import shutil
import sys
from collections.abc import Callable
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any

from perfmodel.display._table import FittedTable
from perfmodel.errors import plain_text

if TYPE_CHECKING:
    from rich.console import Console


def say(*lines: str, file: IO[str] | None = None) -> None:
    """Print lines of text; in a window, a line that is too long continues indented on the next
    one."""
    stream = sys.stdout if file is None else file
    width = window_width(stream)
    for line in lines:
        print(_broken(line, width), file=stream)


def say_verbatim(*lines: str, file: IO[str] | None = None) -> None:
    """Print lines that are copied or read by programs, such as commands, layouts and paths: they
    are never broken."""
    for line in lines:
        print(line, file=file)


def window_width(stream: IO[str]) -> int | None:
    """Columns of the window that a stream is shown in; None for a file, whose lines are never
    broken."""
    # `COLUMNS` asks for a width where the answer is piped. An error that is piped stays one line,
    # which scripts read.
    is_shown = stream.isatty() or (stream is sys.stdout and "COLUMNS" in os.environ)
    return shutil.get_terminal_size().columns if is_shown else None


def with_hanging_indent(line: str, width: int) -> str:
    """Break a line of text at blanks, so that its further lines stand two columns to the right of
    its first."""
    if len(line) <= width:
        return line
    indent = " " * (len(line) - len(line.lstrip()))
    pieces = wrap(
        line.strip(),
        width,
        initial_indent=indent,
        subsequent_indent=indent + "  ",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return "\n".join(pieces)


def new_console(file: IO[str] | None = None, *, shown_in: IO[str] | None = None) -> "Console":
    """Return a console for standard output or a file.

    Args:
        shown_in: the stream whose window the lines are broken for, if it is not the file itself.
    """
    from rich.console import Console

    text_width = window_width(shown_in or file or sys.stdout)

    class WholeTables(Console):
        """Breaks long lines of text as `say` does, and prints tables without cutting long names."""

        def print(self, *objects: Any, **options: Any) -> None:
            # A fitted table has broken its lines already; rich would break them again.
            if any(isinstance(printed, FittedTable) for printed in objects):
                options |= {"soft_wrap": True}
            # Rich would continue a long line in the first column, where the next one begins.
            elif not options.get("soft_wrap") and all(isinstance(text, str) for text in objects):
                objects = tuple(_broken(text, text_width) for text in objects)
                options |= {"soft_wrap": True}
            super().print(*objects, **options)

        def on_broken_pipe(self) -> None:
            # Rich would end the process with status 1. A reader that has seen enough is no error,
            # which the command line decides for every way of printing alike.
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

    # A file gets tables as wide as most of them need.
    return WholeTables(highlight=False, file=file, width=text_width or 150)


def _broken(text: str, width: int | None) -> str:
    if width is None:
        return text
    return "\n".join(with_hanging_indent(line, width) for line in text.split("\n"))


def printed_text(show: Callable[["Console"], object]) -> str:
    """Return the text that a function prints, with lines as long as the window of standard output
    allows."""
    out = io.StringIO()
    show(new_console(out, shown_in=sys.stdout))
    # The string may be printed on a terminal, which control characters in names must not reach.
    lines = plain_text(out.getvalue()).rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)
