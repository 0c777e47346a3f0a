"""The end of a step: remaining reductions, gradient norm, optimizer, gathering of new weights."""

import numpy as np

from perfmodel.program._reductions import reduced_after
from perfmodel.program._spec import ProgramSpec
from perfmodel.program._structure import Kind, Stream
from perfmodel.program._structure_builder import StructureBuilder
from perfmodel.schedule import Schedule

_AWAITED = [Stream.COMPUTE, Stream.DATA_COMM]
"""Streams whose work the end of the step waits for; what SEND carries, a receiver waits for."""


def add_step_end(builder: StructureBuilder, spec: ProgramSpec, schedule: Schedule) -> None:
    """Add everything after the passes; the builder must be sorted."""
    if spec.is_forward_only or schedule.forward_only or schedule.updates.any():
        return
    _add_final_reductions(builder, spec, schedule)
    _add_embedding_reduce(builder, spec, schedule)
    if spec.optimizer:
        _add_optimizers(builder, spec, schedule)
    if spec.param_gather == "step":
        _add_final_gathers(builder, schedule)


def _add_final_reductions(builder: StructureBuilder, spec: ProgramSpec, schedule: Schedule) -> None:
    if spec.grad_reduce not in ("end", "eager_opt") or spec.reduce_every_micro_batch:
        return
    early = np.zeros(schedule.n_stages, bool)
    early[schedule.instruction_stage[reduced_after(spec, schedule)]] = True
    compute = builder.last_on_streams()[:, Stream.COMPUTE]
    for chunk in reversed(range(schedule.chunks)):
        devices = np.flatnonzero(~early[schedule.stage[:, chunk]])
        stage = schedule.stage[devices, chunk]
        reductions = builder.add(Kind.GRAD_REDUCE, devices, Stream.DATA_COMM, stage)
        # all devices that hold the stage have to be ready: this one, and those of its replicas
        reduction, holder = np.nonzero((schedule.stage[None] == stage[:, None, None]).any(axis=2))
        builder.connect(compute[holder], reductions[reduction])


def _add_embedding_reduce(builder: StructureBuilder, spec: ProgramSpec, schedule: Schedule) -> None:
    """The first and last stage's devices meet: each side starts when both are ready."""
    if not spec.tied_embedding:
        return
    ends = np.array([0, schedule.n_stages - 1])
    devices = np.array([np.argwhere(schedule.stage == stage)[0][0] for stage in ends])
    if devices[0] == devices[1]:
        return
    ready = builder.last_on_streams()[devices][:, _AWAITED].ravel()
    reductions = builder.add(Kind.EMBEDDING_REDUCE, devices, Stream.DATA_COMM, ends)
    builder.connect(np.repeat(ready, 2), np.tile(reductions, len(ready)))


def _add_optimizers(builder: StructureBuilder, spec: ProgramSpec, schedule: Schedule) -> None:
    """One optimizer op per device; its class belongs to the stage of the device's chunk 0."""
    ready = builder.last_on_streams()[:, _AWAITED]
    devices = np.arange(schedule.devices)
    if spec.grad_norm_barrier and schedule.devices > 1:
        barrier = builder.add_join()
        builder.connect(ready.ravel(), barrier)
        optimizers = builder.add(Kind.OPTIMIZER, devices, Stream.COMPUTE, schedule.stage[:, 0])
        builder.connect(barrier, optimizers)
    else:
        optimizers = builder.add(Kind.OPTIMIZER, devices, Stream.COMPUTE, schedule.stage[:, 0])
        builder.connect(ready[:, 1], optimizers)


def _add_final_gathers(builder: StructureBuilder, schedule: Schedule) -> None:
    updated = builder.last_on_streams()[:, Stream.COMPUTE]
    for chunk in range(schedule.chunks):
        gathers = builder.add(
            Kind.PARAM_GATHER, np.arange(schedule.devices), Stream.DATA_COMM, schedule.stage[:, chunk]
        )
        if chunk == 0:
            builder.connect(updated, gathers)
