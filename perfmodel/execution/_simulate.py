"""Predicted timelines of programs: their structure with durations from cost models; and timelines as Chrome traces."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from perfmodel import ingest
from perfmodel.cost import CollectiveModel, KernelModel, event_times
from perfmodel.cost.learn import weight_files
from perfmodel.execution._structure import Event, ProgramStructure, distinct_ops, program_structure
from perfmodel.ops import Op
from perfmodel.program import N_STREAMS, Kind, Stream
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


def chrome_trace(program: ProgramStructure, timeline: Timeline) -> dict[str, Any]:
    """A timeline of a program, predicted or measured, as a Chrome trace (microseconds): a process per device,
    a thread per stream, an event per instruction."""
    structure = program.structure
    events = [ingest.name_event("process_name", device, 0, f"device {device}") for device in range(structure.devices)]
    shown = np.flatnonzero((program.instruction >= 0) & (timeline.end_s > timeline.start_s))
    columns = (shown, structure.device[shown], structure.stream[shown] % N_STREAMS, program.instruction[shown])
    for op, device, stream, index in zip(*(c.tolist() for c in columns), strict=True):
        instruction = program.function.instructions[index]
        start_s, end_s = float(timeline.start_s[op]), float(timeline.end_s[op])
        tag = instruction.tag
        args = {
            "op": instruction.op, "phase": tag.phase, "layer": tag.layer, "micro_batch": tag.micro_batch,
            "stream": Stream(stream).name.lower(), "event": Kind(int(structure.kind[op])).name.lower(),
        }  # fmt: skip
        name = f"%{instruction.outputs[0]}"
        events.append(ingest.complete_event(device, stream, start_s, end_s - start_s, name, instruction.op, args))
    other = {"program": program.function.name, "makespan_s": timeline.makespan_s}
    return ingest.chrome_trace(events, other)


def write_chrome_trace(program: ProgramStructure, timeline: Timeline, path: Path | str) -> None:
    """Write the trace as JSON, compressed if the name ends in .gz."""
    ingest.write_chrome(chrome_trace(program, timeline), path)
