"""One ranking of searches that differ in the global batch."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from perfmodel.errors import Rejection
from perfmodel.planning.layouts._objective import Objective
from perfmodel.planning.layouts._result import SearchResult


def best_of_batches(
    found: Sequence[SearchResult], batches: Sequence[int], objective: Objective, top: int
) -> SearchResult:
    """The best layouts over all batches; its candidates are those of the batch of the best.

    Batches after the last one found were not searched.
    """
    rows = [
        (objective.shown(result.values[i]), result.layouts[i].step_time_s, which, i)
        for which, result in enumerate(found)
        for i in range(len(result.layouts))
    ]
    rows = sorted(rows)[:top]
    rejections: Counter[Rejection] = Counter()
    for result in found:
        rejections.update(result.rejections)

    def of(name: str) -> tuple:
        return tuple(getattr(found[which], name)[i] for *_, which, i in rows)

    bounds = [objective.shown(result.lower_bound) for result in found]
    return replace(
        found[rows[0][2] if rows else 0],
        evaluated=sum(result.evaluated for result in found),
        feasible=sum(result.feasible for result in found),
        seconds=sum(result.seconds for result in found),
        layouts=of("layouts"),
        values=of("values"),
        quantities=of("quantities"),
        bounds_s=of("bounds_s"),
        rejections=dict(rejections.most_common()),
        lower_bound=objective.shown(min(bounds)),
        lower_bound_s=min(result.lower_bound_s for result in found),
        complete=all(result.complete for result in found) and len(found) == len(batches),
        unresolved=sum(result.unresolved for result in found),
        unsearched=tuple(batches[len(found) :]),
        alike=sum(result.alike for result in found),
        batches=tuple(found),
        robustness=None,
        impossible=None if rows else next((r.impossible for r in reversed(found) if r.impossible), None),
    )
