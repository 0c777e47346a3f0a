"""Phases of a block, the passes that run through them, and what recompute changes: the one statement of each; and which
blocks the passes of a program run through."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any, Final, NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.program import WHOLE, Kind, Structure


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
"""Phases of a block that each kind of pass runs through; input gradients may first recompute the forward."""
PASS_KINDS: Final = tuple(PHASES)
PASSED: Final = [Phase.FORWARD, Phase.BACKWARD_INPUT, Phase.BACKWARD_WEIGHT]
"""Phases that every micro-batch runs through once."""
Variant = tuple[int, int, int]
"""Micro-batches in one go, slice of the sequence, beside what other pass (`Structure.variants`)."""
PLAIN: Final[Variant] = (1, 0, 0)
RECOMPUTE_MODES: Final = ("none", "selective", "full")
_AGAIN: Final = np.zeros((len(RECOMPUTE_MODES), N_PHASES))
"""Phases that an input gradient runs besides its own under each mode."""
_AGAIN[1, Phase.RECOMPUTE_SELECTIVE] = _AGAIN[2, Phase.RECOMPUTE_FULL] = 1
_AGAIN.setflags(write=False)
_IN_PASSES: Final = np.repeat(np.eye(N_PHASES)[None, PASSED], len(RECOMPUTE_MODES), axis=0)
_IN_PASSES[:, PASSED.index(Phase.BACKWARD_INPUT)] += _AGAIN
"""How often a micro-batch runs each phase on behalf of each of `PASSED`, by mode."""
_IN_PASSES.setflags(write=False)


def modes_of(recomputes: Sequence[str]) -> Int[np.ndarray, " choices"]:
    """Place of each of some `Layout.recompute` in `RECOMPUTE_MODES`."""
    return np.array([RECOMPUTE_MODES.index(recompute) for recompute in recomputes])


def recompute_s(
    phase_s: Float[np.ndarray, "*some phases"], modes: Int[np.ndarray, "*#some"]
) -> Float[np.ndarray, "*some"]:
    """Seconds of forward work repeated in backward; `modes` broadcasts against all axes of `phase_s` but the last."""
    return phase_s.__array_namespace__().vecdot(phase_s, _AGAIN[modes])


def passed_s(
    phase_s: Float[Any, "lanes blocks phases"], modes: Int[np.ndarray, "lanes 1"]
) -> Float[Any, "lanes passed blocks"]:
    """Seconds that the phases `PASSED` take in each block, with what the mode recomputes before an input gradient."""
    return phase_s.__array_namespace__().matmul(_IN_PASSES[modes[:, 0]], phase_s.mT)


def full_recompute_s(
    phase_s: Float[np.ndarray, "*some phases"], modes: Int[np.ndarray, "*#some"]
) -> Float[np.ndarray, "*some"]:
    """Seconds that a block recomputed in full takes beyond what its layout's mode recomputes anyway."""
    return phase_s[..., Phase.RECOMPUTE_FULL] - recompute_s(phase_s, modes)


def phase_counts(
    kind: Kind, recompute: str, blocks: Float[np.ndarray, "*some blocks"], full: Float[np.ndarray, "*some blocks"]
) -> Float[np.ndarray, "*some blocks phases"]:
    """How often passes of `kind` run through each phase of their blocks, `full` of which are recomputed in full."""
    counts = np.zeros((*blocks.shape, N_PHASES))
    counts[..., PHASES[kind]] = blocks[..., None]
    if Phase.BACKWARD_INPUT in PHASES[kind]:
        counts += (blocks - full)[..., None] * _AGAIN[RECOMPUTE_MODES.index(recompute)]
        counts[..., Phase.RECOMPUTE_FULL] += full
    return counts


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
    def distinct(self) -> "DistinctPasses":
        """Those that run differently, of which there are far fewer than stages and segments."""
        columns = np.concatenate([*self.weights.values(), *self.runs.values(), self.full.T])
        _, first, place = np.unique(columns, axis=1, return_index=True, return_inverse=True)
        weights, runs = (
            {variant: np.ascontiguousarray(values[:, first]) for variant, values in of.items()}
            for of in (self.weights, self.runs)
        )
        return DistinctPasses(weights, runs, self.full[first] if self.full.any() else None, place)


class DistinctPasses(NamedTuple):
    """Classes of which no two run through the same blocks alike, as `passes_s` takes them."""

    weights: dict[Variant, Float[np.ndarray, "passed_blocks distinct"]]
    runs: dict[Variant, Float[np.ndarray, "3 distinct"]]
    full: Float[np.ndarray, "distinct blocks"] | None
    """None where there is no such block."""
    place: Int[np.ndarray, " classes"]
    """Which of them each class is."""


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
        (span, index, beside): {
            kind: np.flatnonzero((structure.class_kind == kind) & (structure.class_variant == variant))
            for kind in PASS_KINDS
        }
        for variant, (span, index, beside) in enumerate(structure.variants.tolist())
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
