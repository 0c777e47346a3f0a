"""The figures of `validate/emulation.py` as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from studies.emulation_runs import NOISE_OF_CLAIMS, claims, judged, waited_text
from studies.tables import rows_table

_STEP_BAR: Final = 0.02
_PAPER_STEP: Final = 0.01
_HOST_BAR: Final = 0.05
_MICRO_BAR: Final = 0.04
_CURVE_BAR: Final = 0.03
_KNEE_BAR: Final = 0.2
_CALLS_BAR: Final = 200


def emulation_report(report: Mapping[str, Any]) -> str:
    """Format the report of every part that was run."""
    lines = [
        "# Emulation against reality",
        "",
        "`python validate/emulation.py --out validate` printed this.",
    ]
    for part, section in _SECTIONS.items():
        if part in report:
            lines += ["", *section(report[part])]
    return "\n".join([*lines, "", *_missed(report)]) + "\n"


def _steps(by_script: Mapping[str, Any]) -> list[str]:
    """The section of steps: real ranks and emulated ones, awake in turn."""
    lines = [
        "## Two ranks, one core each",
        "",
        f"Iterations of the slower rank, lower quartiles (what else the machine does only lengthens an iteration, so "
        "the quicker ones tell more of the run); "
        f"bar {_STEP_BAR:.0%} (the paper: less than {_PAPER_STEP:.0%} between two GPU nodes, section 3.2). "
        "Each run starts by itself, since it measures at its start what emulating a call takes. After that, real and "
        "emulated runs take turns, so that the machine's drifts meet all. Left out are a turn's first iteration, and "
        "turns of which others (processes, the hypervisor) took more core seconds per second than the column says. "
        "Emulated are both ranks, which exchange nothing but wait for one another (`--apart`), and beside that each by "
        "itself. The two cores slow each other: a rank that is not in step with its neighbour runs faster whenever "
        "that one waits, which is none of the emulation's doing. Noise: half of the real run's turns against the other "
        f"half; an error is judged only where it is at most {NOISE_OF_CLAIMS:.0%}. Parts: errors of forward, backward "
        "and optimizer.",
        "",
    ]
    head = (
        "script",
        "real",
        "both emulated",
        "error",
        "each alone",
        "noise",
        "within",
        "iterations",
        "turns",
        "taken at most",
        "parts",
    )
    rows = []
    for name, figures in by_script.items():
        # A step may be right although errors of its parts cancel.
        parts = ", ".join(
            f"{figures[f'{part}_s_error']:+.1%}" for part in ("forward", "backward", "optimizer")
        )
        rows.append(
            (
                name,
                _ms(figures["real_s"]),
                _ms(figures["both_s"]),
                f"{figures['both_error']:+.1%}",
                f"{figures['each_error']:+.1%}",
                f"{figures['noise']:.1%}",
                judged(figures["both_error"], figures["noise"], _STEP_BAR),
                figures["iterations"],
                figures["turns"],
                f"{figures['stolen_at_most']:.2f}",
                parts,
            )
        )
    return [*lines, rows_table(head, rows)]


def _hosts(by_script: Mapping[str, Any]) -> list[str]:
    """The section of hosts in namespaces, between which links are slow."""
    lines = [
        "## Hosts in network namespaces with shaped links",
        "",
        f"Median iterations; bar {_HOST_BAR:.0%}. More ranks than cores share them: emulated is rank 0 alone, whose "
        "emulated others are told to be stragglers by ranks over cores, and beside that all ranks, which "
        "exchange nothing but wait for one another (`--apart`). Noise: largest difference between real launches (none "
        "with one).",
        "",
    ]
    rows = [
        (
            name,
            _ms(figures["real_s"]),
            _ms(figures["emulated_s"]),
            f"{figures['error']:+.1%}",
            f"{figures['apart_error']:+.1%}",
            f"{figures['noise']:.1%}",
            figures["iterations"],
        )
        for name, figures in by_script.items()
    ]
    return [
        *lines,
        rows_table(
            ("script", "real", "emulated", "error", "all apart", "noise", "iterations"), rows
        ),
    ]


def _micro(measured: Mapping[str, Any]) -> list[str]:
    """The section of collectives by themselves."""
    lines = [
        "## Collectives by themselves (NeuronaBox, table 1)",
        "",
        "Overhead: what an emulated call takes over what the emulation was told to take (the time of the real run just "
        f"before it, exactly for its sizes), as the script sees both, from before the call to its return; "
        f"bar {_MICRO_BAR:.0%}. Medians of {measured['rounds']} rounds of a real and an emulated run. Noise: by how "
        "much two real runs in succession differ.",
        "",
    ]
    rows = [
        (
            row["collective"],
            row["bytes"],
            _ms(row["told_s"], 3),
            _ms(row["emulated_s"], 3),
            f"{row['overhead']:+.1%}",
            f"{row['noise']:.1%}",
        )
        for row in measured["rows"]
    ]
    return [
        *lines,
        rows_table(("collective", "bytes", "told (real)", "emulated", "overhead", "noise"), rows),
    ]


def _curve(curves: Mapping[str, Any]) -> list[str]:
    """The section of delays: the emulated curve beside the one that the timeline predicts."""
    # Each curve has a table of its own: libraries differ in what they keep of the core.
    lines = ["## Delay of every all-reduce (NeuronaBox, figure 4)"]
    for name, curve in curves.items():
        errors = [abs(error) for error in curve["errors"]]
        # The knee is the delay from which on reductions no longer hide behind the backward.
        knees = curve["predicted_knee_s"] / curve["emulated_knee_s"] - 1
        lines += [
            "",
            f"**{name}**: predicted over emulated mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%} "
            f"off (bar {_CURVE_BAR:.0%}). Knee {1e3 * curve['emulated_knee_s']:.2f} ms emulated, "
            f"{1e3 * curve['predicted_knee_s']:.2f} ms predicted, {knees:+.0%} (bar {_KNEE_BAR:.0%}). By the "
            f"timeline's gradients {curve['felt']:.0f} all-reduces are felt at first and {curve['felt_at_most']:.0f} "
            f"at last; {1e3 * curve['hidden_s']:.2f} ms are hidden behind backward.",
            "",
        ]
        stamps = zip(curve["delays_s"], curve["emulated_s"], curve["predicted_s"], strict=True)
        rows = [
            (
                _ms(delay_s, 0),
                _ms(emulated_s),
                _ms(predicted_s),
                f"{predicted_s / emulated_s - 1:+.1%}",
            )
            for delay_s, emulated_s, predicted_s in stamps
        ]
        lines.append(
            rows_table(("delay", "emulated", "predicted", "error"), rows, columns_on_left=0)
        )
    return lines


def _what_if(by_condition: Mapping[str, Any]) -> list[str]:
    """The section of other conditions, predicted from one run and emulated."""
    lines = [
        "## Other conditions",
        "",
        "Predicted from the first run alone; no bar. All-reduces at first take three times what gloo's do here.",
        "",
    ]
    rows = [
        (
            name,
            _ms(times["emulated_s"]),
            _ms(times["predicted_s"]),
            f"{times['predicted_s'] / times['emulated_s'] - 1:+.1%}",
        )
        for name, times in by_condition.items()
    ]
    return [*lines, rows_table(("condition", "emulated", "predicted", "error"), rows)]


def _scale(by_ranks: Mapping[str, Any]) -> list[str]:
    """The section of scale: calls per second as the world grows."""
    lines = [
        "## Scale",
        "",
        f"Small all-reduces that take no time in the model; bar {_CALLS_BAR} per second.",
        "",
    ]
    rows = [
        (ranks, f"{figures['calls_per_s']:.0f}", _mib(figures["peak_memory_bytes"]))
        for ranks, figures in by_ranks.items()
    ]
    return [
        *lines,
        rows_table(("ranks", "calls per second", "peak memory"), rows, columns_on_left=0),
    ]


def _memory(by_script: Mapping[str, Any]) -> list[str]:
    """The section of peak memory: real, emulated and predicted."""
    lines = [
        "## Peak memory of a rank",
        "",
        "Since it joined its world, without the code of libraries: resident memory of a real and of an emulated run, "
        "and what was predicted. Of the prediction, what libraries take for themselves is measured on the same script "
        "with a model of next to no size.",
        "",
    ]
    head = (
        "script",
        "real",
        "emulated",
        "predicted",
        "of it the libraries' own",
        "predicted over emulated",
    )
    rows = [
        (
            name,
            _mib(peaks["real_bytes"]) if "real_bytes" in peaks else "",
            _mib(peaks["emulated_bytes"]),
            _mib(peaks["predicted_bytes"]),
            _mib(peaks["context_bytes"]),
            f"{peaks['predicted_bytes'] / peaks['emulated_bytes'] - 1:+.1%}",
        )
        for name, peaks in by_script.items()
    ]
    return [*lines, rows_table(head, rows)]


def _ms(seconds: float, digits: int = 1) -> str:
    """A time in milliseconds."""
    return f"{1e3 * seconds:.{digits}f} ms"


def _mib(size_bytes: float) -> str:
    """A size in mebibytes."""
    return f"{size_bytes / 2**20:.0f} MiB"


def _missed(report: Mapping[str, Any]) -> list[str]:
    """Sentences on what is missing, and on figures that missed their bar."""
    lines = [
        "## What is missing or missed",
        "",
        "- The machine: two cores of a shared host that slow each other, at times for minutes or hours. Steps, hosts "
        "and the micro-benchmark are therefore compared in turns, and what an emulated call keeps of the core is an "
        "amount of work; prices are still measured minutes before. Parts are run one by one, and each stays until it "
        "is run again.",
    ]
    # Each sentence is computed from the figures, so that it stays true of the next run.
    if steps := report.get("steps"):
        # Claims are made of quiet runs alone.
        judgements = [judged(r["both_error"], r["noise"], _STEP_BAR) for r in steps.values()]
        lines.append(
            f"- Steps: {claims(judgements, _STEP_BAR)}; all are off by "
            f"{_span([r['both_error'] for r in steps.values()])}. {waited_text([*steps.values()])} Each rank by itself "
            f"is off by {_span([r['each_error'] for r in steps.values()])}: these cores run faster while their "
            "neighbour waits, and only real ranks wait together."
        )
    # An overhead has a bar, and a noise beside which it is read.
    if rows := report.get("micro", {}).get("rows"):
        errors = {f"{r['collective']} of {r['bytes']} bytes": r["overhead"] for r in rows}
        # An overhead below what two real runs differ by cannot be told from none.
        quiet = sum(abs(r["overhead"]) <= r["noise"] for r in rows)
        lines.append(
            f"- Collectives by themselves: overhead {_met(errors, _MICRO_BAR)}; in {quiet} of {len(rows)} it is less "
            "than two real runs in succession differ by. The emulation's own path is taken off; where the interpreter "
            "is slow and the library fast, not so much is left to take off."
        )
    if hosts := report.get("hosts"):
        lines.append(
            f"- Hosts: rank 0 alone {_met({name: r['error'] for name, r in hosts.items()}, _HOST_BAR)}. All ranks "
            f"apart are off by {_span([r['apart_error'] for r in hosts.values()])}: what answers them takes its time "
            "on the cores that they share."
        )
    if curves := report.get("curve"):
        errors = {}
        for name, curve in curves.items():
            errors[name] = sum(map(abs, curve["errors"])) / len(curve["errors"])
        lines.append(f"- The curve: {_met(errors, _CURVE_BAR)}.")
    # Only FSDP2 frees and takes memory within a step.
    if memory := report.get("memory"):
        errors = [
            r["predicted_bytes"] / r["emulated_bytes"] - 1
            for name, r in memory.items()
            if "fsdp" in name
        ]
        if errors:
            lines.append(
                f"- Memory under FSDP2: predicted off by {_span(errors)}; the largest moment of every part is added "
                "up, though not all come together."
            )
    return lines


def _met(errors: Mapping[str, float], bar: float) -> str:
    """Sentence on how many figures are within a bar, with the names of the others."""
    # Those that miss are named.
    missed = [f"{name} {error:+.1%}" for name, error in errors.items() if abs(error) > bar]
    within = f"{len(errors) - len(missed)} of {len(errors)} within the bar of {bar:.0%}, all {_span([*errors.values()])}"
    return f"{within}; missed by {', '.join(missed)}" if missed else within


def _span(errors: Sequence[float]) -> str:
    """The least and the largest error."""
    return f"{min(errors):+.1%} to {max(errors):+.1%}"


_SECTIONS = {
    "steps": _steps,
    "micro": _micro,
    "hosts": _hosts,
    "curve": _curve,
    "what_if": _what_if,
    "scale": _scale,
    "memory": _memory,
}
