"""Uneven stages for a list of layouts."""

from collections.abc import Callable, Sequence

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._partition import PartitionResult, partition_bound_s, partition_stages
from perfmodel.prediction import StepProblem
from perfmodel.spec import Layout


def refine(
    problem: StepProblem,
    layouts: Sequence[Layout],
    *,
    progress: Callable[[int, int], None] | None = None,
) -> list[PartitionResult]:
    """Uneven stages and recompute by stage for the best of some layouts, fastest first.

    Every layout's bound over all its partitions is computed first (milliseconds); layouts are then partitioned in
    the order of their bounds, until the next bound is no better than the best step found: none of those left out
    can beat it.

    Args:
        problem: model, job, cluster and cost models.
        layouts: such as the best of a search; those without a pipeline are passed over.
        progress: called with (layouts partitioned, of how many).
    """
    bounds = {layout: partition_bound_s(problem, layout) for layout in dict.fromkeys(layouts)}
    found: list[PartitionResult] = []
    order = sorted((layout for layout in bounds if layout.pp > 1), key=bounds.__getitem__)
    for done, layout in enumerate(order):
        if found and bounds[layout] >= min(result.step_time_s for result in found):
            break
        try:
            found.append(partition_stages(problem, layout))
        except LayoutError:
            continue  # nothing fits
        if progress:
            progress(done + 1, len(order))
    return sorted(found, key=lambda result: result.step_time_s)
