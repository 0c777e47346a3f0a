"""How long the compute streams of a layout's devices are busy in a step: what energy depends on."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from perfmodel.layout_search._candidates import Candidates
from perfmodel.prediction import LayoutGrid, StepModel, pass_work_s
from perfmodel.spec import Layout


def busy_s(fixed: StepModel, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
    """Busy seconds of a step, mean over pipeline ranks: all durations on compute streams, as `Prediction` has them."""
    found = np.zeros(len(layouts))
    for bundle in fixed.bundles(layouts):
        for term, weight in fixed.terms(bundle):
            prepared = fixed.prepared(term.spec)
            found[list(bundle.lanes)] += (
                weight * (fixed.durations(term) @ prepared.compute_count) / prepared.structure.devices
            )
    return found


def busy_bound_s(fixed: StepModel, candidates: Candidates) -> Float[np.ndarray, " layouts"]:
    """Busy seconds that no layout stays below: its passes alone, spread evenly over the ranks."""
    return np.concatenate([_of_grid(fixed, cost.grid).reshape(-1) for cost in candidates.costs])


def _of_grid(fixed: StepModel, grid: LayoutGrid) -> Float[np.ndarray, "pipelines shards recomputes states"]:
    work_s = pass_work_s(fixed, grid)
    return np.broadcast_to(work_s[..., None], grid.shape)
