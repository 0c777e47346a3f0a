"""Plans that measure only a model's events, and the cost saved by that (DistSim sections 4, 6)."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfmodel import catalog
from perfmodel.calibration._two_nodes import reachable
from perfmodel.cost import interconnect_of
from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.measure import Plan
from perfmodel.measure.backends import check_kernel
from perfmodel.measure.timing import StoppingRule, measuring_s
from perfmodel.ops import Collective, Op
from perfmodel.prediction import (
    EventShares,
    StepProblem,
    event_shares,
    layout_of,
    priced_events,
    step_problem_of,
)
from perfmodel.spec import Cluster, Framework, Job, Layout, Model
from perfmodel.units import figure, span

if TYPE_CHECKING:
    import pandas as pd

NODES = 2
"""Number of nodes needed to measure events between nodes (DistSim section 1)."""
ITERATIONS = 100
"""Steps of a direct run whose mean is taken as the step time (DistSim section 5.2)."""


@dataclass(frozen=True, kw_only=True)
class LayoutCost:
    """Measurement cost and saving of one layout."""

    layout: Layout
    step_time_s: float
    executions: float
    """Kernels and collectives that one step runs, counted on every device that takes part."""
    distinct: int
    """Number of distinct events among `executions`."""
    new: int
    """Number of measurements that this layout needs in addition to those of earlier layouts."""
    run_device_s: float
    """Device-seconds of running the layout itself for the plan's iterations."""
    measure_device_s: tuple[float, float]
    """Device-seconds of its new measurements: a lower estimate, and an upper one at the stopping
    rule's limits."""
    once_device_s: float
    """Device-seconds of running each new event once, including events that cannot be measured."""


@dataclass(frozen=True, kw_only=True)
class ModelPlan:
    """The measurements needed to predict a model's step time under some layouts."""

    step_problem: StepProblem = field(repr=False)
    """Model, job and cluster, with the calibration that predicted the times."""
    iterations: int
    plan: Plan
    """Plan for `run_plan` or `write_plan`."""
    extrapolated: dict[Collective, tuple[Collective, ...]] = field(repr=False)
    """Collectives out of reach of two nodes, and the measurements that they are extrapolated
    from."""
    unmeasured: dict[Op, str] = field(repr=False)
    """Events that no collector can measure, with the reason; their times remain predicted."""
    unmeasured_share: float
    """Mean share of the layouts' step times in these events."""
    layouts: tuple[LayoutCost, ...]

    @property
    def run_device_s(self) -> float:
        """Device-seconds of running every layout."""
        return sum(cost.run_device_s for cost in self.layouts)

    @property
    def measure_device_s(self) -> tuple[float, float]:
        """Device-seconds of the whole plan: lower and upper estimate."""
        # A layout is charged only for measurements that no layout before it needs, so that the
        # sum counts each once.
        least, most = zip(*(cost.measure_device_s for cost in self.layouts), strict=True)
        return sum(least), sum(most)

    @property
    def relative_scale(self) -> float:
        """Cost of measuring each event once over running each step once (the relative scale of
        DistSim table 3)."""
        # Both sides repeat equally often, so that the repeats cancel. The ratio is how often the
        # same event recurs in the steps of the layouts.
        once_s = sum(cost.once_device_s for cost in self.layouts)
        return once_s * self.iterations / self.run_device_s

    def to_dict(self) -> dict[str, Any]:
        """The saving report as plain values."""
        least, most = self.measure_device_s
        return {
            "model": self.step_problem.model.name,
            "cluster": self.step_problem.cluster.name,
            "layouts": len(self.layouts),
            "iterations": self.iterations,
            "executions": sum(cost.executions for cost in self.layouts),
            "measurements": len(self.plan.kernels) + len(self.plan.collectives),
            "kernels": len(self.plan.kernels),
            "collectives": len(self.plan.collectives),
            "extrapolated": len(self.extrapolated),
            "unmeasured": len(self.unmeasured),
            "unmeasured_share": self.unmeasured_share,
            "unmeasured_reasons": sorted(set(self.unmeasured.values())),
            "unmeasured_by_reason": dict(Counter(self.unmeasured.values()).most_common()),
            "run_device_s": self.run_device_s,
            "measure_device_s": least,
            "measure_device_most_s": most,
            "saving": 1 - least / self.run_device_s,
            "relative_scale": self.relative_scale,
            "per_layout": self.to_frame().to_dict("records"),
        }

    def to_frame(self) -> "pd.DataFrame":
        """One row per layout."""
        import pandas as pd

        return pd.DataFrame(
            [
                {
                    "layout": self.step_problem.notation(cost.layout),
                    "devices": cost.layout.devices,
                    "step_time_s": cost.step_time_s,
                    "executions": cost.executions,
                    "distinct": cost.distinct,
                    "new": cost.new,
                    "run_device_s": cost.run_device_s,
                    "measure_device_s": cost.measure_device_s[0],
                    "measure_device_most_s": cost.measure_device_s[1],
                }
                for cost in self.layouts
            ]
        )

    def _repr_html_(self) -> str:
        least, most = self.measure_device_s
        line = f"measuring takes {span(f'{least:,.0f}', f'{most:,.0f}')} device-seconds, running {self.run_device_s:,.0f}"
        return frame_html(self.to_frame(), line)


def model_plan(
    model: Model | str,
    cluster: Cluster | str,
    job: Job,
    layouts: Sequence[Layout | str],
    *,
    device: str | None = None,
    framework: Framework | str | None = None,
    calibration: Path | str | None = None,
    nodes: int = NODES,
    iterations: int = ITERATIONS,
    rule: StoppingRule | None = None,
    collective_rule: StoppingRule | None = None,
) -> ModelPlan:
    """Plan measurements of some layouts' kernels and collectives, on at most two nodes.

    Args:
        framework: the training framework, as in `perfmodel.predict`.
        device: text of the tables' `device` column; the cluster's device if not given.
        calibration: directory made by `perfmodel fit`, which predicts how long running and
            measuring take.
        nodes: number of nodes at hand; with 1, collectives between nodes are left unmeasured.
        iterations: steps for which a layout would be run to know its step time.
        rule: condition under which a kernel's measurement has run long enough.
        collective_rule: the same for collectives; as `rule` if not given.

    Raises:
        PerfModelError: for no layout, a layout that is impossible, or a name that is not known.
    """
    problem = catalog.problem(model, cluster, job=job, framework=framework)
    if not layouts:
        raise PerfModelError("no layout given; name at least one, e.g. 'tp=8,pp=2,dp=4'")
    if nodes < 1 or iterations < 1:
        raise PerfModelError(
            f"nodes and iterations must be at least 1, got {nodes} and {iterations}"
        )
    parsed = [layout_of(problem, layout)[0] for layout in layouts]
    step_problem = step_problem_of(problem, calibration)

    # Events of every layout with their share of its critical path.
    shares = [event_shares(step_problem, layout) for layout in parsed]

    # Layouts share most of their events, and each is measured once.
    measurements = _Measurements(problem.cluster, nodes)
    additions = [measurements.add(share) for share in shares]
    rule = rule or StoppingRule()
    plan = _plan(
        measurements.ops,
        problem.cluster,
        device or problem.cluster.device.name,
        rule,
        collective_rule or rule,
    )
    costs = []
    for layout, share, added in zip(parsed, shares, additions, strict=True):
        costs.append(_cost(step_problem, layout, share, added, plan, iterations))
    return ModelPlan(
        step_problem=step_problem,
        iterations=iterations,
        plan=plan,
        extrapolated=measurements.extrapolated,
        unmeasured=measurements.unmeasured,
        unmeasured_share=measurements.unmeasured_steps / len(parsed),
        layouts=tuple(costs),
    )


@dataclass(frozen=True)
class _Addition:
    """Events of a layout that no earlier layout has."""

    measured: Sequence[Op]
    """Measurements that the layout needs in addition."""
    unmeasured: Sequence[Op]
    """Events that cannot be measured."""


class _Measurements:
    """The distinct measurements that the events of layouts need, layout after layout."""

    def __init__(self, cluster: Cluster, nodes: int) -> None:
        self._cluster, self._nodes = cluster, nodes
        # Dictionaries of None are sets that keep their order.
        self.ops: dict[Op, None] = {}
        self.extrapolated: dict[Collective, tuple[Collective, ...]] = {}
        self.unmeasured: dict[Op, str] = {}
        self.unmeasured_steps = 0.0
        """Step times in events that cannot be measured, each relative to its layout's step."""

    def add(self, share: EventShares) -> _Addition:
        """Add the events of a layout; returns those that it needs first."""
        measured: dict[Op, None] = {}
        unmeasured: dict[Op, None] = {}
        for op, critical_s in zip(share.ops, share.critical_s.tolist(), strict=True):
            # Events that no backend measures stay predicted; their share of the steps is reported.
            reason = why_not_measured(op, self._nodes)
            if reason:
                if op not in self.unmeasured:
                    unmeasured[op] = None
                self.unmeasured[op] = reason
                self.unmeasured_steps += critical_s / share.step_time_s
                continue

            # A measurement that an earlier layout has asked for already costs this one nothing.
            for needed in self._measured_for(op):
                if needed not in self.ops:
                    measured[needed] = None
        self.ops |= measured
        return _Addition(measured=list(measured), unmeasured=list(unmeasured))

    def _measured_for(self, op: Op) -> Sequence[Op]:
        """The measurements that an event's time is known from: of itself, where it is in reach."""
        if not isinstance(op, Collective):
            return (op,)
        measurements = reachable(op, self._cluster, nodes=self._nodes)
        if not measurements.exact:
            self.extrapolated[op] = measurements.ops
        return measurements.ops


def _plan(
    ops: Collection[Op],
    cluster: Cluster,
    device: str,
    rule: StoppingRule,
    collective_rule: StoppingRule,
) -> Plan:
    """The plan that measures these kernels and collectives on a cluster's device."""
    # Sorted by kind, so that programs and groups of ranks are set up once.
    return Plan(
        device=device,
        interconnect=interconnect_of(cluster),
        rule=rule,
        collective_rule=collective_rule,
        kernels=tuple(sorted((op for op in ops if not isinstance(op, Collective)), key=_kind)),
        # One group of ranks after the other: starting one takes longer than a collective.
        collectives=tuple(sorted((op for op in ops if isinstance(op, Collective)), key=_kind)),
        kernel_table="kernels.csv",
        collective_table="collectives.csv",
        attempts=3,
        patience_s=0.0,
    )


def _cost(
    step_problem: StepProblem,
    layout: Layout,
    share: EventShares,
    added: _Addition,
    plan: Plan,
    iterations: int,
) -> LayoutCost:
    """The cost of running a layout, and of measuring the events that it adds to the plan."""
    least, most, once = 0.0, 0.0, 0.0
    # Running every event once needs those too that cannot be measured; measuring repeats the others
    # by the rule.
    ops = [*added.measured, *added.unmeasured]
    for op, time_s in zip(ops, priced_events(step_problem, ops).time_s.tolist(), strict=True):
        ranks = op.num_ranks if isinstance(op, Collective) else 1
        once += ranks * time_s
        if op in added.unmeasured:
            continue
        # The rule stops a measurement once its mean is known well enough: at least a few repeats,
        # at most its caps. A collective keeps all its ranks busy meanwhile.
        rule = plan.collective_rule if isinstance(op, Collective) else plan.rule
        effort = measuring_s(rule, time_s)
        least += ranks * effort.least
        most += ranks * effort.most
    return LayoutCost(
        layout=layout,
        step_time_s=share.step_time_s,
        executions=float(share.executions.sum()),
        distinct=len(share.ops),
        new=len(added.measured),
        run_device_s=layout.devices * share.step_time_s * iterations,
        measure_device_s=(least, most),
        once_device_s=once,
    )


def why_not_measured(op: Op, nodes: int = NODES) -> str:
    """Why an op cannot be measured; empty if it can."""
    if isinstance(op, Collective):
        if op.num_nodes > nodes == 1:
            return f"{op.collective} between nodes, but only one node is available"
        return ""
    try:
        check_kernel(op)
    except PerfModelError as error:
        return str(error)
    return ""


def _kind(op: Op) -> tuple[str, ...]:
    """Sort key that puts ops of one kind together, so that a plan's text is short."""
    if isinstance(op, Collective):
        # Numbers are padded to one width, so that they sort as numbers among texts.
        return (
            f"{op.num_ranks:6}",
            f"{op.ranks_per_node:6}",
            op.collective,
            op.dtype,
            f"{op.bytes:20.0f}",
        )
    return (op.family, op.op, op.dtype, op.pass_)


def plan_report(plan: ModelPlan) -> str:
    """Report the savings, per layout and in total, and events that are not measured."""
    return saving_text(plan.to_dict())


def saving_text(saving: dict[str, Any]) -> str:
    """The saving report (`ModelPlan.to_dict`) as text."""
    lines = [
        f"{saving['model']} on {saving['cluster']}: one step of each of {saving['layouts']} layouts runs "
        f"{saving['executions']:,.0f} events in all; measuring {saving['kernels']} kernels and "
        f"{saving['collectives']} collectives is enough to predict them.",
        "",
        f"{'layout':40} {'devices':>7} {'step s':>9} {'events run':>12} {'distinct':>8} {'new':>4} {'device-s':>16}",
    ]
    for cost in saving["per_layout"]:
        device_s = span(
            figure(cost["measure_device_s"], 2), figure(cost["measure_device_most_s"], 2)
        )
        lines.append(
            f"{cost['layout']:40} {cost['devices']:7} {cost['step_time_s']:9.4f} {cost['executions']:12,.0f} "
            f"{cost['distinct']:8} {cost['new']:4} {device_s:>16}"
        )
    measuring = span(
        f"{saving['measure_device_s']:,.0f}", f"{saving['measure_device_most_s']:,.0f}"
    )
    lines += [
        "",
        f"measuring takes {measuring} device-seconds; "
        f"running {saving['iterations']} steps of every layout {saving['run_device_s']:,.0f}",
        f"measuring each event once takes {saving['relative_scale']:.2%} of the device-seconds of running each step "
        "once (DistSim, table 3: 12.96%)",
    ]
    if saving["extrapolated"]:
        lines.append(
            f"{saving['extrapolated']} collectives need more than two nodes (or are all-reduces of more than 8 "
            "ranks), so the collective model extrapolates them"
        )
    if saving["unmeasured"]:
        lines.append(
            f"{saving['unmeasured']} events ({saving['unmeasured_share']:.1%} of the steps) cannot be measured "
            "and stay predicted:"
        )
        lines += [
            f"  {count} x {reason}" for reason, count in saving["unmeasured_by_reason"].items()
        ]
    return "\n".join(lines)
