"""NCCL's collectives timed as CUDA graphs, on a stand-in for torch whose host launches slowly."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfmodel.measure.ranks import GRAPH_CALLS, NcclSession, evenly_divided

LAUNCH_MS, KERNEL_MS = 0.015, 0.004


class Machine:
    """A host and a stream, each with a clock; what is captured is not run."""

    def __init__(self) -> None:
        self.host_ms = self.stream_ms = 0.0
        self.captured: list[float] | None = None
        self.captures: list[int] = []

    def run(self, ms: float) -> None:
        if self.captured is not None:
            self.captured.append(ms)
            return
        self.launch(ms)

    def launch(self, ms: float) -> None:
        self.host_ms += LAUNCH_MS
        self.stream_ms = max(self.stream_ms, self.host_ms) + ms

    def cuda(self) -> SimpleNamespace:
        machine = self

        class Event:
            def __init__(self, enable_timing: bool) -> None:
                assert enable_timing

            def record(self) -> None:
                self.at_ms = max(machine.stream_ms, machine.host_ms)

            def elapsed_time(self, end: "Event") -> float:
                return end.at_ms - self.at_ms

        class CUDAGraph:
            def replay(self) -> None:
                machine.launch(sum(self.kernels_ms))

        @contextmanager
        def graph(graph: CUDAGraph) -> Iterator[None]:
            machine.captured = []
            yield
            graph.kernels_ms = machine.captured
            machine.captures.append(len(machine.captured))
            machine.captured = None

        def synchronize() -> None:
            assert machine.captured is None, "no graph may wait for the device"
            machine.host_ms = max(machine.host_ms, machine.stream_ms)

        return SimpleNamespace(
            Event=Event, CUDAGraph=CUDAGraph, graph=graph, synchronize=synchronize
        )


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    machine = Machine()
    torch = SimpleNamespace(cuda=machine.cuda())
    monkeypatch.setattr("perfmodel.measure.ranks._torch_rank.torch_module", lambda: torch)
    return machine


def session(machine: Machine) -> NcclSession:
    made = NcclSession.__new__(NcclSession)
    made._graphs = {}
    made._run_once = lambda: machine.run(KERNEL_MS)
    return made


@pytest.mark.parametrize("calls", [20, GRAPH_CALLS, 3 * GRAPH_CALLS + 7])
def test_a_small_collective_takes_its_kernel_and_not_its_launch(machine: Machine, calls: int):
    spans = session(machine).run(calls)
    assert len(spans) == calls
    call_ms = 1e3 * (spans[-1][1] - spans[0][0]) / calls
    assert call_ms == pytest.approx(KERNEL_MS, rel=0.25)
    assert call_ms < LAUNCH_MS / 2


def test_a_bundle_is_captured_once(machine: Machine):
    nccl = session(machine)
    for _ in range(3):
        nccl.run(2 * GRAPH_CALLS + 5)
    assert machine.captures == [GRAPH_CALLS, 5]


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(1, 9)), min_size=1, max_size=5))
def test_spans_follow_one_another_and_fill_their_bundles(layout_batches: list[tuple[float, int]]):
    at_s = [0.0]
    for length_s, _ in layout_batches:
        at_s.append(at_s[-1] + length_s)
    spans = evenly_divided(at_s, [calls for _, calls in layout_batches])
    assert len(spans) == sum(calls for _, calls in layout_batches)
    assert spans[-1][1] - spans[0][0] == pytest.approx(at_s[-1])
    assert all(a[1] == pytest.approx(b[0]) for a, b in pairwise(spans))
