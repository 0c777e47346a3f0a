"""Reads logs: recognises the format, and returns the steps and other events."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from perfmodel.errors import TableError
from perfmodel.ingest._files import read_bytes
from perfmodel.ingest.logs._events import events_of, peak_bytes, timers_of
from perfmodel.ingest.logs._formats import FORMATS
from perfmodel.ingest.logs._log import LOG_FORMATS, LoggedStep, TrainingLog
from perfmodel.ingest.logs._settings import settings_of
from perfmodel.ingest.logs._stragglers import straggler_clocks, straggler_timers
from perfmodel.ingest.logs._text import plain_lines, process_of

_FIRST_BYTES: Final = 1000
_ZERO_SHARE: Final = 0.2
"""Share of zero bytes at the start of a file from which it is in UTF-16 or no text at all; a broken
disk leaves a few in a log."""


def read_log(path: Path | str) -> TrainingLog:
    """Read the log of a training run; the framework is recognised by its lines about steps.

    Args:
        path: file of the job's output, compressed or not, of one rank or of all ranks.

    Raises:
        TableError: no such file, or a file without a line about a training step.
    """
    path = Path(path)
    # Logs mix the output of many processes; a damaged character should not cost the log.
    content = read_bytes(path)
    start = content[:_FIRST_BYTES]
    if start.count(0) > _ZERO_SHARE * len(start):
        raise TableError(f"{path}: not a text file in UTF-8; convert it, or give the log itself")
    return parse_log(content.decode("utf-8-sig", errors="replace"), str(path))


def parse_log(text: str, place: str = "log") -> TrainingLog:
    """Read the text of a log, see `read_log`.

    Args:
        text: text of the log.
        place: name of the log in errors.
    """
    lines = plain_lines(text)
    # Formats are tried from the most particular on; the marks of one may match a line of another
    # that holds no step.
    for form in FORMATS:
        if not any(form.marks.search(line) for line in lines):
            continue
        reported = dict(form.read(lines))
        if not reported:
            continue
        steps = _each_once(reported, [process_of(lines[line_number]) for line_number in reported])
        allocated_bytes, reserved_bytes = peak_bytes(lines)
        return TrainingLog(
            path=place,
            format=form.name,
            steps=tuple(form.retime(steps).values()),
            events=events_of(lines, steps),
            settings=settings_of(lines, reported),
            timers=straggler_timers(lines) | timers_of(lines),
            clocks=straggler_clocks(lines),
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
        )
    if any("'train_runtime'" in line or "'learning_rate'" in line for line in lines):
        raise TableError(
            f"{place}: no line about a training step: Hugging Face's Trainer prints times only in its progress "
            "bar; unset `disable_tqdm`, or include standard error in the log"
        )
    raise TableError(
        f"{place}: no line about a training step; give the output of a job that ran one of {', '.join(LOG_FORMATS)}"
    )


def _each_once(
    reported: Mapping[int, LoggedStep], processes: Sequence[str]
) -> dict[int, LoggedStep]:
    """Lines about steps, by number of the line, each step once.

    A progress bar writes several lines about one step, and where every rank writes its own, some
    are ahead of others. One process leads: lines of others count only once it has fallen silent, as
    after a restart on other nodes.

    Args:
        reported: lines about steps.
        processes: number of processes that wrote each line.
    """
    last_line_of = {process: place for place, process in enumerate(processes)}
    distinct: dict[int, LoggedStep] = {}
    leader: str | None = None
    followers: set[str] = set()
    last_step: int | None = None
    for place, (line_number, step) in enumerate(reported.items()):
        process = processes[place]
        if leader is None:
            leader = process
        if process != leader:
            # Ranks write at different speeds, so that lines of two ranks about
            # one step may enclose those about the next.
            leads_still = last_line_of[leader] > place
            is_late = process in followers and last_step is not None and step.step <= last_step
            if leads_still or is_late:
                followers.add(process)
                continue
            leader = process
        if step.step != last_step:
            distinct[line_number] = step
            last_step = step.step
    return distinct
