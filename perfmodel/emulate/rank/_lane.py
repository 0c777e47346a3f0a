"""Answers the collectives of one communicator in order, on a separate or the caller's thread."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

from perfmodel.emulate._clock import Core, come_first, fine_timers
from perfmodel.emulate.environment import Call, EmulationError
from perfmodel.emulate.rank._rank import Plan
from perfmodel.emulate.runs import CollectiveNote

_PATIENCE_S: Final = 5.0
_FOREVER: Final = threading.TIMEOUT_MAX


class EmulatedWork(dist.Work):
    """Handle of a collective in progress, as torch returns it to a script."""

    def __init__(
        self,
        noted: CollectiveNote,
        call: Call,
        plan: Callable[[], Plan],
        effect: Callable[[], None],
        result: Any,
        waited: Callable[[float], None],
    ) -> None:
        super().__init__()
        self.noted = noted
        self.call = call
        self.plan = plan
        self.effect = effect
        self._waited = waited
        self._result = result
        self._asked = threading.Lock()
        self._future: Any = None
        # A lock that is held until the work is done: lighter to wait for than a condition.
        self._done = threading.Lock()
        self._done.acquire()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Release the waiters."""
        # Under the lock, so that a future that is requested at this moment is completed exactly
        # once.
        self._error = error
        # The tensors of the effect belong to the script again.
        self.effect = _nothing
        with self._asked:
            self._done.release()
            if self._future is not None:
                self._notify()

    def _notify(self) -> None:
        if self._error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(self._error)

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait until the call is answered, and note how long; raises the call's error."""
        noted = self.noted
        # A call that was answered while the caller waited has its times already.
        if not noted.wait_end_s:
            noted.wait_start_s = time.perf_counter()
            seconds = timeout.total_seconds() if timeout else 0.0
            # Taken and given back: several threads may wait for the same work.
            if not self._done.acquire(timeout=seconds if 0 < seconds < _FOREVER else -1):
                raise EmulationError(f"{self.call}: not finished after {seconds:g} s")
            self._done.release()
            noted.wait_end_s = time.perf_counter()
            self._waited(noted.wait_end_s)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
        with self._asked:
            if self._future is None:
                self._future = torch.futures.Future()
                if self.is_completed():
                    self._notify()
        return self._future

    def is_completed(self) -> bool:
        return not self._done.locked()

    def is_success(self) -> bool:
        return self.is_completed() and self._error is None

    def exception(self) -> Exception | None:
        return self._error

    def result(self) -> list[Any]:
        return self._result

    def synchronize(self) -> None:
        self.wait()


class Lane:
    """Answers the calls of one communicator one at a time, in the order in which they were made."""

    def __init__(
        self, failed: Callable[[Exception], None], first: bool, copies_per_s: float = 0.0
    ) -> None:
        """
        Args:
            failed: called with every error.
            first: whether the lane's thread runs before the script's.
            copies_per_s: speed of the core for which processor times are stated.
        """
        self._failed = failed
        self._first = first
        self._queue: SimpleQueue[EmulatedWork | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._core = Core(torch, copies_per_s)
        # `_turn` keeps calls one after another, `_counted` the number that is under way.
        self._turn, self._counted = threading.Lock(), threading.Lock()
        self._under_way = 0
        self._free_s = 0.0

    def put(self, work: EmulatedWork) -> None:
        """Queue a call for the lane's thread, which works while the script computes."""
        with self._counted:
            self._under_way += 1
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._serve, daemon=True, name="emulated communicator"
                )
                self._thread.start()
        self._queue.put(work)

    def answer(self, work: EmulatedWork) -> float:
        """Answer a call whose caller waits, on the caller's thread if no other call runs.

        Returns:
            Processor time that the calling thread had for it.
        """
        # Behind other calls it has to queue, like them on the lane's own thread.
        with self._counted:
            is_idle = self._under_way == 0
            if is_idle:
                self._under_way += 1
        if not is_idle:
            self.put(work)
            work.wait()
            return 0.0
        noted = work.noted
        thread_s = time.thread_time()
        self._answer(work, thread_s, waits=True)
        noted.wait_start_s, noted.wait_end_s = noted.issued_s, noted.end_s or time.perf_counter()
        return noted.core_s

    def close(self) -> None:
        """End the lane's thread after the calls in progress."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join(_PATIENCE_S)
            self._thread = None

    def _serve(self) -> None:
        """Answer queued calls one after another, on the lane's own thread."""
        fine_timers()
        if self._first:
            come_first([0])
        while True:
            work = self._queue.get()
            # `close` puts None behind the last call.
            if work is None:
                return
            self._answer(work, time.thread_time(), waits=False)

    def _answer(self, work: EmulatedWork, thread_s: float, waits: bool) -> None:
        """Give the result when it is due; `thread_s`: processor time when the call arrived."""
        noted, error = work.noted, None
        with self._turn:
            try:
                # Data first, time after: what moving the data takes is part of the wait that
                # follows.
                plan = work.plan()
                work.effect()
                # The time of emulation itself is subtracted, unless the previous call hides it.
                noted.delay_s, comes_s = plan.delay_s, max(noted.issued_s, plan.start_s)
                # A communicator serves one call at a time, so a call begins when the one before has
                # ended.
                noted.start_s = max(comes_s, self._free_s)
                takes_s = (
                    plan.delay_s if self._free_s > comes_s else max(0.0, plan.delay_s - plan.over_s)
                )
                core_s = max(0.0, min(plan.core_s - plan.over_core_s, takes_s))
                self._free_s = self._core.occupy(noted.start_s, takes_s, core_s, thread_s, waits)
                noted.end_s = time.perf_counter()
                noted.core_s = time.thread_time() - thread_s
            except Exception as raised:
                error = raised
        # Counted off before the caller goes on: its next call must find the lane free.
        with self._counted:
            self._under_way -= 1
        if error is not None:
            self._failed(error)
        work.finish(error)


def _nothing() -> None:
    pass
