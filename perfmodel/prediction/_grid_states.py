"""Lower bounds on what weights, gradients and optimizer states add to a step, for many pipelines at once."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._blocks import ShardBlocks
from perfmodel.prediction._grid import StateChoice
from perfmodel.prediction._placement import Group, Network
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
    reduces_every_micro_batch,
    reductions,
    shard_params,
    stored_params,
    trained_params,
    update,
)
from perfmodel.program import ProgramSpec
from perfmodel.spec import Cluster, Layout

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
        params = stored_params(blocks, layout.pp > 1, job)
        trained = trained_params(blocks, layout.pp > 1, job)
        self._groups: list[Group] = [group for group, of_block in params.items() if of_block.any()]
        self._index: dict[Hashable, dict[float, int]] = {}
        self._exchanges: dict[tuple[int, bool, Group], Int[np.ndarray, "kinds stages segments"]] = {}
        self._units: dict[tuple[int, bool], Float[np.ndarray, "stages segments"]] = {}
        self._updates: dict[tuple[int, Group], Int[np.ndarray, "sharded ranks"]] = {}
        self._on_host = layout.offload_states != "none"
        self._host: list[HostSeconds] = []
        self._own: list[tuple[Float[np.ndarray, "stages segments"], Float[np.ndarray, "stages segments"]]] = []
        """Where the host updates: parameters that are a rank's own, and those of them that it updates."""
        places = {
            (group, replicas): _placed(StatePlace.of(group, layout, layout.replicate, replicas), cluster)
            for replicas in {shape.spec.replicas for shape in shapes}
            for group in self._groups
        }
        frozen = any((params[group] != trained[group]).any() for group in self._groups)
        for n, shape in enumerate(shapes):
            counts, spec = shape.by_segments, shape.spec
            if self._on_host:
                self._host.append(host_seconds(setting, layout, spec.grad_reduce != "none"))
                held, updated = (counts @ shard_params(layout, of, spec.replicas) for of in (params, trained))
                self._own.append((held, updated))
            for by_layer in (False, True):
                self._units[n, by_layer] = exchanged_units(3 if by_layer else 0, blocks.layers, counts)
            for group in self._groups:
                place, on_network = places[group, spec.replicas]
                make = {kind: partial(exchange, kind, place=place, job=job, cluster=cluster) for kind in _EXCHANGES}
                for by_layer in (False, True):
                    units, exchanged = self._units[n, by_layer], [(_EXCHANGES, trained[group])]
                    if by_layer and frozen:  # weights that are kept sharded are gathered whether trained or not
                        exchanged = [(_EXCHANGES[:-1], trained[group]), (_GATHER, params[group])]
                    self._exchanges[n, by_layer, group] = np.concatenate([
                        self._numbers(counts @ of_block / units, {kind: make[kind] for kind in kinds}, on_network)
                        for kinds, of_block in exchanged
                    ])  # fmt: skip
                held = (counts.sum(axis=1) @ trained[group])[spec.stage_map].sum(axis=1)
                shards = place.shards.size
                updates = {of: partial(update, shards=of, job=job, on_host=self._on_host) for of in (1, shards)}
                self._updates[n, group] = self._numbers(held, updates, "update")[[0, -1]]

    def _numbers(
        self,
        amounts: Float[np.ndarray, "*shape"],
        make: Mapping[Any, Callable[[float], Op | None]],
        what: Hashable,
    ) -> Int[np.ndarray, "kinds *shape"]:
        """Number of the event that each of `make` makes of each amount, -1 for none; the same for all alike in `what`
        and its key."""
        values, inverse = np.unique(amounts, return_inverse=True)
        table = np.full((len(make), len(values)), -1)
        for k, (kind, one) in enumerate(make.items()):
            known = self._index.setdefault((what, kind), {})
            for at, value in enumerate(values.tolist()):
                if value > 0 and value not in known:
                    op = one(value)
                    known[value] = -1 if op is None else len(self.ops)
                    self.ops += [] if op is None else [op]
                table[k, at] = known.get(value, -1)
        return table[:, inverse.reshape(-1)].reshape(len(make), *amounts.shape)

    def seconds(self, time_s: Float[np.ndarray, " ops"], states: Sequence[StateChoice]) -> StateSeconds:
        """The bounds, from the seconds of `ops`."""
        time_s = np.append(time_s, 0.0)  # -1 stands for no event
        rows = []
        own = list(dict.fromkeys(state.resident for state in states))  # activations are of no account
        wanted = {(s.zero == 3, kinds) for s in own for kinds in (_GATHER, reductions(s.zero, self._job))}
        for n, shape in enumerate(self.shapes):
            parts = {one: self._collective(n, *one, time_s) for one in wanted}
            updates = np.sum([time_s[self._updates[n, group]] for group in self._groups], axis=0)
            if self._on_host:
                of_rank = self._own[n][1].sum(axis=1)[shape.spec.stage_map].sum(axis=1)
                updates = updates + of_rank * self._host[n].update
            fullest = np.min if shape.spec.steps > 1 else np.max  # without a barrier of all devices any may be last
            alone = fullest(updates, axis=1)
            gathered = {
                by_layer: float(fullest(updates[1] + of_kind.of_rank))
                for (by_layer, kinds), of_kind in parts.items()
                if kinds == _GATHER
            }
            every = reduces_every_micro_batch(
                np.arange(4), shape.spec.stages > 1, shape.spec.replicas, self._job
            ).tolist()
            rows.append([self._of(shape.spec, s, every[s.zero], parts, alone, gathered) for s in own])
        of_state = [own.index(state.resident) for state in states]
        return StateSeconds(*np.array(rows, float).transpose(2, 0, 1)[..., of_state])

    def _of(
        self,
        spec: ProgramSpec,
        state: StateChoice,
        every: bool,
        parts: "dict[tuple[bool, tuple[Exchange, ...]], Collectives]",
        updates: Float[np.ndarray, " sharded"],
        gathered: dict[bool, float],
    ) -> tuple[float, ...]:
        zero, overlap, ahead = state.zero, state.overlap_grad_reduce, state.overlap_param_gather
        trained = is_trained(self._job)
        reduce = parts[zero == 3, reductions(zero, self._job)] if trained else NONE
        gather = parts[zero == 3, _GATHER] if "all_gather" in exchanges(zero, self._job) else NONE
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


def _placed(place: StatePlace, cluster: Cluster) -> tuple[StatePlace, tuple[Network, ...]]:
    """Ranks that hold the same parameters, and where on the network these, those with shards and those with copies
    lie."""
    return place, tuple(over.on_network(cluster) for over in (place.whole, place.shards, place.copies))


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
