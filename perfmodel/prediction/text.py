"""Prints predictions as text."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from perfmodel.display import table
from perfmodel.units import GIB, batch_words, duration, figure, fit_words, number_of, span

if TYPE_CHECKING:
    from rich.console import Console

    from perfmodel.prediction._prediction import Prediction


def print_prediction(console: "Console", result: "Prediction", more: Sequence[str] = ()) -> None:
    """Print summary, `more` lines, breakdown, memory and the top of the critical path."""
    console.print(
        f"{result.model} on {number_of(result.devices, 'device')} of {result.cluster}, "
        f"{batch_words(result.global_batch, result.seq_len, result.sample_unit)}"
    )
    # Never broken, or else it could not be copied.
    console.print(f"layout {result.layout_notation}", soft_wrap=True, markup=False)
    console.print(
        f"{step_words(result)}, MFU {result.mfu:.1%}, {result.tflops_per_device:.0f} TFLOP/s and "
        f"{throughput_words(result, result.devices)} per device, bubble {result.bubble_fraction:.1%}"
    )
    console.print(f"memory: {memory_words(result)}")
    for line in (*more, *result.reasons, *result.warnings):
        console.print(line)
    print_breakdown(console, result)
    console.print(
        table(f"memory as {result.framework} reports it", ("part", "GiB"), _memory_rows(result))
    )
    if result.kinds:
        console.print(
            table("pipeline ranks", ("rank", "kind", "device", "GiB", "of"), _ranks(result))
        )
    console.print(
        table(
            "critical path",
            ("event", "count", "time", "share"),
            [
                (
                    e.event,
                    f"{e.count:.0f}",
                    duration(e.time_s),
                    f"{e.time_s / result.step_time_s:.1%}",
                )
                for e in result.critical_path[:15]
            ],
        )
    )
    shares = ", ".join(f"{k} {v:.0%}" for k, v in result.provenance.items() if v >= 0.005)
    console.print(f"where the times come from (shares of the critical path): {shares}")


def _memory_rows(result: "Prediction") -> list[tuple[str, str]]:
    """The reported peak and its parts, and the memory that must fit."""
    parts = result.memory.to_dict()
    # The framework's report may leave out the context of the device, which must fit as well.
    not_reported = result.memory_needed_bytes - parts["peak"]
    if not_reported > 0.005 * GIB:
        parts["needed beyond this"] = not_reported
    return [
        (name.replace("peak", "reported peak"), f"{value / GIB:.2f}")
        for name, value in parts.items()
    ]


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
        for rank, (kind, stage) in enumerate(
            zip(result.kinds, result.memory_per_stage, strict=True)
        )
    ]


def print_breakdown(
    console: "Console", result: "Prediction", title: str = "where the step goes"
) -> None:
    """Print the parts of the step that are not negligible."""
    rows = [
        (name.replace("_", " "), duration(seconds), f"{seconds / result.step_time_s:.1%}")
        for name, seconds in result.breakdown_s.items()
        if seconds > 5e-4 * result.step_time_s
    ]
    console.print(table(title, ("mean over pipeline ranks", "time", "share"), rows))


def step_words(p: "Prediction") -> str:
    """Format the step time with its 90 % interval."""
    interval = span(duration(p.step_time_lo_s), duration(p.step_time_hi_s))
    return f"step time {duration(p.step_time_s)} (90 %: {interval})"


def memory_words(p: "Prediction") -> str:
    """Format the memory needed on the fullest device, and whether it fits."""
    needed, capacity = p.memory_needed_bytes / GIB, p.memory_capacity_bytes / GIB
    return f"needs {needed:.1f} of {capacity:.1f} GiB: {fit_words(p.fits_probability)}"


def throughput_words(p: "Prediction", devices: int = 1, *, step_s: float | None = None) -> str:
    """Format the throughput in the unit that people count the model's samples in.

    Args:
        devices: number that the throughput of all devices is divided by.
        step_s: seconds of a step; those predicted if not given.
    """
    faster = p.step_time_s / (step_s or p.step_time_s)
    if p.sample_unit == "tokens":
        return f"{p.tokens_per_s_per_device * p.devices / devices * faster:,.0f} tokens/s"
    # A device may process a fraction of a video per second.
    return f"{figure(p.samples_per_s / devices * faster, 3)} {p.sample_unit}/s"
