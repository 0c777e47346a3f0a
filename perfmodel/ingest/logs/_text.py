"""Numbers, durations, clocks and fields in lines of logs."""

import re
from datetime import datetime
from typing import Final

_ANSI: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CLOCKS: Final = (
    (re.compile(r"(\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?"), "%Y-%m-%d %H:%M:%S"),
    (re.compile(r"\b(\d\d/\d\d/\d{4} \d\d:\d\d:\d\d)(?:[.,](\d{1,6}))?"), "%m/%d/%Y %H:%M:%S"),
)
_SUFFIXES: Final = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15}
_NUMBER: Final = re.compile(
    r"([-+]?(?:\d[\d,]*\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)\s?([KkMmGgBbTtPp]?)(?:i?[Bb])?(?=$|[\s%/|\]),;])"
)


def plain_lines(text: str) -> list[str]:
    """Lines without colours; a progress bar that rewrites its line gives one line for each
    state."""
    return _ANSI.sub("", text).replace("\r", "\n").split("\n")


def number(text: str) -> float | None:
    """The number that a text begins with: `1,234`, `1.5E+01`, or shortened as in `23.4K`; None
    where there is none."""
    match = _NUMBER.match(text.strip())
    if match is None:
        return None
    return float(match[1].replace(",", "")) * _SUFFIXES[match[2].lower()]


def clock_seconds(line: str) -> float | None:
    """The date and time in a line, in seconds; None where it has none."""
    # Only differences between lines matter, so that the time zone and the epoch do not.
    for pattern, form in _CLOCKS:
        match = pattern.search(line)
        if match is None:
            continue
        try:
            moment = datetime.strptime(match[1].replace("T", " "), form)
        except ValueError:
            continue
        fraction = float(f"0.{match[2]}") if match[2] else 0.0
        return (moment - datetime(2000, 1, 1)).total_seconds() + fraction
    return None


_UNIT_S: Final = {"d": 86400, "h": 3600, "m": 60, "s": 1}


def duration_seconds(text: str) -> float:
    """Seconds of `1:02:03`, `02:03`, `1 day, 2:03:04` or `1h 2m 3s`."""
    units = re.findall(r"(\d+) ?([dhms])", text)
    clock = re.search(r"\d+(?::\d+)+", text)
    seconds = 0.0
    for count, unit in units:
        # The day of `1 day, 2:03:04` stands before a clock.
        if clock is None or unit == "d":
            seconds += int(count) * _UNIT_S[unit]
    if clock is None:
        return seconds
    clock_s = 0.0
    for part in clock[0].split(":"):
        clock_s = clock_s * 60 + float(part)
    return seconds + clock_s


_PROCESSES: Final = (
    # Several may stand in one line, from the launcher that wraps all to the rank itself.
    re.compile(r"\[rank(\d+)\]"),
    re.compile(r"\[default(\d+)\]"),
    re.compile(r"^\[(\d+),(\d+)\]<std"),
    re.compile(r"\brank(\d+)\[\d+\]"),
    re.compile(r"\|(DP=\d+\|PP=\d+\|TP=\d+)"),
    re.compile(r"^\((?:\w+ )?(pid=\d+(?:, ip=[\d.]+)?)\)"),
    re.compile(r"^ *(\d+): "),
    re.compile(r"^([\w.-]+) ?\| "),
)
"""Patterns of the process names that torchrun, mpirun, Composer, nanotron, Ray, srun and Docker put
before a line."""


def process_of(line: str) -> str:
    """The process that wrote a line, as its launcher names it; empty if the line does not name
    one."""
    # Launchers nest (srun starts torchrun): all names together tell the process, as ranks repeat on
    # every node.
    names = []
    for pattern in _PROCESSES:
        match = pattern.search(line)
        if match is not None:
            names.append(" ".join(match.groups()))
    return "/".join(names)


def piped_fields(line: str) -> dict[str, str]:
    """Fields of a line such as `loss scale: 1.0 | grad norm: 2.3 |`, by name in lower case with
    underscores.

    Names and values are separated by a colon or an equals sign, fields by a bar, or in a progress
    bar by a comma.
    """
    fields = {}
    for part in re.split(r"\||, (?=[a-z_]+[ a-z_]*=)", line):
        match = re.match(r"\s*(.*?)\s*[:=]\s*(.*?)\s*$", part)
        if match is not None:
            name = re.sub(r"[^a-z0-9]+", "_", match[1].lower()).strip("_")
            # The first field of a name counts; a later one in the same line belongs to another
            # framework.
            fields.setdefault(name, match[2].rstrip("]"))
    return fields
