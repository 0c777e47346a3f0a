"""A chain of layers cut into pipeline stages, each under its own recompute: the problem as arrays.

The same chain is solved three ways: exactly by dynamic programming, by relaxation of cuts and
choices through the timeline, and by moving single layers; `perfmodel.planning.optimise.partition`
is the same for a real model's layouts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import permutations, product
from typing import Final

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from perfmodel.errors import PerfModelError
from perfmodel.planning.optimise._contiguous import Cuts, least_sum_plus_max
from perfmodel.planning.optimise._pipeline import descend, neighbours, spans
from perfmodel.planning.optimise._relax import Relaxation, Values
from perfmodel.planning.optimise._variables import Choices, Shares, Variable, WholeShares
from perfmodel.prediction import prepared
from perfmodel.program import Kind, ProgramSpec
from perfmodel.timeline import CompiledStructure, makespan_lanes

LEAST_LINK: Final = 0.02
_KICKS: Final = 20
_KICK: Final = 4
"""Random changes, and moves in each, from which descents start again."""
_TIMED = (Kind.FORWARD, Kind.BACKWARD, Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


@dataclass(frozen=True, eq=False)
class Chain:
    """Layers with their ways of recomputation, and the pipeline that they are cut for.

    Raises:
        PerfModelError: arrays that do not belong together, or fewer layers than stages.
    """

    forward_s: Float[np.ndarray, " layers"]
    backward_s: Float[np.ndarray, "modes layers"]
    """With what is recomputed."""
    saved_bytes: Float[np.ndarray, "modes layers"]
    """Kept for backward per micro-batch in flight."""
    state_bytes: Float[np.ndarray, " layers"]
    """Weights, gradients and optimizer."""
    in_flight: Int[np.ndarray, " stages"]
    """Micro-batches alive at once on every stage (1F1B: p - s at most)."""
    capacity_bytes: Float[np.ndarray, " stages"]
    slowness: Float[np.ndarray, " stages"]
    """Factor of the layers' times on each stage's device."""
    boundary_s: Float[np.ndarray, " layers"]
    """Transfer of what each layer hands to the next, one way, over a link as given."""
    micro_batches: int
    schedule: str = "1f1b"

    def __post_init__(self) -> None:
        """Check that the arrays belong together."""
        layers = len(self.forward_s)
        stages = len(self.in_flight)
        same_shape = (
            self.backward_s.shape == self.saved_bytes.shape and self.backward_s.shape[1] == layers
        )
        if not same_shape or len(self.state_bytes) != layers or len(self.boundary_s) != layers:
            raise PerfModelError("chain: forward, backward, saved and state need the same layers")
        if layers < stages:
            raise PerfModelError(f"chain: {layers} layers cannot fill {stages} stages")

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return len(self.in_flight)

    @property
    def layers(self) -> int:
        """Number of layers."""
        return len(self.forward_s)

    @property
    def modes(self) -> int:
        """Number of ways to recompute."""
        return len(self.backward_s)

    @cached_property
    def tables(
        self,
    ) -> tuple[Float[np.ndarray, "stages cuts cuts"], Int[np.ndarray, "stages cuts cuts"]]:
        """Seconds of forward and backward of every possible stage, and the mode: the fastest that
        fits."""
        # Shapes below are (stages, modes, cuts, cuts), or broadcast to that: a stage of layers i
        # to j - 1 is at [..., i, j].
        both_s = _between(_prefix(self.forward_s + self.backward_s))
        saved = self.in_flight[:, None, None, None] * _between(_prefix(self.saved_bytes))
        need = saved + _between(_prefix(self.state_bytes))
        fits = need <= self.capacity_bytes[:, None, None, None]

        # A stage has at least one layer. What is impossible takes for ever.
        cut = np.arange(self.layers + 1)
        possible = fits & (cut[:, None] < cut)
        seconds = np.where(possible, both_s * self.slowness[:, None, None, None], np.inf)
        mode = seconds.argmin(axis=1)
        return np.take_along_axis(seconds, mode[:, None], axis=1)[:, 0], mode

    @property
    def forward_table_s(self) -> Float[np.ndarray, "stages cuts cuts"]:
        """Seconds of every stage's forward."""
        return _between(_prefix(self.forward_s)) * self.slowness[:, None, None]

    def exact(self) -> list[Cuts]:
        """Minimise sum + (m - 1) max by dynamic programming: the best cut and those near it."""
        seconds, _ = self.tables
        return least_sum_plus_max(
            (seconds + self._both_sends)[None], (self.micro_batches - 1) * seconds[None]
        )

    def brute_force(self) -> float:
        """Minimise sum + (m - 1) max over all partitions, one by one."""
        seconds, _ = self.tables
        best = np.inf
        for inner in product(range(1, self.layers), repeat=self.stages - 1):
            # Cuts in order and none twice: every stage has a layer.
            if list(inner) == sorted(set(inner)):
                stages = np.arange(self.stages), [0, *inner], [*inner, self.layers]
                slowest = (self.micro_batches - 1) * seconds[stages].max()
                best = min(best, (seconds + self._both_sends)[stages].sum() + slowest)
        return float(best)

    @property
    def _both_sends(self) -> Float[np.ndarray, "1 1 cuts"]:
        """Seconds of both transfers at every cut; 0 after the last layer."""
        return np.append(0.0, 2 * np.append(self.boundary_s[:-1], 0.0))[None, None]

    @property
    def program(self) -> CompiledStructure:
        """The schedule's structure, one for all chains of the session that share it."""
        spec = ProgramSpec(
            schedule=self.schedule,
            stages=self.stages,
            micro_batches=self.micro_batches,
            optimizer=False,
        )
        return prepared(spec).compiled

    def relaxation(self, *, links: bool = False, stages: bool = True) -> Relaxation:
        """The timeline's makespan over `layers` per stage and `mode` (unless not `stages`), and
        `links`: the share of every hop in a fixed sum of bandwidths. What is no unknown must be
        given."""
        variables: dict[str, Variable] = {}
        if stages:
            variables = {
                "layers": WholeShares(self.stages, self.layers, least=1),
                "mode": Choices(self.stages, self.modes),
            }
        if links:
            variables["links"] = Shares(self.stages - 1, self.stages - 1.0, least=LEAST_LINK)
        row, column, timed = _entries(self.program)
        constants = {
            "forward": _prefix(self.forward_s),
            "backward": _prefix(self.backward_s),
            "saved": _prefix(self.saved_bytes),
            "state": _prefix(self.state_bytes),
            "in_flight": self.in_flight,
            "capacity": self.capacity_bytes,
            "slowness": self.slowness,
            "boundary": np.append(0.0, self.boundary_s),
            "row": row,
            "column": column,
            "timed": timed,
        }
        return Relaxation(
            variables, self.program, _durations, constants, limits=_limits if stages else None
        )

    def mode_of(self, partition: tuple[int, ...]) -> Float[np.ndarray, "stages modes"] | None:
        """The fastest mode of each stage that fits, one-hot; None where none does."""
        seconds, mode = self.tables
        at = spans(partition)
        return np.eye(self.modes)[mode[at]] if np.isfinite(seconds[at]).all() else None

    def durations_s(
        self,
        partitions: Sequence[tuple[int, ...]],
        links: Float[np.ndarray, "partitions hops"] | float = 1.0,
    ) -> Float[np.ndarray, "partitions classes"]:
        """Seconds of the program's classes for partitions, each stage in its fastest mode that fits
        (else infinite)."""
        # `seconds` has forward and backward in one: forward is taken off, for the two are events
        # of their own in the timeline.
        end = np.cumsum(partitions, axis=1)
        start = end - np.array(partitions)
        stage = np.arange(self.stages)
        seconds, _ = self.tables
        forward = _prefix(self.forward_s)
        forward_s = (forward[end] - forward[start]) * self.slowness
        sends_s = self.boundary_s[end[:, :-1] - 1] / links
        # The last stage sends nothing.
        sends_s = np.concatenate([sends_s, np.zeros((len(end), 1))], axis=1)
        table = np.stack([forward_s, seconds[stage, start, end] - forward_s, sends_s])
        row, column, timed = _entries(self.program)
        return np.where(timed > 0, table[row, :, column].T, 0.0)

    def step_s(self, partitions: Sequence[tuple[int, ...]]) -> Float[np.ndarray, " partitions"]:
        """Makespans of partitions, each stage in its fastest mode that fits; infinite where none
        does."""
        durations = self.durations_s(partitions)
        fits = np.isfinite(durations).all(axis=1)
        step_s = np.full(len(durations), np.inf)
        if fits.any():
            step_s[fits] = makespan_lanes(self.program, durations[fits])
        return step_s

    def moved(self, partition: tuple[int, ...]) -> Iterable[tuple[int, ...]]:
        """Partitions with one or two layers moved from any stage to any other."""
        yield from neighbours(partition, self.stages)
        for giver, taker in permutations(range(self.stages), 2):
            if partition[giver] > 2:
                layers = list(partition)
                layers[giver] -= 2
                layers[taker] += 2
                yield tuple(layers)

    def improved(self, start: Iterable[tuple[int, ...]]) -> tuple[tuple[int, ...], float]:
        """The best of `start` after moving layers as long as that shortens the makespan.

        Descends from the best eight, then from random changes of the best (iterated local search,
        Lourenço et al. 2003).

        Raises:
            NothingFitsError: none of `start` fits.
        """
        start = list(start)
        ranked = sorted(zip(self.step_s(start).tolist(), start, strict=True))
        ends = [descend([partition], self.moved, self.step_s) for _, partition in ranked[:8]]
        first = min(ends, key=lambda end: end.value)
        best, best_s = first.best, first.value
        rng = np.random.default_rng(0)
        for _ in range(_KICKS):
            # A few random moves leave the local minimum, without leaving its neighbourhood.
            kicked = np.array(best)
            for giver, taker in rng.integers(self.stages, size=(_KICK, 2)):
                if kicked[giver] > 1:
                    kicked[giver] -= 1
                    kicked[taker] += 1
            kicked_partition = tuple(kicked.tolist())
            if np.isfinite(self.step_s([kicked_partition])[0]):
                end = descend([kicked_partition], self.moved, self.step_s)
                if end.value < best_s:
                    best, best_s = end.best, end.value
        return best, best_s


def _durations(values: Values) -> Float[Array, " classes"]:
    """Seconds of the event classes (JAX) for a relaxed partition: a cut layer counts by its shares,
    and recompute modes are mixed."""
    forward_s = _stage_sums(values, values["forward"]) * values["slowness"]
    backward_s = _mixed(values, values["backward"]) * values["slowness"]
    # Cuts are real numbers here: between two layers the transfer is interpolated.
    boundary_s = values["boundary"]
    cuts = jnp.cumsum(values["layers"])[:-1]
    send_s = jnp.interp(cuts, jnp.arange(len(boundary_s)), boundary_s)
    if "links" in values:
        send_s = send_s / values["links"]
    send_s = jnp.append(send_s, 0.0)
    table = jnp.stack([forward_s, backward_s, send_s])
    return table[values["row"], values["column"]] * values["timed"]


def _limits(values: Values) -> Float[Array, " stages"]:
    """Share by which each stage exceeds its memory."""
    saved = _mixed(values, values["saved"]) * values["in_flight"]
    return (_stage_sums(values, values["state"]) + saved) / values["capacity"] - 1


def _stage_sums(values: Values, prefix: Float[Array, " cuts"]) -> Float[Array, " stages"]:
    """Sums over every stage's layers from sums over all layers before a cut."""
    layers = len(prefix) - 1
    # The ends are fixed: rounding of the shares must not lose a part of a layer.
    cuts = jnp.concatenate(
        [jnp.zeros(1), jnp.cumsum(values["layers"])[:-1], jnp.array([float(layers)])]
    )
    return jnp.diff(jnp.interp(cuts, jnp.arange(layers + 1), prefix))


def _mixed(values: Values, prefix: Float[Array, "modes cuts"]) -> Float[Array, " stages"]:
    """Sums over every stage's layers, modes mixed by their shares."""
    by_mode = jnp.stack([_stage_sums(values, prefix_of_mode) for prefix_of_mode in prefix])
    return (values["mode"].T * by_mode).sum(axis=0)


def _entries(
    program: CompiledStructure,
) -> tuple[Int[np.ndarray, " classes"], Int[np.ndarray, " classes"], Float[np.ndarray, " classes"]]:
    """Row and column of each event class in a table of forwards, backwards and transfers by
    stage."""
    structure = program.structure
    row = np.full(structure.n_classes, 2)
    row[structure.class_kind == Kind.FORWARD] = 0
    row[structure.class_kind == Kind.BACKWARD] = 1
    # A backward transfer over a hop belongs to the stage before the hop, as the forward one does.
    column = np.maximum(structure.class_stage - (structure.class_kind == Kind.SEND_BACKWARD), 0)
    return row, column, np.isin(structure.class_kind, _TIMED).astype(float)


def _prefix(per_layer: Float[np.ndarray, "*some layers"]) -> Float[np.ndarray, "*some cuts"]:
    """Sums over all layers before each cut."""
    return np.concatenate(
        [np.zeros((*per_layer.shape[:-1], 1)), np.cumsum(per_layer, axis=-1)], axis=-1
    )


def _between(prefix: Float[np.ndarray, "*some cuts"]) -> Float[np.ndarray, "*some cuts cuts"]:
    """Sums over layers i to j - 1, indexed [..., i, j]."""
    return prefix[..., None, :] - prefix[..., :, None]
