"""Chooses the method for a space, and finds uneven stages for a list of layouts."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Literal

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._partition import (
    PartitionResult,
    partition_bound_s,
    partition_stages,
)
from perfmodel.prediction import StepProblem
from perfmodel.spec import Layout

Method = Literal["enumerate", "dynamic programming", "relax", "relax and descend"]
ENUMERABLE: Final = 1_000_000
"""Combinations that are evaluated one by one in seconds (all layouts of a space share few
structures)."""


@dataclass(frozen=True)
class Chosen:
    """The chosen method and the reason."""

    method: Method
    why: str

    def __str__(self) -> str:
        return f"{self.method}: {self.why}"


def choose_method(
    *, combinations: int = 1, contiguous: bool = False, continuous: int = 0
) -> Chosen:
    """Choose the method for `combinations` discrete choices and `continuous` real unknowns.

    The rules follow the measurements in `validate/optimise.md`: the relaxation is used only where
    it wins.

    Args:
        combinations: discrete members, not counting ways to cut layers into stages.
        contiguous: layers are cut into stages, one per rank.
        continuous: real unknowns.
    """
    if continuous and (contiguous or combinations > 1):
        return Chosen(
            "relax and descend",
            f"{continuous} continuous unknowns together with discrete ones: no exact solver handles both, so "
            "stages come from dynamic programming and a relaxation, with continuous values fitted at every move",
        )
    if continuous:
        return Chosen(
            "relax",
            f"{continuous} continuous unknowns: the timeline's gradient costs little more than its value, whatever "
            "their number",
        )
    if contiguous:
        return Chosen(
            "dynamic programming",
            "contiguous stages are solved exactly in milliseconds; a relaxation comes close but proves nothing",
        )
    if combinations <= ENUMERABLE:
        return Chosen("enumerate", f"{combinations:,} layouts can all be evaluated, which is exact")
    return Chosen(
        "relax and descend",
        f"{combinations:,} combinations are too many to evaluate, so they are relaxed, rounded and improved "
        "by single changes",
    )


def refine(problem: StepProblem, layouts: Sequence[Layout]) -> list[PartitionResult]:
    """Find uneven stages and per-stage recomputation for the best of some layouts, fastest first.

    First every layout's bound over all its partitions is computed, which takes milliseconds. Then
    layouts are partitioned in the order of their bounds, until the next bound is no better than the
    best step found, so that no other layout can beat it.

    Args:
        problem: model, job, cluster and cost models.
        layouts: such as the best of a search; those without a pipeline are passed over.
    """
    # Branch and bound: a layout whose bound is above the best step found ends the list, since all
    # after it have higher bounds.
    bounds = {layout: partition_bound_s(problem, layout) for layout in dict.fromkeys(layouts)}
    results: list[PartitionResult] = []
    for layout in sorted((layout for layout in bounds if layout.pp > 1), key=bounds.__getitem__):
        if results and bounds[layout] >= min(result.step_time_s for result in results):
            break
        with suppress(LayoutError):  # nothing fits
            results.append(partition_stages(problem, layout))
    return sorted(results, key=lambda result: result.step_time_s)
