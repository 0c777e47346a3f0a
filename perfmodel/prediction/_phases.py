"""Phases of a block, the passes that run through them, and what recompute changes: the one statement of each."""

from collections.abc import Sequence
from enum import IntEnum
from typing import Any, Final

import numpy as np
from jaxtyping import Bool, Float, Int

from perfmodel.errors import LayoutError, Reason
from perfmodel.program import Kind
from perfmodel.spec import PerStage


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


def leading_layers(
    counts: Float[Any, "stages *segments blocks"],
    layers: Bool[Any, " blocks"],
    per_stage: Int[Any, "#stages"] | Float[Any, "#stages"],
) -> Float[Any, "stages *segments blocks"]:
    """The first layers of every stage, so many of each; `layers` marks the blocks that are layers."""
    xp = counts.__array_namespace__()
    in_order = xp.where(layers, counts, 0.0).reshape(len(counts), -1)
    before = xp.cumsum(in_order, axis=1) - in_order
    return xp.clip(per_stage[:, None] - before, 0.0, in_order).reshape(counts.shape)


def fully_recomputed(
    counts: Float[np.ndarray, "stages *segments blocks"], layers: Bool[np.ndarray, " blocks"], per_stage: PerStage
) -> Float[np.ndarray, "stages *segments blocks"]:
    """How many of each block every segment of every stage recomputes in full: the first layers of the stage.

    Raises:
        LayoutError: not a number per stage (nor one for all), or more layers than a stage has.
    """
    if per_stage is None:
        return np.zeros_like(counts)
    held = counts[..., layers].reshape(len(counts), -1).sum(axis=1)
    if len(per_stage) > 1 and (len(per_stage) != len(counts) or (np.array(per_stage) > held).any()):
        raise LayoutError(
            f"recompute_full_layers={'-'.join(map(str, per_stage))} must name at most the layers of each of "
            f"{len(counts)} stages, {'-'.join(f'{n:.0f}' for n in held)}",
            Reason.PER_STAGE, "recompute_full_layers",
        )  # fmt: skip
    return leading_layers(counts, layers, np.array(per_stage))
