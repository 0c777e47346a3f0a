"""Spec to structure, in vectorised NumPy: cost is linear in the number of ops, without a loop over them."""

from perfmodel.program._assemble import assemble
from perfmodel.program._communication import (
    add_layer_gathers,
    add_offloads,
    add_reductions,
    add_step_gathers,
    add_transfers,
)
from perfmodel.program._passes import add_passes, variants_of
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Structure
from perfmodel.program._structure_builder import ProgramOrder, StructureBuilder
from perfmodel.program._updates import add_step_end, add_updates
from perfmodel.schedule import Schedule, require_valid


def build(spec: ProgramSpec, schedule: Schedule | None = None) -> Structure:
    """The structure of one step.

    Classes are one per (kind, variant, global stage, segment) that occurs. A class of segment 0..S-1 covers that
    layer group of the stage; where a structure has split ops beside whole ones, whole ones have segment
    `WHOLE` (-1). With one segment all are 0. Transfers are classed by the sending stage, the optimizer
    by the stage of its device's chunk 0 (the op updates all chunks).

    Args:
        spec: what the step consists of.
        schedule: an order of one's own in place of the one that `spec.schedule` names.

    Raises:
        PerfModelError: the schedule lacks or repeats work, or deadlocks.
    """
    schedule = spec.build_schedule() if schedule is None else schedule
    require_valid(schedule)
    variants = variants_of(schedule, spec.combines_passes)
    builder = StructureBuilder(schedule.devices, schedule.n_stages, spec.segments, variants.table)
    most = schedule.chunks * spec.segments if schedule.updates.any() else 0  # gathers of a step
    order = ProgramOrder(schedule.devices, spec.segments, lead_in=max(most, spec.gathers_ahead))
    passes = add_passes(builder, spec, schedule, variants, order)
    arrivals = add_transfers(builder, spec, passes, order)
    add_offloads(builder, spec, passes, order)
    add_reductions(builder, spec, passes, order)
    optimizers = add_updates(builder, spec, passes, order)
    add_layer_gathers(builder, spec, passes, order, optimizers, arrivals)
    add_step_gathers(builder, spec, passes, order)
    builder.sort()
    add_step_end(builder, spec, schedule)
    return assemble(builder)
