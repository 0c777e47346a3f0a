"""How long the compute streams of a layout's devices are busy in a step: what energy depends on."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from perfmodel.planning.layouts._candidates import Candidates
from perfmodel.prediction import LayoutGrid, StepProblem, bundles, durations, pass_work_s, prepared, weighted_programs
from perfmodel.spec import Layout


def busy_s(problem: StepProblem, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Busy seconds of a step, mean over pipeline ranks: all durations on compute streams, as `Prediction` has them."""
    found = np.zeros(len(layouts))
    for bundle in bundles(problem, layouts):
        for one, weight in weighted_programs(bundle):
            program = prepared(one.spec)
            found[list(bundle.lanes)] += (
                weight * (durations(problem, one) @ program.compute_count) / program.structure.devices
            )
    return found


def busy_bound_s(problem: StepProblem, candidates: Candidates) -> Float[np.ndarray, " layouts"]:
    """Busy seconds that no layout stays below: its passes alone, spread evenly over the ranks."""
    parts = [_of_grid(problem, cost.grid).reshape(-1) for cost in candidates.costs]
    return np.concatenate(parts) if parts else np.zeros(0)


def _of_grid(problem: StepProblem, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    work_s = pass_work_s(problem, grid)
    return np.broadcast_to(work_s[..., None], grid.shape)
