"""Memory and bounds of grids of layouts are those of the table."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from constant_rates import SITE, Rates
from known_grids import HOST_STATES, RECOMPUTES, TABLE, cases, grid_of
from known_steps import BASES
from stored_figures import moved_figures

from perfmodel.prediction import step_problem
from perfmodel.prediction.grids import price_grids

MEANT = "if the change is meant, run `PYTHONPATH=tests python tests/prediction/known_grids.py` and review it"


def test_grids_are_those_of_the_table() -> None:
    moved = moved_figures(cases(), TABLE)
    assert not moved, f"{len(moved)} figures moved; {MEANT}; the first: {moved[:5]}"


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
