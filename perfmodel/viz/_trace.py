"""Chrome trace events: open the file in Perfetto or chrome://tracing."""

import gzip
from pathlib import Path
from typing import Any

from perfmodel.display import EVENTS, json_text
from perfmodel.ingest.tables import write_bytes
from perfmodel.prediction import Prediction
from perfmodel.timeline import KIND_NAMES, slices
from perfmodel.units import GIB
from perfmodel.viz._require import timeline_of

_STREAM_NAMES = ("compute", "data-parallel communication", "pipeline sends")


def trace_events(prediction: Prediction) -> dict[str, Any]:
    """The timeline as a Chrome trace (Trace Event Format, complete events, microseconds)."""
    timeline = timeline_of(prediction)
    events: list[dict[str, Any]] = []
    for device in range(timeline.structure.devices):
        events.append(_meta("process_name", device, 0, f"pipeline rank {device}"))
        events.append({"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}})
        events += [_meta("thread_name", device, tid, name) for tid, name in enumerate(_STREAM_NAMES)]
    for start, duration, device, stream, kind, stage, micro_batch, critical in slices(timeline):
        label = EVENTS[KIND_NAMES[kind]].label
        events.append(
            {
                "ph": "X", "pid": device, "tid": stream, "ts": start * 1e6, "dur": duration * 1e6, "cat": label,
                "name": f"{label} {micro_batch}" if micro_batch >= 0 else label,
                "args": {
                    "event": KIND_NAMES[kind], "stage": stage, "micro_batch": micro_batch, "critical": critical,
                },
            }
        )  # fmt: skip
    for device, steps in enumerate(prediction.memory_over_time().steps):
        events += [
            {"ph": "C", "pid": device, "ts": at * 1e6, "name": "memory", "args": {"GiB": held / GIB}}
            for at, held in zip(steps.time_s.tolist(), steps.in_use_bytes.tolist(), strict=True)
        ]
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {
            "model": prediction.model,
            "cluster": prediction.cluster,
            "devices": prediction.devices,
            "layout": str(prediction.layout),
            "step_time_s": prediction.step_time_s,
        },
    }


def write_trace(prediction: Prediction, path: Path | str) -> None:
    """Write the trace as JSON, compressed if the name ends in .gz."""
    data = json_text(trace_events(prediction)).encode()
    write_bytes(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
