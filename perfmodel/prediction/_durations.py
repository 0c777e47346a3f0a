"""Durations of a program's classes, from the times of their blocks and events.

On nodes of several kinds every class is of the kind that its stage lies on (`parts`): all of its blocks and collectives
are those of that kind, and what two kinds exchange takes as long as at the slower end.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, Op
from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._communication import EventClasses
from perfmodel.prediction._compose import Bundle, bundles, composed, event_classes, pass_s, phase_s
from perfmodel.prediction._layer_copies import copy_waits_s
from perfmodel.prediction._phases import full_recompute_s, passes_s, phase_counts
from perfmodel.prediction._price import block_times, priced_events
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._sends import across, rank_of_stage
from perfmodel.prediction._step_costs import beside_loss, has_step_costs, with_step_costs
from perfmodel.prediction._zero import host_bandwidth, host_block_s, host_state_s, host_takes_part
from perfmodel.program import PAIRED, Kind
from perfmodel.schedule import PassTimes
from perfmodel.spec import Layout

_EXCHANGED: Final = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD, Kind.EMBEDDING_REDUCE)
"""What stages exchange, which may lie on different kinds of nodes."""


@dataclass(frozen=True, eq=False)
class NodeKindShare:
    """The part of a program that runs on one kind of nodes."""

    problem: StepProblem
    """The step on this kind."""
    bundle: Bundle
    """The layouts as this kind runs them."""
    events: list[EventClasses]
    """Events between blocks, for each of the bundle's layouts."""
    on: Bool[np.ndarray, " classes"] | None = None
    """Classes whose blocks lie on it; None: all."""
    ranks: Bool[np.ndarray, " ranks"] | None = None
    """The same of pipeline ranks."""

    def only(self, of_class: Float[np.ndarray, "classes *some"]) -> Float[np.ndarray, "classes *some"]:
        """Zero the entries of classes that run on other kinds of nodes."""
        if self.on is None:
            return of_class
        return of_class * self.on.reshape(-1, *[1] * (of_class.ndim - 1))

    @cached_property
    def copy_waits_s(self) -> Float[np.ndarray, " classes"]:
        """What the passes of the first layout wait for copies of layers' activations."""
        return self.only(copy_waits_s(self.problem, self.bundle)[0])

    @cached_property
    def host_state_s(self) -> Float[np.ndarray, " classes"]:
        """What states of the first layout in host memory add to its classes: copies, and updates on the host."""
        return self.only(_host_state_s(self.problem, self.bundle)[0])

    @cached_property
    def passes(self) -> list[tuple[BlockTimes, bool, list[tuple[np.ndarray, Float[np.ndarray, "some blocks phases"]]]]]:
        """Passes of the first layout by variant: the times of their blocks, whether each runs beside another pass, and
        for each kind of pass its classes with how often they run through every phase of every block."""
        layout, passes, found = self.bundle.layouts[0], self.bundle.program.passes, []
        for variant, of_kind in passes.of_variant.items():
            counts = [
                (where, phase_counts(kind, layout.recompute, passes.blocks[where], passes.full[where]))
                for kind, where in of_kind.items()
                if len(where)
            ]
            table = block_times(self.problem, layout, variant, self.bundle.spec.scheduler.slices)
            found.append((table, variant[2] == PAIRED, counts))
        return found


def parts(problem: StepProblem, bundle: Bundle) -> list[NodeKindShare]:
    """A bundle's program by the kinds of nodes that it runs on; one part of all where nodes are alike."""
    if not problem.kinds:
        return [NodeKindShare(problem, bundle, event_classes(problem, bundle))]
    structure, spec = prepared(bundle.spec).structure, bundle.spec
    of_rank = kind_of_ranks(problem, bundle.layouts[0])
    of_stage = of_rank[rank_of_stage(spec)]
    of_class = of_stage[structure.class_stage]
    bundle_of = {
        kind: replace(bundle, composed=tuple(composed(problem.kinds[kind], layout) for layout in bundle.layouts))
        for kind in np.unique(of_rank).tolist()
    }
    to = structure.class_stage + np.where(structure.class_kind == Kind.SEND_BACKWARD, -1, 1)
    to = np.where(structure.class_kind == Kind.EMBEDDING_REDUCE, spec.n_stages - 1 - structure.class_stage, to)
    exchanged = np.isin(structure.class_kind, _EXCHANGED)
    other = np.where(exchanged, of_stage[np.clip(to, 0, spec.n_stages - 1)], of_class)
    events = {kind: event_classes(problem.kinds[kind], one) for kind, one in bundle_of.items()}
    whole = structure.class_kind == Kind.EMBEDDING_REDUCE
    dealt = [_cross_kind_events(problem, {kind: of[lane] for kind, of in events.items()}, of_class, other, whole)
             for lane in range(len(bundle.layouts))]  # fmt: skip
    return [
        NodeKindShare(problem.kinds[kind], one, [of[kind] for of in dealt], of_class == kind, of_rank == kind)
        for kind, one in bundle_of.items()
    ]


def kind_of_ranks(problem: StepProblem, layout: Layout) -> Int[np.ndarray, " ranks"]:
    """Place in `StepProblem.kinds` of the kind of every pipeline rank of a layout whose kinds are written out."""
    names = [one.cluster.name for one in problem.kinds]
    return np.array([names.index(name) for name in layout.kinds or names[:1] * layout.pp])


def _cross_kind_events(
    problem: StepProblem,
    events: Mapping[int, EventClasses],
    of_class: Int[np.ndarray, " classes"],
    other: Int[np.ndarray, " classes"],
    whole: Bool[np.ndarray, " classes"],
) -> dict[int, EventClasses]:
    """Events of one layout, each on the kind that runs it; entries are the same on all kinds but for their network.

    What crosses between kinds is with the end that takes longer; what completes it, with the receiver.

    Args:
        of_class, other: kind of every class, and of the stage that it exchanges something with.
        whole: classes of which everything is exchanged; of others sends are.
    """
    where = next(iter(events.values())).class_index
    owner = of_class[where].copy()
    crosses = np.flatnonzero(of_class[where] != other[where]).tolist()
    found: dict[int, list[tuple[Op, int]]] = {kind: [] for kind in events}
    for entry in crosses:
        here, there = int(of_class[where[entry]]), int(other[where[entry]])
        op = events[here].ops[events[here].op_index[entry]]
        owner[entry] = there
        if isinstance(op, Collective) and (op.collective == "send_recv" or whole[where[entry]]):
            ends = [(across(op, problem.links[kind].cluster), kind) for kind in (here, there)]
            seconds = [priced_events(problem.links[kind], [one]).time_s.item() for one, kind in ends]
            one, kind = ends[int(np.argmax(seconds))]
            found[kind].append((one, int(where[entry])))
            owner[entry] = -1
    dealt = {}
    for kind, of in events.items():
        mine = owner == kind
        links = [op for op, _ in found[kind]]
        dealt[kind] = EventClasses(
            ops=(*of.ops, *links),
            times=_joined(of.times, priced_events(problem.links[kind], links)) if links else of.times,
            class_index=np.concatenate([of.class_index[mine], [at for _, at in found[kind]]]).astype(int),
            op_index=np.concatenate([of.op_index[mine], len(of.ops) + np.arange(len(links))]).astype(int),
            n_classes=of.n_classes,
        )
    return dealt


def _joined(some: EventTimes, others: EventTimes) -> EventTimes:
    time_s, lo_s, hi_s = (
        np.concatenate([getattr(some, name), getattr(others, name)]) for name in ("time_s", "lo_s", "hi_s")
    )
    return EventTimes(time_s=time_s, lo_s=lo_s, hi_s=hi_s, provenance=some.provenance + others.provenance)


def durations(problem: StepProblem, bundle: Bundle) -> Float[np.ndarray, "lanes classes"]:
    """Seconds of every class of the bundle's program, a row per layout."""
    return durations_on(parts(problem, bundle))


def durations_on(kinds: Sequence[NodeKindShare]) -> Float[np.ndarray, "lanes classes"]:
    """`durations` of a bundle whose parts are known."""
    first, *others = kinds
    out = _durations(first)
    for part in others:
        out = out + _durations(part)
    return out


def _durations(part: NodeKindShare) -> Float[np.ndarray, "lanes classes"]:
    """Seconds of the classes on one kind of nodes."""
    problem, bundle, program = part.problem, part.bundle, part.bundle.program
    passes = program.passes.distinct
    out = np.concatenate([events.durations_s for events in part.events]).reshape(len(part.events), -1)
    inside = out if part.on is None else np.zeros_like(out)
    by_phase = {variant: phase_s(problem, bundle, variant) for variant in passes.runs}
    of_distinct = passes_s(by_phase, passes.weights, passes.runs, passes.full, bundle.modes)
    inside += of_distinct.take(passes.place, axis=1)
    if bundle.spec.offload:
        _add_host_copies(problem, bundle, inside)
    inside += copy_waits_s(problem, bundle)
    inside += _host_state_s(problem, bundle)
    if part.on is not None:
        out += inside * part.on
    if not has_step_costs(problem):
        return out
    scale = np.array([one.factor for one in bundle.composed])[:, None]
    optimizer = prepared(bundle.spec).optimizer
    if part.on is not None:
        optimizer = optimizer[part.on[optimizer]]
    return with_step_costs(out, problem.host.step_overhead_s, beside_loss(problem), scale, optimizer, program.beside)


def _host_state_s(problem: StepProblem, bundle: Bundle) -> Float[np.ndarray, "lanes classes"]:
    """What the host adds to every class: copies beside gathers and reductions, and updates of states that it holds."""
    structure = bundle.program.structure
    out = np.zeros((len(bundle.layouts), structure.n_classes))
    for row, composed_layout, layout in zip(out, bundle.composed, bundle.layouts, strict=True):
        if host_takes_part(problem.setting, layout):
            of_block_s = host_block_s(problem.setting, layout, composed_layout.events, bundle.spec)
            row += host_state_s(
                of_block_s,
                structure.class_kind,
                structure.class_stage,
                structure.class_segment,
                bundle.spec.stage_map,
                bundle.counts,
            )
    return out


def _add_host_copies(problem: StepProblem, bundle: Bundle, out: Float[np.ndarray, "lanes classes"]) -> None:
    """Copies of a stage's activations to and from host memory, at the link's nominal rate."""
    structure = prepared(bundle.spec).structure
    where = np.flatnonzero(np.isin(structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD)))
    of_stage = bundle.saved_bytes
    moved = of_stage[:, structure.class_stage[where]] * structure.class_span[where]
    out[:, where] = moved / bundle.spec.scheduler.slices / host_bandwidth(problem.cluster.device)


def pass_times(problem: StepProblem, layout: Layout) -> PassTimes:
    """What a scheduler needs to make an order of one's own for a layout: seconds of every stage's passes
    and of a transfer (the longest), one stage per device."""
    (bundle,) = bundles(problem, [layout.replace(schedule="zb-h1", vpp=1)])
    structure, durations_s = prepared(bundle.spec).structure, durations(problem, bundle)[0]
    of_stage, of_block = bundle.counts.sum(axis=1), pass_s(problem, bundle)
    forward, of_input, weight = (
        (of_block[kind] @ of_stage.T)[0] for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    extra = full_recompute_s(phase_s(problem, bundle), bundle.modes)
    of_input = of_input + (extra @ bundle.full.sum(axis=1).T)[0]
    sends = np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
    return PassTimes(forward, of_input, weight, float(durations_s[sends].max(initial=0.0)))
