"""Collectives of one communicator, answered one after another by a thread of their own."""

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final

import torch  # pyright: ignore[reportMissingImports]
import torch.distributed as dist  # pyright: ignore[reportMissingImports]

from perfmodel.emulation._clock import Core, come_first, fine_timers
from perfmodel.emulation._line import Plan
from perfmodel.emulation._orders import Call, EmulationError
from perfmodel.emulation._record import Noted

_PATIENCE_S: Final = 5.0
_FOREVER: Final = threading.TIMEOUT_MAX


class EmulatedWork(dist.Work):
    """What a script holds of a collective under way."""

    def __init__(
        self,
        noted: Noted,
        call: Call,
        plan: Callable[[], Plan],
        effect: Callable[[], None],
        result: Any,
        waited: Callable[[float], None],
    ) -> None:
        super().__init__()
        self.noted, self.call, self.plan, self.effect, self._waited = noted, call, plan, effect, waited
        self._result = result
        self._future: Any = torch.futures.Future()
        self._done = threading.Lock()
        self._done.acquire()
        self._error: Exception | None = None

    def finish(self, error: Exception | None = None) -> None:
        """Let those go on who wait."""
        self._error = error
        self.effect = _nothing  # its tensors belong to the script again
        if error is None:
            self._future.set_result(self._result)
        else:
            self._future.set_exception(error)
        self._done.release()

    def wait(self, timeout: timedelta | None = None) -> bool:
        self.noted.wait_start_s = time.perf_counter()
        seconds = timeout.total_seconds() if timeout else 0.0
        if not self._done.acquire(timeout=seconds if 0 < seconds < _FOREVER else -1):
            raise EmulationError(f"{self.call}: not done after {seconds:g} s")
        self._done.release()
        self.noted.wait_end_s = time.perf_counter()
        self._waited(self.noted.wait_end_s)
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> Any:
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
    """One at a time, in the order in which they were called."""

    def __init__(self, failed: Callable[[Exception], None], first: bool) -> None:
        """
        Args:
            failed: told of errors.
            first: whether the thread runs before the script's.
        """
        self._failed, self._first = failed, first
        self._queue: SimpleQueue[EmulatedWork | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, daemon=True, name="emulated communicator")
        self._thread.start()

    def put(self, work: EmulatedWork) -> None:
        self._queue.put(work)

    def close(self) -> None:
        """After what is under way."""
        self._queue.put(None)
        self._thread.join(_PATIENCE_S)

    def _serve(self) -> None:
        fine_timers()
        if self._first:
            come_first([0])
        core = Core(torch)
        free_s = 0.0
        while (work := self._queue.get()) is not None:
            thread_s = time.thread_time()
            noted = work.noted
            try:
                plan = work.plan()
                work.effect()
                noted.start_s = max(noted.issued_s, free_s, plan.start_s)
                noted.delay_s = plan.delay_s
                core.occupy(noted.start_s, plan.delay_s, plan.core_s, thread_s)
                noted.end_s = free_s = time.perf_counter()
                noted.core_s = time.thread_time() - thread_s
                work.finish()
            except Exception as error:
                self._failed(error)
                work.finish(error)


def _nothing() -> None:
    pass
