"""Ops as timed programs, with samplers by the host's clock for warm and cold caches.

Ops of a whole plan are checked before anything runs.
"""

from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Final

import numpy as np

from perfmodel import catalog
from perfmodel.errors import PerfModelError, UnknownNameError
from perfmodel.measure.timing import Meter, Sample, SampleCalls
from perfmodel.ops import FAMILIES, Gemm, KernelOp
from perfmodel.ops.programs import JAX_DTYPES, Program, Tensors

MEASURED_FAMILIES: Final[dict[str, type[KernelOp]]] = {
    name: family.op for name, family in FAMILIES.items() if family.measurement is not None
}
"""Families that can be timed, with the class of their ops."""
_CAPABILITIES: Final = {"fp8": (8, 9), "tf32": (8, 0)}
"""Least CUDA compute capability whose matrix units support an element type (fp8: Ada, Hopper)."""


def check_kernel(op: KernelOp, dtypes: Collection[str] = tuple(JAX_DTYPES)) -> None:
    """Raise `PerfModelError` unless backends have a program for the op, on any device."""
    measurement = FAMILIES[op.family].timed()
    if op.dtype not in dtypes:
        raise UnknownNameError("dtype to measure", op.dtype, dtypes)
    if op.pass_ not in measurement.passes:
        raise UnknownNameError(f"pass of {op.op}", op.pass_, measurement.passes)
    measurement.check(op)


FP8_MULTIPLE: Final = 16
"""k and n of an fp8 product must be multiples of this (cuBLASLt)."""


def check_jax_kernel(op: KernelOp) -> None:
    """Raise `PerfModelError` unless JAX can time the op on some device."""
    check_kernel(op, jax_dtypes(op))


def check_torch_kernel(op: KernelOp) -> None:
    """Raise `PerfModelError` unless torch can time the op on some device."""
    check_kernel(op, torch_dtypes(op))
    if isinstance(op, Gemm) and op.dtype == "fp8" and (op.n % FP8_MULTIPLE or op.k % FP8_MULTIPLE):
        raise PerfModelError(
            f"fp8 products need n and k to be multiples of {FP8_MULTIPLE}; got {op}"
        )


def check_capability(op: KernelOp, capability: tuple[int, int], accelerator: str | None) -> None:
    """Raise `PerfModelError` unless a device of this CUDA compute capability (0.0 for others) has
    the op's units."""
    # CPUs and other vendors' devices have capability 0.0, and so none of these units.
    needed = _CAPABILITIES.get(op.dtype, (0, 0))
    if capability < needed:
        raise PerfModelError(
            f"{op.dtype} products need an NVIDIA GPU of compute capability {needed[0]}.{needed[1]} or newer, but "
            f"this is {accelerator or 'a CPU'}; remove them from the plan"
        )


def jax_dtypes(op: KernelOp) -> tuple[str, ...]:
    """Element types in which JAX can time the op's family."""
    return (*FAMILIES[op.family].timed().jax_dtypes, *JAX_DTYPES)


def torch_dtypes(op: KernelOp) -> tuple[str, ...]:
    """Element types in which torch can time the op's family."""
    return (*FAMILIES[op.family].timed().torch_dtypes, *JAX_DTYPES)


def jax_program(op: KernelOp) -> Program:
    """The op as a jitted function and its inputs on the default device; fp8 gives bf16.

    Raises:
        PerfModelError: for a family, pass, element type or kernel without a program.
    """
    check_kernel(op, jax_dtypes(op))
    return FAMILIES[op.family].timed().jax_program(op, np.random.default_rng(0))


def torch_program(op: KernelOp, device: str) -> Program:
    """The op as a function of tensors on `device`; the op must have passed the backend's check."""
    return (
        FAMILIES[op.family]
        .timed()
        .torch_program(op, Tensors(np.random.default_rng(0), device, op.dtype))
    )


def queued_sampler(
    timed: Program, meter: Meter, wait: Callable[[Any], Any], *, every_call: bool
) -> SampleCalls:
    """Sampler that queues calls. With `every_call` it waits for each, since CPUs may run several at
    once."""
    call = Calls(timed)

    # Calls that are queued run in order, so that waiting for the last one is waiting for all.
    def sample(calls: int) -> Sample:
        output: Any = None
        before = meter.read()
        for _ in range(calls):
            output = call()
            if every_call:
                wait(output)
        wait(output)
        after = meter.read()
        return Sample(calls, after.wall_s - before.wall_s, meter.interference(before, after))

    return sample


def cold_sampler(
    timed: Program, meter: Meter, wait: Callable[[Any], Any], flush: Callable[[], None]
) -> SampleCalls:
    """Sampler of single calls after cache flushes, which are not timed.

    Interference is that of flushes and calls together, which others disturb alike.
    """
    call = Calls(timed)

    # The meter is read around each call, and once over all of them for interference, whose counters
    # are coarse.
    def sample(calls: int) -> Sample:
        wall_s = 0.0
        first = last = meter.read()
        for _ in range(calls):
            flush()
            before = meter.read()
            wait(call())
            last = meter.read()
            wall_s += last.wall_s - before.wall_s
        return Sample(calls, wall_s, meter.interference(first, last))

    return sample


class Calls:
    """Calls a program repeatedly, feeding results back as arguments."""

    def __init__(self, timed: Program) -> None:
        self._timed = timed
        self._arguments = timed.arguments

    def __call__(self) -> Any:
        timed = self._timed
        output = timed.function(*self._arguments)

        # Such as a cache of keys: a call's output takes the place of its first arguments in the
        # next.
        if timed.carried:
            self._arguments = (*output[: timed.carried], *self._arguments[timed.carried :])
        return output


FLUSH_FACTOR: Final = 2
"""Size of the buffer that is read to flush caches, in last-level caches; above 1 because
replacement is not strictly least-recently-used."""


def host_flush() -> partial[Any]:
    """Return a function that fills the CPU's caches with a buffer."""
    # Written in place, so that no page is allocated anew. An element has 8 bytes.
    buffer = np.zeros(FLUSH_FACTOR * int(catalog.device("cpu").l2_bytes) // 8)
    return partial(np.add, buffer, 1.0, out=buffer)
