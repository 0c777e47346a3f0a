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
from perfmodel.prediction._attention_kernels import FORWARD_SHARE, training_forward
from perfmodel.prediction._blocks import RECOMPUTE, BlockDraft, BlockTable, Phase, draft_blocks, time_blocks
from perfmodel.prediction._bundle import BatchResult, Bundle, Division, Prepared, prepare
from perfmodel.prediction._classes import EventClasses, PassClasses, event_entries, pass_classes
from perfmodel.prediction._communication import CommunicationEvents, communication_events
from perfmodel.prediction._discrepancy import Coordinates, coordinates
from perfmodel.prediction._framework import Framework
from perfmodel.prediction._live import LiveState, live_state
from perfmodel.prediction._memory import CATEGORIES, MemoryBatch, host_bandwidth, memory_batch, saved_per_stage
from perfmodel.prediction._placement import Group, Placement
from perfmodel.prediction._program_spec import program_spec
from perfmodel.prediction._stages import fully_recomputed, layer_count, stage_blocks
from perfmodel.prediction._step_costs import beside_passes, with_step_costs
from perfmodel.prediction._variants import PLAIN, Variant, on_slice, sliced_job
from perfmodel.program import Kind, ProgramSpec
from perfmodel.schedule import PassTimes, get_schedule
from perfmodel.spec import Cluster, Collective, Job, Layout, Model, Op, PerStage
from perfmodel.timeline import ProgramBatch, makespan_many
from perfmodel.workload import BlockOps, Shard, blocks, parameter_count

T = TypeVar("T")
BLOCK_GROUPS: tuple[Group, ...] = ("tp", "cp", "ep")
"""Process groups whose collectives run inside blocks."""
_PASSES = [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT]
_WITHOUT_PRICES = ("blocks", "places", "draft", "spec", "prepared", "stages", "full", "pass classes", "events", "live")
"""Memoised results that hold at any price."""


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
            device = self.cluster.device
            times = event_times(new, self.cluster, self.kernels, self.collectives)
            times = times.scaled(np.array([self.framework.slowdown(op, device) for op in new]))
            times = times.at_most(*self._bounds(new))
            columns = (times.time_s.tolist(), times.lo_s.tolist(), times.hi_s.tolist(), times.provenance)
            known.update(zip(new, zip(*columns, strict=True), strict=True))
        rows = [known[op] for op in ops]
        time_s, lo_s, hi_s = np.array([row[:3] for row in rows], float).reshape(-1, 3).T
        times = EventTimes(time_s=time_s, lo_s=lo_s, hi_s=hi_s, provenance=tuple(row[3] for row in rows))
        return self.adjustment.times(ops, times, self._latency_s(ops)) if self.adjustment else times

    def _bounds(self, ops: Sequence[Op]) -> tuple[list[int], EventTimes]:
        """Which events cannot take longer than some others do, with those times (`training_forward`)."""
        bounded = [i for i, op in enumerate(ops) if training_forward(op, self.cluster.device, self.job) is not None]
        by = [training_forward(ops[i], self.cluster.device, self.job) for i in bounded]
        times = event_times([op for op in by if op is not None], self.cluster, self.kernels, self.collectives)
        return bounded, times.scaled(np.full(len(bounded), FORWARD_SHARE))

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
            elif isinstance(key, tuple) and key[0] == "event classes" and isinstance(value, dict):
                kept[key] = {lay: replace(one, times=other.timed(one.ops)) for lay, one in value.items()}
        return other

    def table(self, layout: Layout) -> BlockTable:
        """Timed blocks of the layout's shard (raises `LayoutError` if the model does not divide)."""
        key = ("table", *self._shard_key(layout), layout.tp_overlap)
        return self._once(key, lambda: self._table(layout, self.draft(layout)))

    def draft(self, layout: Layout) -> BlockDraft:
        """Blocks of the layout's shard, before they are timed."""
        return self._once(
            ("draft", *self._shard_key(layout)), lambda: self._draft(layout, self.job, self.shard_blocks(layout))
        )

    def shard_blocks(self, layout: Layout) -> Sequence[tuple[BlockOps, int]]:
        """Blocks of the layout's shard (raises `LayoutError` if the model does not divide)."""
        return self._once(("blocks", *_degrees(layout)), lambda: blocks(self.model, self.job, Shard.of(layout)))

    def _draft(self, layout: Layout, job: Job, of_shard: Sequence[tuple[BlockOps, int]]) -> BlockDraft:
        places = {group: Placement.of(group, layout) for group in BLOCK_GROUPS}
        return draft_blocks(of_shard, places, job, self.cluster)

    def _table(self, layout: Layout, draft: BlockDraft) -> BlockTable:
        return time_blocks(draft, self.timed(draft.ops), self.host, layout.tp if layout.tp_overlap else 1)

    def _shard_key(self, layout: Layout) -> tuple[Hashable, ...]:
        """What the events of a layout's blocks depend on."""
        ranks = layout.order, layout.tp, layout.cp, layout.dp, layout.ep, layout.pp
        places = self._once(
            ("places", *ranks),
            lambda: tuple(Placement.of(group, layout).on_network(self.cluster) for group in BLOCK_GROUPS),
        )
        return *_degrees(layout), *places

    def variant_table(self, layout: Layout, variant: Variant, slices: int) -> BlockTable:
        """Timed blocks of a pass that computes several micro-batches, or one of `slices` slices."""
        span, index, _ = variant
        if slices == 1:
            return self.table(layout.replace(micro_batch=layout.micro_batch * span))
        key = ("slice", index, slices, *self._shard_key(layout), layout.tp_overlap)
        return self._once(key, lambda: self._slice_table(layout, index, slices))

    def _slice_table(self, layout: Layout, index: int, slices: int) -> BlockTable:
        job = sliced_job(self.job, slices)
        of_shard = on_slice(blocks(self.model, job, Shard.of(layout)), index)
        return self._table(layout, self._draft(layout, job, of_shard))

    # --- programs ---------------------------------------------------------------------------------

    def spec(self, layout: Layout, table: BlockTable) -> ProgramSpec:
        """The layout's program."""
        key = (
            "spec", layout.schedule, layout.pp, layout.vpp, layout.micro_batch * layout.dp,
            layout.dp * layout.cp > 1, layout.zero, layout.overlap_grad_reduce, layout.overlap_param_gather,
            layout.offload, get_schedule(layout.schedule).digest, layer_count(table.pairs),
        )  # fmt: skip
        tied = bool(getattr(self.model, "tied_embeddings", False))

        def make() -> ProgramSpec:
            sends = "blocking" if self.framework.blocking_sends else "lag"
            spec = program_spec(layout, self.job, layer_count(table.pairs), tied, sends)
            return self._once(("spec", spec), lambda: spec)  # one object for equal ones

        return self._once(key, make)

    def prepared(self, spec: ProgramSpec) -> Prepared:
        """The program's structure, built and compiled once."""
        return self._once(("prepared", spec), lambda: prepare(spec))

    def bundles(self, layouts: Sequence[Layout]) -> list[Bundle]:
        """Layouts sorted by the program that they share."""
        placed: dict[Layout, tuple[BlockTable, ProgramSpec]] = self._once("placed", dict)
        found: list[tuple[BlockTable, ProgramSpec]] = []
        # a stack of linear layers is cut into other blocks where it is split
        alike: dict[tuple[int, Division], list[int]] = defaultdict(list)
        for lane, layout in enumerate(layouts):
            place = placed.get(layout)
            if place is None or layout.schedule.startswith("file:"):  # files change
                table = self.table(layout)
                place = placed[layout] = table, self.spec(layout, table)
            found.append(place)
            division = place[0].repeats, layout.partition, layout.recompute_full_layers
            alike[id(place[1]), division].append(lane)
        bundles = []
        for (_, division), lanes in alike.items():
            table, spec = found[lanes[0]]
            counts, full = self._once(
                ("stages", spec.n_stages, spec.segments, division),
                lambda t=table, s=spec, d=division: _divide(t, s, *d[1:]),
            )
            tables, of_lanes = tuple(found[i][0] for i in lanes), tuple(layouts[i] for i in lanes)
            bundles.append(Bundle(spec, tuple(lanes), of_lanes, tables, division, counts, full))
        return bundles

    # --- composition --------------------------------------------------------------------------------

    def phase_s(self, bundle: Bundle, variant: Variant = PLAIN) -> Float[np.ndarray, "lanes blocks phases"]:
        """Seconds that each phase of a pass spends in each block."""
        tables = bundle.tables
        slices = bundle.spec.scheduler.slices
        if variant[:2] != PLAIN[:2] or slices > 1:
            tables = [self.variant_table(layout, variant, slices) for layout in bundle.layouts]
        return np.stack([t.overlapped_phase_s if variant[2] else t.phase_s for t in tables])

    def full_recompute_s(self, bundle: Bundle, variant: Variant = PLAIN) -> Float[np.ndarray, "lanes blocks"]:
        """Seconds that a full recompute adds to a block's backward, beyond what the layout recomputes anyway."""
        phase = self.phase_s(bundle, variant)
        return phase[:, :, Phase.RECOMPUTE_FULL] - recompute_s(phase, bundle.layouts)

    def pass_s(self, bundle: Bundle, variant: Variant = PLAIN) -> dict[Kind, Float[np.ndarray, "lanes blocks"]]:
        """Seconds that a pass spends in each block, by kind of pass (`full_recompute_s` comes on top)."""
        phase = self.phase_s(bundle, variant)
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
        of_input = of_input + (self.full_recompute_s(bundle) @ bundle.full.sum(axis=1).T)[0]
        sends = np.isin(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
        return PassTimes(forward, of_input, weight, float(durations_s[sends].max(initial=0.0)))

    def pass_classes(self, bundle: Bundle) -> PassClasses:
        """Blocks of each class of the bundle's program."""
        key = ("pass classes", bundle.spec, bundle.division)
        return self._once(key, lambda: pass_classes(self.prepared(bundle.spec).structure, bundle.counts, bundle.full))

    def events(self, bundle: Bundle, lane: int) -> CommunicationEvents:
        """Events between blocks of one of the bundle's layouts."""
        spec, lay = bundle.spec, bundle.layouts[lane]
        spans = tuple(np.unique(self.prepared(spec).structure.variants[:, 0]).tolist())
        program = (spec.stage_map.tobytes(), spec.segments, spec.scheduler.slices, spans, spec.tied_embedding)
        key = ("events", *program, *bundle.division[:2], *_degrees(lay), lay.pp, lay.dp, lay.zero, lay.order)
        return self._once(
            key,
            lambda: communication_events(
                lay, bundle.tables[lane], spec, spans, bundle.counts, self.job, self.cluster
            ),
        )  # fmt: skip

    def event_classes(self, bundle: Bundle) -> list[EventClasses]:
        """Events between blocks in each class, for each of the bundle's layouts."""
        known: dict[Hashable, EventClasses] = self._once(("event classes", bundle.spec, *bundle.division[:2]), dict)
        found = []
        for lane, lay in enumerate(bundle.layouts):
            key = (*_degrees(lay), lay.dp, lay.zero, lay.order)
            if key not in known:
                known[key] = self._event_classes(bundle, lane)
            found.append(known[key])
        return found

    def _event_classes(self, bundle: Bundle, lane: int) -> EventClasses:
        events, structure = self.events(bundle, lane), self.prepared(bundle.spec).structure
        ops = tuple(events.ops)
        return EventClasses(ops, self.timed(ops), *event_entries(structure, events), structure.n_classes)

    def durations(self, bundle: Bundle) -> Float[np.ndarray, "lanes classes"]:
        """Seconds of every class of the bundle's program, a row per layout."""
        passes, layouts = self.pass_classes(bundle), bundle.layouts
        out = np.stack([events.durations_s for events in self.event_classes(bundle)])
        for variant, of_kind in passes.of_variant.items():
            phase = self.phase_s(bundle, variant)
            once = phase[:, :, _PASSES].transpose(0, 2, 1)
            once[:, Phase.BACKWARD_INPUT] += recompute_s(phase, layouts)
            out += once.reshape(len(layouts), -1) @ passes.weights[variant]
            if bundle.full.any():
                where = np.concatenate([of_kind[Kind.BACKWARD], of_kind[Kind.BACKWARD_INPUT]])
                out[:, where] += self.full_recompute_s(bundle, variant) @ passes.full[where].T
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
        of_stage = saved_per_stage(bundle.layouts, bundle.tables, bundle.counts, bundle.full)
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
        live = self.live(bundle.spec)
        return memory_batch(bundle.layouts, bundle.tables, bundle.counts, bundle.full, live, self.job, self.framework)

    def live(self, spec: ProgramSpec) -> LiveState:
        """What the program keeps on every rank."""
        key = (spec.schedule, spec.stages, spec.micro_batches, spec.chunks, spec.forward_only, spec.steps, spec.offload)
        return self._once(("live", *key, spec.digest), lambda: live_state(spec, spec.build_schedule()))

    def peak_memory(self, layouts: Sequence[Layout]) -> tuple[Float[np.ndarray, " layouts"], list[str]]:
        """Peak bytes of every layout, and the category that takes most of them."""
        peak, largest = np.zeros(len(layouts)), [""] * len(layouts)
        for bundle in self.bundles(layouts):
            memory = self.memory(bundle)
            peak[list(bundle.lanes)] = memory.peak
            for lane, part in zip(bundle.lanes, memory.largest.tolist(), strict=True):
                largest[lane] = CATEGORIES[part]
        return peak, largest

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


def _divide(
    table: BlockTable, spec: ProgramSpec, partition: PerStage, full_layers: PerStage
) -> tuple[Float[np.ndarray, "stages segments blocks"], Float[np.ndarray, "stages segments blocks"]]:
    """Blocks of every segment of every stage, and those of them that are recomputed in full."""
    counts = stage_blocks(table.pairs, spec.n_stages, spec.segments, partition)
    return counts, fully_recomputed(counts, table.layers, full_layers)


def _degrees(layout: Layout) -> tuple[int, ...]:
    return layout.tp, layout.cp, layout.ep, layout.micro_batch, layout.sequence_parallel


def recompute_s(
    phase: Float[np.ndarray, "lanes blocks phases"], layouts: Sequence[Layout]
) -> Float[np.ndarray, "lanes blocks"]:
    """Forward work repeated in backward under each layout's recompute mode."""
    extra = np.zeros(phase.shape[:2])
    for lane, layout in enumerate(layouts):
        if layout.recompute in RECOMPUTE:
            extra[lane] = phase[lane, :, RECOMPUTE[layout.recompute]]
    return extra
