"""Predicted timelines of programs: their structure with durations from cost models."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float

from perfmodel.cost import CollectiveModel, KernelModel, event_times
from perfmodel.cost.learn import weight_files
from perfmodel.execution._structure import Event, ProgramStructure, distinct_ops, program_structure
from perfmodel.ops import Op
from perfmodel.program.ir import Function
from perfmodel.spec import Cluster
from perfmodel.timeline import Timeline, times

Timer = Callable[[Sequence[Op]], Float[np.ndarray, " ops"]]
"""Seconds of each of some distinct kernels and collectives."""


def cluster_timer(cluster: Cluster, calibration: Path | None = None) -> Timer:
    """Times on a cluster by the cost models (raises `CalibrationError` for weights that cannot be read)."""
    weights = weight_files(calibration)
    kernels, collectives = KernelModel.of(weights), CollectiveModel.of(weights)

    def timer(ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
        return event_times(ops, cluster, kernels, collectives).time_s

    return timer


def durations(events: Sequence[Event], timer: Timer) -> Float[np.ndarray, " classes"]:
    """Seconds of each class: its kernels and collectives one after another."""
    ops = distinct_ops(events)
    time_s = dict(zip(ops, timer(ops).tolist(), strict=True)) if ops else {}
    return np.array([sum(time_s[op] for op in work) for _, work in events])


def simulate(program: ProgramStructure | Function, timer: Timer) -> Timeline:
    """When every instruction runs on every device (DistIR, section 3.3).

    Args:
        program: a structure made for the timer's cluster, or a function (whose devices then share one node).
        timer: as from `cluster_timer`.
    """
    prepared = program_structure(program) if isinstance(program, Function) else program
    return times(prepared.structure, durations(prepared.events, timer))
