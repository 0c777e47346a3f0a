"""Schedules by name."""

from collections.abc import Callable

from perfmodel.errors import LayoutError, PerfModelError, UnknownNameError
from perfmodel.schedule._schedule import Schedule

Scheduler = Callable[[int, int, int], Schedule]
"""(devices, micro_batches, chunks) -> Schedule."""

_SCHEDULERS: dict[str, Scheduler] = {}


def register(name: str) -> Callable[[Scheduler], Scheduler]:
    """Decorator that makes a scheduler known under `name`; a name is given once."""

    def add(scheduler: Scheduler) -> Scheduler:
        def checked(devices: int, micro_batches: int, chunks: int = 1) -> Schedule:
            counts = {"devices": devices, "micro_batches": micro_batches, "chunks": chunks}
            for what, count in counts.items():
                if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                    raise LayoutError(f"schedule {name}: {what} must be a whole number of at least 1, got {count!r}")
            return scheduler(devices, micro_batches, chunks)

        if name in _SCHEDULERS:
            raise PerfModelError(f"schedule {name!r} is registered already; choose another name")
        _SCHEDULERS[name] = checked
        return checked

    return add


def get_schedule(name: str) -> Scheduler:
    """The scheduler registered as `name`: call it with (devices, micro_batches, chunks).

    Raises:
        UnknownNameError: no schedule has this name.
    """
    try:
        return _SCHEDULERS[name]
    except KeyError:
        raise UnknownNameError("schedule", name, _SCHEDULERS) from None


def schedule_names() -> tuple[str, ...]:
    """Names of all registered schedules, sorted."""
    return tuple(sorted(_SCHEDULERS))
