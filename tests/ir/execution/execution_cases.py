"""Programs in text form, and a slow simulator to hold the fast one against."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from perfmodel.ir import OPS, Function, instruction_devices, parse_function
from perfmodel.ops import Collective, Op

PROGRAMS = Path(__file__).parent / "programs"


def listing(name: str) -> Function:
    """A program of DistIR's figures."""
    return parse_function((PROGRAMS / f"{name}.ir").read_text())


def unit_timer(ops: Sequence[Op]) -> np.ndarray:
    """Kernels take 1 s, collectives half of that."""
    return np.array([0.5 if isinstance(op, Collective) else 1.0 for op in ops])


def event_loop(
    function: Function, timer: Callable[[Sequence[Op]], np.ndarray]
) -> dict[tuple[int, int], float]:
    """End of each (instruction, device), from a walk through the program line by line with a clock
    per stream."""
    clock: dict[tuple[int, str], float] = defaultdict(float)
    ready: dict[str, float] = defaultdict(float)
    ends: dict[tuple[int, int], float] = {}
    types = function.types
    for index, (instruction, group) in enumerate(
        zip(function.instructions, instruction_devices(function), strict=True)
    ):
        inputs = tuple(types[n] for n in instruction.inputs)
        outputs = tuple(types[n] for n in instruction.outputs)
        work = OPS[instruction.op].work(inputs, outputs, dict(instruction.attributes))
        stream = instruction.tag.stream
        start = max(
            [clock[device, stream] for device in group]
            + [ready[name] for name in instruction.inputs]
        )
        end = start + float(sum(timer(work))) if work else start
        for device in group:
            clock[device, stream] = ends[index, device] = end
        ready.update(dict.fromkeys(instruction.outputs, end))
    return ends
