"""Predicted timelines of programs, and timelines as Chrome traces.

`simulate` puts durations from cost models on a program's structure; `simulate_on_cores` lets ranks
contend for processor cores and links, as real ranks on a small machine do.
"""

import heapq
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from perfmodel.cost import CollectiveModel, KernelModel, event_times
from perfmodel.cost.learn import weight_files
from perfmodel.ingest.profiles import chrome
from perfmodel.ir import Function
from perfmodel.ir.execution._structure import Event, ProgramStructure, program_structure
from perfmodel.ops import Op
from perfmodel.program import N_STREAMS, Kind, Stream, Structure
from perfmodel.spec import Cluster
from perfmodel.timeline import Timeline, times

Timer = Callable[[Sequence[Op]], Float[np.ndarray, " ops"]]
"""Seconds of each of some distinct kernels and collectives."""


def cluster_timer(cluster: Cluster, calibration: Path | None = None) -> Timer:
    """Return a timer that asks the cost models for times on a cluster.

    Raises:
        CalibrationError: weights that cannot be read.
    """
    weights = weight_files(calibration)
    kernels = KernelModel.of(weights)
    collectives = CollectiveModel.of(weights)

    def timer(ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
        return event_times(ops, cluster, kernels, collectives).time_s

    return timer


def durations(events: Sequence[Event], timer: Timer) -> Float[np.ndarray, " classes"]:
    """Duration of each class: the sum of its kernels and collectives."""
    # Classes share kernels; cost models are asked once, for the distinct ones.
    ops = list(dict.fromkeys(chain.from_iterable(work for _, work in events)))
    time_s = dict(zip(ops, timer(ops).tolist(), strict=True)) if ops else {}
    class_s = []
    for _, work in events:
        class_s.append(sum(time_s[op] for op in work))
    return np.array(class_s)


def simulate(program: ProgramStructure | Function, timer: Timer) -> Timeline:
    """Simulate the timeline of all instructions on all devices (DistIR, section 3.3).

    Args:
        program: a structure made for the timer's cluster, or a function (whose devices then share
            one node).
        timer: times of kernels and collectives, such as `cluster_timer` returns.
    """
    # DistIR fixes the order of execution, so simulation is a longest path over the structure: no
    # scheduling is left.
    prepared = program_structure(program) if isinstance(program, Function) else program
    return times(prepared.structure, durations(prepared.events, timer))


def simulate_on_cores(
    structure: Structure,
    core_s: Float[np.ndarray, " ops"],
    network_s: Float[np.ndarray, " ops"],
    credit_s: Float[np.ndarray, " ops"],
    messages: Int[np.ndarray, " ops"],
    cores: Sequence[int],
) -> Timeline:
    """Simulate ranks that share cores: each core runs the work of its ranks one at a time, first
    come, first served.

    An op's span begins when its rank calls it, as it does in a real run, though it may wait for its
    core. With a core for every rank this is the critical path.

    Args:
        structure: structure of a program (without lags).
        core_s: seconds for which every op needs its rank's core.
        network_s: seconds that it waits for messages.
        credit_s: seconds by which this wait is shorter if the rank's link was idle for as long
            before.
        messages: number of messages among which both divide equally, one after another; 1 for a
            kernel.
        cores: core of each rank.
    """
    queue = _CoreQueue(structure, core_s, network_s, credit_s, messages, cores)
    queue.run()
    spans_s = queue.end_s - queue.start_s
    return Timeline(queue.start_s, queue.end_s, class_means_s(structure, spans_s), structure)


class _CoreQueue:
    """An event queue of ops on ranks that share cores.

    The critical path cannot say who gets a core first, because that depends on when work arrives.
    """

    def __init__(
        self,
        structure: Structure,
        core_s: Float[np.ndarray, " ops"],
        network_s: Float[np.ndarray, " ops"],
        credit_s: Float[np.ndarray, " ops"],
        messages: Int[np.ndarray, " ops"],
        cores: Sequence[int],
    ) -> None:
        # Each message of an op takes an equal part of its work and of its wait.
        self._work_s = (core_s / messages).tolist()
        self._wait_s = (network_s / messages).tolist()
        self._credit_left_s = credit_s.tolist()
        self._messages = messages.tolist()
        self._messages_left = messages.tolist()
        self._device = structure.device.tolist()
        self._core = [cores[device] for device in self._device]
        self._link_free_s = [-np.inf] * structure.devices

        # Which ops wait for which.
        self._unmet = (structure.pred >= 0).sum(axis=1).tolist()
        self._followers: dict[int, list[int]] = defaultdict(list)
        for op, place in zip(*np.nonzero(structure.pred >= 0), strict=True):
            self._followers[int(structure.pred[op, place])].append(int(op))

        self.start_s, self.end_s = np.zeros(structure.n_ops), np.zeros(structure.n_ops)
        self._now_s = 0.0
        self._waiting: dict[int, deque[int]] = defaultdict(deque)
        """Ops that wait for a core, of which the first runs on it."""
        self._events: list[tuple[float, bool, int]] = []
        """An event: when, whether the op is on a core until then, and the op."""

    def run(self) -> None:
        """Run all ops, starting with those that wait for nothing."""
        ready = [op for op, count in enumerate(self._unmet) if count == 0]
        while ready or self._events:
            for op in ready:
                self.start_s[op] = self._now_s
                self._call_core(op)
            ready = self._next()

    def _next(self) -> list[int]:
        """Let the next event happen, and return the ops that have nothing left to wait for."""
        # The op leaves its core, or has its message: it goes on with the next one, or is done.
        self._now_s, on_core, op = heapq.heappop(self._events)
        if on_core:
            self._leave_core(op)
            if self._wait_s[op] > 0:
                self._await_message(op)
                return []
        self._messages_left[op] -= 1
        if self._messages_left[op] > 0:
            self._call_core(op)
            return []

        self.end_s[op] = self._now_s
        ready = []
        for follower in self._followers[op]:
            self._unmet[follower] -= 1
            if self._unmet[follower] == 0:
                ready.append(follower)
        return ready

    def _call_core(self, op: int) -> None:
        """Put an op into the queue of its rank's core."""
        # Joins and pure waits need no core.
        if self._work_s[op] == 0:
            self._await_message(op)
            return
        waiting = self._waiting[self._core[op]]
        waiting.append(op)
        if len(waiting) == 1:
            self._begin(op)

    def _leave_core(self, op: int) -> None:
        """Give the core of an op to the next in its queue."""
        waiting = self._waiting[self._core[op]]
        waiting.popleft()
        if waiting:
            self._begin(waiting[0])

    def _begin(self, op: int) -> None:
        """Run the first op of a queue on its core."""
        heapq.heappush(self._events, (self._now_s + self._work_s[op], True, op))

    def _await_message(self, op: int) -> None:
        """Schedule the arrival of an op's next message."""
        arrival_s = self._now_s
        wait_s, device = self._wait_s[op], self._device[op]
        if wait_s > 0:
            # A link that was idle before the first message shortens the waits, by as much as it was
            # idle.
            if self._messages_left[op] == self._messages[op]:
                idle_s = self._now_s - self._link_free_s[device]
                self._credit_left_s[op] = min(self._credit_left_s[op], idle_s)
            shorter_s = min(self._credit_left_s[op], wait_s)
            self._credit_left_s[op] -= shorter_s
            arrival_s += wait_s - shorter_s
            self._link_free_s[device] = arrival_s
        heapq.heappush(self._events, (arrival_s, False, op))


def class_means_s(
    structure: Structure, spans_s: Float[np.ndarray, " ops"]
) -> Float[np.ndarray, " classes"]:
    """Mean seconds of the ops of each class."""
    # A timeline carries durations by class; measured ops of a class differ, so their mean stands
    # for it.
    count = np.bincount(structure.duration, minlength=structure.n_classes)
    total_s = np.bincount(structure.duration, spans_s, minlength=structure.n_classes)
    return np.where(structure.class_kind == Kind.ZERO, 0.0, total_s / np.maximum(count, 1))


def chrome_trace(program: ProgramStructure, timeline: Timeline) -> dict[str, Any]:
    """A timeline of a program, predicted or measured, as a Chrome trace (microseconds): a process
    per device, a thread per stream, an event per instruction."""
    structure = program.structure
    events = [
        chrome.name_event("process_name", device, 0, f"device {device}")
        for device in range(structure.devices)
    ]
    # Joins and ops that take no time would only clutter the picture.
    visible = np.flatnonzero((program.instruction >= 0) & (timeline.end_s > timeline.start_s))
    columns = (
        visible,
        structure.device[visible],
        structure.stream[visible] % N_STREAMS,
        program.instruction[visible],
    )
    for op, device, stream, index in zip(*(c.tolist() for c in columns), strict=True):
        instruction = program.function.instructions[index]
        start_s = float(timeline.start_s[op])
        end_s = float(timeline.end_s[op])
        tag = instruction.tag
        args = {
            "op": instruction.op,
            "phase": tag.phase,
            "layer": tag.layer,
            "micro_batch": tag.micro_batch,
            "stream": Stream(stream).name.lower(),
            "event": Kind(int(structure.kind[op])).name.lower(),
        }
        name = f"%{instruction.outputs[0]}"
        events.append(
            chrome.complete_event(
                device, stream, start_s, end_s - start_s, name, instruction.op, args
            )
        )
    metadata = {"program": program.function.name, "makespan_s": timeline.makespan_s}
    return chrome.chrome_trace(events, metadata)


def write_chrome_trace(program: ProgramStructure, timeline: Timeline, path: Path | str) -> None:
    """Write the trace as JSON, compressed if the name ends in .gz."""
    chrome.write_chrome(chrome_trace(program, timeline), path)
