"""Lower bounds on what weights, gradients and optimizer states add to a step, for many pipelines at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._grid import StateChoice
from perfmodel.prediction._placement import Group
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import (
    Exchange,
    HostSeconds,
    StatePlace,
    exchange,
    exchanged_units,
    exchanges,
    host_seconds,
    is_trained,
    reductions,
    shard_params,
    shards_gradients,
    state_params,
    trained_params,
    update,
)
from perfmodel.program import ProgramSpec
from perfmodel.spec import Layout

_EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)
_GATHER: Final[tuple[Exchange, ...]] = ("all_gather",)


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
    by_segments: Float[np.ndarray, "stages segments blocks"]
    """Blocks of the segments that states are exchanged in."""


class StateEvents:
    """The events of one placement of some degrees, for all pipeline shapes; timed later with those of others."""

    def __init__(
        self,
        layout: Layout,
        shapes: Sequence[StageShape],
        blocks: ShardBlocks,
        setting: Setting,
    ) -> None:
        job, cluster = setting.job, setting.cluster
        self.shapes, self._job = shapes, job
        self.ops: list[Op] = []
        params = state_params(blocks, layout.pp > 1)
        trained = trained_params(blocks, layout.pp > 1, job)
        self._groups: list[Group] = [group for group, of_block in params.items() if of_block.any()]
        self._index: dict[tuple[object, ...], int] = {}
        self._exchanges: dict[tuple[int, bool, Group], Int[np.ndarray, "kinds stages segments"]] = {}
        self._units: dict[tuple[int, bool], Float[np.ndarray, "stages segments"]] = {}
        self._updates: dict[tuple[int, Group], Int[np.ndarray, "sharded ranks"]] = {}
        self._on_host = layout.offload_states != "none"
        self._host: list[HostSeconds] = []
        self._own: list[tuple[Float[np.ndarray, "stages segments"], Float[np.ndarray, "stages segments"]]] = []
        """Where the host updates: parameters that are a rank's own, and those of them that it updates."""
        for n, shape in enumerate(shapes):
            counts, spec = shape.by_segments, shape.spec
            if self._on_host:
                self._host.append(host_seconds(setting, layout, spec.grad_reduce != "none"))
                held, updated = (counts @ shard_params(layout, of, spec.replicas) for of in (params, trained))
                self._own.append((held, updated))
            for by_layer in (False, True):
                self._units[n, by_layer] = exchanged_units(3 if by_layer else 0, blocks.layers, counts)
            for group in self._groups:
                place = StatePlace.of(group, layout, layout.replicate, spec.replicas)
                on_network = [over.on_network(cluster) for over in (place.whole, place.shards, place.copies)]
                for by_layer in (False, True):
                    # weights that are kept sharded are gathered whether they are trained or not
                    self._exchanges[n, by_layer, group] = np.concatenate([
                        self._numbers(
                            counts @ (params if by_layer and kind == "all_gather" else trained)[group]
                            / self._units[n, by_layer],
                            [partial(exchange, kind, place=place, job=job, cluster=cluster)],
                            (kind, *on_network),
                        )
                        for kind in _EXCHANGES
                    ])  # fmt: skip
                held = (counts.sum(axis=1) @ trained[group])[spec.stage_map].sum(axis=1)
                self._updates[n, group] = self._numbers(
                    held,
                    [partial(update, shards=shards, job=job) for shards in (1, place.shards.size)],
                    ("update", place.shards.size),
                )

    def _numbers(
        self, amounts: Float[np.ndarray, "*shape"], make: list, what: tuple[object, ...]
    ) -> Int[np.ndarray, "kinds *shape"]:
        """Number of the event that each of `make` makes of each amount, -1 for none."""
        values, inverse = np.unique(amounts, return_inverse=True)
        table = np.full((len(make), len(values)), -1)
        for at, value in enumerate(values.tolist()):
            for k, one in enumerate(make if value > 0 else []):
                if (what, k, value) not in self._index:
                    op = one(value)
                    self._index[what, k, value] = -1 if op is None else len(self.ops)
                    self.ops += [] if op is None else [op]
                table[k, at] = self._index[what, k, value]
        return table[:, inverse.reshape(-1)].reshape(len(make), *amounts.shape)

    def seconds(self, time_s: Float[np.ndarray, " ops"], states: Sequence[StateChoice]) -> StateSeconds:
        """The bounds, from the seconds of `ops`."""
        time_s = np.append(time_s, 0.0)  # -1 stands for no event
        rows = []
        for n, shape in enumerate(self.shapes):
            wanted = {(state.zero == 3, kinds) for state in states for kinds in (_GATHER, self._reductions_of(state))}
            parts = {one: self._collective(n, *one, time_s) for one in wanted}
            updates = np.sum([time_s[self._updates[n, group]] for group in self._groups], axis=0)
            if self._on_host:
                own = self._own[n][1].sum(axis=1)[shape.spec.stage_map].sum(axis=1)
                updates = np.stack([own, own]) * self._host[n].update
            fullest = np.min if shape.spec.steps > 1 else np.max  # without a barrier of all devices any may be last
            alone = fullest(updates, axis=1)
            gathered = {
                by_layer: float(fullest(updates[1] + of_kind.of_rank))
                for (by_layer, kinds), of_kind in parts.items()
                if kinds == _GATHER
            }
            rows.append([self._of(shape.spec, state, parts, alone, gathered) for state in states])
        return StateSeconds(*np.array(rows, float).transpose(2, 0, 1))

    def _of(
        self,
        spec: ProgramSpec,
        state: StateChoice,
        parts: "dict[tuple[bool, tuple[Exchange, ...]], Collectives]",
        updates: Float[np.ndarray, " sharded"],
        gathered: dict[bool, float],
    ) -> tuple[float, ...]:
        zero, overlap, ahead = state.zero, state.overlap_grad_reduce, state.overlap_param_gather
        every, trained = bool(shards_gradients(zero, spec.stages > 1, spec.replicas, self._job)), is_trained(self._job)
        wanted = exchanges(zero, self._job)
        reduce = parts[zero == 3, self._reductions_of(state)] if trained else NONE
        gather = parts[zero == 3, _GATHER] if "all_gather" in wanted else NONE
        passes = 1 if spec.is_forward_only else 2
        start = end = gather_each = reduce_each = stream = stream_each = 0.0
        if zero == 3 and not ahead:
            gather_each = passes * gather.least
        if every and not overlap:
            reduce_each = reduce.least
        if every:
            stream_each = passes * gather.most if zero == 3 else 0.0
            stream_each = max(stream_each + reduce.least, reduce.most)
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
            after = gathered[False]
        if overlap:
            end = reduce.smallest
        elif not every:
            end = reduce.least
        return start, end + after, gather_each, reduce_each, stream + after, stream_each

    def _reductions_of(self, state: StateChoice) -> tuple[Exchange, ...]:
        return reductions(state.zero, self._job)

    def _collective(
        self, n: int, by_layer: bool, kinds: tuple[Exchange, ...], time_s: Float[np.ndarray, " ops"]
    ) -> "Collectives":
        spec = self.shapes[n].spec
        numbers = [_EXCHANGES.index(kind) for kind in kinds]
        found = [time_s[self._exchanges[n, by_layer, group][numbers]].sum(axis=0) for group in self._groups]
        seconds = np.sum(found, axis=0) * self._units[n, by_layer]
        if self._on_host:
            held, updated = self._own[n]
            seconds = seconds + (held * self._host[n].gather if kinds == _GATHER else updated * self._host[n].reduce)
        if not seconds.any():
            return NONE
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
