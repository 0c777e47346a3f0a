"""The figures of `validate/emulation.py` as Markdown."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

_STEP_BAR: Final = 0.02
_HOST_BAR: Final = 0.05
_MICRO_BAR: Final = 0.04
_CURVE_BAR: Final = 0.03
_KNEE_BAR: Final = 0.2
_CALLS_BAR: Final = 200


def emulation_report(report: Mapping[str, Any]) -> str:
    """Every part that was run."""
    lines = ["# Emulation against reality", "", "`python validate/emulation.py --out validate` printed this."]
    for part, section in _SECTIONS.items():
        if part in report:
            lines += ["", *section(report[part])]
    return "\n".join([*lines, "", *_missed(report)]) + "\n"


def _steps(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Two ranks, one core each", "",
        f"Median iterations of the slower rank; bar {_STEP_BAR:.0%}. Real and emulated runs take turns, so that the "
        "machine's drifts meet all; a turn's first iteration is left out, and turns of which others (processes, the "
        "hypervisor) took more core seconds per second than the column says. Emulated are both ranks, which exchange "
        "nothing but wait for one another (`--apart`), and beside that each by itself. The two cores slow each other: "
        "a rank that is not in step with its neighbour runs faster whenever that one waits, which is none of the "
        "emulation's doing. Noise: half of the real run's turns against the other half. Parts: errors of forward, "
        "backward and optimizer.", "",
        "| script | real | both emulated | error | each alone | noise | iterations | turns | taken at most | parts |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, r in found.items():
        parts = ", ".join(f"{r[f'{part}_s_error']:+.1%}" for part in ("forward", "backward", "optimizer"))
        lines.append(
            f"| {name} | {1e3 * r['real_s']:.1f} ms | {1e3 * r['both_s']:.1f} ms | {r['both_error']:+.1%} "
            f"| {r['each_error']:+.1%} | {r['noise']:.1%} | {r['iterations']} | {r['turns']} "
            f"| {r['stolen_at_most']:.2f} | {parts} |"
        )
    return lines


def _hosts(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Hosts in network namespaces with shaped links", "",
        f"Median iterations; bar {_HOST_BAR:.0%}. More ranks than cores share them: emulated is rank 0 alone, whose "
        "emulated others are told to be stragglers by ranks over cores, and beside that all ranks, which "
        "exchange nothing but wait for one another (`--apart`). Noise: largest difference between real launches (none "
        "with one).", "",
        "| script | real | emulated | error | all apart | noise | iterations |",
        "|---|--:|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    return lines + [
        f"| {name} | {1e3 * r['real_s']:.1f} ms | {1e3 * r['emulated_s']:.1f} ms | {r['error']:+.1%} "
        f"| {r['apart_error']:+.1%} | {r['noise']:.1%} | {r['iterations']} |"
        for name, r in found.items()
    ]


def _micro(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Collectives by themselves (NeuronaBox, table 1)", "",
        "Overhead: what an emulated call takes over what the emulation was told to take (the time of the real run just "
        f"before it, exactly for its sizes), as the script sees both, from before the call to its return; "
        f"bar {_MICRO_BAR:.0%}. Medians of {found['rounds']} rounds of a real and an emulated run. Noise: by how "
        "much two real runs in succession differ.", "",
        "| collective | bytes | told (real) | emulated | overhead | noise |",
        "|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    lines += [
        f"| {r['collective']} | {r['bytes']} | {1e3 * r['told_s']:.3f} ms | {1e3 * r['emulated_s']:.3f} ms "
        f"| {r['overhead']:+.1%} | {r['noise']:.1%} |"
        for r in found["rows"]
    ]
    return lines


def _curve(found: Mapping[str, Any]) -> list[str]:
    lines = ["## Delay of every all-reduce (NeuronaBox, figure 4)"]
    for name, curve in found.items():
        errors = [abs(e) for e in curve["errors"]]
        knees = curve["predicted_knee_s"] / curve["emulated_knee_s"] - 1
        lines += [
            "", f"**{name}**: predicted over emulated mean {sum(errors) / len(errors):.1%}, largest {max(errors):.1%} "
            f"off (bar {_CURVE_BAR:.0%}). Knee {1e3 * curve['emulated_knee_s']:.2f} ms emulated, "
            f"{1e3 * curve['predicted_knee_s']:.2f} ms predicted, {knees:+.0%} (bar {_KNEE_BAR:.0%}). By the "
            f"timeline's gradients {curve['felt']:.0f} all-reduces are felt at first and {curve['felt_at_most']:.0f} "
            f"at last; {1e3 * curve['hidden_s']:.2f} ms are hidden behind backward.", "",
            "| delay | emulated | predicted | error |", "|--:|--:|--:|--:|",
        ]  # fmt: skip
        for delay_s, emulated_s, predicted_s in zip(
            curve["delays_s"], curve["emulated_s"], curve["predicted_s"], strict=True
        ):
            lines.append(
                f"| {1e3 * delay_s:.0f} ms | {1e3 * emulated_s:.1f} ms | {1e3 * predicted_s:.1f} ms "
                f"| {predicted_s / emulated_s - 1:+.1%} |"
            )
    return lines


def _what_if(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Other conditions", "",
        "Predicted from the first run alone; no bar. All-reduces at first take three times what gloo's do here.", "",
        "| condition | emulated | predicted | error |", "|---|--:|--:|--:|",
    ]  # fmt: skip
    return lines + [
        f"| {name} | {1e3 * r['emulated_s']:.1f} ms | {1e3 * r['predicted_s']:.1f} ms "
        f"| {r['predicted_s'] / r['emulated_s'] - 1:+.1%} |"
        for name, r in found.items()
    ]


def _scale(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Scale", "", f"Small all-reduces that take no time in the model; bar {_CALLS_BAR} per second.", "",
        "| ranks | calls per second | peak memory |", "|--:|--:|--:|",
    ]  # fmt: skip
    return lines + [
        f"| {ranks} | {r['calls_per_s']:.0f} | {r['peak_memory_bytes'] / 2**20:.0f} MiB |" for ranks, r in found.items()
    ]


def _memory(found: Mapping[str, Any]) -> list[str]:
    lines = [
        "## Peak memory of a rank", "",
        "Since it joined its world, without the code of libraries: resident memory of a real and of an emulated run, "
        "and what was predicted. Of the prediction, what libraries take for themselves is measured on the same script "
        "with a model of next to no size.", "",
        "| script | real | emulated | predicted | of it the libraries' own | predicted over emulated |",
        "|---|--:|--:|--:|--:|--:|",
    ]  # fmt: skip
    for name, r in found.items():
        sizes = [f"{r[key] / 2**20:.0f} MiB" if key in r else "" for key in ("real_bytes", "emulated_bytes")]
        lines.append(
            f"| {name} | {' | '.join(sizes)} | {r['predicted_bytes'] / 2**20:.0f} MiB "
            f"| {r['context_bytes'] / 2**20:.0f} MiB | {r['predicted_bytes'] / r['emulated_bytes'] - 1:+.1%} |"
        )
    return lines


def _missed(report: Mapping[str, Any]) -> list[str]:
    """What is missing or missed: every figure of the run that is described above it."""
    lines = [
        "## What is missing or missed", "",
        "- The machine: two cores of a shared host that slow each other, at times for minutes or hours. Steps, hosts "
        "and the micro-benchmark are therefore compared in turns, and what an emulated call keeps of the core is an "
        "amount of work; prices are still measured minutes before. Parts are run one by one, and each stays until it "
        "is run again.",
    ]  # fmt: skip
    if steps := report.get("steps"):
        lines.append(
            f"- Steps: {_met({name: r['both_error'] for name, r in steps.items()}, _STEP_BAR)}. Each rank by itself is "
            f"off by {_span([r['each_error'] for r in steps.values()])}: these cores run faster while their neighbour "
            "waits, and only real ranks wait together."
        )
    if rows := report.get("micro", {}).get("rows"):
        errors = {f"{r['collective']} of {r['bytes']} bytes": r["overhead"] for r in rows}
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
        errors = {name: sum(map(abs, c["errors"])) / len(c["errors"]) for name, c in curves.items()}
        lines.append(f"- The curve: {_met(errors, _CURVE_BAR)}.")
    if memory := report.get("memory"):
        errors = [r["predicted_bytes"] / r["emulated_bytes"] - 1 for name, r in memory.items() if "fsdp" in name]
        if errors:
            lines.append(
                f"- Memory under FSDP2: predicted off by {_span(errors)}; the largest moment of every part is added "
                "up, though not all come together."
            )
    return lines


def _met(errors: Mapping[str, float], bar: float) -> str:
    """How many are within a bar, and the others by name."""
    missed = [f"{name} {error:+.1%}" for name, error in errors.items() if abs(error) > bar]
    within = (
        f"{len(errors) - len(missed)} of {len(errors)} within the bar of {bar:.0%}, all {_span([*errors.values()])}"
    )
    return f"{within}; missed by {', '.join(missed)}" if missed else within


def _span(errors: Sequence[float]) -> str:
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
