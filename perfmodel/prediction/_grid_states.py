"""Lower bounds on what weights, gradients and optimizer states add to a step, for many pipelines at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._grid import StateChoice
from perfmodel.prediction._memory import stored_dtype_bytes
from perfmodel.prediction._placement import Group, Placement
from perfmodel.program import ProgramSpec
from perfmodel.spec import Cluster, Job, Layout, Op
from perfmodel.units import dtype_bytes
from perfmodel.workload import optimizer_op

_ALL_REDUCE, _REDUCE_SCATTER, _GATHER = range(3)


@dataclass(frozen=True, eq=False)
class StateTerms:
    """Seconds per pipeline shape and state choice; `each` ones for every micro-batch that a stage sees."""

    start_s: Float[np.ndarray, "shapes states"]
    """Before the first pass can start."""
    end_s: Float[np.ndarray, "shapes states"]
    """After the last."""
    gather_each_s: Float[np.ndarray, "shapes states"]
    """Between the passes, on every rank: weights that are not gathered ahead."""
    reduce_each_s: Float[np.ndarray, "shapes states"]
    """The same: gradients that are reduced after each backward (once per weight gradient on the stream)."""
    stream_s: Float[np.ndarray, "shapes states"]
    """On the communication stream of some rank, whatever the passes do."""
    stream_each_s: Float[np.ndarray, "shapes states"]


@dataclass(frozen=True, eq=False)
class StageShape:
    """Pipelines that hold the same stages on the same ranks."""

    spec: ProgramSpec
    by_segments: tuple[Float[np.ndarray, "stages segments blocks"], ...]
    """Blocks of whole stages, in the segments of overlapped reductions, and in those of ZeRO 3."""


_WHOLE, _OVERLAP, _LAYER = range(3)


class StateDraft:
    """The events of one placement of some degrees, for all pipeline shapes; timed later with those of others."""

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[StageShape],
        params: dict[Group, Float[np.ndarray, " blocks"]],
        job: Job,
        cluster: Cluster,
    ) -> None:
        self.shapes, self.training = shapes, job.mode == "train" and not job.frozen
        self.ops: list[Op] = []
        self._groups: list[Group] = [group for group, of_block in params.items() if of_block.any()]
        self._index: dict[tuple[object, ...], int] = {}
        self._reductions: dict[tuple[int, int, Group], Int[np.ndarray, "kinds stages segments"]] = {}
        self._updates: dict[tuple[int, Group], Int[np.ndarray, "sharded ranks"]] = {}
        wide, narrow = dtype_bytes(job.grad_dtype), stored_dtype_bytes(job)
        collectives = (
            ("all_reduce", wide, job.grad_dtype), ("reduce_scatter", wide, job.grad_dtype),
            ("all_gather", narrow, job.dtype),
        )  # fmt: skip
        for n, shape in enumerate(shapes):
            for group in self._groups:
                of_block = params[group]
                place = Placement.of(group, layout).times(shape.spec.replicas, layout)
                if place.size > 1:
                    for g, counts in enumerate(shape.by_segments):
                        self._reductions[n, g, group] = self._numbers(
                            counts @ of_block,
                            [lambda amount, c=c, place=place: place.collective(c[0], amount * c[1], c[2], cluster)
                             for c in collectives],
                            place.on_network(cluster),
                        )  # fmt: skip
                held = (shape.by_segments[_WHOLE].sum(axis=1) @ of_block)[shape.spec.stage_map].sum(axis=1)
                self._updates[n, group] = self._numbers(
                    held,
                    [lambda amount, k=k: optimizer_op(-(-int(amount) // k), job) for k in (1, place.size)],
                    ("update", place.size),
                )

    def _numbers(
        self, amounts: Float[np.ndarray, "*shape"], make: list, what: tuple[object, ...]
    ) -> Int[np.ndarray, "kinds *shape"]:
        """Number of the event that each of `make` makes of each amount, -1 for no amount."""
        values, inverse = np.unique(amounts, return_inverse=True)
        table = np.full((len(make), len(values)), -1)
        for at, value in enumerate(values.tolist()):
            if value > 0:
                first = self._index.setdefault((what, value), len(self.ops))
                if first == len(self.ops):
                    self.ops += [one(value) for one in make]
                table[:, at] = np.arange(first, first + len(make))
        return table[:, inverse.reshape(-1)].reshape(len(make), *amounts.shape)

    def terms(self, time_s: Float[np.ndarray, " ops"], states: Sequence[StateChoice]) -> StateTerms:
        """The bounds, once the events of `ops` are timed."""
        time_s = np.append(time_s, 0.0)  # -1 stands for no event
        rows = []
        for n, shape in enumerate(self.shapes):
            parts = {
                (part, kind): self._collective(n, part, kind, time_s)
                for part, kind in {_part_and_kind(state) for state in states}
                | {(_part(state), _GATHER) for state in states}
            }
            updates = np.sum([time_s[self._updates[n, group]] for group in self._groups], axis=0)
            fullest = np.min if shape.spec.steps > 1 else np.max  # without a barrier of all devices any may be last
            alone = fullest(updates, axis=1)
            gathered = {
                part: float(fullest(updates[1] + of_kind.of_rank))
                for (part, kind), of_kind in parts.items()
                if kind == _GATHER
            }
            rows.append([self._of(shape.spec, state, parts, alone, gathered) for state in states])
        return StateTerms(*np.array(rows, float).transpose(2, 0, 1))

    def _of(
        self,
        spec: ProgramSpec,
        state: StateChoice,
        parts: "dict[tuple[int, int], Collectives]",
        updates: Float[np.ndarray, " sharded"],
        gathered: dict[int, float],
    ) -> tuple[float, ...]:
        zero, overlap, ahead = state.zero, state.overlap_grad_reduce, state.overlap_param_gather
        reduce, gather = parts[_part_and_kind(state)], parts[_part(state), _GATHER] if zero else NONE
        training = self.training and not spec.is_forward_only
        if not training:
            reduce = NONE
        every, passes = zero >= 2, 1 + training
        start = end = gather_each = reduce_each = stream = stream_each = 0.0
        if zero == 3 and not ahead:
            gather_each = passes * gather.least
        elif every and not overlap:  # a gather that is not ahead runs beside the reduction before it
            reduce_each = reduce.least
        if every:
            stream_each = passes * gather.most if zero == 3 else 0.0
            stream_each = max(stream_each + overlap * reduce.least, overlap * reduce.most)
            stream = gather.least * (zero == 2 and ahead)
        if spec.steps > 1:
            if not spec.scheduler.plain:  # a backward may be of several micro-batches
                gather_each = reduce_each = stream_each = 0.0
            if spec.scheduler.staggered:  # the next step of a device waits for its update, in all steps but one
                end = (float(updates[int(zero > 0)]) + reduce.smallest) * (1 - 2 / spec.steps)
            return start, end, gather_each, reduce_each, 0.0, stream_each
        if zero == 3 or (ahead and training):
            start = gather.first
        after = float(updates[int(zero > 0)])
        if zero in (1, 2) and not ahead:
            after = gathered[_part(state)]
        after *= training
        if overlap:
            end = reduce.smallest
        elif not every:
            end = reduce.least
        return start, end + after, gather_each, reduce_each, stream + after, stream_each

    def _collective(self, n: int, part: int, kind: int, time_s: Float[np.ndarray, " ops"]) -> "Collectives":
        spec = self.shapes[n].spec
        found = [self._reductions[n, part, group] for group in self._groups if (n, part, group) in self._reductions]
        if not found:
            return NONE
        seconds = np.sum([time_s[numbers[kind]] for numbers in found], axis=0)
        of_rank = seconds.sum(axis=1)[spec.stage_map].sum(axis=1)
        return Collectives(
            first=float(seconds[0, 0]),
            smallest=float(np.min(seconds, where=seconds > 0, initial=np.inf)),
            least=float(of_rank.min()),
            most=float(of_rank.max()),
            of_rank=of_rank,
        )


class Collectives(NamedTuple):
    """Seconds of one kind of collective over the parts of all stages."""

    first: float
    """Of the first stage's first part."""
    smallest: float
    """Of any part."""
    least: float
    """Of all parts of any rank."""
    most: float
    of_rank: Float[np.ndarray, " ranks"] | float


NONE = Collectives(0.0, 0.0, 0.0, 0.0, 0.0)


def _part(state: StateChoice) -> int:
    return _LAYER if state.zero == 3 else _OVERLAP if state.overlap_grad_reduce else _WHOLE


def _part_and_kind(state: StateChoice) -> tuple[int, int]:
    return _part(state), _REDUCE_SCATTER if state.zero else _ALL_REDUCE
