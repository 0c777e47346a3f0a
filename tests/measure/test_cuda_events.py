"""Timing between CUDA events, on a stand-in for torch whose stream works by a clock of its own."""

from types import SimpleNamespace

import pytest

from perfmodel.errors import PerfModelError
from perfmodel.measure.backends import TorchBackend, event_sampler
from perfmodel.measure.timing import NoMeter
from perfmodel.ops import Gemm
from perfmodel.ops.programs import Program


class Stream:
    """Work in order; `synchronize` is what a reader of events must wait for."""

    def __init__(self) -> None:
        self.now_ms, self.done = 0.0, True

    def work(self, ms: float) -> None:
        self.now_ms += ms
        self.done = False


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            self.at_ms = stream.now_ms

        def elapsed_time(self, end: "Event") -> float:
            assert stream.done, "read before the device was done"
            return end.at_ms - self.at_ms

    cuda = SimpleNamespace(Event=Event, synchronize=lambda: setattr(stream, "done", True))
    monkeypatch.setattr(
        "perfmodel.measure.backends._torch_backend.torch_module", lambda: SimpleNamespace(cuda=cuda)
    )
    return stream


def test_a_sample_is_the_time_between_two_events(stream: Stream):
    sample = event_sampler(Program(stream.work, (2.0,)), None)(5)
    assert (sample.calls, sample.wall_s, sample.interference) == (5, pytest.approx(0.01), 0.0)


def test_flushes_lie_before_the_events(stream: Stream):
    sample = event_sampler(Program(stream.work, (2.0,)), lambda: stream.work(100.0))(3)
    assert (sample.calls, sample.wall_s) == (3, pytest.approx(0.006))
    assert stream.now_ms == pytest.approx(306.0)


@pytest.mark.parametrize(
    ("capability", "dtype", "refused"),
    [
        ((7, 0), "tf32", True),
        ((8, 0), "tf32", False),
        ((8, 0), "fp8", True),
        ((8, 9), "fp8", False),
        ((9, 0), "fp8", False),
    ],
)
def test_element_types_need_their_units(capability: tuple[int, int], dtype: str, refused: bool):
    backend = TorchBackend("NVIDIA X", capability, NoMeter())
    op = Gemm(m=16, n=16, k=16, dtype=dtype)
    if refused:
        with pytest.raises(PerfModelError, match=f"{dtype} products need an NVIDIA GPU"):
            backend.check(op)
    else:
        backend.check(op)


def test_fp8_wants_multiples_of_sixteen():
    with pytest.raises(PerfModelError, match="multiples of 16"):
        TorchBackend("NVIDIA X", (9, 0), NoMeter()).check(Gemm(m=1, n=16, k=24, dtype="fp8"))
