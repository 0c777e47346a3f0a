"""What the step time is a function of, with its values as they are and the range in which they may move."""

from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._problem import StepProblem
from perfmodel.spec import Device

FACTOR = 4.0
"""Rates, latencies, host times and corrections may move by this factor either way."""
_NARROW = {"bf16": "fp8", "fp16": "fp8"}


class StepParameters(NamedTuple):
    """Parameters of a step, a pytree of real numbers: `jax.grad` gives another of the same shape.

    SI units throughout. Where a layout cannot vary one, its bounds are equal.
    """

    compute_flops_per_s: dict[str, Float[Any, ""]]
    """Dense peak rate of the device by element type (`PeakRates`) [FLOP/s]."""
    memory_bytes_per_s: Float[Any, ""]
    """Memory bandwidth of the device [bytes/s]."""
    link_bytes_per_s: Float[Any, " levels"]
    """One-way bandwidth per device of every network level, innermost first [bytes/s]."""
    link_latency_s: Float[Any, " levels"]
    """Latency of every network level [s]."""
    host_op_s: Float[Any, ""]
    """Host time to issue an operator (`Framework.host_op_s`) [s]."""
    kernel_gap_s: Float[Any, ""]
    """Idle time after a kernel (`Framework.kernel_gap_s`) [s]."""
    kernel_factor: dict[str, Float[Any, ""]]
    """By op family, the time of its kernels relative to what the cost models say."""
    layers: Float[Any, " stages"]
    """Layers of every pipeline stage, in model order; should add up to the model's."""
    micro_batch: Float[Any, ""]
    """Sequences per micro-batch; the global batch stays."""
    recompute: Float[Any, " stages"]
    """Share of every stage's layers that recompute all of their forward, the first ones; the others do as the layout
    says (`selective` where it says `full`)."""
    offload: Float[Any, ""]
    """Share of saved activations that wait in host memory, where the layout offloads them."""
    fp8: Float[Any, ""]
    """Share of the layers whose products are in 8 bits rather than in 16."""


class Bounds(NamedTuple):
    """Least and greatest values; of an optimiser that projects: `optax.projections.projection_box(x, *bounds)`."""

    low: StepParameters
    high: StepParameters


def machine_rates(device: Device) -> dict[str, float]:
    """Peak rates that a device has, by element type in the order in which JAX flattens a dict."""
    return {name: rate for name, rate in sorted(vars(device.peak).items()) if rate is not None}


def narrower(problem: StepProblem) -> str | None:
    """The 8-bit element type that the products of a 16-bit job could have on its device."""
    found = _NARROW.get(problem.job.dtype)
    return found if found in problem.cluster.device.dtypes else None


def nominal_machine(problem: StepProblem) -> dict[str, Any]:
    """Fields of `StepParameters` that tell of the machine and the host, as they are."""
    device, levels, framework = problem.cluster.device, problem.cluster.levels, problem.framework
    return {
        "compute_flops_per_s": {name: np.float64(rate) for name, rate in machine_rates(device).items()},
        "memory_bytes_per_s": np.float64(device.memory_bandwidth_bytes_per_s),
        "link_bytes_per_s": np.array([level.bandwidth_bytes_per_s for level in levels]),
        "link_latency_s": np.array([level.latency_s for level in levels]),
        "host_op_s": np.float64(framework.host_op_s),
        "kernel_gap_s": np.float64(framework.kernel_gap_s),
    }
