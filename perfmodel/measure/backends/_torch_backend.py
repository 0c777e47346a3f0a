"""torch on a CPU or CUDA GPU. Needs the extra `torch`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from perfmodel.measure.backends._programs import (
    FLUSH_FACTOR,
    Calls,
    check_capability,
    check_torch_kernel,
    cold_sampler,
    host_flush,
    queued_sampler,
    torch_program,
)
from perfmodel.measure.tables import Row
from perfmodel.measure.timing import Meter, NoMeter, Sample, SampleCalls, host_meter
from perfmodel.ops import KernelOp
from perfmodel.ops.programs import Program, torch_module
from perfmodel.units import MIB

L2_BYTES: Final = 128 * MIB
"""Assumed L2 size if torch does not report it; larger than any GPU's to date."""


@dataclass(frozen=True)
class TorchBackend:
    """The first CUDA GPU if there is one, else the CPU.

    On a CPU a time is that of one call, on one thread. On a GPU it lies between CUDA events around
    a sample's calls, which are queued: the kernel's time, or the host's launch rate where that is
    slower (`call_overhead_us` on the card is this floor). Cold calls have events of their own.
    """

    accelerator: str | None
    """Name of the GPU as its driver gives it; None for a CPU."""
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) on a CPU."""
    meter: Meter
    """Meter of the disturbance by other processes."""
    packages = ("torch", "numpy", "perfmodel")

    @property
    def software(self) -> str:
        torch = torch_module()
        toolkit = f"cuda{torch.version.cuda}" if torch.version.cuda else f"rocm{torch.version.hip}"
        return (
            f"torch{torch.__version__.partition('+')[0]}-{toolkit if self.accelerator else 'cpu'}"
        )

    @property
    def method(self) -> Row:
        if self.accelerator:
            return {"calls": "queued, between CUDA events"}
        return {"calls": "each in turn", "threads": 1}

    def check(self, op: KernelOp, *, cold: bool = False) -> None:
        check_torch_kernel(op)
        check_capability(op, self.capability, self.accelerator)

    def variant(self, op: KernelOp) -> str:
        return ""

    def sampler(self, op: KernelOp, *, cold: bool = False) -> SampleCalls:
        # A process-wide switch: right for this op until the next one is built.
        torch = torch_module()
        torch.backends.cuda.matmul.allow_tf32 = op.dtype == "tf32"
        torch.backends.cudnn.allow_tf32 = False
        timed = torch_program(op, "cuda" if self.accelerator else "cpu")
        return self._sampler(timed, cold=cold)

    def overhead_sampler(self) -> SampleCalls:
        torch = torch_module()
        scalar = torch.zeros((), device="cuda" if self.accelerator else "cpu")
        return self._sampler(Program(scalar.add, (1,)))

    def _sampler(self, timed: Program, *, cold: bool = False) -> SampleCalls:
        """Calls timed by events on a GPU, by the host's clock on a CPU, where calls return when
        they are done."""
        if self.accelerator:
            return event_sampler(timed, self._flush if cold else None)
        if cold:
            return cold_sampler(timed, self.meter, lambda _: None, self._flush)
        return queued_sampler(timed, self.meter, lambda _: None, every_call=False)

    @cached_property
    def _flush(self) -> Callable[[], Any]:
        """Fills the cache with other data, before a cold call."""
        # The buffer must fill the GPU's L2; filling it with zeros writes all of it.
        if not self.accelerator:
            return host_flush()
        torch = torch_module()
        l2_bytes = getattr(torch.cuda.get_device_properties(0), "L2_cache_size", L2_BYTES)
        return torch.empty(FLUSH_FACTOR * l2_bytes, dtype=torch.int8, device="cuda").zero_


def event_sampler(timed: Program, flush: Callable[[], Any] | None) -> SampleCalls:
    """Time calls with CUDA events: all together or, with `flush`, each after a cache flush."""
    torch = torch_module()
    call = Calls(timed)

    # Two events around queued calls, whose times are known once the device has come to them.
    def between(calls: int) -> tuple[Any, Any]:
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            call()
        end.record()
        return start, end

    def sample(calls: int) -> Sample:
        # A flush is queued on the same stream, so that it is done before the first event.
        if flush is None:
            spans = [between(calls)]
        else:
            spans = []
            for _ in range(calls):
                flush()
                spans.append(between(1))
        torch.cuda.synchronize()
        elapsed_ms = sum(start.elapsed_time(end) for start, end in spans)
        return Sample(calls, elapsed_ms * 1e-3, 0.0)

    return sample


@contextmanager
def torch_backend() -> Iterator[TorchBackend]:
    """torch on one thread; products in the element type that rows name."""
    torch = torch_module()
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        capability = torch.cuda.get_device_capability(0)
        yield TorchBackend(name, capability, NoMeter())
        return
    # On a CPU a kernel is measured on one thread, whatever the caller has set for itself.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield TorchBackend(None, (0, 0), host_meter())
    finally:
        torch.set_num_threads(threads)
