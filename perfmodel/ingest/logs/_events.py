"""Events that a log reports between its lines about steps: checkpoints, evaluations, restarts,
skipped updates, timers and memory."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import Final, NamedTuple

from perfmodel.ingest.logs._log import EventKind, LogEvent, LoggedStep, PhaseTimer
from perfmodel.ingest.logs._text import number
from perfmodel.units import GB, GIB, MIB

# ---- checkpoints, evaluations, skipped updates ----

_KINDS: Final[tuple[tuple[EventKind, re.Pattern[str]], ...]] = (
    (
        "checkpoint",
        re.compile(
            r"successfully saved checkpoint|finished saving the checkpoint|checkpoint saved|saved .*model_states\.pt|"
            r"saved (?:a )?checkpoint|saving (?:model |the |a full |a )?checkpoint",
            re.IGNORECASE,
        ),
    ),
    (
        "evaluation",
        re.compile(
            r"validation loss at iteration|\*+ Running Evaluation|\bEval (?:metrics|time)/|'eval_loss'|"
            r"\bvalidate step:|Progress on:eval|eval metrics after step|"
            r"\bstep \d+: train loss [\d.]+, val loss|\bval loss [\d.]+|valid on 'valid' subset",
            re.IGNORECASE,
        ),
    ),
    (
        "overflow",
        re.compile(r"overflow!? .*skipping step|Grad overflow on iteration", re.IGNORECASE),
    ),
    (
        "allocator_retry",
        re.compile(
            r"memory allocation retries|cudaMalloc retries|pytorch allocator cache flushes", re.I
        ),
    ),
)
_SAVE_SECONDS: Final = re.compile(r"finished saving the checkpoint.*?in ([\d.]+) ?s", re.IGNORECASE)
_SAVE_TIMER: Final = re.compile(r"save-checkpoint \.+: (?:\(([\d.]+), )?([\d.]+)\)?")


def events_of(lines: Sequence[str], steps: Mapping[int, LoggedStep]) -> tuple[LogEvent, ...]:
    """Events in order; each kind is counted once between two lines about steps.

    Args:
        lines: lines of the log.
        steps: step of each line that reports one, by line number.
    """
    events: dict[tuple[str, int], LogEvent] = {}
    at_step = 0
    for at, line in enumerate(lines):
        step = steps.get(at)
        if step is not None:
            # A step that was passed before: the run was started again from a checkpoint.
            if step.step < at_step:
                events["restart", step.step] = LogEvent(kind="restart", after_step=step.step)
            at_step = step.step
        for kind, pattern in _KINDS:
            if pattern.search(line):
                # Every rank may report the same checkpoint, often in several words: one event of a
                # kind after a step.
                events.setdefault((kind, at_step), LogEvent(kind=kind, after_step=at_step))
        seconds = _save_seconds(line)
        if seconds is not None:
            # The line with the duration says most about a checkpoint, and replaces earlier notes of
            # it.
            events["checkpoint", at_step] = LogEvent(
                kind="checkpoint", after_step=at_step, seconds=seconds
            )
    return tuple(events.values())


def _save_seconds(line: str) -> float | None:
    """Seconds that a checkpoint took, if the line states them."""
    timer = _SAVE_TIMER.search(line)
    if timer is not None:
        return float(timer[2]) / 1000
    said = _SAVE_SECONDS.search(line)
    return None if said is None else float(said[1])


# ---- timers of phases ----

_PHASE_OF_TIMER: Final = {
    "batch-generator": "data",
    "forward-compute": "compute",
    "backward-compute": "compute",
    "all-grads-sync": "gradient_sync",
    "grads-reduce-scatter": "gradient_sync",
    "params-all-gather": "weight_gather",
    "optimizer": "optimizer",
    # DeepSpeed, and its names until 2023
    "fwd": "compute",
    "forward": "compute",
    "bwd_inner": "compute",
    "backward_inner": "compute",
    "bwd_allreduce": "gradient_sync",
    "backward_allreduce": "gradient_sync",
    "step": "optimizer",
    # XTuner
    "data_time": "data",
}
_MINMAX: Final = re.compile(
    r"(?<![\w/-])([a-z][\w/-]*) \.{2,}: (?:\(([\d.]+), ([\d.]+)\)|([\d.]+))\s*$"
)
_DEEPSPEED_TIMERS: Final = re.compile(r"time \(ms\) \| ((?:fwd|forward): .*)$")
_XTUNER_TIMER: Final = re.compile(r"Iter\(train\).*\bdata_time: ([\d.]+)")


class _LoggedTimer(NamedTuple):
    """A timer of an iteration, as a line of a log states it."""

    name: str
    least_s: float
    """Of the rank that takes least."""
    most_s: float


def _timers_in(line: str) -> Iterator[_LoggedTimer]:
    """The timers that a line of a log states."""
    # Megatron prints (min, max) across ranks, or one number where it logs the maximum alone.
    across_ranks = _MINMAX.search(line)
    if across_ranks is not None:
        name, least, most, only = across_ranks.groups()
        yield _LoggedTimer(name, float(least or only) / 1000, float(most or only) / 1000)

    timer_line = _DEEPSPEED_TIMERS.search(line)
    for part in timer_line[1].split("|") if timer_line is not None else ():
        name, _, value = part.partition(":")
        time_ms = number(value)
        if time_ms is not None:
            yield _LoggedTimer(name.strip(), time_ms / 1000, time_ms / 1000)

    loader = _XTUNER_TIMER.search(line)
    if loader is not None:
        yield _LoggedTimer("data_time", float(loader[1]), float(loader[1]))


def timers_of(lines: Sequence[str]) -> dict[str, PhaseTimer]:
    """Medians of the timers of Megatron-LM (`--timing-log-level`), DeepSpeed
    (`wall_clock_breakdown`) and XTuner, by phase."""
    least_s: dict[str, list[float]] = defaultdict(list)
    most_s: dict[str, list[float]] = defaultdict(list)
    for timer in chain.from_iterable(map(_timers_in, lines)):
        least_s[timer.name].append(timer.least_s)
        most_s[timer.name].append(timer.most_s)

    timers: dict[str, PhaseTimer] = {}
    for name, phase in _PHASE_OF_TIMER.items():
        if name not in least_s:
            continue
        # Several timers make a phase (reduce-scatter beside all-reduce), so that their medians are
        # added. Medians leave out the first steps, which compile and warm up.
        before = timers.get(phase, PhaseTimer(least_s=0.0, most_s=0.0))
        timers[phase] = PhaseTimer(
            least_s=before.least_s + median(least_s[name]),
            most_s=before.most_s + median(most_s[name]),
        )
    return timers


# ---- memory ----

_ALLOCATED: Final = (
    # Megatron prints MiB without a unit; all others name theirs, or stand for one framework.
    (re.compile(r"max allocated: ([\d.]+)(?! ?[GM]i?B)"), MIB),
    (re.compile(r"Peak allocated:? ([\d.]+)MiB"), MIB),
    (re.compile(r"MaxMemAllocated=([\d.]+)GB"), GIB),
    (re.compile(r"memory/peak_allocated_mem: ([\d.]+)"), GB),
    (re.compile(r"Using \(GB\) ([\d.]+) /"), GB),
    (re.compile(r"\bpeak_memory_usage: ([\d.]+)\b(?! ?[GM])"), 1.0),
    (re.compile(r"\bpeak_memory_alloc:([\d.]+)"), GIB),
    (re.compile(r"\| mem ([\d.]+) GiB"), GIB),
    (re.compile(r"Iter\(train\).*\bmemory: (\d+)"), MIB),
    (re.compile(r"memory/max_allocated \(GiB\)': ([\d.]+)"), GIB),
    (re.compile(r"\bmax_memory_allocated: ([\d.]+)(?=, | ?GB)"), GIB),
)
_RESERVED: Final = (
    (re.compile(r"max reserved: ([\d.]+)(?! ?[GM]i?B)"), MIB),
    (re.compile(r"Peak reserved:? ([\d.]+)MiB"), MIB),
    (re.compile(r"\bmemory:\s*([\d.]+)GiB"), GIB),
    (re.compile(r"cuda_max_memory_reserved: ([\d.]+)G"), GB),
    (re.compile(r"memory/peak_reserved_mem: ([\d.]+)"), GB),
    (re.compile(r"\bpeak_memory_reserved:([\d.]+)"), GIB),
    (re.compile(r"""['"]memory\(GiB\)['"]: ['"]?([\d.]+)"""), GIB),
    (re.compile(r"memory/device_reserved \(GiB\)': ([\d.]+)"), GIB),
    (re.compile(r"\b(?:gpu_)?max_memory_reserved: ([\d.]+)(?=, | ?GB)"), GIB),
)
"""Patterns of memory figures in lines, with their units. DeepSpeed writes GB for GiB, Composer GB
for 10^9 bytes."""


def peak_bytes(lines: Sequence[str]) -> tuple[float | None, float | None]:
    """The largest peaks in a log: bytes of tensors, and bytes that the allocator holds for them."""
    return _largest(lines, _ALLOCATED), _largest(lines, _RESERVED)


def _largest(
    lines: Sequence[str], patterns: Sequence[tuple[re.Pattern[str], float]]
) -> float | None:
    largest = None
    for line in lines:
        for pattern, unit in patterns:
            for value in pattern.findall(line):
                size_bytes = float(value) * unit
                largest = size_bytes if largest is None else max(largest, size_bytes)
    return largest
