"""JAX on a CPU, GPU or TPU."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from perfmodel.errors import PerfModelError
from perfmodel.measure.backends._programs import (
    check_capability,
    check_jax_kernel,
    cold_sampler,
    host_flush,
    jax_program,
    queued_sampler,
)
from perfmodel.measure.tables import Row
from perfmodel.measure.timing import Meter, NoMeter, Sample, SampleCalls, host_meter
from perfmodel.ops import Attention, KernelOp
from perfmodel.ops.programs import Program


@dataclass(frozen=True)
class JaxBackend:
    """The default JAX device.

    A time is that of one call of the jitted op with its inputs in memory and the output allocated
    anew, dispatch included. On a CPU it waits for each call. On an accelerator it queues the calls
    of a sample and waits once, so that the time is the kernel's, or the host's launch rate where
    that is slower: `call_overhead_us` on the card is this floor.
    """

    platform: str
    """JAX's name of the platform: cpu, gpu or tpu."""
    accelerator: str | None
    """Name of the accelerator as its driver gives it; None for a CPU."""
    capability: tuple[int, int]
    """CUDA compute capability; (0, 0) elsewhere."""
    meter: Meter
    """Meter of the disturbance by other processes."""
    packages = ("jax", "jaxlib", "numpy", "perfmodel")

    @property
    def software(self) -> str:
        import jax

        return f"jax{jax.__version__}-{self.platform}"

    @property
    def method(self) -> Row:
        if self.accelerator:
            return {
                "calls": "queued, waited for once per sample",
                "fp32_products": "not rounded to tf32 or bf16",
            }
        return {"calls": "each waited for", "threads": 1}

    def check(self, op: KernelOp, *, cold: bool = False) -> None:
        check_jax_kernel(op)
        check_capability(op, self.capability, self.accelerator)
        if cold and self.accelerator:
            raise PerfModelError(
                "JAX cannot separate a single call on an accelerator from its launch; use --backend torch for "
                'cache = "cold"'
            )

    def variant(self, op: KernelOp) -> str:
        return "unfused" if isinstance(op, Attention) else ""

    def sampler(self, op: KernelOp, *, cold: bool = False) -> SampleCalls:
        import jax

        # Cold calls are waited for one by one; only CPUs get here with them (`check`).
        if cold:
            return cold_sampler(jax_program(op), self.meter, jax.block_until_ready, self._flush)
        sample = self._queued(jax_program(op))
        return unrounded(sample) if self.accelerator and op.dtype == "fp32" else sample

    def overhead_sampler(self) -> SampleCalls:
        import jax
        import jax.numpy as jnp

        return self._queued(Program(jax.jit(lambda x: x + 1), (jnp.zeros(()),)))

    def _queued(self, timed: Program) -> SampleCalls:
        """Calls in a row, on a CPU each waited for."""
        import jax

        return queued_sampler(
            timed, self.meter, jax.block_until_ready, every_call=not self.accelerator
        )

    @cached_property
    def _flush(self) -> Any:
        return host_flush()


@contextmanager
def jax_backend() -> Iterator[JaxBackend]:
    """Open JAX on its default device."""
    import jax

    # AMD names an architecture instead of a capability.
    device = jax.devices()[0]
    stated = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    capability = (int(stated[1]), int(stated[2])) if stated else (0, 0)
    accelerator = None if device.platform == "cpu" else device.device_kind
    meter = NoMeter() if accelerator else host_meter()
    yield JaxBackend(device.platform, accelerator, capability, meter)


def unrounded(sample: SampleCalls) -> SampleCalls:
    """Keep fp32 products in fp32, which accelerators otherwise round to tf32 or bf16."""
    import jax

    # The precision counts when the program is traced, in its first call.
    def sample_unrounded(calls: int) -> Sample:
        with jax.default_matmul_precision("highest"):
            return sample(calls)

    return sample_unrounded
