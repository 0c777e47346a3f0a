"""Wall clock of calls."""

import time
from collections.abc import Callable


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest of some calls."""
    return min(seconds_of(call) for _ in range(repeats))
