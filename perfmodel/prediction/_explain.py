"""Why the step takes as long as it does: events on the critical path and in all, and what every pass is made of."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from jaxtyping import Float

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, Op
from perfmodel.prediction._adjustment import factors_of
from perfmodel.prediction._blocks import BlockTimes
from perfmodel.prediction._compose import bundles
from perfmodel.prediction._durations import NodeKindShare, parts
from perfmodel.prediction._evaluate import per_step, step_programs
from perfmodel.prediction._phases import Phase, phase_counts
from perfmodel.prediction._population import CLASSES, class_of
from perfmodel.prediction._prediction import CriticalEvent, PassEvent, PassPart
from perfmodel.prediction._price import block_times
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._step_costs import beside_loss, has_whole_step_costs, step_factors
from perfmodel.program import PAIRED, Kind
from perfmodel.spec import Layout


class CriticalPath:
    """Seconds of the step by event, from the gradient of the step time: a collective's with those by which it makes
    kernels run longer."""

    def __init__(
        self,
        kinds: Sequence[NodeKindShare],
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> None:
        self.slowed_s = self.gap_s = self.waiting_s = 0.0
        self.host_updates_s = self.state_copies_s = 0.0
        self.ops: tuple[Op, ...] = ()
        self._kinds: list[str] = []
        self.provenance: tuple[str, ...] = ()
        self._found: list[tuple[Float[np.ndarray, " ops"], ...]] = []
        for part in kinds:
            self._add(part, durations, gradient)
        self.count, self.seconds, self.half_width = map(np.concatenate, zip(*self._found, strict=True))
        copies = np.isin(prepared(kinds[0].bundle.spec).structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD))
        self.copies_s = float((gradient * durations)[copies].sum())
        self.copies_s += sum(float((gradient * part.copy_waits_s).sum()) for part in kinds)
        self.step_costs_s = 0.0
        if any(has_whole_step_costs(part.problem) for part in kinds):
            self.step_costs_s = float(gradient @ durations) - self.total_s

    def _add(
        self, part: NodeKindShare, durations: Float[np.ndarray, " classes"], gradient: Float[np.ndarray, " classes"]
    ) -> None:
        """What of the path lies on one kind of nodes."""
        between, before = part.events[0], len(self.ops)
        inside = part.only(gradient)
        with_slowing = gradient + self._slowing(part, durations, inside)
        outside = between.occurrences(with_slowing)
        self.ops += between.ops
        self.provenance += between.times.provenance
        self._found.append((outside, outside * between.times.time_s, _half_widths(between.times)))

        # States in host memory: copies take part in reductions and gathers, updates in the optimizer's step.
        updates = prepared(part.bundle.spec).structure.class_kind == Kind.OPTIMIZER
        on_host_s = with_slowing * part.host_state_s
        self.host_updates_s += float(on_host_s[updates].sum())
        self.state_copies_s += float(on_host_s[~updates].sum())
        for table, paired, classes in part.passes:
            weight = np.sum([np.tensordot(inside[where], counts, 1) for where, counts in classes], axis=0)
            shown = weight * table.shown(paired)
            self.gap_s += float((shown * table.gap_s).sum())
            self.waiting_s += float((shown * table.waiting_s).sum())
            self.ops += table.ops
            self.provenance += table.times.provenance
            count = np.einsum("bp,bpo->o", weight, table.counts)
            seconds = np.einsum("bp,bpo->o", shown, table.event_s + table.slowing_s)
            self._found.append((count, seconds, _half_widths(table.times)))
        kind = f" on {part.problem.cluster.name}" if part.on is not None else ""
        self._kinds += [kind] * (len(self.ops) - before)

    def _slowing(
        self,
        part: NodeKindShare,
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> Float[np.ndarray, " classes"]:
        """What reductions and gathers add to the gradient by slowing the passes beside them. Where these cannot run
        any longer than they do, it is their own time that counts (`slowed_s`)."""
        problem, bundle = part.problem, part.bundle
        beside, loss = bundle.program.beside, beside_loss(problem)
        between_s = part.events[0].durations_s + part.host_state_s
        alone_s = durations / np.prod(step_factors(problem, bundle.layouts[0]))
        passes, wanted_s = beside.slowed[beside.place], np.zeros_like(alone_s)
        np.add.at(wanted_s, passes, loss * beside.share * between_s[beside.comm])
        free = wanted_s <= loss * alone_s
        added = np.zeros_like(alone_s)
        np.add.at(added, beside.comm, (gradient * free)[passes] * loss * beside.share)
        self.slowed_s += float((gradient * alone_s)[~free].sum() * loss)
        return added

    @property
    def other_s(self) -> float:
        """Seconds of the step that no event takes."""
        on_host_s = self.copies_s + self.state_copies_s + self.host_updates_s
        return self.gap_s + self.waiting_s + self.slowed_s + on_host_s + self.step_costs_s

    @property
    def total_s(self) -> float:
        """Seconds of the path."""
        return float(self.seconds.sum()) + self.other_s

    def events(self) -> tuple[CriticalEvent, ...]:
        """Events by falling share, which sum to the step; gaps, copies and updates of the host are events too."""
        order = np.argsort(-self.seconds, kind="stable")
        named = [
            CriticalEvent(
                event=self.ops[i].label + self._kinds[i], count=float(self.count[i]), time_s=float(self.seconds[i])
            )
            for i in order.tolist()
            if self.seconds[i] > 0
        ]
        others = {
            "kernel launch gaps": self.gap_s,
            "waiting for the slowest rank": self.waiting_s,
            "kernels slowed by communication": self.slowed_s,
            "copies to and from the host": self.copies_s + self.state_copies_s,
            "optimizer on the host": self.host_updates_s,
        }
        named += [CriticalEvent(event=name, count=1.0, time_s=s) for name, s in others.items() if s > 0]
        if self.step_costs_s:
            name = "stragglers, overhead, and what like runs showed"
            named.append(CriticalEvent(event=name, count=1.0, time_s=self.step_costs_s))
        return tuple(sorted(named, key=lambda e: -e.time_s))

    @cached_property
    def provenance_shares(self) -> dict[str, float]:
        """Share of the critical path by origin of its times."""
        shares: dict[str, float] = dict.fromkeys(("measured", "learned", "analytical", "extrapolated"), 0.0)
        total = float(self.seconds.sum()) or 1.0
        for name, value in zip(self.provenance, self.seconds.tolist(), strict=True):
            shares[name] = shares.get(name, 0.0) + value / total
        return shares

    def family_half_widths(self) -> dict[str, float]:
        """Half-width of the 90 % interval of the step time that each op family contributes, relative to it."""
        family: dict[str, float] = defaultdict(float)
        for op, seconds, half in zip(self.ops, self.seconds.tolist(), self.half_width.tolist(), strict=True):
            family[op.family] += seconds * half
        return {name: value / self.total_s for name, value in family.items()}

    @cached_property
    def class_shares(self) -> dict[str, float]:
        """Shares of the step by class of events (`CLASSES`)."""
        found: dict[str, float] = dict.fromkeys(CLASSES, 0.0)
        for op, seconds in zip(self.ops, self.seconds.tolist(), strict=True):
            found[class_of(factors_of(op)[1])] += seconds
        found["host"] += self.gap_s
        found["other"] += self.other_s - self.gap_s
        return {name: seconds / self.total_s for name, seconds in found.items()}

    def shares(self) -> dict[str, float]:
        """Shares of the step that rest on little."""
        total = self.total_s
        between = np.array([isinstance(op, Collective) and op.num_nodes > 1 for op in self.ops], bool)
        known = self.provenance_shares
        return {
            "extrapolated": known["extrapolated"] + known["analytical"],
            "host": self.gap_s / total,
            "network": float(self.seconds[between].sum()) / total,
        }


def _half_widths(times: EventTimes) -> Float[np.ndarray, " ops"]:
    return (times.hi_s - times.lo_s) / 2 / np.maximum(times.time_s, 1e-12)


@dataclass(frozen=True, eq=False)
class EventShares:
    """The distinct events of one layout's step."""

    step_time_s: float
    gap_s: float
    """Seconds of the step that no event takes: host, launch gaps, waiting, contention, copies to the host,
    what the step costs beyond."""
    waiting_s: float
    """The part of them that ranks wait for the last of a group."""
    ops: tuple[Op, ...]
    critical_s: Float[np.ndarray, " ops"]
    """d step time / d log(event time): seconds of the step's critical path that the event takes."""
    executions: Float[np.ndarray, " ops"]
    """How often the step runs the event, counted on every device that takes part."""


def event_shares(problem: StepProblem, layout: Layout) -> EventShares:
    """Distinct events of a step (DistSim section 4.1) with what each contributes.

    Hidden communication counts with its exposed part only; a block that waits for its host counts with the time
    of its kernels.

    Raises:
        LayoutError: if the model does not divide as the layout asks.
    """
    (bundle,), (programs,) = bundles(problem, [layout]), step_programs(problem, [layout])
    (program, durations, _), kinds = programs[0], parts(problem, bundle)
    step_s, gradient, _ = per_step(programs)
    path = CriticalPath(kinds, durations, gradient)
    # how often the program has each class, as an op's own duration or as a transfer between two
    occurring = np.concatenate([program.structure.duration, program.structure.lag.ravel()])
    often = np.bincount(occurring, minlength=program.structure.n_classes).astype(float)
    counted = CriticalPath(kinds, durations, often / bundle.spec.steps)
    index: dict[Op, int] = {}
    at = np.array([index.setdefault(op, len(index)) for op in path.ops])
    replicas = layout.devices / layout.pp
    return EventShares(
        step_time_s=step_s,
        gap_s=path.other_s,
        waiting_s=path.waiting_s,
        ops=tuple(index),
        critical_s=np.bincount(at, path.seconds, len(index)),
        executions=np.bincount(at, counted.count, len(index)) * replicas,
    )


_ORDER: Final = (
    Phase.FORWARD, Phase.RECOMPUTE_SELECTIVE, Phase.RECOMPUTE_FULL, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT,
)  # fmt: skip
"""In which a pass runs through the phases of a block."""


def pass_parts(
    kinds: Sequence[NodeKindShare], durations_s: Float[np.ndarray, " classes"]
) -> dict[int, tuple[PassPart, ...]]:
    """Blocks of each class of pass, in the order in which they run; together they take as long as the class.

    Args:
        kinds: parts of a program of one layout.
        durations_s: of its program's classes.
    """
    found: dict[int, tuple[PassPart, ...]] = {}
    for part in kinds:
        found |= _of_kind(part, durations_s)
    return found


def _of_kind(part: NodeKindShare, durations_s: Float[np.ndarray, " classes"]) -> dict[int, tuple[PassPart, ...]]:
    """The same of the classes on one kind of nodes."""
    problem, bundle = part.problem, part.bundle
    layout, passes = bundle.layouts[0], bundle.program.passes
    found: dict[int, tuple[PassPart, ...]] = {}
    for variant, of_kind in passes.of_variant.items():
        table = block_times(problem, layout, variant, bundle.spec.scheduler.slices)
        shown = table.shown(variant[2] == PAIRED)
        for kind, where in of_kind.items():
            known: dict[tuple[int, bool], PassPart] = {}
            for each in where.tolist() if part.on is None else where[part.on[where]].tolist():
                blocks = list(_blocks(kind, passes.blocks[each], passes.full[each]))
                for block, in_full in set(blocks) - known.keys():
                    (runs,) = phase_counts(kind, layout.recompute, np.ones(1), np.array([float(in_full)]))
                    known[block, in_full] = _part(table, block, runs, shown[block])
                pieces = [known[one] for one in blocks]
                total_s = sum(one.time_s for one in pieces)
                if total_s > 0:
                    found[each] = tuple(_scaled(one, float(durations_s[each]) / total_s) for one in pieces)
    return found


def _part(
    table: BlockTimes, block: int, runs: Float[np.ndarray, " phases"], shown: Float[np.ndarray, " phases"]
) -> PassPart:
    """A block that runs through its phases so often, of whose time so much is left that nothing else hides."""
    event_s = (table.event_s + table.slowing_s)[block] * (runs * shown)[:, None]
    events = tuple(
        PassEvent(table.ops[o].label, table.groups[o], float(runs[p] * table.counts[block, p, o]), float(event_s[p, o]))
        for p in _ORDER
        for o in np.flatnonzero(event_s[p]).tolist()
    )
    return PassPart(table.blocks[block].name, float((runs * shown) @ table.phase_s[block]), events)


def _blocks(
    kind: Kind, counts: Float[np.ndarray, " blocks"], full: Float[np.ndarray, " blocks"]
) -> Iterator[tuple[int, bool]]:
    """Blocks of a pass one by one, and whether each is recomputed in full; backward runs through them from the end."""
    backward = kind != Kind.FORWARD
    for block in range(len(counts))[:: -1 if backward else 1]:
        n, in_full = round(counts[block]), round(full[block])
        yield from ((block, i < in_full) for i in range(n)[:: -1 if backward else 1])


def _scaled(part: PassPart, factor: float) -> PassPart:
    events = (PassEvent(one.name, one.group, one.count, one.time_s * factor) for one in part.events)
    return PassPart(part.name, part.time_s * factor, tuple(events))
