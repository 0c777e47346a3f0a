"""Emptying the processor's caches."""

from collections.abc import Callable
from typing import Final

from perfmodel import catalog

FLUSH_FACTOR: Final = 2
"""Size of the buffer that is touched, in last-level caches: replacement is not strictly least-recently-used."""


def host_flush() -> tuple[Callable[[], None], int]:
    """A function that fills the CPU's caches with a buffer of its own, and the buffer's bytes."""
    import numpy as np

    size = FLUSH_FACTOR * int(catalog.device("cpu").l2_bytes)
    buffer = np.zeros(size // 8)

    def flush() -> None:
        np.add(buffer, 1.0, out=buffer)

    return flush, size
