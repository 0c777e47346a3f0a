"""Schedules as text: one line per device, its passes in order.

    # two devices, whole backward passes; what follows a hash sign is not read
    stages 0 | 1
    F0 F1 B0 B1
    F0 B0 F1 B1

The first line gives the stage of every chunk of every device, devices separated by `|`. A pass is
written `F0` (forward of micro-batch 0), `B0` (backward), `BI0` and `BW0` (input and weight
gradient); `F0.1` is on chunk 1; `F0-3` takes micro-batches 0 to 3 in one go; `F2+B0` run together;
`B0!` is followed by an update of the weights. `slices 2` on a line of its own tells that every two
micro-batches are slices of one sequence.
"""

import re
from itertools import chain, pairwise
from pathlib import Path

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.files import read_text
from perfmodel.schedule._construct import Work, from_orders
from perfmodel.schedule._schedule import Phase, Schedule

_PASS = re.compile(r"(BI|BW|F|B)(\d+)(?:-(\d+))?(?:\.(\d+))?(!?)")
"""Pattern of a pass: phase, first and last micro-batch, chunk, update."""
_PHASES = {phase.symbol: phase for phase in Phase}


def read_schedule(path: Path) -> Schedule:
    """The schedule in a text file.

    Raises:
        PerfModelError: no such file, or a line that cannot be read, with its number.
    """
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise PerfModelError(f"schedule file {path} cannot be read: {error}") from None
    return parse_schedule(text, str(path))


def _slices(fields: list[str]) -> int:
    """The number of slices that a line states."""
    (slices,) = map(int, fields)
    if slices < 1:
        raise ValueError(f"slices {slices} must be at least 1")
    return slices


def parse_schedule(text: str, name: str = "custom") -> Schedule:
    """The schedule that a text describes; it may still be wrong in ways that `check` finds.

    Raises:
        PerfModelError: a line that cannot be read, with its number.
    """
    # A line is `stages ...`, `slices N`, or the passes of the next device.
    stage: list[list[int]] | None = None
    slices = 1
    orders: list[list[Work]] = []
    for number, line in enumerate(text.splitlines(), 1):
        fields = line.partition("#")[0].split()
        if not fields:
            continue
        try:
            if fields[0] == "stages":
                by_device = " ".join(fields[1:]).split("|")
                stage = [list(map(int, chunks.split())) for chunks in by_device]
            elif fields[0] == "slices":
                slices = _slices(fields[1:])
            else:
                orders.append(list(chain.from_iterable(map(_works, fields))))
        except ValueError as error:
            raise PerfModelError(f"schedule {name}, line {number}: {error}") from None

    # The lines must be consistent.
    if stage is None:
        raise PerfModelError(
            f"schedule {name}: the line with the stages is missing, such as 'stages 0 | 1' for two devices"
        )
    stages_per_device = {len(chunks) for chunks in stage}
    if len(stages_per_device) != 1 or 0 in stages_per_device or min(map(min, stage)) < 0:
        raise PerfModelError(
            f"schedule {name}: every device needs the same number of stages, at least one, each numbered from 0"
        )
    if len(orders) != len(stage):
        raise PerfModelError(
            f"schedule {name}: give one line of passes per device, got {len(orders)} lines for {len(stage)} devices"
        )

    # The text does not say how many micro-batches there are; the highest number does.
    ends = (work.micro_batch + work.span for work in chain.from_iterable(orders))
    micro_batches = max(ends, default=0)
    if micro_batches % slices:
        raise PerfModelError(
            f"schedule {name}: {micro_batches} micro-batches are not a multiple of {slices} slices"
        )
    return from_orders(name, np.array(stage), micro_batches, orders, slices=slices)


def _works(word: str) -> list[Work]:
    """The passes of a word: one, or a pair joined by a plus sign."""
    # All but the last are paired with the pass that follows.
    parts = word.split("+")
    if len(parts) > 2:
        raise ValueError(f"{word!r} joins more than two passes")
    return [_work(part, paired=i + 1 < len(parts)) for i, part in enumerate(parts)]


def _work(word: str, paired: bool) -> Work:
    """The pass that `_PASS` finds in a word."""
    match = _PASS.fullmatch(word)
    if not match:
        raise ValueError(f"{word!r} is not a pass such as F0, B3, BI3, BW3, F0.1, F0-1 or B3!")
    symbol, first, last, chunk, update = match.groups()
    span = int(last or first) - int(first) + 1
    if span < 1:
        raise ValueError(f"{word!r} has its micro-batches in descending order")
    return Work(_PHASES[symbol], int(chunk or 0), int(first), span, paired, bool(update))


def schedule_text(schedule: Schedule) -> str:
    """A schedule in the form that `parse_schedule` reads."""
    stages_of_devices = [" ".join(map(str, chunks)) for chunks in schedule.stage.tolist()]
    lines = ["stages " + " | ".join(stages_of_devices)]
    if schedule.slices > 1:
        lines.append(f"slices {schedule.slices}")
    for first, end in pairwise(schedule.offsets.tolist()):
        line = ""
        for i in range(first, end):
            separator = "+" if schedule.paired[i] else " "
            line += _word(schedule, i) + separator
        lines.append(line.strip())
    return "\n".join(lines) + "\n"


def _word(schedule: Schedule, index: int) -> str:
    """One instruction as `_work` reads it."""
    instruction = schedule[index]
    first = instruction.micro_batch
    last = f"-{first + instruction.span - 1}" if instruction.span > 1 else ""
    chunk = f".{instruction.chunk}" if instruction.chunk else ""
    update = "!" if schedule.updates[index] else ""
    return f"{instruction.phase.symbol}{first}{last}{chunk}{update}"
