"""Explains the step time: events on the critical path, all events, and the parts of every pass."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Final, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, Op
from perfmodel.prediction._compose import layout_batches
from perfmodel.prediction._durations import StepProgram, programs_of_step
from perfmodel.prediction._evaluate import per_step
from perfmodel.prediction._node_kinds import NodeKindShare
from perfmodel.prediction._prediction import CriticalEvent, PassEvent, PassPart
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._step_costs import has_whole_step_costs, overlap_loss, step_factors
from perfmodel.prediction.blocks import BlockTimes
from perfmodel.prediction.phases import Phase, phase_counts
from perfmodel.prediction.sites import CLASSES, class_of, factors_of
from perfmodel.program import Kind, is_of_kind
from perfmodel.spec import Layout


class _EventRow(NamedTuple):
    """Some events on the critical path."""

    count: Float[np.ndarray, " ops"]
    """How often each occurs."""
    seconds: Float[np.ndarray, " ops"]
    """Seconds of all occurrences."""
    half_width: Float[np.ndarray, " ops"]
    """Half-width of the 90 % interval of each event's time, relative to it."""


class CriticalPath:
    """Seconds of the step by event, from the gradient of the step time.

    The derivative of the step time with respect to an event's time counts how often the event lies
    on the critical path. The seconds of a collective include those by which it makes the kernels
    beside it run longer.

    Args:
        program: the (first) program of a layout's step.
        gradient: gradient of the step time with respect to the duration of each of its classes.
    """

    def __init__(self, program: StepProgram, gradient: Float[np.ndarray, " classes"]) -> None:
        durations, kinds = program.timed.durations_s, program.shares
        self.slowed_s = self.gap_s = self.waiting_s = 0.0
        self.host_updates_s = self.state_copies_s = 0.0
        self.ops: tuple[Op, ...] = ()
        self._node_kinds: list[str] = []
        self.provenance: tuple[str, ...] = ()
        self._rows: list[_EventRow] = []
        for share in kinds:
            self._add(share, durations, gradient)
        self.count = np.concatenate([row.count for row in self._rows])
        self.seconds = np.concatenate([row.seconds for row in self._rows])
        self.half_width = np.concatenate([row.half_width for row in self._rows])

        copies = is_of_kind(
            program.timed.prepared.structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD)
        )
        self.copies_s = float((gradient * durations)[copies].sum())
        self.copies_s += sum(float((gradient * share.copy_waits_s[0]).sum()) for share in kinds)

        # Stragglers and overhead lengthen all durations: the rest of the path is theirs.
        self.step_costs_s = 0.0
        if any(has_whole_step_costs(share.problem) for share in kinds):
            self.step_costs_s = float(gradient @ durations) - self.total_s

    def _add(
        self,
        share: NodeKindShare,
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> None:
        """Add the events of one kind of nodes."""
        events_before = len(self.ops)
        with_slowing = gradient + self._slowed_by_collectives(share, durations, gradient)
        self._add_between_blocks(share, with_slowing)
        self._add_in_blocks(share, gradient)
        node_kind = f" on {share.problem.cluster.name}" if share.on is not None else ""
        self._node_kinds += [node_kind] * (len(self.ops) - events_before)

    def _slowed_by_collectives(
        self,
        share: NodeKindShare,
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> Float[np.ndarray, " classes"]:
        """What reductions and gathers add to the gradient by slowing the passes beside them."""
        in_blocks = share.only(gradient)
        overlap = share.batch.program.overlap
        loss = overlap_loss(share.problem)
        between_s = share.events[0].durations_s + share.host_state_s[0]
        unslowed_s = durations / np.prod(step_factors(share.problem, share.batch.layouts[0]))
        passes = overlap.slowed[overlap.place]
        slowing_s = np.zeros_like(unslowed_s)
        np.add.at(slowing_s, passes, loss * overlap.share * between_s[overlap.comm])

        # A pass is slowed no longer than it runs. Beyond that it is the pass whose time counts, not
        # the collective.
        follows_collective = slowing_s <= loss * unslowed_s
        by_collective = np.zeros_like(unslowed_s)
        np.add.at(
            by_collective,
            overlap.comm,
            (in_blocks * follows_collective)[passes] * loss * overlap.share,
        )
        self.slowed_s += float((in_blocks * unslowed_s)[~follows_collective].sum() * loss)
        return by_collective

    def _add_between_blocks(
        self, share: NodeKindShare, with_slowing: Float[np.ndarray, " classes"]
    ) -> None:
        """Add collectives of states and transfers, with the passes that they slow."""
        between_blocks = share.events[0]
        occurrences = between_blocks.occurrences(with_slowing)
        self.ops += between_blocks.ops
        self.provenance += between_blocks.times.provenance
        self._rows.append(
            _EventRow(
                occurrences,
                occurrences * between_blocks.times.time_s,
                _half_widths(between_blocks.times),
            )
        )

        # States in host memory: copies take part in reductions and gathers, updates in the
        # optimizer's step.
        updates = prepared(share.batch.spec).structure.class_kind == Kind.OPTIMIZER
        on_host_s = with_slowing * share.host_state_s[0]
        self.host_updates_s += float(on_host_s[updates].sum())
        self.state_copies_s += float(on_host_s[~updates].sum())

    def _add_in_blocks(self, share: NodeKindShare, gradient: Float[np.ndarray, " classes"]) -> None:
        """Add the events inside blocks: each phase with the share of it that nothing else hides."""
        in_blocks = share.only(gradient)
        for times, paired, runs in share.passes:
            weight = np.sum(
                [np.tensordot(in_blocks[classes], counts, 1) for _, classes, counts in runs], axis=0
            )
            exposed = weight * times.exposed_share(paired)
            self.gap_s += float((exposed * times.gap_s).sum())
            self.waiting_s += float((exposed * times.waiting_s).sum())
            self.ops += times.ops
            self.provenance += times.times.provenance
            count = np.einsum("bp,bpo->o", weight, times.counts)
            seconds = np.einsum("bp,bpo->o", exposed, times.event_s + times.slowing_s)
            self._rows.append(_EventRow(count, seconds, _half_widths(times.times)))

    @property
    def other_s(self) -> float:
        """Seconds of the step not spent in events."""
        on_host_s = self.copies_s + self.state_copies_s + self.host_updates_s
        return self.gap_s + self.waiting_s + self.slowed_s + on_host_s + self.step_costs_s

    @property
    def total_s(self) -> float:
        """Length of the path in seconds."""
        return float(self.seconds.sum()) + self.other_s

    def events(self) -> tuple[CriticalEvent, ...]:
        """Events by decreasing share, summing to the step; gaps and the host's copies and updates
        count as events."""
        # A collective of forward and backward passes is one event to a reader, although it hides
        # behind different kernels in each.
        count: dict[str, float] = defaultdict(float)
        seconds: dict[str, float] = defaultdict(float)
        for i in np.flatnonzero(self.seconds > 0).tolist():
            name = self.ops[i].label + self._node_kinds[i]
            count[name] += float(self.count[i])
            seconds[name] += float(self.seconds[i])
        named = [
            CriticalEvent(event=name, count=count[name], time_s=seconds[name]) for name in seconds
        ]
        beyond_events = {
            "kernel launch gaps": self.gap_s,
            "waiting for the slowest rank": self.waiting_s,
            "kernels slowed by communication": self.slowed_s,
            "copies to and from the host": self.copies_s + self.state_copies_s,
            "optimizer on the host": self.host_updates_s,
        }
        named += [
            CriticalEvent(event=name, count=1.0, time_s=s)
            for name, s in beyond_events.items()
            if s > 0
        ]
        if self.step_costs_s:
            name = "stragglers, overhead, and corrections from similar runs"
            named.append(CriticalEvent(event=name, count=1.0, time_s=self.step_costs_s))
        return tuple(sorted(named, key=lambda e: -e.time_s))

    @cached_property
    def provenance_shares(self) -> dict[str, float]:
        """Share of the critical path by origin of its times."""
        shares: dict[str, float] = dict.fromkeys(
            ("measured", "learned", "analytical", "extrapolated"), 0.0
        )
        # A step without any event (all is overhead) rests on nothing.
        total = float(self.seconds.sum()) or 1.0
        for name, value in zip(self.provenance, self.seconds.tolist(), strict=True):
            shares[name] = shares.get(name, 0.0) + value / total
        return shares

    @cached_property
    def class_shares(self) -> dict[str, float]:
        """Shares of the step by class of events (`CLASSES`)."""
        seconds_of_class: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
        for op, seconds in zip(self.ops, self.seconds.tolist(), strict=True):
            seconds_of_class[class_of(factors_of(op)[1])] += seconds
        seconds_of_class["host"] += self.gap_s
        seconds_of_class["other"] += self.other_s - self.gap_s
        return {name: seconds / self.total_s for name, seconds in seconds_of_class.items()}

    def shares(self) -> dict[str, float]:
        """Shares of the step that are uncertain: extrapolation, the host, the network between
        nodes."""
        total = self.total_s
        between_nodes = np.array(
            [isinstance(op, Collective) and op.num_nodes > 1 for op in self.ops], bool
        )
        provenance = self.provenance_shares
        return {
            "extrapolated": provenance["extrapolated"] + provenance["analytical"],
            "host": self.gap_s / total,
            "network": float(self.seconds[between_nodes].sum()) / total,
        }


def _half_widths(times: EventTimes) -> Float[np.ndarray, " ops"]:
    """Half-widths of the 90 % intervals of events, relative to their times."""
    return (times.hi_s - times.lo_s) / 2 / np.maximum(times.time_s, 1e-12)


@dataclass(frozen=True, eq=False)
class EventShares:
    """The distinct events of one layout's step."""

    step_time_s: float
    """Seconds of the step."""
    gap_s: float
    """Seconds of the step outside events: host, launch gaps, waits, contention, copies to the host,
    and the step's other costs."""
    waiting_s: float
    """Seconds of `gap_s` in which ranks wait for the last of a group."""
    ops: tuple[Op, ...]
    """Events of the step, in the order of the other fields."""
    critical_s: Float[np.ndarray, " ops"]
    """d step time / d log(event time): seconds of the step's critical path that the event takes."""
    executions: Float[np.ndarray, " ops"]
    """How often the step runs the event, counted on every device that takes part."""


def event_shares(problem: StepProblem, layout: Layout) -> EventShares:
    """Distinct events of a step (DistSim section 4.1), with the contribution of each.

    Communication counts only as far as it is exposed; a block that waits for its host counts with
    the time of its kernels.

    Raises:
        LayoutError: if the model does not divide as the layout asks.
    """
    (batch,) = layout_batches(problem, [layout])
    programs = programs_of_step(problem, batch)
    first = programs[0]
    step_s, gradient, _ = per_step([program.timed for program in programs])
    path = CriticalPath(first, gradient)

    # A program has a class as the duration of an op, or as a transfer between two ops. With these
    # counts in place of the gradient every event counts, whether it lies on the critical path or
    # not.
    structure = first.timed.prepared.structure
    classes = np.concatenate([structure.duration, structure.lag.ravel()])
    occurrences = np.bincount(classes, minlength=structure.n_classes).astype(float)
    counted = CriticalPath(first, occurrences / batch.spec.steps)

    # The path lists an event once for each block time that it is part of.
    index: dict[Op, int] = {}
    number_of_event = np.array([index.setdefault(op, len(index)) for op in path.ops])
    replicas = layout.devices / layout.pp
    return EventShares(
        step_time_s=step_s,
        gap_s=path.other_s,
        waiting_s=path.waiting_s,
        ops=tuple(index),
        critical_s=np.bincount(number_of_event, path.seconds, len(index)),
        executions=np.bincount(number_of_event, counted.count, len(index)) * replicas,
    )


_ORDER: Final = (
    Phase.FORWARD,
    Phase.RECOMPUTE_SELECTIVE,
    Phase.RECOMPUTE_FULL,
    Phase.BACKWARD_INPUT,
    Phase.BACKWARD_WEIGHT,
)
"""Order in which a pass runs the phases of a block."""


def pass_parts(program: StepProgram) -> dict[int, tuple[PassPart, ...]]:
    """Blocks of each class of pass in execution order; their times sum to the class's duration."""
    parts_of_class: dict[int, tuple[PassPart, ...]] = {}
    for share in program.shares:
        parts_of_class |= _pass_parts_on(share, program.timed.durations_s)
    return parts_of_class


def _pass_parts_on(
    share: NodeKindShare, durations_s: Float[np.ndarray, " classes"]
) -> dict[int, tuple[PassPart, ...]]:
    """`pass_parts` of the classes on one kind of nodes."""
    layout = share.batch.layouts[0]
    passes = share.batch.program.passes
    parts_of_class: dict[int, tuple[PassPart, ...]] = {}
    for times, paired, runs_of_kinds in share.passes:
        exposed = times.exposed_share(paired)
        for kind, classes, _ in runs_of_kinds:
            classes_here = classes if share.on is None else classes[share.on[classes]]
            blocks_of_class = {
                pass_class: list(_blocks(kind, passes.blocks[pass_class], passes.full[pass_class]))
                for pass_class in classes_here.tolist()
            }
            # Blocks of one kind of pass are the same in all of its classes, except whether they are
            # recomputed in full.
            part_of_block: dict[tuple[int, bool], PassPart] = {}
            for block, in_full in set(chain.from_iterable(blocks_of_class.values())):
                (runs,) = phase_counts(
                    kind, layout.recompute, np.ones(1), np.array([float(in_full)])
                )
                part_of_block[block, in_full] = _part(times, block, runs, exposed[block])
            for pass_class, blocks in blocks_of_class.items():
                parts = [part_of_block[block] for block in blocks]
                parts_of_class |= _stretched(parts, pass_class, float(durations_s[pass_class]))
    return parts_of_class


def _stretched(
    parts: Sequence[PassPart], pass_class: int, duration_s: float
) -> dict[int, tuple[PassPart, ...]]:
    """The parts of a class of pass, as long together as the pass; nothing for an empty pass."""
    # Stragglers and other slowdowns of the class as a whole stretch all of its blocks.
    total_s = sum(part.time_s for part in parts)
    if total_s <= 0:
        return {}
    return {pass_class: tuple(_scaled(part, duration_s / total_s) for part in parts)}


def _part(
    times: BlockTimes,
    block: int,
    runs: Float[np.ndarray, " phases"],
    exposed: Float[np.ndarray, " phases"],
) -> PassPart:
    """A block of a pass with its events.

    Args:
        times: times of all blocks.
        block: index of the block.
        runs: number of runs through each phase.
        exposed: share of each phase that nothing else hides.
    """
    event_s = (times.event_s + times.slowing_s)[block] * (runs * exposed)[:, None]
    events = []
    for phase in _ORDER:
        for number in np.flatnonzero(event_s[phase]).tolist():
            count = float(runs[phase] * times.counts[block, phase, number])
            seconds = float(event_s[phase, number])
            events.append(PassEvent(times.ops[number].label, times.groups[number], count, seconds))
    return PassPart(
        times.blocks[block].name, float((runs * exposed) @ times.phase_s[block]), tuple(events)
    )


def _blocks(
    kind: Kind, counts: Float[np.ndarray, " blocks"], full: Float[np.ndarray, " blocks"]
) -> Iterator[tuple[int, bool]]:
    """Blocks of a pass one by one, and whether each is recomputed in full; backward runs through
    them from the end."""
    order = -1 if kind != Kind.FORWARD else 1
    for block in range(len(counts))[::order]:
        in_full = round(full[block])
        for copy in range(round(counts[block]))[::order]:
            yield block, copy < in_full


def _scaled(part: PassPart, factor: float) -> PassPart:
    """A block of a pass and its events, `factor` times as long."""
    events = (
        PassEvent(event.name, event.group, event.count, event.time_s * factor)
        for event in part.events
    )
    return PassPart(part.name, part.time_s * factor, tuple(events))
