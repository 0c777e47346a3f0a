"""Gradient buckets: how the layers of a stage are grouped for reductions that overlap with backward.

Few whole layers per bucket leave little to relax: sizes are moved layer by layer and evaluated exactly.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.errors import LayoutError
from perfmodel.planning.optimise._pipeline import descend, neighbours
from perfmodel.prediction import (
    Bundle,
    StepProblem,
    bundles,
    by_layer,
    durations,
    prepared,
    segment_sizes,
)
from perfmodel.spec import Layout
from perfmodel.timeline import makespan, makespan_lanes

Sizes = tuple[tuple[int, ...], ...]
"""Layers of every bucket of every stage, in model order; the last of a stage is reduced first."""
NUMBERS: Final = (1, 2, 4, 8)


@dataclass(frozen=True)
class BucketResult:
    """Buckets of every stage."""

    buckets: Sizes
    step_time_s: float
    given_s: float
    """Step time with the buckets that a prediction assumes: equal ones, at most four per stage."""
    evaluated: int
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dict(vars(self))


def size_buckets(problem: StepProblem, layout: Layout, *, numbers: Sequence[int] = NUMBERS) -> BucketResult:
    """The best grouping of each stage's layers into gradient buckets, by descent from equal ones.

    Args:
        problem: model, job, cluster and cost models, for training.
        layout: with data-parallel replicas, overlapped reduction and ZeRO below 3.
        numbers: of buckets per stage to try.

    Raises:
        LayoutError: no overlapped reductions to group.
    """
    began = time.perf_counter()
    (bundle,) = bundles(problem, [layout])
    if bundle.spec.grad_reduce not in ("overlap", "eager_opt") or bundle.spec.gathers_by_layer or bundle.spec.steps > 1:
        raise LayoutError(f"layout {layout} has no overlapped gradient reductions to group; use dp > 1 and zero < 3")
    found = [_Grouping(problem, bundle, n) for n in sorted(set(numbers))]
    ends = [(grouping, *descend([grouping.equal], grouping.moves, grouping.step_s)) for grouping in found]
    grouping, best, *_ = min(ends, key=lambda end: end[2])
    given = prepared(bundle.spec).compiled
    return BucketResult(
        buckets=best,
        step_time_s=float(makespan(grouping.prepared.compiled, grouping.durations(best))),
        given_s=float(makespan(given, durations(problem, bundle)[0])),
        evaluated=sum(end[3] for end in ends),
        seconds=time.perf_counter() - began,
    )


class _Grouping:
    """All groupings of a layout's layers into a number of buckets per stage: one structure."""

    def __init__(self, problem: StepProblem, bundle: Bundle, buckets: int) -> None:
        self._problem, self._bundle = problem, bundle
        before, upto, after = by_layer(bundle.tables[0].pairs)
        whole = bundle.counts.sum(axis=1)
        whole[0] -= before
        whole[-1] -= after
        # cuts between stages: where the prefix sums of blocks agree
        ends = [int(np.flatnonzero((upto == at).all(axis=1))[0]) for at in np.cumsum(whole, axis=0)]
        per_stage = np.diff([0, *ends]).tolist()
        self.equal: Sizes = tuple(tuple(segment_sizes(n, buckets).tolist()) for n in per_stage)
        self.prepared = prepared(replace(bundle.spec, segments=buckets))

    def moves(self, at: Sizes) -> Iterable[Sizes]:
        """A layer from a bucket to the one beside it."""
        for stage, sizes in enumerate(at):
            for moved in neighbours(sizes, reach=1):
                yield (*at[:stage], moved, *at[stage + 1 :])

    def step_s(self, some: Sequence[Sizes]) -> Float[np.ndarray, " n"]:
        return np.asarray(makespan_lanes(self.prepared.compiled, np.stack([self.durations(at) for at in some])), float)

    def durations(self, at: Sizes) -> Float[np.ndarray, " classes"]:
        """Seconds of the structure's classes, priced anew for these buckets."""
        divided = replace(self._bundle, program=self._bundle.program.with_segments(at))
        return durations(self._problem, divided)[0]
