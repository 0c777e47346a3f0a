"""Meters of interference: CPU time taken by other work during a timing."""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from perfmodel.catalog.this_machine import usable_cores

_LOOK_S = 0.5
"""Seconds over which the load of the cores is measured."""
_PROC_STAT = Path("/proc/stat")
_IDLE_FIELDS = (3, 4, 5, 6)
"""Columns `idle`, `iowait`, `irq` and `softirq` of a processor's line, after its name (proc(5)).
The last two contain the system's work for messages, which belongs to the ranks that exchange them
and is not interference."""
_GUEST_FIELDS = 2
"""`guest` and `guest_nice` at the end are already part of `user` and `nice`."""


@dataclass(frozen=True, slots=True)
class Reading:
    """Counters at one moment; only differences mean anything."""

    wall_s: float
    own_s: float
    """Processor time of the measured processes."""
    busy_s: float
    """Processor time of all processes on the watched cores."""


class Meter(Protocol):
    """Interface: measures interference between two readings."""

    @property
    def min_sample_s(self) -> float:
        """Shortest interval that the counters resolve."""
        ...

    def read(self, own_s: float | None = None) -> Reading:
        """The current counters; `own_s` if the measured processes are not this one."""
        ...

    def interference(self, before: Reading, after: Reading) -> float:
        """Share [0, 1] of the processor time between two readings that other processes took."""
        ...


@dataclass(frozen=True)
class OwnCoreMeter:
    """Meter for one busy thread on one core: time not given to the thread went to others.

    The core is busy all the while, so its busy time less the own time is wall less own time. That
    resolves samples far below the 10 ms ticks of the system's accounting.
    """

    wall_clock: Callable[[], float] = time.perf_counter
    own_clock: Callable[[], float] = time.process_time
    min_sample_s: float = 0.0

    def read(self, own_s: float | None = None) -> Reading:
        # The core is always busy, so that its busy time is the wall clock's.
        wall_s = self.wall_clock()
        own_s = self.own_clock() if own_s is None else own_s
        return Reading(wall_s, own_s, busy_s=wall_s)

    def interference(self, before: Reading, after: Reading) -> float:
        return _share(before, after, cores=1)


@dataclass(frozen=True)
class MachineMeter:
    """Meter of several threads or processes: busy time of the watched cores less own processor
    time.

    What others do while all measured threads sleep counts too, so the share is an upper bound.
    Reads `/proc/stat`, which counts in ticks of usually 10 ms: samples of a quarter of a second
    keep the error at a few per cent.
    """

    cores: tuple[int, ...]
    wall_clock: Callable[[], float] = time.perf_counter
    stat: Path = _PROC_STAT
    min_sample_s: float = 0.25

    def read(self, own_s: float | None = None) -> Reading:
        own_s = time.process_time() if own_s is None else own_s
        return Reading(self.wall_clock(), own_s, busy_s(self.cores, self.stat))

    def interference(self, before: Reading, after: Reading) -> float:
        return _share(before, after, cores=len(self.cores))


@dataclass(frozen=True)
class NoMeter:
    """Meter of accelerators and systems without counters: reports no interference."""

    wall_clock: Callable[[], float] = time.perf_counter
    min_sample_s: float = 0.0

    def read(self, own_s: float | None = None) -> Reading:
        return Reading(self.wall_clock(), 0.0, 0.0)

    def interference(self, before: Reading, after: Reading) -> float:
        return 0.0


def host_meter() -> Meter:
    """The finest meter for CPU work of this process on the cores that it may use."""
    # A process pinned to one core need not read the system's counters, which are coarse.
    if len(usable_cores()) == 1:
        return OwnCoreMeter()
    return machine_meter()


def machine_meter() -> Meter:
    """The meter for work of several processes on the cores that this one may use."""
    return MachineMeter(usable_cores()) if _PROC_STAT.exists() else NoMeter()


@contextmanager
def pinned_to_one_core() -> Iterator[Callable[[], None]]:
    """Pin this thread, and threads started meanwhile, to its last usable core.

    XLA sizes its thread pool by the cores it finds when JAX first runs something: enter this
    before. Does nothing where the system has no affinities. Gives a function that ends the pinning
    early.
    """
    before = usable_cores()
    if not hasattr(os, "sched_setaffinity"):
        yield lambda: None
        return
    os.sched_setaffinity(0, {before[-1]})
    try:
        yield lambda: os.sched_setaffinity(0, before)
    finally:
        os.sched_setaffinity(0, before)


def wait_until_quiet(
    limit: float,
    patience_s: float,
    busy_share: Callable[[float], float] | None = None,
) -> float:
    """Wait until the usable cores are busy for less than `limit` of the time, for `patience_s` at
    most.

    Args:
        busy_share: busy share of the cores over the next given seconds; default: the system's.

    Returns:
        Seconds waited, as far as the patience reached.
    """
    # Each look takes `_LOOK_S` and is the waiting itself.
    busy_share = busy_share or _busy_share
    waited_s = 0.0
    while waited_s < patience_s and busy_share(_LOOK_S) > limit:
        waited_s += _LOOK_S
    return waited_s


def _busy_share(duration_s: float) -> float:
    """Busy share of the usable cores over the next seconds; 0 if the system does not report it."""
    # Only Linux reports this; on other systems nothing is waited for.
    if not _PROC_STAT.exists():
        return 0.0
    cores = usable_cores()
    before_s = busy_s(cores)
    time.sleep(duration_s)
    return (busy_s(cores) - before_s) / (duration_s * len(cores))


def busy_s(cores: Iterable[int], stat: Path = _PROC_STAT) -> float:
    """Seconds that the cores have been busy since boot, stolen time included."""
    # A line per core, `cpuN user nice system idle iowait irq softirq steal guest guest_nice`, in
    # ticks.
    watched = {f"cpu{core}" for core in cores}
    ticks = 0
    for line in stat.read_text().splitlines():
        name, *values = line.split()
        if name not in watched:
            continue
        for column, count in enumerate(values[: len(values) - _GUEST_FIELDS]):
            if column not in _IDLE_FIELDS:
                ticks += int(count)
    return ticks / os.sysconf("SC_CLK_TCK")


def _share(before: Reading, after: Reading, *, cores: int) -> float:
    """Share of the cores' time between two readings spent on work of other processes."""
    # Counters of different clocks may disagree by a little, hence the bounds.
    available_s = (after.wall_s - before.wall_s) * cores
    if available_s <= 0:
        return 0.0
    taken_s = (after.busy_s - before.busy_s) - (after.own_s - before.own_s)
    return min(1.0, max(0.0, taken_s / available_s))
