"""Processes that end with the one that started them, whatever ends it."""

import ctypes
import os
import signal
import sys
from typing import Final

_PR_SET_PDEATHSIG: Final = 1
"""`prctl` of Linux: the signal that a process gets when its parent ends."""


def end_with_parent(parent: int | None = None) -> None:
    """Have the kernel kill this process when its parent ends, even by SIGKILL, which nobody can handle.

    Does nothing but on Linux; elsewhere a child notices by its pipe.

    Args:
        parent: process id of the parent as it was told; a process whose parent has ended meanwhile ends at once.
    """
    if sys.platform != "linux":
        return
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if parent is not None and os.getppid() != parent:
        os._exit(1)
