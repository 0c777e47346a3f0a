"""What the duration classes of a program hold: blocks of the model, or events between them."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from perfmodel.cost import EventTimes
from perfmodel.ops import Op
from perfmodel.prediction._communication import CommunicationEvents
from perfmodel.prediction._phases import PASS_KINDS, PASSED, PHASES, Phase, full_recompute_s, passed_s
from perfmodel.prediction._sends import NO_EVENT
from perfmodel.prediction._variants import Variant
from perfmodel.program import WHOLE, Kind, Structure


@dataclass(frozen=True, eq=False)
class PassClasses:
    """The classes that run through blocks."""

    blocks: Float[np.ndarray, "classes blocks"]
    """Blocks in the part of the model that a class passes; zero for classes of other kinds."""
    full: Float[np.ndarray, "classes blocks"]
    """Those of them that are recomputed in full whatever the layout says of the others."""
    of_variant: dict[Variant, dict[Kind, Int[np.ndarray, " some"]]]
    """Classes of each kind of pass in each variant that occurs."""

    @cached_property
    def runs(self) -> dict[Variant, Float[np.ndarray, "3 classes"]]:
        """For each variant, whether each class runs forward, input gradient and weight gradient of its blocks."""
        found = {}
        for variant, of_kind in self.of_variant.items():
            found[variant] = np.zeros((len(PASSED), len(self.blocks)))
            for kind, where in of_kind.items():
                found[variant][np.array(PHASES[kind])[:, None], where] = 1.0
        return found

    @cached_property
    def weights(self) -> dict[Variant, Float[np.ndarray, "passed_blocks classes"]]:
        """How often each class of each variant runs through each phase of every block (`block_passes`)."""
        return {variant: block_passes(runs, self.blocks) for variant, runs in self.runs.items()}

    @cached_property
    def some_full(self) -> bool:
        """Whether any block is recomputed in full whatever the layout says."""
        return bool(self.full.any())


def block_passes(
    runs: Float[Any, "3 classes"], blocks: Float[Any, "classes blocks"]
) -> Float[Any, "passed_blocks classes"]:
    """How often each class runs through the phases `PASSED` of every block, phase by phase."""
    return (runs[:, None, :] * blocks.T).reshape(-1, len(blocks))


def passes_s(
    phase_s: Mapping[Any, Float[Any, "lanes blocks phases"]],
    weights: Mapping[Any, Float[Any, "passed_blocks classes"]],
    runs: Mapping[Any, Float[Any, "3 classes"]],
    full: Float[Any, "classes blocks"] | None,
    modes: Int[np.ndarray, "lanes 1"],
) -> Float[Any, "lanes classes"]:
    """Seconds of every class of passes; 0 for classes of other kinds.

    Args:
        phase_s: of every block, by variant of the passes; its array namespace is that of the result.
        weights, runs, full: see `PassClasses`; None where no block is recomputed in full against its lane's mode.
        modes: recompute of every lane, for all blocks but those of `full`.
    """
    out = None
    for variant, own in phase_s.items():
        of_variant = passed_s(own, modes).reshape(len(own), -1) @ weights[variant]
        out = of_variant if out is None else out + of_variant
        if full is not None:
            out = out + (full_recompute_s(own, modes) @ full.T) * runs[variant][Phase.BACKWARD_INPUT]
    return out


def pass_classes(
    structure: Structure,
    counts: Float[np.ndarray, "stages segments blocks"],
    full: Float[np.ndarray, "stages segments blocks"],
) -> PassClasses:
    """Deal the blocks of stages and segments to the classes of a structure."""
    of_pass = np.isin(structure.class_kind, PASS_KINDS)
    of_variant = {
        (span, index, bool(paired)): {
            kind: np.flatnonzero((structure.class_kind == kind) & (structure.class_variant == variant))
            for kind in PASS_KINDS
        }
        for variant, (span, index, paired) in enumerate(structure.variants.tolist())
        if (of_pass & (structure.class_variant == variant)).any()
    }
    stage, segment = structure.class_stage, structure.class_segment
    blocks, again = (in_classes(stage, segment, held) * of_pass[:, None] for held in (counts, full))
    return PassClasses(blocks=blocks, full=again, of_variant=of_variant)


def in_classes(
    stage: Int[np.ndarray, " classes"], segment: Int[np.ndarray, " classes"], held: Float[Any, "stages segments *some"]
) -> Float[Any, "classes *some"]:
    """What the part of the model holds that each class is of: a segment, or a whole stage (`WHOLE`)."""
    xp = held.__array_namespace__()
    whole = (segment == WHOLE).reshape(-1, *[1] * (held.ndim - 2))
    return xp.where(whole, held.sum(axis=1)[stage], held[stage, segment])


@dataclass(frozen=True, eq=False)
class EventClasses:
    """The classes that hold events between blocks, as a sparse (class, event) incidence."""

    ops: tuple[Op, ...]
    times: EventTimes
    class_index: Int[np.ndarray, " entries"]
    op_index: Int[np.ndarray, " entries"]
    n_classes: int

    @cached_property
    def durations_s(self) -> Float[np.ndarray, " classes"]:
        """Seconds of each class; 0 where it holds no such event."""
        return summed(self.class_index, self.times.time_s[self.op_index], self.n_classes)

    def occurrences(self, gradient: Float[np.ndarray, " classes"]) -> Float[np.ndarray, " ops"]:
        """How often each event occurs, given how often each class does."""
        return np.bincount(self.op_index, gradient[self.class_index], minlength=len(self.ops)).astype(float)


def event_entries(
    structure: Structure, events: CommunicationEvents
) -> tuple[Int[np.ndarray, " entries"], Int[np.ndarray, " entries"]]:
    """The (class, event) pairs, one for each time that it occurs; an event of a segment is also part of the whole
    stage."""
    classes, numbers = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
    for table in events.tables:
        of_kind = np.flatnonzero((structure.class_kind == table.kind) & (structure.class_span == table.span))
        stage, segment = structure.class_stage[of_kind], structure.class_segment[of_kind]
        whole = segment == WHOLE
        part, often = (of[stage[~whole], segment[~whole]] for of in (table.index, table.times))
        parts, often_parts = (of[stage[whole]] for of in (table.index, table.times))
        times = np.concatenate([often, often_parts.reshape(-1)])
        held = np.concatenate([of_kind[~whole], np.repeat(of_kind[whole], parts.shape[1])])
        classes.append(np.repeat(held, times))
        numbers.append(np.repeat(np.concatenate([part, parts.reshape(-1)]), times))
    class_index, op_index = np.concatenate(classes), np.concatenate(numbers)
    real = op_index != NO_EVENT
    return class_index[real], op_index[real]


def summed(index: Int[Any, " entries"], values: Float[Any, "*lanes entries"], n: int) -> Float[Any, "*lanes {n}"]:
    """Sums of the values of equal index."""
    xp, shape = values.__array_namespace__(), (*values.shape[:-1], n)
    if xp is not np:
        return xp.zeros(shape, values.dtype).at[..., index].add(values)
    of_lane = np.arange(prod(shape[:-1]))[:, None] * n + index  # `add.at` takes thrice the time
    sums = np.bincount(of_lane.ravel(), values.ravel(), prod(shape))
    return sums.reshape(shape).astype(values.dtype, copy=False)  # of nothing they would be integers
