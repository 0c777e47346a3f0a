"""Programs ready to be evaluated."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from perfmodel.program import N_STREAMS, Kind, ProgramSpec, Stream, Structure, build
from perfmodel.session import current_session
from perfmodel.timeline import CompiledStructure, compile_structure, load_or_compile


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program's structure, compiled for evaluation."""

    structure: Structure
    compiled: CompiledStructure
    compute_count: Float[np.ndarray, " classes"]
    """Occurrences of each class on the compute streams."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays."""
        found = {id(a): a.nbytes for of in (self, self.structure, self.compiled) for a in vars(of).values()
                 if isinstance(a, np.ndarray)}  # fmt: skip
        return sum(found.values())

    @cached_property
    def optimizer(self) -> Int[np.ndarray, " some"]:
        """Classes of the optimizer's steps."""
        return np.flatnonzero(self.structure.class_kind == Kind.OPTIMIZER)

    @cached_property
    def rank_count(self) -> Float[np.ndarray, "ranks classes"]:
        """The same on each rank's compute stream."""
        structure = self.structure
        compute = (structure.stream >= 0) & (structure.stream % N_STREAMS == Stream.COMPUTE)
        where = structure.device[compute] * structure.n_classes + structure.duration[compute]
        shape = structure.devices, structure.n_classes
        return np.bincount(where, minlength=shape[0] * shape[1]).reshape(shape).astype(float)


WeightedDurations = tuple[Prepared, Float[np.ndarray, "*lanes classes"], float]
"""A program, the durations of its classes, and the weight of its makespan in the step time."""


def rank_busy_s(programs: Iterable[WeightedDurations]) -> Float[np.ndarray, "*lanes ranks"]:
    """Seconds of a step in which each rank's compute stream is busy.

    No step is shorter than its busiest rank's. One that is the difference of two streams could be: while the pipeline
    fills, another rank may set the pace than in the long run, for longer than any stream is.
    """
    return np.sum([weight * (durations @ prepared.rank_count.T) for prepared, durations, weight in programs], axis=0)


def prepared(spec: ProgramSpec) -> Prepared:
    """The program's structure, built and compiled once in a session."""
    return current_session().programs.once(spec, lambda: _prepare(spec))


def _prepare(spec: ProgramSpec) -> Prepared:
    """Build and compile a program (from the disk cache if it was built before)."""
    if spec.digest is None:  # a schedule of the caller's own, which may be another one next time
        compiled = compile_structure(build(spec))
        structure = compiled.structure
    else:
        structure, compiled = load_or_compile(spec.key(), lambda: build(spec))
    compute = (structure.stream >= 0) & (structure.stream % N_STREAMS == Stream.COMPUTE)
    count = np.bincount(structure.duration[compute], minlength=structure.n_classes).astype(float)
    return Prepared(structure, compiled, count)
