"""Consoles for printed results: a terminal, a file or a string."""

import io
import os
from collections.abc import Callable
from textwrap import wrap
from typing import IO, TYPE_CHECKING, Any

from perfmodel.display._table import FittedTable
from perfmodel.errors import plain_text

if TYPE_CHECKING:
    from rich.console import Console


def new_console(file: IO[str] | None = None) -> "Console":
    """Return a console for standard output or a file."""
    from rich.console import Console

    class WholeTables(Console):
        """Prints tables without cutting long names."""

        def print(self, *objects: Any, **options: Any) -> None:
            # A fitted table has broken its lines already; rich would break them again.
            if any(isinstance(printed, FittedTable) for printed in objects):
                options |= {"soft_wrap": True}
            super().print(*objects, **options)

    # Wide enough for most tables when the output goes to a file, unless somebody says otherwise.
    console = WholeTables(highlight=False, file=file)
    width_is_known = console.is_terminal or "COLUMNS" in os.environ
    return console if width_is_known else WholeTables(highlight=False, file=file, width=150)


def with_hanging_indent(line: str, width: int) -> str:
    """Break a line of text at blanks, so that its further lines stand two columns to the right of
    its first."""
    indent = len(line) - len(line.lstrip())
    further = " " * (indent + 2)
    return "\n".join(
        wrap(line, width, subsequent_indent=further, break_long_words=False, break_on_hyphens=False)
    )


def printed_text(show: Callable[["Console"], object]) -> str:
    """Return the text that a function prints, as if its output went to a file."""
    out = io.StringIO()
    show(new_console(out))
    # The string may be printed on a terminal, which control characters in names must not reach.
    lines = plain_text(out.getvalue()).rstrip().split("\n")
    return "\n".join(line.rstrip() for line in lines)
