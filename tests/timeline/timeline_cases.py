"""Structures to test on, and the slow, obvious oracle: a discrete-event simulation."""

import heapq

import numpy as np
from hypothesis import strategies as st

from perfmodel.program import N_STREAMS, Kind, Stream, Structure


def structure_of(
    preds: list[tuple[int, int]],
    durations: list[int],
    lags: list[tuple[int, int]] | None = None,
    *,
    devices: int = 1,
    device: list[int] | None = None,
    alloc: list[int] | None = None,
    free: list[int] | None = None,
    n_classes: int | None = None,
) -> Structure:
    """A structure from plain lists; every class but 0 is a forward pass on a compute stream."""
    n = len(preds)
    pred = np.array(preds, np.int32)
    lag = np.array(lags or [(0, 0)] * n, np.int32)
    duration = np.array(durations, np.int32)
    classes = n_classes or int(max(duration.max(), lag.max())) + 1
    kind = np.full(classes, int(Kind.FORWARD), np.int32)
    kind[0] = Kind.ZERO
    of_device = np.array(device if device is not None else [0] * n, np.int32)
    return Structure(
        duration=duration,
        pred=pred,
        lag=lag,
        stream=np.where(of_device < 0, -1, of_device * N_STREAMS + Stream.COMPUTE).astype(np.int32),
        micro_batch=np.full(n, -1, np.int32),
        class_kind=kind,
        class_stage=np.zeros(classes, np.int32),
        class_segment=np.zeros(classes, np.int32),
        alloc=np.array(alloc or [0] * n, np.int32),
        free=np.array(free or [0] * n, np.int32),
        devices=devices,
    )


@st.composite
def structures(draw: st.DrawFn, max_ops: int = 40, with_lags: bool | None = None) -> Structure:
    """Any directed acyclic graph of in-degree 2, some predecessors missing or named twice."""
    n = draw(st.integers(1, max_ops))
    classes = draw(st.integers(2, 8))
    lagged = draw(st.booleans()) if with_lags is None else with_lags
    near = draw(st.integers(1, max_ops))
    preds, lags = [], []
    for op in range(n):
        ops = st.integers(max(-1, op - near), op - 1)
        preds.append((draw(ops), draw(ops)))
        lag = st.integers(0, classes - 1) if lagged else st.just(0)
        lags.append((draw(lag), draw(lag)))
    durations = [draw(st.integers(0, classes - 1)) for _ in range(n)]
    devices = draw(st.integers(1, 3))
    device = [draw(st.integers(0, devices - 1)) for _ in range(n)]
    memory = st.lists(st.integers(0, 3), min_size=n, max_size=n)
    return structure_of(
        preds,
        durations,
        lags,
        devices=devices,
        device=device,
        alloc=draw(memory),
        free=draw(memory),
        n_classes=classes,
    )


def distinct_durations(structure: Structure, seed: int = 0) -> np.ndarray:
    """Random durations, so that no two paths tie."""
    values = np.random.default_rng(seed).uniform(0.5, 1.5, structure.n_classes)
    values[0] = 0
    return values


def tied_durations(structure: Structure, seed: int = 0) -> np.ndarray:
    """Small whole numbers, so that many paths tie."""
    values = np.random.default_rng(seed).integers(0, 4, structure.n_classes).astype(float)
    values[0] = 0
    return values


def event_loop(structure: Structure, durations: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every op: an op starts once the last of its predecessors has released it."""
    n = structure.n_ops
    successors: list[list[tuple[int, int]]] = [[] for _ in range(n)]
    waits = [0] * n
    for op in range(n):
        for pred, lag in zip(structure.pred[op], structure.lag[op], strict=True):
            if pred >= 0:
                successors[pred].append((op, lag))
                waits[op] += 1
    start = np.zeros(n)
    end = np.zeros(n)
    released: list[list[float]] = [[] for _ in range(n)]
    events = [(durations[structure.duration[op]], op) for op in range(n) if waits[op] == 0]
    heapq.heapify(events)
    while events:
        time, op = heapq.heappop(events)
        end[op] = time
        for successor, lag in successors[op]:
            released[successor].append(time + durations[lag])
            if len(released[successor]) == waits[successor]:
                start[successor] = max(released[successor])
                duration = durations[structure.duration[successor]]
                heapq.heappush(events, (start[successor] + duration, successor))
    return start, end


def first_path(structure: Structure, end: np.ndarray, durations: np.ndarray) -> list[int]:
    """Critical path by the stated tie rule, from the last op back."""
    path = []
    op = structure.n_ops - 1
    while True:
        path.append(op)
        best, by = -np.inf, -1
        for pred, lag in zip(structure.pred[op], structure.lag[op], strict=True):
            if pred >= 0 and end[pred] + durations[lag] > best:
                best = end[pred] + durations[lag]
                by = int(pred)
        if by < 0:
            return path[::-1]
        op = by


def counts_on(
    structure: Structure, path: list[int], end: np.ndarray, durations: np.ndarray
) -> np.ndarray:
    """Occurrences of each class on a path, lags included."""
    counts = np.zeros(structure.n_classes)
    for op, before in zip(path, [-1, *path[:-1]], strict=True):
        counts[structure.duration[op]] += 1
        if before >= 0:
            sides = [j for j in range(2) if structure.pred[op, j] == before]
            released = [end[before] + durations[structure.lag[op, j]] for j in sides]
            counts[structure.lag[op, sides[int(np.argmax(released))]]] += 1
    counts[0] = 0
    return counts


def pipeline_1f1b(stages: int, micro_batches: int) -> Structure:
    """1F1B with an op per send: classes 1 forward, 2 backward, 3 either send; all stages alike."""
    queues = []
    for stage in range(stages):
        warm_up = min(micro_batches, stages - stage - 1)
        order = [("F", i) for i in range(warm_up)]
        for i in range(micro_batches - warm_up):
            order += [("F", warm_up + i), ("B", i)]
        queues.append(order + [("B", i) for i in range(micro_batches - warm_up, micro_batches)])
    preds: list[tuple[int, int]] = []
    durations: list[int] = []
    device: list[int] = []

    def add(duration: int, of_device: int, first: int, second: int = -1) -> int:
        preds.append((first, second))
        durations.append(duration)
        device.append(of_device)
        return len(preds) - 1

    previous = [-1] * stages
    arrived: dict[tuple[str, int, int], int] = {}
    while any(queues):
        for stage, queue in enumerate(queues):
            while queue:
                kind, i = queue[0]
                source = stage - 1 if kind == "F" else stage + 1
                if 0 <= source < stages and (kind, source, i) not in arrived:
                    break
                queue.pop(0)
                op = add(
                    1 if kind == "F" else 2,
                    stage,
                    previous[stage],
                    arrived.get((kind, source, i), -1),
                )
                previous[stage] = op
                if 0 <= (stage + 1 if kind == "F" else stage - 1) < stages:
                    arrived[kind, stage, i] = add(3, stage, op)
    last = previous[0]
    for other in previous[1:]:
        last = add(0, -1, last, other)
    if len(preds) - 1 != last:
        last = add(0, -1, last)
    return structure_of(preds, durations, devices=stages, device=device, n_classes=4)
