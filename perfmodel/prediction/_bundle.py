"""Programs ready to be evaluated, and the layouts that share one."""

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._blocks import BlockTable
from perfmodel.program import N_STREAMS, ProgramSpec, Stream, Structure, build
from perfmodel.spec import Layout, PerStage
from perfmodel.timeline import CompiledStructure, compile_structure, load_or_compile


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program's structure, compiled for evaluation."""

    structure: Structure
    compiled: CompiledStructure
    compute_count: Float[np.ndarray, " classes"]
    """Occurrences of each class on the compute streams."""


def prepare(spec: ProgramSpec) -> Prepared:
    """Build and compile a program (from the disk cache if it was built before)."""
    if spec.digest is None:  # a schedule of the caller's own, which may be another one next time
        compiled = compile_structure(build(spec))
        structure = compiled.structure
    else:
        structure, compiled = load_or_compile(spec.key(), lambda: build(spec))
    compute = (structure.stream >= 0) & (structure.stream % N_STREAMS == Stream.COMPUTE)
    count = np.bincount(structure.duration[compute], minlength=structure.n_classes).astype(float)
    return Prepared(structure, compiled, count)


Division = tuple[tuple[int, ...], PerStage, PerStage]
"""How a model is divided: repeats of its blocks, partition, layers recomputed in full."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Layouts that share one program and one division of the model: a lane each."""

    spec: ProgramSpec
    lanes: tuple[int, ...]
    """Positions in the caller's list."""
    layouts: tuple[Layout, ...]
    tables: tuple[BlockTable, ...]
    division: Division
    """What `counts` and `full` follow from."""
    counts: Float[np.ndarray, "stages segments blocks"]
    full: Float[np.ndarray, "stages segments blocks"]
    """Blocks among them that are recomputed in full whatever the layouts say of the others."""


@dataclass(frozen=True, eq=False)
class BatchResult:
    """Step time of many layouts, in the caller's order."""

    step_time_s: Float[np.ndarray, " layouts"]
