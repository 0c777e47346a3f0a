"""Phases of a block, the passes over them, and recomputation.

A block (embedding, layer, head) has five phases. A pass of the schedule runs through some of them
in every block of its stage. Each of these facts is stated here and nowhere else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.display import shorten_reprs
from perfmodel.program import WHOLE, Kind


class Phase(IntEnum):
    """Phases of a block in one micro-batch."""

    FORWARD = 0
    BACKWARD_INPUT = 1
    BACKWARD_WEIGHT = 2
    RECOMPUTE_SELECTIVE = 3
    RECOMPUTE_FULL = 4


N_PHASES: Final = len(Phase)
PHASES: Final = {
    Kind.FORWARD: [Phase.FORWARD],
    Kind.BACKWARD: [Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT],
    Kind.BACKWARD_INPUT: [Phase.BACKWARD_INPUT],
    Kind.BACKWARD_WEIGHT: [Phase.BACKWARD_WEIGHT],
}
"""Phases of a block that each kind of pass runs through; input gradients may first recompute the
forward."""
PASS_KINDS: Final = tuple(PHASES)
PASSED: Final = [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT]
"""Phases that every micro-batch runs through once."""


class Variant(NamedTuple):
    """The work of a block's passes; passes of one variant take the same time (a row of
    `Structure.variants`)."""

    span: int = 1
    """Micro-batches in one go."""
    slice: int = 0
    """Which slice of the sequence the pass computes."""
    beside: int = 0
    """Overlap with another pass: none (0), `PAIRED` or `COMBINED`."""


PLAIN: Final = Variant()
"""Passes of one micro-batch and the whole sequence, without overlap with another pass."""
RECOMPUTE_MODES: Final = ("none", "selective", "full")
"""Values of `Layout.recompute`; arrays of modes hold places in this tuple."""

# Recomputed activations are needed by the gradients of the inputs, which a block computes first. So
# all of the forward work that is repeated is counted with that phase, also where weight gradients
# are a pass of their own.
_AGAIN: Final = np.zeros((len(RECOMPUTE_MODES), N_PHASES))
"""Phases that an input gradient repeats in addition to its own, under each mode."""
_AGAIN[1, Phase.RECOMPUTE_SELECTIVE] = _AGAIN[2, Phase.RECOMPUTE_FULL] = 1
_AGAIN.setflags(write=False)
_IN_PASSES: Final = np.repeat(np.eye(N_PHASES)[None, PASSED], len(RECOMPUTE_MODES), axis=0)
_IN_PASSES[:, PASSED.index(Phase.BACKWARD_INPUT)] += _AGAIN
"""Number of times that a micro-batch runs each phase for each of `PASSED`, by mode."""
_IN_PASSES.setflags(write=False)


def modes_of(recomputes: Sequence[str]) -> Int[np.ndarray, " choices"]:
    """Return the index in `RECOMPUTE_MODES` of values of `Layout.recompute`."""
    return np.array([RECOMPUTE_MODES.index(recompute) for recompute in recomputes])


def recompute_s(
    phase_s: Float[np.ndarray, "*some phases"], modes: Int[np.ndarray, "*#some"]
) -> Float[np.ndarray, "*some"]:
    """Seconds of forward work repeated in the backward pass.

    Args:
        phase_s: seconds of every phase.
        modes: recompute modes, which broadcast against all axes of `phase_s` but the last.
    """
    return phase_s.__array_namespace__().vecdot(phase_s, _AGAIN[modes])


def passed_s(
    phase_s: Float[Any, "lanes blocks phases"], modes: Int[np.ndarray, "lanes 1"]
) -> Float[Any, "lanes passed blocks"]:
    """Seconds of the phases `PASSED` in each block; an input gradient includes the recompute before
    it."""
    return phase_s.__array_namespace__().matmul(_IN_PASSES[modes[:, 0]], phase_s.mT)


def full_recompute_s(
    phase_s: Float[np.ndarray, "*some phases"], modes: Int[np.ndarray, "*#some"]
) -> Float[np.ndarray, "*some"]:
    """Return the additional seconds of a block that is recomputed in full, beyond those of the
    layout's own recompute mode."""
    return phase_s[..., Phase.RECOMPUTE_FULL] - recompute_s(phase_s, modes)


def phase_counts(
    kind: Kind,
    recompute: str,
    blocks: Float[np.ndarray, "*some blocks"],
    full: Float[np.ndarray, "*some blocks"],
) -> Float[np.ndarray, "*some blocks phases"]:
    """Number of times that passes of `kind` run each phase of their blocks, `full` of which are
    recomputed in full."""
    counts = np.zeros((*blocks.shape, N_PHASES))
    counts[..., PHASES[kind]] = blocks[..., None]

    # Blocks that are recomputed in full against the layout's mode repeat nothing else: the mode
    # holds for the rest.
    if Phase.BACKWARD_INPUT in PHASES[kind]:
        counts += (blocks - full)[..., None] * _AGAIN[RECOMPUTE_MODES.index(recompute)]
        counts[..., Phase.RECOMPUTE_FULL] += full
    return counts


@dataclass(frozen=True, eq=False)
class PassClasses:
    """The classes of a program that are passes through blocks, and the blocks of each."""

    blocks: Float[np.ndarray, "classes blocks"]
    """Blocks in the part of the model that a class passes; zero for classes that are not passes."""
    full: Float[np.ndarray, "classes blocks"]
    """Number of these blocks that are recomputed in full, even if the layout recomputes the others
    differently."""
    of_variant: dict[Variant, dict[Kind, Int[np.ndarray, " some"]]]
    """Classes of each kind of pass in each variant that occurs."""

    @cached_property
    def runs(self) -> dict[Variant, Float[np.ndarray, "3 classes"]]:
        """For each variant, whether each class runs forward, input gradient and weight gradient of
        its blocks."""
        runs_of_variant = {}
        for variant, of_kind in self.of_variant.items():
            runs_of_variant[variant] = np.zeros((len(PASSED), len(self.blocks)))
            for kind, classes in of_kind.items():
                runs_of_variant[variant][np.array(PHASES[kind])[:, None], classes] = 1.0
        return runs_of_variant

    @cached_property
    def weights(self) -> dict[Variant, Float[np.ndarray, "passed_blocks classes"]]:
        """Number of times that each class runs each phase of every block (`block_passes`), by
        variant."""
        return {variant: block_passes(runs, self.blocks) for variant, runs in self.runs.items()}

    @cached_property
    def distinct(self) -> "DistinctPasses":
        """Classes that run differently, of which there are far fewer than stages and segments."""
        # A column holds everything that the seconds of a class depend on.
        columns = np.concatenate([*self.weights.values(), *self.runs.values(), self.full.T])

        # Sorting whole columns takes long: equal ones are found by their bytes before.
        number: dict[bytes, int] = {}
        number_of_class = [
            number.setdefault(row.tobytes(), len(number)) for row in np.ascontiguousarray(columns.T)
        ]
        first_class = np.unique(number_of_class, return_index=True)[1]
        _, first, place = np.unique(
            columns[:, first_class], axis=1, return_index=True, return_inverse=True
        )
        first, place = first_class[first], place[number_of_class]
        weights = {
            variant: np.ascontiguousarray(values[:, first])
            for variant, values in self.weights.items()
        }
        runs = {
            variant: np.ascontiguousarray(values[:, first]) for variant, values in self.runs.items()
        }
        full = self.full[first] if self.full.any() else None
        return DistinctPasses(weights, runs, full, place)


class DistinctPasses(NamedTuple):
    """Classes of passes without duplicates: no two run through the same blocks equally often."""

    weights: dict[Variant, Float[np.ndarray, "passed_blocks distinct"]]
    """How often a pass runs each phase of every block, as in `PassClasses.weights`."""
    runs: dict[Variant, Float[np.ndarray, "3 distinct"]]
    """Whether a pass runs each direction of its blocks, as in `PassClasses.runs`."""
    full: Float[np.ndarray, "distinct blocks"] | None
    """See `PassClasses.full`; None where no block is recomputed in full against the mode."""
    place: Int[np.ndarray, " classes"]
    """Index of every class of the program among the distinct ones."""


def block_passes(
    runs: Float[Any, "3 classes"], blocks: Float[Any, "classes blocks"]
) -> Float[Any, "passed_blocks classes"]:
    """Number of times that each class runs the phases `PASSED` of every block, phase by phase."""
    return (runs[:, None, :] * blocks.T).reshape(-1, len(blocks))


def passes_s(
    phase_s: Mapping[Any, Float[Any, "lanes blocks phases"]],
    weights: Mapping[Any, Float[Any, "passed_blocks classes"]],
    runs: Mapping[Any, Float[Any, "3 classes"]],
    full: Float[Any, "classes blocks"] | None,
    modes: Int[np.ndarray, "lanes 1"],
) -> Float[Any, "lanes classes"]:
    """Seconds of every class of passes; 0 for classes that are not passes.

    Args:
        phase_s: seconds of every block's phases, by variant of the passes; its array namespace is
            that of the result.
        weights, runs, full: see `PassClasses`; None where no block is recomputed in full against
            its lane's mode.
        modes: recompute of every lane, for all blocks but those of `full`.
    """
    durations_s = None
    # Each class is of one variant and weighs nothing in the others, so that their products add up.
    for variant, seconds in phase_s.items():
        of_variant = passed_s(seconds, modes).reshape(len(seconds), -1) @ weights[variant]
        durations_s = of_variant if durations_s is None else durations_s + of_variant
        if full is not None:
            durations_s = (
                durations_s
                + (full_recompute_s(seconds, modes) @ full.T) * runs[variant][Phase.BACKWARD_INPUT]
            )
    return durations_s


def in_classes(
    stage: Int[np.ndarray, " classes"],
    segment: Int[np.ndarray, " classes"],
    amounts: Float[Any, "stages segments *some"],
) -> Float[Any, "classes *some"]:
    """Amount in each class's part of the model: one segment, or all segments of a stage
    (`WHOLE`)."""
    xp = amounts.__array_namespace__()
    is_whole_stage = (segment == WHOLE).reshape(-1, *[1] * (amounts.ndim - 2))
    return xp.where(is_whole_stage, amounts.sum(axis=1)[stage], amounts[stage, segment])


shorten_reprs(__name__)
