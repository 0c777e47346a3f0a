"""Programs as pictures: Graphviz DOT, and Chrome traces of timelines."""

import gzip
from pathlib import Path
from typing import Any

import numpy as np

from perfmodel.display import json_text
from perfmodel.execution._structure import ProgramStructure
from perfmodel.ingest.tables import write_bytes
from perfmodel.program import N_STREAMS, Kind, Stream
from perfmodel.program.ir import Function, instruction_devices
from perfmodel.timeline import Timeline


def to_dot(function: Function) -> str:
    """The data flow as a DOT graph: a cluster per device, collectives outside of them."""
    groups = instruction_devices(function)
    maker: dict[str, str] = {p.name: f"p{k}" for k, p in enumerate(function.parameters)}
    of_device: dict[int, list[str]] = {}
    shared: list[str] = []
    edges: list[str] = []
    for k, parameter in enumerate(function.parameters):
        tensor = function.types[parameter.name]
        of_device.setdefault(tensor.device, []).append(f'p{k} [label="%{parameter.name}", shape=oval];')
    for k, (instruction, group) in enumerate(zip(function.instructions, groups, strict=True)):
        node = f'i{k} [label="%{instruction.outputs[0]}\\n{instruction.op}", shape=box];'
        (of_device.setdefault(group[0], []) if len(group) == 1 else shared).append(node)
        edges += [f"{maker[name]} -> i{k};" for name in dict.fromkeys(instruction.inputs)]
        maker.update(dict.fromkeys(instruction.outputs, f"i{k}"))
    lines = [f'digraph "{function.name}" {{', "  rankdir=LR;"]
    for device, nodes in sorted(of_device.items()):
        lines += [f"  subgraph cluster_{device} {{", f'    label="device {device}";']
        lines += [f"    {node}" for node in nodes] + ["  }"]
    return "\n".join([*lines, *(f"  {line}" for line in (*shared, *edges)), "}", ""])


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
