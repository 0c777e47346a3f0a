"""One program of a layout: durations of its classes, and so its makespan, as a function of the parameters."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.ops import Op
from perfmodel.prediction._classes import event_entries, in_classes, passes_s, summed
from perfmodel.prediction._communication import communication_events
from perfmodel.prediction._compose import Bundle, beside_in, bundle_passes
from perfmodel.prediction._host_states import host_state_s
from perfmodel.prediction._memory import BlockBytes, host_bandwidth
from perfmodel.prediction._overlap import BlockEvents, time_phases
from perfmodel.prediction._phases import leading_layers, modes_of
from perfmodel.prediction._price import beside_loss, priced_events, variant_times
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import Prepared, prepared
from perfmodel.prediction._step_costs import Beside, with_step_costs
from perfmodel.prediction._variants import Variant
from perfmodel.prediction.differentiable._division import Cuts, along
from perfmodel.prediction.differentiable._parameters import StepParameters
from perfmodel.prediction.differentiable._prices import Priced, Prices
from perfmodel.program import Kind
from perfmodel.spec import Layout
from perfmodel.timeline import makespan

MOST_KNOTS: Final = 12
"""Numbers of layers at which a stage's reductions, gathers and updates are priced; between them they are interpolated,
and they are nearly linear in what they carry."""


class Timed(NamedTuple):
    """Events and what they cost, under one element type."""

    blocks: tuple[tuple[BlockEvents, Prices], ...]
    """Of the blocks, for every variant of the passes."""
    between: Prices
    """Of the events between blocks."""
    entry_at: Int[Any, " entries"]
    """Where each of them occurs, in (knot, class) order."""
    entry_op: Int[Any, " entries"]


class Tables(NamedTuple):
    """All numbers of a program: programs that differ in them alone are compiled once."""

    timed: tuple[Timed, ...]
    """Under the job's 16-bit type, and under 8 bits where there are any."""
    cuts: Cuts
    knots: Float[Any, " knots"]
    """Layers per stage at which events between blocks are priced."""
    runs: tuple[Float[Any, "3 classes"], ...]
    """See `PassClasses.runs`, in the order of the variants."""
    beside: Beside
    saved_bytes: Float[Any, "2 blocks"]
    """Activations left behind by a micro-batch, and by how much less where a layer recomputes all."""
    host_bytes_per_s: Float[Any, ""]
    host_state_s: Float[Any, " classes"]
    scale: Float[Any, ""]
    """What the step is multiplied by (`step_factors`)."""
    overhead_s: Float[Any, ""]
    host_units: Float[Any, "2"]
    """Host time of an operator and gap after a kernel, per second of their parameters (`StepProblem.host`)."""
    rank_count: Float[Any, "ranks classes"]
    """See `Prepared`."""


@dataclass(frozen=True)
class Program:
    """What is compiled of a program."""

    prepared: Prepared
    weight: float
    """Of its makespan in the step time."""
    variants: tuple[Variant, ...]
    mode: int
    """Recompute of the layers that do not recompute all (`RECOMPUTE_MODES`)."""
    loss: float
    """See `beside_loss`."""
    slices: int
    offloads: bool
    ranks: tuple[tuple[int, ...], ...]
    """Stages of every pipeline rank."""

    def durations(
        self, tables: Tables, x: StepParameters, log_rates: Float[Array, " r"], factors: Float[Array, " families"]
    ) -> Float[Array, " classes"]:
        """Seconds of every class."""
        structure = self.prepared.structure
        kind, modes = structure.class_kind, np.array([[self.mode]])
        counts = tables.cuts.counts(x.layers)
        held = (counts * tables.cuts.layers).sum(axis=(1, 2))
        full = leading_layers(counts, tables.cuts.layers > 0, x.recompute * held)
        blocks, again = in_classes(structure, counts), in_classes(structure, full)
        runs = dict(zip(self.variants, tables.runs, strict=True))
        host_s = tables.host_units * jnp.stack([x.host_op_s, x.kernel_gap_s])
        each = []
        for timed in tables.timed:
            phase_s = {}
            for variant, (events, prices) in zip(self.variants, timed.blocks, strict=True):
                phases = time_phases(events, prices.seconds(log_rates, factors), host_s[0], host_s[1])
                phase_s[variant] = (phases.overlapped_phase_s if variant[2] else phases.phase_s)[None]
            between_s = self._between_s(timed, tables.knots, x.layers, log_rates, factors)
            each.append(between_s + passes_s(phase_s, runs, blocks, again, modes)[0])
        out = each[0] if len(each) == 1 else (1 - x.fp8) * each[0] + x.fp8 * each[1]
        if self.offloads:
            saved = counts.sum(axis=1) @ tables.saved_bytes[0] - full.sum(axis=1) @ tables.saved_bytes[1]
            copies_s = saved[structure.class_stage] * structure.class_span / self.slices / tables.host_bytes_per_s
            out = out + np.isin(kind, (Kind.OFFLOAD, Kind.RELOAD)) * copies_s * x.offload
        out = out + tables.host_state_s
        optimizer, scale = kind == Kind.OPTIMIZER, tables.scale[None]
        return with_step_costs(out[None], tables.overhead_s, self.loss, scale, optimizer, tables.beside)[0]

    def _between_s(
        self,
        timed: Timed,
        knots: Float[Array, " knots"],
        layers: Float[Array, " stages"],
        log_rates: Float[Array, " r"],
        factors: Float[Array, " families"],
    ) -> Float[Array, " classes"]:
        """Seconds of the events between blocks in every class, from those at the knots around its stage's layers."""
        structure = self.prepared.structure
        classes, n = structure.n_classes, knots.shape[0]
        seconds = timed.between.seconds(log_rates, factors)[timed.entry_op]
        at_knots = summed(timed.entry_at, seconds, n * classes).reshape(n, classes)
        of_class = layers[structure.class_stage]
        ranks = np.array(self.ranks)
        of_rank = layers.at[ranks[:, 0]].set(layers[ranks].mean(axis=1))  # one update for all chunks of a rank
        of_class = jnp.where(structure.class_kind == Kind.OPTIMIZER, of_rank[structure.class_stage], of_class)
        weights = along(jnp.eye(n), jnp.interp(of_class, knots, jnp.arange(n, dtype=layers.dtype)))
        return (weights * at_knots.T).sum(axis=1)

    def makespan(self, durations: Float[Array, " classes"]) -> Float[Array, ""]:
        """Seconds of the program."""
        return makespan(self.prepared.compiled, durations)


class Half(NamedTuple):
    """A program whose events are not priced yet."""

    program: Program
    tables: Tables
    """With `Timed` left out."""
    events: tuple[tuple[BlockEvents, ...], ...]
    """By element type and variant."""
    entries: tuple[tuple[Int[np.ndarray, " entries"], Int[np.ndarray, " entries"]], ...]
    asked: tuple[tuple[Priced, ...], ...]
    """By element type: of the variants, then of the events between blocks."""

    def priced(self, found: list[Prices]) -> Tables:
        """The tables with prices, those of `asked` in order, which are taken off the list."""
        timed = []
        for events, entries in zip(self.events, self.entries, strict=True):
            own = [found.pop(0) for _ in events]
            timed.append(Timed(tuple(zip(events, own, strict=True)), found.pop(0), *entries))
        return self.tables._replace(timed=tuple(timed))


def half_priced(
    problems: Sequence[StepProblem], bundles: Sequence[Bundle], weight: float, layers: Int[np.ndarray, " stages"],
    factor: float,
) -> Half:  # fmt: skip
    """A program of a layout, of what the public prediction composes it.

    Args:
        problems: of the job under each of its element types.
        bundles: of each, with the one layout as its only lane, which recomputes nothing in full.
        weight: of its makespan.
        layers: of every stage.
        factor: that the step is multiplied by.
    """
    problem, bundle = problems[0], bundles[0]
    spec, one, layout = bundle.spec, bundle.composed[0], bundle.layouts[0]
    setting, program, passes = problem.setting, prepared(bundle.spec), bundle_passes(problem, bundle)
    cuts, knots = Cuts.of(one.events, spec.segments), _knots(layers)
    variants, slices = tuple(passes.runs), spec.scheduler.slices
    events, entries, asked = [], [], []
    for own, its in zip(problems, bundles, strict=True):
        tables = [variant_times(own, layout, variant, slices) for variant in variants]
        ops, where, which = _between(own, its, cuts, knots, layers)
        events.append(tuple(table.events for table in tables))
        entries.append((where, which))
        of_blocks = [
            Priced(own, t.ops, _block_pricer(layout, v, slices)) for t, v in zip(tables, variants, strict=True)
        ]
        asked.append((*of_blocks, Priced(own, ops, lambda p, ops=ops: priced_events(p, ops).time_s)))
    kept = BlockBytes.of(bundle.tables, bundle.modes[:, 0], layout.pp > 1, problem.job, problem.framework)
    unit = replace(problem, framework=replace(problem.framework, host_op_s=1.0, kernel_gap_s=1.0)).host
    on_host = np.zeros(program.structure.n_classes)
    if layout.offload_states != "none":
        on_host = host_state_s(setting, layout, one.events, spec, program.structure, bundle.counts)
    found = Tables(
        timed=(),
        cuts=cuts,
        knots=knots.astype(float),
        runs=tuple(passes.runs.values()),
        beside=beside_in(setting, spec),
        saved_bytes=np.stack([kept.kept[0], (kept.kept - kept.least)[0]]),
        host_bytes_per_s=np.float64(host_bandwidth(problem.cluster.device) if spec.offload else 1.0),
        host_state_s=on_host,
        scale=np.float64(factor),
        overhead_s=np.float64(problem.host.step_overhead_s),
        host_units=np.array([unit.issue_s, unit.kernel_gap_s]),
        rank_count=program.rank_count,
    )
    form = Program(
        prepared=program,
        weight=weight,
        variants=variants,
        mode=int(modes_of([layout.recompute])[0]),
        loss=beside_loss(problem),
        slices=slices,
        offloads=spec.offload,
        ranks=tuple(map(tuple, spec.stage_map.tolist())),
    )
    return Half(form, found, tuple(events), tuple(entries), tuple(asked))


def _block_pricer(layout: Layout, variant: Variant, slices: int) -> Callable[[StepProblem], Float[np.ndarray, " n"]]:
    return lambda problem: variant_times(problem, layout, variant, slices).times.time_s


def _knots(layers: Int[np.ndarray, " stages"]) -> Int[np.ndarray, " knots"]:
    low, high = layers.min() // 2, min(2 * layers.max(), layers.sum())
    near = np.unique([layers - 1, layers, layers + 1])
    spread = np.unique(np.linspace(low, high, MOST_KNOTS).astype(int))
    found = np.unique([*near, *spread]) if high - low >= MOST_KNOTS else np.arange(low, high + 1)
    return found[(found >= 0) & (found <= layers.sum())]


def _between(
    problem: StepProblem,
    bundle: Bundle,
    cuts: Cuts,
    knots: Int[np.ndarray, " knots"],
    layers: Int[np.ndarray, " stages"],
) -> tuple[tuple[Op, ...], Int[np.ndarray, " entries"], Int[np.ndarray, " entries"]]:
    """Distinct events between blocks at all knots, and where each occurs (`Timed.entry_at`, `Timed.entry_op`)."""
    one, structure = bundle.composed[0], prepared(bundle.spec).structure
    spans = np.unique(structure.variants[:, 0]).tolist()
    index: dict[Op, int] = {}
    where, which = [], []
    starts = np.cumsum(layers) - layers
    for at, n in enumerate(knots.tolist()):
        counts = cuts.alike(n, starts)
        events = communication_events(
            one.ranks.layout, one.states, one.events, bundle.spec, spans, counts, problem.job, problem.cluster
        )
        classes, numbers = event_entries(structure, events)
        place = np.array([index.setdefault(op, len(index)) for op in events.ops], int)
        where.append(at * structure.n_classes + classes)
        which.append(place[numbers])
    return tuple(index), np.concatenate(where), np.concatenate(which)
