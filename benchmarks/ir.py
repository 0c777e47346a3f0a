"""Simulating distributed programs: speed against a line-by-line interpreter of cost, growth, and
memory.

As a script it prints the entry of a million instructions alone.
"""

import json
import resource
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from timing import best_s

from perfmodel.ir import OPS, Function, instruction_devices
from perfmodel.ir.distribute import Degrees, distribute
from perfmodel.ir.execution import durations, program_structure
from perfmodel.ir.models import (
    GPT2_175B,
    TransformerSize,
    mlp,
    training_step,
    transformer_inference,
)
from perfmodel.ops import Collective, Op
from perfmodel.timeline import compile_structure, makespan

SIZES = (8, 32, 128)
"""Micro-batches of the programs that show growth."""
MILLION = Degrees(data=2, tensor=8, pipeline=16, micro_batches=56)
MEMORY_LIMIT_BYTES = 2e9


def timer(ops: Sequence[Op]) -> np.ndarray:
    """A nominal accelerator: 100 TFLOP/s, 1 TB/s, 100 GB/s between devices."""
    return np.array(
        [
            op.bytes / 1e11 if isinstance(op, Collective) else op.flops / 1e14 + op.bytes / 1e12
            for op in ops
        ]
    )


def interpret(function: Function) -> float:
    """Makespan by walking the program line by line, costs looked up by op and operand types."""
    types = function.types
    clock: dict[tuple[int, str], float] = defaultdict(float)
    ready: dict[str, float] = defaultdict(float)
    costs: dict[tuple[object, ...], float] = {}
    for instruction, group in zip(
        function.instructions, instruction_devices(function), strict=True
    ):
        inputs = tuple([types[name] for name in instruction.inputs])
        # What an interpreter would cache: programs repeat layers.
        key = (instruction.op, instruction.attributes, inputs)
        if key not in costs:
            outputs = tuple(types[name] for name in instruction.outputs)
            work = OPS[instruction.op].work(inputs, outputs, dict(instruction.attributes))
            costs[key] = float(timer(work).sum())
        # Streams of a device run beside each other; operands must be there.
        stream = instruction.tag.stream
        start = max(
            [clock[d, stream] for d in group] + [ready[name] for name in instruction.inputs]
        )
        end = start + costs[key]
        for device in group:
            clock[device, stream] = end
        for name in instruction.outputs:
            ready[name] = end
    return max(clock.values())


def speed_and_growth() -> dict[str, dict[str, object]]:
    """Makespan of a cached structure against the interpreter, and time per instruction as programs
    grow."""
    model = training_step(mlp(2048, (256,) * 17))
    results: dict[str, dict[str, object]] = {}
    build_ns, evaluate_ns = [], []
    for count in SIZES:
        function = distribute(
            model, Degrees(data=2, tensor=2, pipeline=4, micro_batches=count)
        ).function
        n = len(function.instructions)
        # Types are found once, and are no part of building.
        _ = function.types
        build_ns.append(1e9 * best_s(lambda f=function: program_structure(f), 2) / n)
        program = program_structure(function)
        seconds = durations(program.events, timer)
        compiled = compile_structure(program.structure)
        value = float(makespan(compiled, seconds))
        # A fast simulation that says something else is worth nothing.
        if abs(value / interpret(function) - 1) > 1e-5:
            raise SystemExit("simulation and interpreter disagree")
        evaluate_ns.append(
            1e9 * best_s(lambda c=compiled, s=seconds: np.asarray(makespan(c, s)), 5) / n
        )
        interpret_ns = 1e9 * best_s(lambda f=function: interpret(f), 2) / n
    results["ir/speed"] = {
        "ratio": interpret_ns / evaluate_ns[-1],
        "baseline": "line-by-line Python interpreter",
        "unit": "x faster",
        "target": ">= 100",
        "ns_per_instruction": evaluate_ns[-1],
        "instructions": n,
    }
    results["ir/growth"] = {
        "ratio": evaluate_ns[-1] / evaluate_ns[0],
        "baseline": f"{SIZES[0]} micro-batches",
        "target": "<= 1.5",
        "unit": f"x time per instruction at {SIZES[-1]}",
        "structure_ns_per_instruction": build_ns,
    }
    return results


def million() -> dict[str, dict[str, object]]:
    """GPT-2 175B, data, tensor and pipeline parallel, a million instructions: time and peak
    memory."""
    start = time.perf_counter()
    size: TransformerSize = GPT2_175B
    spread = distribute(transformer_inference(size, 2 * MILLION.micro_batches, "fp16"), MILLION)
    # The count proves that it is a million.
    n = len(spread.function.instructions)
    program = program_structure(spread.function)
    made = time.perf_counter() - start
    seconds = durations(program.events, timer)
    span_s = float(makespan(compile_structure(program.structure), seconds))
    # getrusage(2) counts kilobytes on Linux, bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes
    return {
        "ir/million": {
            "ratio": peak_bytes / MEMORY_LIMIT_BYTES,
            "baseline": "2 GB",
            "unit": "x peak memory of the process",
            "target": "<= 1",
            "instructions": n,
            "seconds_to_structure": made,
            "makespan_s": span_s,
        }
    }


def run() -> dict[str, dict[str, object]]:
    """All ratios; the million in a process of its own, whose peak memory is its own."""
    done = subprocess.run([sys.executable, __file__], capture_output=True, check=True, text=True)
    return json.loads(done.stdout) | speed_and_growth()


if __name__ == "__main__":
    print(json.dumps(million()))
