"""The programs of a step: durations of their classes, and so their makespans, as functions of the parameters.

The programs of all micro-batch sizes are composed at once, their classes end to end: what JAX traces and compiles grows
neither with their number nor with the variants of their passes and the element types.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.prediction._classes import in_classes, passes_s, summed
from perfmodel.prediction._host_states import host_state_s
from perfmodel.prediction._overlap import BlockEvents, time_phases
from perfmodel.prediction._programs import Prepared
from perfmodel.prediction._step_costs import Beside, with_step_costs
from perfmodel.prediction.differentiable._division import Cuts, along
from perfmodel.prediction.differentiable._parameters import StepParameters
from perfmodel.prediction.differentiable._prices import Prices
from perfmodel.program import Kind
from perfmodel.timeline import makespan


class Tables(NamedTuple):
    """All numbers of the programs: those that differ in them alone are compiled once."""

    prices: Prices
    """Of all events."""
    events: BlockEvents
    """Of the blocks in every lane (`Programs.lanes`), with leading axes of element types and lanes."""
    event_price: Int[Any, "types lanes ops"]
    """Place of each of them in `prices`."""
    entry_at: Int[Any, " entries"]
    """Where events between blocks occur, in (type, knot, class) order."""
    entry_price: Int[Any, " entries"]
    knots: Float[Any, " knots"]
    """Layers per stage at which events between blocks are priced."""
    runs: Float[Any, "lanes 3 classes"]
    """See `PassClasses.runs`."""
    cuts: Cuts
    saved_bytes: Float[Any, "types steps 2 blocks"]
    """Activations left behind by a micro-batch, and by how much less where a layer recomputes all."""
    host_bytes_per_s: Float[Any, ""]
    host_state_s: Float[Any, "types 3 blocks"]
    """What states on the host add, by block (`host_block_s`)."""
    beside: Beside
    scale: Float[Any, " classes"]
    """What the step is multiplied by (`step_factors`)."""
    overhead_s: Float[Any, ""]
    host_units: Float[Any, "2"]
    """Host time of an operator and gap after a kernel, per second of their parameters (`StepProblem.host`)."""


@dataclass(frozen=True)
class Programs:
    """What is compiled of the programs."""

    prepared: tuple[Prepared, ...]
    steps: tuple[int, ...]
    """Which of the micro-batch sizes each is of."""
    weights: tuple[float, ...]
    """Of each makespan in the step time."""
    lanes: tuple[tuple[int, bool], ...]
    """Passes whose blocks are timed: which micro-batch size, and whether they run beside another pass."""
    mode: int
    """Recompute of the layers that do not recompute all (`RECOMPUTE_MODES`)."""
    loss: float
    """See `beside_loss`."""
    ring_steps: int
    """See `BlockEvents`."""
    absent: tuple[str, ...]
    """Kinds of collectives (fields of `BlockEvents`) of which there are none."""
    slices: int
    offloads: bool
    host_states: bool
    """Whether model states wait in host memory."""
    ranks: tuple[tuple[int, ...], ...]
    """Stages of every pipeline rank."""

    @cached_property
    def starts(self) -> list[int]:
        """First class of every program, and the end of the last."""
        return np.cumsum([0, *(program.structure.n_classes for program in self.prepared)]).tolist()

    def of_classes(self, name: str) -> Int[np.ndarray, " classes"]:
        """A field of the programs' structures, end to end."""
        return np.concatenate([getattr(program.structure, name) for program in self.prepared])

    def step_s(
        self, tables: Tables, x: StepParameters, log_rates: Float[Array, " r"], factors: Float[Array, " families"]
    ) -> Float[Array, " steps"]:
        """Seconds of the step at each micro-batch size."""
        durations = self._durations(tables, x, log_rates, factors)
        parts: list[list[tuple[Array, Array]]] = [[] for _ in range(1 + self.steps[-1])]
        for at, (program, weight) in enumerate(zip(self.prepared, self.weights, strict=True)):
            own = durations[self.starts[at] : self.starts[at + 1]]
            part = weight * makespan(program.compiled, own), weight * (program.rank_count @ own)
            parts[self.steps[at]].append(part)
        spans = [sum(span for span, _ in of_step) for of_step in parts]
        # the difference of two streams may not be shorter than the busiest rank (`rank_busy_s`)
        busy = [jnp.max(sum(b for _, b in of_step)) if len(of_step) > 1 else -jnp.inf for of_step in parts]
        return jnp.stack([jnp.maximum(*both) for both in zip(spans, busy, strict=True)])

    def _durations(
        self, tables: Tables, x: StepParameters, log_rates: Float[Array, " r"], factors: Float[Array, " families"]
    ) -> Float[Array, " classes"]:
        """Seconds of every class."""
        kind, stage, segment = (self.of_classes(f"class_{name}") for name in ("kind", "stage", "segment"))
        counts, full = tables.cuts.held(x.layers, x.recompute)
        seconds = tables.prices.seconds(log_rates, factors)
        plain_s, paired_s = self._phases_s(tables, x, seconds)
        phase_s = {lane: (paired_s if paired else plain_s)[:, lane] for lane, (_, paired) in enumerate(self.lanes)}
        blocks, again = (in_classes(stage, segment, some) for some in (counts, full))
        out = passes_s(phase_s, tables.runs, blocks, again, np.array([[self.mode]]))
        out = out + self._between_s(tables, x.layers, seconds, kind == Kind.OPTIMIZER, stage)
        if self.host_states:
            of_class = [
                host_state_s(one, kind, stage, segment, np.array(self.ranks), counts) for one in tables.host_state_s
            ]
            out = out + jnp.stack(of_class)
        if self.offloads:
            saved, spared = (jnp.einsum("sb,tib->tis", some.sum(axis=1), tables.saved_bytes[:, :, i])
                             for i, some in enumerate((counts, full)))  # fmt: skip
            step = np.repeat(self.steps, np.diff(self.starts))
            copies = np.isin(kind, (Kind.OFFLOAD, Kind.RELOAD)) * self.of_classes("class_span") / self.slices
            out = out + copies * (saved - spared)[:, step, stage] / tables.host_bytes_per_s * x.offload
        if len(out) > 1:
            out = (1 - x.fp8) * out[:1] + x.fp8 * out[1:]
        scale = tables.scale[None]
        return with_step_costs(out, tables.overhead_s, self.loss, scale, kind == Kind.OPTIMIZER, tables.beside)[0]

    def _phases_s(
        self, tables: Tables, x: StepParameters, seconds: Float[Array, " events"]
    ) -> tuple[Float[Array, "types lanes blocks phases"], Float[Array, "types lanes blocks phases"]]:
        """Seconds of every phase of the blocks, alone and beside another pass."""
        issue_s, gap_s = tables.host_units * jnp.stack([x.host_op_s, x.kernel_gap_s])

        none = dict.fromkeys(self.absent, np.zeros(tables.event_price.shape[-1], bool))

        def of_lane(events: BlockEvents, time_s: Float[Array, " ops"]) -> tuple[Array, Array]:
            found = time_phases(events._replace(ring_steps=self.ring_steps, **none), time_s, issue_s, gap_s)
            return found.phase_s, found.overlapped_phase_s

        return jax.vmap(jax.vmap(of_lane))(tables.events, seconds[tables.event_price])

    def _between_s(
        self,
        tables: Tables,
        layers: Float[Array, " stages"],
        seconds: Float[Array, " events"],
        optimizer: Any,
        stage: Int[np.ndarray, " classes"],
    ) -> Float[Array, "types classes"]:
        """Seconds of the events between blocks in every class, from those at the knots around its stage's layers."""
        types, n = tables.event_price.shape[0], tables.knots.shape[0]
        at_knots = summed(tables.entry_at, seconds[tables.entry_price], types * n * len(stage))
        ranks = np.array(self.ranks)
        of_rank = layers.at[ranks[:, 0]].set(layers[ranks].mean(axis=1))  # one update for all chunks of a rank
        weights = along(jnp.eye(n), jnp.stack([layers, of_rank]), tables.knots)[optimizer.astype(int), stage]
        return jnp.einsum("ck,tkc->tc", weights, at_knots.reshape(types, n, len(stage)))
