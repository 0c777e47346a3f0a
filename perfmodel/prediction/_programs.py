"""The pipeline program of a layout, and the division of a model's blocks into its stages.

Structures depend on few fields of a layout, so many layouts share one. A structure is built and
compiled once in a session; everything that follows from it (what ranks keep alive, blocks of
classes, overlaps) hangs on its record.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._problem import Setting, session_cached, store_of
from perfmodel.prediction._step_costs import Overlap, overlap_of_passes
from perfmodel.prediction._zero import reduces_every_micro_batch
from perfmodel.prediction.phases import PASS_KINDS, PassClasses, Variant, in_classes
from perfmodel.program import (
    N_STREAMS,
    GradReduce,
    Kind,
    ProgramSpec,
    Stream,
    Structure,
    build,
    fully_recomputed,
    is_of_kind,
    stage_blocks,
)
from perfmodel.schedule.memory import LiveState, live_state
from perfmodel.session import current_session
from perfmodel.spec import Layout, Transformer
from perfmodel.spec.notation import PerStage
from perfmodel.timeline import (
    CompiledStructure,
    compile_structure,
    load_structure,
    save_structure,
)

MAX_SEGMENTS = 16
"""Layer groups of a stage whose weights are gathered and gradients reduced together. Frameworks cut
finer (torch's `fully_shard` by wrapped block, its DistributedDataParallel by 25 MB, Megatron-Core
by 40 M parameters): with this many groups, the exposed part (the first gather and the last
reduction) is already small."""


def segments_of(layers: int, stages: int) -> int:
    """Number of layer groups of every stage: as many as its layers, and at most `MAX_SEGMENTS`."""
    return min(max(1, layers // stages), MAX_SEGMENTS)


def program_spec(setting: Setting, layout: Layout, layers: int) -> ProgramSpec:
    """The program of one step of a layout.

    Args:
        layers: layers of the model, which bound the segments of a stage.

    Raises:
        LayoutError: if the global batch does not divide into micro-batches.
    """
    job = setting.job
    training = job.mode == "train"
    base_spec = ProgramSpec(
        schedule=layout.effective_schedule, stages=layout.pp, micro_batches=1, chunks=layout.vpp
    )
    scheduler, replicas = base_spec.scheduler, base_spec.replicas
    replicated = layout.replicated or replicas > 1
    gathers = layout.zero == 3 and (replicated or layout.offload_states == "weights")
    is_reduced_each_time = reduces_every_micro_batch(layout.zero, layout.pp > 1, replicas, job)

    # Segments are the same whatever overlaps and is sharded, so that overlap only takes waits away
    # and ZeRO 3 only adds to ZeRO 1.
    segments = segments_of(layers, base_spec.n_stages) if replicated or gathers else 1

    micro_batches = job.num_microbatches(layout)
    grad_reduce = "none"
    if training and replicated:
        # Where pipelines put reductions off, each would hold up the gathers of layers behind it;
        # torch's make them when the last backward is over (torch/distributed/pipelining/stage.py,
        # `run_post_backward`).
        grad_reduce = "end"
        is_put_off = gathers and layout.pp > 1 and not is_reduced_each_time
        if layout.overlap.overlap_grad_reduce and not is_put_off:
            grad_reduce = _overlapped_reduction(replicas, micro_batches, gathers=gathers)

    # Without ZeRO the gathers take no time: the layouts share one program with those of ZeRO 1.
    gather = "none"
    if gathers:
        gather = "layer" if layout.overlap.overlap_param_gather else "layer_serial"
    elif training and replicated and layout.zero < 3:
        gather = "step_overlap" if layout.overlap.overlap_param_gather else "step"

    # Where no flush separates steps, two streams are evaluated, and their difference is the step
    # (`weighted_programs`). The longer one holds twice the steps after which the pipeline runs
    # steadily.
    steps = 1
    if training and (scheduler.asynchronous or scheduler.staggered):
        steps = 2 * scheduler.steady_steps(layout.pp, micro_batches)
    tied_embeddings = isinstance(setting.model, Transformer) and setting.model.head.tied_embeddings
    return ProgramSpec(
        schedule=layout.effective_schedule,
        stages=layout.pp,
        micro_batches=micro_batches,
        chunks=layout.vpp,
        steps=steps,
        offload=layout.offload and training,
        sends="blocking" if setting.framework.communication.blocking_sends else "lag",
        grad_reduce=grad_reduce,
        segments=segments,
        param_gather=gather,
        prefetch=layout.prefetch if gather == "layer" else 1,
        reduce_every_micro_batch=training and replicated and bool(is_reduced_each_time),
        combines_passes=training and layout.overlap.ep_overlap and layout.ep > 1,
        tied_embedding=training and layout.pp > 1 and tied_embeddings,
        optimizer=training,
        forward_only=not training,
        grad_norm_barrier=steps == 1,
    )


def _overlapped_reduction(replicas: int, micro_batches: int, *, gathers: bool) -> GradReduce:
    """The moment at which gradients are reduced if their reduction overlaps with passes
    (`ProgramSpec.grad_reduce`).

    Args:
        replicas: pipeline ranks that hold the same stage.
        gathers: whether weights are gathered layer by layer.
    """
    if replicas == 1:
        return "overlap"
    # A reduction that waits for another rank's replica would hold up the gathers of layers behind
    # it. And a replica that has no pass has no moment to reduce at.
    if gathers or micro_batches < replicas:
        return "end"
    return "eager_opt"


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program's structure, compiled for evaluation."""

    structure: Structure
    """Ops, their predecessors and classes."""
    compiled: CompiledStructure
    """The structure in the form that loops run through."""
    compute_count: Float[np.ndarray, " classes"]
    """Occurrences of each class on the compute streams."""

    @property
    def n_bytes(self) -> int:
        """Bytes of all arrays, each counted once."""
        bytes_of_array: dict[int, int] = {}
        for record in (self, self.structure, self.compiled):
            for value in vars(record).values():
                if isinstance(value, np.ndarray):
                    bytes_of_array[id(value)] = value.nbytes
        return sum(bytes_of_array.values())

    @cached_property
    def optimizer(self) -> Int[np.ndarray, " some"]:
        """Classes of the optimizer's steps."""
        return np.flatnonzero(self.structure.class_kind == Kind.OPTIMIZER)

    @cached_property
    def rank_count(self) -> Float[np.ndarray, "ranks classes"]:
        """Occurrences of each class on every rank's compute stream."""
        structure = self.structure
        compute = (structure.stream >= 0) & (structure.stream % N_STREAMS == Stream.COMPUTE)
        rank_and_class = (
            structure.device[compute] * structure.n_classes + structure.duration[compute]
        )
        shape = structure.devices, structure.n_classes
        return (
            np.bincount(rank_and_class, minlength=shape[0] * shape[1]).reshape(shape).astype(float)
        )


class TimedProgram(NamedTuple):
    """A program that makes up a step, alone or with others whose weighted makespans add up to
    it."""

    prepared: Prepared
    """The program, prepared for pricing."""
    durations_s: Float[np.ndarray, "*lanes classes"]
    """Duration of each class of its instructions."""
    weight: float
    """Weight of its makespan in the step time."""


def rank_busy_s(programs: Iterable[TimedProgram]) -> Float[np.ndarray, "*lanes ranks"]:
    """Seconds of a step in which each rank's compute stream is busy.

    No step is shorter than its busiest rank's. One that is the difference of two streams could be:
    while the pipeline fills, another rank may set the pace than in the long run, for longer than
    any stream is.
    """
    busy_s = [
        program.weight * (program.durations_s @ program.prepared.rank_count.T)
        for program in programs
    ]
    return np.sum(busy_s, axis=0)


def prepared(spec: ProgramSpec) -> Prepared:
    """The program's compiled structure (cached in the session, and on disk if its schedule follows
    from its name)."""

    def prepare() -> Prepared:
        compiled = _compiled(spec)
        structure = compiled.structure
        compute = (structure.stream >= 0) & (structure.stream % N_STREAMS == Stream.COMPUTE)
        count = np.bincount(structure.duration[compute], minlength=structure.n_classes).astype(
            float
        )
        return Prepared(structure, compiled, count)

    return current_session().programs.get_or_compute(spec, prepare)


def _compiled(spec: ProgramSpec) -> CompiledStructure:
    """Build and compile the program's structure, or read it from disk where an earlier process
    did."""
    # A schedule of the caller's own may be another one next time.
    if spec.digest is None:
        return compile_structure(build(spec))
    compiled = load_structure(spec.key())
    if compiled is None:
        compiled = compile_structure(build(spec))
        save_structure(spec.key(), compiled)
    return compiled


def program_live(setting: Setting, spec: ProgramSpec) -> LiveState:
    """Activations and weights that a program keeps alive on every rank."""
    # Reductions, gathers and transfers keep nothing alive: programs that differ in these alone
    # share a result.
    passes_alone = ProgramSpec(
        schedule=spec.schedule,
        stages=spec.stages,
        micro_batches=spec.micro_batches,
        chunks=spec.chunks,
        steps=spec.steps,
        offload=spec.offload,
        forward_only=spec.forward_only,
    )
    return _live_of(setting, passes_alone)


@session_cached
def _live_of(setting: Setting, spec: ProgramSpec) -> LiveState:
    live = live_state(spec.build_schedule(), spec.offload, spec.scheduler.weights)
    return live.with_slots(setting.framework.memory.slots_per_stage, spec.n_stages)


# --- programs whose stages hold the blocks of a model: what all layouts that share one have in
# common --------


class Division(NamedTuple):
    """How a model is divided among stages."""

    kinds: tuple[tuple[bool, int], ...]
    """Whether each block is a layer, and how often it occurs (`ShardBlocks.kinds`)."""
    partition: PerStage
    """Layers of every pipeline stage, as in `Layout.partition`."""
    full_layers: PerStage
    """Layers of every stage that are recomputed in full, as in `Layout.recompute_full_layers`."""
    segments: tuple[tuple[int, ...], ...] | None = None
    """Layers of every segment of every stage; None: as even as can be."""


@dataclass(frozen=True, eq=False)
class PartitionedProgram:
    """A program and a division of the model into its stages (cached, see `divided`)."""

    setting: Setting
    """Model, cluster, job and framework."""
    spec: ProgramSpec
    """Pipeline program without durations."""
    division: Division
    """How the model is divided."""
    counts: Float[np.ndarray, "stages segments blocks"]
    """Blocks of every segment of every stage."""
    full: Float[np.ndarray, "stages segments blocks"]
    """Blocks of `counts` that are recomputed in full even if a layout recomputes the others
    differently."""

    @property
    def structure(self) -> Structure:
        """Structure of the program, independent of the division."""
        return prepared(self.spec).structure

    @cached_property
    def passes(self) -> PassClasses:
        """The classes of passes, with their blocks."""
        # The blocks of stages and segments go to the classes of the structure that are passes.
        structure = self.structure
        is_pass = is_of_kind(structure.class_kind, PASS_KINDS)
        of_variant: dict[Variant, dict[Kind, Int[np.ndarray, " some"]]] = {}
        for number, variant in enumerate(structure.variants.tolist()):
            is_variant = structure.class_variant == number
            # A program's transfers have variants that no pass has.
            if (is_pass & is_variant).any():
                of_kind = {
                    kind: np.flatnonzero((structure.class_kind == kind) & is_variant)
                    for kind in PASS_KINDS
                }
                of_variant[Variant(*variant)] = of_kind
        stage, segment = structure.class_stage, structure.class_segment
        blocks = in_classes(stage, segment, self.counts) * is_pass[:, None]
        recomputed_in_full = in_classes(stage, segment, self.full) * is_pass[:, None]
        return PassClasses(blocks=blocks, full=recomputed_in_full, of_variant=of_variant)

    @cached_property
    def overlap(self) -> Overlap:
        """The reductions and gathers that overlap with passes."""
        return overlap_of_passes(self.spec, self.structure)

    @cached_property
    def canonical(self) -> "PartitionedProgram":
        """A canonical program for all programs that differ only in the number of micro-batches and
        therefore have equal class durations."""
        structure = self.structure
        arrays = (
            structure.class_kind,
            structure.class_stage,
            structure.class_segment,
            structure.class_variant,
            structure.variants,
            *self.overlap,
        )
        contents = [array.tobytes() for array in arrays]
        key = replace(self.spec, micro_batches=1), self.division, *contents
        return store_of(self.setting).get_or_compute((PartitionedProgram, key), lambda: self)

    @cached_property
    def without_recompute(self) -> "PartitionedProgram":
        """The program without recomputation, used as a key because recomputation changes no event
        between blocks."""
        return divided(self.setting, self.spec, self.division._replace(full_layers=None))

    def with_spec(self, spec: ProgramSpec) -> "PartitionedProgram":
        """Return a program with another spec and the same division."""
        return divided(self.setting, spec, self.division)

    def with_segments(self, layers: tuple[tuple[int, ...], ...]) -> "PartitionedProgram":
        """The program with other numbers of layers per stage and segment, without full
        recomputation."""
        spec = replace(self.spec, segments=len(layers[0]))
        return divided(
            self.setting, spec, self.division._replace(full_layers=None, segments=layers)
        )


@session_cached
def divided(setting: Setting, spec: ProgramSpec, division: Division) -> PartitionedProgram:
    """Divide a model into the stages of a program.

    Raises:
        LayoutError: the stages cannot hold the layers so.
    """
    counts = stage_blocks(
        division.kinds, spec.n_stages, spec.segments, division.partition, division.segments
    )
    layers = np.array([is_layer for is_layer, _ in division.kinds])
    full = fully_recomputed(counts, layers, division.full_layers)
    return PartitionedProgram(setting, spec, division, counts, full)
