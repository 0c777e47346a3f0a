"""Searches the D/T/P/K distributions of a program: each is distributed, simulated and ranked
(DistIR, section 5)."""

import gc
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from perfmodel.display import Report, frame_html, shorten_reprs
from perfmodel.errors import LayoutError, PerfModelError
from perfmodel.ir import ITEM_BYTES, GlobalTensor, Program, live_memory
from perfmodel.ir.distribute import Degrees, on_one_stream, spread_stages, staged
from perfmodel.ir.execution import Timer, cluster_timer, program_structure, simulate
from perfmodel.ops import Op
from perfmodel.schedule import get_schedule
from perfmodel.spec import Cluster
from perfmodel.units import divisors

MICRO_BATCHES: Final = tuple(1 << i for i in range(1, 8))
"""Numbers of micro-batches of pipelines: 2 to 128 (DistIR, section 5.1)."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One distribution of the program."""

    degrees: Degrees
    step_time_s: float
    samples_per_s: float
    peak_memory_bytes: float
    """Bytes of the values that are alive at once on the fullest device."""

    @property
    def dtpk(self) -> str:
        """D/T/P/K as the paper writes it."""
        d = self.degrees
        return f"{d.data}/{d.tensor}/{d.pipeline}/{d.micro_batches}"

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "layout": str(self.degrees),
            "dtpk": self.dtpk,
            "step_time_s": self.step_time_s,
            "samples_per_s": self.samples_per_s,
            "peak_memory_bytes": self.peak_memory_bytes,
        }


@dataclass(frozen=True, kw_only=True)
class ProgramSearch:
    """The candidates that fit, and the reasons why others do not."""

    program: str
    cluster: str
    batch: int
    candidates: tuple[Candidate, ...]
    """All candidates that fit into memory, fastest first."""
    rejected: dict[str, int]
    """Number of rejected layouts by reason."""

    @property
    def evaluated(self) -> int:
        """Number of layouts tried: those that fit and those rejected."""
        return len(self.candidates) + sum(self.rejected.values())

    def to_dict(self) -> dict[str, Any]:
        """Return plain values under the keys of `perfmodel search`."""
        return {
            "program": self.program,
            "cluster": self.cluster,
            "global_batch": self.batch,
            "evaluated": self.evaluated,
            "feasible": len(self.candidates),
            "layouts": [c.to_dict() for c in self.candidates],
            "rejected": self.rejected,
        }

    def to_frame(self) -> Any:
        """One row per candidate."""
        import pandas as pd

        return pd.DataFrame([c.to_dict() for c in self.candidates])

    def _repr_html_(self) -> str:
        return frame_html(self.to_frame())


def search_programs(
    program: Program,
    cluster: Cluster,
    devices: int,
    *,
    micro_batches: Sequence[int] = MICRO_BATCHES,
    schedule: str = "1f1b",
    timer: Timer | None = None,
    calibration: Path | None = None,
    progress: Report = lambda *_: None,
) -> ProgramSearch:
    """Distribute a program over devices in every way, and simulate each result.

    A device runs one operation at a time, transfers too (section 2.1). Only one rank of each data-
    and tensor-parallel group is written, which does not change any time. Programs whose weights,
    inputs or results alone do not fit are not written at all, and layouts that differ only in D and
    T share their stages. One core writes and simulates 10,000 to 20,000 instructions per second,
    also for K = 128.

    Args:
        program: program of one device; its data have batch axes.
        devices: shared out among D, T and P, which all divide them.
        micro_batches: K of pipelines; others take the batch at once.
        schedule: schedule of pipelines that train.
        timer: times of kernels and collectives (default: those of the cluster's cost models).

    Raises:
        PerfModelError: a program that is distributed already or has no batch.
    """
    batch = _batch_of(program)
    cluster.require(devices, f"@{program.function.name}")
    memory_bytes = cluster.device.memory_bytes
    # Weights alone rule many layouts out; writing a program of a million instructions to find that
    # out would be waste.
    least_bytes = _least_bytes(program, schedule)
    price = _remembered(timer or cluster_timer(cluster, calibration))
    candidates: list[Candidate] = []
    rejected: Counter[str] = Counter()

    # Stages and micro-batches depend on P and K alone. Sorted by these, consecutive layouts differ
    # in D and T and share them.
    grid = sorted(
        dtpk_grid(devices, micro_batches, schedule), key=lambda d: (d.pipeline, d.micro_batches)
    )
    current, stages = None, None
    for number, degrees in enumerate(grid):
        progress(str(degrees), number, len(grid))
        if current != (degrees.pipeline, degrees.micro_batches):
            # The stages of the last degrees are let go before others are made.
            stages = None
            current = (degrees.pipeline, degrees.micro_batches)
        # At best tensor and pipeline ranks share the weights evenly, so this bound never rejects a
        # layout that fits.
        if least_bytes / (degrees.tensor * degrees.pipeline) > memory_bytes:
            rejected["memory"] += 1
            continue
        try:
            with _no_collection():
                stages = staged(program, degrees) if stages is None else stages
                candidate = _simulated(stages, degrees, batch, cluster, price)
        except LayoutError as reason:
            rejected[_reason(str(reason))] += 1
            continue
        if candidate is None:
            rejected["memory"] += 1
        else:
            candidates.append(candidate)

    # The sort is stable, so ties stay in the order of the grid and answers repeat.
    candidates.sort(key=lambda c: c.step_time_s)
    return ProgramSearch(
        program=program.function.name,
        cluster=cluster.name,
        batch=batch,
        candidates=tuple(candidates),
        rejected=dict(rejected),
    )


def _batch_of(program: Program) -> int:
    """Samples that a program of one device takes at once.

    Raises:
        PerfModelError: a program that is distributed already or has no batch.
    """
    if program.n_devices > 1:
        raise PerfModelError(
            f"@{program.function.name} is already distributed; give a program on one device"
        )
    for data in program.inputs:
        if data.batch_axis is not None:
            return data.shape[data.batch_axis]
    raise PerfModelError(
        f"@{program.function.name}: no input has a batch axis to divide among devices; mark one as data"
    )


def _simulated(
    stages: Program, degrees: Degrees, batch: int, cluster: Cluster, price: Timer
) -> Candidate | None:
    """Simulate one distribution of a program's stages; None if it does not fit into memory."""
    # DistIR's devices run one instruction at a time (section 2.1), hence one stream. One data and
    # tensor rank of each stage is written: the others do the same at the same time.
    distributed = on_one_stream(spread_stages(stages, degrees, representative=True))
    peak_bytes = float(live_memory(distributed.function).peak_bytes.max())
    if peak_bytes > cluster.device.memory_bytes:
        return None
    structure = program_structure(distributed.function, cluster)
    step_s = simulate(structure, price).makespan_s
    return Candidate(
        degrees=degrees,
        step_time_s=step_s,
        samples_per_s=batch / step_s,
        peak_memory_bytes=peak_bytes,
    )


def dtpk_grid(
    devices: int, micro_batches: Sequence[int] = MICRO_BATCHES, schedule: str = "1f1b"
) -> Iterator[Degrees]:
    """Every D/T/P of some devices, and K of pipelines (section 5.1: 75 of 16 devices)."""
    for pipeline in divisors(devices):
        for tensor in divisors(devices // pipeline):
            for count in micro_batches if pipeline > 1 else (1,):
                yield Degrees(
                    data=devices // pipeline // tensor,
                    tensor=tensor,
                    pipeline=pipeline,
                    micro_batches=count,
                    schedule=schedule,
                )


def _least_bytes(program: Program, schedule: str) -> float:
    """Bytes that a program needs at its start or end in any layout, summed over all stages.

    Parameters and states are there at the start; where all that the program returns is kept, new
    parameters and their gradients at the end (schedules that update on the way return no
    gradients).
    """

    def n_bytes(tensors: Iterable[GlobalTensor]) -> float:
        return float(sum(prod(w.shape) * ITEM_BYTES[w.dtype] for w in tensors))

    # Programs return gradients beside new weights; a schedule that updates on the way has none left
    # to return.
    lasting = {"parameter", "state"}
    if not get_schedule(schedule).asynchronous:
        lasting.add("gradient")
    at_start = program.inputs_of("parameter", "state")
    at_end = [tensor for tensor in program.outputs if tensor.role in lasting]
    return max(n_bytes(at_start), n_bytes(at_end))


@contextmanager
def _no_collection() -> Iterator[None]:
    """Pause Python's search for cycles: millions of instructions have none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _reason(message: str) -> str:
    """Name the kind of thing that does not divide, without its numbers."""
    # Messages name tensors and numbers, which would make every rejection its own reason.
    for word in ("batch", "layers", "schedule"):
        if word in message:
            return f"{word} is not divisible" if word == "batch" else word
    return "a weight is not divisible"


def _remembered(timer: Timer) -> Timer:
    """The timer, asked once for each op of the search."""
    known: dict[Op, float] = {}

    def price(ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
        # Layouts repeat most kernels and collectives; cost models are asked in batches, for new
        # ones only.
        new = [op for op in ops if op not in known]
        if new:
            known.update(zip(new, timer(new).tolist(), strict=True))
        return np.array([known[op] for op in ops])

    return price


shorten_reprs(__name__)
