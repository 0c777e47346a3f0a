"""What the check of a run says of simulated faults, with each kind of evidence, kept in
`known_health.csv`.

Probabilities rest on predictions and on how far sites differ, so that a refit moves them a little.
A change that is meant to move them, or a refit, is followed by

    PYTHONPATH=tests:tests/ingest python tests/planning/health/known_health.py
"""

from collections.abc import Iterator
from pathlib import Path

from simulated_runs import SimulatedRun, checked
from stored_figures import StoredCase, write_cases

from perfmodel.planning.health import RunHealth

TABLE = Path(__file__).with_suffix(".csv")
RUNS = {
    "timers and clocks": SimulatedRun(
        form="megatron",
        job="megatron 8b",
        settings=("slow_rank=0", "slow_factor=1.2x"),
        timers=True,
        stragglers=True,
    ),
    "growing batch": SimulatedRun(
        form="megatron",
        job="megatron 8b",
        settings=("inter_node_bandwidth=0.3x",),
        first_batches=(32, 64),
    ),
    "jump": SimulatedRun(
        form="torchtitan",
        job="torchtitan 8b",
        settings=("slow_rank=0", "slow_factor=1.4x"),
        begins_at=60,
    ),
    "one rank": SimulatedRun(
        form="deepspeed",
        job="deepspeed 8b",
        settings=("compute_rate=0.7x", "power_limit=0.7x"),
        timers=True,
    ),
}


def figures(health: RunHealth) -> dict[str, float]:
    """Probabilities, seconds that causes explain and the next measurement, whose text counts
    one."""
    figures = {
        "excess": health.excess_share,
        "slower_than": health.slower_than,
        "no_fault": health.no_fault_probability,
        "typical": health.typical_site_s,
        "good": health.good_site_s,
        "healthy": float(health.healthy),
        "remarks": float(len(health.remarks)),
        "undecided": float(bool(health.undecided)),
        f"next.{health.next_measurement[:24]}".replace(" ", "-"): 1.0,
    }
    for place, cause in enumerate(health.causes):
        figures |= {
            f"{cause.name}.place": place + 1.0,
            f"{cause.name}.probability": cause.probability,
        }
        figures[f"{cause.name}.explains"] = cause.explains_s
    return {name: value for name, value in figures.items() if value}


def cases() -> Iterator[StoredCase]:
    """What is said of every simulated run."""
    for name, run in RUNS.items():
        yield StoredCase(name, name, figures(checked(run)))


if __name__ == "__main__":
    write_cases(TABLE, cases())
