"""The command line run in this process: the one way in which tests ask what a command prints."""

from typing import NamedTuple

import pytest

from perfmodel.cli import main


class Printed(NamedTuple):
    """Everything that a command answers."""

    status: int
    """Exit status: 0, or 2 for bad input."""
    out: str
    err: str


def run(capsys: pytest.CaptureFixture[str], *words: object) -> Printed:
    """Run `perfmodel WORDS...`, and return what it printed since the last call.

    The parser leaves by `SystemExit`, as a process does; its status is returned like any other.
    """
    try:
        status = main([str(word) for word in words])
    except SystemExit as stop:
        status = int(stop.code or 0)
    out, err = capsys.readouterr()
    return Printed(status, out, err)
