"""How much of the processor others took while something was timed."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

_PROC_STAT = Path("/proc/stat")
_TASKS = Path("/proc/self/task")
_IDLE_FIELDS = (3, 4)
"""Columns `idle` and `iowait` of a processor's line, after its name (proc(5))."""
_GUEST_FIELDS = 2
"""`guest` and `guest_nice` at the end are already part of `user` and `nice`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment; only differences mean anything."""

    wall_s: float
    own_s: float
    """Processor time of the measured processes."""
    busy_s: float
    """Processor time of everybody on the watched cores."""
    waited_s: float | None = None
    """Time that threads of the measured processes were ready but had no core; `None` if not known."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Processor time had and waited for, in seconds: of one process, or summed over several."""

    own_s: float
    waited_s: float | None

    @classmethod
    def of_this_process(cls) -> "Usage":
        return cls(time.process_time(), waited_s())

    def __add__(self, other: "Usage") -> "Usage":
        known = self.waited_s is not None and other.waited_s is not None
        return Usage(self.own_s + other.own_s, self.waited_s + other.waited_s if known else None)  # type: ignore[operator]


class Meter(Protocol):
    """Tells the interference between two readings."""

    @property
    def min_sample_s(self) -> float:
        """Shortest interval that the counters resolve."""
        ...

    def read(self, usage: Usage | None = None) -> Reading:
        """The counters now; `usage` of the measured processes where they are not this one."""
        ...

    def interference(self, before: Reading, after: Reading) -> float:
        """Share [0, 1] of the processor time in between that others took."""
        ...


@dataclass(frozen=True)
class OwnCoreMeter:
    """For one busy thread on one core: what the thread did not get, others had.

    The core is busy all the while, so its busy time less the own time is wall less own time. That
    resolves samples far below the 10 ms ticks of the system's accounting.
    """

    wall_clock: Callable[[], float] = time.perf_counter
    own_clock: Callable[[], float] = time.process_time
    min_sample_s: float = 0.0

    def read(self, usage: Usage | None = None) -> Reading:
        wall_s = self.wall_clock()
        return Reading(wall_s, usage.own_s if usage else self.own_clock(), wall_s)

    def interference(self, before: Reading, after: Reading) -> float:
        return _share(before, after, cores=1)


@dataclass(frozen=True)
class MachineMeter:
    """For several threads or processes, by the smaller of two upper bounds.

    Others cannot take more than the busy time of the watched cores less the own processor time,
    and cannot delay more than the time that own threads waited for a core. The first also counts
    what others did while all own threads slept, the second where own threads waited for one another.
    Busy time is counted in ticks of usually 10 ms (`/proc/stat`): samples of a quarter of a second
    keep the error at a few per cent.
    """

    cores: tuple[int, ...]
    wall_clock: Callable[[], float] = time.perf_counter
    stat: Path = _PROC_STAT
    min_sample_s: float = 0.25

    def read(self, usage: Usage | None = None) -> Reading:
        usage = usage or Usage.of_this_process()
        return Reading(self.wall_clock(), usage.own_s, busy_s(self.cores, self.stat), usage.waited_s)

    def interference(self, before: Reading, after: Reading) -> float:
        return _share(before, after, cores=len(self.cores))


@dataclass(frozen=True)
class NoMeter:
    """For accelerators and systems without counters: reports no interference."""

    wall_clock: Callable[[], float] = time.perf_counter
    min_sample_s: float = 0.0

    def read(self, usage: Usage | None = None) -> Reading:
        return Reading(self.wall_clock(), 0.0, 0.0)

    def interference(self, before: Reading, after: Reading) -> float:
        return 0.0


def usable_cores() -> tuple[int, ...]:
    """Logical cores that this process may run on, sorted."""
    affinity: Callable[[int], set[int]] | None = getattr(os, "sched_getaffinity", None)
    return tuple(sorted(affinity(0))) if affinity else tuple(range(os.cpu_count() or 1))


def host_meter() -> Meter:
    """The finest meter for CPU work of this process on the cores that it may use."""
    return OwnCoreMeter() if len(usable_cores()) == 1 else machine_meter()


def machine_meter() -> Meter:
    """The meter for work of several processes on the cores that this one may use."""
    return MachineMeter(usable_cores()) if _PROC_STAT.exists() else NoMeter()


@contextmanager
def pinned_to_one_core() -> Iterator[None]:
    """Keep this thread, and what it starts meanwhile, on the last core that it may use.

    XLA sizes its thread pool by the cores it finds when JAX first runs something: enter this before.
    Does nothing where the system has no affinities.
    """
    before = usable_cores()
    if not hasattr(os, "sched_setaffinity"):
        yield
        return
    os.sched_setaffinity(0, {before[-1]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def busy_s(cores: Iterable[int], stat: Path = _PROC_STAT) -> float:
    """Seconds that the cores have been busy since boot, stolen time included."""
    wanted = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *values = line.split()
        if name in wanted:
            counts = [int(v) for v in values[: len(values) - _GUEST_FIELDS]]
            ticks += sum(c for i, c in enumerate(counts) if i not in _IDLE_FIELDS)
    return ticks / os.sysconf("SC_CLK_TCK")


def waited_s(tasks: Path = _TASKS) -> float | None:
    """Seconds that this process's threads have stood in run queues; `None` where the kernel keeps no account."""
    try:
        return sum(int((task / "schedstat").read_text().split()[1]) for task in tasks.iterdir()) * 1e-9
    except (OSError, IndexError):
        return None


def _share(before: Reading, after: Reading, *, cores: int) -> float:
    available_s = (after.wall_s - before.wall_s) * cores
    if available_s <= 0:
        return 0.0
    taken_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    if before.waited_s is not None and after.waited_s is not None:
        taken_s = min(taken_s, after.waited_s - before.waited_s)
    return min(1.0, max(0.0, taken_s / available_s))
