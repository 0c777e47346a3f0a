"""Builds the dependency structure of events from schedules and communication.

- `_spec` says all that the structure of a step follows from, and `_structure` is the result: ops,
  their predecessors and the classes of their durations, without any times.
- `_passes` adds the passes of the schedule to a table of ops and edges (`_structure`),
  `_communication` what runs beside them, the optimizer and what comes around it.
- `_stage_blocks` divides the blocks of a model among the stages.
- `_build` calls these, puts the ops in program order and joins their predecessors two by two.
"""

from perfmodel.display import shorten_reprs
from perfmodel.program._build import binary_joins, build
from perfmodel.program._passes import Variants, variants_of
from perfmodel.program._spec import GradReduce, ParamGather, ProgramSpec, Sends
from perfmodel.program._stage_blocks import (
    BlocksByLayer,
    by_layer,
    fully_recomputed,
    segment_sizes,
    stage_blocks,
)
from perfmodel.program._structure import (
    COMBINED,
    N_STREAMS,
    PAIRED,
    WHOLE,
    Edges,
    Kind,
    Stream,
    Structure,
    is_of_kind,
)

shorten_reprs(__name__)
