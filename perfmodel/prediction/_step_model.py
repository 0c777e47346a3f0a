"""The step model: everything that stays fixed while layouts vary, and the batch evaluation of layouts.

One code path serves `predict` (a batch of one) and `search` (thousands): events are timed once per
shard, composed per program in NumPy, and all programs are evaluated in one JAX call.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

import numpy as np
from jaxtyping import Float

from perfmodel.cost import EventTimes, PricesCollectives, PricesKernels, event_times
from perfmodel.prediction._adjustment import Adjustment
from perfmodel.prediction._blocks import BlockTable, Phase, block_table
from perfmodel.prediction._classes import EventClasses, PassClasses, event_entries, pass_classes
from perfmodel.prediction._communication import communication_events
from perfmodel.prediction._discrepancy import Coordinates, coordinates
from perfmodel.prediction._framework import Framework
from perfmodel.prediction._live import live_state
from perfmodel.prediction._memory import MemoryBatch, host_bandwidth, memory_batch, saved_bytes
from perfmodel.prediction._program_spec import program_spec
from perfmodel.prediction._stages import layer_count, stage_blocks
from perfmodel.prediction._step_costs import beside_passes, with_step_costs
from perfmodel.prediction._variants import PLAIN, Variant, on_slice, sliced_job
from perfmodel.program import N_STREAMS, Kind, ProgramSpec, Stream, Structure, build
from perfmodel.schedule import PassTimes, get_schedule
from perfmodel.spec import Cluster, Collective, Job, Layout, Model, Op
from perfmodel.timeline import CompiledStructure, ProgramBatch, compile_structure, load_or_compile, makespan_many
from perfmodel.workload import Shard, blocks, parameter_count

T = TypeVar("T")
_WITHOUT_PRICES = ("spec", "prepared", "stages", "pass classes", "live")
"""Memoised results that hold at any price."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A program's structure, compiled for evaluation."""

    structure: Structure
    compiled: CompiledStructure
    compute_count: Float[np.ndarray, " classes"]
    """Occurrences of each class on the compute streams."""


@dataclass(frozen=True, eq=False)
class Bundle:
    """Layouts that share one program: a lane each."""

    spec: ProgramSpec
    lanes: tuple[int, ...]
    """Positions in the caller's list."""
    layouts: tuple[Layout, ...]
    tables: tuple[BlockTable, ...]
    counts: Float[np.ndarray, "stages segments blocks"]


@dataclass(frozen=True, eq=False)
class BatchResult:
    """Step time of many layouts, in the caller's order."""

    step_time_s: Float[np.ndarray, " layouts"]


@dataclass(frozen=True, eq=False)
class StepModel:
    """A model, a job and a cluster with their cost models; layouts are what varies.

    Results of deterministic sub-steps are memoised on the instance.
    """

    model: Model
    job: Job
    cluster: Cluster
    kernels: PricesKernels = field(repr=False)
    collectives: PricesCollectives = field(repr=False)
    framework: Framework = field(default_factory=Framework)
    """Host costs before `adjustment`."""
    adjustment: Adjustment | None = None
    """What measured runs said, on top of the cost models."""
    _memo: dict[Hashable, object] = field(default_factory=dict, repr=False)

    def _once(self, key: Hashable, make: Callable[[], T]) -> T:
        if key not in self._memo:
            self._memo[key] = make()
        return self._memo[key]  # pyright: ignore[reportReturnType]

    def repriced(self, kernels: PricesKernels, collectives: PricesCollectives) -> "StepModel":
        """The same step at other prices; what no price changes is shared with this one."""
        shared = {k: v for k, v in self._memo.items() if isinstance(k, tuple) and k[0] in _WITHOUT_PRICES}
        return replace(self, kernels=kernels, collectives=collectives, _memo=shared)

    # --- events and blocks: the bottom of the hierarchy -----------------------------------------

    def timed(self, ops: Sequence[Op]) -> EventTimes:
        """Times of events; each distinct one is computed once (DistSim, observation 1)."""
        known: dict[Op, tuple[float, float, float, str]] = self._once("events", dict)
        new = list(dict.fromkeys(op for op in ops if op not in known))
        if new:
            times = event_times(new, self.cluster, self.kernels, self.collectives)
            columns = (times.time_s.tolist(), times.lo_s.tolist(), times.hi_s.tolist(), times.provenance)
            known.update(zip(new, zip(*columns, strict=True), strict=True))
        rows = [known[op] for op in ops]
        time_s, lo_s, hi_s = np.array([row[:3] for row in rows], float).reshape(-1, 3).T
        times = EventTimes(time_s=time_s, lo_s=lo_s, hi_s=hi_s, provenance=tuple(row[3] for row in rows))
        return self.adjustment.times(ops, times, self._latency_s(ops)) if self.adjustment else times

    def _latency_s(self, ops: Sequence[Op]) -> Float[np.ndarray, " ops"]:
        """What collectives take that carry next to nothing; 0 for kernels."""
        known: dict[Op, float] = self._once("latencies", dict)
        new = list(dict.fromkeys(op for op in ops if isinstance(op, Collective) and op not in known))
        if new:
            empty = self.collectives.times(self.cluster, [replace(op, bytes=1.0) for op in new])
            known.update(zip(new, empty.time_s.tolist(), strict=True))
        return np.array([known.get(op, 0.0) for op in ops])

    @property
    def host(self) -> Framework:
        """Host costs as the runs have them."""
        adjustment = self.adjustment
        return self._once("host", lambda: adjustment.framework(self.framework)) if adjustment else self.framework

    def adjusted(self, adjustment: Adjustment | None) -> "StepModel":
        """The same step with other parameters: everything but times is shared."""
        for shared in ("events", "latencies"):  # as the cost models have them
            self._once(shared, dict)
        kept = {key: value for key, value in self._memo.items() if key not in ("host", "placed", "batch")}
        other = replace(self, adjustment=adjustment, _memo=kept)
        for key, value in list(kept.items()):
            if isinstance(value, BlockTable):
                kept[key] = value.retimed(other.timed(value.ops), other.host)
            elif isinstance(value, EventClasses):
                kept[key] = replace(value, times=other.timed(value.ops))
        return other

    def table(self, layout: Layout) -> BlockTable:
        """Timed blocks of the layout's shard (raises `LayoutError` if the model does not divide)."""
        key = (
            "table", layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.sequence_parallel, layout.tp_overlap,
        )  # fmt: skip
        return self._once(key, lambda: self._table(layout))

    def _table(self, layout: Layout) -> BlockTable:
        of_shard = blocks(self.model, self.job, Shard.of(layout))
        return block_table(of_shard, layout, self.job, self.cluster, self.timed, self.host)

    def variant_table(self, layout: Layout, variant: Variant, slices: int) -> BlockTable:
        """Timed blocks of a pass that computes several micro-batches, or one of `slices` slices."""
        span, index, _ = variant
        if slices == 1:
            return self.table(layout.replace(micro_batch=layout.micro_batch * span))
        key = ("slice", index, slices, layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.sequence_parallel)
        return self._once((*key, layout.tp_overlap), lambda: self._slice_table(layout, index, slices))

    def _slice_table(self, layout: Layout, index: int, slices: int) -> BlockTable:
        job = sliced_job(self.job, slices)
        of_shard = on_slice(blocks(self.model, job, Shard.of(layout)), index)
        return block_table(of_shard, layout, job, self.cluster, self.timed, self.host)

    # --- programs ---------------------------------------------------------------------------------

    def spec(self, layout: Layout, table: BlockTable) -> ProgramSpec:
        """The layout's program."""
        key = (
            "spec", layout.schedule, layout.pp, layout.vpp, layout.micro_batch * layout.dp,
            layout.dp * layout.cp > 1, layout.zero, layout.overlap_grad_reduce, layout.overlap_param_gather,
            layout.offload, get_schedule(layout.schedule).digest, layer_count(table.pairs),
        )  # fmt: skip
        tied = bool(getattr(self.model, "tied_embeddings", False))
        return self._once(key, lambda: program_spec(layout, self.job, layer_count(table.pairs), tied))

    def prepared(self, spec: ProgramSpec) -> Prepared:
        """The program's structure, built and compiled once."""
        return self._once(("prepared", spec), lambda: prepare(spec))

    def bundles(self, layouts: Sequence[Layout]) -> list[Bundle]:
        """Layouts sorted by the program that they share."""
        placed: dict[Layout, tuple[BlockTable, ProgramSpec]] = self._once("placed", dict)
        tables: list[BlockTable] = []
        # a stack of linear layers is cut into other blocks where it is split
        by_spec: dict[tuple[ProgramSpec, tuple[int, ...]], list[int]] = defaultdict(list)
        for lane, layout in enumerate(layouts):
            if layout not in placed or layout.schedule.startswith("file:"):  # files change
                table = self.table(layout)
                placed[layout] = table, self.spec(layout, table)
            table, spec = placed[layout]
            tables.append(table)
            by_spec[spec, table.repeats].append(lane)
        bundles = []
        for (spec, repeats), lanes in by_spec.items():
            table, stages = tables[lanes[0]], spec.n_stages
            counts = self._once(
                ("stages", stages, spec.segments, repeats),
                lambda t=table, n=stages, s=spec.segments: stage_blocks(t.pairs, n, s),
            )
            of_lanes = tuple(layouts[i] for i in lanes)
            bundles.append(Bundle(spec, tuple(lanes), of_lanes, tuple(tables[i] for i in lanes), counts))
        return bundles

    # --- composition --------------------------------------------------------------------------------

    def pass_s(self, bundle: Bundle, variant: Variant = PLAIN) -> dict[Kind, Float[np.ndarray, "lanes blocks"]]:
        """Seconds that a pass spends in each block, by kind of pass."""
        tables = bundle.tables
        slices = bundle.spec.scheduler.slices
        if variant[:2] != PLAIN[:2] or slices > 1:
            tables = [self.variant_table(layout, variant, slices) for layout in bundle.layouts]
        phase = np.stack([t.overlapped_phase_s if variant[2] else t.phase_s for t in tables])
        backward = phase[:, :, Phase.BACKWARD_INPUT] + recompute_s(phase, bundle.layouts)
        weight = phase[:, :, Phase.BACKWARD_WEIGHT]
        return {
            Kind.FORWARD: phase[:, :, Phase.FORWARD],
            Kind.BACKWARD: backward + weight,
            Kind.BACKWARD_INPUT: backward,
            Kind.BACKWARD_WEIGHT: weight,
        }

    def pass_times(self, layout: Layout) -> PassTimes:
        """What a scheduler needs to make an order of one's own for a layout: seconds of every stage's passes
        and of a transfer (the longest), one stage per device."""
        (bundle,) = self.bundles([layout.replace(schedule="zb-h1", vpp=1)])
        structure, durations_s = self.prepared(bundle.spec).structure, self.durations(bundle)[0]
        of_stage = bundle.counts.sum(axis=1)
        forward, of_input, weight = (
            (self.pass_s(bundle)[kind] @ of_stage.T)[0]
            for kind in (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        )
        sends = np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
        return PassTimes(forward, of_input, weight, float(durations_s[sends].max(initial=0.0)))

    def pass_classes(self, bundle: Bundle) -> PassClasses:
        """Blocks of each class of the bundle's program."""
        key = ("pass classes", bundle.spec, bundle.tables[0].repeats)
        return self._once(key, lambda: pass_classes(self.prepared(bundle.spec).structure, bundle.counts))

    def event_classes(self, bundle: Bundle, lane: int) -> EventClasses:
        """Events between blocks in each class, for one of the bundle's layouts."""
        lay = bundle.layouts[lane]
        key = (bundle.spec, lay.tp, lay.cp, lay.ep, lay.dp, lay.zero, lay.micro_batch, lay.sequence_parallel)
        return self._once(key, lambda: self._event_classes(bundle, lane))

    def _event_classes(self, bundle: Bundle, lane: int) -> EventClasses:
        layout, table = bundle.layouts[lane], bundle.tables[lane]
        structure = self.prepared(bundle.spec).structure
        spans = np.unique(structure.variants[:, 0]).tolist()
        events = communication_events(layout, table, bundle.spec, spans, bundle.counts, self.job, self.cluster)
        ops, class_index, op_index = event_entries(structure, events)
        return EventClasses(ops, self.timed(ops), class_index, op_index, structure.n_classes)

    def durations(self, bundle: Bundle) -> Float[np.ndarray, "lanes classes"]:
        """Seconds of every class of the bundle's program, a row per layout."""
        passes = self.pass_classes(bundle)
        out = np.stack([self.event_classes(bundle, lane).durations_s for lane in range(len(bundle.layouts))])
        for variant, of_kind in passes.of_variant.items():
            for kind, of_block in self.pass_s(bundle, variant).items():
                where = of_kind[kind]
                if len(where):
                    out[:, where] = of_block @ passes.blocks[where].T
        if bundle.spec.offload:
            self._add_host_copies(bundle, out)
        if not self.adjusted_steps:
            return out
        structure = self.prepared(bundle.spec).structure
        pairs = self._once(("beside", bundle.spec), lambda: beside_passes(bundle.spec, structure))
        return with_step_costs(out, self.host, self._scale(bundle), structure, pairs)

    @property
    def adjusted_steps(self) -> bool:
        """Whether a step takes anything else than its events and the gaps between them."""
        return self.host.costs_steps or bool(self.adjustment and self.adjustment.discrepancy)

    def step_factors(self, layout: Layout) -> tuple[float, float]:
        """What stragglers, and what runs like this one have shown beyond all parameters, multiply the step by."""
        adjustment = self.adjustment
        like = adjustment.discrepancy.mean(self.coordinates(layout)) if adjustment and adjustment.discrepancy else 0.0
        return self.host.slowest_of(layout.devices), float(np.exp(like))

    def _scale(self, bundle: Bundle) -> Float[np.ndarray, " lanes"]:
        return np.prod([self.step_factors(layout) for layout in bundle.layouts], axis=1)

    def coordinates(self, layout: Layout) -> Coordinates:
        """Where a layout of this model stands among runs."""
        parameters = self._once("parameters", lambda: parameter_count(self.model))
        return coordinates(parameters, self.job.seq_len, layout)

    def _add_host_copies(self, bundle: Bundle, out: Float[np.ndarray, "lanes classes"]) -> None:
        """Copies of a stage's activations to and from host memory, at the link's nominal rate."""
        structure = self.prepared(bundle.spec).structure
        where = np.flatnonzero(np.isin(structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD)))
        of_stage = saved_bytes(bundle.layouts, bundle.tables) @ bundle.counts.sum(axis=1).T
        moved = of_stage[:, structure.class_stage[where]] * structure.class_span[where]
        out[:, where] = moved / bundle.spec.scheduler.slices / host_bandwidth(self.cluster.device)

    def terms(self, bundle: Bundle) -> tuple[tuple[Bundle, float], ...]:
        """Programs whose weighted makespans add up to the step time.

        Without a flush between steps a step takes what a longer stream takes more than a shorter one.
        """
        spec = bundle.spec
        if spec.steps == 1:
            return ((bundle, 1.0),)
        shorter = replace(spec, steps=spec.steps // 2)
        weight = 1 / (spec.steps - shorter.steps)
        return (bundle, weight), (replace(bundle, spec=shorter), -weight)

    # --- many layouts at once -------------------------------------------------------------------------

    def memory(self, bundle: Bundle) -> MemoryBatch:
        """Memory of a bundle's layouts; needs the order of events but no times."""
        spec = bundle.spec
        key = (spec.schedule, spec.stages, spec.micro_batches, spec.chunks, spec.forward_only, spec.steps, spec.offload)
        live = self._once(("live", *key, spec.digest), lambda: live_state(spec))
        return memory_batch(bundle.layouts, bundle.tables, bundle.counts, live, self.job, self.framework)

    def peak_memory(self, layouts: Sequence[Layout]) -> tuple[Float[np.ndarray, " layouts"], list[str]]:
        """Peak bytes of every layout, and the category that takes most of them."""
        peak, largest = np.zeros(len(layouts)), [""] * len(layouts)
        for bundle in self.bundles(layouts):
            memory = self.memory(bundle)
            peak[list(bundle.lanes)] = memory.peak
            for lane, name in zip(bundle.lanes, memory.largest, strict=True):
                largest[lane] = name
        return peak, largest

    def lower_bound_s(self, layouts: Sequence[Layout]) -> Float[np.ndarray, " layouts"]:
        """A step time that no order of events can beat, from the passes alone and without any structure.

        Rank r starts no earlier than the first micro-batch has passed the ranks before it, works through all
        its passes, and after its last backward the gradient still has to pass those ranks again:
        max over r of m * sum over chunks (F + B) + sum over ranks s < r of (F_s + B_s), chunk 0. The second term
        holds for pipelines that start on rank 0 and flush; with R replicas of every stage a chunk sees m / R
        micro-batches. Passes of several micro-batches, slices and pairs may be faster than this says: 0 for those.
        """
        bound = np.zeros(len(layouts))
        for bundle in self.bundles(layouts):
            spec = bundle.spec
            of_block = self.pass_s(bundle)
            if not spec.scheduler.plain:
                continue
            both = of_block[Kind.FORWARD] + (0.0 if spec.is_forward_only else of_block[Kind.BACKWARD])
            by_chunk = (both @ bundle.counts.sum(axis=1).T)[:, spec.stage_map]
            bounds = spec.micro_batches // spec.replicas * by_chunk.sum(axis=2)
            if spec.steps == 1 and spec.replicas == 1 and (spec.stage_map[:, 0] == np.arange(spec.stages)).all():
                bounds = bounds + np.cumsum(by_chunk[:, :, 0], axis=1) - by_chunk[:, :, 0]
            bound[list(bundle.lanes)] = bounds.max(axis=1) * self._scale(bundle)
        return bound

    def evaluate(self, layouts: Sequence[Layout]) -> BatchResult:
        """Step time of every layout by full evaluation of its schedule (float32)."""
        bundles = self.bundles(layouts)
        terms = [term for bundle in bundles for term in self.terms(bundle)]
        specs = tuple(bundle.spec for bundle, _ in terms)
        # the joined tables are large, so only those of the last call are kept
        last = self._memo.get("batch")
        if not (isinstance(last, tuple) and last[0] == specs):
            last = (specs, ProgramBatch(tuple(self.prepared(spec).compiled for spec in specs)))
            self._memo["batch"] = last
        spans = makespan_many(last[1], [self.durations(bundle) for bundle, _ in terms])
        time_s = np.zeros(len(layouts))
        for (bundle, weight), span in zip(terms, spans, strict=True):
            time_s[list(bundle.lanes)] += weight * np.asarray(span)
        return BatchResult(time_s)


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


def recompute_s(
    phase: Float[np.ndarray, "lanes blocks phases"], layouts: Sequence[Layout]
) -> Float[np.ndarray, "lanes blocks"]:
    """Forward work repeated in backward under each layout's recompute mode."""
    extra = np.zeros(phase.shape[:2])
    for lane, layout in enumerate(layouts):
        if layout.recompute == "selective":
            extra[lane] = phase[lane, :, Phase.RECOMPUTE_SELECTIVE]
        elif layout.recompute == "full":
            extra[lane] = phase[lane, :, Phase.RECOMPUTE_FULL]
    return extra
