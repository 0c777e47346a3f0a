"""What the duration classes of a program hold: blocks of the model, or events between them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from jaxtyping import Float, Int

from perfmodel.cost import EventTimes
from perfmodel.prediction._communication import ClassEvent
from perfmodel.prediction._variants import Variant
from perfmodel.program import WHOLE, Kind, Structure
from perfmodel.spec import Op

PASS_KINDS = (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


@dataclass(frozen=True, eq=False)
class PassClasses:
    """The classes that run through blocks."""

    blocks: Float[np.ndarray, "classes blocks"]
    """Blocks in the part of the model that a class passes; zero for classes of other kinds."""
    of_variant: dict[Variant, dict[Kind, Int[np.ndarray, " some"]]]
    """Classes of each kind of pass in each variant that occurs."""


def pass_classes(structure: Structure, counts: Float[np.ndarray, "stages segments blocks"]) -> PassClasses:
    """Deal the blocks of stages and segments to the classes of a structure."""
    blocks = np.zeros((structure.n_classes, counts.shape[2]))
    of_pass = np.isin(structure.class_kind, PASS_KINDS)
    of_variant = {
        (span, index, bool(paired)): {
            kind: np.flatnonzero((structure.class_kind == kind) & (structure.class_variant == variant))
            for kind in PASS_KINDS
        }
        for variant, (span, index, paired) in enumerate(structure.variants.tolist())
        if (of_pass & (structure.class_variant == variant)).any()
    }
    whole = counts.sum(axis=1)
    stage, segment = structure.class_stage[of_pass], structure.class_segment[of_pass]
    blocks[of_pass] = np.where((segment == WHOLE)[:, None], whole[stage], counts[stage, segment])
    return PassClasses(blocks, of_variant)


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
    structure: Structure, events: Sequence[ClassEvent]
) -> tuple[tuple[Op, ...], Int[np.ndarray, " entries"], Int[np.ndarray, " entries"]]:
    """Distinct events, and the (class, event) pairs; an event of a segment is also part of the whole stage."""
    columns = (structure.class_kind, structure.class_stage, structure.class_segment, structure.class_span)
    classes = {key: i for i, key in enumerate(zip(*(c.tolist() for c in columns), strict=True))}
    index: dict[Op, int] = {}
    pairs = [
        (at, index.setdefault(op, len(index)))
        for kind, (stage, segment, span), op in events
        for part in (segment, WHOLE)
        if (at := classes.get((int(kind), stage, part, span))) is not None
    ]
    table = np.array(pairs, np.int64).reshape(-1, 2)
    return tuple(index), table[:, 0], table[:, 1]
