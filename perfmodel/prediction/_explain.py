"""Why the step takes as long as it does: events on the critical path, interval."""

from collections import defaultdict

import numpy as np
from jaxtyping import Float

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, Op
from perfmodel.prediction._adjustment import factors_of
from perfmodel.prediction._compose import Bundle, bundle_passes
from perfmodel.prediction._durations import OnKind, beside_in, parts
from perfmodel.prediction._phases import phase_counts
from perfmodel.prediction._population import CLASSES, class_of
from perfmodel.prediction._prediction import CriticalEvent
from perfmodel.prediction._price import variant_times
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._step_costs import beside_loss, has_whole_step_costs, step_factors
from perfmodel.program import Kind


class CriticalPath:
    """Seconds of the step by event, from the gradient of the step time: a collective's with those by which it makes
    kernels run longer."""

    def __init__(
        self,
        problem: StepProblem,
        bundle: Bundle,
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> None:
        self.slowed_s = self.gap_s = self.waiting_s = 0.0
        self.ops: tuple[Op, ...] = ()
        self._kinds: list[str] = []
        self.provenance: tuple[str, ...] = ()
        self._found: list[tuple[Float[np.ndarray, " ops"], ...]] = []
        found = parts(problem, bundle)
        for part in found:
            self._add(part, durations, gradient)
        self.count, self.seconds, self.half_width = map(np.concatenate, zip(*self._found, strict=True))
        copies = np.isin(prepared(bundle.spec).structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD))
        self.copies_s = float((gradient * durations)[copies].sum())
        self.step_costs_s = 0.0
        if any(has_whole_step_costs(part.problem) for part in found):
            self.step_costs_s = float(gradient @ durations) - self.total_s

    def _add(
        self, part: OnKind, durations: Float[np.ndarray, " classes"], gradient: Float[np.ndarray, " classes"]
    ) -> None:
        """What of the path lies on one kind of nodes."""
        problem, bundle, between, before = part.problem, part.bundle, part.events[0], len(self.ops)
        inside, passes = part.only(gradient), bundle_passes(problem, bundle)
        outside = between.occurrences(gradient + self._slowing(part, durations, inside))
        self.ops += between.ops
        self.provenance += between.times.provenance
        self._found.append((outside, outside * between.times.time_s, _half_widths(between.times)))
        for variant, of_kind in passes.of_variant.items():
            table, hidden = variant_times(problem, bundle.layouts[0], variant, bundle.spec.scheduler.slices), 1.0
            weight = np.zeros(table.counts.shape[:2])
            for kind, where in of_kind.items():
                counts = phase_counts(kind, bundle.layouts[0].recompute, passes.blocks[where], passes.full[where])
                weight += np.tensordot(inside[where], counts, 1)
            if variant[2]:
                hidden = table.overlapped_phase_s / np.maximum(table.phase_s, 1e-12)
            self.gap_s += float((weight * hidden * table.gap_s).sum())
            self.waiting_s += float((weight * hidden * table.waiting_s).sum())
            self.ops += table.ops
            self.provenance += table.times.provenance
            count = np.einsum("bp,bpo->o", weight, table.counts)
            seconds = np.einsum("bp,bpo->o", weight * hidden, table.event_s + table.slowing_s)
            self._found.append((count, seconds, _half_widths(table.times)))
        kind = f" on {problem.cluster.name}" if part.on is not None else ""
        self._kinds += [kind] * (len(self.ops) - before)

    def _slowing(
        self,
        part: OnKind,
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> Float[np.ndarray, " classes"]:
        """What reductions and gathers add to the gradient by slowing the passes beside them. Where these cannot run
        any longer than they do, it is their own time that counts (`slowed_s`)."""
        problem, bundle = part.problem, part.bundle
        beside, loss = beside_in(problem.setting, bundle.spec), beside_loss(problem, bundle.layouts[0])
        between_s = part.events[0].durations_s
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
        return self.gap_s + self.waiting_s + self.slowed_s + self.copies_s + self.step_costs_s

    @property
    def total_s(self) -> float:
        """Seconds of the path."""
        return float(self.seconds.sum()) + self.other_s

    def events(self) -> tuple[CriticalEvent, ...]:
        """Events by falling share; host and launch gaps, and copies to the host, as events of their own."""
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
            "copies to and from the host": self.copies_s,
        }
        named += [CriticalEvent(event=name, count=1.0, time_s=s) for name, s in others.items() if s > 0]
        if self.step_costs_s:
            name = "stragglers, overhead, and what like runs showed"
            named.append(CriticalEvent(event=name, count=1.0, time_s=self.step_costs_s))
        return tuple(sorted(named, key=lambda e: -e.time_s))

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
        known = self.provenance_shares()
        return {
            "extrapolated": known["extrapolated"] + known["analytical"],
            "host": self.gap_s / total,
            "network": float(self.seconds[between].sum()) / total,
        }


def _half_widths(times: EventTimes) -> Float[np.ndarray, " ops"]:
    return (times.hi_s - times.lo_s) / 2 / np.maximum(times.time_s, 1e-12)
