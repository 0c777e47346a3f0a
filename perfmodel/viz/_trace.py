"""A prediction's timeline as files: an interactive page, and Chrome traces (Perfetto)."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np

from perfmodel.display import EVENTS
from perfmodel.errors import PerfModelError
from perfmodel.ingest.profiles.chrome import chrome_trace, complete_event, name_event, write_chrome
from perfmodel.ingest.tables import write_text
from perfmodel.prediction import Prediction
from perfmodel.prediction.composition import rank_strides
from perfmodel.program import N_STREAMS, Kind, Stream
from perfmodel.timeline import KIND_NAMES, STREAM_NAMES, Timeline, slices
from perfmodel.units import GIB, number_of

_SENDS: Final = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)
_MOST_EVENTS: Final = 3_000_000
"""Most events of a written trace, about 400 MB of text."""


def trace_events(
    prediction: Prediction, *, every_pass: bool = False, every_rank: bool = False
) -> dict[str, Any]:
    """The timeline as a Chrome trace (Trace Event Format, microseconds): passes and communication
    as complete events, transfers as flows from the send to the pass that waits for it, memory as a
    counter.

    The first pass of every class on every rank holds its blocks, and these their kernels and
    collectives; in all passes of a large model they would make a file that no viewer opens.

    Args:
        prediction: prediction with a timeline.
        every_pass: blocks, kernels and collectives in all passes.
        every_rank: all devices, by rank, instead of one per pipeline stage: ranks of the same stage
            do the same.

    Raises:
        PerfModelError: without a timeline, or with more events than can be looked at.
    """
    timeline = prediction.kept_timeline
    events: list[dict[str, Any]] = []
    drawn = slices(timeline)

    # A process per pipeline rank, a thread per stream.
    for device in range(timeline.structure.devices):
        events.append(name_event("process_name", device, 0, f"pipeline rank {device}"))
        events.append(
            {"ph": "M", "name": "process_sort_index", "pid": device, "args": {"sort_index": device}}
        )
        used = sorted({int(Stream.SEND), *(drawn.stream[drawn.device == device]).tolist()})
        events += [name_event("thread_name", device, tid, STREAM_NAMES[tid]) for tid in used]

    # Passes and communication are complete events ("X").
    for start, duration, device, stream, kind, stage, micro_batch, critical, _ in drawn:
        label = EVENTS[KIND_NAMES[kind]].label
        name = f"{label} {micro_batch}" if micro_batch >= 0 else label
        args = {
            "event": KIND_NAMES[kind],
            "stage": stage,
            "micro_batch": micro_batch,
            "critical": critical,
        }
        events.append(complete_event(device, stream, start, duration, name, label, args))
    events += [*_events_inside_passes(prediction, every_pass), *_flows(prediction)]
    for device, steps in enumerate(prediction.memory_over_time().steps):
        for at_s, in_use_bytes in zip(
            steps.time_s.tolist(), steps.in_use_bytes.tolist(), strict=True
        ):
            in_use = {"GiB": in_use_bytes / GIB}
            events.append(
                {"ph": "C", "pid": device, "ts": at_s * 1e6, "name": "memory", "args": in_use}
            )
    if every_rank:
        events = _on_every_rank(events, prediction)
    metadata = {
        "model": prediction.model,
        "cluster": prediction.cluster,
        "devices": prediction.devices,
        "layout": prediction.layout_notation,
        "step_time_s": prediction.step_time_s,
    }
    return chrome_trace(events, metadata)


def write_trace(
    prediction: Prediction,
    path: Path | str,
    *,
    every_pass: bool = False,
    every_rank: bool = False,
) -> None:
    """Write the trace (`trace_events`) as JSON, compressed if the name ends in .gz."""
    write_chrome(trace_events(prediction, every_pass=every_pass, every_rank=every_rank), path)


def _on_every_rank(events: list[dict[str, Any]], prediction: Prediction) -> list[dict[str, Any]]:
    """Events of pipeline ranks on all ranks of the layout, one pipeline after another."""
    layout = prediction.layout

    # Ranks of one stage do the same, so that each pipeline's events are copies with other rank
    # numbers. Flow ids must differ, or viewers join arrows of different pipelines.
    stride = rank_strides(layout)["pp"]
    flows = max((e.get("id", 0) for e in events), default=0) + 1
    firsts = [rank for rank in range(layout.devices) if rank // stride % layout.pp == 0]
    if len(events) * len(firsts) > _MOST_EVENTS:
        raise PerfModelError(
            f"timeline: {len(events) * len(firsts):,} events of {layout.devices} ranks are too many for a trace; "
            "leave out --every-pass or --every-rank, or use a smaller global batch"
        )
    all_events = []
    for pipeline, first in enumerate(firsts):
        for event in events:
            stage = event["pid"]
            rank = first + stage * stride
            changed: dict[str, Any] = {"pid": rank}
            if "id" in event:
                changed["id"] = event["id"] + pipeline * flows
            if event["name"] == "process_name":
                changed["args"] = {"name": f"rank {rank} (pipeline rank {stage})"}
            elif event["name"] == "process_sort_index":
                changed["args"] = {"sort_index": rank}
            all_events.append(event | changed)
    return all_events


def _events_inside_passes(prediction: Prediction, every_pass: bool) -> Iterator[dict[str, Any]]:
    """Blocks, kernels, collectives of each pass, or of each rank's first pass of a class."""
    timeline = prediction.kept_timeline
    s = timeline.structure
    # The first pass of every class on every rank stands for the others, which are alike.
    order = np.argsort(timeline.start_s, kind="stable")
    is_pass = np.isin(s.duration[order], list(prediction.pass_parts))
    order = order[is_pass & (s.stream[order] >= 0)]
    _, first = np.unique(np.stack([s.duration[order], s.device[order]]), axis=1, return_index=True)
    for op in (order if every_pass else order[first]).tolist():
        common = {"ph": "X", "pid": int(s.device[op]), "tid": int(Stream.COMPUTE), "cat": "inside"}
        inside = {"inside": KIND_NAMES[s.kind[op]]}
        at_s = float(timeline.start_s[op])
        for part in prediction.pass_parts[int(s.duration[op])]:
            block = {"name": part.name.replace("_", " "), "args": inside}
            yield _within(timeline, op, at_s, part.time_s) | common | block

            # Kernels of a block follow one another from its start.
            inner_s = at_s
            for event in part.events:
                args = inside | {"count": event.count, "group": event.group}
                yield (
                    _within(timeline, op, inner_s, event.time_s)
                    | common
                    | {"name": event.name, "args": args}
                )
                inner_s += event.time_s
            at_s += part.time_s


def _within(timeline: Timeline, op: int, start_s: float, duration_s: float) -> dict[str, float]:
    """Times of a part of an op, clipped to the op, because viewers reject parts outside."""
    end_s = min(start_s + duration_s, float(timeline.end_s[op]))
    return {"ts": start_s * 1e6, "dur": max(end_s - start_s, 0.0) * 1e6}


def _flows(prediction: Prediction) -> Iterator[dict[str, Any]]:
    """An arrow from every transfer between ranks to the pass that needs it."""
    timeline = prediction.kept_timeline
    s = timeline.structure
    op, side = np.nonzero(s.pred >= 0)
    source, lag = s.pred[op, side], s.lag[op, side]

    # A join (an op on no stream) takes several transfers to one pass. Follow joins to the op that
    # they let run.
    then = np.full(s.n_ops, -1)
    then[source[::-1]] = op[::-1]
    while True:
        joins = (s.stream[op] < 0) & (then[op] >= 0)
        if not joins.any():
            break
        op = np.where(joins, then[op], op)

    # A transfer that no op stands for is folded into a lag, and begins when its source ends.
    folded = lag > 0
    kind = np.where(folded, s.class_kind[lag], s.kind[source])
    stream = np.where(s.stream < 0, -1, s.stream % N_STREAMS)
    sent_from = np.where(folded, Stream.SEND, stream[source])
    sent_s = np.where(folded, timeline.end_s[source], timeline.start_s[source])

    # Arrows between different ranks only; ops without a stream have no place to begin or end.
    crosses = s.device[source] != s.device[op]
    drawable = (stream[source] >= 0) & (stream[op] >= 0)
    transfers = np.flatnonzero(np.isin(kind, _SENDS) & crosses & drawable)
    for number, i in enumerate(transfers.tolist()):
        common = {"cat": "transfer", "name": EVENTS[KIND_NAMES[int(kind[i])]].label, "id": number}
        sender = {"pid": int(s.device[source[i]]), "tid": int(sent_from[i])}
        receiver = {"pid": int(s.device[op[i]]), "tid": int(stream[op[i]])}
        yield {"ph": "s", **sender, "ts": float(sent_s[i]) * 1e6, **common}
        yield {
            "ph": "f",
            "bp": "e",
            **receiver,
            "ts": float(timeline.start_s[op[i]]) * 1e6,
            **common,
        }


def interactive(prediction: Prediction) -> str:
    """Return the interactive page: zoom down to kernels, search, critical path, memory.

    Raises:
        PerfModelError: the prediction holds no timeline.
    """
    title = (
        f"{prediction.model} on {number_of(prediction.devices, 'device')} of {prediction.cluster}, {prediction.layout_notation}: "
        f"step {prediction.step_time_s:.4g} s, bubble {prediction.bubble_fraction:.1%}, MFU {prediction.mfu:.1%}"
    )
    timeline = prediction.kept_timeline
    return timeline.to_html(
        prediction.memory_over_time(),
        prediction.memory_capacity_bytes,
        title,
        prediction.pass_parts,
    )


def write_interactive(prediction: Prediction, path: Path | str) -> None:
    """Write the page, which opens in any browser without a network."""
    write_text(path, interactive(prediction))
