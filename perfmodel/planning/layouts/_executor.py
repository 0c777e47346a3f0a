"""Runs exact evaluations: in this process, in several local processes, or on a Dask cluster."""

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from perfmodel.errors import PerfModelError


@dataclass(frozen=True)
class Executor:
    """Runs a picklable function on many items."""

    map: Callable[[Callable[[Any], Any], Sequence[Any]], Sequence[Any]]
    """`[function(item) for item in items]`, wherever that is computed."""
    workers: int


HERE: Final = Executor(lambda function, items: [function(item) for item in items], 1)
"""An executor that works in this process."""


@contextmanager
def open_executor(workers: int = 1, dask: str = "") -> Iterator[Executor]:
    """An executor that lasts as long as the context.

    Args:
        workers: processes of this machine; 1: this one.
        dask: address of a Dask scheduler, used instead.

    Raises:
        PerfModelError: fewer than one worker, no Dask installed, or no scheduler at the address.
    """
    if workers < 1:
        raise PerfModelError(f"workers must be at least 1, got {workers}")
    if dask:
        with _client(dask) as client:
            # not pure: the same call must not be answered from an earlier one of another version of
            # the package
            yield Executor(
                lambda function, items: client.gather(client.map(function, items, pure=False)),
                max(1, len(client.scheduler_info()["workers"])),
            )
    elif workers == 1:
        yield HERE
    else:
        # JAX runs threads, which a fork would not survive; processes keep their caches between
        # calls
        pool = ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"))
        try:
            yield Executor(partial(_map_in_processes, pool), workers)
        finally:
            pool.shutdown(cancel_futures=True)


def _map_in_processes(
    pool: ProcessPoolExecutor, function: Callable[[Any], Any], items: Sequence[Any]
) -> list[Any]:
    """Apply a function to items in the pool's processes; an interrupt kills these."""
    with _deaf():  # processes start as they are needed
        calls = [pool.submit(function, item) for item in items]
    try:
        return [call.result() for call in calls]
    except KeyboardInterrupt:  # nobody waits for what they are still at
        for process in list((pool._processes or {}).values()):
            process.kill()
        raise


@contextmanager
def _deaf() -> Iterator[None]:
    """Make processes that start within this context ignore interrupts from the beginning; this
    process receives them afterwards.

    Child processes inherit ignored signals (a mask alone is not enough, as `multiprocessing`
    unblocks signals for its own helper). While they are blocked, interrupts of this process are
    kept.
    """
    is_main_thread = threading.current_thread() is threading.main_thread()
    if not is_main_thread or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _client(address: str) -> Any:
    """Connect to the Dask scheduler at an address."""
    try:
        from distributed import Client  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise PerfModelError("a Dask cluster needs Dask: pip install 'perfmodel[dask]'") from None
    try:
        return Client(address, timeout=10)
    except (OSError, ValueError) as error:
        raise PerfModelError(f"no Dask scheduler answers at {address}: {error}") from None
