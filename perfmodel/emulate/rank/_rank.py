"""State of one real rank: orders, record, and emulation overhead."""

import atexit
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

from perfmodel.emulate.environment import Call, Conditions, EnvironmentClient, Orders
from perfmodel.emulate.runs import Record, watch_waiting

_TRIALS: Final = 25
_TRIAL_S: Final = 1e-3
_TRIAL_CORE_S: Final = 5e-4
_COLD_FLOATS: Final = 1 << 22
_COLD_PRODUCTS: Final = 8
"""Number of products before each trial, because a script's work between calls evicts a call's code
and data from the core's caches."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Start time and duration of a collective."""

    start_s: float
    """Time at which the last real rank arrived, on the host's monotonic clock."""
    delay_s: float
    core_s: float
    """Processor time that the collective library takes on this rank."""
    over_s: float = 0.0
    """Overhead of emulating the call, to be subtracted; a queued call does not show it."""
    over_core_s: float = 0.0


class CallPrice(NamedTuple):
    """Times of a call that is answered by emulation, and of emulating it."""

    delay_s: float = 0.0
    """Seconds that the call takes."""
    core_s: float = 0.0
    """Processor time of the call."""
    overhead_s: float = 0.0
    """Seconds that emulating the call takes."""
    core_overhead_s: float = 0.0
    """Processor time that emulating the call takes."""


class Rank:
    """State that the groups of a process share; made when the script joins its world."""

    def __init__(self, orders: Orders, torch: Any) -> None:
        self.orders = orders
        self.environment = EnvironmentClient(orders.address, orders.rank)
        self.conditions = Conditions(orders)
        self.record = Record(orders)
        # At the optimizer all gradients have been reduced: all ranks are at one point.
        self.record.on_optimizer = self.conditions.together
        self.record.watch_training(torch)
        # Emulated calls are compared by the environment.
        if not orders.address and len(orders.real_ranks) > 1:
            watch_waiting(Path(orders.out), orders.rank, torch)
        self._overhead = {False: (0.0, 0.0), True: (0.0, 0.0)}
        self._trial = False
        self.at_end: list[Callable[[], None]] = []
        self._torch, self._process = torch, os.getpid()
        atexit.register(self._leave)

    def _leave(self) -> None:
        # A child that was forked from the process inherits this function, but has nothing to
        # record.
        if os.getpid() == self._process:
            self.record.write()
            for end in self.at_end:
                end()

    def measure_overhead(self, call: Callable[[bool], Any]) -> None:
        """Measure the emulation overhead of a call, which is subtracted afterwards.

        Before each call the caches are filled with something else, as computing does. Meanwhile no
        call is delayed, late or failing: a what-if's delay is not an overhead of emulating, and
        would be subtracted from all later calls.

        Args:
            call: makes one that is answered at once, or else one to wait for.
        """
        # A call in a warm loop takes less than one in a script, so caches are filled before each.
        memory = self._torch.ones(_COLD_FLOATS)
        matrix = self._torch.ones(256, 256)
        conditions, self.conditions = self.conditions, Conditions(self.orders.without_what_if())
        self._trial = True
        for at_once in (False, True):
            times_s, cores_s = [], []
            for _ in range(_TRIALS):
                memory.add_(1.0)
                for _ in range(_COLD_PRODUCTS):
                    self._torch.mm(matrix, matrix)
                start_s = time.perf_counter()
                core_s = time.process_time()
                work = call(at_once)
                if not at_once:
                    work.wait()
                times_s.append(time.perf_counter() - start_s - _TRIAL_S)
                cores_s.append(time.process_time() - core_s - _TRIAL_CORE_S)
            # The median is what scripts meet; by quiet trials alone calls would come out 0.1 ms too
            # long.
            self._overhead[at_once] = max(0.0, median(times_s)), max(0.0, median(cores_s))
        self._trial = False
        self.conditions = conditions
        self.record.overhead_s = max(time_s for time_s, _ in self._overhead.values())
        # Trials are not calls of the script.
        self.record.collectives.clear()
        self.record.tell("joining its world")

    @property
    def copies_per_s(self) -> float:
        """Speed of the core at which processor times are stated.

        0 while the overhead is measured: that is in this core's own time.
        """
        return 0.0 if self._trial else self.orders.copies_per_s

    def price(self, group: str, call: Call, at_once: bool) -> CallPrice:
        """Seconds of a call in the modelled network, and seconds that emulating it takes."""
        if self._trial:
            return CallPrice(_TRIAL_S, _TRIAL_CORE_S)
        return CallPrice(*self.environment.price(group, call), *self._overhead[at_once])

    def fail(self, error: Exception) -> None:
        """Report a failure to the environment, which also ends the other ranks."""
        text = str(error)
        message = text if text.startswith("rank ") else f"rank {self.orders.rank}: {text}"
        self.environment.ask("failed", message)
