"""Live validation in words: every configuration, and the whole beside what it should reach."""

from typing import Final

from studies.live import LiveReport

_BARS: Final = (
    ("mean_step_error", "step time, mean error", 0.04, "at most"),
    ("largest_step_error", "step time, largest error", 0.10, "at most"),
    ("mean_device_error", "activity of a device, mean error", 0.05, "at most"),
    ("median_stage_error", "start and end of a stage, median error", 0.02, "at most"),
    ("spearman", "rank correlation of step times", 0.98, "at least"),
    ("coverage_90", "inside the 90 % interval", 0.85, "at least"),
)


def live_report(report: LiveReport) -> str:
    """The report as Markdown."""
    figures = report.to_dict()
    lines = [
        "# Live validation",
        "",
        f"Calibrated on two ranks, then {figures['configurations']} configurations predicted and run on 2 to 8 ranks "
        "in network namespaces (`make live`).",
        "",
        "| figure | reached | to reach | |",
        "|---|--:|--:|---|",
    ]
    for key, name, bar, sense in _BARS:
        reached = figures[key]
        met = reached <= bar if sense == "at most" else reached >= bar
        shown, wanted = (f"{x:.3f}" if key == "spearman" else f"{x:.1%}" for x in (reached, bar))
        lines.append(f"| {name} | {shown} | {sense} {wanted} | {'met' if met else 'not met'} |")
    checks = ", ".join(f"{error:+.1%}" for error in figures["check_errors"])
    lines += [
        "",
        f"Noise floor, the same configuration measured twice: mean {figures['mean_noise']:.1%}, largest "
        f"{figures['largest_noise']:.1%}. Iterations set aside for interference: {figures['iterations_set_aside']}; "
        f"configurations without an undisturbed one: {figures['disturbed_configurations']}.",
        f"The calibration's own two-rank programs say that work on cores takes {figures['core_factor']:.2f} times as "
        f"long as by itself; they are then off by {checks}, which gives the 90 % interval of "
        f"±{figures['interval_half_width']:.1%}.",
        "",
        "| configuration | ranks | predicted ms | measured ms | error | noise | device | stage | set aside |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for r in report.results:
        stage = "" if r.stage_error != r.stage_error else f"{r.stage_error:.1%}"
        lines.append(
            f"| {r.case} | {r.ranks} | {1e3 * r.predicted_s:.1f} | {1e3 * r.measured_s:.1f} | {r.error:+.1%} "
            f"| {r.noise:.1%} | {r.device_error:.1%} | {stage} | {r.set_aside} |"
        )
    return "\n".join(lines) + "\n"
