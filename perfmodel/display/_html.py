"""HTML of results in notebooks: captions, tables with aligned numbers, parts that fold."""

import html
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from perfmodel.units import figure

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS: Final = 30
"""Rows of a table that are shown."""
_RIGHT: Final = ' style="text-align: right"'
_LEFT: Final = ' style="text-align: left"'


def escaped(value: object) -> str:
    """Text that cannot be taken for markup."""
    return html.escape(str(value))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table whose first column is text and whose others stand on the right; values are escaped."""
    head = "".join(f"<th{_LEFT if i == 0 else _RIGHT}>{escaped(h)}</th>" for i, h in enumerate(heads))
    body = "".join(
        "<tr>" + "".join(f"<td{_LEFT if i == 0 else _RIGHT}>{escaped(v)}</td>" for i, v in enumerate(row)) + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def folded(summary: str, inside: str, opened: bool = False) -> str:
    """A part that opens on a click; `inside` is HTML."""
    return f"<details{' open' if opened else ''}><summary>{escaped(summary)}</summary>{inside}</details>"


def paragraph(*lines: str) -> str:
    """Lines of text, escaped."""
    return "<p>" + "<br>".join(escaped(line) for line in lines if line) + "</p>"


def bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """A bar of coloured parts: (label, colour, share of the whole)."""
    pieces = "".join(
        f'<span title="{escaped(label)}: {share:.1%}" style="display: inline-block; height: 14px; '
        f'width: {100 * share:.3f}%; background: {colour}"></span>'
        for label, colour, share in parts
        if share > 0
    )
    return f'<div style="width: 100%; max-width: 640px; font-size: 0; white-space: nowrap">{pieces}</div>'


def frame_html(frame: "pd.DataFrame", title: str = "") -> str:
    """A table of results with four significant figures, its first rows if it is long."""
    rows = [[cell(value) for value in row] for row in frame.head(MOST_ROWS).itertuples(index=False)]
    more = f"{len(frame):,} rows, the first {MOST_ROWS} shown" if len(frame) > MOST_ROWS else ""
    above = paragraph(title, more) if title or more else ""
    return above + table([str(name).replace("_", " ") for name in frame.columns], rows)


def cell(value: Any) -> str:
    """A number with four significant figures; anything else as it is, nothing for what is missing."""
    if isinstance(value, float):
        return "" if value != value else figure(value)
    return "" if value is None else str(value)
