"""What real ranks did, in the form of all measured timelines: drawn, compared and opened in Perfetto as others are."""

from typing import Any, Final

from perfmodel.execution.emulation._run import EmulatedRun
from perfmodel.execution.emulation._spans import iteration
from perfmodel.ingest import Activity, ActivityKind, MeasuredTrace, trace_of

_GATHERS: Final = {"forward": "param_gather", "backward": "param_gather_backward"}


def measured_trace(run: EmulatedRun, steps: int = 10) -> MeasuredTrace:
    """The last iterations of every real rank: stream 0 is the script's thread, others are communicators.

    Args:
        run: what was recorded.
        steps: iterations, at most.

    Raises:
        TableError: no iteration was recorded.
    """
    activities = []
    for device, rank in enumerate(run.ranks):
        ends_s = rank.marks[rank.marks.name == "iteration_end"].wall_s.to_numpy()
        lanes: dict[tuple[str, str], int] = {}
        for number in range(max(1, len(ends_s) - steps), len(ends_s)):
            found, begin_s = iteration(rank, number), float(ends_s[number - 1])
            for span in found.spans:
                if span.end_s > span.start_s:
                    activities.append(
                        Activity(
                            device, 0, begin_s + span.start_s, begin_s + span.end_s, span.phase, ActivityKind.COMPUTE,
                            span.phase, 0, step=number,
                        )
                    )  # fmt: skip
            phase_of = {span.issues: span.phase for span in found.spans}
            rows: Any = found.calls.itertuples()
            for place, call in enumerate(rows):
                stream = lanes.setdefault((call.group, call.lane), 1 + len(lanes))
                name = f"{call.kind} {call.bytes} bytes, {call.ranks} ranks, group {call.group} #{call.sequence}"
                activities.append(
                    Activity(
                        device, stream, begin_s + call.start_s, begin_s + max(call.start_s, call.end_s), name,
                        ActivityKind.COMMUNICATION, _phase(call.kind, phase_of.get(place, "forward")), 0, step=number,
                    )
                )  # fmt: skip
    return trace_of(activities, "emulation")


def _phase(kind: str, phase: str) -> str:
    if kind in ("send", "recv"):
        return "send_backward" if phase == "backward" else "send_forward"
    if kind in ("all_reduce", "reduce_scatter") and phase == "backward":
        return "grad_reduce"
    return _GATHERS.get(phase, "") if kind == "all_gather" else ""
