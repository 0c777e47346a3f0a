"""Orders and figures of every schedule on small pipelines, kept in `known_orders.txt`.

Orders are what papers draw, and searches have no closed form: no change of the code moves one of
them without anyone knowing. A change that is meant to is followed by

    python tests/schedule/known_orders.py

whose difference in version control shows which passes moved.
"""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from perfmodel.errors import LayoutError
from perfmodel.schedule import (
    PassTimes,
    get_schedule,
    optimised,
    schedule_facts,
    schedule_names,
    schedule_text,
)
from perfmodel.schedule.facts import starts_and_ends
from perfmodel.schedule.memory import alive_at_peak, offloaded_at_peak

TABLE = Path(__file__).with_suffix(".txt")
SIZES = ((2, 4, 1), (4, 8, 1), (4, 4, 2), (3, 6, 1), (4, 8, 2))
AT_LIMITS = ((4, 5, 1), (4, 2, 1), (3, 3, 1), (4, 6, 3), (1, 2, 1), (2, 1, 1))
"""Odd, few or single micro-batches and stages, which some schedules cannot have."""
NAMES = (*schedule_names(), "chimera:4", "seq1f1b:4")


def entries() -> Iterator[str]:
    """Every schedule that is possible on every pipeline, then orders made for drawn times."""
    for name in NAMES:
        for stages, micro_batches, chunks in SIZES:
            try:
                yield _entry(name, stages, micro_batches, chunks)
            except LayoutError:
                yield f"# {name} with chunks={chunks}: none of {stages} stages and {micro_batches} micro-batches\n"
    for name in NAMES:
        possible = [size for size in AT_LIMITS if _is_possible(name, *size)]
        yield f"# {name} is possible with {' '.join(map(str, possible))}\n"
    for seed, (stages, micro_batches, limit) in enumerate(
        ((2, 4, 2), (3, 6, 3), (4, 6, 4), (4, 8, 6), (3, 8, None))
    ):
        yield _optimised(seed, stages, micro_batches, limit)


def _entry(name: str, stages: int, micro_batches: int, chunks: int) -> str:
    schedule = get_schedule(name)(stages, micro_batches, chunks)
    facts = schedule_facts(
        name,
        stages,
        micro_batches,
        chunks=chunks,
        backward_s=2.5,
        weight_share=0.4,
        transfer_s=0.125,
    )
    figures = " ".join(
        f"{key}={_short(value)}" for key, value in facts.to_dict().items() if key != "schedule"
    )
    alive = f"alive={alive_at_peak(schedule).tolist()} beside_host={offloaded_at_peak(schedule).tolist()}"
    return f"# {name} with chunks={chunks}: {figures} {alive}\n{schedule_text(schedule)}"


def _is_possible(name: str, stages: int, micro_batches: int, chunks: int) -> bool:
    try:
        get_schedule(name)(stages, micro_batches, chunks)
    except LayoutError:
        return False
    return True


def _optimised(seed: int, stages: int, micro_batches: int, limit: int | None) -> str:
    """Orders for times that differ by stage, and how long they take."""
    forward_s, input_s, weight_s = (
        np.random.default_rng(seed).uniform(0.5, 2.0, (3, stages)).round(2)
    )
    times = PassTimes(forward_s, input_s, weight_s, transfer_s=0.1)
    lines = []
    for staggered in (False, True):
        schedule = optimised(times, micro_batches, limit, staggered=staggered)
        makespan = starts_and_ends(schedule, times)[1].max()
        lines.append(
            f"# optimised for draw {seed}, limit={limit}, staggered={staggered}: makespan={makespan:.6g}\n"
        )
        lines.append(schedule_text(schedule))
    return "".join(lines)


def _short(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(list(value)) if isinstance(value, tuple) else str(value)


if __name__ == "__main__":
    TABLE.write_text("\n".join(entries()))
