"""The report of `perfmodel emulate` for people."""

from collections.abc import Mapping
from typing import Any, Final

_BUSY_S: Final = 2e-3
"""Emulating a call takes less, unless the machine has other work."""


def show(report: dict[str, Any]) -> None:
    """Print the report."""
    if "ranks" in report:
        for r in report["ranks"]:
            print(f"rank {r['rank']} of {report['world_size']} on {report['cluster']}: {1e3 * r['step_s']:.4g} ms, "
                  f"{1e3 * r['communication_s']:.4g} ms of it in collectives")  # fmt: skip
    elif "classes" in report:
        for row in report["classes"]:
            print(f"ranks {', '.join(map(str, row['ranks']))}, by rank {row['real']}: iteration "
                  f"{1e3 * row['time_s']:.4g} ms, {1e3 * row['communication_s']:.4g} ms in collectives")  # fmt: skip
        print(f"slowest class {1e3 * report['iteration_s']:.4g} ms")
    elif "measured" in report:
        for row in report["measured"]:
            print(
                f"{row['collective']:>15} {row['bytes']:>10} bytes, {row['ranks']} ranks: "
                f"{1e3 * row['time_s']:.3f} ms, {1e3 * row['core_s']:.3f} ms of the core"
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
        print(f"to emulate a call took {1e3 * report['overhead_s']:.3g} ms by itself, which was taken off: "
              "the machine is busy with something else, do not trust times")  # fmt: skip
    for kind in report.get("never_called", ()):
        print(f"no {kind} was called: its delay changed nothing")
    for path in report["written"]:
        print(f"wrote {path}")


def _show_iterations(report: Mapping[str, Any]) -> None:
    print(f"iteration {1e3 * report['iteration_s']:.4g} ms (median of {report['iterations']}; "
          f"{1e3 * report['iteration_p10_s']:.4g} to {1e3 * report['iteration_p90_s']:.4g}): "
          f"forward {1e3 * report['forward_s']:.4g}, backward {1e3 * report['backward_s']:.4g}, "
          f"optimizer {1e3 * report['optimizer_s']:.4g} ms")  # fmt: skip
    print(f"communication {1e3 * report['communication_s']:.4g} ms, {report['overlap']:.0%} of it overlapped; "
          f"core busy {report['utilisation']:.0%}")  # fmt: skip
    for kind, slack in report.get("slack_s", {}).items():
        print(f"{kind}: {slack['felt']:.0f} of {slack['count']:.0f} felt; "
              f"{1e3 * slack['hidden_s']:.3g} ms of delay of each are hidden for the others")  # fmt: skip
    if curve := report.get("curve"):
        print(f"{'delay':>9} {'emulated':>10} {'predicted':>10}")
        for delay_s, emulated_s, predicted_s in zip(
            curve["delays_s"], curve["emulated_s"], curve["predicted_s"], strict=True
        ):
            print(f"{1e3 * delay_s:6.3g} ms {1e3 * emulated_s:7.4g} ms {1e3 * predicted_s:7.4g} ms")
        print(f"{1e3 * curve['hidden_s']:.3g} ms of {curve['collective']} delay are hidden behind computing: "
              f"{curve['felt']:.0f} felt before, {curve['felt_at_most']:.0f} at the end")  # fmt: skip
    if predicted := report.get("predicted"):
        print(f"predicted {1e3 * predicted['iteration_s']:.4g} ms ({predicted['iteration_error']:+.1%}), "
              f"memory {predicted['memory_bytes'] / 2**20:.0f} MiB ({predicted['memory_error']:+.1%})")  # fmt: skip
