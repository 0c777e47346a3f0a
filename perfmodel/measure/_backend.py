"""Backends: whose kernels and collectives are measured."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final, Protocol

from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.measure._harness import SampleCalls
from perfmodel.measure._meter import Meter, pinned_to_one_core
from perfmodel.measure._rows import Row
from perfmodel.ops import KernelOp

BACKENDS: Final = ("jax", "torch", "nccl-tests")
"""`nccl-tests` measures collectives only, by its own programs."""


class Backend(Protocol):
    """What measuring needs of a framework on one device."""

    @property
    def accelerator(self) -> str | None:
        """The accelerator's name as its driver gives it; `None` for a CPU."""
        ...

    @property
    def software(self) -> str:
        """`software` column: framework, version and platform."""
        ...

    @property
    def packages(self) -> tuple[str, ...]:
        """Python packages whose versions belong on the card."""
        ...

    @property
    def method(self) -> Row:
        """What the card says about how calls are timed."""
        ...

    @property
    def meter(self) -> Meter:
        """Tells how much others disturbed."""
        ...

    def check(self, op: KernelOp, *, cold: bool = False) -> None:
        """Raise `PerfModelError` unless the op can be measured on this device."""
        ...

    def variant(self, op: KernelOp) -> str:
        """`variant` column where the framework computes the op otherwise than its family assumes."""
        ...

    def sampler(self, op: KernelOp, *, cold: bool = False) -> SampleCalls:
        """The op built with its inputs on the device: runs calls, waits for them, says what they took.

        With `cold`, the caches are flushed before every call, outside the time that counts.
        """
        ...

    def overhead_sampler(self) -> SampleCalls:
        """The same for a call that does next to nothing: what every time contains."""
        ...


def require(name: str) -> None:
    """Raise `PerfModelError` unless the backend measures in this process and is installed."""
    if name not in BACKENDS[:2]:
        raise UnknownNameError("backend", name, BACKENDS)
    if find_spec(name) is None:
        raise PerfModelError(f"backend {name} needs {name}; install it: pip install 'perfmodel[{name}]'")


@contextmanager
def open_backend(name: str) -> Iterator[Backend]:
    """The backend on this machine's device, ready to measure kernels.

    On a CPU this process keeps to one core with one thread meanwhile; frameworks size their thread
    pools when they first run something, so open this before.

    Raises:
        PerfModelError: for an unknown backend, or one that is not installed.
    """
    require(name)
    with pinned_to_one_core() as unpin:
        if name == "torch":
            from perfmodel.measure._torch_backend import torch_backend

            opened = torch_backend()
        else:
            from perfmodel.measure._jax_backend import jax_backend

            opened = jax_backend()
        with opened as backend:
            if backend.accelerator:
                unpin()  # compilers and the launching thread may use every core
            yield backend
