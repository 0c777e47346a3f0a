"""Labels that launchers, containers and schedulers put before every line of a log of nccl-tests."""

import re
from typing import Final

_LABEL: Final = re.compile(
    r"""\s*(?:
        \[?\d{4}-\d\d-\d\d[T\ ]\d\d:\d\d:\d\d[\d.,]*(?:Z|[+-]\d\d:?\d\d)?\]?  # a clock
          (?:\ std(?:out|err)\ [FP](?=\s|$))?  # of a container's log
        | \([\w.-]+:\d+\)               # host and rank
        | \[[^\]\s]*\](?:<\w+>)?:?          # mpirun --tag-output, mpiexec, kubectl --prefix
        | \(\S+,?\s*pid=\d+[^)]*\)       # Ray
        | \d+:(?=\s)                     # srun --label
        | [A-Za-z][\w./-]*(?:\ [\w.-]+)?\ *\|(?=\s|$)  # docker compose, stern: the container's name
        | [A-Za-z][\w.-]*(?:\[\d+\])?:(?=\s+[#\d]|\s*\#)  # pdsh, kubectl: the host's or the pod's name
    )\s?""",
    re.VERBOSE,
)
"""Labels that launchers and containers put before every line."""
_MOST_LABELS: Final = 3
HEADING: Final = re.compile(r"^([^#\n]*)#\s+size\s+count\s+type\b", re.MULTILINE)
_COLOURS: Final = re.compile(r"\x1b\[[\d;]*m")


def label_of_header(text: str) -> re.Pattern[str] | None:
    """The prefix of a table's heading, if all lines of the log begin with it; None without one.

    Launchers and tools that nobody listed label lines too. Numbers in a label (of processes, of a
    clock) may differ.
    """
    heading = HEADING.search(text)
    if heading is None or not heading[1].strip():
        return None
    return re.compile(
        re.sub(r"\d+", r"\\d+", re.escape(_COLOURS.sub("", heading[1]).rstrip())) + r"\s?"
    )


def without_label(raw: str, label_of_log: re.Pattern[str] | None) -> str:
    """A line without the prefix that a launcher put before it."""
    line = _COLOURS.sub("", raw)
    launcher_label = label_of_log.match(line) if label_of_log else None
    if launcher_label:
        line = line[launcher_label.end() :]
    # A clock of the container may stand before the launcher's own label.
    for _ in range(_MOST_LABELS):
        label = _LABEL.match(line)
        if label is None:
            break
        line = line[label.end() :]
    return line.strip()
