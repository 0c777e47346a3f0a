"""Memory and bounds of grids of layouts are those of the table."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from constant_rates import SITE, Rates
from known_grids import HOST_STATES, RECOMPUTES, TABLE, cases, grid_of
from known_steps import BASES
from stored_figures import moved_figures

from perfmodel.cost import EventTimes
from perfmodel.errors import LayoutError
from perfmodel.ops import Collective, KernelOp
from perfmodel.prediction import step_problem
from perfmodel.prediction.grids import LayoutGrid, price_grids
from perfmodel.spec import Layout

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/prediction/known_grids.py` and review it"


def test_grids_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"


OTHER_DEGREES: dict[str, dict[str, Any]] = {
    "dense": {"tp": 2, "pp": 4, "cp": 1, "dp": 4, "micro_batch": 2, "cp_balanced": False},
    "experts": {"ep_overlap": True, "ep": 8, "etp": 2, "pp": 2, "dp": 32, "micro_batch": 2},
    "sharded": {"tp": 2, "dp": 8, "replicate": 2, "micro_batch": 1, "tp_overlap": True},
}
"""Grids beside the one of a base: each has one of these degrees."""


@pytest.mark.parametrize("name", OTHER_DEGREES)
def test_grids_that_are_priced_together_cost_what_they_cost_alone(name: str) -> None:
    """What grids share is computed once."""
    step = BASES[name]
    problem = step_problem(step.model, step.cluster, step.job, None, step.framework, site=SITE)
    problem = problem.repriced(Rates(), Rates(slower=100.0))
    first = grid_of(step)
    grids = [first]
    for degree, value in OTHER_DEGREES[name].items():
        grids.append(replace(first, degrees=first.degrees.replace(**{degree: value})))
    if name == "experts":
        # Without expert parallelism nothing is exchanged that could overlap.
        grids.append(replace(first, degrees=first.degrees.replace(ep=1, ep_overlap=True)))
    together = list(price_grids(problem, grids))
    for grid, costs in zip(grids, together, strict=True):
        (alone,) = price_grids(problem, [grid])
        assert np.array_equal(alone.peak_bytes, costs.peak_bytes)
        np.testing.assert_allclose(alone.bound_s, costs.bound_s, rtol=1e-12)


@pytest.mark.parametrize("usable_bytes", [1.0, 1e15])
def test_a_limit_that_all_or_none_of_a_grid_keeps_drops_nothing(usable_bytes: float) -> None:
    """Where none fits, all are still there to say why."""
    step = BASES["sharded"]
    problem = step_problem(step.model, step.cluster, step.job, None, step.framework, site=SITE)
    problem = problem.repriced(Rates(), Rates())
    grid = grid_of(step)
    (whole,), (limited,) = price_grids(problem, [grid]), price_grids(problem, [grid], usable_bytes)
    assert limited.grid.shape == whole.grid.shape
    assert np.array_equal(limited.peak_bytes, whole.peak_bytes)
    assert limited.too_large(usable_bytes).sum() == (grid.size if usable_bytes == 1.0 else 0)


@pytest.mark.parametrize(
    "chosen", [{"recompute": "full"}, {"recompute_full_layers": (2,)}, {"offload": True}]
)
def test_what_the_axes_of_a_grid_choose_is_ignored_in_its_degrees(chosen: dict[str, Any]) -> None:
    """Also where a layout with both would be refused."""
    step = BASES["sharded"]
    problem = step_problem(step.model, step.cluster, step.job, None, step.framework, site=SITE)
    problem = problem.repriced(Rates(), Rates())
    grid = replace(grid_of(step), recomputes=RECOMPUTES[:1], states=HOST_STATES)
    other = replace(grid, degrees=grid.degrees.replace(**chosen))
    (costs,), (other_costs,) = price_grids(problem, [grid]), price_grids(problem, [other])
    assert np.array_equal(costs.peak_bytes, other_costs.peak_bytes)
    assert np.array_equal(costs.bound_s, other_costs.bound_s)


PRICED_AT_ONCE = ("1f1b", "gpipe", "pipedream", "seq1f1b", "zb-h1")
"""Schedules whose passes are of one micro-batch or of a slice of one."""


class LoggedRates(Rates):
    """Constant rates that log what they are asked for."""

    def __init__(self, asked: list[str]) -> None:
        super().__init__()
        self.asked = asked

    def times(self, machine: Any, ops: Sequence[KernelOp | Collective]) -> EventTimes:
        if not all(isinstance(op, Collective) for op in ops):
            self.asked.append("kernels")
        elif any(op.bytes > 1 for op in ops):
            self.asked.append("collectives")
        elif ops:
            # The latency of a collective is its time without bytes.
            self.asked.append("latencies")
        return super().times(machine, ops)


@pytest.mark.parametrize("name", ["dense", "experts", "sharded"])
def test_the_events_of_all_grids_are_priced_in_one_batch(name: str) -> None:
    """Also transfers, exchanges of states and slices of sequences: regressors are slow on short
    batches."""
    step = BASES[name]
    asked: list[str] = []
    problem = step_problem(step.model, step.cluster, step.job, None, step.framework, site=SITE)
    problem = problem.repriced(LoggedRates(asked), LoggedRates(asked))
    whole = grid_of(step)
    pipelines = [pipeline for pipeline in whole.pipelines if pipeline.schedule in PRICED_AT_ONCE]
    grid = replace(whole, pipelines=tuple(pipelines))
    other = replace(grid, degrees=grid.degrees.replace(dp=2 * grid.degrees.dp))
    list(price_grids(problem, [grid, other]))
    assert asked.count("collectives") == 1
    assert "kernels" not in asked[asked.index("latencies") :]


@pytest.mark.parametrize(
    "uneven", [{"partition": (5, 3), "pp": 2}, {"recompute_full_layers": (1, 2), "pp": 2}]
)
def test_a_grid_holds_no_uneven_stages(uneven: dict[str, Any]) -> None:
    with pytest.raises(LayoutError, match="uneven"):
        LayoutGrid.of(Layout(**uneven))
    assert LayoutGrid.one(Layout(**uneven)).size == 1
