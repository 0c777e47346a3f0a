"""Child processes that end together with their parent, however it ends.

A process that was killed cannot end what it started, so the kernel of Linux does: it sends a signal
to a process when its parent ends. Our own ranks ask for that themselves (`end_with_parent`).
Programs of others, such as a launcher or a shell script, run under a supervisor that asks for it
(`supervised`) and ends their whole process group.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from multiprocessing import parent_process
from types import FrameType
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""`prctl` of Linux: the signal that a process gets when its parent ends."""
_FORWARDED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that a supervisor leaves to the program: whoever sends them sends them to the group."""
NOT_FOUND: Final = 127
"""Exit status of a program that cannot be started, as shells have it."""


def end_with_parent(parent: int | None = None, number: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent ends, even by SIGKILL.

    On Linux only; on other systems a child notices by its pipe.

    Args:
        parent: process id of the parent as it was told; a process whose parent has ended meanwhile
            ends at once.
        number: the signal.
    """
    if sys.platform != "linux":
        return
    # A parent that ended before this call sends no signal any more; the process then has another
    # parent.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_spawner() -> None:
    """Make this `multiprocessing` process end with its parent, even if the parent has already
    ended."""
    spawner = parent_process()
    end_with_parent(None if spawner is None else spawner.pid)


def supervised(command: Sequence[str]) -> tuple[str, ...]:
    """The command that starts a program in its own process group, so that all its processes end
    with this one.

    The supervisor ends as the program does, by its exit status or its signal. It uses only modules
    of the standard library. On systems other than Linux the program starts without a supervisor.
    """
    if sys.platform != "linux":
        return tuple(command)
    # Run this file as a program of its own, isolated (-I) and without site packages (-S), which a
    # rank may have changed.
    return (sys.executable, "-I", "-S", __file__, str(os.getpid()), *command)


def run_supervised(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program, return its output, and end every process that it started.

    Raises:
        subprocess.TimeoutExpired: it takes longer.
    """
    with subprocess.Popen(
        supervised(command),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as process:
        # On any error or interrupt, the whole group ends.
        try:
            out, err = process.communicate(timeout=timeout_s)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def _supervise(parent: int, command: Sequence[str]) -> None:
    """Run a program, and end the process group when the parent ends."""

    # A signal ends the group only if it tells of the parent's end; any other one is for the
    # program, which is in the same group and has got it too.
    def end_if_orphaned(number: int, frame: FrameType | None) -> None:
        if os.getppid() != parent:
            os.killpg(0, signal.SIGKILL)

    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    for number in _FORWARDED:
        signal.signal(number, end_if_orphaned)

    # The program ends with this supervisor, and handles signals as if it had been started alone.
    program = os.fork()
    if program == 0:
        for number in _FORWARDED:
            signal.signal(number, signal.SIG_DFL)
        end_with_parent()
        try:
            os.execvp(command[0], list(command))
        except OSError as error:
            os.write(2, f"{command[0]}: {error.strerror}\n".encode())
            os._exit(NOT_FOUND)
    end_with_parent(parent, signal.SIGTERM)

    # End as the program does, by the same signal too, so that whoever waits sees what ended it.
    _, status = os.waitpid(program, 0)
    if os.WIFSIGNALED(status):
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
        os.kill(os.getpid(), os.WTERMSIG(status))
    os._exit(os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 1)


if __name__ == "__main__":
    _supervise(int(sys.argv[1]), sys.argv[2:])
