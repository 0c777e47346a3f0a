"""Durations of a program's classes, from the times of their blocks and events."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float

from perfmodel.prediction._compose import (
    LayoutBatch,
    layout_batches,
    pass_s,
    phase_s,
    weighted_programs,
)
from perfmodel.prediction._node_kinds import NodeKindShare, by_node_kind
from perfmodel.prediction._problem import StepProblem
from perfmodel.prediction._programs import TimedProgram, prepared
from perfmodel.prediction._step_costs import has_whole_step_costs, overlap_loss, with_step_costs
from perfmodel.prediction.host import host_bandwidth
from perfmodel.prediction.overlap import collective_sm_share
from perfmodel.prediction.phases import full_recompute_s, passes_s
from perfmodel.program import Kind, is_of_kind
from perfmodel.schedule import PassTimes
from perfmodel.spec import Layout


class StepProgram(NamedTuple):
    """A program that makes up all or a part of one layout's step."""

    timed: TimedProgram
    """The program together with the durations of its instructions."""
    shares: list[NodeKindShare]
    """Its parts by kind of nodes."""


def programs_of_step(problem: StepProblem, batch: LayoutBatch) -> list[StepProgram]:
    """Programs whose weighted makespans add up to the step of a batch's first layout."""
    programs = []
    for program_batch, weight in weighted_programs(batch):
        shares = by_node_kind(problem, program_batch)
        timed = TimedProgram(prepared(program_batch.spec), _over_kinds(shares)[0], weight)
        programs.append(StepProgram(timed, shares))
    return programs


def durations(problem: StepProblem, batch: LayoutBatch) -> Float[np.ndarray, "lanes classes"]:
    """Seconds of each class of the batch's program, one row per layout."""
    return _over_kinds(by_node_kind(problem, batch))


def _over_kinds(shares: Sequence[NodeKindShare]) -> Float[np.ndarray, "lanes classes"]:
    """Seconds of each class, added up over the kinds of nodes that run it."""
    first, *rest = shares
    seconds = _on_kind(first)
    for share in rest:
        seconds = seconds + _on_kind(share)
    return seconds


def _on_kind(share: NodeKindShare) -> Float[np.ndarray, "lanes classes"]:
    """Seconds of the classes on one kind of nodes, 0 for those on others."""
    problem = share.problem
    batch = share.batch
    program = share.batch.program
    between_blocks_s = np.stack([events.durations_s for events in share.events])

    # Passes that are alike are computed once.
    passes = program.passes.distinct
    by_phase = {variant: phase_s(problem, batch, variant) for variant in passes.runs}
    distinct_s = passes_s(by_phase, passes.weights, passes.runs, passes.full, batch.modes)

    # Passes are priced for all classes; events between blocks are already those of this kind of
    # nodes alone.
    nodes_are_alike = share.on is None
    seconds = between_blocks_s if nodes_are_alike else np.zeros_like(between_blocks_s)
    seconds = seconds + distinct_s.take(passes.place, axis=1)

    # The host: copies of activations, waits for those of single layers, states that lie in its
    # memory.
    if batch.spec.offload:
        _add_host_copies(problem, batch, seconds)
    seconds = seconds + share.copy_waits_s
    seconds = seconds + share.host_state_s
    if not nodes_are_alike:
        seconds = between_blocks_s + seconds * share.on

    # Costs of real steps beyond their events: overlapped communication slows passes, stragglers
    # stretch everything, and the overhead of the step is added to the optimizer's step.
    loses_overlap = problem.adjusted_framework.communication.dp_overlap_loss > 0
    contends = collective_sm_share(problem.cluster.device, problem.framework) > 0
    if not (loses_overlap or contends or has_whole_step_costs(problem)):
        return seconds
    scale = np.array([terms.factor for terms in batch.composed])[:, None]
    optimizer = prepared(batch.spec).optimizer
    if share.on is not None:
        optimizer = optimizer[share.on[optimizer]]
    overhead_s = problem.adjusted_framework.host.step_overhead_s
    return with_step_costs(
        seconds, overhead_s, overlap_loss(problem), scale, optimizer, program.overlap
    )


def _add_host_copies(
    problem: StepProblem, batch: LayoutBatch, seconds: Float[np.ndarray, "lanes classes"]
) -> None:
    """Set the seconds of copies of a stage's activations to and from host memory, at the link's
    nominal rate."""
    structure = prepared(batch.spec).structure
    copies = np.flatnonzero(is_of_kind(structure.class_kind, (Kind.OFFLOAD, Kind.RELOAD)))
    micro_batch_bytes = (
        batch.saved_bytes[:, structure.class_stage[copies]] / batch.spec.scheduler.slices
    )
    copied_bytes = micro_batch_bytes * structure.class_span[copies]
    seconds[:, copies] = copied_bytes / host_bandwidth(problem.cluster.device)


def pass_times(problem: StepProblem, layout: Layout) -> PassTimes:
    """Seconds of each stage's passes and of the longest transfer, with one stage per device, as
    input of a scheduler."""
    # A schedule that splits backward has all three kinds of passes.
    (batch,) = layout_batches(problem, [layout.replace(schedule="zb-h1", vpp=1)])
    structure = prepared(batch.spec).structure
    durations_s = durations(problem, batch)[0]
    counts = batch.program.counts.sum(axis=1)
    block_s = pass_s(problem, batch)
    forward_s = (block_s[Kind.FORWARD] @ counts.T)[0]
    backward_input_s = (block_s[Kind.BACKWARD_INPUT] @ counts.T)[0]
    backward_weight_s = (block_s[Kind.BACKWARD_WEIGHT] @ counts.T)[0]
    recomputed_s = full_recompute_s(phase_s(problem, batch), batch.modes)
    backward_input_s = backward_input_s + (recomputed_s @ batch.program.full.sum(axis=1).T)[0]
    sends = is_of_kind(structure.class_kind, (Kind.SEND_FORWARD, Kind.SEND_BACKWARD))
    return PassTimes(
        forward_s, backward_input_s, backward_weight_s, float(durations_s[sends].max(initial=0.0))
    )
