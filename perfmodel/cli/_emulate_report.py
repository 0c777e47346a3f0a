"""The report of `perfmodel emulate` for people."""

from collections.abc import Mapping
from typing import Any, Final

from perfmodel.units import duration

_BUSY_S: Final = 2e-3
"""Emulating a call takes less, unless the machine has other work."""


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    if "ranks" in report:
        for r in report["ranks"]:
            print(f"rank {r['rank']} of {report['world_size']} on {report['cluster']}: {duration(r['step_s'])}, "
                  f"{duration(r['communication_s'])} of it in collectives")  # fmt: skip
    elif "classes" in report:
        for row in report["classes"]:
            print(f"ranks {', '.join(map(str, row['ranks']))}, by rank {row['real']}: iteration "
                  f"{duration(row['time_s'])}, {duration(row['communication_s'])} in collectives")  # fmt: skip
        print(f"slowest class {duration(report['iteration_s'])}")
    elif "measured" in report:
        for row in report["measured"]:
            print(
                f"{row['collective']:>15} {row['bytes']:>10} bytes, {row['ranks']} ranks: "
                f"{duration(row['time_s'])}, {duration(row['core_s'])} of the core"
            )
    else:
        real = ", ".join(map(str, report["real_ranks"]))
        print(f"rank {real} of {report['world_size']} on {report['cluster']}: {report['collectives']} collectives")
        if report["iterations"]:
            _show_iterations(report)
        print(f"peak memory {report['peak_memory_bytes'] / 2**20:.0f} MiB, "
              f"{report['training_memory_bytes'] / 2**20:.0f} MiB of it since the script joined its world")  # fmt: skip
    if wire := report.get("wire"):
        print(f"on the wire {wire['messages']} messages, {wire['nbytes'] / 2**20:.4g} MiB; the process of the others "
              f"took {wire['cpu_s']:.3g} s of a core in {wire['wall_s']:.3g} s")  # fmt: skip
    if report.get("overhead_s", 0.0) > _BUSY_S:
        print(f"to emulate a call took {duration(report['overhead_s'])} by itself, which was taken off: "
              "the machine is busy with something else, do not trust times")  # fmt: skip
    for kind in report.get("never_called", ()):
        print(f"no {kind} was called: its delay changed nothing")
    for path in report["written"]:
        print(f"wrote {path}")


def _show_iterations(report: Mapping[str, Any]) -> None:
    print(f"iteration {duration(report['iteration_s'])} (median of {report['iterations']}; 8 of 10 take "
          f"{duration(report['iteration_p10_s'])} to {duration(report['iteration_p90_s'])}): "
          f"forward {duration(report['forward_s'])}, backward {duration(report['backward_s'])}, "
          f"optimizer {duration(report['optimizer_s'])}")  # fmt: skip
    print(f"communication {duration(report['communication_s'])}, {report['overlap']:.0%} of it overlapped; "
          f"core busy {report['utilisation']:.0%}")  # fmt: skip
    for kind, slack in report.get("slack_s", {}).items():
        print(f"{kind}: {slack['felt']:.0f} of {slack['count']:.0f} felt; "
              f"{duration(slack['hidden_s'])} of delay of each are hidden for the others")  # fmt: skip
    if curve := report.get("curve"):
        print(f"{'delay':>9} {'emulated':>10} {'predicted':>10}")
        for delay_s, emulated_s, predicted_s in zip(
            curve["delays_s"], curve["emulated_s"], curve["predicted_s"], strict=True
        ):
            print(f"{duration(delay_s):>9} {duration(emulated_s):>10} {duration(predicted_s):>10}")
        print(f"{duration(curve['hidden_s'])} of {curve['collective']} delay are hidden behind computing: "
              f"{curve['felt']:.0f} felt before, {curve['felt_at_most']:.0f} at the end")  # fmt: skip
    if predicted := report.get("predicted"):
        print(f"predicted {duration(predicted['iteration_s'])} ({predicted['iteration_error']:+.1%}), "
              f"memory {predicted['memory_bytes'] / 2**20:.0f} MiB ({predicted['memory_error']:+.1%})")  # fmt: skip
