"""Events between a model's blocks: sends, gradient reductions, weight gathers, optimizer steps."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import zip_longest

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._blocks import BlockTable
from perfmodel.prediction._memory import stored_dtype_bytes
from perfmodel.prediction._placement import Group, Placement, rank_strides
from perfmodel.program import Kind, ProgramSpec
from perfmodel.spec import Cluster, Collective, Job, Layout, Op
from perfmodel.units import dtype_bytes
from perfmodel.workload import BlockOps, Comm, optimizer_op

NO_EVENT = -1


@dataclass(frozen=True, eq=False)
class StageEvents:
    """Events of one kind: a class of the kind holds those of its stage and segment."""

    kind: Kind
    span: int
    """Micro-batches that they are for."""
    index: Int[np.ndarray, "stages segments"]
    """Event of every stage and segment, `NO_EVENT` for none; one segment where stages have but one event."""


@dataclass(eq=False)
class CommunicationEvents:
    """Every event of a step that belongs to no block."""

    ops: dict[Op, int] = field(default_factory=dict)
    """Distinct events and their numbers."""
    tables: list[StageEvents] = field(default_factory=list)
    """A class may hold events of several tables."""

    def add(
        self, kind: Kind, amount: Float[np.ndarray, "stages segments"], make: Callable[[float], Op], span: int = 1
    ) -> None:
        """Add the event that `make` makes of each amount (bytes, parameters) above 0."""
        values, inverse = np.unique(amount, return_inverse=True)
        numbers = [self.number(make(value)) if value > 0 else NO_EVENT for value in values.tolist()]
        self.tables.append(StageEvents(kind, span, np.array(numbers)[inverse].reshape(amount.shape)))

    def number(self, op: Op) -> int:
        """The number of an event, new or known."""
        return self.ops.setdefault(op, len(self.ops))


def communication_events(
    layout: Layout,
    table: BlockTable,
    spec: ProgramSpec,
    spans: Iterable[int],
    counts: Float[np.ndarray, "stages segments blocks"],
    job: Job,
    cluster: Cluster,
) -> CommunicationEvents:
    """Every event of the step that belongs to no block; `spans`: how many micro-batches transfers may carry."""
    events = CommunicationEvents()
    if layout.pp > 1:
        for span in spans:
            add_sends(events, layout, table, spec, span, counts, job, cluster)
    groups: dict[Group, Float[np.ndarray, "stages segments"]] = {
        "dp": counts @ table.dense_params(layout.pp > 1),
        "expert_dp": counts @ table.expert_params,
    }
    for group, params in groups.items():
        place = Placement.of(group, layout).times(spec.replicas, layout)
        if place.size > 1 and not (job.frozen and layout.zero < 3):
            _add_sharded_state(events, layout, place, params, job, cluster)
        if job.mode == "train" and not job.frozen:
            _add_optimizer(events, layout, place, params, spec, job)
    if spec.tied_embedding and not job.frozen:
        ends = np.zeros((counts.shape[0], 1))
        ends[[0, -1]] = table.tied_params * dtype_bytes(job.grad_dtype)
        place = Placement.of("embedding", layout)
        events.add(Kind.EMBEDDING_REDUCE, ends, lambda n: place.collective("all_reduce", n, job.grad_dtype, cluster))
    return events


def add_sends(
    events: CommunicationEvents,
    layout: Layout,
    table: BlockTable,
    spec: ProgramSpec,
    span: int,
    counts: Float[np.ndarray, "stages segments blocks"],
    job: Job,
    cluster: Cluster,
) -> None:
    """Transfers between stages; of replicas the first stands for all, whose hops cross the same links.

    What passes between two stages is the output of the last block of the earlier one.
    """
    share = span / spec.scheduler.slices
    rank, last = senders(spec, counts)
    holder = rank * rank_strides(layout)["pp"]
    size = np.array([block.boundary_bytes for block in table.blocks])[last[:-1]] * share
    for kind, source, target in (
        (Kind.SEND_FORWARD, slice(None, -1), slice(1, None)), (Kind.SEND_BACKWARD, slice(1, None), slice(None, -1)),
    ):  # fmt: skip
        level, same = hop_tiers(holder[source], holder[target], cluster)
        kinds, of_hop = np.unique(np.stack([size, level, same], axis=1), axis=0, return_inverse=True)
        sends = np.array([events.number(send(n, int(at), bool(s), job.dtype, cluster)) for n, at, s in kinds.tolist()])
        index = np.full((spec.n_stages, 1), NO_EVENT)
        index[source, 0] = sends[of_hop.reshape(-1)]
        events.tables.append(StageEvents(kind, span, index))
        # what was sent sharded is completed by the receiver before it can start
        for completion in zip_longest(*(completions(block) for block in table.blocks)):
            of_block = np.array(
                [
                    NO_EVENT if comm is None else events.number(
                        Placement.of(comm.group, layout).collective(
                            comm.collective, comm.bytes * share, job.dtype, cluster
                        )
                    )
                    for comm in completion
                ]
            )  # fmt: skip
            completing = np.full_like(index, NO_EVENT)
            completing[source, 0] = of_block[last[:-1]]
            events.tables.append(StageEvents(kind, span, completing))


def senders(
    spec: ProgramSpec, counts: Float[np.ndarray, "stages segments blocks"]
) -> tuple[Int[np.ndarray, " stages"], Int[np.ndarray, " stages"]]:
    """The first pipeline rank that holds each stage, and the stage's last block."""
    holds = spec.stage_map == np.arange(spec.n_stages)[:, None, None]
    return holds.any(axis=2).argmax(axis=1), counts.shape[2] - 1 - (counts.sum(axis=1)[:, ::-1] > 0).argmax(axis=1)


def completions(block: BlockOps) -> list[Comm]:
    """Collectives by which a receiver completes a block's output."""
    return [comm for comm in block.boundary_comm for _ in range(comm.count)]


def hop_tiers(
    source: Int[np.ndarray, " hops"], target: Int[np.ndarray, " hops"], cluster: Cluster
) -> tuple[Int[np.ndarray, " hops"], Int[np.ndarray, " hops"]]:
    """Innermost level that joins two ranks (the last if none does), and whether they share a node."""
    joined = np.stack([source // level.size == target // level.size for level in cluster.levels])
    return np.where(joined.any(axis=0), joined.argmax(axis=0), len(cluster.levels) - 1), joined[0]


def send(n_bytes: float, level: int, same: bool, dtype: str, cluster: Cluster) -> Collective:
    """Point-to-point between two ranks; when it leaves the node, all devices of the node send at once."""
    return Collective(
        collective="send_recv",
        bytes=n_bytes,
        num_ranks=2,
        ranks_per_node=2 if same else 1,
        dtype=dtype,
        level=level,
        concurrent=1 if same else cluster.devices_per_node,
    )


def _add_sharded_state(
    events: CommunicationEvents,
    layout: Layout,
    place: Placement,
    params: Float[np.ndarray, "stages segments"],
    job: Job,
    cluster: Cluster,
) -> None:
    whole = layout.zero == 0 or (layout.zero == 1 and job.all_reduce_gradients)
    reduce = "all_reduce" if whole else "reduce_scatter"
    wanted = [(Kind.GRAD_REDUCE, reduce, dtype_bytes(job.grad_dtype), job.grad_dtype)]
    if layout.zero:
        weight = stored_dtype_bytes(job)
        wanted += [(kind, "all_gather", weight, job.dtype) for kind in (Kind.PARAM_GATHER, Kind.PARAM_GATHER_BACKWARD)]
    for kind, collective, size, dtype in wanted:
        events.add(kind, params * size, lambda n, c=collective, d=dtype: place.collective(c, n, d, cluster))


def _add_optimizer(
    events: CommunicationEvents,
    layout: Layout,
    place: Placement,
    params: Float[np.ndarray, "stages segments"],
    spec: ProgramSpec,
    job: Job,
) -> None:
    """One update per pipeline rank over all its chunks, on its shard of the states."""
    shards = place.size if layout.zero else 1
    stages = np.zeros((len(params), 1))
    stages[spec.stage_map[:, 0], 0] = params.sum(axis=1)[spec.stage_map].sum(axis=1)
    events.add(Kind.OPTIMIZER, stages, lambda n: optimizer_op(-(-int(n) // shards), job))
