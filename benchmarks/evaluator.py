"""The evaluator against a Python event loop and a compiled loop, as ratios within one run.

"Large" is 1F1B with 64 stages, 512 micro-batches and explicit sends: 130,000 ops.
"""

import heapq
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from unittest.mock import patch

import jax
import numba  # pyright: ignore[reportMissingImports]
import numpy as np
from timing import best_s

from perfmodel.program import ProgramSpec, Structure, build
from perfmodel.timeline import (
    CompiledStructure,
    ProgramBatch,
    compile_structure,
    count_traces,
    load_structure,
    makespan,
    makespan_and_grad,
    makespan_lanes,
    makespan_lanes_and_grad,
    makespan_many,
    save_structure,
    times,
)

LARGE = ProgramSpec(stages=64, micro_batches=512, sends="op")
HUGE = ProgramSpec(stages=64, micro_batches=2048, sends="op")
MANY_LANES = 512
LANES_PER_STRUCTURE = 16

Result = dict[str, float | int | str]


def event_loop(structure: Structure) -> Callable[[list[float]], float]:
    """A discrete-event simulation in plain Python; successors are prepared outside the timed
    part."""
    successors: list[list[int]] = [[] for _ in range(structure.n_ops)]
    waits = [0] * structure.n_ops
    for op, preds in enumerate(structure.pred.tolist()):
        for pred in preds:
            if pred >= 0:
                successors[pred].append(op)
                waits[op] += 1
    # A lag would be a second kind of event.
    if structure.lag.any():
        raise ValueError("this simulation has sends as ops, not as lags")
    duration_class = structure.duration.tolist()

    def simulate(durations: list[float]) -> float:
        """Makespan by a queue of events: an op starts when the last that it waits for ends."""
        waiting = waits.copy()
        events = [(durations[duration_class[op]], op) for op, n in enumerate(waiting) if n == 0]
        heapq.heapify(events)
        end = 0.0
        while events:
            end, op = heapq.heappop(events)
            for successor in successors[op]:
                waiting[successor] -= 1
                if not waiting[successor]:
                    heapq.heappush(events, (end + durations[duration_class[successor]], successor))
        return end

    return simulate


@numba.njit
def compiled_loop(duration, pred, lag, durations, end):
    """The recurrence over a full array of end times."""
    # Ops are in an order in which each comes after those that it waits for.
    for op in range(len(duration)):
        start = 0.0
        for side in range(2):
            if pred[op, side] >= 0:
                start = max(start, end[pred[op, side]] + durations[lag[op, side]])
        end[op] = start + durations[duration[op]]
    return end[-1]


def gpt3_programs() -> list[ProgramSpec]:
    """Programs like those of all GPT-3 layouts on 1,024 devices: some 200, of 1.1 million ops."""
    specs = []
    for stages in (1, 2, 4, 8, 16, 32):
        for chunks in (1, 2, 3, 4, 6, 12):
            # GPT-3 has 96 layers; one stage has nothing to interleave.
            if 96 % (stages * chunks) or (stages == 1 and chunks > 1):
                continue
            schedule = "interleaved" if chunks > 1 else "1f1b"
            for per_stage in (1, 2, 3, 4, 6, 8, 12, 16, 24):
                micro_batches = stages * per_stage
                if micro_batches > 384:
                    continue
                specs.append(
                    ProgramSpec(
                        schedule=schedule, stages=stages, chunks=chunks, micro_batches=micro_batches
                    )
                )
    return specs


def durations_of(structure: Structure, seed: int = 0) -> np.ndarray:
    """Random seconds of each class, float32."""
    values = np.random.default_rng(seed).uniform(0.5, 1.5, structure.n_classes)
    # Class 0 is of what takes no time.
    values[0] = 0
    return values.astype(np.float32)


def run() -> dict[str, Result]:
    """Every target of the evaluator; times are the least of several runs on one core."""
    large = build(LARGE)
    compiled = compile_structure(large)
    results = _one_lane(large, compiled)
    loop_s = results["evaluator/one_lane_vs_event_loop"]["baseline_seconds"]
    results |= _many_lanes(compiled, float(loop_s))
    results |= _many_structures()
    results |= _building(large)
    results |= _compilation()
    results |= _reported(compiled)
    return results


def _one_lane(large: Structure, compiled: CompiledStructure) -> dict[str, Result]:
    """Time one set of durations: beside a Python loop, beside a compiled loop, and with its
    gradient."""
    durations = durations_of(large)
    end = np.zeros(large.n_ops)
    simulate = event_loop(large)
    values = durations.tolist()
    loop_s = _best_s(lambda: simulate(values), 5)
    numba_s = _best_s(
        lambda: compiled_loop(large.duration, large.pred, large.lag, durations, end), 30
    )
    value_s = _best_s(lambda: makespan(compiled, durations), 30)
    grad_s = _best_s(lambda: makespan_and_grad(compiled, durations), 30)
    return {
        "evaluator/one_lane_vs_event_loop": _faster(loop_s, value_s, "Python event loop", ">= 120"),
        "evaluator/one_lane_vs_numba": _slower(
            value_s, numba_s, "numba loop over a full array", "<= 3"
        ),
        "evaluator/value_and_grad_vs_value": _slower(grad_s, value_s, "value alone", "<= 2"),
    }


def _many_lanes(compiled: CompiledStructure, loop_s: float) -> dict[str, Result]:
    """Many sets of durations of one structure in a call, seconds of each."""
    rng = np.random.default_rng(1)
    # Sets that differ a little, as those of neighbouring layouts do.
    factors = rng.lognormal(0, 0.01, (MANY_LANES, compiled.structure.n_classes))
    lanes = (durations_of(compiled.structure) * factors).astype(np.float32)
    value_s = _best_s(lambda: makespan_lanes(compiled, lanes), 5) / MANY_LANES
    few_s = _best_s(lambda: makespan_lanes(compiled, lanes[:16]), 5) / 16
    grad_s = _best_s(lambda: makespan_lanes_and_grad(compiled, lanes[:64]), 5) / 64
    return {
        "evaluator/lanes_vs_event_loop": _faster(loop_s, value_s, "Python event loop", ">= 2000"),
        "evaluator/sixteen_lanes_vs_event_loop": _faster(loop_s, few_s, "Python event loop"),
        "evaluator/lanes_and_grad_vs_event_loop": _faster(loop_s, grad_s, "Python event loop"),
    }


def _many_structures() -> dict[str, Result]:
    """The programs of a whole search in a call."""
    specs = gpt3_programs()
    programs = [compile_structure(build(spec)) for spec in specs]
    rng = np.random.default_rng(2)

    def lanes_of(n: int) -> list[np.ndarray]:
        """The given number of sets of durations for every program."""
        return [
            rng.uniform(0.5, 1.5, (n, compiled.structure.n_classes)).astype(np.float32)
            for compiled in programs
        ]

    batch = ProgramBatch(tuple(programs))
    full = lanes_of(LANES_PER_STRUCTURE)
    n_edges = sum(c.structure.n_edges for c in programs)
    full_s = _best_s(lambda: makespan_many(batch, full), 15)
    # Programs of a search have unequally many layouts.
    layouts = [d[: 5 + i % 5] for i, d in enumerate(full)]
    with count_traces() as traces:
        cold_s = _best_s(lambda: makespan_many(ProgramBatch(tuple(programs)), layouts), 5)
        # Searches of other sizes must not compile anew.
        for n in (40, 80, 160):
            makespan_many(programs[:n], layouts[:n])
    warm_s = _best_s(lambda: makespan_many(batch, layouts), 15)
    edge_s = full_s / n_edges / LANES_PER_STRUCTURE
    about = {"structures": len(programs), "ops": sum(c.n_ops for c in programs)}
    return {
        "evaluator/many_structures_ns_per_edge_and_lane": _limit(edge_s * 1e9, 0.8, "ns"),
        "evaluator/gpt3_layouts": _limit(warm_s, 50e-3, "s") | about,
        "evaluator/gpt3_layouts_joined_anew": _limit(cold_s, 50e-3, "s") | about,
        "evaluator/traces_of_a_search": _limit(traces.total, 16, "traces"),
    }


def _building(large: Structure) -> dict[str, Result]:
    """Time to build and compile a structure, and to load it from disk instead."""
    build_s = _best_s(lambda: compile_structure(build(LARGE)), 3)
    with (
        tempfile.TemporaryDirectory() as folder,
        patch.dict(os.environ, {"PERFMODEL_CACHE": folder}),
    ):
        save_structure("large", compile_structure(large))
        load_s = _best_s(lambda: load_structure("large"), 5)
    # Half a million ops: once is enough, as it takes seconds.
    huge = build(HUGE)
    huge_s = _best_s(lambda: compile_structure(huge), 1)
    compiled = compile_structure(huge)
    durations = durations_of(huge)
    evaluate_s = _best_s(lambda: makespan(compiled, durations), 5)
    return {
        "evaluator/build_and_compile_large": _limit(build_s, 0.35, "s"),
        "evaluator/load_large_from_disk": _limit(load_s, 10e-3, "s"),
        "evaluator/half_a_million_ops": _limit(huge_s + evaluate_s, 2.0, "s") | {"ops": huge.n_ops},
    }


_FIRST_CALL = """
import sys, time
import jax, numpy as np
jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from perfmodel.program import ProgramSpec, build
from perfmodel.timeline import compile_structure
from perfmodel.timeline._durations import padded_classes
from perfmodel.timeline._makespan import _span, _span_and_counts
compiled = compile_structure(build(ProgramSpec(stages=64, micro_batches=512, sends="op")))
durations = padded_classes(np.ones(compiled.structure.n_classes, np.float32))
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
for function in (_span, _span_and_counts):
    lowered = function.lower(compiled.op_tables, durations)
    start = time.perf_counter()
    lowered.compile()
    print(time.perf_counter() - start)
"""


def _compilation() -> dict[str, Result]:
    """Seconds that a process's first call waits for compilation, with JAX's disk cache empty and
    full."""
    # A process of its own each time: compiled functions stay in memory.
    with tempfile.TemporaryDirectory() as folder:
        cold, warm = (_first_calls_s(folder) for _ in range(2))
    return {
        "evaluator/compile_value": _limit(cold[0], 0.3, "s"),
        "evaluator/compile_value_and_grad": _limit(cold[1], 0.7, "s"),
        "evaluator/compile_from_persistent_cache": _limit(max(warm), 0.05, "s"),
    }


def _first_calls_s(cache: str) -> list[float]:
    """Seconds of compiling the value, and value and gradient, in a new process."""
    command = [sys.executable, "-c", _FIRST_CALL, cache]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in output.split()]


def _reported(compiled: CompiledStructure) -> dict[str, Result]:
    """Time of a whole report, and the accuracy that single precision loses."""
    usual = compile_structure(build(ProgramSpec(stages=16, micro_batches=192)))
    durations = durations_of(usual.structure)
    times_s = _best_s(lambda: times(usual, durations), 20)

    # Errors add up along the critical path, which is longest here.
    rng = np.random.default_rng(3)
    factors = rng.lognormal(0, 0.1, compiled.structure.n_classes)
    large = (durations_of(compiled.structure) * factors).astype(np.float32)
    in_double = float(makespan(compiled, large.astype(float)))
    error = abs(float(makespan(compiled, large)) / in_double - 1)
    return {
        "evaluator/timeline_p16_m192": _limit(times_s, 10e-3, "s"),
        "evaluator/float32_error_large": _limit(error, 2.6e-5, "relative"),
    }


def _best_s(call: Callable[[], object], repeats: int) -> float:
    """Least seconds of a call, compiled before; JAX returns before it has computed."""
    call()
    return best_s(lambda: jax.block_until_ready(call()), repeats)


def _faster(baseline_s: float, seconds: float, baseline: str, target: str = "") -> Result:
    """Entry on how many times as fast as a baseline a function is."""
    result: Result = {"ratio": baseline_s / seconds, "baseline": baseline, "unit": "x faster"}
    result |= {"seconds": seconds, "baseline_seconds": baseline_s}
    if target:
        result["target"] = target
    return result


def _slower(seconds: float, baseline_s: float, baseline: str, target: str) -> Result:
    """Entry on how many times as long as a baseline a function takes."""
    ratio = {"ratio": seconds / baseline_s, "baseline": baseline, "unit": "x", "target": target}
    return ratio | {"seconds": seconds, "baseline_seconds": baseline_s}


def _limit(value: float, limit: float, unit: str) -> Result:
    """A value as a share of its limit."""
    return {
        "ratio": value / limit,
        "baseline": f"{limit:g} {unit}",
        "unit": "x",
        "target": "<= 1",
        "value": value,
    }
