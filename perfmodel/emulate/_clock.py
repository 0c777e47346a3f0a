"""Precise waiting and keeping a core busy, without the interpreter's lock."""

import ctypes
import os
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

_PR_SET_TIMERSLACK: Final = 29
# Messages of a collective pass through the caches; a busy loop would leave the script's data there
# untouched.
_CHUNK: Final = 16384
"""Bytes of one copy while a core is kept busy, about a microsecond."""
_CHUNKS: Final = 16
"""Number of chunks that are copied in turn, which together occupy as much cache as messages do."""
_WARM_UP: Final = 100
_SLICE_S: Final = 5e-4
_MAX_SLICES: Final = 64
_SHORTEST_SLEEP_S: Final = 5e-6
_WATCHED_S: Final = 1.5e-4
"""Seconds before its end from which a wait polls the clock, because waking up may take this
long."""


def fine_timers() -> None:
    """Make this thread's sleeps precise; Linux otherwise rounds them up by 50 microseconds."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_TIMERSLACK, 1, 0, 0, 0)


def own_threads() -> set[int]:
    """Ids of the threads of this process; empty if the system does not report them."""
    try:
        return {int(path.name) for path in Path("/proc/self/task").iterdir()}
    except OSError:
        return set()


def come_first(threads: Iterable[int]) -> None:
    """Give threads priority on their core; 0 is the calling thread.

    Real-time priority, above that of ranks on emulated hosts. Without the right to it nothing
    changes.
    """
    # A library's thread that wakes for a message would else wait for the script's time slice to
    # end.
    if hasattr(os, "sched_setscheduler"):
        for thread in threads:
            with suppress(OSError):
                os.sched_setscheduler(thread, os.SCHED_RR, os.sched_param(2))


class Core:
    """Keeps the thread's core busy like a collective library, by copying data."""

    def __init__(self, torch: Any, copies_per_s: float = 0.0) -> None:
        """
        Args:
            torch: the module.
            copies_per_s: speed of the core on which processor times of collectives were measured; 0
                for this core. Work is then the same number of copies, and takes longer while this
                core is slower than that one (shared with others, or at a lower clock), as the
                library's own work would.
        """
        self._from = torch.zeros(_CHUNKS * _CHUNK, dtype=torch.uint8)
        self._to = torch.empty(_CHUNK, dtype=torch.uint8)
        self._chunks = self._from.split(_CHUNK)
        self._next = 0
        self._copies_per_s = copies_per_s

    def copies_per_s(self, copies: int = 500) -> float:
        """Measure this core's current copies per second of CPU time."""
        # Processor time, not wall time: other processes on the core do not count as its speed.
        for _ in range(_WARM_UP):
            self._copy()
        begin_s = time.thread_time()
        for _ in range(copies):
            self._copy()
        return copies / max(time.thread_time() - begin_s, 1e-9)

    def occupy(
        self, begin_s: float, delay_s: float, core_s: float, thread_s: float, waits: bool = False
    ) -> float:
        """Wait until `delay_s` after `begin_s`, with the core busy for `core_s` of it.

        A collective's messages follow one another, so other work of the core in the meantime adds
        to its duration.

        Args:
            begin_s: start of the work on `time.perf_counter`.
            delay_s: duration of the work on an idle core.
            core_s: processor time of it.
            thread_s: this thread's processor time when the collective's first work began.
            waits: the script's own thread, which would only wait, may watch the clock.

        Returns:
            When it was due; to wake may have taken longer.
        """
        # Work and waiting take turns in slices, as a library's messages do.
        # One block of work followed by one long wait would stall the script longer at a stretch
        # than a library does.
        slices = max(1, min(_MAX_SLICES, int(delay_s / _SLICE_S)))
        lost_s = 0.0
        if core_s > 0:
            # The time up to here is the first part of the processor time.
            core_s = max(0.0, core_s - (time.thread_time() - thread_s))
        for number in range(1, slices + 1):
            if core_s > 0:
                lost_s += self._work(core_s / slices)
            # Each slice ends at its own moment, so that errors of single sleeps do not add up.
            sleep_until(
                begin_s + delay_s * number / slices + lost_s, watch=waits and number == slices
            )
        return begin_s + delay_s + lost_s

    def _work(self, core_s: float) -> float:
        """Work for a number of seconds, and return the excess of the actual time."""
        # With a reference rate the work is a number of copies, without one a processor time.
        begin_s = time.perf_counter()
        own_s = time.thread_time()
        if self._copies_per_s:
            for _ in range(round(core_s * self._copies_per_s)):
                self._copy()
            return time.perf_counter() - begin_s - core_s
        while time.thread_time() - own_s < core_s:
            self._copy()
        return (time.perf_counter() - begin_s) - (time.thread_time() - own_s)

    def _copy(self) -> None:
        self._to.copy_(self._chunks[self._next])
        self._next = (self._next + 1) % _CHUNKS


def sleep_until(end_s: float, watch: bool = False) -> None:
    """Sleep until a moment on `time.perf_counter`.

    Args:
        end_s: the moment.
        watch: keep to it more closely, by looking at the clock at last; other threads may run
            between the looks.
    """
    # Sleeping to the end would overshoot by the time that waking takes, so the last stretch is
    # watched.
    left_s = end_s - time.perf_counter() - (_WATCHED_S if watch else 0.0)
    if left_s > _SHORTEST_SLEEP_S:
        time.sleep(left_s)
    # Sleeping for no time lets other threads run, and comes back sooner than a real sleep.
    while watch and time.perf_counter() < end_s:
        time.sleep(0)
