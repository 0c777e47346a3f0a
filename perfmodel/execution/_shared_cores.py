"""Predicted timelines of ranks that share processor cores: work on one core is done in turn."""

import heapq
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

from perfmodel.program import Kind, Structure
from perfmodel.timeline import Timeline


def simulate_on_cores(
    structure: Structure,
    core_s: Float[np.ndarray, " ops"],
    network_s: Float[np.ndarray, " ops"],
    credit_s: Float[np.ndarray, " ops"],
    cores: Sequence[int],
) -> Timeline:
    """When every op runs, if a core runs the work of its ranks one at a time, in the order in which it comes.

    An op's span begins when its rank calls it, as it does in a real run, though it may wait for its core. With a core
    for every rank this is the critical path.

    Args:
        structure: of a program (without lags).
        core_s: seconds for which every op needs its rank's core.
        network_s: seconds that it then waits for messages.
        credit_s: seconds that this may take less, as far as the rank's link was idle before.
        cores: core of each rank.
    """
    followers: dict[int, list[int]] = defaultdict(list)
    for op, place in zip(*np.nonzero(structure.pred >= 0), strict=True):
        followers[int(structure.pred[op, place])].append(int(op))
    work_s, wait_s, most_s = core_s.tolist(), network_s.tolist(), credit_s.tolist()
    device = structure.device.tolist()
    link_free_s = [-np.inf] * structure.devices
    left = (structure.pred >= 0).sum(axis=1).tolist()
    start_s, end_s = np.zeros(structure.n_ops), np.zeros(structure.n_ops)
    queue: dict[int, deque[int]] = defaultdict(deque)
    ready, now_s = [op for op, n in enumerate(left) if n == 0], 0.0
    events: list[tuple[float, bool, int]] = []  # (when, whether on a core until then, op)

    def await_messages(op: int) -> None:
        if wait_s[op] > 0:
            idle_s = now_s - link_free_s[device[op]]
            link_free_s[device[op]] = now_s + max(0.0, wait_s[op] - min(most_s[op], idle_s))
            heapq.heappush(events, (link_free_s[device[op]], False, op))
        else:
            heapq.heappush(events, (now_s, False, op))

    while ready or events:
        for op in ready:
            start_s[op] = now_s
            if work_s[op] == 0:
                await_messages(op)
                continue
            waiting = queue[cores[device[op]]]
            waiting.append(op)
            if len(waiting) == 1:
                heapq.heappush(events, (now_s + work_s[op], True, op))
        ready = []
        now_s, on_core, op = heapq.heappop(events)
        if on_core:
            waiting = queue[cores[device[op]]]
            waiting.popleft()
            if waiting:
                heapq.heappush(events, (now_s + work_s[waiting[0]], True, waiting[0]))
            if wait_s[op] > 0:
                await_messages(op)
                continue
        end_s[op] = now_s
        for follower in followers[op]:
            left[follower] -= 1
            if left[follower] == 0:
                ready.append(follower)
    return Timeline(start_s, end_s, class_means_s(structure, end_s - start_s), structure)


def class_means_s(structure: Structure, spans_s: Float[np.ndarray, " ops"]) -> Float[np.ndarray, " classes"]:
    """Mean seconds of the ops of each class, 0 for those that take none."""
    count = np.bincount(structure.duration, minlength=structure.n_classes)
    total_s = np.bincount(structure.duration, spans_s, minlength=structure.n_classes)
    return np.where(structure.class_kind == Kind.ZERO, 0.0, total_s / np.maximum(count, 1))
