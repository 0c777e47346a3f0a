"""Results as text for people; quiet, aligned, with units."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel.units import GIB, duration

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from perfmodel.prediction import Prediction
    from perfmodel.validation import CaseResidual


def prediction(result: "Prediction", more: Sequence[str] = ()) -> None:
    """Summary, `more` lines, breakdown, memory and the head of the critical path."""
    console = new_console()
    fits = "fits" if result.fits else "DOES NOT FIT"
    console.print(
        f"{result.model} on {result.devices} devices of {result.cluster}, global batch {result.global_batch}, "
        f"sequence {result.seq_len}\nlayout {result.layout}"
    )
    console.print(
        f"step time {duration(result.step_time_s)} (90 %: {duration(result.step_time_lo_s)} to "
        f"{duration(result.step_time_hi_s)}), "
        f"MFU {result.mfu:.1%}, {result.tflops_per_device:.0f} TFLOP/s and "
        f"{result.tokens_per_s_per_device:,.0f} tokens/s per device, bubble {result.bubble_fraction:.1%}"
    )
    memory = result.memory
    console.print(
        f"memory {result.memory_needed_bytes / GIB:.1f} of {result.memory_capacity_bytes / GIB:.1f} GiB: {fits} "
        f"(probability {result.fits_probability:.2f})"
    )
    for line in (*more, *result.reasons, *result.warnings):
        console.print(line)
    breakdown(console, result)
    console.print(
        table(
            f"memory as {result.framework} reports it",
            ("part", "GiB"),
            [(k, f"{v / GIB:.2f}") for k, v in memory.to_dict().items()],
        )
    )
    if result.kinds:
        console.print(table("pipeline ranks", ("rank", "kind", "device", "GiB", "of"), _ranks(result)))
    console.print(
        table(
            "critical path",
            ("event", "count", "time", "share"),
            [
                (e.event, f"{e.count:.0f}", duration(e.time_s), f"{e.time_s / result.step_time_s:.1%}")
                for e in result.critical_path[:15]
            ],
        )
    )
    shares = ", ".join(f"{k} {v:.0%}" for k, v in result.provenance.items() if v >= 0.005)
    console.print(f"where the times come from: {shares}")


def _ranks(result: "Prediction") -> list[tuple[str, ...]]:
    """Kind of nodes, device and memory of every pipeline rank."""
    return [
        (
            str(rank),
            kind["kind"],
            kind["device"],
            f"{stage.peak / GIB:.2f}",
            f"{kind['memory_capacity_bytes'] / GIB:.0f}",
        )
        for rank, (kind, stage) in enumerate(zip(result.kinds, result.memory_per_stage, strict=True))
    ]


def written(files: Sequence[str]) -> None:
    for file in files:
        print(f"wrote {file}")


def fit(summary: dict[str, Any], out: Path) -> None:
    """Fitted families and their errors; of collectives, whose place they take and what was set aside."""
    heads = list(
        dict.fromkeys(k for figures in summary.values() for k, v in figures.items() if not isinstance(v, dict))
    )
    rows = [(family, *(_figure(key, figures.get(key)) for key in heads)) for family, figures in summary.items()]
    new_console().print(table("Fitted, and errors on rows kept out", ["family", *map(_head, heads)], rows))
    collectives = summary.get("collectives", {})
    for fabric, names in collectives.get("replaced", {}).items():
        print(f"replaces {len(names)} shipped series: {fabric}")
    for reason, count in collectives.get("set_aside", {}).items():
        print(f"{count:,} rows set aside: {reason}")
    print(f"wrote {out}")


_HEADS = {
    "n": "rows", "kept_out": "kept\nout", "median_ape": "median\nerror", "mean_ape": "mean\nerror",
    "p90_ape": "9 of 10\nwithin", "spearman": "rank cor-\nrelation", "coverage_90": "inside\n90 %",
}  # fmt: skip


def _head(name: str) -> str:
    """A figure's name for people."""
    return _HEADS.get(name, name.replace("_", " "))


_KERNEL_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape", "bias", "coverage_90")


def kernels(report: dict[str, Any]) -> None:
    """Errors per op family and device."""
    rows = []
    for family, devices in report["families"].items():
        for device, figures in devices.items():
            rows.append((family, device, *(_figure(name, figures[name]) for name in _KERNEL_COLUMNS)))
    rows.append(("all", "all", *(_figure(name, report["all"][name]) for name in _KERNEL_COLUMNS)))
    new_console().print(table("Predicted against measured", ("family", "device", *map(_head, _KERNEL_COLUMNS)), rows))
    _nothing("row", report)
    _skipped(report["skipped"])


_MEMORY_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape")
_CASE_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape", "spearman", "coverage_90")


def cases(report: dict[str, Any]) -> None:
    """Errors per source of published runs."""
    rows, memory = [], []
    for source, figures in report["sources"].items():
        rows.append((source, *(_figure(name, figures[name]) for name in _CASE_COLUMNS)))
        if figures["memory"]["n"]:
            memory.append((source, *(_figure(name, figures["memory"][name]) for name in _MEMORY_COLUMNS)))
    rows.append(("all", *(_figure(name, report["all"][name]) for name in _CASE_COLUMNS)))
    console = new_console()
    console.print(table("Step time, predicted against measured", ("source", *map(_head, _CASE_COLUMNS)), rows))
    _nothing("step time", report)
    if memory:
        console.print(
            table("Peak memory, predicted against measured", ("source", *map(_head, _MEMORY_COLUMNS)), memory)
        )
    _skipped(report["skipped"])


def residuals(found: "list[CaseResidual]") -> None:
    """Why predictions of published runs missed."""
    console = new_console()
    for one in found:
        console.print(
            f"{one.case_id}: measured {duration(one.measured_s)}, predicted {duration(one.predicted_s)} "
            f"({one.error:+.1%}; 90 %: {duration(one.lo_s)} to {duration(one.hi_s)}), "
            f"{one.extrapolated:.0%} extrapolated"
        )
        parts = sorted(one.breakdown_s.items(), key=lambda item: -item[1])
        rows = [(name, duration(s), f"{s / one.predicted_s:.1%}") for name, s in parts if s > 1e-3 * one.predicted_s]
        console.print(table("predicted", ("part", "time", "share"), rows))
        events = [
            (
                e.event, duration(e.time_s), e.provenance, e.nearest,
                "" if e.nearest_us is None else duration(1e-6 * e.nearest_us),
                "" if e.doublings is None else f"{e.doublings:.1f}",
            )
            for e in one.events
        ]  # fmt: skip
        names = ("event", "time", "provenance", "nearest measured", "its time", "doublings off")
        console.print(table("largest events", names, events))
        terms = [(t.parameter, f"{t.share:.2f}", f"{t.needed:+.2f}", f"{t.deviations:+.1f}") for t in one.terms[:8]]
        names = ("if it were one term alone", "share", "change (log factor, or amount)", "in standard deviations")
        console.print(table("what would explain the error", names, terms))


def doctor(report: dict[str, Any]) -> None:
    rows = []
    for key, value in report.items():
        if isinstance(value, dict):
            rows += [(f"{key}: {k}", _said(k, v)) for k, v in value.items()]
        else:
            rows.append((key, "; ".join(value) or "-" if isinstance(value, list) else str(value)))
    new_console().print(table("", ("what", "value"), rows))


def _said(name: str, value: Any) -> str:
    if value is None:
        return "-"
    return f"{value / 1e6:,.0f} MB" if name.endswith("_bytes") else str(value)


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name in ("n", "rows", "kept_out", "series", "kept"):
        return f"{value:,}"
    return f"{value:.2f}" if name == "spearman" else f"{100 * value:.1f} %"


def _nothing(what: str, report: dict[str, Any]) -> None:
    if not report["all"]["n"]:
        print(f"no {what} could be compared" if report["skipped"] else "the tables hold no rows")


def _skipped(skipped: dict[str, int]) -> None:
    if skipped:
        new_console().print(table("skipped", ("why", "rows"), [(k, f"{v:,}") for k, v in skipped.items()]))


def breakdown(console: "Console", result: "Prediction", title: str = "where the step goes") -> None:
    rows = [
        (name.replace("_", " "), duration(seconds), f"{seconds / result.step_time_s:.1%}")
        for name, seconds in result.breakdown_s.items()
        if seconds > 5e-4 * result.step_time_s
    ]
    console.print(table(title, ("mean over pipeline ranks", "time", "share"), rows))


def new_console() -> "Console":
    """Where results are printed."""
    from rich.console import Console

    # wide enough for every table when the output goes to a file, unless somebody says otherwise
    console = Console(highlight=False)
    said = console.is_terminal or "COLUMNS" in os.environ
    return console if said else Console(highlight=False, width=150)


_WORDS = frozenset({
    "", "options", "device", "kind", "value", "source", "provenance", "network, from the inside",
})  # fmt: skip
"""Heads of columns of words; those of figures are on the right."""


def table(title: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> "Table":
    """A table without lines, figures on the right."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(heads):
        table.add_column(head, justify="left" if i == 0 or head in _WORDS else "right", no_wrap=True)
    for row in rows:
        table.add_row(*map(escape, row))  # a bracket is no markup
    return table
