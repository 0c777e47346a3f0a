"""The command line: `perfmodel COMMAND ...`. Imports stay lazy so that --help is immediate."""

import gc
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from perfmodel._lazy import lazy_names
from perfmodel.cli._interrupts import interruptible

if TYPE_CHECKING:
    from perfmodel.cli._examples import examples
    from perfmodel.cli._files import complete_from_job
    from perfmodel.cli._idle_flags import IDLE_FLAGS
    from perfmodel.cli._init import samples
    from perfmodel.cli._main import given, parser, parsers
    from perfmodel.cli._vocabulary import VOCABULARY, vocabulary

# The commands as data, for tests and the reference.
__getattr__, __dir__ = lazy_names(__name__)

COLLECTED_EVERY: Final = 100_000
"""Objects that a process makes between two searches for reference cycles (Python's default is
700)."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 ok, 2 bad input, 130 interrupted).

    Args:
        argv: the command's words; if not given they are the process's, whose interrupts end in one
            line.
    """
    if argv is None:
        # Importing JAX makes half a million objects that all stay: at Python's default, looking for
        # garbage among them takes a fifth of a command's time.
        gc.set_threshold(COLLECTED_EVERY)
        return interruptible(_dispatch)
    return _dispatch(argv)


def _dispatch(argv: Sequence[str] | None = None) -> int:
    from perfmodel.cli._main import run

    return run(argv)
