"""Counting traces: each costs a compilation, so a search must get by with few."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax.monitoring

_LOWERED = "/jax/core/compile/jaxpr_to_mlir_module_duration"
"""Once per trace of a function that is called, not for the functions traced inside it."""


@dataclass
class TraceCount:
    """Traces so far inside a `count_traces` block."""

    total: int = 0


@contextmanager
def count_traces() -> Iterator[TraceCount]:
    """Counts how often JAX traces and lowers a function (of any library) inside the block."""
    count, active = TraceCount(), True

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        del duration_secs, kwargs
        count.total += active and event == _LOWERED

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield count
    finally:
        active = False
        # Older versions of JAX cannot unregister; the listener then stays, inactive.
        unregister = getattr(jax.monitoring, "unregister_event_duration_listener", lambda _: None)
        unregister(listen)
