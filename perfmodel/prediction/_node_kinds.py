"""Divides a program by the kinds of nodes that it runs on; usually there is one.

On nodes of several kinds every class belongs to the kind of its stage (`by_node_kind`): its blocks
and collectives take that kind's times, and a transfer between two kinds takes as long as at the
slower end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, Op
from perfmodel.prediction._block_times import block_times
from perfmodel.prediction._communication import EventClasses, across, rank_of_stage
from perfmodel.prediction._compose import LayoutBatch, composed, event_classes
from perfmodel.prediction._price import priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction.blocks import BlockTimes
from perfmodel.prediction.host import host_block_s, host_state_s
from perfmodel.prediction.layer_copies import copy_waits_s
from perfmodel.prediction.phases import phase_counts
from perfmodel.program import PAIRED, Kind, is_of_kind
from perfmodel.spec import Layout

_REPLACED: Final = -1
"""Owner of entries that are replaced by exchanges between kinds of nodes."""
_EXCHANGED: Final = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.EMBEDDING_REDUCE)
"""Kinds of classes in which stages exchange data, possibly between different kinds of nodes."""


@dataclass(frozen=True, eq=False)
class NodeKindShare:
    """The part of a program that runs on one kind of nodes."""

    problem: StepProblem
    """The same training step on a cluster of this kind of nodes only."""
    batch: LayoutBatch
    """The layouts as this kind runs them."""
    events: list[EventClasses]
    """Events between blocks, for each of the batch's layouts."""
    on: Bool[np.ndarray, " classes"] | None = None
    """Classes whose blocks lie on this kind of nodes; None: all."""
    ranks: Bool[np.ndarray, " ranks"] | None = None
    """Pipeline ranks that lie on this kind of nodes; None: all."""

    def only(
        self, values: Float[np.ndarray, "classes *rest"]
    ) -> Float[np.ndarray, "classes *rest"]:
        """Set the entries of classes on other kinds of nodes to zero."""
        if self.on is None:
            return values
        return values * self.on.reshape(-1, *[1] * (values.ndim - 1))

    @cached_property
    def copy_waits_s(self) -> Float[np.ndarray, "lanes classes"]:
        """Seconds that each layout's passes wait for copies of activations."""
        if not any(layout.offload_layers for layout in self.batch.layouts):
            return np.zeros((len(self.batch.layouts), self.batch.program.structure.n_classes))
        return self.only(copy_waits_s(self.problem, self.batch).T).T

    @cached_property
    def host_state_s(self) -> Float[np.ndarray, "lanes classes"]:
        """Seconds that each layout's states in host memory add to its classes: copies and host
        updates."""
        framework = self.problem.setting.framework
        structure = self.batch.program.structure
        seconds = np.zeros((len(self.batch.layouts), structure.n_classes))
        for lane, (terms, layout) in enumerate(
            zip(self.batch.composed, self.batch.layouts, strict=True)
        ):
            # Elsewhere `host_block_s` is zero.
            puts_partitions_together = layout.zero == 3 and framework.host.partition_copy_s > 0
            if layout.offload_states != "none" or puts_partitions_together:
                seconds[lane] += host_state_s(
                    host_block_s(self.problem.setting, layout, terms.events, self.batch.spec),
                    structure.class_kind,
                    structure.class_stage,
                    structure.class_segment,
                    self.batch.spec.stage_map,
                    self.batch.program.counts,
                )
        return self.only(seconds.T).T

    @cached_property
    def passes(self) -> list["VariantPasses"]:
        """Passes of the first layout, by variant."""
        layout = self.batch.layouts[0]
        passes = self.batch.program.passes
        slices = self.batch.spec.scheduler.slices
        by_variant = []
        for variant, classes_of_kind in passes.of_variant.items():
            runs = []
            for kind, classes in classes_of_kind.items():
                if len(classes):
                    counts = phase_counts(
                        kind, layout.recompute, passes.blocks[classes], passes.full[classes]
                    )
                    runs.append(PassRuns(kind, classes, counts))
            times = block_times(self.problem, layout, variant, slices)
            by_variant.append(VariantPasses(times, variant.beside == PAIRED, runs))
        return by_variant


class PassRuns(NamedTuple):
    """Classes of one kind of pass, and how often each runs every phase of every block."""

    kind: Kind
    """Kind of pass that the classes belong to."""
    classes: Int[np.ndarray, " classes"]
    """Numbers of these classes among all classes of the program."""
    counts: Float[np.ndarray, "classes blocks phases"]
    """Number of times that each class runs through every phase."""


class VariantPasses(NamedTuple):
    """Passes that take the same time in each block."""

    times: BlockTimes
    """Times of the blocks in these passes."""
    paired: bool
    """Whether each pass overlaps with another one."""
    runs: list[PassRuns]
    """One entry for each kind of pass."""


def by_node_kind(problem: StepProblem, batch: LayoutBatch) -> list[NodeKindShare]:
    """Divide a batch's program by kind of nodes; a single entry if all nodes are of one kind."""
    if not problem.kinds:
        return [NodeKindShare(problem, batch, event_classes(problem, batch))]
    structure = prepared(batch.spec).structure
    spec = batch.spec
    kind_of_rank = kind_of_ranks(problem, batch.layouts[0])
    kind_of_stage = kind_of_rank[rank_of_stage(spec)]
    kind_of_class = kind_of_stage[structure.class_stage]

    # The stage at the other end of a class's transfer: the next, the previous, or for tied
    # embeddings the last.
    class_kind, class_stage = structure.class_kind, structure.class_stage
    peer = class_stage + np.where(class_kind == Kind.SEND_BACKWARD, -1, 1)
    peer = np.where(class_kind == Kind.EMBEDDING_REDUCE, spec.n_stages - 1 - class_stage, peer)
    kind_of_peer = kind_of_stage[np.clip(peer, 0, spec.n_stages - 1)]
    kind_of_peer = np.where(is_of_kind(class_kind, _EXCHANGED), kind_of_peer, kind_of_class)

    # Every kind prices the whole program; then each event goes to the kind that runs it.
    batches: dict[int, LayoutBatch] = {}
    events_of_kinds: dict[int, list[EventClasses]] = {}
    for kind in np.unique(kind_of_rank).tolist():
        on_kind = problem.kinds[kind]
        batches[kind] = replace(batch, composed=tuple(composed(on_kind, batch.layouts)))
        events_of_kinds[kind] = event_classes(on_kind, batches[kind])
    assigned_events: dict[int, list[EventClasses]] = {kind: [] for kind in batches}
    for lane in range(len(batch.layouts)):
        events = {kind: of_layouts[lane] for kind, of_layouts in events_of_kinds.items()}
        exchanges_all = class_kind == Kind.EMBEDDING_REDUCE
        assigned = _assign_to_kinds(problem, events, kind_of_class, kind_of_peer, exchanges_all)
        for kind, events_on_kind in assigned.items():
            assigned_events[kind].append(events_on_kind)
    shares = []
    for kind, batch_on_kind in batches.items():
        share = NodeKindShare(
            problem=problem.kinds[kind],
            batch=batch_on_kind,
            events=assigned_events[kind],
            on=kind_of_class == kind,
            ranks=kind_of_rank == kind,
        )
        shares.append(share)
    return shares


def kind_of_ranks(problem: StepProblem, layout: Layout) -> Int[np.ndarray, " ranks"]:
    """Index in `StepProblem.kinds` of each pipeline rank's kind of nodes (0 if not named)."""
    names = [kind.cluster.name for kind in problem.kinds]
    name_of_rank = layout.kinds or names[:1] * layout.pp
    return np.array([names.index(name) for name in name_of_rank])


def _assign_to_kinds(
    problem: StepProblem,
    events: Mapping[int, EventClasses],
    kind_of_class: Int[np.ndarray, " classes"],
    kind_of_peer: Int[np.ndarray, " classes"],
    exchanges_all: Bool[np.ndarray, " classes"],
) -> dict[int, EventClasses]:
    """Assign each event of one layout to the kind of nodes that runs it.

    Args:
        events: events of the whole program, as priced on each kind.
        kind_of_class: kind of nodes that every class lies on.
        kind_of_peer: kind of nodes of the stage that the class exchanges something with.
        exchanges_all: classes all of whose events are exchanges; of others only sends are.
    """
    # Entries are the same on all kinds but for their network. An exchange between two kinds is
    # priced at the end where it takes longer; the collective that completes it on arrival belongs
    # to the receiver.
    entries = next(iter(events.values())).class_index
    owner = kind_of_class[entries].copy()
    crossing: dict[int, list[tuple[Op, int]]] = {kind: [] for kind in events}
    for entry in np.flatnonzero(kind_of_class[entries] != kind_of_peer[entries]).tolist():
        event_class = int(entries[entry])
        sender = int(kind_of_class[event_class])
        receiver = int(kind_of_peer[event_class])
        op = events[sender].ops[events[sender].op_index[entry]]
        # Transfers and exchanges of all ranks cross the link between the kinds.
        if isinstance(op, Collective) and (
            op.collective == "send_recv" or exchanges_all[event_class]
        ):
            slower, crossing_op = _slower_end(problem, op, sender, receiver)
            crossing[slower].append((crossing_op, event_class))
            owner[entry] = _REPLACED
        else:
            owner[entry] = receiver
    assigned = {}
    for kind, on_kind in events.items():
        assigned[kind] = _with_crossing(on_kind, owner == kind, crossing[kind], problem.links[kind])
    return assigned


def _slower_end(
    problem: StepProblem, op: Collective, sender: int, receiver: int
) -> tuple[int, Collective]:
    """Find the kind of nodes on whose side of the link an exchange takes longer, and the exchange
    as seen from that side."""
    ends = [(kind, across(op, problem.links[kind].cluster)) for kind in (sender, receiver)]
    seconds = [
        priced_events(problem.links[kind], [crossing]).time_s.item() for kind, crossing in ends
    ]
    return ends[int(np.argmax(seconds))]


def _with_crossing(
    events: EventClasses,
    runs_here: Bool[np.ndarray, " entries"],
    crossing: Sequence[tuple[Op, int]],
    link: StepProblem,
) -> EventClasses:
    """The entries that one kind of nodes runs, including exchanges with other kinds in which it is
    the slower side.

    Args:
        events: events of the whole program.
        runs_here: entries that this kind runs.
        crossing: exchanges with other kinds, each with its class.
        link: network between the kinds, as seen from this one.
    """
    if not crossing:
        return replace(
            events, class_index=events.class_index[runs_here], op_index=events.op_index[runs_here]
        )
    ops = [op for op, _ in crossing]
    classes = [event_class for _, event_class in crossing]
    numbers = len(events.ops) + np.arange(len(ops))
    return EventClasses(
        ops=(*events.ops, *ops),
        times=_joined(events.times, priced_events(link, ops)),
        class_index=np.concatenate([events.class_index[runs_here], classes]).astype(int),
        op_index=np.concatenate([events.op_index[runs_here], numbers]).astype(int),
        n_classes=events.n_classes,
    )


def _joined(first: EventTimes, second: EventTimes) -> EventTimes:
    """Events of two lists, one list behind the other."""
    return EventTimes(
        time_s=np.concatenate([first.time_s, second.time_s]),
        lo_s=np.concatenate([first.lo_s, second.lo_s]),
        hi_s=np.concatenate([first.hi_s, second.hi_s]),
        provenance=first.provenance + second.provenance,
    )
