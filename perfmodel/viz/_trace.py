"""Chrome trace events: open the file in Perfetto or chrome://tracing."""

import gzip
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.display import EVENTS, json_text
from perfmodel.errors import PerfModelError
from perfmodel.ingest.tables import write_bytes
from perfmodel.prediction import Operators, Prediction, rank_strides
from perfmodel.timeline import KIND_NAMES, Timeline, slices
from perfmodel.units import GIB
from perfmodel.viz._require import timeline_of

_STREAM_NAMES = ("compute", "data-parallel communication", "pipeline sends")

_MOST_EVENTS: Final = 3_000_000
"""Of a trace that is written: some 400 MB of text."""


def trace_events(
    prediction: Prediction, operators: Mapping[int, tuple[Operators, ...]] | None = None, every_rank: bool = False
) -> dict[str, Any]:
    """The timeline as a Chrome trace (Trace Event Format, complete events, microseconds).

    Args:
        prediction: with a timeline.
        operators: of every class of passes (`pass_operators`), drawn below the passes, block by block.
        every_rank: all devices, by rank, instead of one per pipeline stage: ranks of the same stage do the same.

    Raises:
        PerfModelError: without a timeline, or with more events than can be looked at.
    """
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
    if operators:
        events += _operator_events(timeline, operators)
    if every_rank:
        events = _on_every_rank(events, prediction)
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


def _operator_events(timeline: Timeline, operators: Mapping[int, tuple[Operators, ...]]) -> Iterator[dict[str, Any]]:
    """Blocks and their operators inside every pass, one after another; a pass as long as it is in the timeline."""
    s = timeline.structure
    for op in np.flatnonzero(np.isin(s.duration, list(operators)) & (s.stream >= 0)).tolist():
        blocks, device = operators[int(s.duration[op])], int(s.device[op])
        at, length = float(timeline.start_s[op]), float(timeline.end_s[op] - timeline.start_s[op])
        whole = sum(block.seconds for block in blocks)
        stretch = length / whole if whole else 0.0
        for block in blocks:
            yield _nested(device, at, block.seconds * stretch, block.block, "block")
            inner = at
            fits = min(1.0, block.seconds / max(sum(block.operator_s), 1e-30)) * stretch
            for label, group, seconds in zip(block.labels, block.groups, block.operator_s, strict=True):
                yield _nested(device, inner, seconds * fits, label, f"{group} collective" if group else "kernel")
                inner += seconds * fits
            at += block.seconds * stretch


def _nested(pid: int, start_s: float, seconds: float, name: str, what: str) -> dict[str, Any]:
    return {"ph": "X", "pid": pid, "tid": 0, "ts": start_s * 1e6, "dur": seconds * 1e6, "cat": what, "name": name}


def _on_every_rank(events: list[dict[str, Any]], prediction: Prediction) -> list[dict[str, Any]]:
    """Events of pipeline ranks on all ranks of the layout."""
    layout = prediction.layout
    if len(events) * layout.devices // layout.pp > _MOST_EVENTS:
        raise PerfModelError(
            f"timeline: {len(events) * layout.devices // layout.pp:,} events on {layout.devices} ranks are too many to "
            "look at; leave out --operators or --every-rank, or take a smaller global batch"
        )
    stride = rank_strides(layout)["pp"]
    found = []
    for rank in range(layout.devices):
        stage = rank // stride % layout.pp
        for event in events:
            if event["pid"] == stage:
                renamed = event | {"pid": rank}
                if event["name"] == "process_name":
                    renamed["args"] = {"name": f"rank {rank} (stage {stage})"}
                elif event["name"] == "process_sort_index":
                    renamed["args"] = {"sort_index": rank}
                found.append(renamed)
    return found


def write_trace(
    prediction: Prediction,
    path: Path | str,
    operators: Mapping[int, tuple[Operators, ...]] | None = None,
    every_rank: bool = False,
) -> None:
    """Write the trace (`trace_events`) as JSON, compressed if the name ends in .gz."""
    data = json_text(trace_events(prediction, operators, every_rank)).encode()
    write_bytes(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def _meta(what: str, pid: int, tid: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": {"name": name}}
