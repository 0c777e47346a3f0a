"""Lower bounds on what weights, gradients and optimizer states add to a step, for many pipelines at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._grid import StateChoice
from perfmodel.prediction._placement import Group
from perfmodel.prediction._zero import (
    Exchange,
    exchange,
    exchanges,
    is_trained,
    reduces_every_micro_batch,
    reduction,
    state_place,
    update,
)
from perfmodel.program import ProgramSpec
from perfmodel.spec import Cluster, Job, Layout

_EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)


@dataclass(frozen=True, eq=False)
class StateSeconds:
    """Seconds per pipeline shape and state choice; `each` ones for every micro-batch that a stage sees."""

    start_s: Float[np.ndarray, "shapes states"]
    """Before the first pass can start; below 0 where what comes each time is counted once too often."""
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


class StateEvents:
    """The events of one placement of some degrees, for all pipeline shapes; timed later with those of others."""

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[StageShape],
        params: dict[Group, Float[np.ndarray, " blocks"]],
        job: Job,
        cluster: Cluster,
    ) -> None:
        self.shapes, self._job = shapes, job
        self.ops: list[Op] = []
        self._groups: list[Group] = [group for group, of_block in params.items() if of_block.any()]
        self._index: dict[tuple[object, ...], int] = {}
        self._reductions: dict[tuple[int, int, Group], Int[np.ndarray, "kinds stages segments"]] = {}
        self._updates: dict[tuple[int, Group], Int[np.ndarray, "sharded ranks"]] = {}
        for n, shape in enumerate(shapes):
            for group in self._groups:
                of_block = params[group]
                place = state_place(group, layout, shape.spec.replicas)
                if place.size > 1:
                    for g, counts in enumerate(shape.by_segments):
                        self._reductions[n, g, group] = self._numbers(
                            counts @ of_block,
                            [partial(exchange, kind, place=place, job=job, cluster=cluster) for kind in _EXCHANGES],
                            place.on_network(cluster),
                        )
                held = (shape.by_segments[_WHOLE].sum(axis=1) @ of_block)[shape.spec.stage_map].sum(axis=1)
                self._updates[n, group] = self._numbers(
                    held,
                    [partial(update, shards=shards, job=job) for shards in (1, place.size)],
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

    def seconds(self, time_s: Float[np.ndarray, " ops"], states: Sequence[StateChoice]) -> StateSeconds:
        """The bounds, from the seconds of `ops`."""
        time_s = np.append(time_s, 0.0)  # -1 stands for no event
        rows = []
        for n, shape in enumerate(self.shapes):
            wanted: set[tuple[int, Exchange]] = {(_part(state), "all_gather") for state in states}
            wanted |= {(_part(state), reduction(state.zero, self._job)) for state in states}
            parts: dict[tuple[int, Exchange], Collectives] = {one: self._collective(n, *one, time_s) for one in wanted}
            updates = np.sum([time_s[self._updates[n, group]] for group in self._groups], axis=0)
            fullest = np.min if shape.spec.steps > 1 else np.max  # without a barrier of all devices any may be last
            alone = fullest(updates, axis=1)
            gathered = {
                part: float(fullest(updates[1] + of_kind.of_rank))
                for (part, kind), of_kind in parts.items()
                if kind == "all_gather"
            }
            rows.append([self._of(shape.spec, state, parts, alone, gathered) for state in states])
        return StateSeconds(*np.array(rows, float).transpose(2, 0, 1))

    def _of(
        self,
        spec: ProgramSpec,
        state: StateChoice,
        parts: "dict[tuple[int, Exchange], Collectives]",
        updates: Float[np.ndarray, " sharded"],
        gathered: dict[int, float],
    ) -> tuple[float, ...]:
        zero, overlap, ahead = state.zero, state.overlap_grad_reduce, state.overlap_param_gather
        every, trained = reduces_every_micro_batch(zero), is_trained(self._job)
        wanted = exchanges(zero, self._job)
        reduce = parts[_part(state), reduction(zero, self._job)] if trained else NONE
        gather = parts[_part(state), "all_gather"] if "all_gather" in wanted else NONE
        passes = 1 if spec.is_forward_only else 2
        start = end = gather_each = reduce_each = stream = stream_each = 0.0
        if zero == 3 and not ahead:
            gather_each = passes * gather.least
        elif every and not overlap:  # a gather that is not ahead runs beside the reduction before it
            reduce_each = reduce.least
        if every:
            stream_each = passes * gather.most if zero == 3 else 0.0
            stream_each = max(stream_each + overlap * reduce.least, overlap * reduce.most)
            stream = gather.least * (zero == 2 and ahead)
        if not spec.scheduler.plain:  # a pass may be of several micro-batches, or of a slice of one
            gather_each = reduce_each = stream_each = 0.0
        after = float(updates[int(zero > 0)]) * trained
        if spec.steps > 1:
            if spec.scheduler.staggered:  # the next step of a device waits for its update, in all steps but one
                end = (after + reduce.smallest) * (1 - 2 / spec.steps)
            return start, end, gather_each, reduce_each, 0.0, stream_each
        if ahead:
            start = gather.first
        elif zero == 3:  # a rank gathers for its first pass while ranks before it compute
            start = gather.first - gather.largest
        elif trained and zero in (1, 2):
            after = gathered[_part(state)]
        if overlap:
            end = reduce.smallest
        elif not every:
            end = reduce.least
        return start, end + after, gather_each, reduce_each, stream + after, stream_each

    def _collective(self, n: int, part: int, kind: Exchange, time_s: Float[np.ndarray, " ops"]) -> "Collectives":
        spec = self.shapes[n].spec
        found = [self._reductions[n, part, group] for group in self._groups if (n, part, group) in self._reductions]
        if not found:
            return NONE
        seconds = np.sum([time_s[numbers[_EXCHANGES.index(kind)]] for numbers in found], axis=0)
        of_rank = seconds.sum(axis=1)[spec.stage_map].sum(axis=1)
        return Collectives(
            first=float(seconds[0, 0]),
            smallest=float(np.min(seconds, where=seconds > 0, initial=np.inf)),
            largest=float(seconds.max()),
            least=float(of_rank.min()),
            most=float(of_rank.max()),
            of_rank=of_rank,
        )


class Collectives(NamedTuple):
    """Seconds of one kind of collective over the parts of all stages."""

    first: float
    """Of the first stage's first part."""
    smallest: float
    """Of the part that takes least."""
    largest: float
    """Of the part that takes most."""
    least: float
    """Of all parts of any rank."""
    most: float
    of_rank: Float[np.ndarray, " ranks"] | float


NONE = Collectives(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)


def _part(state: StateChoice) -> int:
    return _LAYER if state.zero == 3 else _OVERLAP if state.overlap_grad_reduce else _WHOLE
