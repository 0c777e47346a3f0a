"""Schedules run their passes in the order that they did when they were last looked at."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import zip_longest
from types import FrameType

from known_orders import TABLE, entries

MEANT = "if the change is meant to move passes, run `python tests/schedule/known_orders.py` and review the difference"
MOST_S = 20.0
"""Ten times the processor time that all of the table takes: what runs longer does not end."""


@contextmanager
def ends() -> Iterator[None]:
    """Fail what takes too much processor time: a search for a free slot may go on for ever."""

    def stop(signal_number: int, frame: FrameType | None) -> None:
        raise AssertionError(f"constructing schedules took more than {MOST_S:g} s")

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, MOST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_orders_and_figures_are_those_of_the_table() -> None:
    then = f"{TABLE.read_text()}\n".splitlines()
    with ends():
        now = (line for entry in entries() for line in f"{entry}\n".splitlines())
        for number, (new, old) in enumerate(zip_longest(now, then)):
            assert new == old, f"line {number} moved from\n{old}\nto\n{new}\n{MEANT}"
