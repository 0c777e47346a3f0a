"""HTML of results in notebooks: captions, tables, folding parts; predictions, searches and what-ifs
from their `to_dict`."""

import html
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from perfmodel.display._palette import part_looks
from perfmodel.errors import plain_text
from perfmodel.units import GIB, batch_words, duration, figure, fit_words, number_of, span

if TYPE_CHECKING:
    import pandas as pd

MOST_ROWS: Final = 30
"""Rows of a table that are shown."""
_MOST_EVENTS: Final = 20
_RIGHT: Final = ' style="text-align: right"'
_LEFT: Final = ' style="text-align: left"'


def escaped(value: object) -> str:
    """Escape text for HTML, and remove bidirectional marks."""
    return html.escape(plain_text(str(value)))


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table with a text column followed by right-aligned columns; values are escaped."""
    head = _table_row("th", heads)
    body = "".join(_table_row("td", row) for row in rows)
    return f"<table><thead>{head}</thead><tbody>{body}</tbody></table>"


def _table_row(tag: str, values: Sequence[object]) -> str:
    cells = []
    for i, value in enumerate(values):
        alignment = _LEFT if i == 0 else _RIGHT
        cells.append(f"<{tag}{alignment}>{escaped(value)}</{tag}>")
    return f"<tr>{''.join(cells)}</tr>"


def folded(summary: str, body: str, opened: bool = False) -> str:
    """A folding part that opens on a click, with the HTML `body`."""
    return (
        f"<details{' open' if opened else ''}><summary>{escaped(summary)}</summary>{body}</details>"
    )


def paragraph(*lines: str) -> str:
    """A paragraph of escaped lines."""
    return "<p>" + "<br>".join(escaped(line) for line in lines if line) + "</p>"


def bar(parts: Sequence[tuple[str, str, float]]) -> str:
    """A bar of coloured parts, each (label, colour, share of the total)."""
    pieces = "".join(
        f'<span title="{escaped(label)}: {share:.1%}" style="display: inline-block; height: 14px; '
        f'width: {100 * share:.3f}%; background: {colour}"></span>'
        for label, colour, share in parts
        if share > 0
    )
    return f'<div style="width: 100%; max-width: 640px; font-size: 0; white-space: nowrap">{pieces}</div>'


def frame_html(frame: "pd.DataFrame", title: str = "") -> str:
    """A table of results with four significant figures; only the first rows if it is long."""
    rows = []
    for row in frame.head(MOST_ROWS).itertuples(index=False):
        rows.append([cell(value) for value in row])
    note = f"{len(frame):,} rows, the first {MOST_ROWS} shown" if len(frame) > MOST_ROWS else ""
    above = paragraph(title, note) if title or note else ""
    return above + table([str(name).replace("_", " ") for name in frame.columns], rows)


def cell(value: Any) -> str:
    """Format a cell: numbers with four significant figures, missing values as empty."""
    # NaN stands for what is missing in frames; it alone does not equal itself.
    if isinstance(value, float):
        return "" if value != value else figure(value)
    return "" if value is None else str(value)


def prediction_html(values: Mapping[str, Any], timeline: str = "") -> str:
    """Step time, rates, memory; breakdown, critical path and origin of the times fold open.

    Args:
        values: result of `Prediction.to_dict`.
        timeline: HTML of the timeline, if there is one.
    """
    step_s, capacity = values["step_time_s"], values["memory_capacity_bytes"]
    needed = values["memory_needed_bytes"]
    interval = (
        f"90 %: {span(duration(values['step_time_lo_s']), duration(values['step_time_hi_s']))}"
    )
    summary = [
        ("step time", f"{duration(step_s)} ({interval})"),
        ("MFU", f"{values['mfu']:.1%}, {values['tflops_per_device']:.0f} TFLOP/s per device"),
        _throughput(values),
        ("bubble", f"{values['bubble_fraction']:.1%}"),
        (
            "memory",
            f"needs {needed / GIB:.1f} of {capacity / GIB:.1f} GiB: {fit_words(values['fits_probability'])}",
        ),
    ]
    parts = [f"<b>{paragraph(_job(values), values['layout'])}</b>", table(("", ""), summary)]
    notes = [*values["reasons"], *values["warnings"]]
    if notes:
        parts.append(paragraph(*notes))
    parts.append(_breakdown(values["breakdown_s"], step_s))

    # Details fold open: memory by rank, critical path, origins of the times.
    per_stage = values["memory_bytes"]["per_stage"]
    rows = []
    for i, stage in enumerate(per_stage):
        rows.append([f"rank {i}", *(f"{part_bytes / GIB:.2f}" for part_bytes in stage.values())])
    memory_title = f"memory per pipeline rank as {values['framework']} reports it, GiB"
    parts.append(folded(memory_title, table(("", *per_stage[0]), rows)))
    events = []
    for event in values["critical_path"][:_MOST_EVENTS]:
        event_s = event["time_s"]
        events.append(
            (event["event"], f"{event['count']:.0f}", duration(event_s), f"{event_s / step_s:.1%}")
        )
    parts.append(folded("critical path", table(("event", "count", "time", "share"), events)))

    # Shares that would be shown as 0.0 % are left out.
    origins = []
    for name, share in values["provenance"].items():
        if share >= 0.0005:
            origins.append((name, f"{share:.1%}"))
    origin_table = table(("origin", "share of the critical path"), origins)
    parts.append(folded("where the times come from", origin_table))
    if timeline:
        parts.append(folded("timeline", timeline))
    return "".join(parts)


def search_html(values: Mapping[str, Any]) -> str:
    """The ranked layouts, each folding open to its prediction, and why others were rejected.

    Args:
        values: result of `SearchResult.to_dict`.
    """
    # The table first; the recommended layout's whole prediction folds open below.
    layouts = values["layouts"]
    rows = []
    for place, p in enumerate(layouts):
        # The first layout is not compared with itself.
        first_better = ""
        if place and "rank" in p:
            first_better = f"{p['probability_first_better']:.0%}"
        rows.append(
            (
                _rank(p, place),
                p["layout"],
                duration(p["step_time_s"]),
                span(duration(p["step_time_lo_s"]), duration(p["step_time_hi_s"])),
                f"{p['mfu']:.1%}",
                f"{p['bubble_fraction']:.1%}",
                f"{p['memory_needed_bytes'] / GIB:.1f}",
                f"{p['fits_probability']:.2f}",
                first_better,
            )
        )
    counts = f"{values['evaluated']:,} layouts scored, {values['feasible']:,} fit, {values['seconds']:.1f} s"
    parts = [paragraph(_job(layouts[0]) if layouts else "", counts)]
    heads = (
        "#",
        "layout",
        "step",
        "90 % interval",
        "MFU",
        "bubble",
        "GiB",
        "P(fits)",
        "1st better",
    )
    parts.append(table(heads, rows))
    if any(p.get("tied") for p in layouts):
        parts.append(
            paragraph("=: tied with the first of its rank (the chance to be faster is 45 to 55 %)")
        )
    if layouts:
        # If no layout is likely enough to fit, none is recommended and the first one is shown.
        recommended = prediction_html(values["recommended"] or layouts[0])
        parts.append(folded("the recommended layout", recommended))
    if values["rejected"]:
        rejected = [(reason, f"{count:,}") for reason, count in values["rejected"].items()]
        parts.append(folded("rejected", table(("why", "layouts"), rejected)))
    return "".join(parts)


def _rank(values: Mapping[str, Any], place: int) -> str:
    """Return a rank as text; ranks that layouts share (`Robustness.ranks`) end in =."""
    return f"{values.get('rank', place + 1)}{'=' * values.get('tied', False)}"


def whatif_html(values: Mapping[str, Any]) -> str:
    """Step time before and after, and what 10 % more of each parameter would change.

    Args:
        values: result of `WhatIf.to_dict`.
    """
    before, after = values["before"], values["after"]
    changed = ", ".join(values["settings"]) or "no setting"
    rows = []
    for name, record in (("as it is", before), (changed, after)):
        rows.append((name, duration(record["step_time_s"]), fit_words(record["fits_probability"])))

    # An elasticity e turns 10 % more of a parameter into a factor 1.1^e on the step.
    effects = sorted(values["sensitivity"].items(), key=lambda item: -abs(item[1]))
    changes = [(name.replace("_", " "), f"{1.1**value - 1:+.2%}") for name, value in effects]
    return (
        table(("", "step time", "memory"), rows)
        + paragraph(f"change {values['change']:+.1%}", *values["notes"])
        + folded(
            "sensitivity", table(("10 % more of", "changes the step by"), changes), opened=True
        )
    )


def _job(values: Mapping[str, Any]) -> str:
    return (
        f"{values['model']} on {number_of(values['devices'], 'device')} of {values['cluster']}, "
        f"{batch_words(values['global_batch'], values['seq_len'], values['sample_unit'])}"
    )


def _throughput(values: Mapping[str, Any]) -> tuple[str, str]:
    """The row of a prediction that says its throughput, in tokens, images or videos."""
    unit = values["sample_unit"]
    if unit == "tokens":
        return "tokens per second and device", f"{values['tokens_per_s_per_device']:,.0f}"
    return f"{unit} per second", figure(values["samples_per_s"], 3)


def _breakdown(breakdown_s: Mapping[str, float], step_s: float) -> str:
    """A bar of the parts of a step, with a table of them."""
    # Parts come in the order in which all bars stack them; those of no length have no row.
    parts = []
    rows = []
    for name, look in part_looks(breakdown_s).items():
        part_s = breakdown_s.get(name, 0.0)
        if part_s:
            parts.append((look.label, look.colour, part_s / step_s))
            rows.append((look.label, duration(part_s), f"{part_s / step_s:.1%}"))
    coloured = bar(parts)
    return coloured + folded(
        "breakdown", table(("mean over pipeline ranks", "time", "share"), rows)
    )
