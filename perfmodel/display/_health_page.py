"""A checked run as HTML: verdict, measured and predicted figures, step times, causes."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from perfmodel.display._html import escaped, paragraph, table
from perfmodel.units import GIB, duration, span

_WIDTH, _HEIGHT, _MARGIN = 720, 190, 46
_MOST_POINTS: Final = 1500
"""Most points of the curve; more would not be visible on a screen."""
_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 14px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 16px; max-width: 760px; }
h1 { font-size: 20px; } h2 { font-size: 16px; margin: 20px 0 6px; }
table { border-collapse: collapse; width: 100%; }
td, th { padding: 3px 8px; border-bottom: 1px solid color-mix(in srgb, currentColor 20%, transparent); }
th { font-weight: 600; }
svg { width: 100%; height: auto; }
.scroll { overflow-x: auto; }
"""


def health_html(values: Mapping[str, Any], steps: Sequence[int], step_s: Sequence[float]) -> str:
    """A checked run, as notebooks show it.

    Args:
        values: result of `RunHealth.to_dict`.
        steps: numbers of the steps after the warm-up.
        step_s: seconds of each of these steps.
    """
    measured, predicted = values["measured"], values["predicted"]
    interval = span(duration(predicted["step_time_lo_s"]), duration(predicted["step_time_hi_s"]))
    rows = [
        (
            "step time",
            duration(measured["step_time_s"]),
            duration(predicted["step_time_s"]),
            interval,
        ),
        ("with all stalls", duration(measured["mean_step_time_s"]), "", ""),
    ]

    # Peak memory is shown only if the log has one to compare with.
    peaks = (measured["peak_memory_bytes"], predicted["peak_memory_bytes"])
    if None not in peaks:
        rows.append(("peak memory", f"{peaks[0] / GIB:.1f} GiB", f"{peaks[1] / GIB:.1f} GiB", ""))
    contradictions = [f"contradiction: {sentence}" for sentence in values["contradictions"]]
    return (
        f"<h1>{escaped(values['verdict'])}</h1>"
        + paragraph(*contradictions, *values["remarks"])
        + _scrolled(table(("", "measured", "predicted", "90 % interval"), rows))
        + _curve(values, steps, step_s)
        + _causes(values)
        + _other_settings(values)
    )


def health_page(title: str, body: str) -> str:
    """Return `health_html` as a self-contained page.

    Args:
        title: title of the page.
        body: HTML.
    """
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n<title>{escaped(title)}</title>\n'
        f"<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _scrolled(body: str) -> str:
    return f'<div class="scroll">{body}</div>'


def _causes(values: Mapping[str, Any]) -> str:
    """Return the table of causes, and what to measure next; empty without causes."""
    if not values["causes"]:
        return ""
    other_job = values["match"] != "same job"
    rows = []
    for cause in values["causes"]:
        # A cause that is only likely is never shown as certain, whatever rounding makes of it.
        surely = f"{min(cause['probability'], 0.99):.0%}"
        if cause["probability"] == 1:
            surely = "shown by the log"
        explains = duration(cause["explains_s"])
        rows.append((cause["title"], explains, surely, cause["evidence"], cause["remedy"]))
    heads = ("cause", "explains, per step", "probability", "evidence", "remedy")
    return (
        "<h2>Likeliest causes</h2>"
        + _scrolled(table(heads, rows))
        + ("" if other_job else paragraph(f"Measure next: {values['next_measurement']}"))
    )


def _other_settings(values: Mapping[str, Any]) -> str:
    """Return the settings that would explain a step which cannot be one of this job; empty if it
    can."""
    if values["match"] == "same job":
        return ""
    rows = []
    for other in values["other_settings"]:
        predicted = duration(other["step_time_s"])
        rows.append((other["setting"], other["script"], other["run"], predicted))
    listed = paragraph("No single setting of the script explains this step.")
    if rows:
        listed = _scrolled(table(("setting", "script", "run", "predicted step"), rows))
    return (
        "<h2>Settings that would explain the step, if the run differs from the script</h2>"
        + listed
        + paragraph(f"Next: {values['next_measurement']}")
    )


def _curve(values: Mapping[str, Any], steps: Sequence[int], step_s: Sequence[float]) -> str:
    """Step times over the run in front of the predicted interval."""
    predicted = values["predicted"]

    # Thin out the points by a regular stride.
    stride = max(1, len(steps) // _MOST_POINTS)
    points = list(zip(steps, step_s, strict=True))[::stride]
    if len(points) < 2:
        return ""
    # A stall of minutes may leave the picture: what matters is where the usual steps lie.
    highest = 1.15 * max(predicted["step_time_hi_s"], 1.6 * sorted(step_s)[len(step_s) // 2])
    first = points[0][0]
    last = max(point[0] for point in points)

    # Coordinates of the SVG: steps to the right, seconds upwards from the bottom line.
    def across(step: float) -> float:
        return _MARGIN + (step - first) / max(last - first, 1) * (_WIDTH - _MARGIN - 8)

    def up(seconds: float) -> float:
        return 8 + (1 - min(seconds, highest) / highest) * (_HEIGHT - 30)

    # Interval as a band, prediction as a dashed line, measured steps as a polyline.
    line = " ".join(f"{across(step):.1f},{up(seconds):.1f}" for step, seconds in points)
    top = up(predicted["step_time_hi_s"])
    bottom = up(predicted["step_time_lo_s"])
    middle = up(predicted["step_time_s"])
    width = _WIDTH - _MARGIN - 8
    return (
        "<h2>Steps over the run</h2>"
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="step times over the run">'
        f'<rect x="{_MARGIN}" y="{top:.1f}" width="{width}" height="{bottom - top:.1f}" fill="#0072B2" opacity=".18"/>'
        f'<path d="M{_MARGIN} {middle:.1f}h{width}" stroke="#0072B2" stroke-dasharray="5 4"/>'
        f'<polyline points="{line}" fill="none" stroke="#D55E00" stroke-width="1.2"/>'
        f'<g font-size="11" fill="currentColor" font-family="sans-serif">'
        f'<text x="2" y="{top + 4:.1f}">{escaped(duration(predicted["step_time_hi_s"]))}</text>'
        f'<text x="2" y="{middle + 4:.1f}">{escaped(duration(predicted["step_time_s"]))}</text>'
        f'<text x="2" y="{bottom + 4:.1f}">{escaped(duration(predicted["step_time_lo_s"]))}</text>'
        f'<text x="{_MARGIN}" y="{_HEIGHT - 4}">step {first:,}</text>'
        f'<text x="{_WIDTH - 8}" y="{_HEIGHT - 4}" text-anchor="end">step {last:,}</text></g></svg>'
        + paragraph(
            "Orange: measured. Blue: predicted, with the 90 % interval of comparable sites."
        )
    )
