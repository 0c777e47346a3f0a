"""Time to build every schedule and its structure, and how it grows: 32 stages, 512 micro-batches.

`python benchmarks/schedules.py` prints the ratios; `run()` returns them.
"""

from timing import best_s, show

from perfmodel.program import ProgramSpec, build
from perfmodel.schedule import get_schedule, schedule_names

STAGES, MICRO_BATCHES = 32, 512


def seconds(name: str, micro_batches: int) -> tuple[float, int]:
    """Least of three builds, and the ops of the structure."""
    chunks = get_schedule(name).chunks or 2
    spec = ProgramSpec(schedule=name, stages=STAGES, micro_batches=micro_batches, chunks=chunks)
    return best_s(lambda: build(spec), 3), build(spec).n_ops


def run() -> dict[str, dict[str, object]]:
    """For each schedule the seconds of a build, and the time per op against a build of half as many micro-batches."""
    results: dict[str, dict[str, object]] = {}
    for name in schedule_names():
        (half_s, half_ops), (whole_s, ops) = seconds(name, MICRO_BATCHES // 2), seconds(name, MICRO_BATCHES)
        results[f"schedule_{name}_build"] = {
            "ratio": whole_s,
            "baseline": f"nothing; {ops:,} ops",
            "unit": "s",
            "target": "<= 1",
        }
        results[f"schedule_{name}_growth"] = {
            "ratio": whole_s / ops / (half_s / half_ops),
            "baseline": "half as many micro-batches",
            "unit": "x time per op",
            "target": "<= 1.5",
        }
    return results


if __name__ == "__main__":
    show(run())
