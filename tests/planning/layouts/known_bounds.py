"""How close the bound of a search comes to the step time, kept in `known_bounds.csv`.

A bound that is too high is a fault that other tests find. One that is too low loses nothing but
time: here is what it comes to for every schedule and way of keeping model states, under prices that
are the same for ever, where passes bound a step and where exchanges do. A change that is meant to
move it, or what a step consists of, is followed by

    python tests/planning/layouts/known_bounds.py
"""

import csv
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel import catalog
from perfmodel.cost import EventTimes
from perfmodel.errors import LayoutError
from perfmodel.ops import Collective, KernelOp
from perfmodel.prediction import Site, StepProblem, check_layout, evaluate, step_problem
from perfmodel.prediction.grids import lower_bounds_s
from perfmodel.prediction.sites import NEUTRAL
from perfmodel.schedule import get_schedule, schedule_names
from perfmodel.spec import Job, Layout

TABLE = Path(__file__).with_suffix(".csv")
NAMES = (*(name for name in schedule_names() if name != "forward"), "chimera:4", "seq1f1b:4")
STATES: tuple[dict[str, Any], ...] = (
    {"zero": 0},
    {"zero": 1, "overlap_grad_reduce": False, "overlap_param_gather": False},
    {"zero": 1},
    {"zero": 2, "overlap_param_gather": False},
    {"zero": 3, "overlap_grad_reduce": False},
    {"zero": 3, "replicate": 2, "overlap_param_gather": False},
    {"zero": 1, "offload_states": "optimizer"},
)
OTHERS: tuple[dict[str, Any], ...] = (
    {"tp": 2, "sequence_parallel": True, "recompute": "full"},
    {"tp": 4, "tp_overlap": True, "recompute": "selective"},
    {"cp": 2, "micro_batch": 2},
    {"micro_batch": 2, "recompute_full_layers": (2,)},
    {"offload_layers": 3},
)


LINKS = {"share": 1.0, "on slow links": 0.02}
"""Columns of the table: on links so fast that passes bound a step, and so slow that exchanges
do."""


class Rates:
    """Kernels and collectives at constant rates."""

    def __init__(self, links: float) -> None:
        self.links = links

    def times(self, machine: Any, ops: Sequence[KernelOp | Collective]) -> EventTimes:
        time_s = np.array([self.seconds(op) for op in ops], float)
        return EventTimes(time_s, time_s, time_s, ("measured",) * len(ops))

    def seconds(self, op: KernelOp | Collective) -> float:
        if isinstance(op, Collective):
            rate = 2e11 if op.ranks_per_node == op.num_ranks else 2e10
            return 1e-5 + op.bytes * (1 - 1 / op.num_ranks) / (rate * self.links)
        return 5e-6 + op.flops / 2e14 + op.bytes / 1e12


def problem(links: float) -> StepProblem:
    """A step at constant rates on a site without constants of its own, links so many times as fast
    as usual."""
    job = Job(global_batch=32, seq_len=1024)
    site = Site(sustained=(), skew=0.01, power_limited=False, population=NEUTRAL)
    problem = step_problem(catalog.model("gpt3-1.3b"), catalog.cluster("dgx-a100"), job, site=site)
    return problem.repriced(Rates(links), Rates(links))


def layouts() -> Iterator[Layout]:
    """Every schedule with some states each, and every way of keeping states on one stage."""
    for states in STATES:
        yield Layout(dp=4, **states)
    for others in OTHERS:
        yield Layout(dp=2, zero=1, **others)
    places = [*product(NAMES, (2, 4))]
    for i, (name, pp) in enumerate(places):
        vpp = 2 if name in ("interleaved", "breadth-first") else 1
        for j in range(3):
            states = STATES[(i + 2 * j) % (len(STATES) - 1)]
            others = OTHERS[(i + j) % 4] if j else {}
            yield Layout(
                pp=pp, dp=2, vpp=vpp, schedule=name, **(states | others | _fixed_fields(name))
            )


def _fixed_fields(name: str) -> dict[str, Any]:
    """Fields of a layout that its schedule fixes."""
    return {"cp": 1} if name.startswith("seq1f1b") else {}


def shares() -> dict[Layout, tuple[float, ...]]:
    """Ratio of each possible layout's bound to its step time, on each of `LINKS`."""
    columns = []
    for links in LINKS.values():
        step_problem = problem(links)
        possible = [layout for layout in layouts() if _is_possible(step_problem, layout)]
        bounds_s = lower_bounds_s(step_problem, possible)
        columns.append(bounds_s / evaluate(step_problem, possible).step_time_s)
    return dict(zip(possible, map(tuple, np.transpose(columns).tolist()), strict=True))


def _is_possible(of: StepProblem, layout: Layout) -> bool:
    try:
        check_layout(of.model, of.cluster, of.job, layout)
        scheduler = get_schedule(layout.schedule)
        scheduler.require(
            layout.pp, of.job.num_microbatches(layout), scheduler.chunks_for(layout.vpp)
        )
    except LayoutError:
        return False
    return True


def read() -> dict[Layout, tuple[float, ...]]:
    """The stored table, as it was when last written."""
    with TABLE.open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {
        Layout.parse(row["layout"]): tuple(float(row[links]) for links in LINKS) for row in rows
    }


def write() -> None:
    with TABLE.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["layout", *LINKS])
        for layout, of_links in shares().items():
            writer.writerow([str(layout), *(f"{share:.4f}" for share in of_links)])


if __name__ == "__main__":
    write()
