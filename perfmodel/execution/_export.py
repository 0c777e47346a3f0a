"""Timelines of programs as Chrome traces."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.display import json_text
from perfmodel.execution._structure import ProgramStructure
from perfmodel.ingest.tables import write_bytes
from perfmodel.program import N_STREAMS, Kind, Stream
from perfmodel.timeline import Timeline


def chrome_trace(program: ProgramStructure, timeline: Timeline) -> dict[str, Any]:
    """A timeline of a program, predicted or measured, as a Chrome trace (microseconds): a process per device,
    a thread per stream, an event per instruction."""
    structure = program.structure
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": device, "args": {"name": f"device {device}"}}
        for device in range(structure.devices)
    ]
    shown = np.flatnonzero((program.instruction >= 0) & (timeline.end_s > timeline.start_s))
    columns = (shown, structure.device[shown], structure.stream[shown] % N_STREAMS, program.instruction[shown])
    for op, device, stream, index in zip(*(c.tolist() for c in columns), strict=True):
        instruction = program.function.instructions[index]
        start_s, end_s = float(timeline.start_s[op]), float(timeline.end_s[op])
        tag = instruction.tag
        events.append(
            {
                "ph": "X", "pid": device, "tid": stream, "ts": start_s * 1e6, "dur": (end_s - start_s) * 1e6,
                "name": f"%{instruction.outputs[0]}", "cat": instruction.op,
                "args": {
                    "op": instruction.op, "phase": tag.phase, "layer": tag.layer, "micro_batch": tag.micro_batch,
                    "stream": Stream(stream).name.lower(), "event": Kind(int(structure.kind[op])).name.lower(),
                },
            }
        )  # fmt: skip
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"program": program.function.name, "makespan_s": timeline.makespan_s},
    }


def write_chrome_trace(program: ProgramStructure, timeline: Timeline, path: Path | str) -> None:
    """Write the trace as JSON, compressed if the name ends in .gz."""
    data = json_text(chrome_trace(program, timeline)).encode()
    write_bytes(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)
