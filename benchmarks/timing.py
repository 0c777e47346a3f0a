"""Wall clock and processor time of calls; how ratios are printed."""

import time
from collections.abc import Callable
from typing import Any


def seconds_of(call: Callable[[], object]) -> float:
    """Seconds of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def best_s(call: Callable[[], object], repeats: int) -> float:
    """Seconds of the quickest of some calls."""
    return min(seconds_of(call) for _ in range(repeats))


def best_cpu_s(call: Callable[[], object], repeats: int) -> float:
    """Processor seconds, of all threads, of the cheapest of some calls: what other programs of a
    machine change least."""

    def once() -> float:
        """Processor seconds of one call."""
        start = time.process_time()
        call()
        return time.process_time() - start

    return min(once() for _ in range(repeats))


def entry(ratio: float, baseline: str, unit: str, target: str) -> dict[str, object]:
    """One entry of the results that `run` of a benchmark returns by name."""
    return {"ratio": float(ratio), "baseline": baseline, "unit": unit, "target": target}


def show(results: dict[str, dict[str, Any]]) -> None:
    """A line per ratio."""
    for key, entry in results.items():
        target = f" (target {entry['target']})" if "target" in entry else ""
        print(
            f"{key:60s} {entry['ratio']:10.4g} {entry['unit']}, against {entry['baseline']}{target}"
        )
