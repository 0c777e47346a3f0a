"""What a model plan and an active selection say, as text for a terminal."""

from collections import Counter

from perfmodel.calibration._active import Selection
from perfmodel.calibration._model_plan import ModelPlan


def plan_report(plan: ModelPlan) -> str:
    """The saving per layout and in all, what is extrapolated and what no collector measures."""
    d = plan.to_dict()
    least, most = plan.measure_device_s
    lines = [
        f"{d['model']} on {d['cluster']}: one step of each of {d['layouts']} layouts runs "
        f"{d['executions']:,.0f} events in all; measuring {d['kernels']} kernels "
        f"and {d['collectives']} collectives tells them.",
        "",
        f"{'layout':40} {'devices':>7} {'step s':>9} {'events run':>12} {'distinct':>8} {'new':>4} {'device-s':>16}",
    ]
    lines += [
        f"{cost.layout!s:40} {cost.layout.devices:7} {cost.step_time_s:9.4f} {cost.executions:12,.0f} "
        f"{cost.distinct:8} {cost.new:4} {cost.measure_device_s[0]:7.1f} to {cost.measure_device_s[1]:5.0f}"
        for cost in plan.layouts
    ]
    lines += [
        "",
        f"measuring takes {least:,.0f} to {most:,.0f} device-seconds; running {plan.iterations} steps of every layout "
        f"{plan.run_device_s:,.0f}",
        f"every event and every step once: {plan.relative_scale:.2%} of the device-seconds (DistSim, table 3: 12.96%)",
    ]
    if plan.extrapolated:
        lines.append(
            f"{len(plan.extrapolated)} collectives are out of reach of two nodes (or all-reduces of more than 8 ranks) "
            "and extrapolated by the collective model"
        )
    if plan.unmeasured:
        lines.append(f"{len(plan.unmeasured)} events ({plan.unmeasured_share:.1%} of the steps) stay predicted:")
        lines += [f"  {count} x {reason}" for reason, count in Counter(plan.unmeasured.values()).most_common()]
    return "\n".join(lines)


def selection_text(selection: Selection) -> str:
    """Measurements and the widest interval round by round, and why it stopped."""
    last = selection.rounds[-1]
    lines = [f"{r.measurements:5} measurements: step times within {r.half_width.max():.1%}" for r in selection.rounds]
    lines.append(f"{selection.reason} after {last.measurements} measurements")
    if selection.failed:
        lines.append(f"{len(selection.failed)} chosen events could not be measured undisturbed")
    return "\n".join(lines)
