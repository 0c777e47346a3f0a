"""Reads reports of Megatron-Core's straggler detector (`--log-straggler`): times and clocks across
ranks."""

import re
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Final

from perfmodel.ingest.logs._log import ClockRange, PhaseTimer

# `MnRtt/Rnk: 3453.08ms/8 | MxRtt/Rnk: 3468.20ms/0 | ...` (megatron/core/README_STRAGGLER.md): Mn is
# the least of all ranks, Mx the largest.
_FIGURE: Final = re.compile(r"\b(Mn|Mx)(Rtt|DRtt|Clk)/Rnk: ([\d.]+)(?:ms|MHz)/\d+")
_MARK: Final = "MnRtt/Rnk"


def straggler_timers(lines: Sequence[str]) -> dict[str, PhaseTimer]:
    """Medians over the reports, by phase: `forward` passes of a step, and the loading of its
    `data`."""
    least, most = _medians(lines)
    timers = {}
    for figure, phase in (("Rtt", "forward"), ("DRtt", "data")):
        if figure in least and figure in most:
            timers[phase] = PhaseTimer(least_s=least[figure] / 1000, most_s=most[figure] / 1000)
    return timers


def straggler_clocks(lines: Sequence[str]) -> ClockRange | None:
    """Medians over the reports of the lowest and the highest clock of any rank; None without
    reports."""
    least, most = _medians(lines)
    if "Clk" not in least or "Clk" not in most:
        return None
    return ClockRange(least_hz=least["Clk"] * 1e6, most_hz=most["Clk"] * 1e6)


def _medians(lines: Sequence[str]) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the least and of the largest value of each figure, in the units of the reports."""
    least: dict[str, list[float]] = defaultdict(list)
    most: dict[str, list[float]] = defaultdict(list)
    for line in lines:
        if _MARK not in line:
            continue
        for extreme, figure, value in _FIGURE.findall(line):
            reported = least if extreme == "Mn" else most
            reported[figure].append(float(value))
    least_medians = {figure: median(values) for figure, values in least.items()}
    most_medians = {figure: median(values) for figure, values in most.items()}
    return least_medians, most_medians
