"""Activations and weights that every schedule keeps alive, kept in `known_memory.csv`.

Orders are those of `known_orders`; here is what they hold of chunks of unlike sizes, with and
without activations on the host, and with places reserved per stage. A change that is meant to move
it is followed by

    PYTHONPATH=tests python tests/schedule/known_memory.py
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from known_orders import NAMES, SIZES
from stored_figures import StoredCase, write_cases

from perfmodel.errors import LayoutError
from perfmodel.schedule import Schedule, get_schedule, weight_versions
from perfmodel.schedule.memory import in_flight, live_state, offloads, peak_live

TABLE = Path(__file__).with_suffix(".csv")


def figures(name: str, schedule: Schedule) -> dict[str, float]:
    """Figures of a schedule; arrays as sums of their entries times their places, so that exchanged
    entries show."""
    moved = offloads(schedule)
    arrays = {
        "in_flight": in_flight(schedule),
        "forward": moved.forward,
        "next_but_one": moved.next_but_one,
        "backward": moved.backward,
        "peak": peak_live(schedule, 1.0 + np.arange(schedule.n_stages) % 3),
    }
    for offload in (False, True):
        state = live_state(schedule, offload, get_schedule(name).weights)
        for label, live in (("live", state), ("slots", state.with_slots(2, schedule.n_stages))):
            key = f"{label}.{'host' if offload else 'device'}"
            arrays |= {f"{key}.{field}": np.asarray(value) for field, value in vars(live).items()}
    figures = {"offloads": float(len(moved.forward))}
    for key, array in arrays.items():
        values = np.asarray(array, float).ravel()
        figures[key] = float(values @ (1.0 + np.arange(len(values))))
    return {key: value for key, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """Every schedule on every pipeline that it can have, and with several steps where these run
    into each other."""
    for name in NAMES:
        for stages, micro_batches, chunks in SIZES:
            scheduler = get_schedule(name)
            try:
                schedule = scheduler(stages, micro_batches, chunks)
            except LayoutError:
                continue
            label = f"{name} {stages} {micro_batches} {chunks}"
            yield StoredCase(label, label, figures(name, schedule))
            if scheduler.asynchronous or scheduler.staggered:
                stream = scheduler(stages, micro_batches, chunks, 3)
                versions = weight_versions(stream, scheduler.weights)
                stale = {
                    "sequences": float(versions.sequences),
                    "late": float(versions.steady_difference.sum()),
                }
                yield StoredCase(label, "three steps", figures(name, stream) | stale)


if __name__ == "__main__":
    write_cases(TABLE, cases())
