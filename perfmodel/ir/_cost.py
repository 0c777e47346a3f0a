"""Cost of a program per device: arithmetic, traffic, communication and live memory."""

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import PerfModelError
from perfmodel.ir._function import Function, instruction_devices
from perfmodel.ir._instruction import Tensor
from perfmodel.ir.ops import OPS
from perfmodel.ops import Collective


class _InstructionCost(NamedTuple):
    """Work of one instruction."""

    flops: float
    kernel_bytes: float
    collective_bytes: float


@dataclass(frozen=True, eq=False)
class Work:
    """Work of each device in one execution."""

    flops: Float[np.ndarray, " devices"]
    traffic_bytes: Float[np.ndarray, " devices"]
    """Bytes read and written by kernels."""
    communicated_bytes: Float[np.ndarray, " devices"]
    """Sizes of the collectives that the device takes part in, counted as `spec.Collective` does."""


def work(function: Function) -> Work:
    """Sum computation, traffic and communication of each device over a function's instructions."""
    # Layers and micro-batches repeat the same instruction, so each distinct one is asked for its
    # work once.
    types = function.types
    total = np.zeros((3, function.n_devices))
    known: dict[tuple[object, ...], _InstructionCost] = {}
    for instruction, group in zip(
        function.instructions, instruction_devices(function), strict=True
    ):
        inputs = tuple([types[name] for name in instruction.inputs])
        outputs = tuple([types[name] for name in instruction.outputs])
        key = (instruction.op, instruction.attributes, inputs, outputs)
        if key not in known:
            known[key] = _cost_of_instruction(
                instruction.op, inputs, outputs, dict(instruction.attributes)
            )
        # Every member of a collective takes part in the whole of it, so all of them are charged its
        # bytes.
        for device in group:
            total[:, device] += known[key]
    return Work(*total)


def _cost_of_instruction(
    op: str, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...], attributes: dict[str, object]
) -> _InstructionCost:
    """Add up the work of one instruction's kernels and collectives."""
    flops = traffic = moved_bytes = 0.0
    for event in OPS[op].work(inputs, outputs, attributes):
        if isinstance(event, Collective):
            moved_bytes += event.bytes
        else:
            flops += event.flops
            traffic += event.bytes
    return _InstructionCost(flops, traffic, moved_bytes)


@dataclass(frozen=True, eq=False)
class LiveMemory:
    """Bytes in use on every device while each instruction runs."""

    peak_bytes: Float[np.ndarray, " devices"]
    _instruction: Int[np.ndarray, " changes"]
    _device: Int[np.ndarray, " changes"]
    _in_use_bytes: Float[np.ndarray, " changes"]

    def profile(self, device: int) -> tuple[Int[np.ndarray, " steps"], Float[np.ndarray, " steps"]]:
        """Instructions at which a device's memory changes, and the bytes from there on.

        Raises:
            PerfModelError: there is no such device.
        """
        if not 0 <= device < len(self.peak_bytes):
            raise PerfModelError(
                f"device {device} does not exist; the program has {len(self.peak_bytes)} devices"
            )
        on_device = self._device == device
        return self._instruction[on_device], self._in_use_bytes[on_device]


def live_memory(function: Function) -> LiveMemory:
    """Live memory of a function (DistIR, section 3.3); parameters are live from the start.

    Returned values stay to the end. What an instruction frees, it frees when it has ended: its
    operands and results are in use together.
    """
    # Every value lives from the instruction that makes it to the last that uses it.
    types = function.types
    number = {name: k for k, name in enumerate(types)}
    n = len(types)
    end = len(function.instructions)
    size = np.fromiter((tensor.n_bytes for tensor in types.values()), float, n)
    device = np.fromiter((tensor.device for tensor in types.values()), np.int64, n)
    born = np.zeros(n, np.int64)
    last = np.zeros(n, np.int64)
    for index, instruction in enumerate(function.instructions):
        for name in instruction.outputs:
            born[number[name]] = last[number[name]] = index
        for name in instruction.inputs:
            last[number[name]] = index
    # Returned values are never freed.
    last[[number[name] for name in function.outputs]] = end
    # Half steps: what begins at an instruction counts while it runs, what ends there is gone after
    # it.
    freed = last < end
    half_step = np.concatenate([2 * born, 2 * last[freed] + 1])
    change = np.concatenate([size, -size[freed]])
    on_device = np.concatenate([device, device[freed]])
    # Changes of all devices in one array, device after device: their running sum is the memory in
    # use.
    order = np.lexsort((half_step, on_device))
    half_step, change, on_device = half_step[order], change[order], on_device[order]
    running = np.cumsum(change)
    # The running sum goes on from one device to the next; what the devices before ended with is
    # taken off again.
    start = np.searchsorted(on_device, np.arange(function.n_devices + 1))
    before = np.append(0.0, running)[start[:-1]]
    in_use = running - before[on_device]
    peak = np.zeros(function.n_devices)
    for d, (first, stop) in enumerate(pairwise(start.tolist())):
        if stop > first:
            peak[d] = in_use[first:stop].max()
    # Back to whole instructions: what is freed after instruction i (half step 2i + 1) is gone from
    # i + 1 on.
    step = (half_step + 1) // 2
    # If there are several changes before an instruction, only the last one is a state.
    state = np.append((step[1:] != step[:-1]) | (on_device[1:] != on_device[:-1]), True)
    return LiveMemory(peak, step[state], on_device[state], in_use[state])
