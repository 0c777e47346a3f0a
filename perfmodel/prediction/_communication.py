"""Events between a model's blocks: transfers between stages, gradient reductions, weight gathers,
optimizer steps."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import prod
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, CollectiveKind, Op
from perfmodel.prediction._zero import (
    STATES,
    Exchange,
    StateLayout,
    StatePlace,
    exchange,
    exchanged_units,
    exchanges,
    gathered_again,
    is_trained,
    stored_params,
    trained_params,
    update,
)
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.placement import Group, Placement, rank_strides
from perfmodel.program import WHOLE, Kind, ProgramSpec, Structure
from perfmodel.spec import OPTIMIZERS, Cluster, Job, Layout, interleaved_groups
from perfmodel.units import dtype_bytes
from perfmodel.workload import BlockOps, orthogonalisation

NO_EVENT: Final = -1
"""Place of an event that does not exist."""
_KINDS: dict[Exchange, Kind] = {
    "all_reduce": Kind.GRAD_REDUCE,
    "reduce_scatter": Kind.GRAD_REDUCE,
    "all_reduce_copies": Kind.GRAD_REDUCE,
    "all_gather": Kind.PARAM_GATHER,
    "all_gather_backward": Kind.PARAM_GATHER_BACKWARD,
}
"""Kind of the classes that hold each exchange of model states."""


@dataclass(frozen=True, eq=False)
class StageEvents:
    """The events of one kind of pass or transfer, by pipeline stage and segment."""

    kind: Kind
    """Kind of pass or transfer that the classes belong to."""
    span: int
    """Micro-batches that the events are for."""
    index: Int[np.ndarray, "stages segments"]
    """Event of every stage and segment, `NO_EVENT` for none; one segment where stages have but one
    event."""
    times: Int[np.ndarray, "stages segments"]
    """Number of occurrences of each event there."""


@dataclass(eq=False)
class CommunicationEvents:
    """All events of a step that lie between blocks."""

    ops: dict[Op, int] = field(default_factory=dict)
    """Distinct events and their numbers."""
    tables: list[StageEvents] = field(default_factory=list)
    """A class may hold events of several tables."""

    def add(
        self,
        kind: Kind,
        amount: Float[np.ndarray, "stages segments"],
        make: Callable[[float], Op | None],
        units: Float[np.ndarray, "stages segments"] | None = None,
        span: int = 1,
    ) -> None:
        """Add an event of each stage and segment.

        Args:
            kind: kind of the classes that hold it.
            amount: bytes or parameters that it is about; 0 for no event.
            make: makes the event of an amount, if there is any.
            units: equal parts, one after another, that each amount is divided into; None: one.
            span: micro-batches that the events are for.
        """
        parts = np.ones(amount.shape) if units is None else units
        # Most stages hold as much as others: equal amounts make one event.
        values, inverse = np.unique(amount / parts, return_inverse=True)
        numbers = [self.number(make(value) if value > 0 else None) for value in values.tolist()]
        event_of_segment = np.array(numbers)[inverse].reshape(amount.shape)
        self.tables.append(StageEvents(kind, span, event_of_segment, parts.astype(int)))

    def number(self, op: Op | None) -> int:
        """The number of an event, assigned on first use; `NO_EVENT` for None."""
        return NO_EVENT if op is None else self.ops.setdefault(op, len(self.ops))


@dataclass(frozen=True, eq=False)
class PartitionedStep:
    """A step whose blocks are divided into stages and whose model states are placed on ranks."""

    ranks: Layout
    """Layout by which ranks are numbered; its other fields do not matter."""
    states: StateLayout
    """Placement of model states on the ranks."""
    blocks: ShardBlocks
    """Blocks of the shard."""
    spec: ProgramSpec
    """Program that runs them."""
    counts: Float[np.ndarray, "stages segments blocks"]
    """Blocks of every segment of every stage."""
    job: Job
    cluster: Cluster

    def on_first_chunk(
        self, amounts: Float[np.ndarray, " stages"]
    ) -> Float[np.ndarray, "stages 1"]:
        """Amounts of all chunks of a pipeline rank, at the stage of its first one."""
        # A pipeline rank updates all of its chunks at once: the class is of its first one.
        of_rank = np.zeros((len(amounts), 1))
        of_rank[self.spec.stage_map[:, 0], 0] = amounts[self.spec.stage_map].sum(axis=1)
        return of_rank

    def place_of(self, group: Group) -> StatePlace:
        """The ranks that hold the states of a group."""
        return StatePlace.of(group, self.ranks, self.states.replicate, self.spec.replicas)


def communication_events(step: PartitionedStep, spans: Iterable[int]) -> CommunicationEvents:
    """All events of a step that lie between blocks.

    Args:
        step: the blocks, and where they run.
        spans: numbers of micro-batches that transfers may carry.
    """
    events = CommunicationEvents()
    job, states = step.job, step.states

    # Activations and their gradients, between stages.
    if step.ranks.pp > 1:
        for span in spans:
            _add_sends(events, step, span)

    # Gradients, weights and optimizer states, over the ranks that hold the same parameters.
    _add_states(events, step)
    if is_trained(job) and not states.on_host and OPTIMIZERS[job.optimizer].newton_schulz:
        _add_orthogonalisation(events, step)

    # Both copies of a tied embedding, on the first and the last stage, need the sum of their
    # gradients.
    is_frozen = job.fine_tuning.frozen or job.fine_tuning.frozen_embedding
    if step.spec.tied_embedding and not is_frozen:
        ends = np.zeros((step.counts.shape[0], 1))
        ends[[0, -1]] = step.blocks.tied_params * dtype_bytes(job.gradients.grad_dtype)
        place = Placement.of("embedding", step.ranks)
        events.add(
            Kind.EMBEDDING_REDUCE,
            ends,
            lambda n: place.collective("all_reduce", n, job.gradients.grad_dtype, step.cluster),
        )
    return events


def _add_states(events: CommunicationEvents, step: PartitionedStep) -> None:
    """Add the collectives of gradients and weights, and the updates of the optimizer."""
    job, cluster, states = step.job, step.cluster, step.states
    pipelined = step.ranks.pp > 1
    units = exchanged_units(states.zero, step.blocks.layers, step.counts)
    gathered = trained = trained_params(step.blocks, pipelined, job)
    regathered = np.zeros(len(step.blocks.layers))
    if states.zero == 3:
        # Weights that are kept sharded are gathered whether they are trained or not.
        gathered = stored_params(step.blocks, pipelined, job)
        regathered = gathered_again(step.blocks, pipelined, job, states.reuse_params)
    for group in STATES:
        params = step.counts @ trained[group]
        place = step.place_of(group)
        for exchanged in exchanges(states.zero, job):
            is_gather = exchanged in ("all_gather", "all_gather_backward")
            events.add(
                _KINDS[exchanged],
                step.counts @ gathered[group] if is_gather else params,
                lambda n, e=exchanged, p=place: exchange(e, n, p, job, cluster),
                units,
            )
        if regathered.any():
            events.add(
                Kind.PARAM_GATHER_BACKWARD,
                step.counts @ (gathered[group] * regathered),
                lambda n, p=place: exchange("all_gather_backward", n, p, job, cluster),
                units,
            )
        if is_trained(job):
            shards = place.shards.size if states.zero else 1
            events.add(
                Kind.OPTIMIZER,
                step.on_first_chunk(params.sum(axis=1)),
                lambda n, s=shards: update(n, s, job, states.on_host),
            )


def _add_orthogonalisation(events: CommunicationEvents, step: PartitionedStep) -> None:
    """Add the products of optimizers that update whole matrices."""
    # Where states are sharded each rank gets some of the matrices, and what gathers the weights
    # exchanges the results.
    stage_map = step.spec.stage_map
    blocks_of_rank = step.counts.sum(axis=1)[stage_map].sum(axis=1)
    for group in STATES:
        shards = step.place_of(group).shards.size if step.states.zero else 1
        products: dict[Op, Float[np.ndarray, " stages"]] = {}
        for number, block in enumerate(step.blocks.blocks):
            matrices = orthogonalisation(block, step.job, experts=group == "expert_dp")
            for op, times in matrices.items():
                products[op] = products.get(op, 0.0) + times * blocks_of_rank[:, number]
        for op, times in products.items():
            products_of_rank = np.zeros((len(step.counts), 1))
            products_of_rank[stage_map[:, 0], 0] = np.ceil(times / shards)
            events.add(
                Kind.OPTIMIZER,
                products_of_rank,
                lambda n, op=op: op,
                np.maximum(products_of_rank, 1.0),
            )


def _add_sends(events: CommunicationEvents, step: PartitionedStep, span: int) -> None:
    """Add transfers of `span` micro-batches between stages, and the collectives by which the
    receiver completes them."""
    share = span / step.spec.scheduler.slices
    sent = transfers(step.ranks, step.blocks.blocks, share, step.job, step.cluster)
    hop = hops(step.spec, step.counts, step.ranks, step.cluster)
    directions = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
    for kind, block, tier, exists in zip(directions, hop.block, hop.tier, hop.exists, strict=True):
        # The send itself, and one after another the collectives that complete it.
        for place_of_stage in (sent.send[block, tier], *sent.completions[:, block]):
            numbers = []
            for place in np.where(exists, place_of_stage, NO_EVENT).tolist():
                numbers.append(NO_EVENT if place == NO_EVENT else events.number(sent.ops[place]))
            index = np.array(numbers)[:, None]
            events.tables.append(StageEvents(kind, span, index, np.ones(index.shape, int)))


@dataclass(frozen=True, eq=False)
class EventClasses:
    """Sparse matrix of the events between blocks that each class contains."""

    ops: tuple[Op, ...]
    """Distinct events of the classes."""
    times: EventTimes
    """Seconds of each of them."""
    class_index: Int[np.ndarray, " entries"]
    """Class of every occurrence."""
    op_index: Int[np.ndarray, " entries"]
    """Event (place in `ops`) of every occurrence."""
    n_classes: int
    """Number of classes of the program."""

    @cached_property
    def durations_s(self) -> Float[np.ndarray, " classes"]:
        """Seconds of each class; 0 for classes without such events."""
        return summed(self.class_index, self.times.time_s[self.op_index], self.n_classes)

    def occurrences(self, gradient: Float[np.ndarray, " classes"]) -> Float[np.ndarray, " ops"]:
        """Occurrences of each event, summed from those of its classes."""
        return np.bincount(
            self.op_index, gradient[self.class_index], minlength=len(self.ops)
        ).astype(float)


def event_entries(
    structure: Structure, events: CommunicationEvents
) -> tuple[Int[np.ndarray, " entries"], Int[np.ndarray, " entries"]]:
    """Class and event of every occurrence of an event in a class."""
    classes = [np.zeros(0, np.int64)]
    numbers = [np.zeros(0, np.int64)]
    for table in events.tables:
        classes_of_kind = np.flatnonzero(
            (structure.class_kind == table.kind) & (structure.class_span == table.span)
        )
        stage, segment = (
            structure.class_stage[classes_of_kind],
            structure.class_segment[classes_of_kind],
        )

        # Classes of one segment hold its event; those of a whole stage hold the events of all of
        # its segments.
        is_whole = segment == WHOLE
        class_of_segment, class_of_stage = classes_of_kind[~is_whole], classes_of_kind[is_whole]
        segment_events = table.index[stage[~is_whole], segment[~is_whole]]
        segment_times = table.times[stage[~is_whole], segment[~is_whole]]
        stage_events = table.index[stage[is_whole]]
        stage_times = table.times[stage[is_whole]]

        times = np.concatenate([segment_times, stage_times.reshape(-1)])
        holders = np.concatenate(
            [class_of_segment, np.repeat(class_of_stage, stage_events.shape[1])]
        )
        classes.append(np.repeat(holders, times))
        numbers.append(np.repeat(np.concatenate([segment_events, stage_events.reshape(-1)]), times))
    class_index = np.concatenate(classes)
    op_index = np.concatenate(numbers)
    real = op_index != NO_EVENT
    return class_index[real], op_index[real]


def summed(
    index: Int[Any, " entries"], values: Float[Any, "*lanes entries"], n: int
) -> Float[Any, "*lanes {n}"]:
    """Sums of the values of equal index."""
    xp = values.__array_namespace__()
    shape = (*values.shape[:-1], n)
    if xp is not np:
        return xp.zeros(shape, values.dtype).at[..., index].add(values)
    # `np.add.at` takes three times as long as counting with weights.
    index_of_lane = np.arange(prod(shape[:-1]))[:, None] * n + index
    sums = np.bincount(index_of_lane.ravel(), values.ravel(), prod(shape))
    # `bincount` of nothing gives integers.
    return sums.reshape(shape).astype(values.dtype, copy=False)


# --- transfers between pipeline stages
# --------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Transfers:
    """Events for sending each block's output over each distance.

    Tier 0 is inside a node, tier 1 + n crosses network level n.
    """

    ops: tuple[Op, ...]
    """All events of the transfers."""
    send: Int[np.ndarray, "blocks tiers"]
    """Place in `ops` of the send."""
    completions: Int[np.ndarray, "most blocks"]
    """Places of the collectives by which the receiver completes a sharded transfer, `NO_EVENT` for
    none."""

    def seconds(self, time_s: Float[np.ndarray, " ops"]) -> Float[np.ndarray, "blocks tiers"]:
        """Seconds of every transfer.

        Args:
            time_s: seconds of each op of `ops`.
        """
        after_s = np.append(time_s, 0.0)[self.completions].sum(axis=0)
        return time_s[self.send] + after_s[:, None]


def transfers(
    layout: Layout, blocks: Sequence[BlockOps], share: float, job: Job, cluster: Cluster
) -> Transfers:
    """Transfers of a shard, each carrying `share` of a micro-batch."""
    ops: list[Op] = []

    def add(op: Op) -> int:
        ops.append(op)
        return len(ops) - 1

    # Ranks send the part of a block's output that they hold, over any distance.
    tiers = range(len(cluster.levels) + 1)
    stride = rank_strides(layout)["pp"]
    sends = []
    for block in blocks:
        n_bytes = block.boundary_bytes * share
        sends.append([add(_send(n_bytes, tier, job.dtype, cluster, stride)) for tier in tiers])

    # Tensor-parallel ranks receive shards and complete them by collectives.
    completions_of_block = []
    for block in blocks:
        completions = []
        for comm in block.boundary_comm:
            place = Placement.of(comm.group, layout)
            for _ in range(comm.count):
                completions.append(
                    add(place.collective(comm.collective, comm.bytes * share, job.dtype, cluster))
                )
        completions_of_block.append(completions)
    by_step = np.array([*zip_longest(*completions_of_block, fillvalue=NO_EVENT)], int).reshape(
        -1, len(blocks)
    )
    return Transfers(tuple(ops), np.array(sends), by_step)


def _send(
    n_bytes: float,
    tier: int,
    dtype: str,
    cluster: Cluster,
    stride: int,
    kind: CollectiveKind = "send_recv",
) -> Collective:
    """Point-to-point between two ranks that are `stride` apart."""
    # The ranks between the two send at the same time, and if the message leaves the node all of its
    # devices do.
    return Collective(
        collective=kind,
        bytes=n_bytes,
        num_ranks=2,
        ranks_per_node=1 if tier else 2,
        dtype=dtype,
        level=max(0, tier - 1),
        concurrent=cluster.devices_per_node if tier else 1,
        interleaved=1 if tier else interleaved_groups(2, stride + 1),
    )


@dataclass(frozen=True, eq=False)
class Hops:
    """Destinations of each stage's transfers, forwards and backwards."""

    block: Int[np.ndarray, "2 stages"]
    """Block whose output is sent: the last of the earlier stage."""
    tier: Int[np.ndarray, "2 stages"]
    """Network tier of each transfer, as `Transfers` numbers the tiers."""
    exists: Bool[np.ndarray, "2 stages"]
    """Whether a stage has a neighbour to send to."""

    def seconds(self, table: Float[np.ndarray, "blocks tiers"]) -> Float[np.ndarray, "2 stages"]:
        """Seconds of every transfer, from `Transfers.seconds`."""
        return table[self.block, self.tier] * self.exists


def hops(
    spec: ProgramSpec,
    counts: Float[np.ndarray, "stages segments blocks"],
    layout: Layout,
    cluster: Cluster,
) -> Hops:
    """The hops of a pipeline; the first replica stands for all, because their hops cross equivalent
    links."""
    # On several kinds of nodes ranks are numbered on their own kind.
    pipeline_rank = rank_of_stage(spec)
    if layout.kinds is None:
        kind_of_rank = np.zeros(layout.pp, int)
        number_on_kind = np.arange(layout.pp)
    else:
        kinds = np.unique(layout.kinds, return_inverse=True)[1]
        numbers = [(kinds[:rank] == kind).sum() for rank, kind in enumerate(kinds.tolist())]
        kind_of_rank = kinds
        number_on_kind = np.array(numbers)
    kind = kind_of_rank[pipeline_rank]
    rank = number_on_kind[pipeline_rank] * rank_strides(layout)["pp"]

    # In both directions the output of the earlier stage's last block goes over the wire, or its
    # gradient.
    last_block = counts.shape[2] - 1 - (counts.sum(axis=1)[:, ::-1] > 0).argmax(axis=1)
    earlier = slice(None, -1)
    later = slice(1, None)
    block = np.zeros((2, spec.n_stages), int)
    tier = np.zeros((2, spec.n_stages), int)
    exists = np.zeros((2, spec.n_stages), bool)
    for direction, source, target in ((0, earlier, later), (1, later, earlier)):
        # Tier of pairs of ranks: 0 inside a node, else 1 + the innermost level that joins them (the
        # last if none).
        in_same_group = np.stack(
            [rank[source] // level.size == rank[target] // level.size for level in cluster.levels]
        )
        level = np.where(
            in_same_group.any(axis=0), in_same_group.argmax(axis=0), len(cluster.levels) - 1
        )
        on_one_kind = np.where(in_same_group[0], 0, 1 + level)
        # Transfers to another kind of nodes cross the outermost level.
        tier[direction, source] = np.where(
            kind[source] == kind[target], on_one_kind, outermost_tier(cluster)
        )
        block[direction, source] = last_block[:-1]
        exists[direction, source] = True
    return Hops(block, tier, exists)


def rank_of_stage(spec: ProgramSpec) -> Int[np.ndarray, " stages"]:
    """The first pipeline rank that holds each stage."""
    holds = spec.stage_map == np.arange(spec.n_stages)[:, None, None]
    return holds.any(axis=2).argmax(axis=1)


def outermost_tier(cluster: Cluster) -> int:
    """Network tier of traffic that leaves a cluster."""
    return len(cluster.levels) if len(cluster.levels) > 1 else 0


def across(op: Collective, cluster: Cluster) -> Collective:
    """An exchange between two clusters, as seen from the end on `cluster`."""
    return _send(op.bytes, outermost_tier(cluster), op.dtype, cluster, stride=1, kind=op.collective)
