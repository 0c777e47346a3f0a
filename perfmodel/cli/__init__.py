"""The command line: `perfmodel COMMAND ...`. Imports stay lazy so that --help is immediate."""

from collections.abc import Sequence

from perfmodel.cli._interrupts import interruptible


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status (0 ok, 2 bad input, 130 interrupted).

    Args:
        argv: the command's words; if not given they are the process's, whose interrupts end in one line.
    """
    if argv is None:
        return interruptible(_dispatch)
    return _dispatch(argv)


def _dispatch(argv: Sequence[str] | None = None) -> int:
    from perfmodel.cli._main import run

    return run(argv)
