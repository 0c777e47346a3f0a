"""Printed tables that never cut a figure, however narrow the window.

A table that is too wide first folds its columns of words. Columns that still do not fit continue
below: every row then takes several lines, the first of which begins with the row's name.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from textwrap import wrap
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions, RenderResult

GAP: Final = 2
"""Spaces between columns."""
INDENT: Final = 4
"""Spaces before the further lines of a row."""
LEAST_WORDS: Final = 24
"""Narrowest width to which a column of words is folded before a row takes several lines."""
WORD_HEADS: Final = frozenset(
    {
        "its best layout",
        "device",
        "kind",
        "value",
        "source",
        "provenance",
        "network, from the inside",
        "steps",
        "attention",
        "runs schedules",
        "paste the lines here",
        "listed by",
        "remedy",
        "why",
    }
)
"""Headings of columns of words, which may be folded; all others hold right-aligned figures, or
names."""

Lines = list[list[int]]
"""Assignment of columns to the lines of a row."""


@dataclass(frozen=True, kw_only=True)
class FittedTable:
    """A table without rules, fitted to the width of the window."""

    title: str
    heads: tuple[str, ...]
    """Headings of the columns, the first for the names of rows; they may have several lines."""
    rows: tuple[tuple[str, ...], ...]

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> "RenderResult":
        from rich.text import Text

        if self.title:
            yield Text(self.title, style="italic")
        head, *rows = self.blocks(options.max_width)
        if any(self.heads):
            yield from (Text(line, style="bold") for line in head)
        for block in rows:
            yield from map(Text, block)

    def blocks(self, width: int) -> list[list[str]]:
        """Lines of the heading and of each row, for a window width."""
        # Rows are laid out alike: the lines that the columns are put on are the same for all of
        # them.
        widths = self._natural_widths()
        lines = self._lines(widths, width)
        return [self._block(cells, lines, widths) for cells in (self.heads, *self.rows)]

    def _natural_widths(self) -> list[int]:
        """Widths of columns without folded cells."""
        widths = []
        for cells in zip(self.heads, *self.rows, strict=True):
            width = 0
            for cell in cells:
                width = max(width, *(len(line) for line in cell.splitlines()), 0)
            widths.append(width)
        return widths

    def _lines(self, widths: list[int], width: int) -> Lines:
        """Assign columns to the lines of a row; narrow `widths` of columns of words if need be."""
        columns = list(range(len(widths)))
        word_columns = [column for column in columns if self.heads[column] in WORD_HEADS]
        # Columns of words are folded first: these can be read on several lines, figures cannot.
        excess = _line_width(widths, columns) - width
        foldable = sum(max(0, widths[column] - LEAST_WORDS) for column in word_columns)
        if excess <= foldable:
            _narrow(widths, word_columns, excess)
            return [columns]

        # If the table is still too wide, columns that do not fit go on the next line.
        lines: Lines = [[0]]
        for column in columns[1:]:
            indent = INDENT if len(lines) > 1 else 0
            if indent + _line_width(widths, [*lines[-1], column]) <= width:
                lines[-1].append(column)
            else:
                lines.append([column])
        for column in word_columns:
            widths[column] = min(
                widths[column], max(LEAST_WORDS, width - (INDENT if column else 0))
            )
        return lines

    def _block(self, cells: Sequence[str], lines: Lines, widths: Sequence[int]) -> list[str]:
        """The lines of one row."""
        block: list[str] = []
        for line_number, columns in enumerate(lines):
            parts = [self._cell_lines(cells[column], column, widths[column]) for column in columns]
            indent = " " * (INDENT if line_number else 0)

            # Heads end on the line above the figures; all else begins on the line of its row's
            # name.
            height = max(map(len, parts))
            if cells is self.heads:
                parts = [[""] * (height - len(part)) + part for part in parts]
            for line in zip_longest(*parts, fillvalue=""):
                placed = [
                    self._placed(text, column, widths[column])
                    for text, column in zip(line, columns, strict=True)
                ]
                block.append((indent + (" " * GAP).join(placed)).rstrip())
        return [line for line in block if line] or [""]

    def _cell_lines(self, cell: str, column: int, width: int) -> list[str]:
        """Break a cell into lines; only columns of words are folded to their width."""
        lines = cell.splitlines() or [""]
        if self.heads[column] not in WORD_HEADS:
            return lines
        folded: list[str] = []
        for line in lines:
            folded += _folded(line, width) or [""]
        return folded

    def _placed(self, text: str, column: int, width: int) -> str:
        names_or_words = column == 0 or self.heads[column] in WORD_HEADS
        return text.ljust(width) if names_or_words else text.rjust(width)


def _folded(line: str, width: int) -> list[str]:
    """Fold words to lines of a width; a longer word, such as a path, stays whole."""
    return wrap(line, width, break_on_hyphens=False, break_long_words=False)


def _line_width(widths: Sequence[int], columns: Sequence[int]) -> int:
    return sum(widths[column] for column in columns) + GAP * (len(columns) - 1)


def _narrow(widths: list[int], word_columns: Sequence[int], excess: int) -> None:
    """Narrow the columns of words until they fit, always the widest first."""
    for _ in range(max(0, excess)):
        widest = max(word_columns, key=lambda column: widths[column])
        widths[widest] -= 1


def table(title: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> FittedTable:
    """A table to print, with row names first and figures right-aligned."""
    return FittedTable(title=title, heads=tuple(heads), rows=tuple(map(tuple, rows)))
