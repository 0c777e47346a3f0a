"""Lower bounds on the time that model states add to a step, for many pipelines at once.

Their exchanges overlap with passes as a program orders them. A bound counts only time that no order
can hide: before the first pass, after the last one, between passes that wait for it, and along the
communication stream.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple, get_args

import numpy as np
from jaxtyping import Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._problem import Setting
from perfmodel.prediction._zero import (
    Exchange,
    StatePlace,
    exchange,
    exchanged_units,
    exchanges,
    is_trained,
    reduces_every_micro_batch,
    reductions,
    stored_params,
    trained_params,
    update,
)
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.grids._grid import StateChoice
from perfmodel.prediction.host import HostSeconds, host_seconds, shard_params
from perfmodel.prediction.placement import Group
from perfmodel.program import ProgramSpec
from perfmodel.spec import Layout

EXCHANGES: Final[tuple[Exchange, ...]] = get_args(Exchange)
GATHER: Final[tuple[Exchange, ...]] = ("all_gather",)
GATHER_BACKWARD: Final[tuple[Exchange, ...]] = ("all_gather_backward",)
NO_EVENT: Final = -1
"""Number of an event that does not exist: the place behind all others."""


class StateBound(NamedTuple):
    """Seconds that model states add to a step of one pipeline shape, under one state choice; see
    `StateSeconds`."""

    start_s: float
    end_s: float
    gather_each_s: float
    reduce_each_s: float
    stream_s: float
    stream_each_s: float


@dataclass(frozen=True, eq=False)
class StateSeconds:
    """Seconds per pipeline shape and state choice; those named `each` count per micro-batch of a
    stage."""

    start_s: Float[np.ndarray, "shapes states"]
    """Seconds before the first pass can start; below 0 where the `each` seconds count one
    micro-batch too many."""
    end_s: Float[np.ndarray, "shapes states"]
    """Seconds after the last pass."""
    gather_each_s: Float[np.ndarray, "shapes states"]
    """Seconds between the passes, on every rank, for weights that are not gathered ahead."""
    reduce_each_s: Float[np.ndarray, "shapes states"]
    """Seconds between the passes for gradients that are reduced after each backward (once per
    weight gradient on the stream)."""
    stream_s: Float[np.ndarray, "shapes states"]
    """Seconds on a rank's communication stream, independent of the passes."""
    stream_each_s: Float[np.ndarray, "shapes states"]
    """Seconds on that stream for every micro-batch."""


@dataclass(frozen=True, eq=False)
class StageShape:
    """Pipelines that hold the same stages on the same ranks."""

    spec: ProgramSpec
    """One of their programs."""
    by_segments: Float[np.ndarray, "stages segments blocks"]
    """Blocks of the segments that states are exchanged in."""


class StateEvents:
    """Events of one placement, for all pipeline shapes; they are timed later, together with those
    of other placements.

    Shapes share most events: amounts of parameters that are alike make one event, whatever stage
    they lie on.
    """

    def __init__(
        self, layout: Layout, shapes: Sequence[StageShape], blocks: ShardBlocks, setting: Setting
    ) -> None:
        self._job = setting.job
        self._events = DistinctEvents()
        self._shapes = [
            _ShapeEvents.of(layout, shape, blocks, setting, self._events) for shape in shapes
        ]

    @property
    def ops(self) -> list[Op]:
        """The distinct events of all shapes."""
        return self._events.ops

    def seconds(
        self, time_s: Float[np.ndarray, " ops"], states: Sequence[StateChoice]
    ) -> StateSeconds:
        """Bounds for every shape and state choice, from the seconds of `ops`."""
        time_s = np.append(time_s, 0.0)  # NO_EVENT is the last place, and takes no time
        # Where activations lie does not matter here, so choices that differ in it alone have the
        # same bounds.
        resident = list(dict.fromkeys(state.resident for state in states))
        bounds_of_shapes = [
            self._bounds_of_shape(shape, time_s, resident) for shape in self._shapes
        ]
        index_of_state = [resident.index(state.resident) for state in states]
        by_name = np.array(bounds_of_shapes, float).transpose(2, 0, 1)
        return StateSeconds(*by_name[..., index_of_state])

    def _bounds_of_shape(
        self,
        shape: "_ShapeEvents",
        time_s: Float[np.ndarray, " ops"],
        states: Sequence[StateChoice],
    ) -> list[StateBound]:
        """Bounds of every choice of states for the programs of one shape."""
        spec = shape.spec
        # Without a barrier of all devices each rank starts its next step when it is done itself:
        # the fastest counts.
        over_ranks = np.min if spec.steps > 1 else np.max
        updates_s = shape.updates_s(time_s)
        every_micro_batch = reduces_every_micro_batch(
            np.arange(4), spec.stages > 1, spec.replicas, self._job
        )

        # Many choices of states have the same exchanges.
        exchanged: dict[tuple[bool, tuple[Exchange, ...]], Collectives] = {}

        def collectives(by_layer: bool, kinds: tuple[Exchange, ...]) -> Collectives:
            if (by_layer, kinds) not in exchanged:
                exchanged[by_layer, kinds] = shape.collectives(by_layer, kinds, time_s)
            return exchanged[by_layer, kinds]

        trained = is_trained(self._job)
        runs_backward = not spec.is_forward_only
        bounds = []
        for state in states:
            # ZeRO 3 exchanges weights layer by layer.
            by_layer = state.zero == 3
            gathers = "all_gather" in exchanges(state.zero, self._job)
            # Weights that an update changed are gathered as one piece, even if they are used in
            # several.
            gather_after_update = collectives(by_layer=False, kinds=GATHER)
            reduce = gather = gather_backward = NONE
            if trained:
                reduce = collectives(by_layer, reductions(state.zero, self._job))
            if gathers:
                gather = collectives(by_layer, GATHER)
            if runs_backward:
                gather_backward = collectives(by_layer=True, kinds=GATHER_BACKWARD)
            state_collectives = _StateCollectives(
                reduce, gather, gather_backward, bool(every_micro_batch[state.zero])
            )
            bound = _bound(
                spec,
                state,
                state_collectives,
                update_s=float(over_ranks(updates_s[int(state.zero > 0)])) * trained,
                update_and_gather_s=float(over_ranks(updates_s[1] + gather_after_update.of_rank)),
                trained=trained,
            )
            bounds.append(bound)
        return bounds


class _StateCollectives(NamedTuple):
    """Collectives that one choice of states needs."""

    reduce: "Collectives"
    """Reductions of gradients, of one micro-batch or of the step."""
    gather: "Collectives"
    """Gathers of weights, before each forward pass or before the step."""
    gather_backward: "Collectives"
    """Gathers before each backward pass; they count where weights are sharded."""
    reduces_every_micro_batch: bool


class _MicroBatchSeconds(NamedTuple):
    """Seconds of exchanges that come once per micro-batch."""

    gather_s: float
    """Gathers that lie between the passes."""
    reduce_s: float
    """Reductions that lie between the passes."""
    stream_s: float
    """Exchanges on the communication stream."""


def _micro_batch_seconds(
    spec: ProgramSpec, state: StateChoice, collectives: _StateCollectives
) -> _MicroBatchSeconds:
    """Seconds of exchanges for every micro-batch: between the passes if they are not overlapped,
    and on the stream anyway."""
    # A pass may be of several micro-batches, or of a slice of one: nothing comes once per
    # micro-batch.
    if not spec.scheduler.plain:
        return _MicroBatchSeconds(0.0, 0.0, 0.0)
    reduce, gather, gather_backward, reduces_every_micro_batch = collectives
    sharded_weights = state.zero == 3
    gather_s = reduce_s = stream_s = 0.0
    if sharded_weights and not state.overlap_param_gather:
        gather_s = gather.least + gather_backward.least
    if reduces_every_micro_batch:
        reduce_s = 0.0 if state.overlap_grad_reduce else reduce.least
        gathers_s = (
            float(np.max(gather.of_rank + gather_backward.of_rank)) if sharded_weights else 0.0
        )
        stream_s = max(gathers_s + reduce.least, reduce.most)
    return _MicroBatchSeconds(gather_s, reduce_s, stream_s)


def _bound(
    spec: ProgramSpec,
    state: StateChoice,
    collectives: _StateCollectives,
    *,
    update_s: float,
    update_and_gather_s: float,
    trained: bool,
) -> StateBound:
    """Bound on the seconds that the states of one shape add under one choice.

    Args:
        update_s: seconds of the update on the rank that is last.
        update_and_gather_s: seconds of a sharded update and of the gather that follows it.
    """
    reduce, gather = collectives.reduce, collectives.gather
    gathers_ahead = state.overlap_param_gather
    each = _micro_batch_seconds(spec, state, collectives)
    if spec.steps > 1:
        # The next step of a device waits for its update, in all steps but one.
        end = (
            (update_s + reduce.smallest) * (1 - 2 / spec.steps) if spec.scheduler.staggered else 0.0
        )
        return StateBound(0.0, end, each.gather_s, each.reduce_s, 0.0, each.stream_s)

    # The first pass waits for its weights. Gathers between passes are counted for each of them,
    # also for a rank's first, which it gathers for while ranks before it compute: the largest may
    # be counted once too often.
    start = 0.0
    after_s = update_s
    if gathers_ahead:
        start = gather.first
    elif state.zero == 3:
        start = gather.first - gather.largest
    elif trained and state.zero in (1, 2):
        after_s = update_and_gather_s

    # After the last pass at least the last gradients are reduced, or all where they are not
    # overlapped.
    end = 0.0
    if state.overlap_grad_reduce:
        end = reduce.smallest
    elif not collectives.reduces_every_micro_batch:
        end = reduce.least

    # Gathers ahead of the step lie on the stream of reductions, where there are any in between.
    stream_s = after_s
    if collectives.reduces_every_micro_batch and state.zero == 2 and gathers_ahead:
        stream_s = gather.least + after_s
    return StateBound(start, end + after_s, each.gather_s, each.reduce_s, stream_s, each.stream_s)


class DistinctEvents:
    """Events numbered in the order of first use; equal amounts of one kind are one event."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self._numbers: dict[tuple[Hashable, float], int] = {}

    def numbers(
        self,
        kind: Hashable,
        amounts: Float[np.ndarray, "*shape"],
        make: Callable[[float], Op | None],
    ) -> Int[np.ndarray, "*shape"]:
        """Number of the event of each amount, `NO_EVENT` where there is none.

        Args:
            kind: stands for `make` among events that were numbered before.
            amounts: bytes or parameters.
            make: makes the event of an amount.
        """
        values, place = np.unique(amounts, return_inverse=True)
        numbers = [self._number(kind, value, make) for value in values.tolist()]
        return np.array(numbers, int)[place.reshape(-1)].reshape(amounts.shape)

    def _number(self, kind: Hashable, amount: float, make: Callable[[float], Op | None]) -> int:
        """Number of an event of this kind and amount, which is made if it is new; `NO_EVENT` for
        none."""
        if amount <= 0:
            return NO_EVENT
        if (kind, amount) not in self._numbers:
            op = make(amount)
            self._numbers[kind, amount] = NO_EVENT if op is None else len(self.ops)
            if op is not None:
                self.ops.append(op)
        return self._numbers[kind, amount]


class _HostShare(NamedTuple):
    """Inputs of updates on the host: its seconds per parameter, and the parameters of a rank's own
    shard."""

    seconds: HostSeconds
    """Seconds per parameter."""
    stored: Float[np.ndarray, "stages segments"]
    """Parameters of a rank's own shard."""
    updated: Float[np.ndarray, "stages segments"]
    """Parameters of `stored` that are trained."""


@dataclass(frozen=True, eq=False)
class _ShapeEvents:
    """Events that the stages of one pipeline shape have."""

    spec: ProgramSpec
    exchanges: Mapping[tuple[bool, Exchange], Int[np.ndarray, "parts stages segments"]]
    """Numbers of the collectives that exchange a unit of each segment, by whether layers are
    exchanged one by one. One part per group of ranks."""
    units: Mapping[bool, Float[np.ndarray, "stages segments"]]
    """Collectives that each exchange of a segment is made of."""
    updates: Int[np.ndarray, "groups 2 ranks"]
    """Numbers of every rank's updates of all parameters, and of its shard."""
    host: _HostShare | None
    """Inputs of updates on the host, if there are any."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        shape: StageShape,
        blocks: ShardBlocks,
        setting: Setting,
        events: DistinctEvents,
    ) -> "_ShapeEvents":
        """Events of one shape, numbered within the events of all shapes."""
        spec, counts = shape.spec, shape.by_segments
        pipelined = layout.pp > 1
        stored = stored_params(blocks, pipelined, setting.job)
        trained = trained_params(blocks, pipelined, setting.job)
        groups: list[Group] = [group for group, params in stored.items() if params.any()]

        units = {
            by_layer: exchanged_units(3 if by_layer else 0, blocks.layers, counts)
            for by_layer in (False, True)
        }
        parts: dict[tuple[bool, Exchange], list[Int[np.ndarray, "stages segments"]]] = defaultdict(
            list
        )
        updates = []
        for group in groups:
            place = StatePlace.of(group, layout, layout.replicate, spec.replicas)
            for by_layer, units_of_segment in units.items():
                for kind in EXCHANGES:
                    # Weights that are kept sharded are gathered whether they are trained or not.
                    gathers_sharded = by_layer and (kind,) in (GATHER, GATHER_BACKWARD)
                    params = stored[group] if gathers_sharded else trained[group]
                    numbers = _exchange_numbers(
                        kind, counts @ params / units_of_segment, place, setting, events
                    )
                    parts[by_layer, kind].append(numbers)
            updates.append(
                _update_numbers(counts @ trained[group], spec, place, layout, setting, events)
            )

        host = None
        if layout.offload_states != "none":
            of_rank = [
                counts @ shard_params(layout, params, spec.replicas) for params in (stored, trained)
            ]
            host = _HostShare(host_seconds(setting, layout, spec.grad_reduce != "none"), *of_rank)
        exchanged = {key: np.stack(numbers) for key, numbers in parts.items()}
        return cls(spec, exchanged, units, np.stack(updates), host)

    def collectives(
        self, by_layer: bool, kinds: Sequence[Exchange], time_s: Float[np.ndarray, " ops"]
    ) -> "Collectives":
        """Seconds of the exchanges of several kinds, one after another, taken from the times of all
        events."""
        # For each group of ranks (dense and expert parameters) the kinds of exchange follow one
        # another.
        seconds = np.zeros(self.units[by_layer].shape)
        numbers_of_kinds = [self.exchanges[by_layer, kind] for kind in kinds]
        for numbers_of_group in zip(*numbers_of_kinds, strict=True):
            seconds = seconds + np.sum([time_s[numbers] for numbers in numbers_of_group], axis=0)
        seconds = seconds * self.units[by_layer]
        if self.host is not None:
            host_seconds = self.host.seconds
            is_gather = kinds in (GATHER, GATHER_BACKWARD)
            if is_gather:
                copies_s = self.host.stored * host_seconds.gather
            else:
                copies_s = self.host.updated * host_seconds.reduce
            seconds = seconds + copies_s
        if not seconds.any():
            return NONE
        of_rank = _by_rank(seconds.sum(axis=1), self.spec)
        return Collectives(
            first=float(seconds[0, 0]),
            smallest=float(np.min(seconds, where=seconds > 0, initial=np.inf)),
            largest=float(seconds.max()),
            least=float(of_rank.min()),
            most=float(of_rank.max()),
            of_rank=of_rank,
        )

    def updates_s(self, time_s: Float[np.ndarray, " ops"]) -> Float[np.ndarray, "2 ranks"]:
        """Seconds of every rank's update of all parameters, and of its shard."""
        seconds = time_s[self.updates].sum(axis=0)
        if self.host is not None:
            seconds = (
                seconds
                + _by_rank(self.host.updated.sum(axis=1), self.spec) * self.host.seconds.update
            )
        return seconds


def _exchange_numbers(
    kind: Exchange,
    params: Float[np.ndarray, "stages segments"],
    place: StatePlace,
    setting: Setting,
    events: DistinctEvents,
) -> Int[np.ndarray, "stages segments"]:
    """Numbers of the collectives that exchange so many parameters' weights or gradients."""
    cluster = setting.cluster
    # Groups that lie alike on the network exchange alike, so they share events.
    groups = (place.replicas, place.shards, place.copies, place.backward_shards(setting.job))
    on_network = tuple(ranks.on_network(cluster) for ranks in groups)
    make = partial(exchange, kind, place=place, job=setting.job, cluster=cluster)
    # Without secondary shards backward passes gather as forward ones do.
    if kind == "all_gather_backward" and place.backward_shards(setting.job) == place.shards:
        kind = "all_gather"
    return events.numbers((kind, on_network), params, make)


def _update_numbers(
    params: Float[np.ndarray, "stages segments"],
    spec: ProgramSpec,
    place: StatePlace,
    layout: Layout,
    setting: Setting,
    events: DistinctEvents,
) -> Int[np.ndarray, "2 ranks"]:
    """Numbers of every rank's updates of all parameters of its stages, and of its shard of them."""
    of_rank = _by_rank(params.sum(axis=1), spec)
    on_host = layout.offload_states != "none"
    numbers = []
    for shards in (1, place.shards.size):
        make = partial(update, shards=shards, job=setting.job, on_host=on_host)
        numbers.append(events.numbers(("update", shards), of_rank, make))
    return np.stack(numbers)


def _by_rank(
    of_stages: Float[np.ndarray, " stages"], spec: ProgramSpec
) -> Float[np.ndarray, " ranks"]:
    """Sum over the stages that each rank holds."""
    return of_stages[spec.stage_map].sum(axis=1)


class Collectives(NamedTuple):
    """Seconds of one kind of exchange over the parts (segments) of all stages."""

    first: float
    """Seconds of the first stage's first part."""
    smallest: float
    """Seconds of the shortest part."""
    largest: float
    """Seconds of the longest part."""
    least: float
    """Seconds of all parts of the fastest rank."""
    most: float
    """Seconds of all parts of the slowest rank."""
    of_rank: Float[np.ndarray, " ranks"] | float
    """Seconds of all parts of each rank."""


NONE = Collectives(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
