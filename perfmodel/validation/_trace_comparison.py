"""Compares measured traces of any profiler with predicted timelines.

Activities are matched by device and by what both sides say of them: name, or phase, stage and
micro-batch. Activities that the measured trace does not distinguish are not distinguished in the
prediction either. Where one side is finer (single kernels within a predicted pass) both are
compared from their first start to their last end; a trace without any tags is matched in order,
where the numbers of activities agree. Otherwise only batch time and idle time are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import folded, frame_html, paragraph
from perfmodel.errors import PerfModelError
from perfmodel.ingest import MeasuredTrace
from perfmodel.ingest.profiles import PHASES, ActivityKind
from perfmodel.program import N_STREAMS, Kind, Stream
from perfmodel.timeline import Timeline
from perfmodel.validation._timeline_errors import (
    PASSES,
    Activities,
    TimelineErrors,
    timeline_errors,
)

if TYPE_CHECKING:
    import pandas as pd

Key = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class TraceComparison:
    """Errors of a prediction against a measured trace, and the matched shares."""

    errors: TimelineErrors
    matched_by: str
    """`name`; the tags that were used; `order`; or `nothing`, where only batch and idle times are
    compared."""
    predicted_share: float
    """Share of the predicted computations that was found in every measured step."""
    measured_share: float
    """Share of the measured computations that was found in the prediction."""

    def to_dict(self) -> dict[str, Any]:
        """JSON types only."""
        summary = {
            name: getattr(self, name)
            for name in ("matched_by", "predicted_share", "measured_share")
        }
        return self.errors.to_dict() | summary

    def to_frame(self) -> "pd.DataFrame":
        """`TimelineErrors.to_frame`: one row per device, stage, phase and micro-batch."""
        return self.errors.to_frame()

    def _repr_html_(self) -> str:
        e = self.errors
        lines = [
            f"batch time: {e.predicted_batch_s:.4g} s predicted, {e.measured_batch_s:.4g} s measured, "
            f"error {e.batch_time_error:.2%}",
            f"matched by {self.matched_by}: {self.predicted_share:.0%} of the predicted and {self.measured_share:.0%} "
            "of the measured computations",
        ]
        return paragraph(*lines) + folded("errors of stages", frame_html(self.to_frame()))


def compare_traces(
    predicted: Timeline | MeasuredTrace, measured: MeasuredTrace, replicas: int = 1
) -> TraceComparison:
    """Errors per batch, device and stage (DistSim, sections 5.2 to 5.4) of a predicted trace.

    Each step that the profiler marked is a run. A device is idle while none of the matched
    activities runs on it (without any: none of its computations).

    Args:
        predicted: a timeline, or a trace of one (`readers.read_trace("perfmodel", ...)`).
        measured: trace of `replicas` times as many devices.
        replicas: measured devices per predicted one (tensor- and data-parallel ranks), which must
            be numbered next to each other, as where the pipeline is the outermost dimension
            (Megatron-LM).

    Raises:
        PerfModelError: numbers of devices that do not fit.
    """
    trace = timeline_trace(predicted) if isinstance(predicted, Timeline) else predicted
    if replicas < 1 or measured.devices != trace.devices * replicas:
        raise PerfModelError(
            f"{measured.devices} devices measured, {trace.devices} predicted with {replicas} replicas each; set "
            "replicas to the number of measured devices per predicted one, or record all ranks"
        )
    steps = measured.steps()
    matching = _match(trace, steps, replicas)
    batch_s = predicted.makespan_s if isinstance(predicted, Timeline) else trace.batch_time_s
    # Both sides count the same computations as busy: the matched ones, or all of them where none
    # are matched.
    if matching.matched_by:
        predicted_busy_s = matching.predicted_busy_s(measured.devices)
        measured_busy_s = matching.measured_busy_s(measured.devices)
    else:
        predicted_busy_s = np.repeat(_busy_s(trace), replicas)
        measured_busy_s = np.stack([_busy_s(step) for step in steps])
    errors = timeline_errors(
        matching.activities,
        batch_s,
        np.array([step.batch_time_s for step in steps]),
        predicted_busy_s,
        measured_busy_s,
    )
    all_predicted = len(_computations(trace)) * replicas
    all_measured = sum(len(_computations(step)) for step in steps)
    return TraceComparison(
        errors,
        matching.matched_by or "nothing",
        matching.n_predicted / max(all_predicted, 1),
        matching.n_measured / max(all_measured, 1),
    )


def timeline_trace(timeline: Timeline) -> MeasuredTrace:
    """A timeline's ops as a trace, without transfers that are folded into lags."""
    s = timeline.structure
    ops = np.flatnonzero(
        (s.stream >= 0) & (s.kind != Kind.ZERO) & (timeline.end_s > timeline.start_s)
    )
    if not len(ops):
        raise PerfModelError(
            "no op of the predicted timeline takes time, so there is nothing to compare"
        )
    ops = ops[np.argsort(timeline.start_s[ops], kind="stable")]
    names, number = np.unique(np.array(PHASES)[s.kind[ops]], return_inverse=True)
    # Streams of copies are neither computation nor communication between devices.
    stream = s.stream[ops] % N_STREAMS
    copies = np.isin(stream, (Stream.OFFLOAD, Stream.RELOAD))
    kind = np.where(stream == Stream.COMPUTE, ActivityKind.COMPUTE, ActivityKind.COMMUNICATION)
    return MeasuredTrace(
        device=s.device[ops],
        stream=stream,
        start_s=timeline.start_s[ops],
        end_s=timeline.end_s[ops],
        name=number,
        names=tuple(names.tolist()),
        kind=np.where(copies, ActivityKind.COPY, kind),
        phase=s.kind[ops],
        stage=s.class_stage[s.duration[ops]],
        micro_batch=s.micro_batch[ops],
        step=np.full(len(ops), -1),
    )


@dataclass(frozen=True, eq=False)
class _Matching:
    """Activities found on both sides, and the share of each side's computations that they cover."""

    activities: Activities
    matched_by: str
    n_predicted: int
    n_measured: int

    def predicted_busy_s(self, devices: int) -> Float[np.ndarray, " devices"]:
        return _union_s(self.activities.device, self.activities.predicted_s, devices)

    def measured_busy_s(self, devices: int) -> Float[np.ndarray, "runs devices"]:
        return np.stack(
            [_union_s(self.activities.device, run, devices) for run in self.activities.measured_s]
        )


def _match(predicted: MeasuredTrace, steps: Sequence[MeasuredTrace], replicas: int) -> _Matching:
    """Match computations of a predicted step with those of each measured step, by device."""
    matched_by = _tags_of_both(predicted, steps)
    rows: list[tuple[int, int]] = []
    predicted_s: list[Float[np.ndarray, "activities 2"]] = []
    measured_s: list[Float[np.ndarray, "runs activities 2"]] = []
    n_predicted = n_measured = 0
    for device in range(predicted.devices * replicas if matched_by else 0):
        # An activity counts only if it is in every measured step, or else means over runs would
        # be of different sets.
        predicted_ops = _groups(predicted, device // replicas, matched_by)
        ops_of_steps = [_groups(step, device, matched_by) for step in steps]
        for key, ops in predicted_ops.items():
            matching_ops = [groups[key] for groups in ops_of_steps if key in groups]
            if len(matching_ops) < len(steps):
                continue
            n_predicted += len(ops)
            n_measured += sum(map(len, matching_ops))
            # Compare one by one where both sides are equally fine, else from first start to last
            # end.
            single = all(len(step_ops) == len(ops) for step_ops in matching_ops)
            chosen = ops if single else ops[:1]
            rows += [(device, op) for op in chosen.tolist()]
            predicted_s.append(_stamps(predicted, ops, single))
            step_stamps = [
                _stamps(step, step_ops, single)
                for step, step_ops in zip(steps, matching_ops, strict=True)
            ]
            measured_s.append(np.stack(step_stamps))
    devices, ops = np.array(rows, int).reshape(-1, 2).T

    # Activities that are matched by other tags may be of any micro-batch.
    micro_batch = np.full(len(ops), -1)
    if "micro_batch" in matched_by or matched_by == "name":
        micro_batch = predicted.micro_batch[ops]
    all_predicted_s = np.zeros((0, 2))
    all_measured_s = np.zeros((len(steps), 0, 2))
    if rows:
        all_predicted_s = np.concatenate(predicted_s)
        all_measured_s = np.concatenate(measured_s, axis=1)
    return _Matching(
        Activities(
            device=devices,
            stage=predicted.stage[ops],
            phase=np.array(PHASES)[predicted.phase[ops]],
            micro_batch=micro_batch,
            predicted_s=all_predicted_s,
            measured_s=all_measured_s,
        ),
        matched_by if rows else "",
        n_predicted,
        n_measured,
    )


def _tags_of_both(predicted: MeasuredTrace, steps: Sequence[MeasuredTrace]) -> str:
    """Return what activities are matched by: `name`, tags, `order`, or nothing."""
    ours = _computations(predicted)
    theirs = [(step, _computations(step)) for step in steps]

    def names(trace: MeasuredTrace, ops: Int[np.ndarray, " ops"]) -> set[str]:
        return {trace.names[number] for number in np.unique(trace.name[ops])}

    # A run also records activities that take no time in the prediction, so it may have more names.
    predicted_names = names(predicted, ours)
    if len(predicted_names) > 1 and all(
        names(step, ops) >= predicted_names for step, ops in theirs
    ):
        return "name"

    # Without names in common: phases, and as many of the other tags as all sides have.
    if all((step.phase[ops] > 0).any() for step, ops in theirs):
        known = ["phase"]
        sides = [(predicted, ours), *theirs]
        for tag in ("stage", "micro_batch"):
            if all((getattr(trace, tag)[ops] >= 0).any() for trace, ops in sides):
                known.append(tag)
        return ", ".join(known)

    # Without tags: in order, where all sides compute equally often on every device.
    counts = [
        np.bincount(trace.device[ops]).tolist() for trace, ops in ((predicted, ours), *theirs)
    ]
    return "order" if all(count == counts[0] for count in counts) else ""


def _groups(
    trace: MeasuredTrace, device: int, matched_by: str
) -> dict[Key, Int[np.ndarray, " ops"]]:
    """Group a device's computations by their common key, each group in order of start."""
    ops = _computations(trace)
    ops = ops[trace.device[ops] == device]
    if matched_by == "order":
        return {(n,): ops[n : n + 1] for n in range(len(ops))}

    # Key of an activity: its name, or its phase with the tags that both sides have.
    by_name = matched_by == "name"
    ops_by_key: dict[Key, list[int]] = {}
    for op in ops.tolist():
        tags = []
        if by_name or "stage" in matched_by:
            tags.append(int(trace.stage[op]))
        if by_name or "micro_batch" in matched_by:
            tags.append(int(trace.micro_batch[op]))
        phase = PHASES[trace.phase[op]]
        if by_name:
            key = (trace.names[trace.name[op]], *tags)
        elif phase in PASSES:
            key = (phase, *tags)
        elif phase:
            # An optimizer step belongs to no micro-batch, and profilers do not say its stage.
            key = (phase,)
        else:
            continue
        ops_by_key.setdefault(key, []).append(op)
    return {key: np.array(members) for key, members in ops_by_key.items()}


def _computations(trace: MeasuredTrace) -> Int[np.ndarray, " ops"]:
    ops = np.flatnonzero(trace.kind == ActivityKind.COMPUTE)
    return ops[np.argsort(trace.start_s[ops], kind="stable")]


def _stamps(
    trace: MeasuredTrace, ops: Int[np.ndarray, " ops"], single: bool
) -> Float[np.ndarray, "activities 2"]:
    """Start and end of each op, or of all ops together."""
    start_s, end_s = trace.start_s[ops], trace.end_s[ops]
    if single:
        return np.stack([start_s, end_s], axis=1)
    return np.array([[start_s.min(), end_s.max()]])


def _busy_s(trace: MeasuredTrace) -> Float[np.ndarray, " devices"]:
    """Seconds in which each device computes."""
    ops = _computations(trace)
    return _union_s(
        trace.device[ops],
        np.stack([trace.start_s[ops], trace.end_s[ops]], axis=1),
        trace.devices,
    )


def _union_s(
    device: Int[np.ndarray, " intervals"],
    stamps_s: Float[np.ndarray, "intervals 2"],
    devices: int,
) -> Float[np.ndarray, " devices"]:
    """Seconds in which at least one of a device's intervals lies."""
    total_s = np.zeros(devices)
    for number in range(devices):
        intervals = stamps_s[device == number]
        intervals = intervals[np.argsort(intervals[:, 0], kind="stable")]

        # Sweep the intervals by start; `reached_s` is the latest end so far.
        reached_s = np.maximum.accumulate(intervals[:, 1])
        # Each interval adds the part that lies beyond all earlier ones.
        before_s = np.concatenate([intervals[:1, 0], reached_s[:-1]])
        total_s[number] = np.maximum(reached_s - np.maximum(before_s, intervals[:, 0]), 0).sum()
    return total_s
