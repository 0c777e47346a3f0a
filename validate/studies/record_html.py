"""The record as one HTML file with its plots inside."""

import base64
import io
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markdown_it import MarkdownIt  # comes with rich

from perfmodel.display import LINES, VERMILLION

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_STYLE = """body{font:15px/1.45 sans-serif;max-width:75em;margin:2em auto;padding:0 1em}
table{border-collapse:collapse;margin:1em 0;display:block;overflow-x:auto}
td,th{border-bottom:1px solid #ddd;padding:.25em .7em;text-align:left}td{white-space:nowrap}
td:first-child,th:first-child{min-width:14em}td:first-child,td:nth-child(2){white-space:normal}
img{max-width:100%}"""

_MARKERS = "osv^xD"


def record_html(text: str, frame: pd.DataFrame, pairs: dict[str, Any]) -> str:
    """Format the Markdown report, the runs and the `pairs` of `published_record` as HTML with drawn
    plots."""
    # Pictures come after the heading, before what explains them.
    heading, _, rest = text.strip().partition("\n\n")
    # Tables are an extension of CommonMark; HTML in a report would be a mistake.
    markdown = MarkdownIt("commonmark", {"html": False}).enable("table")
    pictures = "".join(
        f'<h2>{escape(title)}</h2><img alt="{escape(title)}" src="data:image/png;base64,{_png(figure)}">'
        for title, figure in [*_plots(frame), ("Pairs of layouts of one site", _reliability(pairs))]
    )
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>Predicted against measured</title>'
        f"<style>{_STYLE}</style>{markdown.render(heading)}{pictures}{markdown.render(rest)}</html>\n"
    )


def _plots(frame: pd.DataFrame) -> "list[tuple[str, Figure]]":
    """Title and picture of step times, of their errors and of peak memory."""
    timed: Any = frame[
        np.isfinite(frame["measured_s"]) & frame["predicted_iter_time_s"].notna()
    ].copy()
    timed["error"] = timed["predicted_iter_time_s"].astype(float) / timed["measured_s"] - 1
    # A source looks the same in all pictures.
    looks = {name: _look(place) for place, name in enumerate(sorted(set(frame["source"])))}
    return [
        ("Step time", _times_plot(timed, looks)),
        ("Errors by source", _errors_plot(timed)),
        ("Peak memory", _memory_plot(frame, looks)),
    ]


def _times_plot(timed: Any, looks: dict[str, dict[str, Any]]) -> "Figure":
    """Draw predicted over measured step time, with a point per run."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.subplots()
    # The sources with most runs lie below the others.
    for name in timed["source"].value_counts().index:
        rows = timed[timed["source"] == name]
        predicted = rows["predicted_iter_time_s"].astype(float)
        axes.loglog(
            rows["measured_s"], predicted, ls="", ms=4, alpha=0.6, label=name, **looks[name]
        )
    span = [timed["measured_s"].min(), timed["measured_s"].max()]
    axes.plot(span, span, color="0.3", lw=1)
    axes.set(xlabel="measured step time in s", ylabel="predicted step time in s")
    axes.legend(fontsize=6, loc="upper left")
    return figure


def _errors_plot(timed: Any) -> "Figure":
    """Draw the spread of relative errors with a box per source, the source with most runs on
    top."""
    from matplotlib.figure import Figure

    names: list[str] = timed["source"].value_counts().index.tolist()
    figure = Figure(figsize=(9, 0.35 * len(names) + 1.2), layout="constrained")
    axes = figure.subplots()
    errors = [100 * timed[timed["source"] == name]["error"].to_numpy(float) for name in names[::-1]]
    # Whiskers instead of outliers: a few runs far off would hide all boxes.
    axes.boxplot(
        errors,
        orientation="horizontal",
        whis=(5, 95),
        showfliers=False,
        medianprops={"color": VERMILLION},
    )
    axes.set_yticks(range(1, len(names) + 1), names[::-1], fontsize=7)
    axes.axvline(0, color="0.3", lw=1)
    axes.set(
        xlabel="error in % of measured time; box: quartiles, whiskers: 5 and 95 %", xlim=(-100, 100)
    )
    return figure


def _memory_plot(frame: pd.DataFrame, looks: dict[str, dict[str, Any]]) -> "Figure":
    """Draw predicted over measured peak memory, with a point per run."""
    from matplotlib.figure import Figure

    memory: Any = frame[
        np.isfinite(frame["measured_bytes"]) & frame["predicted_peak_memory_bytes"].notna()
    ]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.subplots()
    for name, rows in memory.groupby("source"):
        predicted = rows["predicted_peak_memory_bytes"].astype(float)
        axes.plot(
            rows["measured_bytes"] / 1e9,
            predicted / 1e9,
            ls="",
            ms=4,
            alpha=0.6,
            label=name,
            **looks[str(name)],
        )
    # The diagonal is where predictions are right.
    top = float(memory["measured_bytes"].max()) / 1e9 if len(memory) else 1.0
    axes.plot([0, top], [0, top], color="0.3", lw=1)
    axes.set(xlabel="measured peak memory in GB", ylabel="predicted peak memory in GB")
    axes.legend(fontsize=7)
    return figure


def _reliability(pairs: dict[str, Any]) -> "Figure":
    """Draw how often the layout predicted faster was faster, by its probability."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6, 5), layout="constrained")
    axes = figure.subplots()
    axes.plot([50, 100], [50, 100], color="0.3", lw=1)
    named = [("frameworks that behave", pairs["reliability"]), *pairs["apart"].items()]
    for place, (name, figures) in enumerate(named):
        probability = [100 * of_bin["probability"] for of_bin in figures["bins"]]
        faster = [100 * of_bin["faster"] for of_bin in figures["bins"]]
        label = f"{name}, {figures['pairs']:,} pairs"
        axes.plot(probability, faster, label=label, **_look(place))
    axes.set(
        xlabel="probability of being faster in %",
        ylabel="faster in %",
        xlim=(50, 100),
        ylim=(40, 101),
    )
    axes.legend(fontsize=7)
    return figure


def _look(place: int) -> dict[str, Any]:
    """Colour and marker of the n-th source."""
    return {
        "color": LINES[place % len(LINES)],
        "marker": _MARKERS[place // len(LINES) % len(_MARKERS)],
    }


def _png(figure: "Figure") -> str:
    """A picture as a `data:` address."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=90)
    return base64.b64encode(buffer.getvalue()).decode()
