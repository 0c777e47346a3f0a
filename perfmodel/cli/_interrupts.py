"""Handles Ctrl-C at any time: prints one line and exits with status 130.

Nothing heavy is imported here: the handlers stand before the packages of a command are imported.
"""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Final

INTERRUPTED: Final = 130
"""Exit status after an interrupt: 128 plus the number of SIGINT, as in shells."""
QUIET_TRACKER: Final = "ignore:resource_tracker:UserWarning"
"""Option that silences the helper of `multiprocessing`, which outlives a process that ended at
once, removes its semaphores and would report it; the helper inherits the options of its process."""


def interruptible(command: Callable[[], int]) -> int:
    """Run a process's command, and return its exit status.

    The first interrupt raises `KeyboardInterrupt`, for the command to end with what it has. What
    libraries make of it on its way (another exception, or none where it hits a callback) is not
    shown. A second one ends the process at once, as does one that a library swallows, and one while
    modules are imported: extension modules that are half initialised print tracebacks of their own,
    or crash. After the command, interrupts are ignored: its result stands.
    """
    # Set as an option, which helper processes inherit and which wins over PYTHONWARNINGS.
    if QUIET_TRACKER not in sys.warnoptions:
        sys.warnoptions.append(QUIET_TRACKER)

    # Respect a handler that is not Python's own: background jobs of a shell ignore interrupts,
    # and an embedding program may handle them itself.
    inherited = signal.getsignal(signal.SIGINT)
    if inherited is not signal.default_int_handler:
        return command()
    is_requested = False

    def on_interrupt(_: int, frame: FrameType | None) -> None:
        nonlocal is_requested
        if is_requested or _importing(frame):
            _leave()
        is_requested = True
        raise KeyboardInterrupt

    # An interrupt inside a callback of a C library is printed and swallowed. Leave instead, as
    # was asked.
    def on_unraisable(error: Any) -> None:
        if isinstance(error.exc_value, KeyboardInterrupt):
            _leave()
        hook(error)

    hook, sys.unraisablehook = sys.unraisablehook, on_unraisable
    try:
        signal.signal(signal.SIGINT, on_interrupt)
        try:
            return command()
        except BaseException as error:
            # Libraries turn an interrupt into errors of their own. Later signals are part of the
            # same interrupt.
            if not is_requested:
                raise
            with uninterrupted():
                tell(error if isinstance(error, KeyboardInterrupt) else KeyboardInterrupt())
            return INTERRUPTED
    finally:
        # Clean-up at exit must not be interrupted.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        sys.unraisablehook = hook


def tell(stop: KeyboardInterrupt) -> None:
    """Print the line, with the interrupted command's message if it has one."""
    text = str(stop) or "interrupted"
    os.write(2, f"perfmodel: {text}\n".encode())


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Context that ignores interrupts."""
    try:
        inherited = signal.signal(signal.SIGINT, signal.SIG_IGN)
    except ValueError:  # not the main thread, which is the one that is interrupted
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, inherited)


TERMINATING: Final = tuple(
    getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)
)
"""Signals by which schedulers stop jobs and closed terminals end them."""


@contextmanager
def terminable() -> Iterator[None]:
    """Context in which the signals of `TERMINATING` act like Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in TERMINATING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _importing(frame: FrameType | None) -> bool:
    """Whether an interrupted frame was importing a module."""
    # An interrupt during an import shows as a frame of importlib somewhere up the stack.
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _leave() -> None:
    """End the process at once, and its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    # No module of this name, or a half-imported one, has no workers yet.
    workers = getattr(sys.modules.get("multiprocessing"), "active_children", tuple)
    for worker in workers():
        worker.kill()
    tell(KeyboardInterrupt())
    os._exit(INTERRUPTED)
