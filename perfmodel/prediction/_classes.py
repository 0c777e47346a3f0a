"""What the duration classes of a program hold: blocks of the model, or events between them."""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from perfmodel.cost import EventTimes
from perfmodel.ops import Op
from perfmodel.prediction._communication import CommunicationEvents
from perfmodel.prediction._phases import PASS_KINDS, PHASES
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
    def weights(self) -> dict[Variant, Float[np.ndarray, "3*blocks classes"]]:
        """For each variant, how often each class runs forward, input gradient and weight gradient of each block."""
        found = {}
        for variant, of_kind in self.of_variant.items():
            weights = np.zeros((3, self.blocks.shape[1], len(self.blocks)))
            for kind, where in of_kind.items():
                for phase in PHASES[kind]:
                    weights[phase][:, where] = self.blocks[where].T
            found[variant] = weights.reshape(-1, len(self.blocks))
        return found


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
    stage, segment = structure.class_stage[of_pass], structure.class_segment[of_pass]
    dealt = np.zeros((2, structure.n_classes, counts.shape[2]))
    for out, held in zip(dealt, (counts, full), strict=True):
        out[of_pass] = np.where((segment == WHOLE)[:, None], held.sum(axis=1)[stage], held[stage, segment])
    return PassClasses(blocks=dealt[0], full=dealt[1], of_variant=of_variant)


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
        # without entries bincount counts, in integers
        return np.bincount(self.class_index, self.times.time_s[self.op_index], minlength=self.n_classes).astype(float)

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
