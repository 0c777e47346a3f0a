"""The programs of a step: durations of their classes and makespans as functions of the parameters.

The programs of all micro-batch sizes are composed at once, their classes end to end: what JAX
traces and compiles grows neither with their number nor with the variants of their passes and the
element types.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.prediction._communication import summed
from perfmodel.prediction._programs import Prepared
from perfmodel.prediction._step_costs import Overlap, with_step_costs
from perfmodel.prediction.blocks import ShardBlocks
from perfmodel.prediction.differentiable._prices import Prices, StepParameters
from perfmodel.prediction.host import host_state_s
from perfmodel.prediction.layer_copies import CopyClasses, LayerCopies
from perfmodel.prediction.overlap import BlockEvents, time_phases
from perfmodel.prediction.phases import block_passes, in_classes, passed_s, passes_s
from perfmodel.program import Kind, by_layer, is_of_kind, segment_sizes
from perfmodel.schedule import leading_layers
from perfmodel.timeline import makespan


class Cuts(NamedTuple):
    """A model divided between layers: blocks of each stage and segment, as a function that JAX can
    trace.

    Whole numbers of layers give what `stage_blocks` assigns; between them blocks are interpolated
    along the model, so that a cut inside a layer gives both stages their part of it.
    """

    cumulative: Float[Any, "layers+1 blocks"]
    """Blocks before each layer, without those before the first and after the last."""
    ends: Float[Any, "2 blocks"]
    """Blocks before the first layer, and after the last."""
    bounds: Float[Any, "layers+1 segments+1"]
    """First layer of each segment, for stages of each number of layers, and the end of the last
    segment."""
    layers: Float[Any, " blocks"]
    """1 for blocks that are layers."""

    @classmethod
    def of(cls, blocks: ShardBlocks, segments: int) -> "Cuts":
        """Divide a shard's blocks into stages with this many segments."""
        before, cumulative, after = by_layer(blocks.pairs)
        bounds = np.cumsum(
            [np.append(0, segment_sizes(n, segments)) for n in range(len(cumulative))], axis=1
        )
        return cls(
            cumulative, np.stack([before, after]), bounds.astype(float), blocks.layers.astype(float)
        )

    def counts(self, layers: Float[Array, " stages"]) -> Float[Array, "stages segments blocks"]:
        """Blocks of each segment of each stage, from the layers per stage."""
        starts = jnp.cumsum(layers) - layers
        counts = jnp.diff(
            along(self.cumulative, starts[:, None] + along(self.bounds, layers)), axis=1
        )
        # The head goes with the segment that ends with the last layer.
        last = self.bounds.shape[1] - 2
        filled = jnp.clip(jnp.ceil(layers[-1]).astype(int) - 1, 0, last)
        return counts.at[0, 0].add(self.ends[0]).at[-1, filled].add(self.ends[1])

    def counts_and_recomputed(
        self, layers: Float[Array, " stages"], recompute: Float[Array, " stages"]
    ) -> tuple[Float[Array, "stages segments blocks"], Float[Array, "stages segments blocks"]]:
        """`counts`, and the part of them that is recomputed in full."""
        counts = self.counts(layers)
        of_stage = (counts * self.layers).sum(axis=(1, 2))
        return counts, leading_layers(counts, self.layers > 0, recompute * of_stage)

    def equal_stages(
        self, layers: int, starts: Int[np.ndarray, " stages"]
    ) -> Float[np.ndarray, "stages segments blocks"]:
        """Blocks of stages that all have this many layers and start where the actual ones do, even
        beyond the model's end."""
        begin = np.clip(starts, 0, len(self.cumulative) - 1 - layers)[:, None]
        counts = np.diff(self.cumulative[begin + self.bounds[layers].astype(int)], axis=1)
        counts[0, 0] += self.ends[0]
        # The head goes with the segment that ends with the last layer.
        last = min(max(layers - 1, 0), counts.shape[1] - 1)
        counts[-1, last] += self.ends[1]
        return counts


def along(
    table: Float[Array, "rows columns"],
    places: Float[Array, "*places"],
    knots: Float[Any, " rows"] | None = None,
) -> Float[Array, "*places columns"]:
    """Interpolate rows of a table linearly between knots (default 0, 1, 2 ...), and extrapolate
    beyond them.

    At inner knots the slope is that from above, towards the next row. The mean of both sides would
    be the derivative of neither: where layers differ, a stage that gets one more gets the next
    layer, not half of it and half of its last.
    """
    rows = len(table)
    if rows == 1:
        return jnp.broadcast_to(table[0], (*places.shape, table.shape[1]))
    positions = (
        jnp.arange(rows, dtype=places.dtype) if knots is None else jnp.asarray(knots, places.dtype)
    )

    # Start from the first row and add the share of every step to the next row that has been passed.
    low = np.zeros(rows - 1)
    high = np.ones(rows - 1)
    low[0], high[-1] = -np.inf, np.inf
    share = (places[..., None] - positions[:-1]) / jnp.diff(positions)
    # A clip would share the gradient at its ends between both sides.
    passed = jnp.where(share >= high, high, jnp.where(share < low, low, share))
    return table[0] + passed @ jnp.diff(table, axis=0)


def greatest(values: Float[Array, " n"]) -> Float[Array, ""]:
    """Return the greatest value; its derivative is that of the first value that equals it.

    `jnp.max` shares its derivative among the values that equal the greatest, and divides by their
    number. A compiler may compute `values` twice, once for the comparison, and round them
    differently: then none is equal, and the derivative is 0 / 0.
    """
    return values[jnp.argmax(values)]


class Tables(NamedTuple):
    """All numeric data of the programs; programs that differ only in these share a compilation."""

    prices: Prices
    """Prices of all events."""
    events: BlockEvents
    """Events of the blocks in every lane (`Programs.lanes`), with leading axes of element types and
    lanes."""
    event_price: Int[Any, "types lanes ops"]
    """Position of each event's price in `prices`."""
    entry_at: Int[Any, " entries"]
    """Positions of the events between blocks, in (type, knot, class) order."""
    entry_price: Int[Any, " entries"]
    knots: Float[Any, " knots"]
    """Layers per stage at which events between blocks are priced."""
    runs: Float[Any, "lanes 3 classes"]
    """Whether a class of a variant runs each direction of its blocks, as in `PassClasses.runs`."""
    cuts: Cuts
    saved_bytes: Float[Any, "types steps 2 blocks"]
    """Bytes of activations that a micro-batch saves, and the reduction of these bytes for a layer
    recomputed in full."""
    host_bytes_per_s: Float[Any, ""]
    copies: LayerCopies
    """Copies of single layers' activations; none where no layers are offloaded."""
    copy_classes: CopyClasses
    host_state_s: Float[Any, "types 4 blocks"]
    """Seconds that states on the host add, by block (`host_block_s`)."""
    beside: Overlap
    scale: Float[Any, " classes"]
    """Factor of the step time (`step_factors`)."""
    overhead_s: Float[Any, ""]
    host_units: Float[Any, "2"]
    """Host time of an operator and gap after a kernel, per second of their parameters
    (`StepProblem.adjusted_framework`)."""


class Times(NamedTuple):
    """Times of the programs' parts."""

    phase_s: Float[Any, "lanes types blocks phases"]
    """Seconds of the blocks' phases."""
    at_knots: Float[Any, "types knots classes"]
    """Seconds of the events between blocks in every class, for stages with the number of layers of
    each knot."""


@dataclass(frozen=True)
class Programs:
    """The static part of the programs, which determines the compilation."""

    prepared: tuple[Prepared, ...]
    steps: tuple[int, ...]
    """Index of each program's micro-batch size."""
    weights: tuple[float, ...]
    """Weight of each makespan in the step time."""
    lanes: tuple[tuple[int, bool], ...]
    """Passes whose blocks are timed, by micro-batch size and by whether they overlap with another
    pass."""
    mode: int
    """Recompute of the layers that do not recompute all (`RECOMPUTE_MODES`)."""
    loss: float
    """Slowdown of passes beside reductions and gathers (`overlap_loss`)."""
    ring_steps: int
    """Number of parts into which `tp_overlap` cuts a collective, as in `BlockEvents`."""
    absent: tuple[str, ...]
    """Kinds of collectives (fields of `BlockEvents`) that do not occur."""
    slices: int
    offloads: bool
    offloads_layers: bool
    host_states: bool
    """Whether model states wait in host memory."""
    ranks: tuple[tuple[int, ...], ...]
    """Stages of every pipeline rank."""

    @cached_property
    def starts(self) -> list[int]:
        """First class of every program, and the end of the last."""
        return np.cumsum([0, *(program.structure.n_classes for program in self.prepared)]).tolist()

    def of_classes(self, name: str) -> Int[np.ndarray, " classes"]:
        """A field of the programs' structures, concatenated."""
        return np.concatenate([getattr(program.structure, name) for program in self.prepared])

    def times(
        self,
        tables: Tables,
        x: StepParameters,
        log_rates: Float[Array, " r"],
        factors: Float[Array, " families"],
    ) -> Times:
        """Times at some rates, latencies, host times and corrections."""
        seconds = tables.prices.seconds(log_rates, factors)
        issue_s, gap_s = tables.host_units * jnp.stack([x.host_op_s, x.kernel_gap_s])

        # Blocks: all lanes and element types at once. What is known before tracing, such as kinds
        # of collectives that do not occur, makes the compiled function smaller.
        all_false = dict.fromkeys(self.absent, np.zeros(tables.event_price.shape[-1], bool))

        def of_lane(events: BlockEvents, time_s: Float[Array, " ops"]) -> tuple[Array, Array]:
            phases = time_phases(
                events._replace(ring_steps=self.ring_steps, **all_false), time_s, issue_s, gap_s
            )
            return phases.phase_s, phases.paired.phase_s

        plain_s, paired_s = jax.vmap(jax.vmap(of_lane))(tables.events, seconds[tables.event_price])
        phase_s = jnp.stack(
            [
                (paired_s if is_paired else plain_s)[:, i]
                for i, (_, is_paired) in enumerate(self.lanes)
            ]
        )
        shape = tables.event_price.shape[0], len(tables.knots), self.starts[-1]
        at_knots = summed(tables.entry_at, seconds[tables.entry_price], prod(shape))
        return Times(phase_s, at_knots.reshape(shape))

    def durations(
        self, tables: Tables, x: StepParameters, times: Times
    ) -> Float[Array, " classes"]:
        """Seconds of each class."""
        kind = self.of_classes("class_kind")
        stage = self.of_classes("class_stage")
        segment = self.of_classes("class_segment")
        step_of_class = np.repeat(self.steps, np.diff(self.starts))
        optimizer = kind == Kind.OPTIMIZER
        ranks = np.array(self.ranks)

        # Passes, from the phases of the blocks that each class runs through.
        counts, full = tables.cuts.counts_and_recomputed(x.layers, x.recompute)
        blocks = in_classes(stage, segment, counts)
        recomputed = in_classes(stage, segment, full)
        runs = dict(enumerate(tables.runs))
        weights = {lane: block_passes(runs_of_lane, blocks) for lane, runs_of_lane in runs.items()}
        durations_s = passes_s(
            dict(enumerate(times.phase_s)), weights, runs, recomputed, np.array([[self.mode]])
        )

        # Events between blocks, interpolated between knots of the number of layers. A rank updates
        # all of its chunks at once, so the optimizer's step goes by the mean of their layers.
        of_rank = x.layers.at[ranks[:, 0]].set(x.layers[ranks].mean(axis=1))
        knot_weights = along(
            jnp.eye(len(tables.knots)), jnp.stack([x.layers, of_rank]), tables.knots
        )
        durations_s = durations_s + jnp.einsum(
            "ck,tkc->tc", knot_weights[optimizer.astype(int), stage], times.at_knots
        )

        # The host: states in its memory, copies of activations, waits for those of single layers.
        if self.host_states:
            state_s = [
                host_state_s(block_s, kind, stage, segment, ranks, counts)
                for block_s in tables.host_state_s
            ]
            durations_s = durations_s + jnp.stack(state_s)
        if self.offloads:
            saved = jnp.einsum("sb,tib->tis", counts.sum(axis=1), tables.saved_bytes[:, :, 0])
            spared = jnp.einsum("sb,tib->tis", full.sum(axis=1), tables.saved_bytes[:, :, 1])
            copies = (
                is_of_kind(kind, (Kind.OFFLOAD, Kind.RELOAD))
                * self.of_classes("class_span")
                / self.slices
            )
            copied_bytes = (saved - spared)[:, step_of_class, stage]
            durations_s = durations_s + copies * copied_bytes / tables.host_bytes_per_s * x.offload
        if self.offloads_layers:
            for lane, (step, _) in enumerate(self.lanes):
                durations_s = durations_s + self._copy_waits_s(
                    tables, times.phase_s[lane], step
                ) * (step_of_class == step)

        # In between element types durations are mixed; then come the costs of the step beyond its
        # events.
        if len(durations_s) > 1:
            durations_s = (1 - x.fp8) * durations_s[:1] + x.fp8 * durations_s[1:]
        updates = np.flatnonzero(optimizer)
        return with_step_costs(
            durations_s, tables.overhead_s, self.loss, tables.scale[None], updates, tables.beside
        )[0]

    def _copy_waits_s(
        self, tables: Tables, phase_s: Float[Array, "types blocks phases"], step: int
    ) -> Float[Array, "types classes"]:
        """Seconds that passes wait for copies of layers' activations, if all had one micro-batch
        size."""
        passed = passed_s(phase_s, np.array([[self.mode]]))
        waits = [
            tables.copy_classes.seconds(
                tables.copies,
                tables.saved_bytes[of_type, step, 0],
                tables.host_bytes_per_s,
                forward,
                backward + weight,
            )
            for of_type, (forward, backward, weight) in enumerate(passed)
        ]
        return jnp.stack(waits)

    def step_s(self, durations: Float[Array, " classes"]) -> Float[Array, " sizes"]:
        """Seconds of the step at each micro-batch size."""
        spans: list[list[Array]] = [[] for _ in range(1 + self.steps[-1])]
        busy: list[list[Array]] = [[] for _ in range(1 + self.steps[-1])]
        for part, (program, weight) in enumerate(zip(self.prepared, self.weights, strict=True)):
            seconds = durations[self.starts[part] : self.starts[part + 1]]
            spans[self.steps[part]].append(weight * makespan(program.compiled, seconds))
            busy[self.steps[part]].append(weight * (seconds @ program.rank_count.T))
        step_s_of_sizes = []
        for step_spans, step_busy in zip(spans, busy, strict=True):
            # The difference of two streams may not be shorter than the busiest rank
            # (`rank_busy_s`).
            least_s = greatest(jnp.asarray(sum(step_busy))) if len(step_busy) > 1 else -jnp.inf
            step_s_of_sizes.append(jnp.maximum(sum(step_spans), least_s))
        return jnp.stack(step_s_of_sizes)
