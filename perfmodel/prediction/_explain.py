"""Why the step takes as long as it does: events on the critical path, interval."""

from collections import defaultdict
from math import exp

import numpy as np
from jaxtyping import Float

from perfmodel.cost import EventTimes
from perfmodel.ops import Collective, Op
from perfmodel.prediction._compose import Bundle, bundle_passes, event_classes
from perfmodel.prediction._phases import phase_counts
from perfmodel.prediction._prediction import CriticalEvent
from perfmodel.prediction._price import has_step_costs, variant_times
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._site import Site
from perfmodel.program import Kind


class CriticalPath:
    """Seconds of the step by event, from the gradient of the step time."""

    def __init__(
        self,
        problem: StepProblem,
        bundle: Bundle,
        durations: Float[np.ndarray, " classes"],
        gradient: Float[np.ndarray, " classes"],
    ) -> None:
        passes, between = bundle_passes(problem, bundle), event_classes(problem, bundle)[0]
        outside = between.occurrences(gradient)
        self.gap_s = 0.0
        self.ops: tuple[Op, ...] = between.ops
        count, seconds, half_width = [outside], [outside * between.times.time_s], [_half_widths(between.times)]
        self.provenance = between.times.provenance
        for variant, of_kind in passes.of_variant.items():
            table, hidden = variant_times(problem, bundle.layouts[0], variant, bundle.spec.scheduler.slices), 1.0
            weight = np.zeros(table.counts.shape[:2])
            for kind, where in of_kind.items():
                counts = phase_counts(kind, bundle.layouts[0].recompute, passes.blocks[where], passes.full[where])
                weight += np.tensordot(gradient[where], counts, 1)
            if variant[2]:
                hidden = table.overlapped_phase_s / np.maximum(table.phase_s, 1e-12)
            self.gap_s += float((weight * hidden * table.gap_s).sum())
            self.ops += table.ops
            count.append(np.einsum("bp,bpo->o", weight, table.counts))
            seconds.append(np.einsum("bp,bpo->o", weight * hidden, table.event_s))
            half_width.append(_half_widths(table.times))
            self.provenance += table.times.provenance
        self.count, self.seconds = np.concatenate(count), np.concatenate(seconds)
        self.half_width = np.concatenate(half_width)
        copies = np.isin(prepared(bundle.spec).structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD))
        self.copies_s = float((gradient * durations)[copies].sum())
        accounted_s = float(self.seconds.sum()) + self.gap_s + self.copies_s
        self.step_costs_s = float(gradient @ durations) - accounted_s if has_step_costs(problem) else 0.0

    def events(self) -> tuple[CriticalEvent, ...]:
        """Events by falling share; host and launch gaps, and copies to the host, as events of their own."""
        order = np.argsort(-self.seconds, kind="stable")
        named = [
            CriticalEvent(event=self.ops[i].label, count=float(self.count[i]), time_s=float(self.seconds[i]))
            for i in order.tolist()
            if self.seconds[i] > 0
        ]
        if self.gap_s > 0:
            named.append(CriticalEvent(event="kernel launch gaps", count=1.0, time_s=self.gap_s))
        if self.copies_s > 0:
            named.append(CriticalEvent(event="copies to and from the host", count=1.0, time_s=self.copies_s))
        if self.step_costs_s:
            name = "stragglers, lost overlap, overhead, and what like runs showed"
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
        total = float(self.seconds.sum()) + self.gap_s + self.copies_s + self.step_costs_s
        return {name: value / total for name, value in family.items()}

    def shares(self) -> dict[str, float]:
        """Shares of the step that rest on little (`TERMS` of what is unknown)."""
        total = float(self.seconds.sum()) + self.gap_s + self.copies_s + self.step_costs_s
        between = np.array([isinstance(op, Collective) and op.num_nodes > 1 for op in self.ops], bool)
        known = self.provenance_shares()
        return {
            "extrapolated": known["extrapolated"] + known["analytical"],
            "host": self.gap_s / total,
            "network": float(self.seconds[between].sum()) / total,
        }

    def interval(self, site: Site) -> tuple[float, float]:
        """Ends of the 90 % interval as factors of the step time.

        Errors within a family are taken as common to all its events (one regressor, one device), errors of
        different families and of what no table knows as independent.
        """
        events = sum(v**2 for v in self.family_half_widths().values())
        own = site.half_widths(self.shares())
        lower, upper = ((events + half**2) ** 0.5 for half in own)
        return exp(-lower), exp(upper)


def _half_widths(times: EventTimes) -> Float[np.ndarray, " ops"]:
    return (times.hi_s - times.lo_s) / 2 / np.maximum(times.time_s, 1e-12)
