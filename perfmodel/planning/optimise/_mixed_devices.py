"""Pipelines over several kinds of devices: which kind computes which stage, and how many layers it gets."""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.planning.optimise._certificate import Certificate
from perfmodel.planning.optimise._partition import layers_per_stage
from perfmodel.planning.optimise._pipeline import (
    FRONT,
    NothingFitsError,
    descend,
    front,
    lower_bound_s,
    neighbours,
    spans,
)
from perfmodel.prediction import (
    StageCosts,
    StepProblem,
    bundles,
    durations,
    one_stage_per_rank,
    prepared,
    program_live,
    stage_costs,
    weighted_programs,
)
from perfmodel.program import Kind
from perfmodel.spec import Layout
from perfmodel.timeline import makespan, makespan_many

_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True)
class MixedStages:
    """One way to lay a pipeline over devices of several kinds."""

    partition: tuple[int, ...]
    """Layers of every stage."""
    kinds: tuple[int, ...]
    """Kind of device of every stage, as numbered by the caller's list."""
    recompute_full_layers: tuple[int, ...]
    """Layers of every stage that are recomputed in full to fit."""


@dataclass(frozen=True)
class MixedResult:
    """The best assignment found."""

    layout: Layout
    """With the partition; it says nothing of the devices."""
    devices: tuple[str, ...]
    """Device of every stage."""
    step_time_s: float
    even_s: float | None
    """Step time of even stages, kinds in the caller's order; None where that does not fit."""
    certificate: Certificate
    """Over all orders of the kinds, partitions and recompute choices."""
    evaluated: int
    seconds: float

    @property
    def gap(self) -> float:
        """By what share the step time is above the lower bound at most."""
        return self.certificate.gap(self.step_time_s)

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain = {k: v for k, v in vars(self).items() if k not in ("layout", "certificate")}
        return {"layout": str(self.layout)} | plain | {"certificate": self.certificate.to_dict(self.step_time_s)}


def partition_devices(models: Sequence[StepProblem], supply: Sequence[int], layout: Layout) -> MixedResult:
    """Stages of one layout over several kinds of devices: order of the kinds, partition and recompute together.

    Every stage lies on one kind (its tensor- and data-parallel ranks are alike). A stage's times, collectives
    and memory are those of its kind's cluster; a transfer between two kinds takes as long as on the slower one.

    Args:
        models: one problem per kind, of the same model and job.
        supply: how many stages each kind can take; together as many as the layout has.
        layout: a schedule with one stage per rank; partition and full recompute are what is looked for.

    Raises:
        PerfModelError: models of different jobs, or a supply that does not add up.
        LayoutError: a schedule with several stages per rank, or nothing fits.
    """
    started = time.perf_counter()
    if len({(m.model, m.job) for m in models}) != 1 or len(models) != len(supply):
        raise PerfModelError("mixed devices need one problem of the same model and job, and a supply, per kind")
    base = layout.replace(partition=None, recompute_full_layers=None)
    (bundle,) = bundles(models[0], [base])
    if not one_stage_per_rank(bundle):
        raise LayoutError(f"mixed devices need a schedule with one plain stage per rank, not {layout.schedule}")
    if sum(supply) != layout.pp:
        raise PerfModelError(f"{layout.pp} stages need as many devices of all kinds together, got {sum(supply)}")
    space = _Space(models, base, [stage_costs(model, base) for model in models])
    even = space.stages(layers_per_stage(bundle), tuple(np.repeat(np.arange(len(supply)), supply).tolist()))
    start = [space.stages(c.partition, c.kinds) for c in front(space.costs, bundle.spec.micro_batches, supply)[:FRONT]]
    try:
        best, _, evaluated = descend(list(dict.fromkeys([even, *start])), space.moves, space.step_s)
    except NothingFitsError:
        raise LayoutError(f"no partition of {models[0].model.name} over these devices fits into memory") from None
    (even_s,) = space.step_s([even]).tolist()
    return MixedResult(
        layout=space.layout(best),
        devices=tuple(models[kind].cluster.device.name for kind in best.kinds),
        step_time_s=space.exact_step_s(best),
        even_s=even_s if np.isfinite(even_s) else None,
        certificate=Certificate(
            lower_bound_s(space.costs, bundle.spec, program_live(models[0].setting, bundle.spec), supply),
            "sum of stages + (m - 1) slowest stage",
            "what every order of passes needs, least over all orders of devices and partitions by dynamic programming",
        ),
        evaluated=evaluated,
        seconds=time.perf_counter() - started,
    )


@dataclass(frozen=True)
class _Space:
    models: Sequence[StepProblem]
    base: Layout
    costs: Sequence[StageCosts]

    def stages(self, partition: tuple[int, ...], kinds: tuple[int, ...]) -> MixedStages:
        """Stages that recompute what they must."""
        where = zip(*spans(partition), strict=True)
        full = tuple(int(self.costs[kind].full_layers[at]) for kind, at in zip(kinds, where, strict=True))
        return MixedStages(partition, kinds, full)

    def moves(self, at: MixedStages) -> Iterable[MixedStages]:
        """A layer moved, or the devices of two stages exchanged."""
        yield from (self.stages(sizes, at.kinds) for sizes in neighbours(at.partition))
        for a in range(len(at.kinds)):
            for b in range(a):
                if at.kinds[a] != at.kinds[b]:
                    order = [*range(len(at.kinds))]
                    order[a], order[b] = b, a
                    kinds = tuple(at.kinds[i] for i in order)
                    yield self.stages(at.partition, kinds)
                    yield self.stages(tuple(at.partition[i] for i in order), kinds)

    def layout(self, at: MixedStages) -> Layout:
        full = at.recompute_full_layers if any(at.recompute_full_layers) else None
        return self.base.replace(partition=at.partition, recompute_full_layers=full)

    def step_s(self, some: Sequence[MixedStages]) -> Float[np.ndarray, " n"]:
        """Step times by the timeline, infinite where stages are impossible or do not fit."""
        step_s = np.full(len(some), np.inf)
        fits = [
            all(
                np.isfinite(self.costs[kind].forward_s[where])
                for kind, where in zip(at.kinds, zip(*spans(at.partition), strict=True), strict=True)
            )
            for at in some
        ]
        if not any(fits):
            return step_s
        of_layout = [self._terms(at) for at, ok in zip(some, fits, strict=True) if ok]
        total: np.ndarray | float = 0.0
        for of_term in zip(*of_layout, strict=True):  # all share the structure
            program, _, weight = of_term[0]
            (spans_s,) = makespan_many([program], [np.stack([of_class for _, of_class, _ in of_term])])
            total = total + weight * np.asarray(spans_s)
        step_s[np.array(fits)] = total
        return step_s

    def exact_step_s(self, at: MixedStages) -> float:
        """Step time in double precision."""
        return sum(weight * float(makespan(program, of_class)) for program, of_class, weight in self._terms(at))

    def _terms(self, at: MixedStages) -> list[tuple[Any, Float[np.ndarray, " classes"], float]]:
        """Programs, durations with every class at the speed of its stage's kind, and weights."""
        layout, kinds = self.layout(at), np.array(at.kinds)
        by_kind = [weighted_programs(bundles(model, [layout])[0]) for model in self.models]
        out = []
        for of_term in zip(*by_kind, strict=True):
            program = prepared(of_term[0][0].spec)
            structure = program.structure
            seconds = np.stack([durations(m, b)[0] for m, (b, _) in zip(self.models, of_term, strict=True)])
            stage = np.clip(structure.class_stage, 0, len(kinds) - 1)
            ahead = np.where(structure.class_kind == Kind.SEND_BACKWARD, -1, 1)
            other = np.where(np.isin(structure.class_kind, _SENDS), np.clip(stage + ahead, 0, len(kinds) - 1), stage)
            classes = np.arange(structure.n_classes)
            slower = np.maximum(seconds[kinds[stage], classes], seconds[kinds[other], classes])
            out.append((program.compiled, slower, of_term[0][1]))
        return out
