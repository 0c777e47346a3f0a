"""Errors of predicted timelines, as DistSim (arXiv 2306.08423) defines them in sections 5.2 to 5.4;
and those against real runs of the same structure.

What the paper leaves open is read as follows. Errors are per cent of "the whole training" in
section 5.4 and have no stated base in 5.2 and 5.3: here all are shares of the measured batch time.
A bias is taken without its sign before it is averaged, so that early and late events do not cancel
(the signed mean stands beside it). Of several measured runs the batch time is the mean (5.2, "the
average batch-time"), a stage's error the median (5.4), and a device's error the mean over runs.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import frame_html
from perfmodel.errors import PerfModelError
from perfmodel.ingest.profiles import PHASES
from perfmodel.program import N_STREAMS, Kind, Stream, Structure
from perfmodel.timeline import Timeline

if TYPE_CHECKING:
    import pandas as pd

PASSES: Final = ("forward", "backward", "backward_input", "backward_weight")
"""Phases that are a forward or backward pass of a stage, or part of one."""


@dataclass(frozen=True, eq=False)
class Activities:
    """Computations of a step, predicted and measured several times, each on its own clock."""

    device: Int[np.ndarray, " activities"]
    stage: Int[np.ndarray, " activities"]
    phase: np.ndarray
    """Name of the computation: forward, backward, ..."""
    micro_batch: Int[np.ndarray, " activities"]
    predicted_s: Float[np.ndarray, "activities 2"]
    """Start and end."""
    measured_s: Float[np.ndarray, "runs activities 2"]


@dataclass(frozen=True, eq=False)
class TimelineErrors:
    """Errors of a predicted timeline against measured ones, as fractions (0.01 is 1 %)."""

    predicted_batch_s: float
    measured_batch_s: float
    """Mean over the runs."""
    batch_time_error: float
    """Section 5.2: |predicted - measured| / measured batch time."""
    activity_error: Float[np.ndarray, " devices"]
    """Section 5.3: |predicted - measured| start and end time stamps / measured batch time, mean
    over the device's computations and runs; NaN for a device without computations."""
    activity_bias: Float[np.ndarray, " devices"]
    """Mean error with its sign: above zero where the prediction is late."""
    predicted_idle: Float[np.ndarray, " devices"]
    """Share of the batch time in which the device computes nothing (its pipeline bubble and
    waits)."""
    measured_idle: Float[np.ndarray, " devices"]
    stages: "pd.DataFrame"
    """One row per device, stage, phase and micro-batch (section 5.4). `start_error` and `end_error`
    are |predicted - measured| time stamp / measured batch time; `error` is the mean of the two in a
    run. `time_error`, which the paper does not have, is (predicted - measured) / measured duration
    of the pass. All four are medians over the runs."""
    runs: int

    @property
    def median_stage_error(self) -> float:
        """Median `error` over devices, stages, phases and micro-batches; NaN without passes."""
        return float(np.median(self.stages["error"])) if len(self.stages) else np.nan

    @property
    def largest_stage_error(self) -> float:
        """Largest median error of any stage on any device, which section 5.4 reports (1.71 %)."""
        return float(np.max(self.stages["error"])) if len(self.stages) else np.nan

    def to_frame(self) -> "pd.DataFrame":
        """Return a copy of `stages`."""
        return self.stages.copy()

    def _repr_html_(self) -> str:
        line = f"batch time {self.batch_time_error:.2%} off, largest stage error {self.largest_stage_error:.2%}"
        return frame_html(self.to_frame(), line)

    def to_dict(self) -> dict[str, Any]:
        """JSON types only; NaN becomes None."""
        per_device = ("activity_error", "activity_bias", "predicted_idle", "measured_idle")
        devices = []
        for device in range(len(self.activity_error)):
            figures = {name: _number(getattr(self, name)[device]) for name in per_device}
            devices.append({"device": device} | figures)
        # JSON has no NaN.
        stages = []
        for row in self.stages.to_dict(orient="records"):
            for name, value in row.items():
                if isinstance(value, float):
                    row[name] = _number(value)
            stages.append(row)
        known = self.activity_error[~np.isnan(self.activity_error)]
        return {
            "runs": self.runs,
            "predicted_batch_s": self.predicted_batch_s,
            "measured_batch_s": self.measured_batch_s,
            "batch_time_error": self.batch_time_error,
            "mean_activity_error": _number(known.mean()) if len(known) else None,
            "largest_activity_error": _number(known.max()) if len(known) else None,
            "median_stage_error": _number(self.median_stage_error),
            "largest_stage_error": _number(self.largest_stage_error),
            "predicted_bubble_fraction": float(self.predicted_idle.mean()),
            "measured_bubble_fraction": float(self.measured_idle.mean()),
            "devices": devices,
            "stages": stages,
        }


def timeline_errors(
    activities: Activities,
    predicted_batch_s: float,
    measured_batch_s: Float[np.ndarray, " runs"],
    predicted_busy_s: Float[np.ndarray, " devices"],
    measured_busy_s: Float[np.ndarray, "runs devices"],
) -> TimelineErrors:
    """All errors, on a common clock whose zero is the start of the computation predicted to come
    first (section 5.4: "the start timestamp of the first stage as the global standard time").

    Raises:
        PerfModelError: a batch time that is not above zero.
    """
    for name, batch_s in (
        ("predicted", predicted_batch_s),
        *(("measured", float(b)) for b in measured_batch_s),
    ):
        if not 0 < batch_s < np.inf:
            raise PerfModelError(
                f"the {name} step takes {batch_s:g} s, so there is nothing to compare; give a step with events"
            )
    if not np.isfinite(activities.measured_s).all():
        raise PerfModelError("measured time stamps must be finite; leave out what was not measured")

    # All errors are relative to the batch time of their run.
    devices = len(predicted_busy_s)
    predicted_s, measured_s = _on_common_clock(activities)
    late = (predicted_s - measured_s) / measured_batch_s[:, None, None]
    mean_batch_s = float(measured_batch_s.mean())
    return TimelineErrors(
        predicted_batch_s=predicted_batch_s,
        measured_batch_s=mean_batch_s,
        batch_time_error=abs(predicted_batch_s - mean_batch_s) / mean_batch_s,
        activity_error=_device_means(activities.device, np.abs(late).mean(axis=(0, 2)), devices),
        activity_bias=_device_means(activities.device, late.mean(axis=(0, 2)), devices),
        predicted_idle=1 - predicted_busy_s / predicted_batch_s,
        measured_idle=(1 - measured_busy_s / measured_batch_s[:, None]).mean(axis=0),
        stages=_stage_errors(activities, predicted_s, measured_s, measured_batch_s),
        runs=len(measured_batch_s),
    )


def _on_common_clock(activities: Activities) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and measured times from the start of the computation predicted first."""
    predicted_s, measured_s = activities.predicted_s, activities.measured_s
    if not len(predicted_s):
        return predicted_s, measured_s

    # Each run's clock starts with the computation that the prediction has first, on the device of
    # the lowest number.
    first = np.lexsort((activities.device, predicted_s[:, 0]))[0]
    return predicted_s - predicted_s[first, 0], measured_s - measured_s[:, first, :1, None]


def _device_means(
    device: np.ndarray, value: np.ndarray, devices: int
) -> Float[np.ndarray, " devices"]:
    """Mean of the values on each device."""
    # Devices without computations have no error.
    count = np.bincount(device, minlength=devices)
    total = np.bincount(device, value, minlength=devices)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def _stage_errors(
    activities: Activities,
    predicted_s: np.ndarray,
    measured_s: np.ndarray,
    batch_s: Float[np.ndarray, " runs"],
) -> "pd.DataFrame":
    """Errors by stage, from the first start to the last end of each pass."""
    import pandas as pd

    # Number the groups (device, stage, phase, micro-batch) in sorted order; a pass of several
    # instructions is one group.
    names = ["device", "stage", "phase", "micro_batch"]
    is_pass = np.isin(activities.phase, PASSES)
    keys = pd.DataFrame({name: getattr(activities, name)[is_pass] for name in names})
    number = keys.groupby(names, sort=True).ngroup().to_numpy()
    first_of_each = keys.assign(number=number).drop_duplicates("number").sort_values("number")
    rows = first_of_each[names].reset_index(drop=True)

    def spans(stamps_s: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        start_s = np.full(len(rows), np.inf)
        end_s = np.full(len(rows), -np.inf)
        np.minimum.at(start_s, number, stamps_s[is_pass, 0])
        np.maximum.at(end_s, number, stamps_s[is_pass, 1])
        return start_s, end_s

    # A pass whose time was not measured has no error of its duration, though its time stamps have.
    start_s, end_s = spans(predicted_s)
    errors_of_runs: dict[str, list[np.ndarray]] = defaultdict(list)
    for stamps_s, run_batch_s in zip(measured_s, batch_s, strict=True):
        run_start_s, run_end_s = spans(stamps_s)
        start_error = np.abs(start_s - run_start_s) / run_batch_s
        end_error = np.abs(end_s - run_end_s) / run_batch_s
        took_s = run_end_s - run_start_s
        known = took_s > 0
        relative = (end_s - start_s) / np.where(known, took_s, 1) - 1
        errors_of_runs["start_error"].append(start_error)
        errors_of_runs["end_error"].append(end_error)
        errors_of_runs["error"].append((start_error + end_error) / 2)
        errors_of_runs["time_error"].append(np.where(known, relative, np.nan))
    medians = {name: np.median(errors, axis=0) for name, errors in errors_of_runs.items()}
    return rows.assign(**medians)


def _number(value: Any) -> float | None:
    return None if np.isnan(value) else float(value)


def compare_timelines(
    predicted: Timeline, measured: Timeline | Sequence[Timeline]
) -> TimelineErrors:
    """Batch-time, per-device and per-stage errors of a prediction (DistSim, sections 5.2 to 5.4).

    Computations are all ops with a predicted time on the compute streams, including collectives
    that run in sequence with the kernels, such as tensor-parallel ones. Communication on other
    streams is not compared. Passes of a program whose ops are single instructions run from the
    first instruction's start to the last's end.

    Args:
        predicted: result of `execution.simulate` or `timeline.times`.
        measured: one or several runs of the same structure, as from `execution.run(...).timeline`.

    Raises:
        PerfModelError: no measured timeline, one of another structure, or one that takes no time.
    """
    runs = [measured] if isinstance(measured, Timeline) else list(measured)
    if not runs:
        raise PerfModelError("compare_timelines: no measured timeline is given; give at least one")
    s = predicted.structure
    for run in runs:
        _require_same(s, run.structure)
    # Only what runs on a compute stream and takes time is compared.
    takes_time = (s.kind != Kind.ZERO) & (predicted.end_s > predicted.start_s)
    ops = np.flatnonzero((s.stream >= 0) & (s.stream % N_STREAMS == Stream.COMPUTE) & takes_time)
    activities = Activities(
        device=s.device[ops],
        stage=s.class_stage[s.duration[ops]],
        phase=np.array(PHASES)[s.kind[ops]],
        micro_batch=s.micro_batch[ops],
        predicted_s=_stamps(predicted, ops),
        measured_s=np.stack([_stamps(run, ops) for run in runs]),
    )
    return timeline_errors(
        activities,
        predicted.makespan_s,
        np.array([run.makespan_s for run in runs]),
        predicted.device_busy_s(),
        np.stack([run.device_busy_s() for run in runs]),
    )


def _stamps(timeline: Timeline, ops: np.ndarray) -> np.ndarray:
    return np.stack([timeline.start_s[ops], timeline.end_s[ops]], axis=1).astype(float)


def _require_same(a: Structure, b: Structure) -> None:
    """Raise an error unless both timelines have the same structure, up to class numbers."""
    if a is b:
        return
    for name in ("devices", "n_ops"):
        if getattr(a, name) != getattr(b, name):
            raise PerfModelError(
                f"the timelines have different structures: {name} is {getattr(a, name)} as predicted and "
                f"{getattr(b, name)} as measured; simulate the program that was run"
            )
    for name in ("stream", "micro_batch", "kind", "pred"):
        different = getattr(a, name) != getattr(b, name)
        if different.any():
            op = int(np.argmax(different.reshape(a.n_ops, -1).any(axis=1)))
            raise PerfModelError(
                f"the timelines have different structures: {name} of op {op} differs; simulate the program that was run"
            )
