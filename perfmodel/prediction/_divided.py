"""Programs whose stages and segments hold the blocks of a model: what all layouts that share one have in common."""

from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int

from perfmodel.prediction._phases import PassClasses, pass_classes
from perfmodel.prediction._problem import Setting, kept, store_of
from perfmodel.prediction._programs import prepared
from perfmodel.prediction._stages import fully_recomputed, stage_blocks
from perfmodel.prediction._step_costs import Beside, beside_passes
from perfmodel.program import ProgramSpec, Structure
from perfmodel.spec import PerStage


class Division(NamedTuple):
    """How a model is divided among stages."""

    kinds: tuple[tuple[bool, int], ...]
    """Of its blocks (`ShardBlocks.kinds`)."""
    partition: PerStage
    full_layers: PerStage
    """See `Layout.recompute_full_layers`."""
    segments: tuple[tuple[int, ...], ...] | None = None
    """Layers of every segment of every stage; None: as even as can be."""


@dataclass(frozen=True, eq=False)
class DividedProgram:
    """A program and a division of the model among its stages; one object in a session for all that are equal
    (`divided`)."""

    setting: Setting
    spec: ProgramSpec
    division: Division
    counts: Float[np.ndarray, "stages segments blocks"]
    """Blocks of every segment of every stage."""
    full: Float[np.ndarray, "stages segments blocks"]
    """Those of them that are recomputed in full whatever a layout says of the others."""

    @property
    def structure(self) -> Structure:
        """Of the program, whatever the division."""
        return prepared(self.spec).structure

    @cached_property
    def passes(self) -> PassClasses:
        """Blocks of each class."""
        return pass_classes(self.structure, self.counts, self.full)

    @cached_property
    def beside(self) -> Beside:
        """What runs beside what."""
        return beside_passes(self.spec, self.structure)

    @cached_property
    def optimizer(self) -> Int[np.ndarray, " some"]:
        """Classes of the optimizer's steps."""
        return prepared(self.spec).optimizer

    @cached_property
    def alike(self) -> "DividedProgram":
        """One program for all that differ in the number of micro-batches alone and have the same classes, which run
        beside the same ones: durations of a layout's classes are the same in each."""
        structure = self.structure
        stated = structure.class_kind, structure.class_stage, structure.class_segment, structure.class_variant
        arrays = (*stated, structure.variants, *self.beside)
        key = replace(self.spec, micro_batches=1), self.division, *(one.tobytes() for one in arrays)
        return store_of(self.setting).once((DividedProgram, key), lambda: self)

    @cached_property
    def between(self) -> "DividedProgram":
        """The same for events between blocks, which no recompute changes."""
        return divided(self.setting, self.spec, self.division._replace(full_layers=None))

    def with_spec(self, spec: ProgramSpec) -> "DividedProgram":
        """Another program of the same division."""
        return divided(self.setting, spec, self.division)

    def with_segments(self, layers: tuple[tuple[int, ...], ...]) -> "DividedProgram":
        """The same with other numbers of layers in every segment of every stage, none of them recomputed in full."""
        spec = replace(self.spec, segments=len(layers[0]))
        return divided(self.setting, spec, self.division._replace(full_layers=None, segments=layers))


@kept
def divided(setting: Setting, spec: ProgramSpec, division: Division) -> DividedProgram:
    """A program and how its stages divide the model.

    Raises:
        LayoutError: the stages cannot hold the layers so.
    """
    kinds, partition, full_layers, segments = division
    counts = stage_blocks(kinds, spec.n_stages, spec.segments, partition, segments)
    full = fully_recomputed(counts, np.array([is_layer for is_layer, _ in kinds]), full_layers)
    return DividedProgram(setting, spec, division, counts, full)
