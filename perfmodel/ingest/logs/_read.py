"""From the text of a log to what it holds."""

from pathlib import Path

from perfmodel.errors import TableError
from perfmodel.ingest._files import read_bytes
from perfmodel.ingest.logs._events import events_of, peak_bytes, timers_of
from perfmodel.ingest.logs._formats import FORMATS
from perfmodel.ingest.logs._log import LOG_FORMATS, LoggedStep, TrainingLog
from perfmodel.ingest.logs._settings import settings_of
from perfmodel.ingest.logs._text import plain_lines


def read_log(path: Path | str) -> TrainingLog:
    """Read the log of a training run; the framework is known by the lines in which it reports steps.

    Args:
        path: what the job printed, compressed or not; of one rank or of all of them.

    Raises:
        TableError: no such file, or a file without a line about a training step.
    """
    path = Path(path)
    # Logs mix the output of many processes; a damaged character should not cost the log.
    return parse_log(read_bytes(path).decode(errors="replace"), str(path))


def parse_log(text: str, place: str = "log") -> TrainingLog:
    """Read the text of a log, see `read_log`.

    Args:
        text: of the log.
        place: what errors call it.
    """
    lines = plain_lines(text)
    for form in FORMATS:
        if not any(form.marks.search(line) for line in lines):
            continue
        reported = dict(form.read(lines))
        if not reported:
            continue
        steps = _each_once(reported)
        allocated_bytes, reserved_bytes = peak_bytes(lines)
        return TrainingLog(
            path=place,
            format=form.name,
            steps=tuple(form.retime(steps).values()),
            events=events_of(lines, steps),
            settings=settings_of(lines, reported),
            timers=timers_of(lines),
            allocated_bytes=allocated_bytes,
            reserved_bytes=reserved_bytes,
        )
    raise TableError(
        f"{place}: no line about a training step; give what the job printed, by one of {', '.join(LOG_FORMATS)}"
    )


def _each_once(reported: dict[int, LoggedStep]) -> dict[int, LoggedStep]:
    """Lines about steps, by number of the line, without those that repeat the step before them.

    Several ranks may write the same line, and a progress bar writes several about one step.
    """
    distinct: dict[int, LoggedStep] = {}
    last_step: int | None = None
    for line_number, step in reported.items():
        if step.step != last_step:
            distinct[line_number] = step
            last_step = step.step
    return distinct
