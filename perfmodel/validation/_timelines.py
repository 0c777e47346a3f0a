"""A predicted timeline against real runs of the same structure."""

from collections.abc import Sequence

import numpy as np

from perfmodel.errors import PerfModelError
from perfmodel.program import N_STREAMS, Kind, Stream, Structure
from perfmodel.timeline import Timeline
from perfmodel.validation._timeline_errors import Activities, TimelineErrors, timeline_errors

_PASSES = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def compare_timelines(predicted: Timeline, measured: Timeline | Sequence[Timeline]) -> TimelineErrors:
    """Batch-time, per-device and per-stage errors of a prediction (DistSim, sections 5.2 to 5.4).

    Computations are the ops of the compute streams that the prediction gives a time, whatever runs there in order
    with the kernels (as tensor-parallel collectives do) included; communication beside them is not compared.
    Passes of a program whose ops are single instructions run from the first instruction's start to the last's end.

    Args:
        predicted: as from `execution.simulate` or `timeline.times`.
        measured: one or several runs of the same structure, as from `execution.run(...).timeline`.

    Raises:
        PerfModelError: no measured timeline, one of another structure, or one that takes no time.
    """
    runs = [measured] if isinstance(measured, Timeline) else list(measured)
    if not runs:
        raise PerfModelError("compare_timelines: no measured timeline given")
    s = predicted.structure
    for run in runs:
        _require_same(s, run.structure)
    takes_time = (s.kind != Kind.ZERO) & (predicted.end_s > predicted.start_s)
    ops = np.flatnonzero((s.stream >= 0) & (s.stream % N_STREAMS == Stream.COMPUTE) & takes_time)
    names = np.array([kind.name.lower() for kind in Kind])
    activities = Activities(
        device=s.device[ops],
        stage=s.class_stage[s.duration[ops]],
        phase=names[s.kind[ops]],
        micro_batch=s.micro_batch[ops],
        is_pass=np.isin(s.kind[ops], _PASSES),
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
    """Duration classes may be numbered differently (a cluster tells events apart by where they run)."""
    if a is b:
        return
    for name in ("devices", "n_ops"):
        if getattr(a, name) != getattr(b, name):
            raise PerfModelError(
                f"timelines of different structures: {name} is {getattr(a, name)} as predicted and "
                f"{getattr(b, name)} as measured; simulate the program that was run"
            )
    for name in ("stream", "micro_batch", "kind", "pred"):
        different = getattr(a, name) != getattr(b, name)
        if different.any():
            op = int(np.argmax(different.reshape(a.n_ops, -1).any(axis=1)))
            raise PerfModelError(
                f"timelines of different structures: {name} of op {op} differs; simulate the program that was run"
            )
