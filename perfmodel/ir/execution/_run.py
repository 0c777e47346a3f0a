"""Runs a program on one process per device, with times of all instructions."""

import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final, Literal

import numpy as np
from jaxtyping import Float, Int

from perfmodel.errors import PerfModelError
from perfmodel.ir import Program, instruction_devices, lower
from perfmodel.ir.execution._reference import is_double
from perfmodel.ir.execution._session import ProgramSession, RankCode
from perfmodel.ir.execution._simulate import class_means_s
from perfmodel.ir.execution._structure import ProgramStructure, program_structure
from perfmodel.ir.execution.events import EventSession
from perfmodel.measure.ranks import Host, RankGroup
from perfmodel.measure.timing import machine_meter
from perfmodel.timeline import Timeline

_CLOCK_ROUNDS: Final = 7


@dataclass(frozen=True, eq=False)
class Run:
    """Results and measured times of a program on real processes."""

    outputs: Mapping[str, np.ndarray]
    """Whole results by name."""
    timelines: tuple[Timeline, ...]
    """Measured times of every run, in the structure by which the program would be simulated."""
    program: ProgramStructure
    interference: Float[np.ndarray, " runs"]
    """Share of processor time taken by other processes during each run."""
    clock_offset_s: Float[np.ndarray, " ranks"]
    """Seconds by which each rank's clock was ahead of rank 0's, taken out of the times."""

    @property
    def makespans_s(self) -> Float[np.ndarray, " runs"]:
        """Step time of each run in seconds."""
        return np.array([timeline.makespan_s for timeline in self.timelines])

    @property
    def timeline(self) -> Timeline:
        """The timeline of the run with the median makespan."""
        middle = (len(self.timelines) - 1) // 2
        return self.timelines[int(np.argsort(self.makespans_s)[middle])]


Backend = Literal["jax", "torch"]
"""Library whose kernels compute and whose collectives move the data."""


def program_ranks(
    num_ranks: int, backend: Backend = "jax", hosts: Sequence[Host] = ()
) -> RankGroup:
    """Context manager of processes for any number of `run`s, on one or several hosts.

    Raises:
        PerfModelError: for fewer than 2 or more than 64 ranks, or torch where it is not installed.
    """
    return RankGroup(num_ranks, session_class(backend), hosts)


def session_class(backend: Backend, *, events: bool = False) -> type[ProgramSession]:
    """Return the class that runs a rank (or times its events) on a backend.

    Raises:
        PerfModelError: torch is wanted and not installed.
    """
    if backend == "jax":
        return EventSession if events else ProgramSession
    if find_spec("torch") is None:
        raise PerfModelError(
            "backend torch needs torch; install the extra: pip install 'perfmodel[torch]'"
        )
    from perfmodel.ir.execution._torch_session import TorchEventSession, TorchProgramSession

    return TorchEventSession if events else TorchProgramSession


def run(
    program: Program,
    inputs: Mapping[str, np.ndarray],
    *,
    repeats: int = 3,
    ranks: RankGroup | None = None,
    backend: Backend = "jax",
) -> Run:
    """Execute a program by one process per device, on this machine.

    Every rank runs its own lowered program; kernels and collectives are JAX's or PyTorch's (gloo on
    CPUs). A first run that compiles is not timed. Times of all ranks are on rank 0's clock.

    Args:
        program: program of 2 to 64 devices.
        inputs: whole inputs by name.
        repeats: timed runs.
        ranks: running processes from `program_ranks`; by default fresh ones, which takes some
            seconds.
        backend: library that fresh processes compute with.

    Raises:
        PerfModelError: too few or too many devices or ranks, no repeats, or an input of another
            shape.
        CalibrationError: a rank failed or died.
    """
    if repeats < 1:
        raise PerfModelError(f"repeats must be at least 1, got {repeats}")
    # Lowering projects the program to ranks (DistIR, section 3.2); the structure is kept to file
    # measured times in.
    codes = rank_codes(program, inputs)
    prepared = program_structure(program.function)
    if ranks is not None and ranks.num_ranks != len(codes):
        raise PerfModelError(
            f"the program is for {len(codes)} devices, but {ranks.num_ranks} ranks are running"
        )
    with program_ranks(len(codes), backend) if ranks is None else nullcontext(ranks) as group:
        group.ask_each("load", [(code,) for code in codes])
        # The first run compiles, and is not timed.
        group.ask("run")
        recorded, interference = zip(*(_watched_run(group) for _ in range(repeats)), strict=True)
        values = group.ask("values")
        # Clocks are compared right after the runs that they date.
        offset_s = _clock_offsets(group)
    timelines = tuple(_timeline(prepared, record, offset_s) for record in recorded)
    values_by_name = {}
    for rank_values in values:
        values_by_name |= rank_values
    outputs = program.join(values_by_name)
    return Run(outputs, timelines, prepared, np.array(interference), offset_s)


def _watched_run(group: RankGroup) -> tuple[list[tuple[list[float], list[float]]], float]:
    """Run once; return the ranks' records, and other processes' share of processor time."""
    meter = machine_meter()
    # Processor time of this process and its ranks is ours; whatever else the machine spent
    # meanwhile disturbed the run.
    before = meter.read(time.process_time() + sum(group.ask("own_s")))
    noted = group.ask("run")
    after = meter.read(time.process_time() + sum(group.ask("own_s")))
    return noted, meter.interference(before, after)


def rank_codes(program: Program, inputs: Mapping[str, np.ndarray]) -> list[RankCode]:
    """Code of each rank of a program, with its share of the inputs."""
    function, types = program.function, program.types
    arguments = program.split(inputs)
    # Outputs identify an instruction: every value is assigned once. Process groups must be made by
    # all ranks in one order, members or not, hence the list of all groups.
    groups = dict(
        zip((i.outputs for i in function.instructions), instruction_devices(function), strict=True)
    )
    all_groups = tuple(dict.fromkeys(group for group in groups.values() if len(group) > 1))
    codes = []
    for rank, instructions in enumerate(lower(function)):
        local_parameters = [p.name for p in function.parameters if types[p.name].device == rank]
        local_outputs = [name for name in function.outputs if types[name].device == rank]
        names: set[str] = set()
        for instruction in instructions:
            names.update(instruction.inputs, instruction.outputs)
        codes.append(
            RankCode(
                instructions=instructions,
                groups=tuple(groups[i.outputs] for i in instructions),
                types={name: types[name] for name in names},
                arguments={name: arguments[name] for name in local_parameters},
                parameters={name: types[name] for name in local_parameters},
                outputs=tuple(dict.fromkeys(local_outputs)),
                all_groups=all_groups,
                double=is_double(types.values()),
            )
        )
    return codes


def _clock_offsets(group: RankGroup) -> Float[np.ndarray, " ranks"]:
    """Seconds by which each rank's clock is ahead of rank 0's.

    A round asks all ranks at once, so that answers lie within the round's own duration of one
    another; the shortest round counts. An offset that it cannot tell from none is none (one host,
    one clock).
    """

    best_s = np.inf
    offset_s = np.zeros(group.num_ranks)
    for _ in range(_CLOCK_ROUNDS):
        start_s = time.perf_counter()
        clock_s = np.array(group.ask("clock_s"))
        took_s = time.perf_counter() - start_s
        if took_s < best_s:
            best_s = took_s
            offset_s = clock_s - clock_s[0]
    return np.where(np.abs(offset_s) <= best_s, 0.0, offset_s)


def _timeline(
    prepared: ProgramStructure,
    record: list[tuple[list[float], list[float]]],
    offset_s: Float[np.ndarray, " ranks"],
) -> Timeline:
    """Convert a run's times to a timeline that starts with the first rank."""
    # All times on rank 0's clock, counted from the first instruction that any rank reaches.
    structure = prepared.structure
    start_s = np.zeros(structure.n_ops)
    end_s = np.zeros(structure.n_ops)
    origin_s = min(
        reached[0] - offset_s[rank] for rank, (reached, _) in enumerate(record) if reached
    )
    device = structure.device
    is_instruction = prepared.instruction >= 0
    for rank, (reached, done) in enumerate(record):
        # The structure's ops of a device stand in the order of its program.
        ops = np.flatnonzero(is_instruction & (device == rank))
        start_s[ops] = np.array(reached) - offset_s[rank] - origin_s
        end_s[ops] = np.array(done) - offset_s[rank] - origin_s
    # A collective starts when its last rank has reached it.
    met_s = np.zeros(len(prepared.function.instructions))
    np.maximum.at(met_s, prepared.instruction[is_instruction], start_s[is_instruction])
    start_s[is_instruction] = np.minimum(
        met_s[prepared.instruction[is_instruction]], end_s[is_instruction]
    )
    _fill_joins(structure.pred, np.flatnonzero(~is_instruction), start_s, end_s)
    return Timeline(start_s, end_s, class_means_s(structure, end_s - start_s), structure)


def _fill_joins(
    pred: Int[np.ndarray, "ops 2"],
    joins: Int[np.ndarray, " joins"],
    start_s: np.ndarray,
    end_s: np.ndarray,
) -> None:
    """Fill in joins, which take no time and happen when the last of their predecessors ends."""
    # Joins are numbered after what they join, so one pass in order fills them all.
    for join in joins.tolist():
        ends = [end_s[p] for p in pred[join].tolist() if p >= 0]
        start_s[join] = end_s[join] = max(ends, default=0.0)
