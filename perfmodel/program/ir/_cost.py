"""Arithmetic, traffic and communication of a program, device by device."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.ops import Collective
from perfmodel.program.ir._function import Function, instruction_devices
from perfmodel.program.ir._types import Tensor
from perfmodel.program.ir.ops import OPS


@dataclass(frozen=True, eq=False)
class Work:
    """What each device does in one execution."""

    flops: Float[np.ndarray, " devices"]
    traffic_bytes: Float[np.ndarray, " devices"]
    """Read and written by kernels."""
    communicated_bytes: Float[np.ndarray, " devices"]
    """Sizes of the collectives that the device takes part in, counted as `spec.Collective` does."""


def work(function: Function) -> Work:
    """Sums over a function's instructions; each distinct one is looked at once."""
    types = function.types
    total = np.zeros((3, function.n_devices))
    known: dict[tuple[object, ...], tuple[float, float, float]] = {}
    for instruction, group in zip(function.instructions, instruction_devices(function), strict=True):
        inputs = tuple([types[name] for name in instruction.inputs])
        outputs = tuple([types[name] for name in instruction.outputs])
        key = (instruction.op, instruction.attributes, inputs, outputs)
        if key not in known:
            known[key] = _of_one(instruction.op, inputs, outputs, dict(instruction.attributes))
        for device in group:
            total[:, device] += known[key]
    return Work(*total)


def _of_one(
    op: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], attributes: dict[str, object]
) -> tuple[float, float, float]:
    flops = traffic = moved = 0.0
    for event in OPS[op].work(inputs, outputs, attributes):
        if isinstance(event, Collective):
            moved += event.bytes
        else:
            flops += event.flops
            traffic += event.bytes
    return flops, traffic, moved
