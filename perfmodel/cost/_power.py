"""What a power limit leaves of a matrix product's speed once it runs for longer than a moment.

Tables time a kernel by itself, on a cool device and at its highest clock. Under load the clock falls until the power
fits the limit. Voltage falls with it, and energy per operation in proportion (on B200 with the 0.85th power of the
clock, from 1.18 to 1.66 GHz), so that dynamic power goes with the square of the rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final

import numpy as np
from jaxtyping import Float64

from perfmodel.ops import Attention, Convolution, Gemm, MoE, Op
from perfmodel.spec import Device


@dataclass(frozen=True)
class DieEnergy:
    """What arithmetic and traffic of a die cost at its power limit."""

    flop_j: float
    """Energy of a 16-bit FLOP in tensor units, random operands, at `unit_flops_per_s`."""
    unit_flops_per_s: float
    """16-bit rate of one multiprocessor at which `flop_j` was measured."""
    byte_j: float
    """Energy of a byte of memory traffic."""

    @property
    def steepness(self) -> float:
        """Energy per FLOP over the rate: what dynamic power is the square of the rate times."""
        return self.flop_j / self.unit_flops_per_s


_GA100: Final = DieEnergy(1.26e-12, 257e12 / 108, 118e-12)
"""A100 at 400 W: products of 8192 hold 257 TFLOP/s on random operands and 295 on zeros (thonking.ai, strangely matrix
multiplications, 2024). Energy per byte: power over bandwidth in the fp64 ladders of te42kyfo/gpu-benches."""
_GH100: Final = DieEnergy(0.78e-12, 600e12 / 132, 122e-12)
"""H200 NVL at 600 W: a layer's products, 19.2 TFLOP, take 32.0 ms 100 times in a row on random operands (Transformer
Engine 2, docs/examples/gemm_profiling). Energy per byte: as for GA100, on H200."""
_GB100: Final = DieEnergy(0.605e-12, 1200e12 / 148, 103e-12)
"""B200 at 1,000 W, geometric mean of two sources, whose own are 0.54 pJ at 1,300 TFLOP/s and 0.65 pJ at 1,080: the
median of six large products in steady 10 s loops (arjunds/efficient-ai, GPU_power/microbench), and of 178 products of
1.5 ms and longer (SimuMax 1.2, configs/system/b200_bf16_ceperm.json, the limit taken to be nominal). Energy per byte:
streams that the limit holds back (efficient-ai)."""
_OF_DIE: Final = {"GA100": _GA100, "GH100": _GH100, "GB100": _GB100}
_WIDTH: Final = {"tf32": 2.0, "bf16": 1.0, "fp16": 1.0, "fp8": 0.525, "int8": 0.525, "fp4": 4.5 / 16}
"""Energy of a FLOP relative to a 16-bit one. Of 8 bits: a layer's products take 16.8 ms on H200 NVL, those of 16 bits
32.0 (Transformer Engine 2, docs/examples/gemm_profiling). Of others assumed to go with the bits of the operands, of
which 4-bit floats share a scale of 8 bits among 16 (NVFP4)."""
TENSOR_TYPES: Final = tuple(_WIDTH)
"""Element types of tensor units, whose products a power limit holds back."""


def has_power_law(device: Device) -> bool:
    """Whether a device's power, and what arithmetic costs on its die, are known."""
    return device.die in _OF_DIE and device.power_w is not None and device.idle_power_w is not None


def sustained_seconds(device: Device, op: Op) -> float:
    """Least time of an op in which its energy fits the power limit; 0 where that is not known, or does not bind.

    Of t in (P_limit - P_idle) t = E_memory + E_compute t_ref / t, where t_ref is the time at the rate at which the
    energy per FLOP was measured: dynamic power of arithmetic falls with the square of the rate (Horowitz, ISSCC 2014,
    section 1: energy with the square of the voltage; `perfmodel.cost._power`), memory's with the rate.
    """
    energy = _OF_DIE.get(device.die)
    if energy is None or device.power_w is None or device.idle_power_w is None:  # `has_power_law`, for the type checker
        return 0.0
    if not isinstance(op, (Attention, Convolution, Gemm, MoE)) or op.dtype not in _WIDTH:
        return 0.0
    budget_w = device.power_w - device.idle_power_w
    if budget_w <= 0:
        return 0.0
    memory_j, flops = energy.byte_j * op.bytes, op.flops * _WIDTH[op.dtype]
    compute_j_s = energy.steepness / device.compute_units * flops**2
    return (memory_j + sqrt(memory_j**2 + 4.0 * budget_w * compute_j_s)) / (2.0 * budget_w)


def under_load(device: Device, ops: Sequence[Op], alone_s: Float64[np.ndarray, "n"]) -> Float64[np.ndarray, "n"]:
    """Times of events one after another, relative to their times alone: 1 where the power limit does not bind."""
    least_s = np.array([sustained_seconds(device, op) for op in ops])
    return np.maximum(least_s / np.maximum(alone_s, 1e-300), 1.0)
