"""Results as text for people; quiet, aligned, with units."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from perfmodel.layout_search import SearchResult
from perfmodel.prediction import Prediction
from perfmodel.units import GIB


def prediction(result: Prediction) -> None:
    """Summary, breakdown, memory and the head of the critical path."""
    console = _console()
    fits = "fits" if result.fits else "DOES NOT FIT"
    console.print(
        f"{result.model} on {result.devices} x {result.cluster}, global batch {result.global_batch}, "
        f"sequence {result.seq_len}\nlayout {result.layout}"
    )
    console.print(
        f"step time {_s(result.step_time_s)} (90 %: {_s(result.step_time_lo_s)} to {_s(result.step_time_hi_s)}), "
        f"MFU {result.mfu:.1%}, {result.tflops_per_device:.0f} TFLOP/s and "
        f"{result.tokens_per_s_per_device:,.0f} tokens/s per device, bubble {result.bubble_fraction:.1%}"
    )
    memory = result.memory
    console.print(f"memory {memory.peak / GIB:.1f} of {result.memory_capacity_bytes / GIB:.1f} GiB: {fits}")
    for line in (*result.reasons, *result.warnings):
        console.print(line)
    _breakdown(console, result)
    console.print(
        _table(
            "memory of the fullest pipeline rank",
            ("part", "GiB"),
            [(k, f"{v / GIB:.2f}") for k, v in memory.to_dict().items()],
        )
    )
    console.print(
        _table(
            "critical path",
            ("event", "count", "time", "share"),
            [
                (e.event, f"{e.count:.0f}", _s(e.time_s), f"{e.time_s / result.step_time_s:.1%}")
                for e in result.critical_path[:15]
            ],
        )
    )
    shares = ", ".join(f"{k} {v:.0%}" for k, v in result.provenance.items() if v >= 0.005)
    console.print(f"where the times come from: {shares}")


def search(result: SearchResult) -> None:
    """The ranked table, why others were rejected, the winner's breakdown."""
    console = _console()
    used = [name for name in ("cp", "ep") if any(getattr(p.layout, name) > 1 for p in result.layouts)]
    names = ["tp", "pp", "dp", *used]
    rows = []
    for place, p in enumerate(result.layouts, 1):
        lay = p.layout
        options = [lay.schedule + (f" v{lay.vpp}" if lay.vpp > 1 else ""), f"zero {lay.zero}", lay.recompute]
        options += ["sp"] if lay.sequence_parallel else []
        degrees = [getattr(lay, name) for name in names]
        rows.append(
            (
                str(place), *map(str, degrees), str(lay.micro_batch), " ".join(options), _s(p.step_time_s),
                f"{_s(p.step_time_lo_s)} .. {_s(p.step_time_hi_s)}", f"{p.mfu:.1%}", f"{p.bubble_fraction:.1%}",
                f"{p.memory.peak / GIB:.1f}",
            )
        )  # fmt: skip
    heads = ("#", *names, "micro-batch", "options", "step", "90 % interval", "MFU", "bubble", "GiB")
    if result.layouts:
        best = result.layouts[0]
        console.print(
            f"{best.model} on {best.devices} x {best.cluster}, global batch {best.global_batch}, "
            f"sequence {best.seq_len}"
        )
    console.print(_table("", heads, rows))
    console.print(
        f"{result.evaluated:,} layouts scored by full schedule evaluation, {result.feasible:,} fit, "
        f"in {result.seconds:.1f} s"
    )
    if result.rejected:
        console.print(_table("rejected", ("why", "layouts"), [(k, f"{v:,}") for k, v in result.rejected.items()]))
    if result.layouts:
        _breakdown(console, result.layouts[0], "where the best layout's step goes")


def written(files: Sequence[str]) -> None:
    for file in files:
        print(f"wrote {file}")


def fit(summary: dict[str, Any], out: Path) -> None:
    """Fitted families and their errors."""
    heads = list(dict.fromkeys(key for figures in summary.values() for key in figures))
    rows = [
        (family, *(f"{v:.3g}" if isinstance(v := figures.get(key, "-"), float) else str(v) for key in heads))
        for family, figures in summary.items()
    ]
    heads = ["family", *heads]
    _console().print(_table("", heads, rows))
    print(f"wrote {out}")


_KERNEL_COLUMNS = ("n", "median_ape", "mean_ape", "p90_ape", "bias", "coverage_90")


def kernels(report: dict[str, Any]) -> None:
    """Errors per op family and device."""
    rows = []
    for family, devices in report["families"].items():
        for device, figures in devices.items():
            rows.append((family, device, *(_figure(name, figures[name]) for name in _KERNEL_COLUMNS)))
    _console().print(_table("absolute percentage errors", ("family", "device", *_KERNEL_COLUMNS), rows))
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
    console = _console()
    console.print(_table("step time", ("source", *_CASE_COLUMNS), rows))
    if memory:
        console.print(_table("peak memory", ("source", *_MEMORY_COLUMNS), memory))
    _skipped(report["skipped"])


def doctor(report: dict[str, Any]) -> None:
    rows = []
    for key, value in report.items():
        if isinstance(value, dict):
            rows += [(f"{key}: {k}", str(v) if v is not None else "-") for k, v in value.items()]
        else:
            rows.append((key, str(value)))
    _console().print(_table("", ("what", "value"), rows))


def _figure(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    if name == "n":
        return f"{value:,}"
    return f"{value:.2f}" if name == "spearman" else f"{100 * value:.1f} %"


def _skipped(skipped: dict[str, int]) -> None:
    if skipped:
        _console().print(_table("skipped", ("why", "rows"), [(k, f"{v:,}") for k, v in skipped.items()]))


def _breakdown(console: Console, result: Prediction, title: str = "where the step goes") -> None:
    rows = [
        (name.replace("_", " "), _s(seconds), f"{seconds / result.step_time_s:.1%}")
        for name, seconds in result.breakdown_s.items()
        if seconds > 5e-4 * result.step_time_s
    ]
    console.print(_table(title, ("mean over pipeline ranks", "time", "share"), rows))


def _console() -> Console:
    # wide enough for every table when the output goes to a file
    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=150)


def _table(title: str, heads: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(title=title or None, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for i, head in enumerate(heads):
        left = i == 0 or head in ("options", "device", "value")
        table.add_column(head, justify="left" if left else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def _s(seconds: float) -> str:
    for scale, unit in ((1, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= scale:
            return f"{seconds / scale:.4g} {unit}"
    return f"{seconds / 1e-6:.3g} us"
