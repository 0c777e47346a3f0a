"""The package's exceptions: each names what is wrong, where, and what to do about it."""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import Final

MOST_NAMES: Final = 40
"""Known names that a message lists in full."""
FEW_NAMES: Final = 12
"""Examples that it lists of more."""


class PerfModelError(ValueError):
    """Bad input: one clear line that names the offending thing and the remedy.

    The command line prints the message to stderr and exits with status 2.
    """


class UnknownNameError(PerfModelError):
    """A name that no catalog entry, op family or schedule carries."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        known = sorted(set(known))
        close = get_close_matches(name.lower(), [k.lower() for k in known], n=3, cutoff=0.5)
        names = [k for k in known if k.lower() in close]
        hint = f"did you mean {' or '.join(map(repr, names))}?" if names else f"known: {_some(known)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


def _some(names: list[str]) -> str:
    if len(names) <= MOST_NAMES:
        return ", ".join(names)
    return f"{', '.join(names[:: len(names) // FEW_NAMES + 1])} and more; 'perfmodel catalog' lists all"


class LayoutError(PerfModelError):
    """A layout that cannot run this model on this cluster."""


class TableError(PerfModelError):
    """A measurement table that is malformed, truncated or has impossible values."""


class CalibrationError(PerfModelError):
    """Weights or fitted constants that are missing, truncated or of another schema version."""


class NoDataError(PerfModelError):
    """`--strict`: a prediction would rest on extrapolation to something never measured."""
